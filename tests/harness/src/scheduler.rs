//! An engine's scheduler as the agent sees it: a process that speaks the shim's protocol.
//!
//! The process reports the pool figures that the test gives it, in the shim's messages.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Command, Stdio},
};

use serde::Serialize;
use worker_agent::shim::{RankFacts, codec::VERSION};

/// The process: sends the frames of its last argument, with its own pid for [`PID_PLACEHOLDER`],
/// prints its pid, and ends with its standard input.
const PROGRAM: &str = r#"
import os, socket, sys
pid = b"\xce" + os.getpid().to_bytes(4, "big")
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall(bytes.fromhex(sys.argv[2]).replace(b"\xce\xff\xff\xff\xff", pid))
print(os.readlink("/proc/self"), os.getpid(), flush=True)
sys.stdin.read()
"#;
/// A number that MessagePack encodes in as many bytes as the program encodes its pid.
const PID_PLACEHOLDER: u32 = u32::MAX;

/// The tokens of a rank's pool by state; sessions hold the rest.
#[derive(Debug, Clone, Copy)]
pub struct PoolTokens {
    /// All tokens.
    pub total: u64,
    /// Free tokens.
    pub available: u64,
    /// Cached tokens that can be evicted.
    pub evictable: u64,
    /// Cached tokens that are locked.
    pub protected: u64,
}

/// A running scheduler process, which ends when the value is dropped.
#[derive(Debug)]
pub struct Scheduler {
    child: Child,
    /// The process's pid in the test's namespace.
    pub pid: u32,
    /// The process's pid in its own namespace.
    pub own_pid: u32,
}

impl Scheduler {
    /// Starts a process that connects to the agent's shim socket. `wrapper` is a command that runs
    /// it.
    ///
    /// # Errors
    /// Fails if Python is missing or the wrapper doesn't work here.
    pub fn start(
        wrapper: &[&str],
        socket: &Path,
        dp_rank: u32,
        pool: PoolTokens,
    ) -> anyhow::Result<Self> {
        let frames = [hello(dp_rank, pool.total), update(pool)].concat();
        let hex: String = frames.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut line: Vec<String> = wrapper.iter().map(|word| (*word).to_owned()).collect();
        line.extend(["python3", "-B", "-c", PROGRAM].map(str::to_owned));
        line.extend([socket.display().to_string(), hex]);
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]);
        Self::spawn(&mut command)
    }

    fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line_read = String::new();
        let output = child.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut line_read)?;
        let mut pids = line_read.split_whitespace().map(str::parse);
        if let (Some(Ok(pid)), Some(Ok(own_pid))) = (pids.next(), pids.next()) {
            return Ok(Self { child, pid, own_pid });
        }
        let output = child.wait_with_output()?;
        anyhow::bail!("the scheduler did not start: {}", String::from_utf8_lossy(&output.stderr))
    }

    /// Starts another child of this process under one of SGLang's process names; it sends nothing.
    ///
    /// # Errors
    /// Fails if the process can't be started.
    pub fn start_silent(title: &str) -> anyhow::Result<Self> {
        let mut command = Command::new("cat");
        let child = command.arg0(title).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let pid = child.id();
        Ok(Self { child, pid, own_pid: pid })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // Closes the process's standard input, which ends it even behind a wrapper.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Returns the shim's hello for a rank whose pool has this many tokens.
fn hello(dp_rank: u32, pool_tokens: u64) -> Vec<u8> {
    let (page_size_tokens, rows_total, page_bytes) = (16, 8, None::<u64>);
    let (sglang, shim, device) = ("0.5.23", "", "");
    let no_reason = None::<&str>;
    let pin_safety = (no_reason, no_reason);
    frame(&(
        "Hello",
        PID_PLACEHOLDER,
        dp_rank,
        page_size_tokens,
        pool_tokens,
        rows_total,
        [0_u8; 16],
        sglang,
        shim,
        no_reason,
        no_reason,
        no_reason,
        no_reason,
        device,
        page_bytes,
        pin_safety,
    ))
}

/// Returns an update with these figures and no session.
fn update(pool: PoolTokens) -> Vec<u8> {
    let PoolTokens { total, available, evictable, protected } = pool;
    let facts = RankFacts {
        dp_rank: 0,
        read_at: service::clock::now(),
        pool_tokens: total,
        available_tokens: available,
        evictable_tokens: evictable,
        protected_tokens: protected,
        held_tokens: total - available - evictable - protected,
        uncached_tokens: 0,
        rows_total: 8,
        rows_free: 8,
        running: 0,
        waiting: 0,
        events_lost: 0,
        recounts: 0,
        samples: 0,
        samples_ns: 0,
        weight_changes: 0,
        has_old_kv: false,
        host: None,
    };
    let (seq, begins_table, ends_table, empty) = (0, true, true, [0; 0]);
    frame(&("Update", seq, facts, begins_table, ends_table, empty, empty, empty))
}

/// Encodes a message of the shim as a frame.
fn frame(message: &impl Serialize) -> Vec<u8> {
    let message = rmp_serde::to_vec(message).expect("it has numbers and texts");
    let length = u32::try_from(1 + message.len()).expect("it is short").to_le_bytes();
    [&length, &[VERSION][..], &message].concat()
}
