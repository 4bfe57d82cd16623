//! The test's end: requests by a socket, one a line, each answered once it is in force.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::machine::{self, Machine};

/// What a test may ask for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// Replaces a part of the state.
    Set(Value),
    /// Something happens on a GPU.
    Event {
        gpu: u32,
        /// One of NVML's event types.
        kind: u64,
        data: u64,
    },
    /// How often was a symbol called?
    Calls(String),
}

/// The answer's line.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Reply {
    Done,
    Calls(u64),
    Refused(String),
}

/// Serves the test that listens there, if one does, on a thread of its own.
pub(crate) fn connect(path: &Path) {
    if let Ok(stream) = UnixStream::connect(path) {
        let thread = std::thread::Builder::new().name("nvml-fake".into());
        thread.spawn(move || serve(&stream)).expect("a test's machine has room for a thread");
    }
}

/// Until the test hangs up.
fn serve(mut stream: &UnixStream) {
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { return };
        let reply = match serde_json::from_str(&line) {
            Ok(request) => machine::control(|machine| carry_out(machine, request)),
            Err(error) => Reply::Refused(error.to_string()),
        };
        let reply = serde_json::to_string(&reply).expect("plain data always serialises");
        if writeln!(stream, "{reply}").is_err() {
            return;
        }
    }
}

fn carry_out(machine: &mut Machine, request: Request) -> Reply {
    match request {
        Request::Set(patch) => match machine.state.patched(patch) {
            Ok(state) => {
                machine.state = state;
                Reply::Done
            }
            Err(why) => Reply::Refused(why),
        },
        Request::Event { gpu, kind, data } => {
            machine.sets.happen(gpu, kind, data);
            Reply::Done
        }
        Request::Calls(symbol) => Reply::Calls(machine.calls(&symbol)),
    }
}
