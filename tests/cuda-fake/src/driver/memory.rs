//! The driver's calls about memory: device memory, page-locked host memory, copies.

use super::put;
use crate::{
    memory::Mapping,
    state::{Answer, State, code, drained, in_context, wait_for},
    stream::Work,
};
use std::ffi::{c_uint, c_void};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> u32 {
    in_context("cuMemAlloc_v2", |state| {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        if state.memory_used().saturating_add(bytes as u64) > state.memory_max {
            return Err(code::OUT_OF_MEMORY);
        }
        let mapping = Mapping::new(bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(address, mapping.base())? };
        state.allocations.insert(mapping.base(), mapping);
        Ok(())
    })
}

/// Waits for all work, as the real driver does, because some of it may use the memory.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> u32 {
    let waited = drained("cuMemFree_v2", |state| {
        let known = state.allocations.contains_key(&address);
        if known { Ok(state.streams.keys().copied().collect()) } else { Err(code::INVALID_VALUE) }
    });
    if waited != 0 {
        return waited;
    }
    in_context("cuMemFree_v2", |state| {
        let mapping = state.allocations.remove(&address).ok_or(code::INVALID_VALUE)?;
        assert!(
            mapping.is_sound(),
            "something wrote behind {} bytes of device memory",
            mapping.bytes()
        );
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    in_context("cuMemGetInfo_v2", |state| {
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let left = state.memory_max.saturating_sub(state.memory_used());
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(free, size(left)).and(put(total, size(state.memory_max))) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: u64, bytes: usize, _flags: c_uint) -> u32 {
    in_context("cuMemHostRegister_v2", |state| {
        if address == 0 || bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let end = address + bytes as u64;
        let overlaps =
            |(&base, &length): (&u64, &usize)| base < end && base + length as u64 > address;
        if state.registered.iter().any(overlaps) {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        state.registered.insert(address, bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: u64) -> u32 {
    in_context("cuMemHostUnregister", |state| {
        let known = state.registered.remove(&address);
        known.map(|_| ()).ok_or(code::HOST_MEMORY_NOT_REGISTERED)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemsetD8Async", |state| fill(state, address, vec![value; bytes], stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: u64) -> u32 {
    in_context("cuMemsetD32Async", |state| {
        fill(state, address, value.to_le_bytes().repeat(count), stream)
    })
}

fn fill(state: &mut State, to: u64, bytes: Vec<u8>, stream: u64) -> Answer {
    state.check_range(to, bytes.len())?;
    state.enqueue(stream, Work::Write { to, bytes })
}

/// Reads page-locked memory when the stream reaches the copy; reads other memory at once.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: u64,
) -> u32 {
    in_context("cuMemcpyHtoDAsync_v2", |state| {
        state.check_range(to, bytes)?;
        if state.is_registered(from as u64, bytes) {
            return state.enqueue(stream, Work::Copy { to, from: from as u64, bytes });
        }
        // SAFETY: the driver's contract guarantees that many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
        state.enqueue(stream, Work::Write { to, bytes })
    })
}

/// Writes page-locked memory when the stream reaches the copy; for other memory the call waits, as
/// the real driver's does.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: u64,
) -> u32 {
    let mut waits = false;
    let answer = in_context("cuMemcpyDtoHAsync_v2", |state| {
        state.check_range(from, bytes)?;
        waits = !state.is_registered(to as u64, bytes);
        state.enqueue(stream, Work::Copy { to: to as u64, from, bytes })
    });
    if answer == 0 && waits {
        wait_for(&[stream]);
    }
    answer
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) -> u32 {
    in_context("cuMemcpyDtoDAsync_v2", |state| {
        state.check_range(from, bytes)?;
        state.check_range(to, bytes)?;
        state.enqueue(stream, Work::Copy { to, from, bytes })
    })
}
