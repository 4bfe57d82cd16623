//! The accountant: audits a private copy of a running engine's page tables and lists.
//!
//! This module defines the order of the steps. The backend reads memory, [`crate::audit`] finds
//! faults, and [`crate::digest`] compares digests.
//!
//! An audit has three steps. [`Accountant::begin`], called on the scheduler's thread between two
//! steps of the engine, takes the snapshot and only enqueues device work. When
//! [`Accountant::is_ready`] returns true, the caller reads the rows' *current* versions, on the
//! same thread. [`Accountant::finish`], called on any thread, drops the rows whose version has
//! changed; the copy of the other rows was not overwritten while it was made.

mod backend;
#[cfg(feature = "cuda")]
mod device;
mod host;
mod snapshot;

pub use snapshot::{
    BUFFERS_MAX, Error as SnapshotError, FREE_LISTS_MAX, List, Pool, PoolBuffer, REFS_MAX,
    ROWS_MAX, RequestTable, Row, Snapshot, Stream,
};

use crate::{
    audit::{self, ValidRows},
    digest::{self, DigestMemory, Digested, SealedRow},
    reference::{LiveRow, PAGE_BAD},
    report::{Classes, Found, FreePages, Report, Scope, Session},
};
use backend::{Backend, CopyLayout, Counts};
use std::collections::{BTreeMap, btree_map};

/// Why an audit has no report.
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
    Disagree,
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(#[from] crate::cuda::Error),
}

/// Audits one pool, one audit at a time.
pub struct Accountant {
    pool: Pool,
    backend: Box<dyn Backend>,
    memory: DigestMemory,
    open: Option<OpenAudit>,
    finished: u64,
}

impl std::fmt::Debug for Accountant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pool, open, finished, .. } = self;
        f.debug_struct("Accountant")
            .field("pool", pool)
            .field("open", open)
            .field("finished", finished)
            .finish_non_exhaustive()
    }
}

/// The audit in progress.
#[derive(Debug)]
struct OpenAudit {
    /// The live rows, in the order of the copy.
    rows: Vec<PlannedRow>,
    keys: Vec<u64>,
    window: std::ops::Range<u32>,
    complete: bool,
    digests: bool,
    ready: bool,
}

#[derive(Clone, Copy, Debug)]
struct PlannedRow {
    live: LiveRow,
    version: u64,
    sealed_pages: u32,
    /// Pages of the row's prefix that the radix tree owns; `None` if unknown.
    protected_pages: Option<u32>,
}

impl Accountant {
    /// Makes an accountant for a pool in host memory; counts with the scalar reference.
    pub fn host(pool: Pool) -> Self {
        let backend = Box::new(host::Host::default());
        Self::with_backend(pool, backend)
    }

    /// Makes an accountant for a pool in the memory of a CUDA device; counts with the kernels.
    ///
    /// # Errors
    /// When the device has no room for the copy: about 9 bytes per page of the pool.
    #[cfg(feature = "cuda")]
    pub fn device(pool: Pool, device: crate::cuda::Device) -> Result<Self, Error> {
        let backend = Box::new(device::OnDevice::new(device, &pool)?);
        Ok(Self::with_backend(pool, backend))
    }

