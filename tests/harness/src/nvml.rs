//! A simulated machine with GPUs: a copy of the fake NVML in a folder, with a control socket.
//!
//! Through the socket the test changes the state of the GPUs while an agent reads them.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::cluster::PATIENCE;

/// NVML's event type of an XID.
const XID: u64 = 8;

/// A simulated machine with GPUs, visible to a process that loads [`Machine::library`].
#[derive(Debug)]
pub struct Machine {
    folder: tempfile::TempDir,
    listener: UnixListener,
}

/// The control connection to a loaded library.
#[derive(Debug)]
pub struct NvmlControl {
    stream: BufReader<UnixStream>,
}

impl Machine {
    /// Creates a machine with these GPUs, by index, in the format of
    /// `tests/nvml-fake/src/state.rs`.
    ///
    /// # Errors
    /// Fails if the files can't be written.
    pub fn new(gpus: &Value) -> anyhow::Result<Self> {
        Self::without(&[], &json!({ "gpus": gpus }))
    }

    /// Creates a machine with a complete state, and a library without some symbols, as in an older
    /// driver.
    ///
    /// # Errors
    /// Fails if the files can't be written.
    pub fn without(symbols: &[&str], state: &Value) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut library = std::fs::read(nvml_fake::library())?;
        for symbol in symbols {
            rename(&mut library, symbol)?;
        }
        std::fs::write(folder.path().join("libnvidia-ml.so.1"), library)?;
        std::fs::write(folder.path().join("state.json"), state.to_string())?;
        let listener = UnixListener::bind(folder.path().join("control.sock"))?;
        listener.set_nonblocking(true)?;
        Ok(Self { folder, listener })
    }

    /// Returns the path of the library to load.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.folder.path().join("libnvidia-ml.so.1")
    }

    /// Returns the library's folder, for a loader's search path.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until the library is loaded.
    ///
    /// # Errors
    /// Fails if no process loads the library within [`PATIENCE`].
    pub async fn wait_until_loaded(&self) -> anyhow::Result<NvmlControl> {
        let listener = tokio::net::UnixListener::from_std(self.listener.try_clone()?)?;
        let (stream, _) = tokio::time::timeout(PATIENCE, listener.accept()).await??;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(NvmlControl { stream: BufReader::new(stream) })
    }
}

impl NvmlControl {
    /// Changes one GPU. The change is in force when this returns.
    ///
    /// # Errors
    /// Fails if the library is gone or rejects the request.
    pub fn gpu(&mut self, index: u32, patch: &Value) -> anyhow::Result<()> {
        self.set(&json!({ "gpus": { index.to_string(): patch } }))
    }

    /// Changes a part of the machine's state.
    ///
    /// # Errors
    /// Fails if the library is gone or rejects the request.
    pub fn set(&mut self, patch: &Value) -> anyhow::Result<()> {
        self.request(&json!({ "set": patch })).map(drop)
    }

    /// Raises an XID on a GPU.
    ///
    /// # Errors
    /// Fails if the library is gone or rejects the request.
    pub fn xid(&mut self, gpu: u32, number: u64) -> anyhow::Result<()> {
        let event = json!({ "gpu": gpu, "kind": XID, "data": number });
        self.request(&json!({ "event": event })).map(drop)
    }

    /// Returns how often a symbol was called.
    ///
    /// # Errors
    /// Fails if the library is gone or rejects the request.
    pub fn calls(&mut self, symbol: &str) -> anyhow::Result<u64> {
        let answer = self.request(&json!({ "calls": symbol }))?;
        answer["calls"].as_u64().ok_or_else(|| anyhow::anyhow!("no count in {answer}"))
    }

    fn request(&mut self, request: &Value) -> anyhow::Result<Value> {
        writeln!(self.stream.get_mut(), "{request}")?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line)?;
        anyhow::ensure!(answer.get("refused").is_none(), "{request}: {answer}");
        Ok(answer)
    }
}

/// Renames a symbol in the library's string tables, so that no lookup finds it.
fn rename(library: &mut [u8], symbol: &str) -> anyhow::Result<()> {
    let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let mut found = 0;
    let mut at = 0;
    while let Some(place) = library[at..].windows(name.len()).position(|bytes| bytes == name) {
        library[at + place + 1] = b'X';
        at += place + 1;
        found += 1;
    }
    anyhow::ensure!(found > 0, "the fake has no symbol {symbol}");
    Ok(())
}
