//! Page accounting on a CUDA device: the kernels of `kernels/cuda/`, each as a method that only
//! enqueues, and the memory they work on.
//!
//! A [`Device`] retains its GPU's primary context (in an engine's process that is the engine's own)
//! and works on a stream of its own, of the lowest priority. It decides nothing: what the answers
//! mean is in [`mod@crate::reference`], and when a snapshot is sound is its caller's affair.
//!
//! Where there is no CUDA, [`missing`] says so; nothing here panics for the lack of it.

mod account;
mod driver;
mod ipc;
mod launch;
mod memory;
mod rows;

pub use account::{Classified, KvBuffer, KvBuffers, Marks, PageSet, Table};
pub use driver::{Missing, missing};
pub use ipc::{Exported, Imported};
pub use launch::Shape;
pub use memory::{Buffer, Pinned, Plain, Registered, Slice};
pub use rows::{LiveRows, Pool};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUevent, CUevent_flags_enum, CUfunction, CUmodule, CUresult, CUstream,
    CUstream_flags_enum, CUuuid,
};
use driver::Current;
use rows::PAGE_SHIFT_MAX;
use std::{ffi::CStr, ptr, sync::Arc, time::Duration};

/// Threads that a device runs in step.
const WARP: u32 = 32;
/// Without it, an event takes the device's time, which costs.
const UNTIMED: u32 = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Missing(#[from] Missing),
    #[error("{call} answered {name} ({code})")]
    Driver { call: &'static str, code: u32, name: &'static str },
    #[error("the kernel image is no whole fatbin: build it with kernels/cuda/build")]
    Image,
    #[error("the kernel image lacks {0}: build it anew with kernels/cuda/build")]
    Kernel(&'static str),
    #[error("{what}: {has} given, {limit} is the limit")]
    Size { what: &'static str, has: u64, limit: u64 },
    #[error("{0} is not aligned to what it holds")]
    Misaligned(&'static str),
    #[error("live rows overlap in the page list: lay them out first")]
    Layout,
    #[error("the copy before is still under way: ask again when it is done")]
    InFlight,
    #[error("{0:#x} is mapped from handles, which CUDA IPC can't share: audit in the engine")]
    VmmBacked(u64),
}

impl Error {
    /// Is it the driver's answer of this number?
    fn is(&self, wanted: CUresult) -> bool {
        matches!(self, Error::Driver { code, .. } if *code == wanted as u32)
    }
}

/// `Err` where a size is over its limit.
fn at_most(what: &'static str, has: u64, limit: u64) -> Result<(), Error> {
    if has > limit { Err(Error::Size { what, has, limit }) } else { Ok(()) }
}

/// One GPU with the accounting kernels loaded, and a stream of its own.
#[derive(Debug)]
pub struct Device {
    shared: Arc<Shared>,
    shape: Shape,
}

/// What outlives a [`Device`] as long as memory or a mark of it does.
#[derive(Debug)]
struct Shared {
    ordinal: u32,
    device: CUdevice,
    context: CUcontext,
    /// Null until it is made; so is the module.
    stream: CUstream,
    module: CUmodule,
    kernels: [CUfunction; launch::KERNELS.len()],
}

// SAFETY: the driver's handles may be used from any thread; `Shared` itself never changes after
// `Device::open`, and every call makes its context current on the thread it is on.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn enter(&self) -> Result<Current, Error> {
        // SAFETY: the context is retained until `self` is dropped, and no guard outlives `self`.
        unsafe { Current::enter(self.context) }
    }

    fn synchronize(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: the stream is ours and exists.
        unsafe { driver::cuStreamSynchronize(self.stream) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Errors have no one to go to: a driver that is shutting down refuses all of this.
        if let Ok(_current) = self.enter() {
            // SAFETY: ours, made in `open`; nothing that uses them is left, `self` being the last.
            unsafe {
                if !self.stream.is_null() {
                    let _ = driver::cuStreamSynchronize(self.stream);
                    let _ = driver::cuStreamDestroy_v2(self.stream);
                }
                if !self.module.is_null() {
                    let _ = driver::cuModuleUnload(self.module);
                }
            }
        }
        // SAFETY: retained once, released once.
        let _ = unsafe { driver::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Device {
    /// Takes the GPU of this CUDA ordinal, with the kernels from the fatbin `image`.
    pub fn open(ordinal: u32, image: &[u8]) -> Result<Device, Error> {
        if let Some(missing) = missing() {
            return Err(missing.into());
        }
        check_fatbin(image)?;
        let wanted = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: pointers to locals; the device is the one the driver gave.
        unsafe {
            driver::cuDeviceGet(&raw mut device, wanted)?;
            driver::cuDevicePrimaryCtxRetain(&raw mut context, device)?;
        }
        // From here on `Drop` gives back what was taken.
        let mut shared = Shared {
            ordinal,
            device,
            context,
            stream: ptr::null_mut(),
            module: ptr::null_mut(),
            kernels: [ptr::null_mut(); launch::KERNELS.len()],
        };
        let current = shared.enter()?;
        let (mut least, mut greatest) = (0, 0);
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: pointers into locals; the image was seen to be as long as it says.
        unsafe {
            driver::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest)?;
            driver::cuStreamCreateWithPriority(&raw mut shared.stream, flags, least)?;
            driver::cuModuleLoadData(&raw mut shared.module, image.as_ptr().cast())?;
        }
        for (name, kernel) in launch::KERNELS.iter().zip(&mut shared.kernels) {
            *kernel = function(shared.module, name)?;
        }
        drop(current);
        Ok(Device { shared: Arc::new(shared), shape: Shape::default() })
    }

    /// The CUDA ordinal it was opened by; NVML counts differently.
    pub fn ordinal(&self) -> u32 {
        self.shared.ordinal
    }

    /// The GPU's UUID, the name it shares with NVML.
    pub fn uuid(&self) -> Result<[u8; 16], Error> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: a pointer to a local, and the device that `open` got.
        unsafe { driver::cuDeviceGetUuid_v2(&raw mut uuid, self.shared.device)? };
        Ok(uuid.bytes.map(i8::cast_unsigned))
    }

    /// The stream that everything here is enqueued on, as the driver's handle.
    pub fn stream(&self) -> u64 {
        self.shared.stream as u64
    }

    /// How launches are cut from here on. No answer depends on it.
    pub fn set_shape(&mut self, shape: Shape) {
        self.shape = shape;
    }

    /// Makes all that is enqueued here later wait for what `stream` was given until now.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's primary context, or 0 for its default stream.
    pub unsafe fn wait_for(&self, stream: u64) -> Result<(), Error> {
        let _current = self.shared.enter()?;
        // SAFETY: the caller's stream exists. An event made for one wait is never recorded anew by
        // another thread in between; the driver keeps it until the wait is over.
        unsafe {
            let mark = Mark::on(&self.shared, stream as CUstream, UNTIMED)?;
            driver::cuStreamWaitEvent(self.shared.stream, mark.event, 0)
        }
    }

    /// Marks this point of the stream's work.
    pub fn record(&self) -> Result<Mark, Error> {
        // SAFETY: the stream is ours and exists.
        unsafe { Mark::on(&self.shared, self.shared.stream, UNTIMED) }
    }

    /// As [`Device::record`], and the device notes the time: for measuring.
    pub fn record_timed(&self) -> Result<Mark, Error> {
        // SAFETY: the stream is ours and exists.
        unsafe { Mark::on(&self.shared, self.shared.stream, 0) }
    }

    /// Waits until everything enqueued is done, and shows its errors.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.shared.synchronize()
    }

    /// Has `stream` write `value` to `address`, in the order of its work.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's primary context or 0. `address` is the device address of
    /// 8 aligned bytes which stay there until the write is done.
    pub unsafe fn write_value(&self, stream: u64, address: u64, value: u64) -> Result<(), Error> {
        let _current = self.shared.enter()?;
        // SAFETY: the caller's promise.
        unsafe { driver::cuStreamWriteValue64_v2(stream as CUstream, address, value, 0) }
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Mark {
    shared: Arc<Shared>,
    event: CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above; asking changes nothing.
unsafe impl Sync for Mark {}

impl Mark {
    /// # Safety
    /// The stream exists, in the context of `shared`.
    unsafe fn on(shared: &Arc<Shared>, stream: CUstream, flags: u32) -> Result<Mark, Error> {
        let _current = shared.enter()?;
        let mut event = ptr::null_mut();
        // SAFETY: a pointer to a local; the caller's stream exists.
        unsafe {
            driver::cuEventCreate(&raw mut event, flags)?;
            let mark = Mark { shared: Arc::clone(shared), event };
            driver::cuEventRecord(event, stream)?;
            Ok(mark)
        }
    }

    /// Is everything up to here done? Shows the errors of that work.
    pub fn done(&self) -> Result<bool, Error> {
        let _current = self.shared.enter()?;
        // SAFETY: the event exists until `self` is dropped.
        match unsafe { driver::cuEventQuery(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.is(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The device's time from `earlier` to here. Both are timed, and done.
    pub fn since(&self, earlier: &Mark) -> Result<Duration, Error> {
        let _current = self.shared.enter()?;
        let mut ms = 0.0;
        // SAFETY: a pointer to a local; both events exist.
        unsafe { driver::cuEventElapsedTime_v2(&raw mut ms, earlier.event, self.event)? };
        Ok(Duration::try_from_secs_f32(ms / 1e3).unwrap_or_default())
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Ok(_current) = self.shared.enter() {
            // SAFETY: made once, destroyed once; the driver ends it when the work is through.
            let _ = unsafe { driver::cuEventDestroy_v2(self.event) };
        }
    }
}

/// A fatbin says how long it is; the driver believes it, so it must be true.
fn check_fatbin(image: &[u8]) -> Result<(), Error> {
    const MAGIC: u32 = 0xBA55_ED50;
    let field = |at: usize, bytes: usize| {
        let bytes = image.get(at..at + bytes)?;
        Some(bytes.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)))
    };
    let read = || Some((field(0, 4)?, field(6, 2)?, field(8, 8)?));
    let (magic, header, body) = read().ok_or(Error::Image)?;
    let whole = header.checked_add(body).is_some_and(|bytes| bytes <= image.len() as u64);
    if magic == u64::from(MAGIC) && whole { Ok(()) } else { Err(Error::Image) }
}

fn function(module: CUmodule, name: &'static CStr) -> Result<CUfunction, Error> {
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded, and the name ends with a zero.
    match unsafe { driver::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) } {
        Ok(()) => Ok(function),
        Err(error) if error.is(CUresult::CUDA_ERROR_NOT_FOUND) => {
            Err(Error::Kernel(name.to_str().expect("kernel names are ASCII")))
        }
        Err(error) => Err(error),
    }
}
