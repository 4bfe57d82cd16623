//! MIG: a GPU's MIG mode, its slices, and the GPU of a slice.

use std::ffi::c_uint;

use crate::{
    abi::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Out},
    export::{export, export_device},
    machine::{Place, works},
};

/// Slices per GPU, at most, on boards with MIG.
const SLICES_MAX: u32 = 7;

export_device! {
    nvmlDeviceGetMigMode(current: Out<c_uint>, pending: Out<c_uint>) |gpu| {
        let mode = u32::from(gpu.mig.ok_or(NOT_SUPPORTED)?);
        current.put(mode)?;
        pending.put(mode)
    };
    nvmlDeviceGetMaxMigDeviceCount(count: Out<c_uint>) |gpu| {
        count.put(if gpu.mig.is_some() { SLICES_MAX } else { 0 })
    };
}

export! {
    nvmlDeviceGetMigDeviceHandleByIndex(
        device: usize, index: c_uint, slice: Out<usize>
    ) |machine| {
        let gpu = machine.device(device)?;
        works("nvmlDeviceGetMigDeviceHandleByIndex", &gpu)?;
        match gpu.mig {
            None => Err(NOT_SUPPORTED),
            _ if index >= SLICES_MAX => Err(INVALID_ARGUMENT),
            Some(true) if gpu.slices.contains_key(&index) => {
                let place = Place { slice: Some(index), ..Place::from_handle(device)? };
                slice.put(place.handle())
            }
            Some(_) => Err(NOT_FOUND),
        }
    };
    nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        device: usize, parent: Out<usize>
    ) |machine| {
        works("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", &machine.device(device)?)?;
        match Place::from_handle(device)? {
            Place { slice: None, .. } => Err(INVALID_ARGUMENT),
            place => parent.put(Place { slice: None, ..place }.handle()),
        }
    };
    nvmlDeviceIsMigDeviceHandle(device: usize, is_slice: Out<c_uint>) |machine| {
        works("nvmlDeviceIsMigDeviceHandle", &machine.device(device)?)?;
        is_slice.put(u32::from(Place::from_handle(device)?.slice.is_some()))
    };
}
