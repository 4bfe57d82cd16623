//! Synthetic tables of an engine on a device, as large as a real engine's.

use anyhow::Context;
use fastrand::Rng;
use kernels::{
    account::{self, IdList, PoolBuffer, SnapshotRow},
    cuda::{Device, DeviceBuffer, DeviceSlice, KvBuffer, KvBuffers, PoolSize},
    reference::{LiveRow, lay_out},
};

/// Rows that hold the pool's pages.
pub(crate) const ROWS: u32 = 32;

/// The size of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) pages: u32,
    pub(crate) shift: u32,
    /// Bytes of KV per page, all in one buffer.
    pub(crate) page_bytes: u64,
}

impl Size {
    /// Returns the two sizes: 4 Mi pages of one token, and 64 Ki pages of 64 tokens, with 1 GiB of
    /// KV each. On the fake driver both are a thousand times smaller.
    pub(crate) fn all(fake: bool) -> [Self; 2] {
        let less = if fake { 10 } else { 0 };
        [(22, 0), (16, 6)].map(|(bits, shift)| Self {
            pages: 1 << (bits - less),
            shift,
            page_bytes: 1 << (30 - bits),
        })
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pages of {}", self.pages, 1 << self.shift)
    }
}

/// Which lists hold the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// Rows, free list and tree all name all pages: the most work for the kernels.
    ByAll,
    /// Rows hold half of the pages, free list and tree a quarter each: a sound engine.
    ByOne,
}

/// The tables.
#[derive(Debug)]
pub(crate) struct Synthetic {
    pub(crate) pool: PoolSize,
    pub(crate) size: Size,
    pub(crate) entries: DeviceBuffer<i32>,
    pub(crate) stride: u32,
    pub(crate) rows: Vec<LiveRow>,
    pub(crate) free: DeviceBuffer<i64>,
    pub(crate) tree: DeviceBuffer<i64>,
    pub(crate) kv: DeviceBuffer<u8>,
}

impl Synthetic {
    pub(crate) fn new(
        device: &Device,
        size: Size,
        held: Held,
        scattered: bool,
    ) -> anyhow::Result<Self> {
        let Size { pages: npages, shift, page_bytes, .. } = size;
        let mut pages: Vec<u32> = (1..npages).collect();
        if scattered {
            Rng::with_seed(1).shuffle(&mut pages);
        }
        let quarter = pages.len() / 4;
        let (in_rows, free, tree) = match held {
            Held::ByAll => (&pages[..], &pages[..], &pages[..]),
            Held::ByOne => {
                let (lists, rows) = pages.split_at(2 * quarter);
                (rows, &lists[..quarter], &lists[quarter..])
            }
        };
        let each = in_rows.len().div_ceil(ROWS as usize);
        let stride = u32::try_from(each << shift)?;
        let mut entries = vec![0; (ROWS * stride) as usize];
        let mut rows = vec![];
        for (row, held) in (0..).zip(in_rows.chunks(each)) {
            for (place, &page) in held.iter().enumerate() {
                entries[(row * stride) as usize + (place << shift)] = i32::try_from(page << shift)?;
            }
            let len = u32::try_from(held.len() << shift)?;
            rows.push(LiveRow { row, len, session: row, list_start: 0 });
        }
        lay_out(&mut rows, shift);
        let free: Vec<i64> = free.iter().map(|&page| page.into()).collect();
        let slots = |&page: &u32| (i64::from(page) << shift)..(i64::from(page) + 1) << shift;
        let tree: Vec<i64> = tree.iter().flat_map(slots).collect();
        let kv = usize::try_from(u64::from(npages) * page_bytes).context("the KV's size")?;
        let uploaded = |ids: &[i64]| {
            let mut buffer = device.alloc(ids.len())?;
            device.upload(&mut buffer, ids).map(|()| buffer)
        };
        let mut table = device.alloc(entries.len())?;
        device.upload(&mut table, &entries)?;
        Ok(Self {
            pool: PoolSize { page_shift: shift, npages },
            size,
            entries: table,
            stride,
            rows,
            free: uploaded(&free)?,
            tree: uploaded(&tree)?,
            kv: device.alloc(kv)?,
        })
    }

    /// Returns the number of page references of all rows.
    pub(crate) fn refs(&self) -> usize {
        self.rows.iter().map(|row| row.pages(self.size.shift) as usize).sum()
    }

    /// Returns the KV buffers in the kernels' form.
    pub(crate) fn kv_buffers(&self, device: &Device) -> anyhow::Result<KvBuffers> {
        let part = KvBuffer { address: self.kv.address(), page_bytes: self.size.page_bytes };
        // SAFETY: `kv` has that many bytes for each page, and callers keep `self` longer.
        Ok(unsafe { device.kv_buffers(&[part], self.pool.npages)? })
    }

    /// Returns the pool in the accountant's form.
    pub(crate) fn account_pool(&self) -> anyhow::Result<account::Pool> {
        let part = PoolBuffer { addr: self.kv.address(), page_bytes: self.size.page_bytes };
        let table =
            account::RequestTable { addr: self.entries.address(), rows: ROWS, stride: self.stride };
        // SAFETY: the buffers have these sizes, and callers keep `self` longer.
        Ok(unsafe { account::Pool::new(1 << self.size.shift, self.size.pages, table, vec![part])? })
    }

    /// Returns the free list and the tree in the accountant's form.
    pub(crate) fn lists(&self) -> [IdList; 2] {
        [self.free.slice(), self.tree.slice()].map(|ids: DeviceSlice<'_, i64>| {
            // SAFETY: the lists never change, and callers keep `self` longer than the audit.
            unsafe { IdList::new(ids.address(), ids.len() as u64) }
        })
    }

    /// Returns the live rows for a snapshot.
    pub(crate) fn snapshot_rows(&self) -> Vec<SnapshotRow> {
        let row = |live: &LiveRow| SnapshotRow {
            row: live.row,
            len: live.len,
            session: live.session,
            sealed_tokens: live.len,
            protected_tokens: 0,
            version: 1,
        };
        self.rows.iter().map(row).collect()
    }
}
