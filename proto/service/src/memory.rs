//! The process's memory: keeps it small where that matters more than speed.

use rustix::thread::disable_transparent_huge_pages;

/// The allocator asks for huge pages of 2 MiB, which stay resident as a whole while a part of them
/// is used. Call this before the process starts threads.
pub fn use_small_pages() {
    let _ = disable_transparent_huge_pages(true);
}
