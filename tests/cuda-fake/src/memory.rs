//! Device memory in host memory: each allocation has pages of its own, and none behind them.

use std::{io, ptr};

/// Fills each allocation's last memory page behind its end; checked when the memory is freed.
const CANARY: u8 = 0xA5;
const PAGE_BYTES: usize = 4096;

/// Zeroed memory. The memory page after it can't be read or written.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: usize,
    bytes: usize,
}

impl Mapping {
    pub(crate) fn new(bytes: usize) -> io::Result<Mapping> {
        let length = padded(bytes);
        // SAFETY: a new mapping, one page longer than the memory; only the memory is made
        // accessible.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let base =
                libc::mmap(ptr::null_mut(), length + PAGE_BYTES, libc::PROT_NONE, flags, -1, 0);
            if base == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            if libc::mprotect(base, length, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                let error = io::Error::last_os_error();
                libc::munmap(base, length + PAGE_BYTES);
                return Err(error);
            }
            base
        };
        let mapping = Mapping { base: base as usize, bytes };
        // SAFETY: the mapping extends to the end of the memory page.
        unsafe {
            let end = (mapping.base + bytes) as *mut u8;
            end.write_bytes(CANARY, length - bytes);
        }
        Ok(mapping)
    }

    pub(crate) fn base(&self) -> u64 {
        self.base as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether nothing was written right behind the memory.
    pub(crate) fn is_sound(&self) -> bool {
        let slack = padded(self.bytes) - self.bytes;
        // SAFETY: the mapping extends to the end of the memory page.
        let behind =
            unsafe { std::slice::from_raw_parts((self.base + self.bytes) as *const u8, slack) };
        behind.iter().all(|&byte| byte == CANARY)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped once with this length, unmapped once.
        unsafe { libc::munmap(self.base as *mut _, padded(self.bytes) + PAGE_BYTES) };
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE_BYTES)
}
