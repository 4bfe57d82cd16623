//! The driver's calls for CUDA IPC.

use super::put;
use crate::{
    memory::{Mapping, Ticket},
    state::{code, in_context, wait_for},
};
use std::ffi::c_uint;

/// An IPC handle, of which 24 bytes are used.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle {
    pid: u32,
    fd: u32,
    inode: u64,
    bytes: u64,
    rest: [u64; 5],
}

const _: () = assert!(size_of::<Handle>() == 64, "as long as the driver's");

#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut Handle, address: u64) -> u32 {
    in_context("cuIpcGetMemHandle", |state| {
        let mapping = state.allocations.get(&address).ok_or(code::INVALID_VALUE)?;
        if state.vmm.contains(&address) {
            return Err(code::INVALID_VALUE);
        }
        let Ticket { pid, fd, inode, bytes } = mapping.ticket().map_err(|_| code::INVALID_VALUE)?;
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(handle, Handle { pid, fd, inode, bytes, rest: [0; 5] }) }
    })
}

/// If the memory can't be opened, returns the driver's error for another PID namespace.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    address: *mut u64,
    handle: Handle,
    _flags: c_uint,
) -> u32 {
    in_context("cuIpcOpenMemHandle_v2", |state| {
        let Handle { pid, fd, inode, bytes, .. } = handle;
        let mapping =
            Mapping::open(&Ticket { pid, fd, inode, bytes }).map_err(|_| code::INVALID_CONTEXT)?;
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(address, mapping.base())? };
        state.imports.insert(mapping.base(), mapping);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: u64) -> u32 {
    let streams = crate::state::state().streams.keys().copied().collect::<Vec<_>>();
    wait_for(&streams);
    in_context("cuIpcCloseMemHandle", |state| {
        state.imports.remove(&address).map(|_| ()).ok_or(code::INVALID_VALUE)
    })
}