    fn with_backend(pool: Pool, backend: Box<dyn Backend>) -> Self {
        let memory = DigestMemory::new(digest::REMEMBERED_MAX);
        Self { pool, backend, memory, open: None, finished: 0 }
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the number of sessions in the audit in progress; `None` if there is none.
    pub fn sessions(&self) -> Option<usize> {
        self.open.as_ref().map(|open| open.keys.len())
    }

    /// Begins an audit without waiting. On the host, this takes the private copy. On a device, this
    /// enqueues the copy behind everything enqueued on `stream` so far.
    ///
    /// # Errors
    /// When the snapshot doesn't fit this pool, an audit is in progress, or the device fails.
    pub fn begin(&mut self, snapshot: &Snapshot<'_>, stream: Stream) -> Result<(), Error> {
        if self.open.is_some() {
            return Err(Error::Busy);
        }
        snapshot.check(&self.pool)?;
        let open = self.plan(snapshot);
        let layout = CopyLayout {
            rows: open.rows.iter().map(|row| row.live).collect(),
            window: open.window.clone(),
        };
        if let Err(error) = self.backend.copy(&self.pool, snapshot, &layout, stream) {
            // After this error the caller may free its lists, so wait until nothing reads them.
            let _ = self.backend.wait();
            return Err(error);
        }
        self.open = Some(open);
        Ok(())
    }

    /// Returns whether the private copy has been made. The engine must still keep its lists until
    /// [`Self::finish`] has returned; after that, it may free or change them.
    ///
    /// # Errors
    /// When there is no audit, or the device fails.
    pub fn is_ready(&mut self) -> Result<bool, Error> {
        let open = self.open.as_mut().ok_or(Error::Idle)?;
        open.ready = open.ready || self.backend.is_copied()?;
        Ok(open.ready)
    }

    /// Ends the audit and returns its report. `now` lists the versions that the live rows had after
    /// the copy was ready. A row that is not in `now`, or has another version there, is left out
    /// and count_pages.
    ///
    /// # Errors
    /// When there is no audit, the copy is not ready, or the device fails. Except for a copy that
    /// isn't ready, the audit is over.
    pub fn finish(&mut self, now: &[(u32, u64)]) -> Result<Report, Error> {
        if !self.open.as_ref().ok_or(Error::Idle)?.ready {
            return Err(Error::NotReady);
        }
        let open = self.open.take().expect("checked above");
        let moved = find_moved(&open.rows, now);
        let kept = keep_unmoved(&open.rows, &moved, self.pool.page_shift());
        let rows_moved = moved.iter().filter(|&&moved| moved).count();
        let scope = Scope::new(open.complete, rows_moved);
        let counts = self.backend.count(&self.pool, &kept)?;
        let mut findings = self.findings(&counts, &kept, scope)?;
        let (digests, changed) = self.compare_digests(&open, &moved)?;
        if open.digests {
            findings.push(audit::changed(&changed));
        }
        let classes = counts.classes(scope);
        let report = Report {
            number: self.finished,
            scope,
            page_tokens: self.pool.page_tokens(),
            pages: self.pool.pages(),
            rows: row_count(kept.rows.len()),
            rows_moved: row_count(rows_moved),
            held_pages: counts.held_pages(),
            free: (counts.free.is_some())
                .then(|| FreePages { pages: counts.free_pages(), runs: counts.free_runs }),
            classes,
            sessions: session_entries(&open.rows, &moved, &counts, classes),
            digests,
            findings,
        };
        self.finished += 1;
        Ok(report)
    }

    /// Abandons the audit in progress, if any: waits for its copy and discards it.
    ///
    /// # Errors
    /// When the device fails.
    pub fn abandon(&mut self) -> Result<(), Error> {
        self.open = None;
        self.backend.wait()
    }

    /// Lays out the copy and returns the audit's state.
    fn plan(&mut self, snapshot: &Snapshot<'_>) -> OpenAudit {
        let shift = self.pool.page_shift();
        let pages = |tokens: u32| tokens.div_ceil(1 << shift);
        let sealed: Vec<SealedRow> = (snapshot.rows.iter())
            .map(|row| SealedRow {
                key: snapshot.keys[row.session as usize],
                row: row.row,
                pages: pages(row.len),
                sealed: row.sealed_tokens >> shift,
            })
            .collect();
        let can_digest = !self.pool.buffers().is_empty();
        let digest_max = if can_digest { snapshot.digest_pages_max } else { 0 };
        let digest::DigestPlan { order, window } = self.memory.plan(&sealed, digest_max);
        let mut out_off = 0;
        let planned = |at: usize| {
            let (row, SealedRow { pages: refs, sealed, .. }) = (&snapshot.rows[at], sealed[at]);
            let live = LiveRow { row: row.row, len: row.len, session: row.session, out_off };
            out_off += refs;
            let protected_pages = row.protected_tokens.map(pages);
            PlannedRow { live, version: row.version, sealed_pages: sealed, protected_pages }
        };
        OpenAudit {
            rows: order.into_iter().map(planned).collect(),
            keys: snapshot.keys.to_vec(),
            window,
            complete: snapshot.complete,
            digests: digest_max > 0,
            ready: false,
        }
    }

    /// Returns the findings. The copy is examined only if the counts show a fault.
    fn findings(
        &mut self,
        counts: &Counts,
        kept: &ValidRows,
        scope: Scope,
    ) -> Result<Vec<Found>, Error> {
        let shift = self.pool.page_shift();
        let refs = kept.rows.iter().map(|row| u64::from(row.pages(shift))).sum();
        if !counts.has_fault(refs, scope) {
            let (free, tree) = (counts.free.is_some(), counts.tree.is_some());
            let kinds = audit::kinds(scope, free, tree, !kept.own.is_empty());
            return Ok(kinds.into_iter().map(audit::none_of).collect());
        }
        let copy = self.backend.read_copy(&self.pool)?;
        if Counts::by_reference(&copy, kept, &self.pool) != *counts {
            return Err(Error::Disagree);
        }
        let pages = (self.pool.pages(), shift);
        Ok(audit::findings(&copy, kept, pages, scope))
    }

    /// Compares the digests of those pages in the window whose rows did not change.
    fn compare_digests(
        &mut self,
        open: &OpenAudit,
        moved: &[bool],
    ) -> Result<(crate::report::Digests, Vec<(u32, u32)>), Error> {
        let window = self.backend.digests()?;
        let shift = self.pool.page_shift();
        let mut digested = Vec::with_capacity(window.len());
        for (row, _) in open.rows.iter().zip(moved).filter(|(_, moved)| !**moved) {
            let start = row.live.out_off;
            let sealed = start..start + row.sealed_pages.min(row.live.len >> shift);
            let from = sealed.start.max(open.window.start);
            let to = sealed.end.min(open.window.end);
            for at in from..to {
                let (page, digest) = window[(at - open.window.start) as usize];
                if page != PAGE_BAD {
                    let session = row.live.session;
                    let key = open.keys[session as usize];
                    digested.push(Digested { key, session, page, digest });
                }
            }
        }
        Ok(self.memory.compare(&open.keys, digested))
    }
}

/// Returns, for each planned row, whether its version changed or the row is gone.
fn find_moved(rows: &[PlannedRow], now: &[(u32, u64)]) -> Vec<bool> {
    let mut versions: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for &(row, version) in now {
        match versions.entry(row) {
            btree_map::Entry::Vacant(entry) => _ = entry.insert(Some(version)),
            // A row listed with two different versions has no trustworthy version.
            btree_map::Entry::Occupied(mut entry) if *entry.get() != Some(version) => {
                entry.insert(None);
            }
            btree_map::Entry::Occupied(_) => {}
        }
    }
    let kept = |row: &PlannedRow| versions.get(&row.live.row) == Some(&Some(row.version));
    rows.iter().map(|row| !kept(row)).collect()
}

fn keep_unmoved(rows: &[PlannedRow], moved: &[bool], shift: u32) -> ValidRows {
    let mut kept = ValidRows::default();
    for (row, _) in rows.iter().zip(moved).filter(|(_, moved)| !**moved) {
        kept.rows.push(row.live);
        let Some(protected) = row.protected_pages else { continue };
        let len = row.live.len.saturating_sub(protected << shift);
        kept.own.push(LiveRow { len, out_off: row.live.out_off + protected, ..row.live });
    }
    kept
}

/// Returns an entry for each session that has rows, if none of them changed.
fn session_entries(
    rows: &[PlannedRow],
    moved: &[bool],
    counts: &Counts,
    classes: Option<Classes>,
) -> Vec<Session> {
    let mut unmoved: BTreeMap<u32, bool> = BTreeMap::new();
    for (row, moved) in rows.iter().zip(moved) {
        *unmoved.entry(row.live.session).or_insert(true) &= !moved;
    }
    let lines = unmoved.into_iter().filter(|&(_, unmoved)| unmoved);
    lines.map(|(number, _)| counts.session(number, classes.is_some())).collect()
}

fn row_count(n: usize) -> u32 {
    u32::try_from(n).expect("a snapshot has at most ROWS_MAX rows")
}
