//! A `libnvidia-ml.so.1` whose GPUs are what a test says: the real agent loads it in place of the
//! driver's. It follows NVML's protocol (init counts, struct versions, count-then-fetch, buffer
//! lengths, handles, blocking event waits) and knows the calls that the agent and the conformance
//! check make. A call that isn't here is a missing symbol, as with an older driver.
//!
//! What the GPUs are comes from two files beside the loaded library, both optional:
//!
//! - `state.json`: the `State` to start from; what it leaves out is an idle H200.
//! - `control.sock`: a unix socket, connected to when NVML is first initialised. It takes one
//!   `Request` a line and answers each with a line, once it is in force.
//!
//! A copy of the library in another folder is another machine, also inside one process. Without
//! `state.json` there are as many GPUs as `NVML_FAKE_GPUS` says, two if it says nothing.

mod abi;
mod control;
mod device;
mod event;
mod gpm;
mod machine;
mod mig;
mod state;
mod system;

use std::path::{Path, PathBuf};

/// The C library that was built along with the calling test.
///
/// # Panics
/// When it isn't there, which means that the caller wasn't built by Cargo.
#[must_use]
pub fn library() -> PathBuf {
    let own = std::env::current_exe().expect("a process knows its program");
    let mut folders = own.ancestors().skip(1);
    let found = folders.find_map(|folder| {
        let beside = |folder: &Path| Some(folder.join("libnvml_fake.so")).filter(|at| at.exists());
        beside(folder).or_else(|| beside(&folder.join("deps")))
    });
    found.expect("cargo puts it beside what depends on it")
}
