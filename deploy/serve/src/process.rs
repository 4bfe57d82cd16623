//! Runs the process of one engine: passes its log on, and leaves nothing of it behind.
//!
//! The engine has a process group of its own: Ctrl-C at the terminal ends the turns first, and then
//! the engine. If `berth serve` is killed, the system kills the engine.

use std::{
    ffi::OsString,
    io::{self, Write as _},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::Path,
    process::{ExitCode, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{
    Pid, Signal, getppid, kill_process, kill_process_group, set_parent_process_death_signal,
};
use rustix::thread::disable_transparent_huge_pages;
use service::command_line::print_error;
use tokio::{net::unix::pipe, process::Child};

use crate::{engine_command::EngineCommand, last_lines::LastLines};

/// The first word of a command line of this program that becomes an engine.
const BECOME: &str = "become-engine";
/// As of a shell that doesn't find a program.
const NOT_STARTED: u8 = 127;
const READ_BYTES_MAX: usize = 16 << 10;
/// A pipe holds 64 KiB.
const LAST_READS_MAX: usize = 8;
/// So much of a line without an end waits for it.
const OPEN_BYTES_MAX: usize = 16 << 10;

#[derive(Debug)]
pub struct EngineProcess {
    child: Child,
    /// The group has the same number.
    pid: Pid,
    log: pipe::Receiver,
    is_log_open: bool,
    /// Its id may be another process's.
    has_ended: bool,
    out: LogOut,
    pub last_lines: LastLines,
}

/// Becomes the engine if this process was started for that. Returns what it ends with if it can't.
#[must_use]
pub fn become_engine(mut args: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    args.next();
    (args.next()? == BECOME).then_some(())?;
    let parent = args.next()?.into_string().ok()?.parse().ok().and_then(Pid::from_raw)?;
    let program = args.next()?;
    let bound = set_parent_process_death_signal(Some(Signal::KILL));
    // The parent may have gone before.
    if bound.is_err() || getppid() != Some(parent) {
        return Some(ExitCode::FAILURE);
    }
    // This program keeps its own memory in small pages; an engine's is for the engine to decide.
    let _ = disable_transparent_huge_pages(false);
    let error = std::process::Command::new(&program).args(args).exec();
    print_error(&format_args!("can't start {}: {error}", program.to_string_lossy()));
    Some(ExitCode::from(NOT_STARTED))
}

impl EngineProcess {
    /// To call on a thread that lives as long as the engine may: the engine ends with it. Lines of
    /// the log get `prefix`.
    pub fn start(command: &EngineCommand, shim_socket: &Path, prefix: String) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let child = tokio::process::Command::new("/proc/self/exe")
            .args([BECOME, &std::process::id().to_string()])
            .args(&command.words)
            .envs(command.environment.iter().map(|(name, value)| (name, value)))
            .env("BERTH_SHIM_SOCKET", shim_socket)
            // Otherwise Python would hold its last lines back in a pipe.
            .env("PYTHONUNBUFFERED", "1")
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0)
            .spawn()?;
        let number = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = number.expect("a process that nobody has waited for has an id");
        let log = pipe::Receiver::from_owned_fd(OwnedFd::from(reader))?;
        let out = LogOut { prefix, open: vec![] };
        Ok(Self {
            child,
            pid,
            log,
            is_log_open: true,
            has_ended: false,
            out,
            last_lines: LastLines::default(),
        })
    }

    /// Passes the log on until the process ends, and ends what is left of its group. Dropping the
    /// future loses nothing.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = loop {
            tokio::select! {
                biased;
                readable = self.log.readable(), if self.is_log_open => {
                    readable?;
                    self.pass_on();
                }
                status = self.child.wait() => break status?,
            }
        };
        self.has_ended = true;
        // Fails if nothing of the group is left.
        let _ = kill_process_group(self.pid, Signal::KILL);
        for _ in 0..LAST_READS_MAX {
            if !self.pass_on() {
                break;
            }
        }
        write_log(&self.out.finish());
        Ok(status)
    }

    /// Returns whether something has come.
    fn pass_on(&mut self) -> bool {
        let mut bytes = [0; READ_BYTES_MAX];
        match self.log.try_read(&mut bytes) {
            Ok(0) => self.is_log_open = false,
            Ok(length) => {
                self.last_lines.push(&bytes[..length]);
                write_log(&self.out.take(&bytes[..length]));
                return true;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => self.is_log_open = false,
        }
        false
    }

    /// Asks the process to end, and kills it if it doesn't.
    pub async fn stop(&mut self, time_max: Duration) -> io::Result<ExitStatus> {
        // Fails if it has ended.
        let _ = kill_process(self.pid, Signal::TERM);
        match tokio::time::timeout(time_max, self.wait()).await {
            Ok(status) => status,
            Err(_) => {
                let _ = kill_process_group(self.pid, Signal::KILL);
                self.wait().await
            }
        }
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        if !self.has_ended {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }
}

/// Makes of an engine's log the lines to show.
#[derive(Debug)]
struct LogOut {
    prefix: String,
    /// The begin of the line that hasn't ended.
    open: Vec<u8>,
}

impl LogOut {
    /// Returns the lines that have ended.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.open.extend_from_slice(bytes);
        // A progress bar ends its lines by carriage returns.
        let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
        match self.open.iter().rposition(is_end) {
            Some(last) => {
                let rest = self.open.split_off(last + 1);
                let lines = self.finish();
                self.open = rest;
                lines
            }
            None if self.open.len() > OPEN_BYTES_MAX => self.finish(),
            None => vec![],
        }
    }

    /// Returns what is there, also of a line that hasn't ended.
    fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.open.len() + 64);
        for line in self.open.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            if !is_own_question(line) {
                out.extend_from_slice(self.prefix.as_bytes());
                out.extend_from_slice(line);
            }
        }
        self.open.clear();
        out
    }
}

/// If standard error has gone, nobody reads it.
fn write_log(lines: &[u8]) {
    let _ = io::stderr().lock().write_all(lines);
}

/// The agent asks for the engine's load five times a second, and SGLang logs each answer.
fn is_own_question(line: &[u8]) -> bool {
    String::from_utf8_lossy(line).contains("\"GET /v1/loads?include=core HTTP/1.1\" 200")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_agent_s_own_questions_are_left_out() {
        let log = |path: &str, status| {
            let line = format!("INFO: 127.0.0.1:5 - \"GET {path} HTTP/1.1\" {status}\n");
            is_own_question(line.as_bytes())
        };
        assert!(log("/v1/loads?include=core", "200 OK"));
        assert!(!log("/v1/loads?include=core", "503 Service Unavailable"));
        assert!(!log("/v1/loads", "200 OK") && !is_own_question(b"\xff"));
    }

    #[test]
    fn a_line_in_parts_is_one_line_and_nothing_waits_for_ever() {
        let mut out = LogOut { prefix: String::new(), open: vec![] };
        assert_eq!(out.take(b"a\nb"), b"a\n");
        assert_eq!(out.take(b"c\rd"), b"bc\r");
        let long = vec![b'e'; OPEN_BYTES_MAX];
        assert_eq!(out.take(&long).len(), OPEN_BYTES_MAX + 1);
        out.prefix = "engine 0 | ".to_owned();
        assert_eq!(out.take(b"f\n\n"), b"engine 0 | f\nengine 0 | \n");
    }
}
