//! The second process of a question about what another process has on the GPU.

use crate::{Options, device, say};
use anyhow::Context;
use std::{
    env,
    io::{BufRead, BufReader},
    process::{self, ChildStdout, Command, Stdio},
};

/// What the second process prints once its context is open.
const OPEN: &str = "open";

/// The second process, as the first process holds it. Killed on drop.
#[derive(Debug)]
pub(crate) struct Child {
    process: process::Child,
    output: BufReader<ChildStdout>,
}

impl Child {
    pub(crate) fn start(options: &Options) -> anyhow::Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.arg("--hold-context").arg("--fatbin").arg(&options.fatbin);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(process.stdout.take().context("its output was piped")?);
        Ok(Self { process, output })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits until its context is open.
    pub(crate) fn wait_open(&mut self) -> anyhow::Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        anyhow::ensure!(line.trim() == OPEN, "the other process opened no context");
        Ok(())
    }

    /// Ends the process through its standard input.
    pub(crate) fn end(mut self) -> anyhow::Result<()> {
        drop(self.process.stdin.take());
        anyhow::ensure!(self.process.wait()?.success(), "the other process failed");
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Opens the device and prints a line. Keeps the context until standard input ends.
pub(crate) fn hold_context(options: &Options) -> anyhow::Result<()> {
    let _device = device::open(options)?;
    say(OPEN)?;
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
    Ok(())
}
