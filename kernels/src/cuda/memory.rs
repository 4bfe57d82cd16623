//! Manages the memory of the page kernels, on the device and on the host, and copies between both.
//!
//! Enqueued work runs later, on the device. The types protect memory that such work may still
//! use: a [`PinnedBuffer`] can be written only after its copy is done, and a drop waits for the
//! work before it frees the memory.

use super::{Device, Error, OpenGpu, StreamPoint, at_most, driver};
use crate::reference::{LiveRow, SessionPages};
use cudarc::driver::sys::CUdeviceptr;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    marker::PhantomData,
    ptr::NonNull,
    slice,
    sync::Arc,
};

/// The driver locks whole pages, so two page-locked ranges must not share one.
const HOST_PAGE_BYTES: usize = 4096;
/// Usable from every CUDA context (1), and mapped into the device's address space (2).
const REGISTER_FLAGS: u32 = 0x1 | 0x2;

/// # Safety
/// Every bit pattern must be a valid value. The layout must be that of the type in the kernels'
/// C++.
pub unsafe trait DeviceValue:
    Copy + Default + std::fmt::Debug + Send + Sync + 'static
{
}

// SAFETY: integers.
unsafe impl DeviceValue for u8 {}
// SAFETY: integers.
unsafe impl DeviceValue for u32 {}
// SAFETY: integers.
unsafe impl DeviceValue for i32 {}
// SAFETY: integers.
unsafe impl DeviceValue for u64 {}
// SAFETY: integers.
unsafe impl DeviceValue for i64 {}
// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceValue for LiveRow {}
// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceValue for SessionPages {}

/// A device allocation of `len` values; freed on drop, after the work that uses it.
#[derive(Debug)]
pub struct DeviceBuffer<T: DeviceValue> {
    gpu: Arc<OpenGpu>,
    /// The device address; 0 if `len` is 0.
    address: CUdeviceptr,
    len: usize,
    item_type: PhantomData<T>,
}

impl<T: DeviceValue> DeviceBuffer<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the device address, which is 256-byte aligned.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn slice(&self) -> DeviceSlice<'_, T> {
        DeviceSlice { address: self.address, len: self.len, lifetime: PhantomData }
    }

    fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }
}

impl<T: DeviceValue> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        let _ = self.gpu.synchronize();
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: allocated once, freed once, and nothing enqueued uses it any more. An error
            // is ignored.
            let _ = unsafe { driver::cuMemFree_v2(self.address) };
        }
    }
}

/// Device memory for reading: a part of a [`DeviceBuffer`], or memory of another owner.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a, T: DeviceValue> {
    address: CUdeviceptr,
    len: usize,
    lifetime: PhantomData<&'a [T]>,
}

impl<'a, T: DeviceValue> DeviceSlice<'a, T> {
    /// If the address is null, `len` must be 0.
    ///
    /// # Safety
    /// On the device that reads the slice, `len` values must lie at `address` and stay there for
    /// `'a`, and until all work enqueued during `'a` is done. The caller must cope with values that
    /// change meanwhile.
    pub unsafe fn foreign(address: u64, len: usize) -> Result<DeviceSlice<'a, T>, Error> {
        if !address.is_multiple_of(align_of::<T>() as u64) {
            return Err(Error::Misaligned("foreign memory"));
        }
        let limit = if address == 0 { 0 } else { isize::MAX as u64 / size_of::<T>() as u64 };
        at_most("foreign values", len as u64, limit)?;
        Ok(DeviceSlice { address, len, lifetime: PhantomData })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn part(&self, start: usize, len: usize) -> Result<DeviceSlice<'a, T>, Error> {
        at_most("a slice's end", start.saturating_add(len) as u64, self.len as u64)?;
        let address = self.address + (start * size_of::<T>()) as u64;
        Ok(DeviceSlice { address, len, lifetime: PhantomData })
    }
}

