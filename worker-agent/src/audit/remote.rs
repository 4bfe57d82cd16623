//! Audits the engine's KV pages from the agent's process, so that the engine's Python isn't used.
//!
//! An audit finds out who uses each page of the engine's KV pool. Usually the *shim*, our code in
//! the engine's process, makes the audit there. That is slow if the engine's Python interpreter is
//! busy. Here, the agent maps the engine's request table (which lists the pages of each request) by
//! CUDA IPC and runs the kernels itself. The shim publishes a file with the *row table*, which says
//! which session each row of the request table belongs to.
//!
//! A remote audit sees only rows, not the free lists or the radix tree. It needs a CUDA context, so
//! the agent makes remote audits only if the settings ask for them. If a remote audit fails, the
//! agent's owner task asks the shim for an audit instead. Each rank has a thread, because CUDA's
//! calls block. The thread ends when the handle [`RemoteAuditor`] is dropped.

use std::{
    path::{Path, PathBuf},
    sync::mpsc,
};

/// The answer to a request for an audit.
#[derive(Debug)]
pub struct RemoteAnswer {
    /// The number that the requester gave to [`RemoteAuditor::request`].
    pub number: u64,
    /// The audit, or why there is none. After an error, the thread makes no further audit.
    pub result: Result<RemoteReport, String>,
}

/// A report about the request table's rows, with the keys of their sessions.
#[derive(Debug)]
pub struct RemoteReport {
    /// The report as `kernels` encodes it.
    pub report: Vec<u8>,
    /// For each session number in the report: [`session_table_key`] of the session's id inside the
    /// engine.
    pub session_keys: Vec<u64>,
}

/// Handle to the thread that makes the remote audits of one rank.
#[derive(Debug)]
pub struct RemoteAuditor {
    /// Sends the numbers of requests to the thread.
    requests: mpsc::SyncSender<u64>,
}

impl RemoteAuditor {
    /// Starts the thread of a rank. The shim publishes the rank's row table in a file whose name is
    /// `table_prefix` with the rank appended. The thread maps the engine's memory at the first
    /// request. The thread calls `on_answer` for each request that it carries out, and drops
    /// `on_answer` when it ends.
    ///
    /// # Errors
    /// When the thread can't be created.
    pub fn start(
        table_prefix: &Path,
        dp_rank: u32,
        on_answer: impl Fn(RemoteAnswer) + Send + 'static,
    ) -> std::io::Result<Self> {
        // One request may wait while another is carried out. `request` refuses any further
        // request, and the owner task sends that request to the shim.
        let (requests, request_numbers) = mpsc::sync_channel(1);
        let path = rank_table_path(table_prefix, dp_rank);
        let thread = std::thread::Builder::new().name("audit".into());
        thread.spawn(move || {
            let on_answer = on_answer;
            // Locals are dropped in reverse order. `request_numbers` must be dropped before
            // `on_answer`, so that no request can be sent any more once `on_answer` is gone.
            let request_numbers = request_numbers;
            run_thread(&path, &request_numbers, &on_answer);
        })?;
        Ok(Self { requests })
    }

    /// Requests an audit. Returns false if the thread has ended or its queue is full.
    #[must_use]
    pub fn request(&self, number: u64) -> bool {
        self.requests.try_send(number).is_ok()
    }
}

/// Returns the file of a rank's row table. The shim forms the name in the same way.
fn rank_table_path(table_prefix: &Path, dp_rank: u32) -> PathBuf {
    let mut name = table_prefix.as_os_str().to_owned();
    name.push(format!("-{dp_rank}"));
    name.into()
}

/// Returns a session's key in the row table: the first eight bytes of the SHA-256 of its id,
/// little-endian.
#[must_use]
pub fn session_table_key(incarnation: &str) -> u64 {
    use sha2::{Digest as _, Sha256};
    let digest = Sha256::digest(incarnation.as_bytes());
    u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"))
}

#[cfg(not(feature = "cuda"))]
fn run_thread(_: &Path, request_numbers: &mpsc::Receiver<u64>, on_answer: impl Fn(RemoteAnswer)) {
    if let Ok(number) = request_numbers.recv() {
        let reason = "this agent was built without CUDA (cargo build --features cuda)";
        on_answer(RemoteAnswer { number, result: Err(reason.into()) });
    }
}

