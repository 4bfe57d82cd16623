//! Enqueues the kernels that count KV pages on a GPU: one method of [`Device`] per kernel.
//!
//! Each method checks its arguments, so that the kernel can trust them. [`mod@crate::reference`]
//! defines what the kernels compute, except `kv_ref_bitmap`, which prepares the input of
//! `kv_classify`. A method overwrites its output; only [`Device::list_to_set`] adds to it, because
//! an engine can have several free lists.

use super::launch::Kernel;
use super::{
    Device, DeviceBuffer, DeviceSlice, DeviceValue, Error, LiveRows, PAGE_SHIFT_MAX, PoolSize,
    at_most,
};
use crate::reference::SessionPages;

#[derive(Clone, Copy, Debug)]
pub struct DeviceTable<'a> {
    pub entries: DeviceSlice<'a, i32>,
    /// The number of entries from one row to the next.
    pub stride: u64,
}

#[derive(Debug)]
pub struct DeviceMarks {
    pub refcnt: DeviceBuffer<u32>,
    pub owner: DeviceBuffer<u32>,
}

#[derive(Debug)]
pub struct DevicePageSet {
    /// A bitmap with one bit per page.
    pub bitmap: DeviceBuffer<u32>,
    /// Two counters: entries that named a page again, and entries outside the pool.
    pub fault_counts: DeviceBuffer<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ClassifyResult {
    /// The number of pages in each class; see [`crate::reference::class_counts`].
    pub classes: [u64; 8],
    pub free_runs: u64,
    /// The number of pages outside the radix tree that rows of several sessions reference.
    pub aliased_pages: u64,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceValue for ClassifyResult {}

/// One of a pool's KV buffers, for example the keys of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct KvBuffer {
    pub address: u64,
    /// Bytes per page, a multiple of 16.
    pub page_bytes: u64,
}

// SAFETY: `repr(C)`, integers only, no padding.
unsafe impl DeviceValue for KvBuffer {}

#[derive(Debug)]
pub struct KvBuffers {
    buffers: DeviceBuffer<KvBuffer>,
    /// The most bytes that a page has in one of the buffers.
    page_bytes_max: u64,
    npages: u32,
}

impl Device {
    pub fn marks(&self, npages: u32) -> Result<DeviceMarks, Error> {
        Ok(DeviceMarks {
            refcnt: self.alloc(npages as usize)?,
            owner: self.alloc(npages as usize)?,
        })
    }

    pub fn page_set(&self, pool: PoolSize) -> Result<DevicePageSet, Error> {
        Ok(DevicePageSet { bitmap: self.alloc(pool.bitmap_words())?, fault_counts: self.alloc(2)? })
    }

    /// Uploads the addresses of the pool's KV buffers. Waits.
    ///
    /// # Safety
    /// Each buffer must be device memory of `npages * page_bytes` bytes that stays valid until the
    /// result is dropped and the work enqueued with it is done.
    pub unsafe fn kv_buffers(&self, buffers: &[KvBuffer], npages: u32) -> Result<KvBuffers, Error> {
        if buffers.iter().any(|buffer| (buffer.address | buffer.page_bytes) % 16 != 0) {
            return Err(Error::Misaligned("a KV buffer"));
        }
        let mut on_device = self.alloc(buffers.len())?;
        self.upload(&mut on_device, buffers)?;
        let page_bytes_max = buffers.iter().map(|buffer| buffer.page_bytes).max().unwrap_or(0);
        Ok(KvBuffers { buffers: on_device, page_bytes_max, npages })
    }

