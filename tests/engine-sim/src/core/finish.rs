//! The end of requests, and what happens to their KV.

use super::{
    super::{
        radix::Prefix,
        request::{Finish, Output, ReqKey, RequestKind, Space},
    },
    Core, Row,
};

const OUT_OF_MEMORY: &str = "Out of memory even after retracting all other requests in the \
                             decode batch. Aborting the last request.";

impl Core {
    /// Inserts the full pages computed so far into the tree and locks them for the row.
    pub(super) fn publish(&mut self, key: ReqKey) {
        let req = &self.reqs[&key];
        if !req.publishes || self.config.disable_radix_cache {
            return;
        }
        let row = req.row.expect("a request that ran has a row");
        let len = req.seq.min(req.prompt.len());
        self.cache_row(key, row, len, None);
    }

    /// Returns the tag that a successful request puts on its KV, or `None` if its session was
    /// closed.
    fn tag_of(&self, key: ReqKey) -> Option<String> {
        match &self.reqs[&key].kind {
            RequestKind::Tagged { session, life } if self.tags.get(session) == Some(life) => {
                Some(session.clone())
            }
            _ => None,
        }
    }

    /// Moves the full pages of the row's first `len` tokens into the tree and locks them for the
    /// row.
    fn cache_row(&mut self, key: ReqKey, row: usize, len: usize, tag: Option<&str>) {
        let req = &self.reqs[&key];
        let (tokens, space, session_id) =
            (req.fill(len), req.space.clone(), req.session_id.clone());
        self.cache_tokens(row, &tokens, &space, tag, session_id.as_deref(), false);
    }

    /// Moves the full pages of the row's first tokens, which are these, into the tree and locks
    /// them for the row.
    pub(super) fn cache_tokens(
        &mut self,
        row: usize,
        tokens: &[u32],
        space: &Space,
        tag: Option<&str>,
        session_id: Option<&str>,
        is_wanted_again: bool,
    ) {
        let page_size = self.config.page_size;
        let full = tokens.len() / page_size;
        let record = self.rows[row].as_mut().expect("a row in use has a record");
        let own_from = record.protected / page_size;
        if full < own_from {
            return;
        }
        let cached = self.tree.insert(Prefix {
            tokens: &tokens[..full * page_size],
            pages: &record.pages[..full],
            space,
            tag,
            session_id,
            priority: record.priority,
            inserted: if is_wanted_again { 0 } else { record.inserted },
            is_wanted_again,
        });
        self.tree.lock(cached.node);
        self.tree.unlock(record.lock);
        record.lock = cached.node;
        record.protected = full * page_size;
        record.inserted = record.inserted.max(record.protected);
        // Where the tree already has a page for these tokens, the row uses that page and frees its
        // own.
        for (own, kept) in record.pages.iter_mut().zip(&cached.pages).skip(own_from) {
            if own != kept {
                let duplicate = std::mem::replace(own, *kept);
                self.pool.return_pages([duplicate]);
            }
        }
        self.copy_to_host();
    }

    /// Frees the row and its private pages; its pages in the tree stay there, unlocked.
    fn free_row(&mut self, row: usize) {
        let record = self.rows[row].take().expect("a row is freed once");
        let Row { mut pages, protected, lock, .. } = record;
        self.pool.return_pages(pages.drain(protected / self.config.page_size..));
        self.tree.unlock(lock);
        self.free_rows.push(row);
    }

    /// Frees a session's KV and row; the locked prefix becomes evictable.
    pub(super) fn release_slot(&mut self, session: &str) {
        if let Some(row) = self.slots.remove(session) {
            self.free_row(row);
        }
    }

    /// Whether a close freed the session's row while this turn still runs on it.
    pub(super) fn is_orphan(&self, key: ReqKey) -> bool {
        let req = &self.reqs[&key];
        match &req.kind {
            RequestKind::Streaming { session } => self.slots.get(session).copied() != req.row,
            RequestKind::Plain | RequestKind::Normal { .. } | RequestKind::Tagged { .. } => false,
        }
    }

    pub(super) fn output(&self, key: ReqKey, token: Option<u32>, finish: Option<Finish>) -> Output {
        let req = &self.reqs[&key];
        let shared = match &req.kind {
            // All turns of a session share one history buffer, and each counts all of it.
            RequestKind::Streaming { session } if req.refused.is_none() => {
                self.sessions.get(session)
            }
            _ => None,
        };
        Output {
            key,
            token,
            finish,
            prompt_tokens: shared.map_or(req.prompt.len(), |session| session.prompt_len()),
            cached_tokens: req.cached,
            host_tokens: req.from_host,
            retractions: req.retractions,
        }
    }

