//! Calls about the library, the driver, and the list of devices.

use std::ffi::{c_char, c_int, c_uint};

use crate::{
    abi::{Answer, INVALID_ARGUMENT, NOT_FOUND, Out},
    export::export,
    machine::{Machine, Place, works},
    state::Gpu,
};

export! {
    nvmlInit_v2() |machine| {
        machine.initialise();
        Ok(())
    };
    nvmlInitWithFlags(_flags: c_uint) |machine| {
        machine.initialise();
        Ok(())
    };
    nvmlShutdown() |machine| {
        machine.shut_down();
        Ok(())
    };
    nvmlSystemGetDriverVersion(version: Out<c_char>, length: c_uint) |machine| {
        version.text(length, &machine.state.driver_version)
    };
    nvmlSystemGetNVMLVersion(version: Out<c_char>, length: c_uint) |machine| {
        version.text(length, &machine.state.nvml_version)
    };
    nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) |machine| {
        version.put(machine.state.cuda_version)
    };
    nvmlDeviceGetCount_v2(count: Out<c_uint>) |machine| {
        count.put(u32::try_from(machine.state.listed().count()).expect("as many as a test writes"))
    };
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: Out<usize>) |machine| {
        let (gpu, state) = machine.state.listed().nth(index as usize).ok_or(INVALID_ARGUMENT)?;
        works("nvmlDeviceGetHandleByIndex_v2", state)?;
        device.put(Place { gpu, slice: None }.handle())
    };
    nvmlDeviceGetHandleByUUID(uuid: Out<c_char>, device: Out<usize>) |machine| {
        let wanted = uuid.read_text(TEXT_BYTES_MAX)?;
        find("nvmlDeviceGetHandleByUUID", machine, &device, |gpu| gpu.uuid == wanted)
    };
    nvmlDeviceGetHandleByPciBusId_v2(address: Out<c_char>, device: Out<usize>) |machine| {
        let wanted = address.read_text(TEXT_BYTES_MAX)?;
        let call = "nvmlDeviceGetHandleByPciBusId_v2";
        find(call, machine, &device, |gpu| gpu.pci_address.eq_ignore_ascii_case(&wanted))
    };
}

/// Bytes of a UUID or a PCI address, at most; NVML's own bound.
const TEXT_BYTES_MAX: usize = 96;

fn find(
    call: &str,
    machine: &Machine,
    device: &Out<usize>,
    is_it: impl Fn(&Gpu) -> bool,
) -> Answer {
    for (index, gpu) in machine.state.listed() {
        let slices = gpu.slices.iter().filter(|_| gpu.mig == Some(true));
        let slices = slices.map(|(&at, slice)| (Some(at), slice.device(gpu)));
        for (slice, found) in [(None, gpu.clone())].into_iter().chain(slices) {
            if is_it(&found) {
                works(call, &found)?;
                return device.put(Place { gpu: index, slice }.handle());
            }
        }
    }
    Err(NOT_FOUND)
}

/// Returns the text of a return code. Works before initialisation, so it skips the entry check.
// SAFETY: the name is NVML's, and no other library in a process that loads this one has it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlErrorString(result: u32) -> *const c_char {
    let words = match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    words.as_ptr()
}
