//! The choice of requests for the next forward pass, and the forward pass itself.

use super::{
    super::{
        pool::scramble,
        request::{EngineStep, Finish, Output, ReqKey, RequestKind},
        tokenizer::{EOS, VOCAB_SIZE},
    },
    Core, Match, NodeId, REFUSED_OUTPUT, ROOT, Row, model,
};
use std::time::Duration;

/// The most output tokens that admission reserves for one request.
const RESERVED_OUTPUT_MAX: usize = 4096;
/// The number of forward passes between two retractions that `test_retract` forces.
const TEST_RETRACT_EVERY: u64 = 3;

/// One request's share of a prefill batch.
#[derive(Debug)]
pub(super) struct Extend {
    key: ReqKey,
    /// The cached pages to start from; empty for a request that already has its row.
    pages: Vec<u32>,
    node: NodeId,
    /// The session's own row, borrowed for this turn.
    borrowed: Option<usize>,
    start: usize,
    /// The part of `start` that was loaded from the host for this request.
    loaded: usize,
    take: usize,
    last: bool,
}

/// Where a request starts, and what of its prompt follows on the host.
#[derive(Debug, Default)]
struct Start {
    /// The cached pages; empty for a request that borrows its session's row.
    pages: Vec<u32>,
    node: NodeId,
    borrowed: Option<usize>,
    tokens: usize,
    on_host: Vec<NodeId>,
    host_pages: usize,
}

/// The result of offering a request to a batch.
enum Admission {
    Admitted(Extend),
    /// The pool has no room for the request.
    NoRoom,
    /// The batch has no prefill tokens left.
    NextBatch,
}

/// The resources that remain while a batch is assembled.
struct Budget {
    chunk: usize,
    /// The tokens promised to running requests and to this batch.
    promised: usize,
}

impl Core {
    /// Assembles the next prefill batch, strictly first come, first served.
    pub(super) fn schedule(&mut self) -> Vec<Extend> {
        self.batch_is_full &= !self.running.is_empty();
        if self.batch_is_full && self.chunked.is_none() {
            return Vec::new();
        }
        let mut budget = Budget {
            chunk: self.config.chunked_prefill_size,
            promised: self.running.iter().map(|&key| self.reserve_running(key)).sum(),
        };
        let mut batch: Vec<Extend> = Vec::new();
        if let Some(key) = self.chunked.take() {
            let req = &self.reqs[&key];
            let left = req.fill_len() - req.seq;
            let (take, last) = self.chunk(left, budget.chunk);
            budget.chunk -= take;
            let output = if last { self.reserve_output(key) } else { 0 };
            budget.promised += self.whole_pages(take) + output + self.config.page_size;
            let start = req.seq;
            batch.push(Extend {
                key,
                pages: Vec::new(),
                node: ROOT,
                borrowed: req.row,
                start,
                loaded: 0,
                take,
                last,
            });
        }
        self.admit(&mut batch, &mut budget);
        batch
    }

    /// Takes requests from the queue as long as rows and tokens last.
    fn admit(&mut self, batch: &mut Vec<Extend>, budget: &mut Budget) {
        let mut admitted = 0;
        // The engine counts free rows before it checks whether the candidate already holds a row.
        // It adds back the rows of admitted requests, but never the candidate's own row.
        let mut allocatable = self.free_rows.len();
        while batch.last().is_none_or(|extend| extend.last)
            && let Some(&key) = self.waiting.front()
        {
            if admitted >= allocatable {
                self.batch_is_full = true;
                return;
            }
            match self.try_admit(key, budget) {
                Admission::Admitted(extend) => {
                    self.waiting.pop_front();
                    admitted += 1;
                    allocatable += usize::from(extend.borrowed.is_some());
                    batch.push(extend);
                }
                Admission::NoRoom => {
                    self.batch_is_full = !batch.is_empty() || !self.running.is_empty();
                    return;
                }
                Admission::NextBatch => return,
            }
            if budget.promised >= self.available_tokens() + self.evictable_tokens() {
                self.batch_is_full = true;
                return;
            }
        }
    }

    fn chunk(&self, left: usize, budget: usize) -> (usize, bool) {
        if left <= budget {
            return (left, true);
        }
        (budget / self.config.page_size * self.config.page_size, false)
    }

    fn whole_pages(&self, tokens: usize) -> usize {
        self.pool.pages_of(tokens) * self.config.page_size
    }

