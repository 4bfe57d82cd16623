//! Accounting on a CUDA device with the kernels.
//!
//! A buffer that is too small is replaced by one at least twice as large, and the smaller one is
//! kept until the end: freeing device memory waits for the whole device, including the engine's
//! work.

use super::{
    Error, Pool, Stream,
    backend::{Backend, CopyLayout, Counts, ListCount},
    snapshot::{List, PoolBuffer, Snapshot},
};
use crate::{
    audit::{ListedPages, PoolCopy, ValidRows},
    cuda::{
        self, Classified, Device, DeviceBuffer, DeviceMarks, DevicePageSet, DeviceTable, KvBuffer,
        KvBuffers, LiveRows, Plain, Slice, StreamMark,
    },
    reference::SessionPages,
};
use std::ops::Range;

/// Initial room for digests, in pages: enough for 64 MiB of 16 KiB pages.
const DIGESTS: usize = 1 << 12;

/// The device, and all device memory that an audit needs.
#[derive(Debug)]
pub(super) struct OnDevice {
    device: Device,
    pool: cuda::PoolSize,
    kv: KvBuffers,
    rows: LiveRows,
    own: LiveRows,
    staged: Growing<u32>,
    bad: DeviceBuffer<u64>,
    free: DevicePageSet,
    tree: DevicePageSet,
    marks: DeviceMarks,
    claimed: DeviceBuffer<u32>,
    referenced: DeviceBuffer<u32>,
    shared: DeviceBuffer<u32>,
    sessions: Growing<SessionPages>,
    classified: [DeviceBuffer<Classified>; 2],
    digests: Growing<u64>,
    copy: CopyInProgress,
}

/// The audit in progress.
#[derive(Debug, Default)]
struct CopyInProgress {
    refs: usize,
    window: Range<usize>,
    /// The free lists; `None` if the snapshot has none.
    free: Option<Vec<List>>,
    tree: Option<List>,
    end: Option<StreamMark>,
}

impl OnDevice {
    /// Allocates everything that an audit of this pool needs.
    pub(super) fn new(device: Device, pool: &Pool) -> Result<Self, cuda::Error> {
        let npages = pool.pages();
        let on = cuda::PoolSize { page_shift: pool.page_shift(), npages };
        let part =
            |&PoolBuffer { addr, page_bytes }: &PoolBuffer| KvBuffer { address: addr, page_bytes };
        let parts: Vec<KvBuffer> = pool.buffers().iter().map(part).collect();
        let rows = pool.rows_max();
        Ok(Self {
            // SAFETY: the caller of `Pool::new` guaranteed all pages of each buffer while `self`
            // lives.
            kv: unsafe { device.kv_buffers(&parts, npages)? },
            rows: device.live_rows(rows)?,
            own: device.live_rows(rows)?,
            // Needs to grow only if rows share pages.
            staged: Growing::new(&device, npages as usize)?,
            bad: device.alloc(1)?,
            free: device.page_set(on)?,
            tree: device.page_set(on)?,
            marks: device.marks(npages)?,
            claimed: device.alloc(on.words())?,
            referenced: device.alloc(on.words())?,
            shared: device.alloc(on.words())?,
            sessions: Growing::new(&device, rows)?,
            classified: [device.alloc(1)?, device.alloc(1)?],
            digests: Growing::new(&device, DIGESTS)?,
            copy: CopyInProgress::default(),
            pool: on,
            device,
        })
    }

    fn enqueue(&mut self, pool: &Pool, layout: &CopyLayout) -> Result<(), cuda::Error> {
        let table = pool.table();
        let size = table.rows as usize * table.stride as usize;
        // SAFETY: the caller of `Pool::new` guaranteed these entries while `self` lives.
        let entries = unsafe { Slice::foreign(table.addr, size)? };
        let table = DeviceTable { entries, ld: table.stride.into() };
        let device = &self.device;
        let staged = self.staged.at_least(device, self.copy.refs)?;
        if !layout.rows.is_empty() {
            device.gather_pages(table, &self.rows, staged, &mut self.bad)?;
        }
        for list in self.copy.free.iter().flatten() {
            device.list_to_set(ids(list)?, 0, self.pool, &mut self.free)?;
        }
        if let Some(list) = &self.copy.tree {
            let shift = self.pool.page_shift;
            device.list_to_set(ids(list)?, shift, self.pool, &mut self.tree)?;
        }
        let Range { start, end } = self.copy.window;
        if start < end {
            let pages = staged.slice().part(start, end - start)?;
            let digests = self.digests.at_least(device, end - start)?;
            device.page_digest(&self.kv, pages, digests)?;
        }
        self.copy.end = Some(device.record()?);
        Ok(())
    }

    /// Enqueues marking and classifying the pages that these rows reference.
    fn classify(&mut self, which: usize) -> Result<(), cuda::Error> {
        let rows = [&self.rows, &self.own][which];
        let device = &self.device;
        device.mark(rows, &self.staged.buffer, &mut self.marks)?;
        device.ref_bitmap(&self.marks, self.pool, &mut self.referenced, &mut self.shared)?;
        device.classify(
            &self.free,
            &self.tree,
            &self.referenced,
            &self.shared,
            self.pool,
            &mut self.classified[which],
        )
    }

