//! Shares device memory of one process with another process, by CUDA IPC, for [`crate::ipc`].
//!
//! The first process exports a range of its memory with [`Device::export`]. The caller brings the
//! result, an [`ExportedRange`], to the other process. [`Device::import`] maps the range there.
//! CUDA IPC can't revoke a mapping. So the first process must free the memory only after the other
//! process has dropped its [`ImportedRange`]. This file copies and counts nothing.

use super::{Device, DeviceSlice, DeviceValue, Error, OpenGpu, at_most, driver};
use cudarc::driver::sys::{CUipcMem_flags_enum, CUipcMemHandle};
use std::sync::Arc;

/// A description of a range of device memory, with which another process can map the range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedRange {
    /// The driver's handle of the allocation that holds the range.
    pub handle: [u8; 64],
    /// Bytes from the beginning of the allocation to the range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

/// A mapped range of another process's device memory; closed on drop.
#[derive(Debug)]
pub struct ImportedRange {
    gpu: Arc<OpenGpu>,
    /// Address at which the whole allocation is mapped.
    base: u64,
    /// Bytes from `base` to the range.
    offset: u64,
    bytes: u64,
}

impl Device {
    /// Exports the `bytes` bytes at device address `address` of this process.
    ///
    /// Memory mapped from handles (CUDA's virtual memory calls) has no IPC handle and gives
    /// [`Error::VmmBacked`]. The address is looked up, never dereferenced.
    pub fn export(&self, address: u64, bytes: u64) -> Result<ExportedRange, Error> {
        let _current = self.gpu.enter()?;
        let mut vmm_handle = 0;
        // SAFETY: the pointers refer to locals; the driver looks the address up in its own tables.
        unsafe {
            if driver::cuMemRetainAllocationHandle(&raw mut vmm_handle, address as *mut _).is_ok() {
                driver::cuMemRelease(vmm_handle)?;
                return Err(Error::VmmBacked(address));
            }
        }
        let (mut base, mut allocation_bytes) = (0, 0);
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: as above.
        unsafe {
            driver::cuMemGetAddressRange_v2(&raw mut base, &raw mut allocation_bytes, address)?;
            at_most("bytes to export", bytes, allocation_bytes as u64 - (address - base))?;
            driver::cuIpcGetMemHandle(&raw mut handle, base)?;
        }
        let handle = handle.reserved.map(i8::cast_unsigned);
        Ok(ExportedRange { handle, offset: address - base, bytes })
    }

    /// Maps a range that another process exported. A process can't open its own handle.
    pub fn import(&self, exported: &ExportedRange) -> Result<ImportedRange, Error> {
        let _current = self.gpu.enter()?;
        let handle = CUipcMemHandle { reserved: exported.handle.map(u8::cast_signed) };
        let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: the pointer refers to a local; the driver returns an error for an invalid handle.
        unsafe { driver::cuIpcOpenMemHandle_v2(&raw mut base, handle, flags)? };
        let (offset, bytes) = (exported.offset, exported.bytes);
        let imported = ImportedRange { gpu: Arc::clone(&self.gpu), base, offset, bytes };
        let (mut start, mut mapped_bytes) = (0, 0);
        // SAFETY: the pointers refer to locals; the base was just mapped.
        unsafe { driver::cuMemGetAddressRange_v2(&raw mut start, &raw mut mapped_bytes, base)? };
        at_most("exported bytes", offset.saturating_add(bytes), mapped_bytes as u64)?;
        Ok(imported)
    }
}

impl ImportedRange {
    /// Returns the range as values of type `T`.
    ///
    /// # Safety
    /// The exporter must free the memory only after `self` is dropped. The caller must not rely on
    /// values read while the exporter writes them.
    pub unsafe fn slice<T: DeviceValue>(&self) -> Result<DeviceSlice<'_, T>, Error> {
        let address = self.base + self.offset;
        let len = usize::try_from(self.bytes).unwrap_or(usize::MAX) / size_of::<T>();
        // SAFETY: mapped for that many bytes until `self` is dropped; the caller guarantees the
        // rest.
        unsafe { DeviceSlice::foreign(address, len) }
    }
}

impl Drop for ImportedRange {
    fn drop(&mut self) {
        // Wait first: a kernel may still be reading the mapping.
        let _ = self.gpu.synchronize();
        if let Ok(_current) = self.gpu.enter() {
            // SAFETY: opened once, closed once. An error is ignored: the exporter may be gone.
            let _ = unsafe { driver::cuIpcCloseMemHandle(self.base) };
        }
    }
}
