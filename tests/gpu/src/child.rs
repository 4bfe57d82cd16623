//! The second process of a question that needs two processes.

use crate::{Options, device, say};
use anyhow::Context;
use kernels::{
    cuda::{DeviceBuffer, ExportedRange},
    ipc::{Error, RemoteAuditor},
};
use std::{
    env,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{self, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};
use tokio::time::Instant;

/// Bytes that the exporter shares.
pub(crate) const EXPORTED: usize = 64 << 20;
/// The value of every exported byte.
pub(crate) const CONTENT: u8 = 0x5A;

/// The second process's role, which it plays until its standard input ends.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Role {
    /// Opens the device and prints a line.
    Context,
    /// Exports device memory and prints how to import it.
    Exporter,
    /// Audits an engine through its row table, and prints the number of audits at the end.
    Auditor,
}

/// The second process, as the first process holds it. Killed on drop.
#[derive(Debug)]
pub(crate) struct Child {
    process: process::Child,
    output: BufReader<ChildStdout>,
}

impl Child {
    pub(crate) fn start(
        options: &Options,
        role: Role,
        table: Option<&Path>,
        rate: f64,
    ) -> anyhow::Result<Self> {
        let name = match role {
            Role::Context => "context",
            Role::Exporter => "exporter",
            Role::Auditor => "auditor",
        };
        let mut command = Command::new(env::current_exe()?);
        command.args(["--role", name, "--rate", &rate.to_string()]);
        command.arg("--fatbin").arg(&options.fatbin);
        if let Some(table) = table {
            command.arg("--table").arg(table);
        }
        Self::spawn(&mut command)
    }

    /// Starts any program that prints lines and ends when its standard input ends.
    pub(crate) fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(process.stdout.take().context("its output was piped")?);
        Ok(Self { process, output })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the next line of its output.
    pub(crate) fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        anyhow::ensure!(!line.is_empty(), "the other process ended without any output");
        Ok(line.trim().to_owned())
    }

    /// Ends the process through its standard input, and returns the rest of its output.
    pub(crate) fn end(mut self) -> anyhow::Result<String> {
        drop(self.process.stdin.take());
        let mut rest = String::new();
        self.output.read_to_string(&mut rest)?;
        anyhow::ensure!(self.process.wait()?.success(), "the other process failed");
        Ok(rest)
    }

    /// Kills the process, as in a crash.
    pub(crate) fn kill(mut self) -> anyhow::Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs this process in the role.
pub(crate) fn play(role: Role, options: &Options) -> anyhow::Result<()> {
    match role {
        Role::Context => {
            let _device = device::open(options)?;
            say("open")?;
            wait();
        }
        Role::Exporter => {
            let device = device::open(options)?;
            let mut memory: DeviceBuffer<u8> = device.alloc(EXPORTED)?;
            device.fill(&mut memory, CONTENT)?;
            device.synchronize()?;
            say(&written(&device.export(memory.address(), EXPORTED as u64)?))?;
            wait();
        }
        Role::Auditor => {
            let ended = thread::spawn(wait);
            let table = options.table.as_ref().context("an auditor is told of a table")?;
            let mut remote = RemoteAuditor::open(table, device::open(options)?)?;
            let mut audits = 0u64;
            let mut next = Instant::now();
            while !ended.is_finished() {
                if Instant::now() >= next {
                    next += Duration::from_secs_f64(1.0 / options.rate);
                    audits += u64::from(audit(&mut remote)?);
                }
                thread::sleep(Duration::from_millis(1));
            }
            say(&audits.to_string())?;
        }
    }
    Ok(())
}

/// Makes one audit; returns false if the engine overwrote its tables faster than they were read.
fn audit(remote: &mut RemoteAuditor) -> anyhow::Result<bool> {
    match remote.begin() {
        Ok(()) => {}
        Err(Error::Overrun) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    while remote.poll()?.is_none() {
        thread::sleep(Duration::from_micros(200));
    }
    Ok(true)
}

/// Waits until standard input ends.
fn wait() {
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
}

fn written(exported: &ExportedRange) -> String {
    let handle: String = exported.handle.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{handle} {} {}", exported.offset, exported.bytes)
}

/// Parses the line that an exporter wrote: the handle in hex, offset, bytes.
pub(crate) fn read(line: &str) -> anyhow::Result<ExportedRange> {
    let mut words = line.split(' ');
    let mut word = || words.next().context("an export has three words");
    let hex = word()?;
    anyhow::ensure!(hex.len() == 128 && hex.is_ascii(), "a handle has 64 bytes");
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16);
    let bytes = (0..64).map(byte).collect::<Result<Vec<u8>, _>>()?;
    let mut handle = [0; 64];
    handle.copy_from_slice(&bytes);
    Ok(ExportedRange { handle, offset: word()?.parse()?, bytes: word()?.parse()? })
}
