//! Functions `cuda_fake_*` by which a test controls the driver.
//!
//! They are for [`crate::Fake`], and for programs that load the library otherwise, such as Python.

use crate::{
    fake::{ALL_STREAMS, Live},
    host::Kernels,
    state::{State, memory_default, state},
};
use std::ffi::{CStr, c_char};

/// # Safety
/// `text` must be null or NUL-terminated.
unsafe fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Returns the number of launches of one kernel, or of all kernels if `kernel` is null.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_fake_launches(kernel: *const c_char) -> u64 {
    // SAFETY: same contract as this function's.
    let kernel = unsafe { text(kernel) };
    let state = state();
    let counted = |name: &String| kernel.as_ref().is_none_or(|kernel| kernel == name);
    state.launches.iter().filter(|(name, _)| counted(name)).map(|(_, count)| count).sum()
}

/// Makes `symbol` return `code` without doing anything; 0 undoes that.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_fake_fail(symbol: *const c_char, code: u32) {
    // SAFETY: same contract as this function's.
    let Some(symbol) = (unsafe { text(symbol) }) else { return };
    if code == 0 {
        state().faults.remove(&symbol);
    } else {
        state().faults.insert(symbol, code);
    }
}

/// Sets the amount of device memory, in bytes.
#[unsafe(no_mangle)]
extern "C" fn cuda_fake_memory_max(bytes: u64) {
    state().memory_max = bytes;
}

/// Holds a stream: its work is not executed. [`ALL_STREAMS`] also means streams created later.
#[unsafe(no_mangle)]
extern "C" fn cuda_fake_hold(stream: u64) {
    set_held(&mut state(), stream, true);
}

/// Releases a held stream; its work is executed.
#[unsafe(no_mangle)]
extern "C" fn cuda_fake_release(stream: u64) {
    let mut state = state();
    set_held(&mut state, stream, false);
    state.advance();
}

/// Executes up to `pieces` pieces of a held stream's work, and work of other streams that waited
/// for them.
#[unsafe(no_mangle)]
extern "C" fn cuda_fake_step(stream: u64, pieces: u64) {
    let mut state = state();
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.allowance = pieces;
    }
    state.advance();
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.allowance = 0;
    }
}

/// Returns the number of pieces of work that a stream has left.
#[unsafe(no_mangle)]
extern "C" fn cuda_fake_pending(stream: u64) -> u64 {
    state().streams.get(&stream).map_or(0, |stream| stream.work.len() as u64)
}

/// Reports the objects that exist now.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_fake_live(live: *mut Live) {
    let state = state();
    let found = Live {
        allocations: state.allocations.len() as u64,
        bytes: state.memory_used(),
        registrations: state.registered.len() as u64,
        streams: state.streams.len() as u64 - 1,
        events: state.events.len() as u64,
        modules: state.modules.len() as u64,
        contexts: state.contexts.values().sum(),
    };
    // SAFETY: `live` may be written.
    unsafe { live.write(found) };
}

/// Gives modules loaded from now on the kernels of this library; null means the built-in kernels.
/// Returns 0 if the library can't be loaded.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuda_fake_kernels(path: *const c_char) -> u32 {
    // SAFETY: same contract as this function's.
    let path = unsafe { text(path) };
    let kernels = path.map_or_else(|| Ok(Kernels::built_in()), |path| Kernels::load(&path));
    let Ok(kernels) = kernels else { return 0 };
    state().kernels = kernels;
    1
}

/// Undoes everything that a test has set; releases held streams.
#[unsafe(no_mangle)]
extern "C" fn cuda_fake_reset() {
    let mut state = state();
    state.faults.clear();
    state.launches.clear();
    state.kernels = Kernels::built_in();
    state.memory_max = memory_default();
    set_held(&mut state, ALL_STREAMS, false);
    state.advance();
}

fn set_held(state: &mut State, stream: u64, held: bool) {
    if stream == ALL_STREAMS {
        state.all_held = held;
        state.streams.values_mut().for_each(|stream| stream.held = held);
    } else if let Some(stream) = state.streams.get_mut(&stream) {
        stream.held = held;
    }
}
