//! Calls about events: event sets, registrations, and waits that block until an event happens.

use std::{
    ffi::{c_uint, c_ulonglong},
    time::Duration,
};

use nvml_wrapper_sys::bindings as sys;

use crate::{
    abi::{Answer, GPU_IS_LOST, INVALID_ARGUMENT, NOT_SUPPORTED, Out},
    event_sets::EventSet,
    export::export,
    machine::{self, Machine, Place, works},
};

/// NVML's value for no MIG instance.
const NO_INSTANCE: u32 = u32::MAX;

export! {
    nvmlEventSetCreate(set: Out<usize>) |machine| {
        let sets = &mut machine.sets;
        sets.made += 1;
        sets.sets.insert(sets.made, EventSet::default());
        set.put(sets.made)
    };
    nvmlEventSetFree(set: usize) |machine| {
        machine.sets.sets.remove(&set).map(drop).ok_or(INVALID_ARGUMENT)
    };
    nvmlDeviceRegisterEvents(device: usize, types: c_ulonglong, set: usize) |machine| {
        let gpu = machine.device(device)?;
        works("nvmlDeviceRegisterEvents", &gpu)?;
        if types & !gpu.event_types != 0 {
            return Err(NOT_SUPPORTED);
        }
        let set = machine.sets.sets.get_mut(&set).ok_or(INVALID_ARGUMENT)?;
        *set.registered.entry(Place::from_handle(device)?.gpu).or_default() |= types;
        Ok(())
    };
}

/// Waits for an event of the set.
// SAFETY: the name is NVML's, and no other library in a process that loads this one has it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlEventSetWait_v2(
    set: usize,
    data: Out<sys::nvmlEventData_t>,
    limit_ms: c_uint,
) -> u32 {
    let limit = Duration::from_millis(u64::from(limit_ms));
    machine::wait("nvmlEventSetWait_v2", limit, |machine| next(machine, set, &data))
}

fn next(machine: &mut Machine, set: usize, data: &Out<sys::nvmlEventData_t>) -> Option<Answer> {
    let Some(set) = machine.sets.sets.get_mut(&set) else { return Some(Err(INVALID_ARGUMENT)) };
    if let Some((gpu, kind, number)) = set.waiting.pop_front() {
        let handle = Place { gpu, slice: None }.handle();
        return Some(data.put(sys::nvmlEventData_t {
            device: std::ptr::without_provenance_mut(handle),
            eventType: kind,
            eventData: number,
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        }));
    }
    let lost = |index| machine.state.gpus.get(index).is_some_and(|gpu| gpu.lost);
    set.registered.keys().any(lost).then_some(Err(GPU_IS_LOST))
}
