//! Accounting in host memory with the scalar reference, for engines on a CPU and as tests' oracle.

use super::{
    Error, Pool, Stream,
    backend::{Backend, Counts, Layout},
    snapshot::{Buffer, Snapshot, List},
};
use crate::{
    audit::{Books, Kept, Listed},
    reference::{self, KvBytes},
};
use std::{ptr, slice};

/// The private copy, made synchronously.
#[derive(Debug, Default)]
pub(super) struct Host {
    books: Books,
    window: Vec<(u32, u64)>,
}

impl Backend for Host {
    fn copy(
        &mut self,
        pool: &Pool,
        snapshot: &Snapshot<'_>,
        layout: &Layout,
        _stream: Stream,
    ) -> Result<(), Error> {
        let (npages, shift) = (pool.pages(), pool.shift());
        let table = pool.table();
        let (ld, size) = (table.stride as usize, table.rows as usize * table.stride as usize);
        // SAFETY: the caller of `Pool::new` guaranteed that these entries are readable while an
        // accountant of the pool lives. The thread that takes a snapshot is the thread that writes
        // them, so they don't change during this call.
        let entries: &[i32] = unsafe { at(table.addr, size) };
        let (staged, _) = reference::gather_pages(entries, ld, &layout.rows, shift, npages);
        let free = snapshot.free.iter().flat_map(|list| ids(list).iter().copied());
        let free = (!snapshot.free.is_empty()).then(|| Listed::of(free, 0, npages));
        let tree =
            snapshot.tree.as_ref().map(|list| Listed::of(ids(list).iter().copied(), shift, npages));
        let pages = &staged[layout.window.start as usize..layout.window.end as usize];
        let digests = reference::page_digest(&buffers(pool), pages);
        self.window = pages.iter().copied().zip(digests).collect();
        self.books = Books { staged, free, tree };
        Ok(())
    }

    fn copied(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    fn settle(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn count(&mut self, pool: &Pool, kept: &Kept) -> Result<Counts, Error> {
        Ok(Counts::scalar(&self.books, kept, pool))
    }

    fn books(&mut self, _pool: &Pool) -> Result<Books, Error> {
        Ok(std::mem::take(&mut self.books))
    }

    fn window(&mut self) -> Result<Vec<(u32, u64)>, Error> {
        Ok(std::mem::take(&mut self.window))
    }
}

fn ids(list: &List) -> &[i64] {
    // SAFETY: the caller of `List::new` guaranteed that these entries are readable until the audit
    // is over.
    unsafe { at(list.addr(), size(list.entries())) }
}

fn buffers(pool: &Pool) -> Vec<KvBytes<'_>> {
    let bytes = |buffer: &Buffer| {
        let page_bytes = size(buffer.page_bytes);
        // SAFETY: the caller of `Pool::new` guaranteed all pages of each buffer, and that they
        // stay.
        let bytes = unsafe { at(buffer.addr, pool.pages() as usize * page_bytes) };
        KvBytes { bytes, page_bytes }
    };
    pool.buffers().iter().map(bytes).collect()
}

/// Returns `n` values at an address that was checked to be aligned, and non-null unless `n` is 0.
///
/// # Safety
/// The values must be readable for `'a`.
unsafe fn at<'a, T>(addr: u64, n: usize) -> &'a [T] {
    if n == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(size(addr)), n) }
}

fn size(value: u64) -> usize {
    usize::try_from(value).expect("usize has 64 bits on supported machines")
}