    fn reserve_output(&self, key: ReqKey) -> usize {
        let req = &self.reqs[&key];
        req.max_new.saturating_sub(req.output.len()).min(RESERVED_OUTPUT_MAX)
    }

    fn reserve_running(&self, key: ReqKey) -> usize {
        let full = self.reserve_output(key);
        if self.reqs[&key].sampling.ignore_eos { full } else { self.ratio.scale(full) }
    }

    /// Returns where the request starts: at its session's row, or after the longest prefix that is
    /// on the device; and what of its prompt follows on the host.
    fn locate(&mut self, key: ReqKey) -> Start {
        let req = self.reqs.get_mut(&key).expect("a queued request exists");
        let reach = req.fill_len() - 1;
        if let RequestKind::Streaming { session } = &req.kind
            && let Some(&row) = self.slots.get(session)
        {
            if req.refused.is_none() {
                let record = self.rows[row].as_ref().expect("a slot's row has a record");
                let tokens = record.committed.min(reach);
                return Start { borrowed: Some(row), tokens, ..Start::default() };
            }
            // The engine detaches the refused turn through the session's abort. This clears the
            // in-flight flag, even if the flag belongs to a running turn.
            let session = self.sessions.get_mut(session);
            req.kind = RequestKind::Plain;
            if let Some(session) = session {
                session.inflight = false;
            }
        }
        let req = &self.reqs[&key];
        let found = self.tree.find(&req.space, &req.fill(reach));
        let Match { pages, node, on_host, host_pages } = found;
        let tokens = pages.len() * self.config.page_size;
        Start { pages, node, borrowed: None, tokens, on_host, host_pages }
    }

    fn try_admit(&mut self, key: ReqKey, budget: &mut Budget) -> Admission {
        let mut from = self.locate(key);
        let left = self.reqs[&key].fill_len() - from.tokens;
        if self.chunk(left - from.host_pages * self.config.page_size, budget.chunk).0 == 0 {
            return Admission::NextBatch;
        }
        self.tree.lock(from.node);
        // The engine asks for one page more, because an append may begin on a new page.
        let need = left + self.reserve_output(key) + self.config.page_size;
        let free = self.available_tokens() + self.evictable_tokens();
        // At least one token must stay free.
        if need + budget.promised >= free {
            self.tree.unlock(from.node);
            return Admission::NoRoom;
        }
        let loaded = self.load(&mut from);
        let Start { pages, node, borrowed, tokens: start, .. } = from;
        let (take, last) = self.chunk(left - loaded, budget.chunk);
        if take == 0 {
            // The load was not worth it, or had no room.
            self.tree.unlock(node);
            return Admission::NextBatch;
        }
        let output = if last { self.reserve_output(key) } else { 0 };
        budget.chunk -= take;
        budget.promised += self.whole_pages(take) + output + self.config.page_size;
        Admission::Admitted(Extend { key, pages, node, borrowed, start, loaded, take, last })
    }

    /// Loads what follows on the host, if there is room on the device. Returns the tokens. The
    /// request starts after them then.
    fn load(&mut self, from: &mut Start) -> usize {
        if !self.tree.is_loaded(from.host_pages) {
            return 0;
        }
        let end = *from.on_host.last().expect("it has pages");
        self.tree.hold(end, true);
        self.make_free(from.host_pages);
        self.tree.hold(end, false);
        if self.pool.free_pages().len() < from.host_pages {
            return 0;
        }
        let taken = (0..from.host_pages).map(|_| self.pool.take_page().expect("counted above"));
        let taken: Vec<u32> = taken.collect();
        for (host_page, page) in self.tree.load(&from.on_host, &taken) {
            self.pool.copy_page(&self.host_pool, host_page + 1, page);
        }
        self.tree.lock(end);
        self.tree.unlock(from.node);
        from.node = end;
        let tokens = taken.len() * self.config.page_size;
        from.pages.extend(taken);
        from.tokens += tokens;
        tokens
    }

