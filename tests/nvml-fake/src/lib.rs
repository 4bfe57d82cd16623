//! A fake `libnvidia-ml.so.1` whose GPUs are defined by a test.
//!
//! The real agent loads it instead of the driver's library. It follows NVML's protocol (init
//! counts, struct versions, count-then-fetch, buffer lengths, handles, blocking event waits) and
//! has the calls that the agent and the conformance check make. Any other call is a missing symbol,
//! as with an older driver.
//!
//! Two optional files next to the loaded library define the GPUs:
//!
//! - `state.json`: the initial `State`; fields left out have the values of an idle H200.
//! - `control.sock`: a Unix socket, to which the library connects when NVML is first initialised.
//!   The test sends one `Request` per line, and each is answered with a line once it has taken
//!   effect.
//!
//! A copy of the library in another folder is another machine, also within one process. Without
//! `state.json` there are as many GPUs as `NVML_FAKE_GPUS` says, by default two.

mod abi;
mod control;
mod device;
mod event;
mod event_sets;
mod export;
mod gpm;
mod gpm_samples;
mod machine;
mod mig;
mod state;
mod system;

use std::path::{Path, PathBuf};

/// Returns the path of the C library that was built along with the calling test.
///
/// # Panics
/// When the library isn't there, because the caller wasn't built by Cargo.
#[must_use]
pub fn library() -> PathBuf {
    let own = std::env::current_exe().expect("a process knows its program");
    let mut folders = own.ancestors().skip(1);
    let found = folders.find_map(|folder| {
        let beside = |folder: &Path| Some(folder.join("libnvml_fake.so")).filter(|at| at.exists());
        beside(folder).or_else(|| beside(&folder.join("deps")))
    });
    found.expect("cargo builds it next to its dependents")
}
