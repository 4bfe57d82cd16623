//! The driver's functions, by their own names: devices, contexts, modules, launches, error names.

mod memory;
mod stream;

use crate::state::{
    Function, after_init, call, code, context_of, current, in_context, set_current,
};
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
};

/// The driver's `CUlaunchConfig`, up to the last field that this driver reads.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: u64,
}

/// Stores a result where the caller wants it.
///
/// # Safety
/// `to` must be null or writable.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), u32> {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> u32 {
    call("cuInit", |state| {
        if state.devices == 0 {
            return Err(code::NO_DEVICE);
        }
        state.initialized = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    // SAFETY: guaranteed by the driver's contract.
    after_init("cuDeviceGetCount", |state| unsafe { put(count, state.devices) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> u32 {
    after_init("cuDeviceGet", |state| {
        state.check_device(ordinal)?;
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(device, ordinal) }
    })
}

/// Returns values of an H200 for the attributes that programs read first.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) -> u32 {
    after_init("cuDeviceGetAttribute", |state| {
        state.check_device(device)?;
        let answer = match which {
            16 => 132, // Multiprocessors.
            75 => 9,   // Compute capability, major; its minor is 0.
            _ => 0,
        };
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(value, answer) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) -> u32 {
    after_init("cuDevicePrimaryCtxRetain", |state| {
        state.check_device(device)?;
        *state.contexts.entry(device).or_default() += 1;
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(context, context_of(device)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> u32 {
    after_init("cuDevicePrimaryCtxRelease_v2", |state| match state.contexts.get_mut(&device) {
        Some(retained) if *retained > 0 => {
            *retained -= 1;
            Ok(())
        }
        _ => Err(code::INVALID_CONTEXT),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut u64) -> u32 {
    // SAFETY: guaranteed by the driver's contract.
    after_init("cuCtxGetCurrent", |_| unsafe { put(context, current()) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: u64) -> u32 {
    after_init("cuCtxSetCurrent", |state| {
        if context != 0 && !state.is_context(context) {
            return Err(code::INVALID_CONTEXT);
        }
        set_current(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> u32 {
    in_context("cuCtxGetStreamPriorityRange", |_| {
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(least, 0).and(put(greatest, -5)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const u32) -> u32 {
    in_context("cuModuleLoadData", |state| {
        // SAFETY: by the driver's contract, an image is longer than its magic number.
        if image.is_null() || unsafe { image.read_unaligned() } != crate::fake::FATBIN_MAGIC {
            return Err(code::INVALID_IMAGE);
        }
        let handle = state.new_handle();
        state.modules.insert(handle, state.kernels);
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(module, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> u32 {
    in_context("cuModuleUnload", |state| {
        state.modules.remove(&module).map(|_| ()).ok_or(code::INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut u64,
    module: u64,
    name: *const c_char,
) -> u32 {
    in_context("cuModuleGetFunction", |state| {
        let kernels = *state.modules.get(&module).ok_or(code::INVALID_HANDLE)?;
        // SAFETY: by the driver's contract, the name is NUL-terminated.
        let name = unsafe { CStr::from_ptr(name) }.to_owned();
        let kernel = kernels.find(&name).ok_or(code::NOT_FOUND)?;
        let handle = state.new_handle();
        state.functions.insert(handle, Function { kernels, kernel, name });
        // SAFETY: guaranteed by the driver's contract.
        unsafe { put(function, handle) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    function: u64,
    params: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    in_context("cuLaunchKernelEx", |state| {
        // SAFETY: guaranteed by the driver's contract.
        let config = unsafe { &*config };
        let function = state.functions.get(&function).ok_or(code::INVALID_HANDLE)?.clone();
        let [grid, 1, 1] = config.grid else { return Err(code::INVALID_VALUE) };
        let [threads @ 1..=1024, 1, 1] = config.block else { return Err(code::INVALID_VALUE) };
        if grid == 0 || grid > i32::MAX.cast_unsigned() || config.shared_bytes > 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: by the driver's contract, there is an argument for each parameter.
        let launch = unsafe { function.kernels.bind(function.kernel, params, grid, threads) };
        state.launch(config.stream, function.name.to_string_lossy().into_owned(), launch)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: u64,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let config = LaunchConfig { grid, block, shared_bytes, stream };
    // SAFETY: same contract as this function's.
    unsafe { cuLaunchKernelEx(&raw const config, function, params, extra) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(result: u32, name: *mut *const c_char) -> u32 {
    let known = match result {
        0 => c"CUDA_SUCCESS",
        code::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        code::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        code::NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
        code::NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        code::INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        code::INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        code::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        code::INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        code::NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        code::NOT_READY => c"CUDA_ERROR_NOT_READY",
        code::HOST_MEMORY_ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        code::HOST_MEMORY_NOT_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        _ => {
            // SAFETY: guaranteed by the driver's contract.
            let answer = unsafe { put(name, ptr::null()) };
            return answer.err().unwrap_or(code::INVALID_VALUE);
        }
    };
    // SAFETY: guaranteed by the driver's contract.
    unsafe { put(name, known.as_ptr()) }.err().unwrap_or(0)
}

/// Returns the error's name, because no test needs the description.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(result: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: same contract as this function's.
    unsafe { cuGetErrorName(result, text) }
}
