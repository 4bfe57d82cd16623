//! Accounting in host memory with the scalar reference, for engines on a CPU and as tests' oracle.

use super::{
    Error, Pool, Stream,
    backend::{Backend, CopyLayout, Counts},
    snapshot::{List, PoolBuffer, Snapshot},
};
use crate::{
    audit::{ListedPages, PoolCopy, ValidRows},
    reference::{self, KvBytes},
};
use std::{ptr, slice};

/// The private copy, made synchronously.
#[derive(Debug, Default)]
pub(super) struct Host {
    copy: PoolCopy,
    window: Vec<(u32, u64)>,
}

impl Backend for Host {
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &CopyLayout,
        _stream: Stream,
    ) -> Result<(), Error> {
        let (npages, shift) = (pool.pages(), pool.page_shift());
        let table = pool.table();
        let (ld, size) = (table.stride as usize, table.rows as usize * table.stride as usize);
        // SAFETY: the caller of `Pool::new` guaranteed that these entries are readable while an
        // accountant of the pool lives. The thread that takes a snapshot is the thread that writes
        // them, so they don't change during this call.
        let entries: &[i32] = unsafe { values_at(table.addr, size) };
        let (staged, _) = reference::gather_pages(entries, ld, &layout.rows, shift, npages);
        let free = snapshot.free.iter().flat_map(|list| ids(list).iter().copied());
        let free = (!snapshot.free.is_empty()).then(|| ListedPages::new(free, 0, npages));
        let tree = snapshot
            .tree
            .as_ref()
            .map(|list| ListedPages::new(ids(list).iter().copied(), shift, npages));
        let pages = &staged[layout.window.start as usize..layout.window.end as usize];
        let digests = reference::page_digest(&buffers(pool), pages);
        self.window = pages.iter().copied().zip(digests).collect();
        self.copy = PoolCopy { staged, free, tree };
        Ok(())
    }

    fn is_copied(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    fn wait(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn count(&mut self, pool: &Pool, kept: &ValidRows) -> Result<Counts, Error> {
        Ok(Counts::by_reference(&self.copy, kept, pool))
    }

    fn read_copy(&mut self, _pool: &Pool) -> Result<PoolCopy, Error> {
        Ok(std::mem::take(&mut self.copy))
    }

    fn digests(&mut self) -> Result<Vec<(u32, u64)>, Error> {
        Ok(std::mem::take(&mut self.window))
    }
}

fn ids(list: &List) -> &[i64] {
    // SAFETY: the caller of `List::new` guaranteed that these entries are readable until the audit
    // is over.
    unsafe { values_at(list.addr(), size(list.entries())) }
}

fn buffers(pool: &Pool) -> Vec<KvBytes<'_>> {
    let bytes = |buffer: &PoolBuffer| {
        let page_bytes = size(buffer.page_bytes);
        // SAFETY: the caller of `Pool::new` guaranteed all pages of each buffer, and that they
        // stay.
        let bytes = unsafe { values_at(buffer.addr, pool.pages() as usize * page_bytes) };
        KvBytes { bytes, page_bytes }
    };
    pool.buffers().iter().map(bytes).collect()
}

/// Returns `n` values at an address that was checked to be aligned, and non-null unless `n` is 0.
///
/// # Safety
/// The values must be readable for `'a`.
unsafe fn values_at<'a, T>(addr: u64, n: usize) -> &'a [T] {
    if n == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(size(addr)), n) }
}

fn size(value: u64) -> usize {
    usize::try_from(value).expect("usize has 64 bits on supported machines")
}
