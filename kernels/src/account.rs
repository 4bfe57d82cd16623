//! The accountant: takes a private copy of the engine's books while the engine runs on, and says
//! what is in it. The order of things is here; reading memory is the backend's, what is wrong is
//! [`crate::audit`]'s, digests are [`crate::digest`]'s.
//!
//! An audit has three steps. [`Accountant::begin`], on the scheduler's thread between two steps,
//! takes the cut and only enqueues. When [`Accountant::ready`], the caller reads the versions that
//! its rows have *now*, on the same thread. [`Accountant::finish`], on any thread, drops the rows
//! whose version is another: what was copied of the rest was not rewritten while it was copied.

mod backend;
mod cut;
#[cfg(feature = "cuda")]
mod device;
mod host;

pub use cut::{
    BUFFERS_MAX, Buffer, Cut, Error as CutError, FREE_LISTS_MAX, List, Pool, REFS_MAX, ROWS_MAX,
    Row, Stream, Table,
};

use crate::{
    audit::{self, Kept},
    digest::{self, Digested, Memory, SealedRow},
    reference::{LiveRow, PAGE_BAD},
    report::{Classes, Found, FreePages, Report, Scope, Session},
};
use backend::{Backend, Counts, Layout};
use std::collections::{BTreeMap, btree_map};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Cut(#[from] CutError),
    #[error("an audit is under way: finish or abandon it first")]
    Busy,
    #[error("no audit is under way: begin one first")]
    Idle,
    #[error("the copy was not seen ready: ask until it is, then read the versions, then finish")]
    NotReady,
    #[error("the device's counts are not those of its copy: report this, and don't trust it")]
    Disagree,
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Device(#[from] crate::cuda::Error),
}

/// Audits one pool, one audit at a time.
pub struct Accountant {
    pool: Pool,
    backend: Box<dyn Backend>,
    memory: Memory,
    open: Option<Open>,
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

/// The audit under way.
#[derive(Debug)]
struct Open {
    /// In the order of the copy.
    rows: Vec<Planned>,
    keys: Vec<u64>,
    window: std::ops::Range<u32>,
    whole: bool,
    digests: bool,
    ready: bool,
}

#[derive(Clone, Copy, Debug)]
struct Planned {
    live: LiveRow,
    version: u64,
    sealed_pages: u32,
    /// `None` if unknown.
    protected_pages: Option<u32>,
}

impl Accountant {
    /// Accounts on the host, by the scalar reference: for pools in host memory.
    pub fn host(pool: Pool) -> Self {
        let backend = Box::new(host::Host::default());
        Self::over(pool, backend)
    }

    /// Accounts on a CUDA device, by its kernels: for pools in its memory.
    ///
    /// # Errors
    /// A device without room for the copy: 9 bytes for each page of the pool, about.
    #[cfg(feature = "cuda")]
    pub fn device(pool: Pool, device: crate::cuda::Device) -> Result<Self, Error> {
        let backend = Box::new(device::OnDevice::new(device, &pool)?);
        Ok(Self::over(pool, backend))
    }

    fn over(pool: Pool, backend: Box<dyn Backend>) -> Self {
        let memory = Memory::new(digest::REMEMBERED_MAX);
        Self { pool, backend, memory, open: None, finished: 0 }
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Sessions of the audit under way; `None` when there is none.
    pub fn sessions(&self) -> Option<usize> {
        self.open.as_ref().map(|open| open.keys.len())
    }

    /// Begins an audit: takes the private copy (on the host), or enqueues taking it behind all
    /// that was enqueued on `stream` so far (on a device). Waits for nothing.
    ///
    /// # Errors
    /// A cut that is none of this pool, an audit under way, a failing device.
    pub fn begin(&mut self, cut: &Cut<'_>, stream: Stream) -> Result<(), Error> {
        if self.open.is_some() {
            return Err(Error::Busy);
        }
        cut.check(&self.pool)?;
        let open = self.plan(cut);
        let layout = Layout {
            rows: open.rows.iter().map(|row| row.live).collect(),
            window: open.window.clone(),
        };
        if let Err(error) = self.backend.copy(&self.pool, cut, &layout, stream) {
            // The caller may do with its lists what it likes, so nothing may read them any more.
            let _ = self.backend.settle();
            return Err(error);
        }
        self.open = Some(open);
        Ok(())
    }

    /// Has the copy been made? From then on the engine may do with its lists what it likes, once
    /// [`Self::finish`] has returned.
    ///
    /// # Errors
    /// No audit, or a failing device.
    pub fn ready(&mut self) -> Result<bool, Error> {
        let open = self.open.as_mut().ok_or(Error::Idle)?;
        open.ready = open.ready || self.backend.copied()?;
        Ok(open.ready)
    }

    /// Ends the audit, by the versions that the live rows have had since the copy was seen ready.
    /// A row that is not among `now`, or there with another version, is left out and counted.
    ///
    /// # Errors
    /// No audit, one not seen ready, or a failing device. But for one not ready, the audit is over.
    pub fn finish(&mut self, now: &[(u32, u64)]) -> Result<Report, Error> {
        if !self.open.as_ref().ok_or(Error::Idle)?.ready {
            return Err(Error::NotReady);
        }
        let open = self.open.take().expect("it was there a line ago");
        let moved = moved(&open.rows, now);
        let kept = kept(&open.rows, &moved, self.pool.shift());
        let rows_moved = moved.iter().filter(|&&moved| moved).count();
        let scope = Scope::of(open.whole, rows_moved);
        let counts = self.backend.count(&self.pool, &kept)?;
        let mut findings = self.findings(&counts, &kept, scope)?;
        let (digests, changed) = self.settle(&open, &moved)?;
        if open.digests {
            findings.push(audit::changed(&changed));
        }
        let classes = counts.classes(scope);
        let report = Report {
            number: self.finished,
            scope,
            page_tokens: self.pool.page_tokens(),
            pages: self.pool.pages(),
            rows: count(kept.rows.len()),
            rows_moved: count(rows_moved),
            held_pages: counts.held(),
            free: (counts.free.is_some())
                .then(|| FreePages { pages: counts.free_pages(), runs: counts.free_runs }),
            classes,
            sessions: sessions(&open.rows, &moved, &counts, classes),
            digests,
            findings,
        };
        self.finished += 1;
        Ok(report)
    }

    /// Gives the audit under way up, if there is one: its copy is waited for and thrown away.
    ///
    /// # Errors
    /// A failing device.
    pub fn abandon(&mut self) -> Result<(), Error> {
        self.open = None;
        self.backend.settle()
    }

    /// Lays out the copy and remembers what finishing needs.
    fn plan(&mut self, cut: &Cut<'_>) -> Open {
        let shift = self.pool.shift();
        let pages = |tokens: u32| tokens.div_ceil(1 << shift);
        let sealed: Vec<SealedRow> = (cut.rows.iter())
            .map(|row| SealedRow {
                key: cut.keys[row.session as usize],
                row: row.row,
                pages: pages(row.len),
                sealed: row.sealed_tokens >> shift,
            })
            .collect();
        let can_digest = !self.pool.buffers().is_empty();
        let digest_max = if can_digest { cut.digest_pages_max } else { 0 };
        let digest::Layout { order, window } = self.memory.plan(&sealed, digest_max);
        let mut out_off = 0;
        let planned = |at: usize| {
            let (row, SealedRow { pages: refs, sealed, .. }) = (&cut.rows[at], sealed[at]);
            let live = LiveRow { row: row.row, len: row.len, session: row.session, out_off };
            out_off += refs;
            let protected_pages = row.protected_tokens.map(pages);
            Planned { live, version: row.version, sealed_pages: sealed, protected_pages }
        };
        Open {
            rows: order.into_iter().map(planned).collect(),
            keys: cut.keys.to_vec(),
            window,
            whole: cut.whole,
            digests: digest_max > 0,
            ready: false,
        }
    }

    /// Names what is wrong, if the counts say that something is.
    fn findings(
        &mut self,
        counts: &Counts,
        kept: &Kept,
        scope: Scope,
    ) -> Result<Vec<Found>, Error> {
        let shift = self.pool.shift();
        let refs = kept.rows.iter().map(|row| u64::from(row.pages(shift))).sum();
        if !counts.alarming(refs, scope) {
            let (free, tree) = (counts.free.is_some(), counts.tree.is_some());
            let kinds = audit::kinds(scope, free, tree, !kept.own.is_empty());
            return Ok(kinds.into_iter().map(audit::none_of).collect());
        }
        let books = self.backend.books(&self.pool)?;
        if Counts::scalar(&books, kept, &self.pool) != *counts {
            return Err(Error::Disagree);
        }
        let pages = (self.pool.pages(), shift);
        Ok(audit::findings(&books, kept, pages, scope))
    }

    /// Compares the digests of those pages of the window whose rows did not move.
    fn settle(
        &mut self,
        open: &Open,
        moved: &[bool],
    ) -> Result<(crate::report::Digests, Vec<(u32, u32)>), Error> {
        let window = self.backend.window()?;
        let shift = self.pool.shift();
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
        Ok(self.memory.settle(&open.keys, digested))
    }
}

/// Which rows have another version now, or none.
fn moved(rows: &[Planned], now: &[(u32, u64)]) -> Vec<bool> {
    let mut versions: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for &(row, version) in now {
        match versions.entry(row) {
            btree_map::Entry::Vacant(entry) => _ = entry.insert(Some(version)),
            // A row with two versions has none that could be trusted.
            btree_map::Entry::Occupied(mut entry) if *entry.get() != Some(version) => {
                entry.insert(None);
            }
            btree_map::Entry::Occupied(_) => {}
        }
    }
    let kept = |row: &Planned| versions.get(&row.live.row) == Some(&Some(row.version));
    rows.iter().map(|row| !kept(row)).collect()
}

fn kept(rows: &[Planned], moved: &[bool], shift: u32) -> Kept {
    let mut kept = Kept::default();
    for (row, _) in rows.iter().zip(moved).filter(|(_, moved)| !**moved) {
        kept.rows.push(row.live);
        let Some(protected) = row.protected_pages else { continue };
        let len = row.live.len.saturating_sub(protected << shift);
        kept.own.push(LiveRow { len, out_off: row.live.out_off + protected, ..row.live });
    }
    kept
}

/// A line for each session that has rows, none of which moved.
fn sessions(
    rows: &[Planned],
    moved: &[bool],
    counts: &Counts,
    classes: Option<Classes>,
) -> Vec<Session> {
    let mut whole: BTreeMap<u32, bool> = BTreeMap::new();
    for (row, moved) in rows.iter().zip(moved) {
        *whole.entry(row.live.session).or_insert(true) &= !moved;
    }
    let lines = whole.into_iter().filter(|&(_, whole)| whole);
    lines.map(|(number, _)| counts.session(number, classes.is_some())).collect()
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("a cut has at most ROWS_MAX rows")
}
