//! The test's control connection: one request per line, answered once it has taken effect.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A request of the test.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// Merges a part into the state.
    Set(Value),
    /// Reports an event on a GPU.
    Event {
        gpu: u32,
        /// An NVML event type.
        kind: u64,
        data: u64,
    },
    /// Asks how often a symbol was called.
    Calls(String),
}

/// The answer to a request, one line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    Done,
    Calls(u64),
    Refused(String),
}

/// Serves the test that listens at `path`, if there is one, on a thread of its own. `carry_out`
/// answers each request.
pub(crate) fn connect(path: &Path, carry_out: fn(Request) -> Reply) {
    if let Ok(stream) = UnixStream::connect(path) {
        let thread = std::thread::Builder::new().name("nvml-fake".into());
        thread.spawn(move || serve(&stream, carry_out)).expect("a thread can be started");
    }
}

/// Serves requests until the test closes the connection.
fn serve(mut stream: &UnixStream, carry_out: fn(Request) -> Reply) {
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let reply = match serde_json::from_str(&line) {
            Ok(request) => carry_out(request),
            Err(error) => Reply::Refused(error.to_string()),
        };
        let reply = serde_json::to_string(&reply).expect("plain data always serialises");
        if writeln!(stream, "{reply}").is_err() {
            return;
        }
    }
}
