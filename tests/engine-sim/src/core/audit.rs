//! A rank's exact account, the delayed gauges of `/metrics`, and the core's invariants.

use super::{
    super::{
        radix::HostFacts,
        request::{ReqKey, RequestKind},
    },
    Core,
};
use kernels::reference::{self, LiveRow, OWNER_SHARED};
use std::{collections::BTreeMap, time::Duration};

/// The state of one controller session in the scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionFacts {
    pub id: String,
    pub streaming: bool,
    pub inflight: bool,
    pub closing: bool,
    /// The number of tokens in the last successful turn, output included.
    pub history_tokens: usize,
    /// The number of KV slots that the session holds; 0 without a row.
    pub alloc_tokens: usize,
    pub committed_tokens: usize,
    /// The part of `committed_tokens` that lies in the tree and is locked.
    pub protected_tokens: usize,
    pub row: Option<usize>,
}

/// The exact account of one rank; amounts are tokens unless their name says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolFacts {
    pub total: usize,
    pub available: usize,
    pub evictable: usize,
    pub protected: usize,
    pub session_held: usize,
    pub uncached: usize,
    pub rows: usize,
    pub free_rows: usize,
    /// The number of rows that sessions hold, also while a turn runs.
    pub held_rows: usize,
    pub running: usize,
    pub waiting: usize,
    /// The prompt tokens of queued requests, histories included.
    pub waiting_tokens: usize,
    /// The part of `waiting_tokens` that no session holds KV for, plus the rest of a prompt that is
    /// being prefilled in chunks.
    pub waiting_uncached_tokens: usize,
    pub sessions: Vec<SessionFacts>,
    /// The tokens in the tree under the tag of each open `session_id`. Shared tokens count for each
    /// tag.
    pub tagged_tokens: BTreeMap<String, usize>,
    pub prefilled_tokens: u64,
    pub prefill_busy: Duration,
    /// `None` without a host tier.
    pub host: Option<HostFacts>,
}

impl PoolFacts {
    /// Returns the tokens that are neither free nor evictable.
    pub fn used(&self) -> usize {
        self.total - self.available - self.evictable
    }

    /// Returns the ids of all open controller sessions.
    pub fn open_sessions(&self) -> Vec<&str> {
        self.sessions.iter().map(|s| s.id.as_str()).collect()
    }

    /// Returns the session with the engine id `id`.
    pub fn session(&self, id: &str) -> Option<&SessionFacts> {
        self.sessions.iter().find(|s| s.id == id)
    }
}

/// The figures of `/metrics`, as of the last report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gauges {
    pub used: usize,
    pub available: usize,
    pub evictable: usize,
    pub running: usize,
    pub waiting: usize,
    pub sessions: usize,
    pub session_held: usize,
    pub prefilled_tokens: u64,
    pub prefill_busy: Duration,
    pub decode_steps: u64,
    pub retracted: u64,
}

impl Gauges {
    pub(super) fn prefilled(&mut self, tokens: usize, busy: Duration) {
        self.prefilled_tokens += tokens as u64;
        self.prefill_busy += busy;
    }
}

impl Core {
    pub fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// Updates all gauges to the exact values, as the engine does after every 30 s of idleness.
    pub fn report_idle(&mut self) {
        self.report_pool();
        self.report_sessions();
    }

    pub(super) fn report_pool(&mut self) {
        let total = self.config.total_tokens();
        self.gauges.available = self.available_tokens();
        self.gauges.evictable = self.evictable_tokens();
        self.gauges.used = total - self.gauges.available - self.gauges.evictable;
        self.gauges.running = self.running.len();
        self.gauges.waiting = self.waiting.len();
    }

    pub(super) fn report_sessions(&mut self) {
        self.gauges.sessions = self.sessions.values().filter(|s| s.streaming).count();
        self.gauges.session_held = self.session_held();
    }

    fn session_held(&self) -> usize {
        self.slots.values().map(|&row| self.private_tokens(row)).sum()
    }

    /// Returns the tokens in the row's pages that are not in the tree.
    fn private_tokens(&self, row: usize) -> usize {
        let record = self.rows[row].as_ref().expect("a row in use has a record");
        record.pages.len() * self.config.page_size - record.protected
    }

    /// Returns the exact account at this moment.
    pub fn facts(&self) -> PoolFacts {
        let used_rows = (0..self.rows.len()).filter(|&row| self.rows[row].is_some());
        let all_private: usize = used_rows.map(|row| self.private_tokens(row)).sum();
        let session_held = self.session_held();
        PoolFacts {
            total: self.config.total_tokens(),
            available: self.available_tokens(),
            evictable: self.evictable_tokens(),
            protected: self.tree.protected_pages() * self.config.page_size,
            session_held,
            uncached: all_private - session_held,
            rows: self.rows.len(),
            free_rows: self.free_rows.len(),
            held_rows: self.slots.len(),
            running: self.running.len() + usize::from(self.chunked.is_some()),
            waiting: self.waiting.len(),
            waiting_tokens: self.waiting.iter().map(|key| self.reqs[key].fill_len()).sum(),
            waiting_uncached_tokens: self.waiting_uncached(),
            tagged_tokens: self.tree.tagged_tokens(),
            sessions: self.sessions.keys().map(|id| self.session_facts(id)).collect(),
            prefilled_tokens: self.gauges.prefilled_tokens,
            prefill_busy: self.gauges.prefill_busy,
            host: self.tree.host_facts().map(|tier| HostFacts {
                loaded: self.host_loads.loaded,
                load_us: self.host_loads.load_us,
                ..tier
            }),
        }
    }

