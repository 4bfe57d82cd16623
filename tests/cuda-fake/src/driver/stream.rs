//! The driver's calls about streams and events.

use super::put;
use crate::{
    state::{code, drained, in_context},
    stream::{Event, Stream, Work},
};
use std::{
    ffi::{c_int, c_uint},
    sync::{Arc, atomic::Ordering},
};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _flags: c_uint) -> u32 {
    // SAFETY: same contract as this function's.
    unsafe { create("cuStreamCreate", stream) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut u64,
    _flags: c_uint,
    _priority: c_int,
) -> u32 {
    // SAFETY: same contract as this function's.
    unsafe { create("cuStreamCreateWithPriority", stream) }
}

/// # Safety
/// `stream` must be null or writable.
unsafe fn create(symbol: &str, stream: *mut u64) -> u32 {
    in_context(symbol, |state| {
        let handle = state.new_handle();
        let new = Stream { held: state.all_held, ..Stream::default() };
        state.streams.insert(handle, new);
        // SAFETY: guaranteed by the caller.
        unsafe { put(stream, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: u64) -> u32 {
    let waited = drained("cuStreamDestroy_v2", |state| {
        let known = stream != 0 && state.streams.contains_key(&stream);
        if known { Ok(vec![stream]) } else { Err(code::INVALID_HANDLE) }
    });
    if waited != 0 {
        return waited;
    }
    in_context("cuStreamDestroy_v2", |state| {
        state.streams.remove(&stream).map(|_| ()).ok_or(code::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: u64) -> u32 {
    drained("cuStreamSynchronize", |state| {
        if state.streams.contains_key(&stream) {
            Ok(vec![stream])
        } else {
            Err(code::INVALID_HANDLE)
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> u32 {
    drained("cuCtxSynchronize", |state| Ok(state.streams.keys().copied().collect()))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> u32 {
    in_context("cuStreamWaitEvent", |state| {
        let event = Arc::clone(state.events.get(&event).ok_or(code::INVALID_HANDLE)?);
        let turn = event.recorded.load(Ordering::Relaxed);
        state.enqueue(stream, Work::Wait { event, turn })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut u64, _flags: c_uint) -> u32 {
    in_context("cuEventCreate", |state| {
        let handle = state.new_handle();
        state.events.insert(handle, Arc::new(Event::default()));
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(event, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: u64, stream: u64) -> u32 {
    in_context("cuEventRecord", |state| {
        let event = Arc::clone(state.events.get(&event).ok_or(code::INVALID_HANDLE)?);
        let turn = event.recorded.fetch_add(1, Ordering::Relaxed) + 1;
        state.enqueue(stream, Work::Record { event, turn })
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: u64) -> u32 {
    in_context("cuEventQuery", |state| {
        let event = state.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        if event.is_done() { Ok(()) } else { Err(code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: u64) -> u32 {
    drained("cuEventSynchronize", |state| {
        let event = state.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        let all = if event.is_done() { vec![] } else { state.streams.keys().copied().collect() };
        Ok(all)
    })
}

/// The driver's header has had both names.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime(ms: *mut f32, from: u64, to: u64) -> u32 {
    // SAFETY: same contract as this function's.
    unsafe { cuEventElapsedTime_v2(ms, from, to) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(ms: *mut f32, from: u64, to: u64) -> u32 {
    in_context("cuEventElapsedTime_v2", |state| {
        let at = |event: &u64| Some(*state.events.get(event)?.at.lock());
        let times = (at(&from).ok_or(code::INVALID_HANDLE)?, at(&to).ok_or(code::INVALID_HANDLE)?);
        let (Some(from), Some(to)) = times else { return Err(code::NOT_READY) };
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(ms, to.saturating_duration_since(from).as_secs_f32() * 1e3) }
    })
}

/// Work that waits for the event continues when the event is reached.
#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: u64) -> u32 {
    in_context("cuEventDestroy_v2", |state| {
        state.events.remove(&event).map(|_| ()).ok_or(code::INVALID_HANDLE)
    })
}
