//! An engine's scheduler as far as the agent sees one: a process of its own that speaks the shim's
//! protocol, by the shim's own code. What it says of its pool is what the test says.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// Speaks, prints its pid and ends with its standard input.
const SPEAK: &str = r#"
import os, socket, sys
sys.path.insert(0, sys.argv[1])
import wire
socket_path, rank, total, available, evictable, protected = sys.argv[2], *map(int, sys.argv[3:])
kinds = {int: 0, str: "", bytes: os.urandom(16), bool: False}
blank = lambda form: {name: kinds[kind] for name, kind in form.__annotations__.items()}
hello = wire.Hello(**blank(wire.Hello))._replace(
    pid=os.getpid(), dp_rank=rank, page_size=16, total=total, rows_total=8, sglang="0.5.23")
held = total - available - evictable - protected
head = wire.Head(**blank(wire.Head))._replace(
    total=total, available=available, evictable=evictable, protected=protected, held=held,
    rows_total=8, rows_free=8, full=True)
link = socket.socket(socket.AF_UNIX)
link.connect(socket_path)
link.sendall(wire.hello(hello) + wire.update(head, [], [], []))
print(os.readlink("/proc/self"), os.getpid(), flush=True)
sys.stdin.read()
"#;

/// Tokens of a rank's pool by state; the rest is held by sessions.
#[derive(Debug, Clone, Copy)]
pub struct Pool {
    /// All.
    pub total: u64,
    /// Free.
    pub available: u64,
    /// Cached, and eviction takes it.
    pub evictable: u64,
    /// Cached and locked.
    pub protected: u64,
}

/// A running scheduler; ends when dropped.
#[derive(Debug)]
pub struct Scheduler {
    child: Child,
    /// Its pid where the test runs.
    pub pid: u32,
    /// Its pid in its own namespace.
    pub own_pid: u32,
}

impl Scheduler {
    /// Starts one that speaks to the agent's shim socket. `wrapper` is a command to run it by.
    ///
    /// # Errors
    /// When there is no Python for it, or the wrapper doesn't work here.
    pub fn speak(
        wrapper: &[&str],
        socket: &Path,
        dp_rank: u32,
        pool: Pool,
    ) -> anyhow::Result<Self> {
        let shim =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker-agent/shim/berth_shim");
        let numbers = [pool.total, pool.available, pool.evictable, pool.protected];
        let mut line: Vec<String> = wrapper.iter().map(|word| (*word).to_owned()).collect();
        line.extend(["python3", "-B", "-c", SPEAK].map(str::to_owned));
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
        let mut said = String::new();
        let output = child.stdout.as_mut().expect("it is piped");
        BufReader::new(output).read_line(&mut said)?;
        let mut pids = said.split_whitespace().map(str::parse);
        if let (Some(Ok(pid)), Some(Ok(own_pid))) = (pids.next(), pids.next()) {
            return Ok(Self { child, pid, own_pid });
        }
        let output = child.wait_with_output()?;
        anyhow::bail!("no scheduler: {}", String::from_utf8_lossy(&output.stderr))
    }

    /// Another process of this one's parent, with a name of SGLang's. It says nothing.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn silent(title: &str) -> anyhow::Result<Self> {
        let mut command = Command::new("cat");
        let child = command.arg0(title).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        let pid = child.id();
        Ok(Self { child, pid, own_pid: pid })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // By its end of input, which reaches it through a wrapper too.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