#[cfg(feature = "cuda")]
fn run_thread(
    path: &Path,
    request_numbers: &mpsc::Receiver<u64>,
    on_answer: impl Fn(RemoteAnswer),
) {
    let Ok(mut number) = request_numbers.recv() else { return };
    let mut remote = match mapped::open(path) {
        Ok(remote) => remote,
        Err(reason) => return on_answer(RemoteAnswer { number, result: Err(reason) }),
    };
    loop {
        let result = mapped::audit(&mut remote);
        let has_failed = result.is_err();
        on_answer(RemoteAnswer { number, result });
        if has_failed {
            return;
        }
        let Ok(next_number) = request_numbers.recv() else { return };
        number = next_number;
    }
}

#[cfg(feature = "cuda")]
mod mapped {
    //! Opens the engine's tables and makes the audits: the part of this module that needs CUDA.

    use std::{path::Path, time::Duration};

    use kernels::{
        cuda::{self, Device},
        ipc::{Error, RemoteAuditor},
    };

    use super::RemoteReport;

    /// The maximum number of GPUs that are tried. No machine has more.
    const GPUS_MAX: u32 = 64;
    /// The pause between two polls. A copy takes some microseconds, and a step of the engine, for
    /// which the copy may wait, some milliseconds.
    const POLL_PAUSE: Duration = Duration::from_millis(2);
    /// The maximum number of polls. They take two seconds in all, which is longer than any decoding
    /// step.
    const POLLS_MAX: u32 = 1000;

    /// Opens the row table, and maps the request table on the GPU that holds it.
    pub(super) fn open(path: &Path) -> Result<RemoteAuditor, String> {
        if let Some(missing) = cuda::missing() {
            return Err(missing.to_string());
        }
        let kernels_path = std::env::var("BERTH_KV_FATBIN")
            .map_err(|_| "BERTH_KV_FATBIN is not set; set it to the kernels' file".to_owned())?;
        let image =
            std::fs::read(&kernels_path).map_err(|error| format!("{kernels_path}: {error}"))?;
        for ordinal in 0..GPUS_MAX {
            let device = Device::open(ordinal, &image).map_err(|error| error.to_string())?;
            match RemoteAuditor::open(path, device) {
                Err(Error::OtherGpu) => {}
                opened => return opened.map_err(|error| error.to_string()),
            }
        }
        Err(Error::OtherGpu.to_string())
    }

    /// Makes one audit.
    pub(super) fn audit(remote: &mut RemoteAuditor) -> Result<RemoteReport, String> {
        remote.begin().map_err(|error| error.to_string())?;
        for _ in 0..POLLS_MAX {
            match remote.poll() {
                Ok(Some(result)) => {
                    return Ok(RemoteReport {
                        report: result.report.encode(),
                        session_keys: result.keys,
                    });
                }
                Ok(None) => std::thread::sleep(POLL_PAUSE),
                Err(error) => return Err(error.to_string()),
            }
        }
        Err("no step of the engine ended in time".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_s_key_is_the_shim_s() {
        // int.from_bytes(hashlib.sha256(b"berth-a-1").digest()[:8], "little")
        assert_eq!(session_table_key("berth-a-1"), 8_365_165_709_124_144_987);
    }

    #[test]
    fn each_rank_has_a_table_of_its_own() {
        assert_eq!(rank_table_path(Path::new("/dev/shm/berth"), 3), Path::new("/dev/shm/berth-3"));
    }

    #[test]
    fn a_rank_that_can_t_be_mapped_says_why_once() {
        let (answers, answered) = mpsc::channel();
        let remote = RemoteAuditor::start(Path::new("/nowhere/berth"), 0, move |answer| {
            answers.send(answer).unwrap();
        });
        let remote = remote.unwrap();
        assert!(remote.request(7));
        let answer = answered.recv().unwrap();
        assert_eq!(answer.number, 7);
        assert!(answer.result.is_err(), "{answer:?}");
        assert!(answered.recv().is_err(), "its thread has ended");
        assert!(!remote.request(8));
    }
}
