//! Audits the KV pool of a running engine: tells which pages each session holds, and finds faults.
//!
//! An audit counts in a copy, so the engine needn't stop:
//! 1. [`Accountant::begin`] takes a snapshot, on the scheduler's thread, between two steps of the
//!    engine. For a pool on a device, this only enqueues work.
//! 2. When [`Accountant::is_ready`], the copy is made. The caller now reads the rows' current
//!    *versions*, on the scheduler's thread: the engine changes a row's version whenever it may
//!    have rewritten the row.
//! 3. [`Accountant::finish`], on any thread, drops the rows whose version has changed, because
//!    their copy may be wrong.

mod backend;
#[cfg(feature = "cuda")]
mod device;
mod host;
mod snapshot;

pub use snapshot::{
    BUFFERS_MAX, Error as SnapshotError, FREE_LISTS_MAX, IdList, Pool, PoolBuffer, REFS_MAX,
    ROWS_MAX, RequestTable, Snapshot, SnapshotRow, Stream,
};

use crate::{
    audit::{self, ValidRows},
    digest::{self, ChangedPage, DigestMemory, DigestRow, DigestedPage},
    reference::{LiveRow, PAGE_BAD},
    report::{FreePages, KindFindings, Report, Scope, Session},
};
use backend::{Backend, CopyLayout, Counts, PageDigest};
use std::collections::{BTreeMap, btree_map};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error("an audit is in progress: finish or abandon it first")]
    Busy,
    #[error("no audit is in progress: begin one first")]
    Idle,
    #[error("the copy is not ready: wait until `is_ready` is true, read the versions, then finish")]
    NotReady,
    #[error(
        "the device's counts differ from a recount of its copy: don't trust them, report a bug"
    )]
    CountsDiffer,
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(#[from] crate::cuda::Error),
}

/// Audits one pool, one audit at a time.
pub struct Accountant {
    pool: Pool,
    backend: Box<dyn Backend>,
    digest_memory: DigestMemory,
    open_audit: Option<OpenAudit>,
    finished_count: u64,
}

impl std::fmt::Debug for Accountant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pool, open_audit, finished_count, .. } = self;
        f.debug_struct("Accountant")
            .field("pool", pool)
            .field("open", open_audit)
            .field("finished", finished_count)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct OpenAudit {
    /// The live rows of the snapshot, in the order of the copy.
    rows: Vec<PlannedRow>,
    /// The sessions' keys, indexed by session number.
    keys: Vec<u64>,
    /// The numbers of the page references whose pages are digested; see [`CopyLayout`].
    window: std::ops::Range<u32>,
    has_digests: bool,
    is_ready: bool,
}

#[derive(Clone, Copy, Debug)]
struct PlannedRow {
    live: LiveRow,
    version: u64,
    /// At the row's beginning. These pages must not change while the session has the same key.
    sealed_pages: u32,
    /// The number of pages at the row's beginning that the radix tree owns.
    protected_pages: u32,
}

impl Accountant {
    /// Makes an accountant for a pool in host memory. Counts with the scalar reference.
    pub fn host(pool: Pool) -> Self {
        let backend = Box::new(host::HostBackend::default());
        Self::with_backend(pool, backend)
    }

    /// Audits a pool in the memory of a CUDA device, by the kernels. The copy takes about 13 bytes
    /// per page of the pool, and 80 bytes per row of `req_to_token`.
    #[cfg(feature = "cuda")]
    pub fn device(pool: Pool, device: crate::cuda::Device) -> Result<Self, Error> {
        let backend = Box::new(device::DeviceBackend::new(device, &pool)?);
        Ok(Self::with_backend(pool, backend))
    }

