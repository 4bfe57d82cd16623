//! How a kernel is found and launched: names, block counts and parameters.

use super::{Device, Error, WARP, at_most, driver};
use cudarc::driver::sys::CUlaunchConfig;
use std::{
    ffi::{CStr, c_void},
    ptr,
};

/// The kernels' names in the image, in the order of [`Kernel`].
pub(super) const KERNELS: [&CStr; 7] = [
    c"kv_gather_pages",
    c"kv_mark",
    c"kv_session",
    c"kv_list_to_bitmap",
    c"kv_ref_bitmap",
    c"kv_classify",
    c"kv_page_digest",
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

/// The block size of launches and the number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    threads: u32,
    entries: u32,
    pub(super) blocks_max: u32,
}

impl Default for LaunchShape {
    /// Four warps per block hide memory latency, and leave room for the engine's own kernels. With
    /// eight entries per thread, a row of 128k single-token pages gets 128 blocks. 1,024 blocks of
    /// this size fill the 132 multiprocessors of an H200 at half occupancy.
    fn default() -> LaunchShape {
        LaunchShape { threads: 128, entries: 8, blocks_max: 1024 }
    }
}

impl LaunchShape {
    /// Makes a shape: `threads` per block, in whole warps; `entries` per thread before a row gets
    /// another block; at most `blocks_max` blocks for work that isn't divided by rows.
    pub fn new(threads: u32, entries: u32, blocks_max: u32) -> Result<LaunchShape, Error> {
        at_most("threads of a block", threads.into(), 1024)?;
        if threads == 0 || !threads.is_multiple_of(WARP) {
            return Err(Error::Misaligned("a block's thread count"));
        }
        Ok(LaunchShape { threads, entries: entries.max(1), blocks_max: blocks_max.max(1) })
    }

    /// Returns the number of blocks for `items`, of which a thread may take any number.
    pub(super) fn blocks(self, items: u64) -> u32 {
        let wanted = items.div_ceil(self.threads.into());
        u32::try_from(wanted).unwrap_or(u32::MAX).min(self.blocks_max)
    }

    /// Returns the number of blocks per row if the longest row has `refs` pages.
    pub(super) fn chunks(self, refs: u32) -> u32 {
        let each = self.threads.saturating_mul(self.entries);
        refs.div_ceil(each).clamp(1, self.blocks_max)
    }
}

impl Device {
    /// Enqueues one kernel with `blocks` blocks; does nothing for 0 blocks.
    ///
    /// The driver reads a four-byte parameter from the low half of its `u64`, which comes first on
    /// a little-endian machine.
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
            hStream: self.shared.stream,
            attrs: ptr::null_mut(),
            numAttrs: 0,
        };
        let function = self.shared.kernels[kernel as usize];
        let _current = self.shared.enter()?;
        // SAFETY: the driver copies the parameters before it returns, and doesn't write to them.
        unsafe {
            let (params, extra) = (pointers.as_mut_ptr(), ptr::null_mut());
            driver::cuLaunchKernelEx(&raw const config, function, params, extra)
        }
    }
}
