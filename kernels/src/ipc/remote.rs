//! Audits an engine's rows from the agent's process.
//!
//! A [`RemoteAuditor`] maps the engine's `req_to_token` by CUDA IPC. The live rows and their
//! versions come from the row tables that the engine publishes, one per step of its scheduler. A
//! step's number is its epoch; see [`crate::table`]. [`super`] says in which order an audit reads
//! the tables.
//! The result is a [`RemoteReport`]. The agent's module `audit/remote.rs` calls the auditor.

use super::Error;
use crate::{
    account::{Accountant, Pool, RequestTable, Snapshot, SnapshotRow, Stream},
    cuda::{Device, ExportedRange, ImportedRange},
    report::{Report, SESSIONS_MAX},
    table::{PoolFacts, TableReader, TableRow},
};
use std::path::Path;

/// The maximum number of attempts to read the row table of the newest finished step. An attempt
/// fails if the engine overwrites the table meanwhile.
const READ_ATTEMPTS_MAX: usize = 16;

/// Audits one engine from outside its process.
#[derive(Debug)]
pub struct RemoteAuditor {
    // Fields are dropped in this order. `accountant` reads `_imported`, so it must be dropped
    // first.
    accountant: Accountant,
    _imported: ImportedRange,
    reader: TableReader,
    open_audit: Option<OpenAudit>,
}

/// The audit in progress.
#[derive(Debug)]
struct OpenAudit {
    /// The epoch of the step whose table lists the copied rows.
    epoch: u64,
    rows: Vec<TableRow>,
    /// The sessions' keys, indexed by session number.
    keys: Vec<u64>,
    /// The epoch of the newest step that had begun when the copy was ready; `None` before that.
    begun_epoch: Option<u64>,
}

/// One audit's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteReport {
    pub report: Report,
    /// The engine's session keys, indexed by the report's session numbers.
    pub keys: Vec<u64>,
    /// The epoch of the step whose table lists the copied rows.
    pub epoch: u64,
}

impl RemoteAuditor {
    /// Opens the file of row tables at `path`, and maps the `req_to_token` that the file describes
    /// on `device`.
    ///
    /// # Errors
    /// When there is no file, the memory isn't shared ([`Error::Unshared`]), or it is on another
    /// GPU.
    pub fn open(path: &Path, device: Device) -> Result<Self, Error> {
        let reader = TableReader::open(path)?;
        let &PoolFacts { page_tokens, pages, r2t_rows, r2t_stride, ref export } = reader.facts();
        let export = export.as_ref().ok_or(Error::Unshared(None))?;
        if export.uuid != device.uuid()? {
            return Err(Error::OtherGpu);
        }
        let bytes = u64::from(r2t_rows) * u64::from(r2t_stride) * size_of::<i32>() as u64;
        if export.bytes < bytes {
            return Err(Error::ExportTooSmall { bytes: export.bytes });
        }
        let exported = ExportedRange { handle: export.handle, offset: export.offset, bytes };
        let imported = device.import(&exported)?;
        // SAFETY: only the address is used here. The engine closes its row table before it frees
        // the memory. An audit drops the rows whose version shows that the engine wrote to them.
        let addr = unsafe { imported.slice::<i32>()? }.address();
        let table = RequestTable { addr, rows: r2t_rows, stride: r2t_stride };
        // SAFETY: the memory is mapped for the requested bytes, and outlives the accountant.
        let pool = unsafe { Pool::new(page_tokens, pages, table, vec![])? };
        let accountant = Accountant::device(pool, device)?;
        Ok(Self { accountant, _imported: imported, reader, open_audit: None })
    }

    /// Begins an audit of the rows of the newest finished step. Abandons an audit in progress.
    ///
    /// # Errors
    /// [`Error::NoStep`] before the engine's first step; also when the table is closed or the
    /// device fails.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.reader.check()?;
        self.abandon()?;
        let (epoch, rows) = self.read_newest_done()?;
        let session_count = rows.iter().map(|row| row.session as usize + 1).max().unwrap_or(0);
        // The limit bounds the memory. The accountant refuses the snapshot if a row's session is
        // above it.
        let mut keys = vec![0; session_count.min(SESSIONS_MAX)];
        for row in &rows {
            if let Some(key) = keys.get_mut(row.session as usize) {
                *key = row.key;
            }
        }
        let snapshot_rows: Vec<SnapshotRow> = rows.iter().map(snapshot_row).collect();
        let snapshot = Snapshot {
            rows: &snapshot_rows,
            keys: &keys,
            free: &[],
            tree: None,
            is_complete: false,
            digest_pages_max: 0,
        };
        self.accountant.begin(&snapshot, Stream::DEFAULT)?;
        self.open_audit = Some(OpenAudit { epoch, rows, keys, begun_epoch: None });
        Ok(())
    }

    /// Returns the audit's result, or `None` while the audit needs more time. Doesn't wait.
    ///
    /// The result needs the copy, and the table of the newest step that had begun when the copy
    /// was ready, or a newer table.
    ///
    /// # Errors
    /// When there is no audit, the table is closed, or the device fails.
    pub fn poll(&mut self) -> Result<Option<RemoteReport>, Error> {
        self.reader.check()?;
        if !self.accountant.is_ready()? {
            return Ok(None);
        }
        let open = self.open_audit.as_mut().expect("set together with the accountant's audit");
        let begun_epoch = *open.begun_epoch.get_or_insert_with(|| self.reader.begun_epoch());
        let current_versions = if begun_epoch == open.epoch {
            versions(&open.rows)
        } else {
            // The table of a later step serves too: a version never returns to an older value.
            let newest_epoch = self.reader.newest_epoch();
            match (newest_epoch >= begun_epoch).then(|| self.reader.table(newest_epoch)).flatten() {
                Some(rows) => versions(&rows),
                None => return Ok(None),
            }
        };
        let report = self.accountant.finish(&current_versions)?;
        let OpenAudit { epoch, keys, .. } = self.open_audit.take().expect("checked above");
        Ok(Some(RemoteReport { report, keys, epoch }))
    }

    /// Abandons the audit in progress, if any.
    ///
    /// # Errors
    /// When the device fails.
    pub fn abandon(&mut self) -> Result<(), Error> {
        if self.open_audit.take().is_some() {
            self.accountant.abandon()?;
        }
        Ok(())
    }

    /// Returns the epoch and the table of the newest finished step.
    fn read_newest_done(&self) -> Result<(u64, Vec<TableRow>), Error> {
        for _ in 0..READ_ATTEMPTS_MAX {
            let epoch = self.reader.done_epoch();
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

/// Returns the row for a snapshot. A row table doesn't tell which part of the row is sealed (not
/// rewritten any more) or protected (owned by the radix tree).
fn snapshot_row(row: &TableRow) -> SnapshotRow {
    SnapshotRow {
        row: row.row,
        len: row.len,
        session: row.session,
        sealed_tokens: 0,
        protected_tokens: None,
        version: row.version,
    }
}

/// Returns each row's index in `req_to_token` and its version.
fn versions(rows: &[TableRow]) -> Vec<(u32, u64)> {
    rows.iter().map(|row| (row.row, row.version)).collect()
}
