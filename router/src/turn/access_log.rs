//! Writes one line of JSON for each request to the data port, if the settings name a file for it.
//!
//! An [`AccessEntry`] goes with the request and its answer; its last holder's drop hands the line
//! to a thread, so that no request waits for a disk. Lines that the thread can't write soon enough
//! are dropped and counted. A line has no prompt, answer or query string. Of a session it has the
//! digest, not the id.

use std::{
    fs::OpenOptions,
    io::{self, BufWriter, Write},
    net::IpAddr,
    path::Path,
    sync::mpsc::{self, Receiver, SyncSender, TryRecvError},
    time::{Duration, Instant},
};

use http::Method;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use serde::Serialize;
use service::{
    clock::{now, unix_ns, whole_millis},
    metrics::Registrar,
};
use tracing::warn;

use super::ended::TurnRecord;

/// The most lines that wait for the thread. A line takes up to a KiB. At 5,000 requests a second a
/// disk may hang for almost two seconds.
const LINES_MAX: usize = 8_192;

/// A reader of standard output that has stopped must not keep the router from ending.
const LAST_LINES_TIME_MAX: Duration = Duration::from_secs(2);

/// Clones write to the same file.
#[derive(Debug, Clone)]
pub(crate) struct AccessLog {
    messages: SyncSender<Message>,
    dropped: Counter,
}

/// Its drop waits until the lines are written, but not for long.
#[derive(Debug)]
pub(crate) struct LogEnd {
    messages: SyncSender<Message>,
    /// Closed when the thread has ended.
    is_written: Receiver<()>,
}

#[derive(Debug)]
enum Message {
    Line(Box<AccessLine>),
    End,
}

#[derive(Debug)]
pub(crate) struct AccessEntry {
    arrived_at: Instant,
    /// `None` only during the drop.
    line: Mutex<Option<Box<AccessLine>>>,
    log: AccessLog,
}

/// Unknown members are left out.
#[derive(Debug, Default, Serialize)]
#[serde(default)]
struct AccessLine {
    /// When the request arrived.
    time_unix_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    principal: Option<String>,
    method: String,
    /// The route, or what the client wrote where no route is.
    path: String,
    /// `None` if the client left before an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    /// `None` unless Berth itself refused the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<&'static str>,
    response_bytes: u64,
    /// From the request's arrival to the end of its answer.
    duration_ms: u64,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    turn: Option<TurnMembers>,
}

/// The names are those of `GET /v1/turns`.
#[derive(Debug, Serialize)]
struct TurnMembers {
    turn: String,
    session: Option<String>,
    parent: Option<String>,
    worker: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_worker: Option<String>,
    reason: &'static str,
    retried: bool,
    retention: Option<&'static str>,
    outcome: &'static str,
    ttft_ms: Option<u64>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

service::metrics! {
    pub(crate) struct Metrics {
        /// Requests without a line in the access log, because it was slow or failed
        dropped: Counter = "access_log_lines_dropped";
    }
}

impl AccessLog {
    /// Lines are added to the file `path`; `-` is standard output.
    pub(crate) fn start(path: &Path, registry: &mut Registrar<'_>) -> io::Result<(Self, LogEnd)> {
        let target: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(OpenOptions::new().create(true).append(true).open(path)?)
        };
        Self::with(target, Metrics::new(registry).dropped)
    }

    fn with(target: Box<dyn Write + Send>, dropped: Counter) -> io::Result<(Self, LogEnd)> {
        let (messages, received) = mpsc::sync_channel(LINES_MAX);
        let (writing, is_written) = mpsc::sync_channel(0);
        let of_thread = dropped.clone();
        std::thread::Builder::new().name("access-log".into()).spawn(move || {
            write_lines(received, BufWriter::new(target), &of_thread);
            drop::<SyncSender<()>>(writing);
        })?;
        let end = LogEnd { messages: messages.clone(), is_written };
        Ok((Self { messages, dropped }, end))
    }

    pub(crate) fn entry(&self, peer: Option<IpAddr>, method: &Method, path: &str) -> AccessEntry {
        let line = AccessLine {
            time_unix_ms: unix_ns() / 1_000_000,
            peer,
            method: method.to_string(),
            path: path.to_owned(),
            ..AccessLine::default()
        };
        let line = Mutex::new(Some(Box::new(line)));
        AccessEntry { arrived_at: now(), line, log: self.clone() }
    }
}

impl Drop for LogEnd {
    fn drop(&mut self) {
        // If the queue is full, the thread never hears of the end, but has this time to write.
        let _ = self.messages.try_send(Message::End);
        let _ = self.is_written.recv_timeout(LAST_LINES_TIME_MAX);
    }
}