/// Page-locked host memory; copies from it to the device never block the caller.
#[derive(Debug)]
pub struct PinnedBuffer<T: DeviceValue> {
    gpu: Arc<OpenGpu>,
    memory: NonNull<T>,
    len: usize,
    /// The point in the stream behind the newest copy from this memory.
    copy_end: Option<StreamPoint>,
}

// SAFETY: `PinnedBuffer` owns its memory.
unsafe impl<T: DeviceValue> Send for PinnedBuffer<T> {}
// SAFETY: `&PinnedBuffer` only allows reading.
unsafe impl<T: DeviceValue> Sync for PinnedBuffer<T> {}

impl<T: DeviceValue> PinnedBuffer<T> {
    fn layout(len: usize) -> Layout {
        let bytes = (len * size_of::<T>()).next_multiple_of(HOST_PAGE_BYTES).max(HOST_PAGE_BYTES);
        Layout::from_size_align(bytes, HOST_PAGE_BYTES).expect("`Device::pinned` checked the size")
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn is_idle(&self) -> Result<bool, Error> {
        self.copy_end.as_ref().map_or(Ok(true), StreamPoint::is_done)
    }

    /// Returns the values for writing, or `None` while a copy from them is in progress.
    pub fn get_mut(&mut self) -> Result<Option<&mut [T]>, Error> {
        let is_idle = self.is_idle()?;
        // SAFETY: `memory` holds `len` values, no copy is reading them when this is called, and
        // `self` is borrowed exclusively.
        let values = || unsafe { slice::from_raw_parts_mut(self.memory.as_ptr(), self.len) };
        Ok(is_idle.then(values))
    }
}

impl<T: DeviceValue> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if !self.is_idle().unwrap_or(false) {
            let _ = self.gpu.synchronize();
        }
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: registered once, and no copy is in progress.
            let _ = unsafe { driver::cuMemHostUnregister(self.memory.as_ptr().cast()) };
        }
        // SAFETY: allocated with the layout of the same length.
        unsafe { dealloc(self.memory.as_ptr().cast(), Self::layout(self.len)) };
    }
}

impl Device {
    /// Later work on the device's stream sees the values as zero.
    pub fn alloc<T: DeviceValue>(&self, len: usize) -> Result<DeviceBuffer<T>, Error> {
        at_most("values to allocate", len as u64, isize::MAX as u64 / size_of::<T>() as u64)?;
        let gpu = Arc::clone(&self.gpu);
        let mut buffer = DeviceBuffer { gpu, address: 0, len: 0, item_type: PhantomData };
        if len > 0 {
            let _current = self.gpu.enter()?;
            // SAFETY: the pointer refers to a local. `Drop` frees only a buffer with a length,
            // which is set after success.
            unsafe { driver::cuMemAlloc_v2(&raw mut buffer.address, len * size_of::<T>())? };
            buffer.len = len;
            self.fill(&mut buffer, 0)?;
        }
        Ok(buffer)
    }

    /// Allocates page-locked host memory for `len` values, all zero.
    pub fn pinned<T: DeviceValue>(&self, len: usize) -> Result<PinnedBuffer<T>, Error> {
        let bytes_max = isize::MAX as u64 / 2;
        at_most("page-locked values", len as u64, bytes_max / size_of::<T>() as u64)?;
        let layout = PinnedBuffer::<T>::layout(len);
        // SAFETY: the layout's size isn't zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(memory) = NonNull::new(memory.cast::<T>()) else { handle_alloc_error(layout) };
        let register = || {
            let _current = self.gpu.enter()?;
            // SAFETY: whole pages of this allocation, which stay until they are unregistered.
            unsafe {
                driver::cuMemHostRegister_v2(memory.as_ptr().cast(), layout.size(), REGISTER_FLAGS)
            }
        };
        if let Err(error) = register() {
            // SAFETY: allocated above with the same layout.
            unsafe { dealloc(memory.as_ptr().cast(), layout) };
            return Err(error);
        }
        Ok(PinnedBuffer { gpu: Arc::clone(&self.gpu), memory, len, copy_end: None })
    }

