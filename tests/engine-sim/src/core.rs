//! The scheduler of one DP rank, without clock, socket, task or lock.
//!
//! The core reproduces the engine's mechanics, flaws included: one waiting queue served strictly in
//! order, session KV that nothing evicts, and an in-flight flag that a refused turn clears although
//! another turn is live. Callers pass the time as an argument. [`Core::step`] is one scheduler
//! iteration. A fault that takes the real process down makes the core [`crashed`](Core::crashed)
//! for good.

use super::{
    kv::event::KvEvent,
    pool::PagePool,
    radix::{Match, NodeId, ROOT, Radix, order::EvictionOrder},
    request::{EngineStep, Finish, Output, Req, ReqKey, RequestKind, SessionRef, Space, Submit},
    session::Session,
};
use clap::{Args as _, FromArgMatches as _};
use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

mod audit;
mod finish;
mod model;
mod ratio;
mod schedule;

pub use super::radix::{
    HostFacts, WritePolicy,
    order::{EvictionPolicy, TlruConfig},
};
pub use audit::{Gauges, PoolFacts, SessionFacts};
pub use model::is_model_answer;
use ratio::NewTokenRatio;

/// The shortest time between two runs of the reaper, which closes expired sessions.
const REAP_EVERY: Duration = Duration::from_secs(1);
/// The number of context tokens that the engine keeps free of input.
const INPUT_RESERVE_TOKENS: usize = 6;
/// The one-token prompt as which a refused request runs; the next constant is its one answer token.
const REFUSED_PROMPT: u32 = 0;
const REFUSED_OUTPUT: u32 = 296;

/// The settings of one rank.
#[derive(Clone, Debug, PartialEq, clap::Args)]
pub struct CoreConfig {
    /// The tokens of a page; a power of two.
    #[arg(long, default_value_t = 16)]
    pub page_size: usize,
    #[arg(long, default_value_t = 2048)]
    pub max_total_tokens: usize,
    #[arg(long = "context-length", default_value_t = 1024)]
    pub context_len: usize,
    #[arg(long, default_value_t = 8)]
    pub max_running_requests: usize,
    #[arg(long, default_value_t = 512)]
    pub chunked_prefill_size: usize,
    #[arg(long = "enable-streaming-session")]
    pub streaming_sessions: bool,
    #[arg(long = "enable-session-radix-cache")]
    pub session_radix_cache: bool,
    /// The number of decode steps between two pool reports to `/metrics`.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..))]
    pub decode_log_interval: u32,
    /// With 1, admission reserves 70 % of an unfinished answer; with less, less. Here in
    /// thousandths of the answer. With `ignore_eos` admission reserves all of it.
    #[arg(
        long = "schedule-conservativeness",
        default_value = "1",
        value_parser = new_token_per_mille
    )]
    pub new_token_per_mille: usize,
    /// Makes every third forward pass retract a request, if more than one runs.
    #[arg(skip)]
    pub test_retract: bool,
    #[arg(long, default_value_t = 100_000.0)]
    pub prefill_tokens_per_s: f64,
    #[arg(long, default_value_t = 1.0)]
    pub decode_ms_per_step: f64,
    /// The chance, in thousandths, that a token ends an answer; ignored with `ignore_eos`.
    #[arg(long, default_value_t = 0)]
    pub eos_per_mille: u32,
    /// The seed of sampled answers and generated ids; greedy answers don't depend on it.
    #[arg(long, alias = "random-seed", default_value_t = 0)]
    pub seed: u64,
    /// Keeps no KV of requests that have ended.
    #[arg(long)]
    pub disable_radix_cache: bool,
    /// Which KV is evicted first.
    #[arg(long, value_enum, default_value = "lru")]
    pub radix_eviction_policy: EvictionPolicy,
    /// The settings of `tlru`, as JSON.
    #[arg(long, default_value = "{}", value_parser = tlru_config)]
    pub radix_eviction_policy_config: TlruConfig,
    /// Records the radix tree's changes as KV events.
    #[arg(skip)]
    pub kv_events: bool,
    /// Keeps copies of KV in the host's memory.
    #[arg(long = "enable-hierarchical-cache", alias = "enable-hicache")]
    pub has_host_tier: bool,
    /// The size of the host tier, as a multiple of the pool.
    #[arg(long, default_value_t = 2.0)]
    pub hicache_ratio: f64,
    #[arg(long, value_enum, default_value = "write_through")]
    pub hicache_write_policy: WritePolicy,
    /// How fast KV is loaded from the host, beside the prefill of other tokens.
    #[arg(long, default_value_t = 1_000_000.0)]
    pub host_load_tokens_per_s: f64,
}

