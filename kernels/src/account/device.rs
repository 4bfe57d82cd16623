//! Accounting on a CUDA device with the kernels.
//!
//! A buffer that is too small is replaced by one at least twice as large, and the smaller one is
//! kept until the end: freeing device memory waits for the whole device, including the engine's
//! work.

use super::{
    Error, Pool, Stream,
    backend::{Backend, Counts, Layout, ListCount},
    snapshot::{Buffer as KvPart, Snapshot, List},
};
use crate::{
    audit::{Books, Kept, Listed},
    cuda::{
        self, Buffer, Classified, Device, KvBuffer, KvBuffers, LiveRows, Mark, Marks, PageSet,
        Plain, Slice, Table,
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
    pool: cuda::Pool,
    kv: KvBuffers,
    rows: LiveRows,
    own: LiveRows,
    staged: Growing<u32>,
    bad: Buffer<u64>,
    free: PageSet,
    tree: PageSet,
    marks: Marks,
    claimed: Buffer<u32>,
    referenced: Buffer<u32>,
    shared: Buffer<u32>,
    sessions: Growing<SessionPages>,
    classified: [Buffer<Classified>; 2],
    digests: Growing<u64>,
    taken: Taken,
}

/// The audit in progress.
#[derive(Debug, Default)]
struct Taken {
    refs: usize,
    window: Range<usize>,
    /// The free lists; `None` if the snapshot has none.
    free: Option<Vec<List>>,
    tree: Option<List>,
    copied: Option<Mark>,
}

impl OnDevice {
    /// Allocates everything that an audit of this pool needs.
    pub(super) fn new(device: Device, pool: &Pool) -> Result<Self, cuda::Error> {
        let npages = pool.pages();
        let on = cuda::Pool { page_shift: pool.shift(), npages };
        let part = |&KvPart { addr, page_bytes }: &KvPart| KvBuffer { address: addr, page_bytes };
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
            taken: Taken::default(),
            pool: on,
            device,
        })
    }

    fn enqueue(&mut self, pool: &Pool, layout: &Layout) -> Result<(), cuda::Error> {
        let table = pool.table();
        let size = table.rows as usize * table.stride as usize;
        // SAFETY: the caller of `Pool::new` guaranteed these entries while `self` lives.
        let entries = unsafe { Slice::foreign(table.addr, size)? };
        let table = Table { entries, ld: table.stride.into() };
        let device = &self.device;
        let staged = self.staged.at_least(device, self.taken.refs)?;
        if !layout.rows.is_empty() {
            device.gather_pages(table, &self.rows, staged, &mut self.bad)?;
        }
        for list in self.taken.free.iter().flatten() {
            device.list_to_set(ids(list)?, 0, self.pool, &mut self.free)?;
        }
        if let Some(list) = &self.taken.tree {
            let shift = self.pool.page_shift;
            device.list_to_set(ids(list)?, shift, self.pool, &mut self.tree)?;
        }
        let Range { start, end } = self.taken.window;
        if start < end {
            let pages = staged.slice().part(start, end - start)?;
            let digests = self.digests.at_least(device, end - start)?;
            device.page_digest(&self.kv, pages, digests)?;
        }
        self.taken.copied = Some(device.record()?);
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

    fn counted(&mut self, kept: &Kept) -> Result<Counts, cuda::Error> {
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
        let list = |set: &PageSet, given: bool| -> Result<Option<ListCount>, cuda::Error> {
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
            free: list(&self.free, self.taken.free.is_some())?,
            tree: list(&self.tree, self.taken.tree.is_some())?,
        })
    }

    fn copy_of_books(&self) -> Result<Books, cuda::Error> {
        let npages = self.pool.npages;
        let list = |list: &List| self.device.download(ids(list)?);
        let free = match &self.taken.free {
            None => None,
            Some(lists) => {
                let lists = lists.iter().map(list).collect::<Result<Vec<_>, _>>()?;
                Some(Listed::of(lists.into_iter().flatten(), 0, npages))
            }
        };
        let tree = match &self.taken.tree {
            None => None,
            Some(tree) => Some(Listed::of(list(tree)?, self.pool.page_shift, npages)),
        };
        let staged = self.device.download(self.staged.buffer.slice().part(0, self.taken.refs)?)?;
        Ok(Books { staged, free, tree })
    }
}

impl Backend for OnDevice {
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &Layout,
        stream: Stream,
    ) -> Result<(), Error> {
        self.taken = Taken {
            refs: layout
                .rows
                .last()
                .map_or(0, |row| (row.out_off + row.pages(pool.shift())) as usize),
            window: layout.window.start as usize..layout.window.end as usize,
            free: (!snapshot.free.is_empty()).then(|| snapshot.free.to_vec()),
            tree: snapshot.tree,
            copied: None,
        };
        // Work that doesn't read the engine's memory is enqueued before the wait for the engine.
        self.device.set_live_rows(&mut self.rows, &layout.rows, self.pool)?;
        self.device.clear_set(&mut self.free)?;
        self.device.clear_set(&mut self.tree)?;
        // SAFETY: the caller of `Stream::new` guaranteed a stream of this device.
        unsafe { self.device.wait_for(stream.handle())? };
        Ok(self.enqueue(pool, layout)?)
    }

    fn copied(&mut self) -> Result<bool, Error> {
        let copied = self.taken.copied.as_ref().map(Mark::done).transpose()?;
        Ok(copied.unwrap_or(false))
    }

    fn settle(&mut self) -> Result<(), Error> {
        Ok(self.device.synchronize()?)
    }

    fn count(&mut self, _pool: &Pool, kept: &Kept) -> Result<Counts, Error> {
        Ok(self.counted(kept)?)
    }

    fn books(&mut self, _pool: &Pool) -> Result<Books, Error> {
        Ok(self.copy_of_books()?)
    }

    fn window(&mut self) -> Result<Vec<(u32, u64)>, Error> {
        let Range { start, end } = self.taken.window;
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
    buffer: Buffer<T>,
    /// The replaced buffers; together they are smaller than `buffer`.
    before: Vec<Buffer<T>>,
}

impl<T: Plain> Growing<T> {
    fn new(device: &Device, len: usize) -> Result<Self, cuda::Error> {
        Ok(Self { buffer: device.alloc(len)?, before: vec![] })
    }

    fn at_least(&mut self, device: &Device, len: usize) -> Result<&mut Buffer<T>, cuda::Error> {
        if self.buffer.len() < len {
            let larger = device.alloc(len.max(2 * self.buffer.len()))?;
            self.before.push(std::mem::replace(&mut self.buffer, larger));
        }
        Ok(&mut self.buffer)
    }
}