    /// Ends a request that ran.
    pub(super) fn finish(&mut self, key: ReqKey, token: Option<u32>, finish: Finish) -> Output {
        let aborted = matches!(finish, Finish::Abort { .. });
        let output = self.output(key, token, Some(finish));
        if self.is_orphan(key) {
            self.crashed = Some("AssertionError: release_kv_cache");
            return output;
        }
        let req = &self.reqs[&key];
        let row = req.row.expect("a request that ran has a row");
        let seq = req.seq;
        match req.kind.clone() {
            RequestKind::Streaming { .. } if aborted && !self.owns_prefix(key, row) => {
                self.crashed = Some("pool memory leak detected");
                return output;
            }
            RequestKind::Streaming { session } if aborted => {
                // All of the turn's KV, the aborted output included, moves to the evictable cache.
                self.cache_row(key, row, seq, None);
                self.release_slot(&session);
            }
            RequestKind::Streaming { .. } => {}
            RequestKind::Plain | RequestKind::Normal { .. } | RequestKind::Tagged { .. } => {
                let tag = if aborted { None } else { self.tag_of(key) };
                if !self.config.disable_radix_cache {
                    self.cache_row(key, row, seq, tag.as_deref());
                }
                self.free_row(row);
            }
        }
        self.settle_session(key, aborted);
        self.reqs.remove(&key);
        output
    }

    /// Whether the row's locked prefix consists of this turn's tokens. If not, inserting this
    /// turn's chain would put its pages in the tree twice; the engine's memory check then kills the
    /// process.
    fn owns_prefix(&mut self, key: ReqKey, row: usize) -> bool {
        let protected = self.row(row).protected;
        let req = &self.reqs[&key];
        if req.fill_len() < protected {
            return false;
        }
        let found = self.tree.find(&req.space, &req.fill(protected));
        self.row(row).pages.starts_with(&found.pages)
            && found.pages.len() * self.config.page_size == protected
    }

    fn settle_session(&mut self, key: ReqKey, aborted: bool) {
        let req = &self.reqs[&key];
        let Some(id) = req.controller_session() else { return };
        let Some(session) = self.sessions.get_mut(id) else { return };
        if aborted {
            session.abort_turn(&req.rid);
        } else {
            session.finish_turn(&req.rid, &req.output, true);
        }
    }

    /// Ends, as aborted, the request whose prompt was being prefilled in chunks.
    pub(super) fn finish_aborted(&mut self, key: ReqKey) -> Output {
        let message = "Aborted".to_owned();
        self.finish(key, None, Finish::Abort { message, status: None, queued: false })
    }

    /// Ends the last running request because the pool has no room for it. Like a retraction, this
    /// frees nothing of a session's turn, and the output so far becomes history.
    pub(super) fn finish_out_of_memory(&mut self, key: ReqKey) -> Output {
        let message = OUT_OF_MEMORY.to_owned();
        let finish = Finish::Abort { message, status: Some(500), queued: false };
        let output = self.output(key, None, Some(finish));
        self.release_unfinished(key);
        self.reqs.remove(&key);
        output
    }

    /// Removes a request from the queue. Its session loses the in-flight flag and keeps its row.
    pub(super) fn abort_queued(&mut self, key: ReqKey) -> Output {
        self.waiting.retain(|&k| k != key);
        let message = "Abort in waiting queue".to_owned();
        let finish = Finish::Abort { message, status: None, queued: true };
        let output = self.output(key, None, Some(finish));
        let req = self.reqs.remove(&key).expect("a queued request exists");
        if let Some(id) = req.controller_session()
            && let Some(session) = self.sessions.get_mut(id)
        {
            session.abort_turn(&req.rid);
        }
        output
    }

    /// Sends a running request back to the queue. A session's turn frees no KV by this, and its
    /// partial output becomes history.
    pub(super) fn retract(&mut self, key: ReqKey) {
        self.running.retain(|&k| k != key);
        self.gauges.retracted += 1;
        self.release_unfinished(key);
        self.reqs.get_mut(&key).expect("it ran").retractions += 1;
        self.waiting.push_back(key);
    }

    /// Frees a running request's row. A session's turn leaves its row to the session, which records
    /// the turn as finished.
    fn release_unfinished(&mut self, key: ReqKey) {
        let req = self.reqs.get_mut(&key).expect("it runs");
        let row = req.row.take().expect("a running request has a row");
        let req = &self.reqs[&key];
        if !matches!(req.kind, RequestKind::Streaming { .. }) {
            return self.free_row(row);
        }
        if let Some(id) = req.controller_session()
            && let Some(session) = self.sessions.get_mut(id)
        {
            session.finish_turn(&req.rid, &req.output, false);
        }
    }
}
