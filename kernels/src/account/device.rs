//! Copies and counts a pool on a CUDA device with the kernels, for an accountant.
//!
//! The device copies only the rows' page ids, and makes bitmaps of the lists. An audit that must
//! name a fault reads the lists again, so the engine keeps them until the audit is over.

use super::{
    Error, Pool, Stream,
    backend::{Backend, CopyLayout, Counts, ListFaults, PageDigest},
    snapshot::{IdList, PoolBuffer, Snapshot},
};
use crate::{
    audit::{ListedPages, PoolCopy, ValidRows},
    cuda::{
        self, ClassifyResult, Device, DeviceBuffer, DeviceMarks, DevicePageSet, DeviceSlice,
        DeviceTable, DeviceValue, KvBuffer, KvBuffers, LiveRows, StreamPoint,
    },
    reference::SessionPages,
};
use std::ops::Range;

/// Initial room for digests, in pages: enough for 64 MiB of 16 KiB pages.
const DIGEST_ROOM_INITIAL: usize = 1 << 12;
/// Index of the class counts in which a page counts as held if any part of a row references it.
const WHOLE_ROWS: usize = 0;
/// Index of the class counts for which only the rows' unprotected parts count.
const UNPROTECTED_PARTS: usize = 1;

/// The device, and all device memory that an audit needs.
#[derive(Debug)]
pub(super) struct DeviceBackend {
    device: Device,
    pool_size: cuda::PoolSize,
    kv_buffers: KvBuffers,
    /// All rows of the snapshot while the copy is made, and then only the valid rows.
    rows: LiveRows,
    unprotected: LiveRows,
    /// The page references of all rows of the snapshot, also of those that changed.
    page_list: GrowableBuffer<u32>,
    /// A counter that `kv_gather_pages` needs. The audit doesn't read it.
    bad_slots: DeviceBuffer<u64>,
    free: DevicePageSet,
    tree: DevicePageSet,
    marks: DeviceMarks,
    /// Scratch bitmap of `kv_session`: the pages that are already counted as exclusive.
    claimed: DeviceBuffer<u32>,
    /// Bitmap of the pages that rows reference. Only the kernels use it.
    referenced: DeviceBuffer<u32>,
    shared: DeviceBuffer<u32>,
    sessions: GrowableBuffer<SessionPages>,
    /// The pages by class, indexed by [`WHOLE_ROWS`] and [`UNPROTECTED_PARTS`].
    classified: [DeviceBuffer<ClassifyResult>; 2],
    digests: GrowableBuffer<u64>,
    copy: CopyInProgress,
}

#[derive(Debug, Default)]
struct CopyInProgress {
    refs: usize,
    /// The numbers of the page references whose pages are digested; see [`CopyLayout`].
    window: Range<usize>,
    free: Vec<IdList>,
    /// The radix tree's slots.
    tree: IdList,
    /// The point in the device's stream behind the copy; `None` until all its work is enqueued.
    copy_end: Option<StreamPoint>,
}

impl DeviceBackend {
    pub(super) fn new(device: Device, pool: &Pool) -> Result<Self, cuda::Error> {
        let npages = pool.pages();
        let pool_size = cuda::PoolSize { page_shift: pool.page_shift(), npages };
        let kv_buffer =
            |&PoolBuffer { addr, page_bytes }: &PoolBuffer| KvBuffer { address: addr, page_bytes };
        let kv_addresses: Vec<KvBuffer> = pool.buffers().iter().map(kv_buffer).collect();
        let rows_max = pool.rows_max();
        Ok(Self {
            // SAFETY: the caller of `Pool::new` guaranteed all pages of each buffer while `self`
            // lives.
            kv_buffers: unsafe { device.kv_buffers(&kv_addresses, npages)? },
            rows: device.live_rows(rows_max)?,
            unprotected: device.live_rows(rows_max)?,
            // One reference per page is enough, unless rows share pages.
            page_list: GrowableBuffer::new(&device, npages as usize)?,
            bad_slots: device.alloc(1)?,
            free: device.page_set(pool_size)?,
            tree: device.page_set(pool_size)?,
            marks: device.marks(npages)?,
            claimed: device.alloc(pool_size.bitmap_words())?,
            referenced: device.alloc(pool_size.bitmap_words())?,
            shared: device.alloc(pool_size.bitmap_words())?,
            sessions: GrowableBuffer::new(&device, rows_max)?,
            classified: [device.alloc(1)?, device.alloc(1)?],
            digests: GrowableBuffer::new(&device, DIGEST_ROOM_INITIAL)?,
            copy: CopyInProgress::default(),
            pool_size,
            device,
        })
    }

