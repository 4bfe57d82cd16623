//! Calls the CUDA driver for the crate, and tells everyone whether that is possible ([`missing`]).
//!
//! The functions have the driver's names. No other module calls the driver. The crate `cudarc`
//! loads the driver's library at run time, and panics if the library or a symbol in it is absent:
//! so [`missing`] looks up all symbols before the first call.

use super::Error;
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUlaunchConfig, CUmodule,
    CUresult, CUstream,
};
use std::{
    ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void},
    ptr,
    sync::OnceLock,
};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MissingReason {
    #[error("no CUDA driver: there is no libcuda on the library path")]
    Library,
    #[error("the CUDA driver lacks {0}: a newer driver is needed")]
    Symbol(&'static str),
    #[error("libcuda is the toolkit's stub: put the driver's own first on the library path")]
    Stub,
    #[error("the CUDA driver shows no device: look at CUDA_VISIBLE_DEVICES")]
    Device,
    #[error("the CUDA driver does not start: {0}")]
    Refused(String),
}

/// `None` if CUDA can be used. Only the first call looks; later ones return the same answer.
pub fn missing() -> Option<MissingReason> {
    static ANSWER: OnceLock<Option<MissingReason>> = OnceLock::new();
    ANSWER.get_or_init(|| probe().err()).clone()
}

fn probe() -> Result<(), MissingReason> {
    // SAFETY: opening the driver's library runs its constructors, as in any CUDA program.
    if !unsafe { sys::is_culib_present() } {
        return Err(MissingReason::Library);
    }
    // SAFETY: the library was just opened. `culib` tries the same file names in the same order.
    let library = unsafe { sys::culib() };
    for &symbol in SYMBOLS {
        // SAFETY: the symbol is looked up, not called.
        if unsafe { library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_err() {
            return Err(MissingReason::Symbol(symbol));
        }
    }
    // SAFETY: all symbols are there, and cuInit may be called any number of times.
    unsafe { cuInit(0) }.map_err(missing_from)?;
    let mut devices = 0;
    // SAFETY: the driver is initialised, and the pointer refers to a local.
    unsafe { cuDeviceGetCount(&raw mut devices) }.map_err(missing_from)?;
    if devices > 0 { Ok(()) } else { Err(MissingReason::Device) }
}

fn missing_from(error: Error) -> MissingReason {
    match error {
        error if error.is_driver_error(CUresult::CUDA_ERROR_STUB_LIBRARY) => MissingReason::Stub,
        error if error.is_driver_error(CUresult::CUDA_ERROR_NO_DEVICE) => MissingReason::Device,
        error => MissingReason::Refused(error.to_string()),
    }
}

fn check(call: &'static str, result: CUresult) -> Result<(), Error> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name: *const c_char = ptr::null();
    // SAFETY: a code's name is a static string of the driver, or null for an unknown code.
    let name = unsafe {
        let is_known = sys::cuGetErrorName(result, &raw mut name) == CUresult::CUDA_SUCCESS;
        if is_known && !name.is_null() { CStr::from_ptr(name).to_str().ok() } else { None }
    };
    Err(Error::Driver { call, code: result as u32, name: name.unwrap_or("an unknown error") })
}

macro_rules! driver_calls {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        /// Every symbol that this crate calls.
        const SYMBOLS: &[&str] = &["cuGetErrorName", $(stringify!($name)),*];

        $(
            #[expect(non_snake_case, reason = "the driver's own names")]
            pub(super) unsafe fn $name($($arg: $type),*) -> Result<(), Error> {
                // SAFETY: the caller keeps the driver's contract; `missing` has found the symbol.
                check(stringify!($name), unsafe { sys::$name($($arg),*) })
            }
        )*
    };
}

driver_calls! {
    cuInit(flags: c_uint);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxSetCurrent(context: CUcontext);
    cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    cuEventElapsedTime_v2(ms: *mut f32, from: CUevent, to: CUevent);
    cuEventDestroy_v2(event: CUevent);
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(address: CUdeviceptr);
    cuMemsetD8Async(address: CUdeviceptr, value: c_uchar, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuLaunchKernelEx(
        config: *const CUlaunchConfig, function: CUfunction, params: *mut *mut c_void,
        extra: *mut *mut c_void
    );
}

/// While it lives, a context is current on the thread that made it. On drop, the previous one is
/// current again: in an engine's process, thread and context belong to the engine.
#[derive(Debug)]
pub(super) struct CurrentContext {
    /// `None` if the context was already current.
    previous: Option<CUcontext>,
}

impl CurrentContext {
    /// # Safety
    /// The context must exist as long as the returned value lives.
    pub(super) unsafe fn enter(context: CUcontext) -> Result<CurrentContext, Error> {
        let mut previous = ptr::null_mut();
        // SAFETY: the pointer refers to a local.
        unsafe { cuCtxGetCurrent(&raw mut previous)? };
        if previous == context {
            return Ok(CurrentContext { previous: None });
        }
        // SAFETY: the caller guarantees that the context exists.
        unsafe { cuCtxSetCurrent(context)? };
        Ok(CurrentContext { previous: Some(previous) })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        let Some(previous) = self.previous else { return };
        // SAFETY: the thread had this context before, and this crate doesn't destroy the context.
        // An error is ignored, because the next call on the thread gets the same error.
        let _ = unsafe { cuCtxSetCurrent(previous) };
    }
}
