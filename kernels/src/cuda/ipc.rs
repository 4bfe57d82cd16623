//! Device memory of one process, mapped into another process by CUDA IPC.
//!
//! This module doesn't transport an [`Exported`] between the processes. CUDA IPC maps for reading
//! and writing and can't revoke a mapping: the importer must close before the exporter frees.

use super::{Device, Error, Plain, Shared, Slice, at_most, driver};
use cudarc::driver::sys::{CUipcMem_flags_enum, CUipcMemHandle};
use std::sync::Arc;

/// A range of device memory that another process can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The driver's handle of the whole allocation.
    pub handle: [u8; 64],
    /// Offset in bytes of the range in the allocation.
    pub offset: u64,
    /// Length of the range, bytes.
    pub bytes: u64,
}

/// A mapped range of another process's device memory; closed on drop.
#[derive(Debug)]
pub struct Imported {
    shared: Arc<Shared>,
    base: u64,
    offset: u64,
    bytes: u64,
}

impl Device {
    /// Exports the `bytes` bytes at device address `address` of this process.
    ///
    /// Memory mapped from handles (CUDA's virtual memory calls) has no IPC handle and gives
    /// [`Error::VmmBacked`]. The address is looked up, never dereferenced.
    pub fn export(&self, address: u64, bytes: u64) -> Result<Exported, Error> {
        let _current = self.shared.enter()?;
        let mut vmm = 0;
        // SAFETY: the pointers refer to locals; the driver looks the address up in its own tables.
        unsafe {
            if driver::cuMemRetainAllocationHandle(&raw mut vmm, address as *mut _).is_ok() {
                driver::cuMemRelease(vmm)?;
                return Err(Error::VmmBacked(address));
            }
        }
        let (mut base, mut size) = (0, 0);
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: as above.
        unsafe {
            driver::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address)?;
            at_most("bytes to export", bytes, size as u64 - (address - base))?;
            driver::cuIpcGetMemHandle(&raw mut handle, base)?;
        }
        let handle = handle.reserved.map(i8::cast_unsigned);
        Ok(Exported { handle, offset: address - base, bytes })
    }

    /// Maps a range that another process exported. A process can't open its own handle.
    pub fn import(&self, exported: &Exported) -> Result<Imported, Error> {
        let _current = self.shared.enter()?;
        let handle = CUipcMemHandle { reserved: exported.handle.map(u8::cast_signed) };
        let flags = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: the pointer refers to a local; the driver returns an error for an invalid handle.
        unsafe { driver::cuIpcOpenMemHandle_v2(&raw mut base, handle, flags)? };
        let (offset, bytes) = (exported.offset, exported.bytes);
        let imported = Imported { shared: Arc::clone(&self.shared), base, offset, bytes };
        let (mut start, mut size) = (0, 0);
        // SAFETY: the pointers refer to locals; the base was just mapped.
        unsafe { driver::cuMemGetAddressRange_v2(&raw mut start, &raw mut size, base)? };
        at_most("exported bytes", offset.saturating_add(bytes), size as u64)?;
        Ok(imported)
    }
}

impl Imported {
    /// Returns the range as values of one type.
    ///
    /// # Safety
    /// The exporter must free the memory only after `self` is dropped. The caller must not rely on
    /// values read while the exporter writes them.
    pub unsafe fn slice<T: Plain>(&self) -> Result<Slice<'_, T>, Error> {
        let address = self.base + self.offset;
        let len = usize::try_from(self.bytes).unwrap_or(usize::MAX) / size_of::<T>();
        // SAFETY: mapped for that many bytes until `self` is dropped; the caller guarantees the
        // rest.
        unsafe { Slice::foreign(address, len) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // Wait first: a kernel may still be reading the mapping.
        let _ = self.shared.synchronize();
        if let Ok(_current) = self.shared.enter() {
            // SAFETY: opened once, closed once. The error that a vanished exporter causes is
            // ignored.
            let _ = unsafe { driver::cuIpcCloseMemHandle(self.base) };
        }
    }
}
