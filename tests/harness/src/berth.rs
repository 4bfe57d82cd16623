//! The command `berth` as a process of its own, as a person or a script runs it.

use std::{io, process::Stdio};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

/// What a command said, and how it ended.
#[derive(Debug)]
pub struct Said {
    /// The exit status.
    pub status: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Said {
    /// Returns the output as JSON.
    ///
    /// # Panics
    /// Panics if the output isn't JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// The binary of `berth`, and the flags of each of its runs.
#[derive(Debug, Clone)]
pub struct BerthCommand {
    binary: &'static str,
    flags: Vec<String>,
    environment: Vec<(&'static str, String)>,
}

impl BerthCommand {
    /// Returns the command with these flags.
    #[must_use]
    pub fn new(binary: &'static str, flags: &[String]) -> Self {
        Self { binary, flags: flags.to_vec(), environment: vec![] }
    }

    /// Returns the same command with a variable in its environment.
    #[must_use]
    pub fn with_variable(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.to_owned()));
        self
    }

    /// Runs the command to its end. Nothing of this process's environment reaches it.
    ///
    /// # Errors
    /// Fails if the process can't be started.
    pub async fn run(&self, args: &[&str]) -> io::Result<Said> {
        let output = self.command(args).output().await?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let status = output.status.code().unwrap_or(-1);
        Ok(Said { status, out: text(&output.stdout), err: text(&output.stderr) })
    }

    /// Starts a command that goes on until it is dropped.
    ///
    /// # Errors
    /// Fails if the process can't be started.
    pub fn start(&self, args: &[&str]) -> io::Result<RunningBerth> {
        let mut child = self.command(args).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let out = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(RunningBerth { lines: BufReader::new(out).lines(), _child: child })
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.binary);
        command.args(&self.flags).args(args).env_clear().env("COLUMNS", "80");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// A running command; killed when dropped.
#[derive(Debug)]
pub struct RunningBerth {
    lines: Lines<BufReader<ChildStdout>>,
    _child: Child,
}

impl RunningBerth {
    /// Returns the next line of the output.
    ///
    /// # Errors
    /// Fails if the output has ended.
    pub async fn next_line(&mut self) -> io::Result<String> {
        self.lines.next_line().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}