    /// Sets every byte of `buffer` to `byte`. Only enqueues the work.
    pub fn fill<T: DeviceValue>(
        &self,
        buffer: &mut DeviceBuffer<T>,
        byte: u8,
    ) -> Result<(), Error> {
        if buffer.is_empty() {
            return Ok(());
        }
        let _current = self.gpu.enter()?;
        // SAFETY: the buffer has that many bytes, and waits for this work before it is freed.
        unsafe { driver::cuMemsetD8Async(buffer.address, byte, buffer.bytes(), self.gpu.stream) }
    }

    /// Copies the first `count` values from the host to the device. Only enqueues.
    pub fn send<T: DeviceValue>(
        &self,
        from: &mut PinnedBuffer<T>,
        count: usize,
        to: &mut DeviceBuffer<T>,
    ) -> Result<(), Error> {
        at_most("values to send", count as u64, from.len.min(to.len) as u64)?;
        if !from.is_idle()? {
            return Err(Error::CopyInFlight);
        }
        if count > 0 {
            let (host, bytes) = (from.memory.as_ptr().cast(), count * size_of::<T>());
            let _current = self.gpu.enter()?;
            // SAFETY: both ends have that many bytes, and both wait for the copy before they are
            // freed.
            unsafe { driver::cuMemcpyHtoDAsync_v2(to.address, host, bytes, self.gpu.stream)? };
            from.copy_end = Some(self.record()?);
        }
        Ok(())
    }

    /// Copies all of `from` to the beginning of `to`, on the device. Only enqueues.
    pub fn copy<T: DeviceValue>(
        &self,
        from: DeviceSlice<'_, T>,
        to: &mut DeviceBuffer<T>,
    ) -> Result<(), Error> {
        at_most("values to copy", from.len as u64, to.len as u64)?;
        if from.is_empty() {
            return Ok(());
        }
        let bytes = from.len * size_of::<T>();
        let _current = self.gpu.enter()?;
        // SAFETY: both ends have that many bytes. `to` waits for the copy before it is freed.
        // `from` waits too, or its owner has guaranteed that it stays.
        unsafe { driver::cuMemcpyDtoDAsync_v2(to.address, from.address, bytes, self.gpu.stream) }
    }

    /// Copies `values` to the beginning of `buffer`, and waits for the end of the copy.
    pub fn upload<T: DeviceValue>(
        &self,
        buffer: &mut DeviceBuffer<T>,
        values: &[T],
    ) -> Result<(), Error> {
        at_most("values to upload", values.len() as u64, buffer.len as u64)?;
        if values.is_empty() {
            return Ok(());
        }
        let _current = self.gpu.enter()?;
        // SAFETY: both ends have that many bytes, and stay until the wait below is over.
        unsafe {
            let from = values.as_ptr().cast();
            let (to, stream) = (buffer.address, self.gpu.stream);
            driver::cuMemcpyHtoDAsync_v2(to, from, size_of_val(values), stream)?;
        }
        self.synchronize()
    }

    /// Waits for the work enqueued so far, and returns the values that `slice` then has.
    pub fn download<T: DeviceValue>(&self, slice: DeviceSlice<'_, T>) -> Result<Vec<T>, Error> {
        let mut values = vec![T::default(); slice.len];
        if slice.is_empty() {
            return Ok(values);
        }
        let _current = self.gpu.enter()?;
        // SAFETY: both ends have that many bytes, and stay until the wait below is over.
        unsafe {
            let (to, bytes) = (values.as_mut_ptr().cast(), size_of_val(values.as_slice()));
            driver::cuMemcpyDtoHAsync_v2(to, slice.address, bytes, self.gpu.stream)?;
        }
        self.synchronize()?;
        Ok(values)
    }
}
