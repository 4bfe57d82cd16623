//! Copies and counts a pool in host memory, for an accountant of an engine on a CPU.

use super::{
    Error, Pool, Stream,
    backend::{Backend, CopyLayout, Counts, PageDigest},
    snapshot::{IdList, PoolBuffer, Snapshot},
};
use crate::{
    audit::{ListedPages, PoolCopy, ValidRows},
    reference::{self, KvBytes},
};
use std::{ptr, slice};

/// [`Backend::copy`] makes the private copy before it returns.
#[derive(Debug, Default)]
pub(super) struct HostBackend {
    copy: PoolCopy,
    digests: Vec<PageDigest>,
}

impl Backend for HostBackend {
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &CopyLayout,
        _stream: Stream,
    ) -> Result<(), Error> {
        let (npages, page_shift) = (pool.pages(), pool.page_shift());
        let table = pool.table();
        let stride = table.stride as usize;
        let entry_count = table.rows as usize * stride;
        // SAFETY: the caller of `Pool::new` guaranteed that these entries are readable while an
        // accountant of the pool lives. The thread that takes a snapshot is the thread that writes
        // them, so they don't change during this call.
        let entries: &[i32] = unsafe { values_at(table.addr, entry_count) };
        let (row_page_ids, _) =
            reference::gather_pages(entries, stride, &layout.rows, page_shift, npages);
        let free = snapshot.free.iter().flat_map(|list| ids(list).iter().copied());
        let free = ListedPages::new(free, 0, npages);
        let tree = ListedPages::new(ids(&snapshot.tree).iter().copied(), page_shift, npages);
        let pages = &row_page_ids[layout.window.start as usize..layout.window.end as usize];
        let digests = reference::page_digest(&buffers(pool), pages);
        let page_digest = |(page, digest)| PageDigest { page, digest };
        self.digests = pages.iter().copied().zip(digests).map(page_digest).collect();
        self.copy = PoolCopy { row_page_ids, free, tree };
        Ok(())
    }

    fn is_copied(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    fn wait(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn count(&mut self, pool: &Pool, valid_rows: &ValidRows) -> Result<Counts, Error> {
        Ok(Counts::count_by_reference(&self.copy, valid_rows, pool))
    }

    fn read_copy(&mut self, _pool: &Pool) -> Result<PoolCopy, Error> {
        Ok(std::mem::take(&mut self.copy))
    }

    fn digests(&mut self) -> Result<Vec<PageDigest>, Error> {
        Ok(std::mem::take(&mut self.digests))
    }
}

fn ids(list: &IdList) -> &[i64] {
    // SAFETY: the caller of `IdList::new` guaranteed that these entries are readable until the
    // audit is over.
    unsafe { values_at(list.addr(), to_usize(list.entries())) }
}

fn buffers(pool: &Pool) -> Vec<KvBytes<'_>> {
    let kv_bytes = |buffer: &PoolBuffer| {
        let page_bytes = to_usize(buffer.page_bytes);
        // SAFETY: the caller of `Pool::new` guaranteed that all pages of each buffer are readable
        // while an accountant of the pool lives.
        let bytes = unsafe { values_at(buffer.addr, pool.pages() as usize * page_bytes) };
        KvBytes { bytes, page_bytes }
    };
    pool.buffers().iter().map(kv_bytes).collect()
}

/// # Safety
/// Unless `n` is 0, the address must be aligned and not null, and the values readable for `'a`.
unsafe fn values_at<'a, T>(addr: u64, n: usize) -> &'a [T] {
    if n == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(to_usize(addr)), n) }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).expect("usize has 64 bits on supported machines")
}