    fn with_backend(pool: Pool, backend: Box<dyn Backend>) -> Self {
        let digest_memory = DigestMemory::new(digest::REMEMBERED_PAGES_MAX);
        Self { pool, backend, digest_memory, open_audit: None, finished_count: 0 }
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn session_count(&self) -> Option<usize> {
        self.open_audit.as_ref().map(|open| open.keys.len())
    }

    /// Doesn't wait. A device copies behind everything enqueued on `stream` so far.
    pub fn begin(&mut self, snapshot: &Snapshot<'_>, stream: Stream) -> Result<(), Error> {
        if self.open_audit.is_some() {
            return Err(Error::Busy);
        }
        snapshot.check(&self.pool)?;
        let open = self.plan_audit(snapshot);
        let layout = CopyLayout {
            rows: open.rows.iter().map(|row| row.live).collect(),
            window: open.window.clone(),
        };
        if let Err(error) = self.backend.copy(&self.pool, snapshot, &layout, stream) {
            // After this error the caller may free its lists, so wait until nothing reads them.
            let _ = self.backend.wait();
            return Err(error);
        }
        self.open_audit = Some(open);
        Ok(())
    }

    /// Whether the private copy has been made. The engine must keep its lists until
    /// [`Self::finish`] has returned.
    pub fn is_ready(&mut self) -> Result<bool, Error> {
        let open = self.open_audit.as_mut().ok_or(Error::Idle)?;
        open.is_ready = open.is_ready || self.backend.is_copied()?;
        Ok(open.is_ready)
    }

    /// `current_versions` lists the live rows with the versions that they had after the copy was
    /// ready. A row that isn't in it, or has another version, is left out and counted in
    /// [`Report::rows_changed`]. After an error other than [`Error::NotReady`], the audit is over.
    pub fn finish(&mut self, current_versions: &[(u32, u64)]) -> Result<Report, Error> {
        if !self.open_audit.as_ref().ok_or(Error::Idle)?.is_ready {
            return Err(Error::NotReady);
        }
        let open = self.open_audit.take().expect("checked above");
        let has_changed = find_changed_rows(&open.rows, current_versions);
        let valid_rows = collect_valid_rows(&open.rows, &has_changed, self.pool.page_shift());
        let rows_changed = has_changed.iter().filter(|&&has_changed| has_changed).count();
        let scope = if rows_changed == 0 { Scope::Complete } else { Scope::RowsChanged };
        let counts = self.backend.count(&self.pool, &valid_rows)?;
        let mut findings = self.findings(&counts, &valid_rows, scope)?;
        let (digests, changed_pages) = self.compare_digests(&open, &has_changed)?;
        if open.has_digests {
            findings.push(audit::changed_page_findings(&changed_pages));
        }
        let pages_by_owner = counts.pages_by_owner(scope);
        let report = Report {
            audit_number: self.finished_count,
            scope,
            page_tokens: self.pool.page_tokens(),
            pages: self.pool.pages(),
            rows: row_count(valid_rows.rows.len()),
            rows_changed: row_count(rows_changed),
            held_pages: counts.held_pages(),
            free: FreePages { pages: counts.free_pages(), runs: counts.free_runs },
            pages_by_owner,
            sessions: session_entries(&open.rows, &has_changed, &counts, pages_by_owner.is_some()),
            digests,
            findings,
        };
        self.finished_count += 1;
        Ok(report)
    }

    /// Waits until nothing reads the engine's lists.
    pub fn abandon(&mut self) -> Result<(), Error> {
        self.open_audit = None;
        self.backend.wait()
    }

    fn plan_audit(&mut self, snapshot: &Snapshot<'_>) -> OpenAudit {
        let page_shift = self.pool.page_shift();
        let pages = |tokens: u32| tokens.div_ceil(1 << page_shift);
        let digest_rows: Vec<DigestRow> = (snapshot.rows.iter())
            .map(|row| DigestRow {
                key: snapshot.keys[row.session as usize],
                row: row.row,
                pages: pages(row.len),
                sealed_pages: row.sealed_tokens >> page_shift,
            })
            .collect();
        let can_digest = !self.pool.buffers().is_empty();
        let digest_pages_max = if can_digest { snapshot.digest_pages_max } else { 0 };
        let digest::DigestPlan { order, window } =
            self.digest_memory.plan(&digest_rows, digest_pages_max);
        let mut list_start = 0;
        let plan_row = |index: usize| {
            let row = &snapshot.rows[index];
            let DigestRow { pages: refs, sealed_pages, .. } = digest_rows[index];
            let live = LiveRow { row: row.row, len: row.len, session: row.session, list_start };
            list_start += refs;
            let protected_pages = pages(row.protected_tokens);
            PlannedRow { live, version: row.version, sealed_pages, protected_pages }
        };
        OpenAudit {
            rows: order.into_iter().map(plan_row).collect(),
            keys: snapshot.keys.to_vec(),
            window,
            has_digests: digest_pages_max > 0,
            is_ready: false,
        }
    }

    /// Returns the findings. Reads the copy only if the counts show a fault.
    fn findings(
        &mut self,
        counts: &Counts,
        valid_rows: &ValidRows,
        scope: Scope,
    ) -> Result<Vec<KindFindings>, Error> {
        let page_shift = self.pool.page_shift();
        let refs = valid_rows.rows.iter().map(|row| u64::from(row.pages(page_shift))).sum();
        if !counts.has_fault(refs, scope) {
            let kinds = audit::detectable_kinds(scope, !valid_rows.rows.is_empty());
            return Ok(kinds.into_iter().map(audit::no_faults).collect());
        }
        let copy = self.backend.read_copy(&self.pool)?;
        if Counts::count_by_reference(&copy, valid_rows, &self.pool) != *counts {
            return Err(Error::CountsDiffer);
        }
        Ok(audit::find_faults(&copy, valid_rows, self.pool.pages(), page_shift, scope))
    }

    /// Leaves out the rows that changed, as `has_changed` says of each row of `open`.
    fn compare_digests(
        &mut self,
        open: &OpenAudit,
        has_changed: &[bool],
    ) -> Result<(crate::report::DigestCounts, Vec<ChangedPage>), Error> {
        let window_digests = self.backend.digests()?;
        let page_shift = self.pool.page_shift();
        let mut digested = Vec::with_capacity(window_digests.len());
        for row in unchanged(&open.rows, has_changed) {
            let start = row.live.list_start;
            let sealed = start..start + row.sealed_pages.min(row.live.len >> page_shift);
            let first_ref = sealed.start.max(open.window.start);
            let refs_end = sealed.end.min(open.window.end);
            for ref_number in first_ref..refs_end {
                let window_index = (ref_number - open.window.start) as usize;
                let PageDigest { page, digest } = window_digests[window_index];
                if page != PAGE_BAD {
                    let session = row.live.session;
                    let key = open.keys[session as usize];
                    digested.push(DigestedPage { key, session, page, digest });
                }
            }
        }
        Ok(self.digest_memory.compare(&open.keys, digested))
    }
}

/// Returns, for each planned row, whether its version has changed or the row is gone.
fn find_changed_rows(rows: &[PlannedRow], current_versions: &[(u32, u64)]) -> Vec<bool> {
    let mut versions: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for &(row, version) in current_versions {
        match versions.entry(row) {
            btree_map::Entry::Vacant(entry) => _ = entry.insert(Some(version)),
            // A row that is listed with two different versions counts as changed.
            btree_map::Entry::Occupied(mut entry) if *entry.get() != Some(version) => {
                entry.insert(None);
            }
            btree_map::Entry::Occupied(_) => {}
        }
    }
    let is_same = |row: &PlannedRow| versions.get(&row.live.row) == Some(&Some(row.version));
    rows.iter().map(|row| !is_same(row)).collect()
}

fn unchanged<'a>(
    rows: &'a [PlannedRow],
    has_changed: &'a [bool],
) -> impl Iterator<Item = &'a PlannedRow> {
    rows.iter().zip(has_changed).filter(|(_, has_changed)| !**has_changed).map(|(row, _)| row)
}

