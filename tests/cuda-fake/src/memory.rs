//! Device memory in host memory: one shared memory file per allocation, mapped at its address.
//!
//! The file has no name. Another process of the same user opens it through this process's folder in
//! `/proc`. So no file is left when a process dies, and a process in another PID namespace can't
//! open it; both are true of CUDA IPC too.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::MetadataExt,
    },
    ptr,
};

/// Fills each allocation's last memory page behind its end; checked when the memory is freed.
const CANARY: u8 = 0xA5;
const PAGE_BYTES: usize = 4096;

/// A mapped file of shared memory. The memory page after it can't be read or written.
#[derive(Debug)]
pub(crate) struct Mapping {
    file: File,
    base: usize,
    bytes: usize,
    /// Whether this process allocated the memory, instead of opening it.
    own: bool,
}

/// Everything that another process needs to open a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    pub(crate) pid: u32,
    pub(crate) fd: u32,
    /// Identifies the file, in case the descriptor number was reused.
    pub(crate) inode: u64,
    pub(crate) bytes: u64,
}

impl Mapping {
    pub(crate) fn new(bytes: usize) -> io::Result<Mapping> {
        // SAFETY: the name is NUL-terminated; the descriptor is new and owned here only.
        let file = unsafe {
            let fd = libc::memfd_create(c"cuda-fake".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd)
        };
        file.set_len(padded(bytes) as u64)?;
        let mapping = Mapping::map(file, bytes, true)?;
        // SAFETY: the mapping extends to the end of the memory page.
        unsafe {
            let end = (mapping.base + bytes) as *mut u8;
            end.write_bytes(CANARY, padded(bytes) - bytes);
        }
        Ok(mapping)
    }

    /// Opens the memory that a ticket of another process names. A process can't open its own
    /// ticket.
    pub(crate) fn open(ticket: &Ticket) -> io::Result<Mapping> {
        if ticket.pid == std::process::id() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let path = format!("/proc/{}/fd/{}", ticket.pid, ticket.fd);
        let file = File::options().read(true).write(true).open(path)?;
        let bytes = usize::try_from(ticket.bytes).map_err(io::Error::other)?;
        let metadata = file.metadata()?;
        if metadata.ino() != ticket.inode || metadata.len() != padded(bytes) as u64 {
            return Err(io::ErrorKind::NotFound.into());
        }
        Mapping::map(file, bytes, false)
    }

    fn map(file: File, bytes: usize, own: bool) -> io::Result<Mapping> {
        let length = padded(bytes);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, one page longer than the file; the file is then mapped over its
        // front.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let base =
                libc::mmap(ptr::null_mut(), length + PAGE_BYTES, libc::PROT_NONE, flags, -1, 0);
            if base == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            if libc::mmap(base, length, access, flags, file.as_raw_fd(), 0) == libc::MAP_FAILED {
                let error = io::Error::last_os_error();
                libc::munmap(base, length + PAGE_BYTES);
                return Err(error);
            }
            base
        };
        Ok(Mapping { file, base: base as usize, bytes, own })
    }

    pub(crate) fn base(&self) -> u64 {
        self.base as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn ticket(&self) -> io::Result<Ticket> {
        Ok(Ticket {
            pid: std::process::id(),
            fd: self.file.as_raw_fd().cast_unsigned(),
            inode: self.file.metadata()?.ino(),
            bytes: self.bytes as u64,
        })
    }

    /// Returns whether nothing was written right behind the memory.
    pub(crate) fn is_sound(&self) -> bool {
        let slack = padded(self.bytes) - self.bytes;
        // SAFETY: the mapping extends to the end of the memory page.
        let behind =
            unsafe { std::slice::from_raw_parts((self.base + self.bytes) as *const u8, slack) };
        !self.own || behind.iter().all(|&byte| byte == CANARY)
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