impl Default for CoreConfig {
    /// Returns the defaults of the command line, with streaming sessions.
    fn default() -> CoreConfig {
        let matches = Self::augment_args(clap::Command::new("rank")).get_matches_from(["rank"]);
        let config = Self::from_arg_matches(&matches).expect("all have defaults");
        CoreConfig { streaming_sessions: true, ..config }
    }
}

fn tlru_config(json: &str) -> Result<TlruConfig, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}

/// Converts SGLang's factor to the share, in thousandths, that admission reserves: 70 % of the
/// factor.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
fn new_token_per_mille(factor: &str) -> Result<usize, std::num::ParseFloatError> {
    let factor: f64 = factor.parse()?;
    Ok((700.0 * factor).round().clamp(0.0, 1000.0) as usize)
}

impl CoreConfig {
    /// Returns the pool's size in tokens, rounded down to whole pages.
    pub fn total_tokens(&self) -> usize {
        self.max_total_tokens / self.page_size * self.page_size
    }

    /// Returns the size of the host tier in pages. SGLang adds a page.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "as SGLang rounds it"
    )]
    fn host_pages(&self) -> u32 {
        let tokens = (self.total_tokens() as f64 * self.hicache_ratio) as u64;
        let pages = tokens / self.page_size as u64 + 1;
        u32::try_from(pages).expect("a tier has fewer than 2^32 pages")
    }

    fn max_req_len(&self) -> usize {
        (self.context_len - 1).min(self.total_tokens() - 1)
    }

    /// Returns the prompt length, in tokens, from which on prompts are refused.
    pub fn max_req_input_len(&self) -> usize {
        self.max_req_len().saturating_sub(INPUT_RESERVE_TOKENS - 1)
    }
}

/// One row of `req_to_token`, with its KV record.
#[derive(Clone, Debug, Default)]
struct Row {
    pages: Vec<u32>,
    alloc: usize,
    committed: usize,
    /// The number of leading tokens that lie in the radix tree, locked by this row.
    protected: usize,
    lock: NodeId,
    /// The number of leading tokens that this row's request has inserted into the tree.
    inserted: usize,
    /// The priority of the request that has the row.
    priority: i64,
    space: Space,
}

/// The scheduler and caches of one rank.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    pool: PagePool,
    tree: Radix,
    /// The KV of the host tier, by the tree's pages there. Without a tier it has one page.
    host_pool: PagePool,
    host_loads: HostFacts,
    rows: Vec<Option<Row>>,
    free_rows: Vec<usize>,
    sessions: BTreeMap<String, Session>,
    /// The row of each streaming session that has KV.
    slots: BTreeMap<String, usize>,
    /// The number of the current life of each open `session_id` tag; a close ends a life.
    tags: BTreeMap<String, u64>,
    next_tag: u64,
    reqs: BTreeMap<ReqKey, Req>,
    waiting: VecDeque<ReqKey>,
    running: Vec<ReqKey>,
    /// The one request whose prompt is being prefilled in chunks.
    chunked: Option<ReqKey>,
    next_key: ReqKey,
    last_reap: Duration,
    forward_sleep: Duration,
    ratio: NewTokenRatio,
    /// Set when a request did not fit: the queue then waits until a running request has left.
    batch_is_full: bool,
    /// The number of forward passes so far.
    forwards: u64,
    gauges: Gauges,
    /// The event batches that are ready to be published.
    batches: Vec<Vec<KvEvent>>,
    crashed: Option<&'static str>,
}