/// Returns the rows that didn't change, and the part of each row that the radix tree doesn't own.
fn collect_valid_rows(rows: &[PlannedRow], has_changed: &[bool], page_shift: u32) -> ValidRows {
    let mut valid_rows = ValidRows::default();
    for row in unchanged(rows, has_changed) {
        valid_rows.rows.push(row.live);
        let protected = row.protected_pages;
        let len = row.live.len.saturating_sub(protected << page_shift);
        valid_rows.unprotected.push(LiveRow {
            len,
            list_start: row.live.list_start + protected,
            ..row.live
        });
    }
    valid_rows
}

/// Leaves out sessions of which a row changed. `is_pool_known`: the report has
/// [`Report::pages_by_owner`].
fn session_entries(
    rows: &[PlannedRow],
    has_changed: &[bool],
    counts: &Counts,
    is_pool_known: bool,
) -> Vec<Session> {
    let mut is_exact: BTreeMap<u32, bool> = BTreeMap::new();
    for (row, has_changed) in rows.iter().zip(has_changed) {
        *is_exact.entry(row.live.session).or_insert(true) &= !has_changed;
    }
    let exact_sessions = is_exact.into_iter().filter(|&(_, is_exact)| is_exact);
    exact_sessions.map(|(number, _)| counts.session_entry(number, is_pool_known)).collect()
}

fn row_count(n: usize) -> u32 {
    u32::try_from(n).expect("a snapshot has at most ROWS_MAX rows")
}