    fn enqueue_copy(&mut self, pool: &Pool, layout: &CopyLayout) -> Result<(), cuda::Error> {
        let table = pool.table();
        let entry_count = table.rows as usize * table.stride as usize;
        // SAFETY: the caller of `Pool::new` guaranteed these entries while `self` lives.
        let entries = unsafe { DeviceSlice::foreign(table.addr, entry_count)? };
        let table = DeviceTable { entries, stride: table.stride.into() };
        let device = &self.device;
        let page_list = self.page_list.with_room(device, self.copy.refs)?;
        if !layout.rows.is_empty() {
            device.gather_pages(table, &self.rows, page_list, &mut self.bad_slots)?;
        }
        for list in &self.copy.free {
            device.list_to_set(ids(list)?, 0, self.pool_size, &mut self.free)?;
        }
        let shift = self.pool_size.page_shift;
        device.list_to_set(ids(&self.copy.tree)?, shift, self.pool_size, &mut self.tree)?;
        let Range { start, end } = self.copy.window;
        if start < end {
            let pages = page_list.slice().part(start, end - start)?;
            let digests = self.digests.with_room(device, end - start)?;
            device.page_digest(&self.kv_buffers, pages, digests)?;
        }
        self.copy.copy_end = Some(device.record()?);
        Ok(())
    }

    /// Only enqueues. `row_parts` is [`WHOLE_ROWS`] or [`UNPROTECTED_PARTS`].
    fn classify(&mut self, row_parts: usize) -> Result<(), cuda::Error> {
        let rows = [&self.rows, &self.unprotected][row_parts];
        let device = &self.device;
        device.mark(rows, &self.page_list.buffer, &mut self.marks)?;
        device.ref_bitmap(&self.marks, self.pool_size, &mut self.referenced, &mut self.shared)?;
        device.classify(
            &self.free,
            &self.tree,
            &self.referenced,
            &self.shared,
            self.pool_size,
            &mut self.classified[row_parts],
        )
    }

    fn count_pages(&mut self, valid_rows: &ValidRows) -> Result<Counts, cuda::Error> {
        self.device.set_live_rows(&mut self.rows, &valid_rows.rows, self.pool_size)?;
        self.device.set_live_rows(
            &mut self.unprotected,
            &valid_rows.unprotected,
            self.pool_size,
        )?;
        self.classify(WHOLE_ROWS)?;
        let device = &self.device;
        let session_count = self.rows.session_numbers_end();
        let sessions = self.sessions.with_room(device, session_count)?;
        device.session_pages(
            &self.rows,
            &self.page_list.buffer,
            &self.marks,
            &self.tree,
            &mut self.claimed,
            sessions,
        )?;
        let sessions = device.download(sessions.slice().part(0, session_count)?)?;
        // The sessions' counts need the marks of the whole rows, which this call overwrites.
        self.classify(UNPROTECTED_PARTS)?;
        let classified = |row_parts: usize| -> Result<ClassifyResult, cuda::Error> {
            Ok(self.device.download(self.classified[row_parts].slice())?[0])
        };
        let whole = classified(WHOLE_ROWS)?;
        let unprotected = classified(UNPROTECTED_PARTS)?;
        let list_faults = |set: &DevicePageSet| {
            let counters = self.device.download(set.fault_counts.slice())?;
            let first_word = self.device.download(set.bitmap.slice().part(0, 1)?)?[0];
            let (duplicates, outside_pool) = (counters[0], counters[1]);
            // The padding page is page 0, so its bit is the lowest bit of the first word.
            let has_padding = first_word & 1 != 0;
            Ok::<_, cuda::Error>(ListFaults { duplicates, outside_pool, has_padding })
        };
        Ok(Counts {
            sessions,
            classes: whole.classes,
            unprotected_classes: unprotected.classes,
            aliased_pages: whole.aliased_pages,
            free_runs: whole.free_runs,
            free: list_faults(&self.free)?,
            tree: list_faults(&self.tree)?,
        })
    }

