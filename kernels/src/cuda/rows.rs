//! Puts the live rows of a snapshot on the device, and checks them so that kernels can trust them.
//!
//! A live row is a request's or session's part of the list of held pages.

use super::{Device, DeviceBuffer, Error, PinnedBuffer, WARP, at_most};
use crate::reference::{LiveRow, OWNER_SHARED};

/// Base-2 logarithm of the largest page size: the engine's token slots are positive `i32`s.
pub(super) const PAGE_SHIFT_MAX: u32 = 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSize {
    /// Base-2 logarithm of the page size in token slots.
    pub page_shift: u32,
    /// Number of pages, including the padding page 0.
    pub npages: u32,
}

impl PoolSize {
    pub fn bitmap_words(self) -> usize {
        self.npages.div_ceil(WARP) as usize
    }
}

#[derive(Debug)]
pub struct LiveRows {
    pub(super) rows: DeviceBuffer<LiveRow>,
    staging: PinnedBuffer<LiveRow>,
    pub(super) count: u32,
    /// Where the last row's part of the page list ends.
    pub(super) page_list_len: u32,
    pub(super) refs_per_row_max: u32,
    /// The highest session number plus one.
    pub(super) session_numbers_end: u32,
    pub(super) pool: PoolSize,
}

impl LiveRows {
    pub fn page_list_len(&self) -> usize {
        self.page_list_len as usize
    }

    pub fn session_numbers_end(&self) -> usize {
        self.session_numbers_end as usize
    }

    pub fn pool(&self) -> PoolSize {
        self.pool
    }
}

impl Device {
    pub fn live_rows(&self, rows_max: usize) -> Result<LiveRows, Error> {
        at_most("live rows", rows_max as u64, u32::MAX.into())?;
        Ok(LiveRows {
            rows: self.alloc(rows_max)?,
            staging: self.pinned(rows_max)?,
            count: 0,
            page_list_len: 0,
            refs_per_row_max: 0,
            session_numbers_end: 0,
            pool: PoolSize { page_shift: 0, npages: 0 },
        })
    }

    /// The rows must be in ascending order of [`LiveRow::list_start`], and must not overlap. Gaps
    /// are allowed: a caller can leave out rows that have changed since the page list was made.
    /// Session numbers should be small, because arrays are indexed by them. Returns
    /// [`Error::CopyInFlight`] while the previous rows are still being copied.
    pub fn set_live_rows(
        &self,
        live: &mut LiveRows,
        rows: &[LiveRow],
        pool: PoolSize,
    ) -> Result<(), Error> {
        at_most("page shift", pool.page_shift.into(), PAGE_SHIFT_MAX.into())?;
        at_most("live rows", rows.len() as u64, live.rows.len() as u64)?;
        let (mut page_list_len, mut refs_per_row_max, mut session_numbers_end) = (0, 0, 0);
        for row in rows {
            let pages = row.pages(pool.page_shift);
            if row.list_start < page_list_len {
                return Err(Error::OverlappingRows);
            }
            page_list_len = row.list_start.checked_add(pages).ok_or(Error::OverlappingRows)?;
            refs_per_row_max = pages.max(refs_per_row_max);
            at_most("session number", row.session.into(), u64::from(OWNER_SHARED) - 1)?;
            session_numbers_end = session_numbers_end.max(row.session + 1);
        }
        let staging = live.staging.get_mut()?.ok_or(Error::CopyInFlight)?;
        staging[..rows.len()].copy_from_slice(rows);
        self.send(&mut live.staging, rows.len(), &mut live.rows)?;
        live.count = u32::try_from(rows.len()).expect("`live_rows` bounds it");
        (live.page_list_len, live.refs_per_row_max) = (page_list_len, refs_per_row_max);
        (live.session_numbers_end, live.pool) = (session_numbers_end, pool);
        Ok(())
    }
}
