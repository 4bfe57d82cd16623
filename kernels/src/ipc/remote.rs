//! The agent's side: an accountant over the memory of another process.

use super::Error;
use crate::{
    account::{Accountant, Pool, RequestTable, Row, Snapshot, Stream},
    cuda::{Device, Exported, Imported},
    report::{Report, SESSIONS_MAX},
    table::{PoolFacts, Reader, TableRow},
};
use std::path::Path;

/// Attempts to read the newest table before giving up; the ring overwrites a table once per round.
const READ_ATTEMPTS_MAX: usize = 16;

/// Audits one engine from outside its process.
#[derive(Debug)]
pub struct Remote {
    // The field order matters: `accountant` must be dropped before the memory that it reads.
    accountant: Accountant,
    _imported: Imported,
    reader: Reader,
    open: Option<OpenAudit>,
}

/// The audit in progress.
#[derive(Debug)]
struct OpenAudit {
    epoch: u64,
    rows: Vec<TableRow>,
    keys: Vec<u64>,
    /// The newest step that had begun when the copy was ready.
    begun: Option<u64>,
}

/// One audit's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteReport {
    pub report: Report,
    /// The engine's session keys, indexed by the report's session numbers.
    pub keys: Vec<u64>,
    /// The step to which the copied rows belong.
    pub epoch: u64,
}

impl Remote {
    /// Opens the table at `path`, and on `device` the memory that the table describes.
    ///
    /// # Errors
    /// When there is no table, the memory isn't shared ([`Error::Unshared`]), or it is on another
    /// GPU.
    pub fn open(path: &Path, device: Device) -> Result<Self, Error> {
        let reader = Reader::open(path)?;
        let &PoolFacts { page_tokens, pages, r2t_rows, r2t_stride, ref export } = reader.facts();
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
        // SAFETY: only the address is taken. The engine closes its table before it frees the
        // memory. The tables' versions reveal what the engine writes in the meantime.
        let addr = unsafe { imported.slice::<i32>()? }.address();
        let table = RequestTable { addr, rows: r2t_rows, stride: r2t_stride };
        // SAFETY: the memory is mapped for the requested bytes, and outlives the accountant.
        let pool = unsafe { Pool::new(page_tokens, pages, table, vec![])? };
        let accountant = Accountant::device(pool, device)?;
        Ok(Self { accountant, _imported: imported, reader, open: None })
    }

    /// Begins an audit of the newest step that is done; abandons an audit in progress.
    ///
    /// # Errors
    /// [`Error::NoStep`] before the engine's first step; also when the table is closed or the
    /// device fails.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.reader.check()?;
        self.abandon()?;
        let (epoch, rows) = self.newest_done()?;
        let sessions = rows.iter().map(|row| row.session as usize + 1).max().unwrap_or(0);
        // The accountant refuses more sessions than this.
        let mut keys = vec![0; sessions.min(SESSIONS_MAX)];
        for row in &rows {
            if let Some(key) = keys.get_mut(row.session as usize) {
                *key = row.key;
            }
        }
        let snapshot_rows: Vec<Row> = rows.iter().map(snapshot_row).collect();
        let snapshot = Snapshot {
            rows: &snapshot_rows,
            keys: &keys,
            free: &[],
            tree: None,
            complete: false,
            digest_pages_max: 0,
        };
        self.accountant.begin(&snapshot, Stream::DEFAULT)?;
        self.open = Some(OpenAudit { epoch, rows, keys, begun: None });
        Ok(())
    }

    /// Returns the audit's result, or `None` while the copy isn't ready or the table isn't
    /// published of a step that began before the copy was ready. Doesn't wait.
    ///
    /// # Errors
    /// When there is no audit, the table is closed, or the device fails.
    pub fn poll(&mut self) -> Result<Option<RemoteReport>, Error> {
        self.reader.check()?;
        if !self.accountant.is_ready()? {
            return Ok(None);
        }
        let open = self.open.as_mut().expect("set together with the accountant's audit");
        let begun = *open.begun.get_or_insert_with(|| self.reader.begun());
        let now = if begun == open.epoch {
            versions(&open.rows)
        } else {
            // Any table at least as new as that step will do: a version never returns to an older
            // value.
            let newest = self.reader.newest();
            match (newest >= begun).then(|| self.reader.table(newest)).flatten() {
                Some(rows) => versions(&rows),
                None => return Ok(None),
            }
        };
        let report = self.accountant.finish(&now)?;
        let OpenAudit { epoch, keys, .. } = self.open.take().expect("checked above");
        Ok(Some(RemoteReport { report, keys, epoch }))
    }

    /// Abandons the audit in progress, if any.
    ///
    /// # Errors
    /// When the device fails.
    pub fn abandon(&mut self) -> Result<(), Error> {
        if self.open.take().is_some() {
            self.accountant.abandon()?;
        }
        Ok(())
    }

    fn newest_done(&self) -> Result<(u64, Vec<TableRow>), Error> {
        for _ in 0..READ_ATTEMPTS_MAX {
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

fn snapshot_row(row: &TableRow) -> Row {
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
