//! Opens a GPU for audits of KV pages: loads the kernels, launches them, and manages their memory.
//!
//! The kernels' source is in `kernels/cuda/`; [`mod@crate::reference`] defines what they compute.
//! Each kernel is a method of [`Device`] that only enqueues its work. Without CUDA, functions
//! return errors and don't panic.
//!
//! A [`Device`] uses its GPU's primary context, as the engine in its process does. Its stream has
//! the lowest priority, so that the engine's work comes first.

mod account;
mod driver;
mod launch;
mod memory;
mod rows;

pub use account::{ClassifyResult, DeviceMarks, DevicePageSet, DeviceTable, KvBuffer, KvBuffers};
pub use driver::{MissingReason, missing};
pub use launch::LaunchShape;
pub use memory::{DeviceBuffer, DeviceSlice, DeviceValue, PinnedBuffer};
pub use rows::{LiveRows, PoolSize};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUevent, CUevent_flags_enum, CUfunction, CUmodule, CUresult, CUstream,
    CUstream_flags_enum,
};
use driver::CurrentContext;
use rows::PAGE_SHIFT_MAX;
use std::{ffi::CStr, ptr, sync::Arc, time::Duration};

/// Number of threads in a warp, which a GPU executes in lockstep; also the bits of a bitmap's word.
const WARP: u32 = 32;
/// Flag of a CUDA event without a timestamp. A timestamp costs device time.
const EVENT_WITHOUT_TIME: u32 = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Missing(#[from] MissingReason),
    #[error("{call} failed with {name} ({code})")]
    Driver { call: &'static str, code: u32, name: &'static str },
    #[error("the kernel image is not a complete fatbin: build it with kernels/cuda/build")]
    IncompleteImage,
    #[error("the kernel image lacks {0}: build it anew with kernels/cuda/build")]
    MissingKernel(&'static str),
    #[error("{what}: {has} given, {limit} is the limit")]
    TooLarge { what: &'static str, has: u64, limit: u64 },
    #[error("{0} is misaligned")]
    Misaligned(&'static str),
    #[error("live rows overlap in the page list: lay them out first")]
    OverlappingRows,
    #[error("the previous copy is still in progress: try again when it is done")]
    CopyInFlight,
}

impl Error {
    fn is_driver_error(&self, result: CUresult) -> bool {
        matches!(self, Error::Driver { code, .. } if *code == result as u32)
    }
}

fn at_most(what: &'static str, has: u64, limit: u64) -> Result<(), Error> {
    if has > limit { Err(Error::TooLarge { what, has, limit }) } else { Ok(()) }
}

#[derive(Debug)]
pub struct Device {
    gpu: Arc<OpenGpu>,
    shape: LaunchShape,
}

/// Released with the last of the [`Device`], its memory and its [`StreamPoint`]s.
#[derive(Debug)]
struct OpenGpu {
    device: CUdevice,
    context: CUcontext,
    /// Null until the stream is created.
    stream: CUstream,
    /// The loaded fatbin; null until it is loaded.
    module: CUmodule,
    /// Indexed by [`launch::Kernel`].
    kernels: [CUfunction; launch::KERNELS.len()],
}

// SAFETY: the driver's handles may be used from any thread. `OpenGpu` doesn't change after
// `Device::open`, and every call makes its context current on the calling thread.
unsafe impl Send for OpenGpu {}
// SAFETY: as above.
unsafe impl Sync for OpenGpu {}

impl OpenGpu {
    /// Makes the context current on this thread until the result is dropped.
    fn enter(&self) -> Result<CurrentContext, Error> {
        // SAFETY: the context is retained until `self` is dropped, and no guard outlives `self`.
        unsafe { CurrentContext::enter(self.context) }
    }

    fn synchronize(&self) -> Result<(), Error> {
        let _current = self.enter()?;
        // SAFETY: the stream belongs to `self` and exists.
        unsafe { driver::cuStreamSynchronize(self.stream) }
    }
}

impl Drop for OpenGpu {
    fn drop(&mut self) {
        // Errors are ignored: a driver that is shutting down refuses all of these calls.
        if let Ok(_current) = self.enter() {
            // SAFETY: created in `open`; `self` is the last owner, so nothing uses them any more.
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
    pub fn open(ordinal: u32, image: &[u8]) -> Result<Device, Error> {
        if let Some(missing) = missing() {
            return Err(missing.into());
        }
        check_fatbin(image)?;
        // The driver refuses an ordinal without a GPU, so `i32::MAX` serves for all larger numbers.
        let driver_ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the pointers refer to locals; the device was returned by the driver.
        unsafe {
            driver::cuDeviceGet(&raw mut device, driver_ordinal)?;
            driver::cuDevicePrimaryCtxRetain(&raw mut context, device)?;
        }
        // From here on, `Drop` releases everything acquired so far.
        let mut gpu = OpenGpu {
            device,
            context,
            stream: ptr::null_mut(),
            module: ptr::null_mut(),
            kernels: [ptr::null_mut(); launch::KERNELS.len()],
        };
        let current = gpu.enter()?;
        let (mut lowest_priority, mut highest_priority) = (0, 0);
        let flags = CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the pointers refer to locals; the image was checked to be as long as its header
        // says.
        unsafe {
            driver::cuCtxGetStreamPriorityRange(
                &raw mut lowest_priority,
                &raw mut highest_priority,
            )?;
            driver::cuStreamCreateWithPriority(&raw mut gpu.stream, flags, lowest_priority)?;
            driver::cuModuleLoadData(&raw mut gpu.module, image.as_ptr().cast())?;
        }
        for (name, kernel) in launch::KERNELS.iter().zip(&mut gpu.kernels) {
            *kernel = find_function(gpu.module, name)?;
        }
        drop(current);
        Ok(Device { gpu: Arc::new(gpu), shape: LaunchShape::default() })
    }

    pub fn stream(&self) -> u64 {
        self.gpu.stream as u64
    }

    /// Sets the number of blocks and threads of later launches. Results don't depend on the shape.
    pub fn set_shape(&mut self, shape: LaunchShape) {
        self.shape = shape;
    }

    /// Makes what is enqueued from now on wait for what is already enqueued on `stream`.
    ///
    /// # Safety
    /// `stream` must be a stream of this GPU's primary context, or 0 for its default stream.
    pub unsafe fn wait_for(&self, stream: u64) -> Result<(), Error> {
        let _current = self.gpu.enter()?;
        // SAFETY: the caller's stream exists. The event is used for this wait only, so no other
        // thread records it again; the driver keeps it until the wait is over.
        unsafe {
            let point = StreamPoint::record(&self.gpu, stream as CUstream, EVENT_WITHOUT_TIME)?;
            driver::cuStreamWaitEvent(self.gpu.stream, point.event, 0)
        }
    }

    /// Records the point in the device's stream behind all work that is enqueued so far.
    pub fn record(&self) -> Result<StreamPoint, Error> {
        // SAFETY: the stream belongs to `self` and exists.
        unsafe { StreamPoint::record(&self.gpu, self.gpu.stream, EVENT_WITHOUT_TIME) }
    }

    /// The device also stores the time when it reaches the point, for [`StreamPoint::since`].
    pub fn record_timed(&self) -> Result<StreamPoint, Error> {
        // SAFETY: the stream belongs to `self` and exists.
        unsafe { StreamPoint::record(&self.gpu, self.gpu.stream, 0) }
    }

    pub fn synchronize(&self) -> Result<(), Error> {
        self.gpu.synchronize()
    }
}

#[derive(Debug)]
pub struct StreamPoint {
    gpu: Arc<OpenGpu>,
    event: CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for StreamPoint {}
// SAFETY: as above; querying an event doesn't change it.
unsafe impl Sync for StreamPoint {}

impl StreamPoint {
    /// Records a new event on a stream. `flags` are those of the event.
    ///
    /// # Safety
    /// The stream must exist in the context of `gpu`.
    unsafe fn record(
        gpu: &Arc<OpenGpu>,
        stream: CUstream,
        flags: u32,
    ) -> Result<StreamPoint, Error> {
        let _current = gpu.enter()?;
        let mut event = ptr::null_mut();
        // SAFETY: the pointer refers to a local; the caller's stream exists.
        unsafe {
            driver::cuEventCreate(&raw mut event, flags)?;
            let point = StreamPoint { gpu: Arc::clone(gpu), event };
            driver::cuEventRecord(event, stream)?;
            Ok(point)
        }
    }

    pub fn is_done(&self) -> Result<bool, Error> {
        let _current = self.gpu.enter()?;
        // SAFETY: the event exists until `self` is dropped.
        match unsafe { driver::cuEventQuery(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.is_driver_error(CUresult::CUDA_ERROR_NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the time that the device took from `earlier` to this point. The work before both
    /// points must be done, and [`Device::record_timed`] must have recorded both.
    pub fn since(&self, earlier: &StreamPoint) -> Result<Duration, Error> {
        let _current = self.gpu.enter()?;
        let mut ms = 0.0;
        // SAFETY: the pointer refers to a local; both events exist.
        unsafe { driver::cuEventElapsedTime_v2(&raw mut ms, earlier.event, self.event)? };
        Ok(Duration::try_from_secs_f32(ms / 1e3).unwrap_or_default())
    }
}

impl Drop for StreamPoint {
    fn drop(&mut self) {
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: created once, destroyed once; the driver frees the event when its work is
            // done.
            let _ = unsafe { driver::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Checks that the image is a fatbin and as long as its header says. The driver trusts the header.
fn check_fatbin(image: &[u8]) -> Result<(), Error> {
    const MAGIC: u32 = 0xBA55_ED50;
    let field = |offset: usize, len: usize| {
        let bytes = image.get(offset..offset + len)?;
        Some(bytes.iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)))
    };
    let read_header = || Some((field(0, 4)?, field(6, 2)?, field(8, 8)?));
    let (magic, header_bytes, body_bytes) = read_header().ok_or(Error::IncompleteImage)?;
    let image_bytes = header_bytes.checked_add(body_bytes);
    let is_whole = image_bytes.is_some_and(|bytes| bytes <= image.len() as u64);
    if magic == u64::from(MAGIC) && is_whole { Ok(()) } else { Err(Error::IncompleteImage) }
}

fn find_function(module: CUmodule, name: &'static CStr) -> Result<CUfunction, Error> {
    let mut function = ptr::null_mut();
    // SAFETY: the module is loaded, and the name is NUL-terminated.
    match unsafe { driver::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) } {
        Ok(()) => Ok(function),
        Err(error) if error.is_driver_error(CUresult::CUDA_ERROR_NOT_FOUND) => {
            Err(Error::MissingKernel(name.to_str().expect("kernel names are ASCII")))
        }
        Err(error) => Err(error),
    }
}