    /// Returns the private copy of the rows, and the engine's lists. Waits.
    fn download_copy(&self) -> Result<PoolCopy, cuda::Error> {
        let npages = self.pool_size.npages;
        let download = |list: &IdList| self.device.download(ids(list)?);
        let free = self.copy.free.iter().map(download).collect::<Result<Vec<_>, _>>()?;
        let free = ListedPages::new(free.into_iter().flatten(), 0, npages);
        let tree = download(&self.copy.tree)?;
        let tree = ListedPages::new(tree, self.pool_size.page_shift, npages);
        let page_list = self.page_list.buffer.slice().part(0, self.copy.refs)?;
        let row_page_ids = self.device.download(page_list)?;
        Ok(PoolCopy { row_page_ids, free, tree })
    }
}

impl Backend for DeviceBackend {
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &CopyLayout,
        stream: Stream,
    ) -> Result<(), Error> {
        self.copy = CopyInProgress {
            refs: layout
                .rows
                .last()
                .map_or(0, |row| (row.list_start + row.pages(pool.page_shift())) as usize),
            window: layout.window.start as usize..layout.window.end as usize,
            free: snapshot.free.to_vec(),
            tree: snapshot.tree,
            copy_end: None,
        };
        // The device can do this work at once: it doesn't read the engine's memory.
        self.device.set_live_rows(&mut self.rows, &layout.rows, self.pool_size)?;
        self.device.clear_set(&mut self.free)?;
        self.device.clear_set(&mut self.tree)?;
        // SAFETY: the caller of `Stream::new` guaranteed a stream of this device.
        unsafe { self.device.wait_for(stream.handle())? };
        Ok(self.enqueue_copy(pool, layout)?)
    }

    fn is_copied(&mut self) -> Result<bool, Error> {
        let is_done = self.copy.copy_end.as_ref().map(StreamPoint::is_done).transpose()?;
        Ok(is_done.unwrap_or(false))
    }

    fn wait(&mut self) -> Result<(), Error> {
        Ok(self.device.synchronize()?)
    }

    fn count(&mut self, _pool: &Pool, valid_rows: &ValidRows) -> Result<Counts, Error> {
        Ok(self.count_pages(valid_rows)?)
    }

    fn read_copy(&mut self, _pool: &Pool) -> Result<PoolCopy, Error> {
        Ok(self.download_copy()?)
    }

    fn digests(&mut self) -> Result<Vec<PageDigest>, Error> {
        let Range { start, end } = self.copy.window;
        let window_len = end - start;
        let pages = self.device.download(self.page_list.buffer.slice().part(start, window_len)?)?;
        let digests = self.device.download(self.digests.buffer.slice().part(0, window_len)?)?;
        let page_digest = |(page, digest)| PageDigest { page, digest };
        Ok(pages.into_iter().zip(digests).map(page_digest).collect())
    }
}

fn ids<'a>(list: &IdList) -> Result<DeviceSlice<'a, i64>, cuda::Error> {
    let entries = usize::try_from(list.entries()).unwrap_or(usize::MAX);
    // SAFETY: the caller of `IdList::new` guaranteed these entries until the audit is over.
    unsafe { DeviceSlice::foreign(list.addr(), entries) }
}

#[derive(Debug)]
struct GrowableBuffer<T: DeviceValue> {
    buffer: DeviceBuffer<T>,
    /// Freed only when the accountant is dropped, because freeing device memory waits for the whole
    /// device, also for the engine's work. Together they are smaller than `buffer`.
    replaced: Vec<DeviceBuffer<T>>,
}

impl<T: DeviceValue> GrowableBuffer<T> {
    fn new(device: &Device, len: usize) -> Result<Self, cuda::Error> {
        Ok(Self { buffer: device.alloc(len)?, replaced: vec![] })
    }

    /// Returns a buffer for at least `len` values. Their contents are undefined.
    fn with_room(
        &mut self,
        device: &Device,
        len: usize,
    ) -> Result<&mut DeviceBuffer<T>, cuda::Error> {
        if self.buffer.len() < len {
            let larger = device.alloc(len.max(2 * self.buffer.len()))?;
            self.replaced.push(std::mem::replace(&mut self.buffer, larger));
        }
        Ok(&mut self.buffer)
    }
}