    /// `kv_gather_pages`.
    pub fn gather_pages(
        &self,
        table: DeviceTable<'_>,
        live: &LiveRows,
        page_list: &mut DeviceBuffer<u32>,
        bad_slots: &mut DeviceBuffer<u64>,
    ) -> Result<(), Error> {
        at_most("gathered pages", live.page_list_len.into(), page_list.len() as u64)?;
        at_most("counters", 1, bad_slots.len() as u64)?;
        self.fill(bad_slots, 0)?;
        let table_rows = (table.entries.len() as u64).checked_div(table.stride).unwrap_or(0);
        let row_blocks = self.shape.blocks_per_row(live.refs_per_row_max);
        // SAFETY: the list has room for all references; the kernel gets the table's size.
        unsafe {
            self.launch(
                Kernel::GatherPages,
                u64::from(live.count) * u64::from(row_blocks),
                &[
                    table.entries.address(),
                    table.stride,
                    table_rows,
                    live.rows.address(),
                    live.count.into(),
                    row_blocks.into(),
                    live.pool.page_shift.into(),
                    live.pool.npages.into(),
                    page_list.address(),
                    bad_slots.address(),
                ],
            )
        }
    }

    /// `kv_mark`: computes each page's reference count and owner.
    pub fn mark(
        &self,
        live: &LiveRows,
        page_list: &DeviceBuffer<u32>,
        marks: &mut DeviceMarks,
    ) -> Result<(), Error> {
        check_marks(marks, live.pool.npages)?;
        at_most("gathered pages", live.page_list_len.into(), page_list.len() as u64)?;
        self.fill(&mut marks.refcnt, 0)?;
        self.fill(&mut marks.owner, 0xFF)?;
        let row_blocks = self.shape.blocks_per_row(live.refs_per_row_max);
        // SAFETY: both arrays have an element per page; the kernel skips pages outside the pool.
        unsafe {
            self.launch(
                Kernel::Mark,
                u64::from(live.count) * u64::from(row_blocks),
                &[
                    live.rows.address(),
                    live.count.into(),
                    row_blocks.into(),
                    live.pool.page_shift.into(),
                    live.pool.npages.into(),
                    page_list.address(),
                    marks.refcnt.address(),
                    marks.owner.address(),
                ],
            )
        }
    }

    /// `kv_session`: by session number. `claimed` is a bitmap for the kernel's own use.
    pub fn session_pages(
        &self,
        live: &LiveRows,
        page_list: &DeviceBuffer<u32>,
        marks: &DeviceMarks,
        tree: &DevicePageSet,
        claimed: &mut DeviceBuffer<u32>,
        out: &mut DeviceBuffer<SessionPages>,
    ) -> Result<(), Error> {
        check_marks(marks, live.pool.npages)?;
        at_most("gathered pages", live.page_list_len.into(), page_list.len() as u64)?;
        at_most("sessions", live.session_numbers_end.into(), out.len() as u64)?;
        check_bitmaps(live.pool, [claimed, &tree.bitmap])?;
        self.fill(claimed, 0)?;
        self.fill(out, 0)?;
        let row_blocks = self.shape.blocks_per_row(live.refs_per_row_max);
        // SAFETY: the arrays have an element per page and session; the kernel skips pages outside
        // the pool.
        unsafe {
            self.launch(
                Kernel::Session,
                u64::from(live.count) * u64::from(row_blocks),
                &[
                    live.rows.address(),
                    live.count.into(),
                    row_blocks.into(),
                    live.pool.page_shift.into(),
                    live.pool.npages.into(),
                    page_list.address(),
                    marks.refcnt.address(),
                    marks.owner.address(),
                    tree.bitmap.address(),
                    claimed.address(),
                    out.address(),
                ],
            )
        }
    }

    pub fn clear_set(&self, set: &mut DevicePageSet) -> Result<(), Error> {
        self.fill(&mut set.bitmap, 0)?;
        self.fill(&mut set.fault_counts, 0)
    }

    /// `kv_list_to_bitmap`: adds pages, and faults to the counters. `shift` is 0 for page ids. For
    /// token slots it is the pool's page shift: only the first slot of a page names the page.
    pub fn list_to_set(
        &self,
        ids: DeviceSlice<'_, i64>,
        shift: u32,
        pool: PoolSize,
        set: &mut DevicePageSet,
    ) -> Result<(), Error> {
        at_most("shift", shift.into(), PAGE_SHIFT_MAX.into())?;
        check_bitmaps(pool, [&set.bitmap])?;
        at_most("counters", 2, set.fault_counts.len() as u64)?;
        let count = ids.len() as u64;
        // SAFETY: the bitmap has a bit per page; the kernel only counts ids outside the pool.
        unsafe {
            self.launch(
                Kernel::ListToBitmap,
                self.shape.blocks(count).into(),
                &[
                    ids.address(),
                    count,
                    shift.into(),
                    pool.npages.into(),
                    set.bitmap.address(),
                    set.fault_counts.address(),
                ],
            )
        }
    }