    /// Loads a session's KV from the host ahead of its turn, as the shim does for the agent.
    /// Returns the tokens, or the shim's refusal.
    pub fn prefetch(&mut self, id: &str, tokens_max: usize) -> Result<usize, &'static str> {
        let demoted = self
            .sessions
            .get(id)
            .and_then(|session| session.demoted_to.clone().map(|space| (space, session.history())));
        let is_busy =
            !self.waiting.is_empty() || self.chunked.is_some() || self.free_rows.is_empty();
        if is_busy {
            return Err("busy");
        }
        let tagged = || match self.tree.tagged_prefix(id) {
            None => Err("unknown"),
            Some((_, _, true)) => Err("resident"),
            Some((space, prefix, false)) => Ok((space, prefix)),
        };
        let (space, prefix) = demoted.map_or_else(tagged, Ok)?;
        let Match { pages, node, on_host, host_pages } = self.tree.find(&space, &prefix);
        let tokens = host_pages * self.config.page_size;
        let promised: usize = self.running.iter().map(|&key| self.reserve_running(key)).sum();
        let refusals = [
            ("resident", tokens == 0),
            ("too_long", tokens > tokens_max),
            ("no_room", tokens + promised > self.available_tokens() + self.evictable_tokens()),
        ];
        if let Some((refusal, _)) = refusals.iter().find(|(_, applies)| *applies) {
            return Err(refusal);
        }
        self.tree.lock(node);
        let mut from = Start { pages, node, borrowed: None, tokens: 0, on_host, host_pages };
        let loaded = self.load(&mut from);
        self.tree.unlock(from.node);
        self.load_time(loaded);
        if loaded == 0 { Err("no_room") } else { Ok(loaded) }
    }

    /// Makes the tree's copies, before a page that it gave up is written.
    pub(super) fn copy_to_host(&mut self) {
        for (page, host_page) in self.tree.take_copies() {
            self.host_pool.copy_page(&self.pool, page, host_page + 1);
        }
    }

    /// Runs a prefill batch.
    pub(super) fn prefill(&mut self, batch: Vec<Extend>) -> EngineStep {
        let tokens: usize = batch.iter().map(|extend| extend.take).sum();
        // KV that another engine has computed costs no time here.
        let is_computed = |extend: &&Extend| self.reqs[&extend.key].given.is_none();
        let computed: usize = batch.iter().filter(is_computed).map(|extend| extend.take).sum();
        let loaded = batch.iter().map(|extend| extend.loaded).sum();
        let busy = self.prefill_time(computed).max(self.load_time(loaded));
        let mut step = EngineStep { outputs: Vec::new(), busy };
        // All rows are allocated before anything runs, so two first turns of one session in a batch
        // both try to create its slot.
        self.reserve(tokens, batch.len());
        for extend in &batch {
            if let Err(reason) = self.allocate(extend) {
                self.crashed = Some(reason);
                return step;
            }
        }
        self.gauges.prefilled(tokens, step.busy);
        for extend in batch {
            let key = extend.key;
            if let Err(reason) = self.write_prompt(&extend) {
                self.crashed = Some(reason);
                return step;
            }
            if extend.last {
                let output = self.sample(key);
                // A request that ends with its first token publishes no prefix before its end.
                if output.finish.is_none() {
                    self.publish(key);
                    self.running.push(key);
                }
                step.outputs.push(output);
            } else if self.reqs[&key].to_abort {
                step.outputs.push(self.finish_aborted(key));
            } else {
                self.publish(key);
                self.chunked = Some(key);
            }
        }
        self.report_pool();
        self.publish_events();
        step
    }

    /// Evicts pages to make room for a batch. With pages of more than one token, the engine asks
    /// for one page per request more than may be needed.
    fn reserve(&mut self, tokens: usize, requests: usize) {
        let page_size = self.config.page_size;
        let more = if page_size > 1 { requests * page_size } else { 0 };
        self.make_free(self.pool.pages_of(tokens + more));
    }

    /// Evicts pages until `pages` pages are free or nothing more can be evicted.
    fn make_free(&mut self, pages: usize) {
        let short = pages.saturating_sub(self.pool.free_pages().len());
        if short > 0 {
            let evicted = self.tree.evict(short);
            self.copy_to_host();
            self.pool.return_pages(evicted);
        }
    }

    /// Counts a load, which runs beside the prefill of other tokens, and returns its time.
    fn load_time(&mut self, tokens: usize) -> Duration {
        let seconds = tokens as f64 / self.config.host_load_tokens_per_s;
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        self.host_loads.loaded += tokens;
        self.host_loads.load_us += u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        time
    }

    fn prefill_time(&self, tokens: usize) -> Duration {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let seconds = f64::from(tokens) / self.config.prefill_tokens_per_s;
        Duration::try_from_secs_f64(seconds).unwrap_or_default() + self.forward_sleep
    }

    fn allocate(&mut self, extend: &Extend) -> Result<(), &'static str> {
        let req = self.reqs.get_mut(&extend.key).expect("an admitted request exists");
        let first = req.row.is_none();
        if first && req.retractions == 0 {
            req.cached = req.given.unwrap_or(extend.start);
            req.from_host = extend.loaded;
        }
        req.seq = extend.start;
        let streaming = match &req.kind {
            RequestKind::Streaming { session } => Some(session.clone()),
            RequestKind::Plain | RequestKind::Normal { .. } | RequestKind::Tagged { .. } => None,
        };
        let row = match (extend.borrowed, &streaming) {
            (Some(row), _) if self.rows[row].is_none() => {
                return Err("AssertionError: the session's row is gone");
            }
            (Some(row), _) => row,
            (None, Some(session)) if self.slots.contains_key(session) => {
                return Err("AssertionError: streaming session already has a slot");
            }
            (None, streaming) => {
                let row = self.free_rows.pop().expect("admission counted the free rows");
                self.rows[row] = Some(Row {
                    pages: extend.pages.clone(),
                    alloc: extend.start,
                    committed: extend.start,
                    protected: extend.start,
                    lock: extend.node,
                    inserted: 0,
                    priority: req.priority,
                    space: req.space.clone(),
                });
                if let Some(session) = streaming {
                    self.slots.insert(session.clone(), row);
                }
                row
            }
        };
        let req = self.reqs.get_mut(&extend.key).expect("an admitted request exists");
        req.row = Some(row);
        if first && extend.borrowed.is_some() {
            req.publishes = false;
            self.trim(row, extend.start);
        }
        self.grow(row, extend.start + extend.take);
        Ok(())
    }

    /// Frees the pages that the row holds beyond `tokens`.
    fn trim(&mut self, row: usize, tokens: usize) {
        // Pages in the tree belong to the tree, so the row must not free them.
        let shared = self.row(row).protected / self.config.page_size;
        let keep = self.pool.pages_of(tokens).max(shared);
        let record = self.row(row);
        let tail = record.pages.split_off(keep.min(record.pages.len()));
        record.alloc = tokens;
        record.committed = tokens;
        self.pool.return_pages(tail);
    }

    /// Allocates pages for the row's first `tokens`; admission has made sure that there is room.
    fn grow(&mut self, row: usize, tokens: usize) {
        let have = self.row(row).pages.len();
        let need = self.pool.pages_of(tokens).saturating_sub(have);
        self.make_free(need);
        for _ in 0..need {
            let page = self.pool.take_page().expect("admission reserved the pages");
            self.row(row).pages.push(page);
        }
        let record = self.row(row);
        record.alloc = record.alloc.max(tokens);
        record.committed = record.committed.max(tokens);
    }

    /// Computes the KV of one chunk of a prompt. An error is the reason of a crash.
    fn write_prompt(&mut self, extend: &Extend) -> Result<(), &'static str> {
        let end = extend.start + extend.take;
        let row = self.reqs[&extend.key].row.expect("allocated");
        if self.rows[row].is_none() {
            return Err("AssertionError: the session's row is gone");
        }
        // Another turn on the same row may have shortened the row since the allocation.
        self.grow(row, end);
        let req = self.reqs.get_mut(&extend.key).expect("an admitted request exists");
        let record = self.rows[row].as_ref().expect("checked above");
        for at in extend.start..end {
            let token = req.fill_token(at);
            if token >= VOCAB_SIZE {
                return Err("IndexError: index out of range in self");
            }
            self.pool.write(&record.pages, at, token);
        }
        req.seq = end;
        Ok(())
    }

    /// Computes one output token for every running request.
    pub(super) fn decode(&mut self) -> EngineStep {
        let ms = self.config.decode_ms_per_step / 1000.0;
        let busy = Duration::try_from_secs_f64(ms).unwrap_or_default() + self.forward_sleep;
        let mut outputs = Vec::new();
        self.make_room(&mut outputs);
        // The engine assumes that each running request may need a page.
        self.make_free(self.running.len());
        for key in self.running.clone() {
            let req = &self.reqs[&key];
            let at = req.seq;
            let token = req.fill_token(at);
            if !self.is_orphan(key) {
                let row = req.row.expect("a running request has a row");
                self.grow(row, at + 1);
                let record = self.rows[row].as_ref().expect("a row in use has a record");
                self.pool.write(&record.pages, at, token);
            }
            self.reqs.get_mut(&key).expect("it runs").seq = at + 1;
        }
        for key in self.running.clone() {
            let output = self.sample(key);
            if self.crashed.is_some() {
                break;
            }
            if output.finish.is_some() {
                self.running.retain(|&k| k != key);
            }
            outputs.push(output);
        }
        self.gauges.decode_steps += 1;
        if self.gauges.decode_steps.is_multiple_of(u64::from(self.config.decode_log_interval)) {
            self.report_pool();
            self.report_sessions();
            self.publish_events();
        }
        EngineStep { outputs, busy }
    }

    /// Retracts requests until the pool has room for the next decode step.
    fn make_room(&mut self, outputs: &mut Vec<Output>) {
        let tested = self.config.test_retract && self.forwards.is_multiple_of(TEST_RETRACT_EVERY);
        if !tested && self.has_room() {
            return self.ratio.decay();
        }
        if tested && let Some(victim) = self.next_victim() {
            self.retract(victim);
        }
        while !self.has_room() {
            match self.next_victim() {
                Some(victim) => self.retract(victim),
                None => {
                    let last = self.running.pop().expect("only a running request can lack room");
                    outputs.push(self.finish_out_of_memory(last));
                }
            }
        }
        let running = || self.running.iter().map(|key| &self.reqs[key]);
        let made = running().map(|req| req.output.len()).sum();
        let asked = running().map(|req| req.max_new).sum();
        self.ratio.retracted(self.running.len(), made, asked);
    }

    fn has_room(&self) -> bool {
        let needs = |&&key: &&ReqKey| !self.is_orphan(key) && self.needs_page(key);
        let need = self.running.iter().filter(needs).count();
        need <= self.pool.free_pages().len() + self.tree.evictable_pages()
    }

    /// Returns the next request to retract: the one with the least output, then the longest prompt,
    /// then the latest arrival. Returns `None` if only one request runs.
    fn next_victim(&self) -> Option<ReqKey> {
        let cost = |&key: &ReqKey| {
            let req = &self.reqs[&key];
            (req.output.len(), std::cmp::Reverse(req.prompt.len()))
        };
        let victim = self.running.iter().copied().rev().min_by_key(cost);
        victim.filter(|_| self.running.len() > 1)
    }

    fn needs_page(&self, key: ReqKey) -> bool {
        let req = &self.reqs[&key];
        let row = req.row.and_then(|row| self.rows[row].as_ref());
        row.is_some_and(|row| self.pool.pages_of(req.seq + 1) > row.pages.len())
    }

    /// Samples the next token of a request whose KV is complete, and ends the request if the token
    /// does.
    fn sample(&mut self, key: ReqKey) -> Output {
        let token = self.next_token(key);
        let req = self.reqs.get_mut(&key).expect("it ran");
        if req.max_new > 0 || req.refused.is_some() {
            req.output.push(token);
        }
        match self.verdict(key) {
            None => self.output(key, Some(token), None),
            Some(finish) => self.finish(key, Some(token), finish),
        }
    }

    fn verdict(&self, key: ReqKey) -> Option<Finish> {
        let req = &self.reqs[&key];
        if let Some(refusal) = &req.refused {
            return Some(refusal.clone());
        }
        if req.to_abort {
            let message = "Aborted".to_owned();
            return Some(Finish::Abort { message, status: None, queued: false });
        }
        if req.output.len() >= req.max_new {
            return Some(Finish::Length(req.max_new));
        }
        if !req.sampling.ignore_eos && req.output.last() == Some(&EOS) {
            return Some(Finish::StopToken(EOS));
        }
        let mut stops = req.sampling.stop.iter();
        let stop = stops.find(|stop| !stop.is_empty() && req.output.ends_with(stop))?;
        Some(Finish::StopText(stop.clone()))
    }

    /// Returns the simulated model's next token, a function of the row's actual pages.
    fn next_token(&self, key: ReqKey) -> u32 {
        let req = &self.reqs[&key];
        if req.refused.is_some() {
            return REFUSED_OUTPUT;
        }
        let record = req.row.and_then(|row| self.rows[row].as_ref());
        let pages = record.map_or(&[][..], |row| &row.pages);
        let mut digest = self.pool.digest(pages, req.seq);
        if !req.sampling.greedy {
            digest = scramble(digest ^ scramble(self.config.seed ^ (key << 32)));
        }
        let last = req.fill_token(req.seq - 1);
        model::next_token(digest, last, self.config.eos_per_mille)
    }
}
