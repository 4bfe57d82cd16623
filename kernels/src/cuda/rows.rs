//! A snapshot's live rows on their way to the device: checked here, so kernels may follow them.

use super::{Buffer, Device, Error, Pinned, WARP, at_most};
use crate::reference::{LiveRow, OWNER_SHARED};

/// A slot is a positive `i32`, so no page is larger.
pub(super) const PAGE_SHIFT_MAX: u32 = 30;

/// The pool that rows and lists are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// log2 of a page's token slots.
    pub page_shift: u32,
    /// Pages, the padding page 0 included.
    pub npages: u32,
}

impl Pool {
    /// `u32` words of a bitmap of its pages.
    pub fn words(self) -> usize {
        self.npages.div_ceil(WARP) as usize
    }
}

/// A snapshot's live rows on the device.
#[derive(Debug)]
pub struct LiveRows {
    pub(super) rows: Buffer<LiveRow>,
    staging: Pinned<LiveRow>,
    pub(super) count: u32,
    pub(super) list_len: u32,
    pub(super) refs_row_max: u32,
    pub(super) sessions: u32,
    pub(super) pool: Pool,
}

impl LiveRows {
    /// Where the gathered page list of its rows ends.
    pub fn list_len(&self) -> usize {
        self.list_len as usize
    }

    /// One more than the largest session number.
    pub fn sessions(&self) -> usize {
        self.sessions as usize
    }

    pub fn pool(&self) -> Pool {
        self.pool
    }
}

impl Device {
    /// Room for up to `rows_max` live rows.
    pub fn live_rows(&self, rows_max: usize) -> Result<LiveRows, Error> {
        at_most("live rows", rows_max as u64, u32::MAX.into())?;
        Ok(LiveRows {
            rows: self.alloc(rows_max)?,
            staging: self.pinned(rows_max)?,
            count: 0,
            list_len: 0,
            refs_row_max: 0,
            sessions: 0,
            pool: Pool { page_shift: 0, npages: 0 },
        })
    }

    /// Takes a snapshot's rows, laid out by [`crate::reference::lay_out`]. Sessions are counted by
    /// number, so numbers are small.
    ///
    /// Rows may be missing from a layout: those that stayed as they were can be taken again, over
    /// the same page list. [`Error::InFlight`] where the rows before are still on their way.
    pub fn set_live_rows(
        &self,
        live: &mut LiveRows,
        rows: &[LiveRow],
        pool: Pool,
    ) -> Result<(), Error> {
        at_most("page shift", pool.page_shift.into(), PAGE_SHIFT_MAX.into())?;
        at_most("live rows", rows.len() as u64, live.rows.len() as u64)?;
        let (mut list_len, mut refs_row_max, mut sessions) = (0, 0, 0);
        for row in rows {
            let pages = row.pages(pool.page_shift);
            if row.out_off < list_len {
                return Err(Error::Layout);
            }
            list_len = row.out_off.checked_add(pages).ok_or(Error::Layout)?;
            refs_row_max = pages.max(refs_row_max);
            at_most("session number", row.session.into(), u64::from(OWNER_SHARED) - 1)?;
            sessions = sessions.max(row.session + 1);
        }
        let staging = live.staging.get_mut()?.ok_or(Error::InFlight)?;
        staging[..rows.len()].copy_from_slice(rows);
        self.send(&mut live.staging, rows.len(), &mut live.rows)?;
        live.count = u32::try_from(rows.len()).expect("`live_rows` bounds it");
        (live.list_len, live.refs_row_max) = (list_len, refs_row_max);
        (live.sessions, live.pool) = (sessions, pool);
        Ok(())
    }
}