    /// `kv_ref_bitmap`: writes two bitmaps of pages: those that rows reference, and those that rows
    /// of several sessions reference.
    pub fn ref_bitmap(
        &self,
        marks: &DeviceMarks,
        pool: PoolSize,
        referenced: &mut DeviceBuffer<u32>,
        shared: &mut DeviceBuffer<u32>,
    ) -> Result<(), Error> {
        check_marks(marks, pool.npages)?;
        check_bitmaps(pool, [referenced, shared])?;
        // SAFETY: the marks have an element per page, the bitmaps a bit per page.
        unsafe {
            self.launch(
                Kernel::RefBitmap,
                self.shape.blocks(pool.npages.into()).into(),
                &[
                    marks.refcnt.address(),
                    marks.owner.address(),
                    pool.npages.into(),
                    referenced.address(),
                    shared.address(),
                ],
            )
        }
    }

    /// `kv_classify`: counts the pages in each class. Writes one value to `out`.
    pub fn classify(
        &self,
        free: &DevicePageSet,
        tree: &DevicePageSet,
        referenced: &DeviceBuffer<u32>,
        shared: &DeviceBuffer<u32>,
        pool: PoolSize,
        out: &mut DeviceBuffer<ClassifyResult>,
    ) -> Result<(), Error> {
        check_bitmaps(pool, [&free.bitmap, &tree.bitmap, referenced, shared])?;
        at_most("classifications", 1, out.len() as u64)?;
        self.fill(out, 0)?;
        // SAFETY: the four bitmaps have a bit per page, and `out` has room for the counts.
        unsafe {
            self.launch(
                Kernel::Classify,
                self.shape.blocks(pool.bitmap_words() as u64).into(),
                &[
                    free.bitmap.address(),
                    referenced.address(),
                    tree.bitmap.address(),
                    shared.address(),
                    pool.npages.into(),
                    out.address(),
                ],
            )
        }
    }

    /// `kv_digest_pages`. The digest of a page outside the pool is 0.
    pub fn page_digest(
        &self,
        kv: &KvBuffers,
        pages: DeviceSlice<'_, u32>,
        out: &mut DeviceBuffer<u64>,
    ) -> Result<(), Error> {
        let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        at_most("pages to digest", pages.len() as u64, (u32::MAX - 1).into())?;
        at_most("pages to digest", count.into(), out.len() as u64)?;
        self.fill(out, 0)?;
        // SAFETY: the caller of `kv_buffers` guaranteed the sizes; the kernel doesn't read other
        // pages.
        unsafe {
            self.launch(
                Kernel::PageDigest,
                count.min(self.shape.blocks_max).into(),
                &[
                    kv.buffers.address(),
                    kv.buffers.len() as u64,
                    self.shape.digest_team(kv.page_bytes_max).into(),
                    kv.npages.into(),
                    pages.address(),
                    count.into(),
                    out.address(),
                ],
            )
        }
    }
}

fn check_marks(marks: &DeviceMarks, npages: u32) -> Result<(), Error> {
    let marks_len = marks.refcnt.len().min(marks.owner.len());
    at_most("pages to mark", npages.into(), marks_len as u64)
}

fn check_bitmaps<const N: usize>(
    pool: PoolSize,
    bitmaps: [&DeviceBuffer<u32>; N],
) -> Result<(), Error> {
    for bitmap in bitmaps {
        at_most("words of a bitmap", pool.bitmap_words() as u64, bitmap.len() as u64)?;
    }
    Ok(())
}
