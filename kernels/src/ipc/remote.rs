//! The agent's side: an accountant over memory of another process.

use super::Error;
use crate::{
    account::{Accountant, Cut, Pool, Row, Stream, Table},
    cuda::{Device, Exported, Imported},
    report::{Report, SESSIONS_MAX},
    table::{Facts, Reader, TableRow},
};
use std::path::Path;

/// Looks at the newest table before it counts as lost: the ring is overwritten once a turn.
const LOOKS_MAX: usize = 16;

/// Audits one engine from outside.
#[derive(Debug)]
pub struct Remote {
    // Dropped before the memory that it reads.
    accountant: Accountant,
    _imported: Imported,
    reader: Reader,
    open: Option<Open>,
}

/// The audit under way.
#[derive(Debug)]
struct Open {
    epoch: u64,
    rows: Vec<TableRow>,
    keys: Vec<u64>,
    /// The newest step that had begun when the copy was there.
    begun: Option<u64>,
}

/// One audit's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audited {
    pub report: Report,
    /// By the report's session numbers: the keys that the engine gave.
    pub keys: Vec<u64>,
    /// The step that the copied rows are of.
    pub epoch: u64,
}

impl Remote {
    /// Opens the table at `path`, and on `device` the memory that it tells of.
    ///
    /// # Errors
    /// No table, memory that isn't shared ([`Error::Unshared`]) or is of another GPU.
    pub fn open(path: &Path, device: Device) -> Result<Self, Error> {
        let reader = Reader::open(path)?;
        let &Facts { page_tokens, pages, r2t_rows, r2t_stride, ref export } = reader.facts();
        let export = export.as_ref().ok_or(Error::Unshared(None))?;
        if export.uuid != device.uuid()? {
            return Err(Error::OtherGpu);
        }
        let bytes = u64::from(r2t_rows) * u64::from(r2t_stride) * size_of::<i32>() as u64;
        if export.bytes < bytes {
            return Err(Error::Export { bytes: export.bytes });
        }
        let exported = Exported { handle: export.handle, offset: export.offset, bytes };
        let imported = device.import(&exported)?;
        // SAFETY: only the address is taken. The engine takes its table back before it frees, and
        // whatever it writes meanwhile is told by the tables' versions.
        let addr = unsafe { imported.slice::<i32>()? }.address();
        let table = Table { addr, rows: r2t_rows, stride: r2t_stride };
        // SAFETY: mapped for as many bytes as were asked for, and until after the accountant.
        let pool = unsafe { Pool::new(page_tokens, pages, table, vec![])? };
        let accountant = Accountant::device(pool, device)?;
        Ok(Self { accountant, _imported: imported, reader, open: None })
    }

    /// Begins an audit of the newest step that is done; one under way is given up.
    ///
    /// # Errors
    /// [`Error::NoStep`] before the engine's first, a table taken back, a failing device.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.reader.check()?;
        self.give_up()?;
        let (epoch, rows) = self.newest_done()?;
        let sessions = rows.iter().map(|row| row.session as usize + 1).max().unwrap_or(0);
        // More than these the accountant refuses.
        let mut keys = vec![0; sessions.min(SESSIONS_MAX)];
        for row in &rows {
            if let Some(key) = keys.get_mut(row.session as usize) {
                *key = row.key;
            }
        }
        let cut_rows: Vec<Row> = rows.iter().map(cut_row).collect();
        let cut = Cut {
            rows: &cut_rows,
            keys: &keys,
            free: &[],
            tree: None,
            whole: false,
            digest_pages_max: 0,
        };
        self.accountant.begin(&cut, Stream::DEFAULT)?;
        self.open = Some(Open { epoch, rows, keys, begun: None });
        Ok(())
    }

    /// Goes on with the audit: its result, or `None` while the copy isn't made, or while the table
    /// is missing of a step that began before it was. Waits for nothing else.
    ///
    /// # Errors
    /// No audit, a table taken back, a failing device.
    pub fn poll(&mut self) -> Result<Option<Audited>, Error> {
        self.reader.check()?;
        if !self.accountant.ready()? {
            return Ok(None);
        }
        let open = self.open.as_mut().expect("the accountant has an audit, and we begin them");
        let begun = *open.begun.get_or_insert_with(|| self.reader.begun());
        let now = if begun == open.epoch {
            versions(&open.rows)
        } else {
            // A newer table says no less than the one of that step: versions don't come back.
            let newest = self.reader.newest();
            match (newest >= begun).then(|| self.reader.table(newest)).flatten() {
                Some(rows) => versions(&rows),
                None => return Ok(None),
            }
        };
        let report = self.accountant.finish(&now)?;
        let Open { epoch, keys, .. } = self.open.take().expect("it was there a line ago");
        Ok(Some(Audited { report, keys, epoch }))
    }

    /// Gives the audit under way up, if there is one.
    ///
    /// # Errors
    /// A failing device.
    pub fn give_up(&mut self) -> Result<(), Error> {
        if self.open.take().is_some() {
            self.accountant.abandon()?;
        }
        Ok(())
    }

    fn newest_done(&self) -> Result<(u64, Vec<TableRow>), Error> {
        for _ in 0..LOOKS_MAX {
            let epoch = self.reader.done();
            if epoch == 0 {
                return Err(Error::NoStep);
            }
            if let Some(rows) = self.reader.table(epoch) {
                return Ok((epoch, rows));
            }
        }
        Err(Error::Overrun)
    }
}

fn cut_row(row: &TableRow) -> Row {
    Row {
        row: row.row,
        len: row.len,
        session: row.session,
        sealed_tokens: 0,
        protected_tokens: None,
        version: row.version,
    }
}

fn versions(rows: &[TableRow]) -> Vec<(u32, u64)> {
    rows.iter().map(|row| (row.row, row.version)).collect()
}