    fn count_pages(&mut self, kept: &ValidRows) -> Result<Counts, cuda::Error> {
        self.device.set_live_rows(&mut self.rows, &kept.rows, self.pool)?;
        self.device.set_live_rows(&mut self.own, &kept.own, self.pool)?;
        self.classify(0)?;
        let device = &self.device;
        let numbers = self.rows.sessions();
        let sessions = self.sessions.at_least(device, numbers)?;
        let (staged, tree) = (&self.staged.buffer, Some(&self.tree));
        device.session(&self.rows, staged, &self.marks, tree, &mut self.claimed, sessions)?;
        let sessions = device.download(sessions.slice().part(0, numbers)?)?;
        self.classify(1)?;
        let classified = |which: usize| -> Result<Classified, cuda::Error> {
            Ok(self.device.download(self.classified[which].slice())?[0])
        };
        let (all, own) = (classified(0)?, classified(1)?);
        let list = |set: &DevicePageSet, given: bool| -> Result<Option<ListCount>, cuda::Error> {
            let counters = self.device.download(set.duplicates_bad.slice())?;
            let first = self.device.download(set.words.slice().part(0, 1)?)?[0];
            let (duplicates, bad) = (counters[0], counters[1]);
            Ok(given.then_some(ListCount { duplicates, bad, padding: first & 1 != 0 }))
        };
        Ok(Counts {
            sessions,
            classes: all.classes,
            own_classes: own.classes,
            aliased: all.aliased,
            free_runs: all.free_runs,
            free: list(&self.free, self.copy.free.is_some())?,
            tree: list(&self.tree, self.copy.tree.is_some())?,
        })
    }

    fn download_copy(&self) -> Result<PoolCopy, cuda::Error> {
        let npages = self.pool.npages;
        let list = |list: &List| self.device.download(ids(list)?);
        let free = match &self.copy.free {
            None => None,
            Some(lists) => {
                let lists = lists.iter().map(list).collect::<Result<Vec<_>, _>>()?;
                Some(ListedPages::new(lists.into_iter().flatten(), 0, npages))
            }
        };
        let tree = match &self.copy.tree {
            None => None,
            Some(tree) => Some(ListedPages::new(list(tree)?, self.pool.page_shift, npages)),
        };
        let staged = self.device.download(self.staged.buffer.slice().part(0, self.copy.refs)?)?;
        Ok(PoolCopy { staged, free, tree })
    }
}

impl Backend for OnDevice {
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
                .map_or(0, |row| (row.out_off + row.pages(pool.page_shift())) as usize),
            window: layout.window.start as usize..layout.window.end as usize,
            free: (!snapshot.free.is_empty()).then(|| snapshot.free.to_vec()),
            tree: snapshot.tree,
            end: None,
        };
        // Work that doesn't read the engine's memory is enqueued before the wait for the engine.
        self.device.set_live_rows(&mut self.rows, &layout.rows, self.pool)?;
        self.device.clear_set(&mut self.free)?;
        self.device.clear_set(&mut self.tree)?;
        // SAFETY: the caller of `Stream::new` guaranteed a stream of this device.
        unsafe { self.device.wait_for(stream.handle())? };
        Ok(self.enqueue(pool, layout)?)
    }

    fn is_copied(&mut self) -> Result<bool, Error> {
        let copied = self.copy.end.as_ref().map(StreamMark::is_done).transpose()?;
        Ok(copied.unwrap_or(false))
    }

    fn wait(&mut self) -> Result<(), Error> {
        Ok(self.device.synchronize()?)
    }

    fn count(&mut self, _pool: &Pool, kept: &ValidRows) -> Result<Counts, Error> {
        Ok(self.count_pages(kept)?)
    }

    fn read_copy(&mut self, _pool: &Pool) -> Result<PoolCopy, Error> {
        Ok(self.download_copy()?)
    }

    fn digests(&mut self) -> Result<Vec<(u32, u64)>, Error> {
        let Range { start, end } = self.copy.window;
        let n = end - start;
        let pages = self.device.download(self.staged.buffer.slice().part(start, n)?)?;
        let digests = self.device.download(self.digests.buffer.slice().part(0, n)?)?;
        Ok(pages.into_iter().zip(digests).collect())
    }
}

fn ids<'a>(list: &List) -> Result<Slice<'a, i64>, cuda::Error> {
    let entries = usize::try_from(list.entries()).unwrap_or(usize::MAX);
    // SAFETY: the caller of `List::new` guaranteed these entries until the audit is over.
    unsafe { Slice::foreign(list.addr(), entries) }
}

/// Device memory that is replaced when more is needed.
#[derive(Debug)]
struct Growing<T: Plain> {
    buffer: DeviceBuffer<T>,
    /// The replaced buffers; together they are smaller than `buffer`.
    before: Vec<DeviceBuffer<T>>,
}

impl<T: Plain> Growing<T> {
    fn new(device: &Device, len: usize) -> Result<Self, cuda::Error> {
        Ok(Self { buffer: device.alloc(len)?, before: vec![] })
    }

    fn at_least(
        &mut self,
        device: &Device,
        len: usize,
    ) -> Result<&mut DeviceBuffer<T>, cuda::Error> {
        if self.buffer.len() < len {
            let larger = device.alloc(len.max(2 * self.buffer.len()))?;
            self.before.push(std::mem::replace(&mut self.buffer, larger));
        }
        Ok(&mut self.buffer)
    }
}
