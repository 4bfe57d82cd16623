//! An engine's scheduler as the agent sees it: a process that speaks the shim's protocol.
//!
//! The process uses the shim's own code and reports the pool figures that the test gives it.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// The process: sends its reports, prints its pid, and ends with its standard input.
const PROGRAM: &str = r#"
import os, socket, sys
sys.path.insert(0, sys.argv[1])
import wire
socket_path, rank, total, available, evictable, protected = sys.argv[2], *map(int, sys.argv[3:])
kinds = {int: 0, str: "", bytes: os.urandom(16), bool: False}
blank = lambda form: {name: kinds[kind] for name, kind in form.__annotations__.items()}
hello = wire.Hello(**blank(wire.Hello))._replace(
    pid=os.getpid(), dp_rank=rank, page_size=16, pool_tokens=total, rows_total=8, sglang="0.5.23")
held = total - available - evictable - protected
head = wire.Figures(**blank(wire.Figures))._replace(
    pool_tokens=total, available_tokens=available, evictable_tokens=evictable,
    protected_tokens=protected, held_tokens=held, rows_total=8, rows_free=8, is_full_table=True)
link = socket.socket(socket.AF_UNIX)
link.connect(socket_path)
link.sendall(wire.encode_hello(hello) + wire.encode_update(head, [], [], []))
print(os.readlink("/proc/self"), os.getpid(), flush=True)
sys.stdin.read()
"#;

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
        let shim =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker-agent/shim/berth_shim");
        let numbers = [pool.total, pool.available, pool.evictable, pool.protected];
        let mut line: Vec<String> = wrapper.iter().map(|word| (*word).to_owned()).collect();
        line.extend(["python3", "-B", "-c", PROGRAM].map(str::to_owned));
        line.extend([shim, socket.to_owned()].map(|path| path.display().to_string()));
        line.push(dp_rank.to_string());
        line.extend(numbers.map(|number| number.to_string()));
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