    fn waiting_uncached(&self) -> usize {
        let queued: usize = self.waiting.iter().map(|key| self.uncached_of(*key)).sum();
        let left = |key: &ReqKey| self.reqs[key].fill_len() - self.reqs[key].seq;
        queued + self.chunked.as_ref().map_or(0, left)
    }

    fn uncached_of(&self, key: ReqKey) -> usize {
        let req = &self.reqs[&key];
        let row = match &req.kind {
            RequestKind::Streaming { session } => self.slots.get(session),
            RequestKind::Plain | RequestKind::Normal { .. } | RequestKind::Tagged { .. } => None,
        };
        let record = row.and_then(|&row| self.rows[row].as_ref());
        req.fill_len().saturating_sub(record.map_or(0, |record| record.committed))
    }

    fn session_facts(&self, id: &str) -> SessionFacts {
        let session = &self.sessions[id];
        let row = self.slots.get(id).copied();
        let record = row.and_then(|row| self.rows[row].as_ref());
        SessionFacts {
            id: id.to_owned(),
            streaming: session.streaming,
            inflight: session.inflight,
            closing: session.close_on_finish,
            history_tokens: session.history_len(),
            alloc_tokens: record.map_or(0, |r| r.alloc),
            committed_tokens: record.map_or(0, |r| r.committed),
            protected_tokens: record.map_or(0, |r| r.protected),
            row,
        }
    }

    /// Panics unless the counts agree with each other and, page by page, with the page audit.
    pub fn check_invariants(&self) {
        self.tree.check_invariants();
        let facts = self.facts();
        let sum = facts.available
            + facts.evictable
            + facts.protected
            + facts.session_held
            + facts.uncached;
        assert_eq!(sum, facts.total, "{facts:?}");
        let used_rows = self.rows.iter().filter(|row| row.is_some()).count();
        assert_eq!(facts.free_rows + used_rows, facts.rows, "every row is free or has a record");
        for req in self.waiting.iter().map(|key| &self.reqs[key]) {
            assert!(req.row.is_none(), "a queued request holds no row of its own");
        }
        self.audit_pages(&facts);
    }

    fn audit_pages(&self, facts: &PoolFacts) {
        let page_size = self.config.page_size;
        let shift = page_size.trailing_zeros();
        let npages = u32::try_from(self.pool.pages() + 1).expect("pages fit in u32");
        let (r2t, ld, rows) = self.req_to_token();
        let (staged, bad) = reference::gather_pages(&r2t, ld, &rows, shift, npages);
        assert_eq!(bad, 0, "a row names a page outside the pool");
        let marks = reference::mark(&rows, &staged, shift, npages);
        let free = reference::list_to_set(self.pool.free_pages().iter().copied(), npages);
        let tree = reference::list_to_set(self.tree.all_pages(), npages);
        assert_eq!(
            (free.duplicates, free.outside_pool),
            (0, 0),
            "duplicate or bad page in the free list"
        );
        assert_eq!(
            (tree.duplicates, tree.outside_pool),
            (0, 0),
            "duplicate or bad page in the tree"
        );
        let classes = reference::classify(&free, &marks, &tree);
        let private = usize::try_from(classes.private).expect("pages fit in usize");
        assert_eq!(private * page_size, facts.session_held + facts.uncached, "{classes:?}");
        assert_eq!((classes.leaked, classes.corrupt), (1, 0), "{classes:?}");
        for (page, &owner) in marks.owner.iter().enumerate() {
            assert!(owner != OWNER_SHARED || tree.has[page], "two rows own page {page}");
        }
        let usage = reference::session_pages(&rows, &staged, &marks, &tree, shift);
        for row in &rows {
            let exclusive = usage[&row.session].exclusive_pages;
            let private = self.private_tokens(row.row as usize) / page_size;
            assert!(exclusive >= private as u64, "row {} shares private pages", row.row);
        }
    }

    /// Returns the rows in the device's layout: token slots, and one session number per row.
    fn req_to_token(&self) -> (Vec<i32>, usize, Vec<LiveRow>) {
        let page_size = self.config.page_size;
        let longest = self.rows.iter().flatten().map(|r| r.pages.len()).max().unwrap_or(0);
        let ld = longest * page_size;
        let mut r2t = vec![0; ld * self.rows.len()];
        let mut live = Vec::new();
        let mut list_start = 0;
        for (index, record) in self.rows.iter().enumerate() {
            let Some(record) = record else { continue };
            for (i, &page) in record.pages.iter().enumerate() {
                let slot = page as usize * page_size;
                r2t[index * ld + i * page_size] = i32::try_from(slot).expect("slots fit in i32");
            }
            let row = u32::try_from(index).expect("rows fit in u32");
            let len = u32::try_from(record.pages.len() * page_size).expect("rows fit in u32");
            live.push(LiveRow { row, len, session: row, list_start });
            list_start += u32::try_from(record.pages.len()).expect("pages fit in u32");
        }
        (r2t, ld, live)
    }
}
