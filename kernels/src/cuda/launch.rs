//! Launches the page kernels on a GPU, for the methods of [`Device`] in `account.rs`.
//!
//! The shape of a launch changes the time that a kernel takes, not its result. The callers check
//! the kernels' parameters; this file doesn't.

use super::{Device, Error, WARP, at_most, driver};
use cudarc::driver::sys::CUlaunchConfig;
use std::{
    ffi::{CStr, c_void},
    ptr,
};

/// The kernels' names in the fatbin, in the order of [`Kernel`].
pub(super) const KERNELS: [&CStr; 7] = [
    c"kv_gather_pages",
    c"kv_mark",
    c"kv_session",
    c"kv_list_to_bitmap",
    c"kv_ref_bitmap",
    c"kv_classify",
    c"kv_digest_pages",
];

#[derive(Clone, Copy)]
pub(super) enum Kernel {
    GatherPages,
    Mark,
    Session,
    ListToBitmap,
    RefBitmap,
    Classify,
    PageDigest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    threads: u32,
    /// The number of page references that a thread handles before the row gets another block.
    refs_per_thread: u32,
    /// The maximum number of blocks: per row, or in all for work that isn't divided by rows.
    pub(super) blocks_max: u32,
}

impl Default for LaunchShape {
    /// For a GPU that an engine uses at the same time.
    /// Four warps per block hide the latency of memory, and leave room for the engine's kernels.
    /// With eight page references per thread, a row of 128k single-token pages gets 128 blocks.
    /// 1,024 blocks of this size fill the 132 multiprocessors of an H200 at half occupancy.
    fn default() -> LaunchShape {
        LaunchShape { threads: 128, refs_per_thread: 8, blocks_max: 1024 }
    }
}

impl LaunchShape {
    /// `threads` are those of a block: at most 1024, in whole warps. A row gets another block for
    /// each `threads * refs_per_thread` page references.
    pub fn new(threads: u32, refs_per_thread: u32, blocks_max: u32) -> Result<LaunchShape, Error> {
        at_most("threads of a block", threads.into(), 1024)?;
        if threads == 0 || !threads.is_multiple_of(WARP) {
            return Err(Error::Misaligned("a block's thread count"));
        }
        let (refs_per_thread, blocks_max) = (refs_per_thread.max(1), blocks_max.max(1));
        Ok(LaunchShape { threads, refs_per_thread, blocks_max })
    }

    /// Returns the number of blocks for `items` items. A thread can work on several items.
    pub(super) fn blocks(self, items: u64) -> u32 {
        let blocks = items.div_ceil(self.threads.into());
        u32::try_from(blocks).unwrap_or(u32::MAX).min(self.blocks_max)
    }

    /// How many threads of `kv_digest_pages` read one buffer: one for each 16 bytes of a page, as a
    /// power of two, or the whole block.
    pub(super) fn digest_team(self, page_bytes_max: u64) -> u32 {
        let loads = u32::try_from(page_bytes_max / 16).unwrap_or(self.threads).max(1);
        loads.checked_next_power_of_two().map_or(self.threads, |team| team.min(self.threads))
    }

    /// All rows get as many blocks as the longest row needs.
    pub(super) fn blocks_per_row(self, refs_per_row_max: u32) -> u32 {
        let refs_per_block = self.threads.saturating_mul(self.refs_per_thread);
        refs_per_row_max.div_ceil(refs_per_block).clamp(1, self.blocks_max)
    }
}

impl Device {
    /// Does nothing for 0 blocks. Of a parameter with four bytes, the driver reads the first four
    /// of the `u64`: on a little-endian machine the low half.
    ///
    /// # Safety
    /// The parameters must be those of the kernel, and point to as much memory as the kernel
    /// expects.
    pub(super) unsafe fn launch(
        &self,
        kernel: Kernel,
        blocks: u64,
        params: &[u64],
    ) -> Result<(), Error> {
        const { assert!(cfg!(target_endian = "little"), "the low half of a `u64` comes first") };
        at_most("blocks of a launch", blocks, i32::MAX.cast_unsigned().into())?;
        let Some(blocks) = u32::try_from(blocks).ok().filter(|&blocks| blocks > 0) else {
            return Ok(());
        };
        let mut pointers: Vec<*mut c_void> =
            params.iter().map(|param| ptr::from_ref(param).cast_mut().cast()).collect();
        let config = CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.gpu.stream,
            attrs: ptr::null_mut(),
            numAttrs: 0,
        };
        let function = self.gpu.kernels[kernel as usize];
        let _current = self.gpu.enter()?;
        // SAFETY: the driver copies the parameters before it returns, and doesn't write to them.
        unsafe {
            let (params, extra) = (pointers.as_mut_ptr(), ptr::null_mut());
            driver::cuLaunchKernelEx(&raw const config, function, params, extra)
        }
    }
}