impl AccessEntry {
    pub(crate) fn set_principal(&self, principal: &str) {
        self.change(|line| line.principal = Some(principal.to_owned()));
    }

    pub(crate) fn set_answer(&self, status: u16, refusal: Option<&'static str>) {
        self.change(|line| (line.status, line.refusal) = (Some(status), refusal));
    }

    pub(crate) fn add_bytes(&self, bytes: usize) {
        self.change(|line| line.response_bytes += bytes as u64);
    }

    pub(super) fn set_turn(&self, record: &TurnRecord) {
        self.change(|line| line.turn = Some(record.into()));
    }

    fn change(&self, change: impl FnOnce(&mut AccessLine)) {
        if let Some(line) = self.line.lock().as_mut() {
            change(line);
        }
    }
}

impl Drop for AccessEntry {
    fn drop(&mut self) {
        let Some(mut line) = self.line.get_mut().take() else { return };
        line.duration_ms = whole_millis(now().saturating_duration_since(self.arrived_at));
        if self.log.messages.try_send(Message::Line(line)).is_err() {
            self.log.dropped.inc();
        }
    }
}

impl From<&TurnRecord> for TurnMembers {
    fn from(record: &TurnRecord) -> Self {
        Self {
            turn: format!("{:016x}", record.turn),
            session: record.session.as_ref().map(|key| key.digest().to_string()),
            parent: record.parent.as_ref().map(|key| key.digest().to_string()),
            worker: record.worker.clone(),
            prefill_worker: record.prefill_worker.clone(),
            reason: record.reason.as_str(),
            retried: record.is_retried,
            retention: record.retention.map(|retention| retention.as_str()),
            outcome: record.outcome.as_str(),
            ttft_ms: record.ttft.map(whole_millis),
            prompt_tokens: record.usage.prompt_tokens,
            cached_tokens: record.usage.cached_tokens,
            output_tokens: record.usage.output_tokens,
        }
    }
}

/// Flushes whenever no line waits. Takes the receiver, so that a line that comes after the end is
/// refused and counted.
fn write_lines(received: Receiver<Message>, mut target: impl Write, dropped: &Counter) {
    let mut has_failed = false;
    let mut note = |result: io::Result<()>| {
        if let Err(error) = result {
            dropped.inc();
            // Once: a full disk would fill the other log, too.
            if !std::mem::replace(&mut has_failed, true) {
                warn!(%error, "can't write the access log");
            }
        }
    };
    loop {
        let next = match received.try_recv() {
            Err(TryRecvError::Empty) => {
                note(target.flush());
                received.recv().ok()
            }
            tried => tried.ok(),
        };
        let Some(Message::Line(line)) = next else { break };
        let mut text = serde_json::to_vec(&line).expect("a line has only names as keys");
        text.push(b'\n');
        note(target.write_all(&text));
    }
    note(target.flush());
    drop(received);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    /// A target that keeps what is written.
    #[derive(Clone, Default)]
    struct Target(Arc<Mutex<Vec<u8>>>);

    impl Write for Target {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A disk that is full.
    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn entry(log: &AccessLog) -> AccessEntry {
        log.entry(None, &Method::POST, "/v1/completions")
    }

    #[test]
    fn each_request_has_one_line_when_its_last_holder_has_gone() {
        let target = Target::default();
        let (log, end) = AccessLog::with(Box::new(target.clone()), Counter::default()).unwrap();
        let of_request = Arc::new(entry(&log));
        let of_answer = Arc::clone(&of_request);
        of_request.set_principal("alice");
        drop(of_request);
        of_answer.set_answer(429, Some("rows"));
        of_answer.add_bytes(7);
        of_answer.add_bytes(5);
        drop(of_answer);
        drop(entry(&log));
        drop(end);
        let text = String::from_utf8(target.0.lock().clone()).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[0]["principal"], "alice");
        assert_eq!(
            [&lines[0]["status"], &lines[0]["refusal"], &lines[0]["response_bytes"]],
            [&json!(429), &json!("rows"), &json!(12)]
        );
        assert!(lines[1].get("status").is_none(), "nobody answered");
    }

    #[test]
    fn a_disk_that_is_full_is_counted_and_holds_up_nothing() {
        let dropped = Counter::default();
        let (log, end) = AccessLog::with(Box::new(Full), dropped.clone()).unwrap();
        for _ in 0..3 * LINES_MAX {
            drop(entry(&log));
        }
        drop(end);
        assert!(dropped.get() > 0);
    }

    #[test]
    fn requests_that_outlive_the_log_are_counted() {
        let dropped = Counter::default();
        let (log, end) = AccessLog::with(Box::new(Target::default()), dropped.clone()).unwrap();
        let late = entry(&log);
        drop(end);
        drop(late);
        assert_eq!(dropped.get(), 1);
    }
}