impl Core {
    pub fn new(config: CoreConfig) -> Core {
        assert!(config.chunked_prefill_size >= config.page_size, "a chunk holds at least a page");
        let pages = config.max_total_tokens / config.page_size;
        let pages = u32::try_from(pages).expect("a pool has fewer than 2^32 pages");
        let rows = config.max_running_requests;
        Core {
            pool: PagePool::new(pages, config.page_size),
            tree: {
                let tree =
                    Radix::new(config.page_size, config.kv_events).with_order(EvictionOrder {
                        policy: config.radix_eviction_policy,
                        tlru: config.radix_eviction_policy_config,
                    });
                if config.has_host_tier {
                    tree.with_host(config.hicache_write_policy, config.host_pages())
                } else {
                    tree
                }
            },
            host_pool: PagePool::new(
                if config.has_host_tier { config.host_pages() } else { 0 },
                config.page_size,
            ),
            host_loads: HostFacts::default(),
            rows: vec![None; rows],
            free_rows: (0..rows).rev().collect(),
            sessions: BTreeMap::new(),
            slots: BTreeMap::new(),
            tags: BTreeMap::new(),
            next_tag: 1,
            reqs: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            chunked: None,
            next_key: 1,
            last_reap: Duration::ZERO,
            forward_sleep: Duration::ZERO,
            ratio: NewTokenRatio::new(config.new_token_per_mille),
            batch_is_full: false,
            forwards: 0,
            gauges: Gauges::default(),
            batches: Vec::new(),
            crashed: None,
            config,
        }
    }

    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// Returns why the process crashed, or `None` while it is alive.
    pub fn crashed(&self) -> Option<&'static str> {
        self.crashed
    }

    /// Adds `forward_sleep` to the duration of every forward pass (`/slow_down`).
    pub fn slow_down(&mut self, forward_sleep: Duration) {
        self.forward_sleep = forward_sleep;
    }

    /// Opens a session. Returns false if a session with that id is open or still closing.
    pub fn open(
        &mut self,
        now: Duration,
        id: &str,
        streaming: bool,
        timeout: Option<Duration>,
    ) -> bool {
        if self.sessions.contains_key(id) {
            return false;
        }
        self.sessions.insert(id.to_owned(), Session::new(now, streaming, timeout));
        true
    }

    /// Closes the session `id` and ends its tag; a session with an unfinished turn closes after
    /// that turn. An unknown id is ignored.
    pub fn close(&mut self, id: &str) {
        self.untag(id);
        self.try_close(id);
    }

    /// Moves an idle session's KV into the tree and frees its row, as the shim does. Returns false
    /// if the session is unknown, has an accepted turn or is closing.
    pub fn demote(&mut self, id: &str) -> bool {
        let busy = |session: &Session| session.inflight || session.close_on_finish;
        let Some(session) = self.sessions.get(id).filter(|session| !busy(session)) else {
            return false;
        };
        if let Some(&row) = self.slots.get(id) {
            let history = session.history();
            let record = self.rows[row].as_ref().expect("a slot's row has a record");
            let kept = record.committed.min(history.len());
            let space = record.space.clone();
            self.cache_tokens(row, &history[..kept], &space, None, None, true);
            self.release_slot(id);
            self.sessions.get_mut(id).expect("found above").demoted_to = Some(space);
        }
        true
    }

    /// Ends a tag's life: requests that began in this life no longer tag their KV.
    fn untag(&mut self, id: &str) {
        if self.tags.remove(id).is_some() {
            self.tree.untag(id);
        }
    }

    /// Returns the `session_id` tags that requests have opened and no close has ended.
    pub fn open_tags(&self) -> impl Iterator<Item = &str> {
        self.tags.keys().map(String::as_str)
    }

    /// Returns the number of a tag's current life. The first request after a close begins a new
    /// life.
    fn tag_life(&mut self, id: &str) -> u64 {
        if let Some(&life) = self.tags.get(id) {
            return life;
        }
        let life = self.next_tag;
        self.next_tag += 1;
        self.tags.insert(id.to_owned(), life);
        life
    }

    /// Queues a request. A refused request is queued too, and its answer is the refusal.
    pub fn submit(&mut self, now: Duration, submit: Submit) -> ReqKey {
        let key = self.next_key;
        self.next_key += 1;
        let Submit { rid, input_ids, sampling, session, space, given, priority, .. } = submit;
        let session_id = match &session {
            SessionRef::Tagged(id) => Some(id.clone()),
            SessionRef::None | SessionRef::Controller(_) => None,
        };
        let (kind, prompt) = self.restore(now, &rid, session, input_ids);
        let limit = self.config.max_req_input_len();
        let checked = prompt.and_then(|prompt| {
            let len = prompt.len();
            if len < limit {
                return Ok(prompt);
            }
            Err(Finish::bad_request(format!(
                "Input length ({len} tokens) exceeds the maximum allowed length ({limit} tokens). \
                 Use a shorter input or enable --allow-auto-truncate."
            )))
        });
        let (prompt, refused) = match checked {
            Ok(prompt) => (prompt, None),
            Err(refusal) => (vec![REFUSED_PROMPT], Some(refusal)),
        };
        let room = self.config.max_req_len().saturating_sub(prompt.len() + 1);
        let max_new = match &refused {
            Some(_) => 1,
            None => sampling.max_new_tokens.unwrap_or(room).min(room),
        };
        assert!(!prompt.is_empty(), "a request without input never reaches the scheduler");
        let req = Req {
            rid,
            prompt,
            output: Vec::new(),
            sampling,
            max_new,
            kind,
            space,
            priority,
            session_id,
            row: None,
            seq: 0,
            cached: 0,
            from_host: 0,
            publishes: true,
            refused,
            given,
            to_abort: false,
            retractions: 0,
        };
        self.reqs.insert(key, req);
        self.waiting.push_back(key);
        key
    }

    /// Returns the kind of a request and its full prompt, with the session's history restored.
    fn restore(
        &mut self,
        now: Duration,
        rid: &str,
        session: SessionRef,
        input: Vec<u32>,
    ) -> (RequestKind, Result<Vec<u32>, Finish>) {
        let params = match session {
            SessionRef::None => return (RequestKind::Plain, Ok(input)),
            SessionRef::Tagged(session) => {
                if !self.config.session_radix_cache {
                    return (RequestKind::Plain, Ok(input));
                }
                let life = self.tag_life(&session);
                return (RequestKind::Tagged { session, life }, Ok(input));
            }
            SessionRef::Controller(params) => params,
        };
        let id = &params.id;
        let Some(session) = self.sessions.get_mut(id) else {
            let message = format!("Invalid request: session id {id} does not exist");
            return (RequestKind::Plain, Err(Finish::bad_request(message)));
        };
        if session.close_on_finish {
            let message = format!("Invalid request: close was requested for session {id}");
            return (RequestKind::Plain, Err(Finish::bad_request(message)));
        }
        let prompt = session.create(now, rid, &params, input);
        // A refused turn of a streaming session stays attached to the session. This flaw of the
        // engine later clears the live turn's in-flight flag.
        let kind = match (session.streaming, prompt.is_ok()) {
            (true, _) => RequestKind::Streaming { session: params.id },
            (false, true) => RequestKind::Normal { session: params.id },
            (false, false) => RequestKind::Plain,
        };
        (kind, prompt)
    }

    /// Aborts every request whose id starts with `rid`, or all requests. A queued request ends
    /// here, a running one at its next forward pass. Returns the outputs of the queued ones.
    pub fn abort(&mut self, rid: &str, all: bool) -> Vec<Output> {
        if rid.is_empty() && !all {
            return Vec::new();
        }
        let hit = |req: &Req| all || req.rid.starts_with(rid);
        let queued: Vec<ReqKey> =
            self.waiting.iter().copied().filter(|k| hit(&self.reqs[k])).collect();
        let outputs = queued.into_iter().map(|key| self.abort_queued(key)).collect();
        for key in self.running.iter().chain(&self.chunked) {
            let req = self.reqs.get_mut(key).expect("a request in a batch exists");
            req.to_abort |= all || req.rid.starts_with(rid);
        }
        outputs
    }

    /// Drops every cached page and every session's KV. Returns false, and drops nothing, while a
    /// request runs or waits.
    pub fn flush(&mut self) -> bool {
        if !self.reqs.is_empty() {
            return false;
        }
        for id in self.slots.keys().cloned().collect::<Vec<_>>() {
            self.release_slot(&id);
        }
        let pages = self.tree.clear();
        self.pool.return_pages(pages);
        true
    }

    /// Runs one scheduler iteration. Returns `None` when nothing can be done; a wedged rank also
    /// returns `None` although requests wait.
    pub fn step(&mut self, now: Duration) -> Option<EngineStep> {
        if self.crashed.is_some() {
            return None;
        }
        self.reap(now);
        self.tree.end_copies();
        let batch = self.schedule();
        if batch.is_empty() && self.running.is_empty() {
            if self.reqs.is_empty() {
                self.publish_events();
            }
            self.ratio.reset();
            return None;
        }
        self.forwards += 1;
        let retracted = self.gauges.retracted;
        let step = if batch.is_empty() { self.decode() } else { self.prefill(batch) };
        let left = step.outputs.iter().any(|output| output.finish.is_some());
        self.batch_is_full &= !left && self.gauges.retracted == retracted;
        Some(step)
    }

    /// Returns the longest token prefixes in the radix cache.
    pub fn cached(&self) -> Vec<(Space, Vec<u32>)> {
        self.tree.chains()
    }

    /// Takes the event batches that were released since the last call. A batch is released with
    /// every prefill, every [`CoreConfig::decode_log_interval`] decode steps, and when the core
    /// becomes idle.
    pub fn take_batches(&mut self) -> Vec<Vec<KvEvent>> {
        std::mem::take(&mut self.batches)
    }

    fn publish_events(&mut self) {
        let events = self.tree.take_events();
        if !events.is_empty() {
            self.batches.push(events);
        }
    }

    /// Returns the latest time by which [`Core::step`] must run again for the reaper, if any
    /// session has a deadline.
    pub fn next_deadline(&self) -> Option<Duration> {
        let due =
            |s: &Session| if s.close_on_finish { Some(Duration::ZERO) } else { s.expires_at() };
        let earliest = self.sessions.values().filter_map(due).min()?;
        // One millisecond more, because both the pause and the timeout must be exceeded.
        Some(earliest.max(self.last_reap + REAP_EVERY) + Duration::from_millis(1))
    }

    fn reap(&mut self, now: Duration) {
        if now <= self.last_reap + REAP_EVERY {
            return;
        }
        self.last_reap = now;
        let expired = |s: &Session| s.close_on_finish || s.expires_at().is_some_and(|at| at < now);
        let due: Vec<String> =
            self.sessions.iter().filter(|(_, s)| expired(s)).map(|(id, _)| id.clone()).collect();
        for id in due {
            self.try_close(&id);
        }
    }

    fn try_close(&mut self, id: &str) {
        let Some(session) = self.sessions.get_mut(id) else { return };
        if session.has_unfinished() {
            session.close_on_finish = true;
            return;
        }
        self.untag(id);
        self.release_slot(id);
        self.sessions.remove(id);
    }

    fn row(&mut self, row: usize) -> &mut Row {
        self.rows[row].as_mut().expect("a row in use has a record")
    }

    fn available_tokens(&self) -> usize {
        self.pool.free_pages().len() * self.config.page_size
    }

    fn evictable_tokens(&self) -> usize {
        self.tree.evictable_pages() * self.config.page_size
    }
}

#[cfg(test)]
mod tests;
