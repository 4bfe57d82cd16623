//! Chooses the worker for a turn. Pure.
//!
//! A placement takes one snapshot of the fleet and returns a worker, the reason, and the figures
//! that were compared. The same inputs give the same worker in every process.
//!
//! `candidates` finds the workers that can take the turn. `cost` computes what the turn costs on
//! each of them, in milliseconds. This module chooses. A session stays on its worker unless another
//! is better by a gain that pays for the move. Among workers of equal cost, a new session goes to
//! the one with fewer sessions, then to the one that a hash of session and worker prefers.
//!
//! Beside the choice, this folder has what it depends on: [`affinity`] (the worker that this router
//! bound each session to), [`session_status`] (a session's status, by the agents' tables and the
//! binding), and `recent` (the last placements, for clients that ask for the reason).

pub mod affinity;
mod candidates;
mod cost;
pub(crate) mod recent;
pub mod session_status;
#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    time::{Duration, Instant},
};

use proto::{id::Digest, load::Retention};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use self::{candidates::NoWorker, cost::Figures};
use crate::{
    fleet::{
        snapshot::Snapshot,
        worker::{WorkerRef, WorkerState},
        worker_table::WorkerStats,
    },
    residency::PromptOverlap,
};

/// Extra cost, in milliseconds, at which a child session still goes to its parent's worker. What
/// siblings share shows in the overlap only after the first of them has run.
pub const PARENT_SLACK_MS: u64 = 250;
/// As [`PARENT_SLACK_MS`], for a cache key. A cache key is only a client's guess about its
/// prefixes.
pub const CACHE_KEY_SLACK_MS: u64 = 150;
/// Time after a move in which a session needs twice the gain to move again. Its own turn may have
/// caused the load it moved away from, and a session must not bounce between two workers.
const MOVED_RECENTLY: Duration = Duration::from_secs(60);
/// Number of compared workers that a placement reports, besides the session's own and the preferred
/// one. They show why the chosen worker was better; a list of a thousand workers would not help.
const FIGURES_MAX: usize = 8;
/// Assumed number of new tokens in a turn whose prompt is unknown. Agents add 4,000 per turn on
/// average.
pub const TURN_TOKENS_ASSUMED: u64 = 4_000;
/// Idle time after which a session is compared with its prompt. Some of its KV may have been
/// evicted by then, so moving to a worker with more room may cost nothing. Four in five turns come
/// sooner.
const IDLE_SETTLED_MAX: Duration = Duration::from_secs(60);
/// Time for which a lost connection is ignored. A control stream that ends is reconnected within
/// this time, and turns still work. A worker that is really gone refuses the turn, which is then
/// placed elsewhere.
const RECONNECT_MAX: Duration = Duration::from_secs(1);

/// Why a worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The session is on this worker.
    Sticky,
    /// The worker costs least; resident blocks of the prompt are counted.
    LeastCost,
    /// The worker costs least by its load; the prompt is unknown.
    LeastLoaded,
    /// The session could have stayed, but moving gains more than it costs.
    Moved,
    /// The session was on another worker and can't stay there.
    Rebound,
    /// The fleet has only this worker.
    OnlyWorker,
    /// All workers are stale. This worker costs least by its last report.
    StaleView,
    /// The parent session is on this worker.
    Parent,
    /// Earlier turns with the same cache key went to this worker.
    CacheKey,
}

impl Reason {
    /// Returns the reason's name in headers and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sticky => "sticky",
            Self::LeastCost => "least_cost",
            Self::LeastLoaded => "least_loaded",
            Self::Moved => "moved",
            Self::Rebound => "rebound",
            Self::OnlyWorker => "only_worker",
            Self::StaleView => "stale_view",
            Self::Parent => "parent",
            Self::CacheKey => "cache_key",
        }
    }
}

/// The worker that already has the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sticky {
    /// The worker.
    pub worker: WorkerRef,
    /// Whether the session must stay, whatever the load: its KV can't be rebuilt elsewhere, or its
    /// gate is on this worker.
    pub fixed: bool,
    /// When the session's last turn ended, or now while a turn runs. `None` if that is unknown, or
    /// if the worker doesn't report its blocks: then each prompt has to be read, to remember its
    /// blocks.
    pub last_turn_ended: Option<Instant>,
    /// When the session moved to this worker from another.
    pub moved_at: Option<Instant>,
    /// Tokens of the session's KV on the worker, as its agent reports it.
    pub reported_tokens: u64,
    /// The part of `reported_tokens` that is private to the session: pinned, and in no reported
    /// block.
    pub private_tokens: u64,
    /// Rough number of tokens that this turn adds to the previous one. `None` if that is unknown,
    /// or if this turn is shorter, so that its history is another.
    pub new_tokens: Option<u64>,
}

impl Sticky {
    /// Creates an entry for a worker, with nothing else known.
    #[must_use]
    pub fn new(worker: WorkerRef) -> Self {
        Self {
            worker,
            fixed: false,
            last_turn_ended: None,
            moved_at: None,
            reported_tokens: 0,
            private_tokens: 0,
            new_tokens: None,
        }
    }
}

/// A turn to be placed.
#[derive(Debug, Clone, Copy)]
pub struct PlacementRequest<'a> {
    /// Chooses among workers of equal cost: the digest of the session, or else of the turn.
    pub digest: Digest,
    /// Whether more turns will follow that begin with this turn's prompt and answer.
    pub expects_more_turns: bool,
    /// The worker that has the session.
    pub sticky: Option<Sticky>,
    /// A worker to prefer, if it costs at most the reason's slack more than the best.
    pub prefer: Option<(WorkerRef, Reason)>,
    /// The turn's prompt. If `None`, its tokens are unknown and the load alone decides.
    pub prompt: Option<PromptOverlap<'a>>,
    /// The retention that a new session asks for.
    pub retention: Option<Retention>,
    /// The model that the request body names.
    pub model: Option<&'a str>,
    /// A worker that has just refused this turn.
    pub exclude: Option<WorkerRef>,
}

/// A placement decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The worker that gets the turn.
    pub worker: WorkerRef,
    /// Why the worker was chosen.
    pub reason: Reason,
    /// Prompt tokens that the worker has to compute, if known.
    pub uncached_tokens: Option<u64>,
    /// The compared workers that cost least, best first, followed by the session's own and the
    /// preferred one. Empty if nothing had to be compared.
    pub figures: Vec<Figures>,
}

impl Placement {
    fn stay_on(worker: WorkerRef) -> Self {
        Self { worker, reason: Reason::Sticky, uncached_tokens: None, figures: vec![] }
    }

    /// Returns the prompt tokens to count on the worker until its answer begins.
    #[must_use]
    pub fn tokens_expected(&self) -> u64 {
        self.uncached_tokens.unwrap_or(TURN_TOKENS_ASSUMED)
    }
}

/// Whether a session's turn stays on the session's worker.
enum Stay<'a> {
    /// The turn must go to this worker, whatever it costs.
    Must(WorkerRef),
    /// The turn goes to this worker if no other is better.
    May(WorkerStats<'a>),
    /// The session has no worker, or its worker can't take the turn.
    No,
}

/// Places a turn without its prompt, if the prompt would hardly change the decision.
///
/// That is the case if the session must stay, or if no other worker would answer sooner by the
/// required gain even with the whole prompt resident there. Returns `None` if [`place`] has to
/// decide with the prompt, or if the prompt may need staged prefill. The prompt is tokenized only
/// then.
#[must_use]
pub fn place_without_prompt(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Option<Placement> {
    let home = match stay(request, view, now) {
        Stay::Must(worker) => return Some(Placement::stay_on(worker)),
        Stay::May(home) => home,
        Stay::No => return None,
    };
    let gain_ms = gain_min(request, view, now).as_millis();
    let queue_cost_ms = |stats| u128::from(cost::queue_cost_ms(request, view, stats, now));
    let is_recent = |at: Instant| now.saturating_duration_since(at) < IDLE_SETTLED_MAX;
    let Sticky { last_turn_ended, new_tokens, .. } = sticky(request)?;
    let is_long = |stage_tokens| new_tokens.is_none_or(|tokens| tokens > stage_tokens);
    if !last_turn_ended.is_some_and(is_recent) || home.stage_tokens().is_some_and(is_long) {
        return None;
    }
    let own_ms = queue_cost_ms(home);
    let stays = own_ms <= gain_ms || {
        let others = candidates::find_candidates(request, view, now).ok()?.workers;
        !others.into_iter().any(|other| queue_cost_ms(other) + gain_ms < own_ms)
    };
    stays.then(|| Placement::stay_on(home.worker()))
}

/// Places a turn.
///
/// # Errors
/// If no worker fits. The error says what the workers offer instead.
pub fn place(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, NoWorker> {
    let stays = match stay(request, view, now) {
        Stay::Must(worker) => return Ok(Placement::stay_on(worker)),
        // Without a prompt the costs of a move are unknown, so the session stays.
        Stay::May(home) if request.prompt.is_none() => {
            return Ok(Placement::stay_on(home.worker()));
        }
        Stay::May(home) => Some(home),
        Stay::No => None,
    };
    let candidates = candidates::find_candidates(request, view, now)?;
    let mut compared = Compared::default();
    for &stats in &candidates.workers {
        let worker = stats.worker();
        // An agent runs a session's turns on the rank that has it, whichever rank the router sends
        // them to.
        let other_rank = |home: WorkerRef| home.agent == worker.agent && home != worker;
        if stays.is_some_and(|home| other_rank(home.worker())) {
            continue;
        }
        let rank = || rendezvous(request.digest, view, worker);
        if let Some(figures) =
            cost::compute_up_to(request, view, stats, compared.cost_ms_max(), now)
        {
            compared.insert(figures, rank);
        }
    }
    let Some(best) = compared.best() else {
        // A draining or unhealthy agent that has the session refuses the turn with its own reason.
        let answers = |worker| {
            let state = view.state(worker, now);
            !matches!(state, WorkerState::Lost | WorkerState::Disaggregated)
        };
        return match sticky(request) {
            Some(Sticky { worker, .. }) if answers(worker) => Ok(Placement::stay_on(worker)),
            _ => Err(NoWorker::Unusable),
        };
    };
    let mut cost_there = |stats: WorkerStats<'_>| {
        compared.cost_on(stats.worker(), || cost::compute(request, view, stats, now))
    };
    let (worker, reason) = match stays {
        // The session's worker may be stale: it takes no new sessions, but its cost is compared.
        Some(home) => {
            let gain = Duration::from_millis(cost_there(home).saturating_sub(best.cost_ms));
            match gain > gain_min(request, view, now) {
                true => (best.worker, Reason::Moved),
                false => (home.worker(), Reason::Sticky),
            }
        }
        None if request.sticky.is_some() => (best.worker, Reason::Rebound),
        None => {
            let preferred = request.prefer.filter(|(worker, reason)| {
                let slack_ms =
                    if *reason == Reason::Parent { PARENT_SLACK_MS } else { CACHE_KEY_SLACK_MS };
                let stats = candidates.workers.iter().find(|stats| stats.worker() == *worker);
                stats.is_some_and(|stats| {
                    cost_there(*stats) <= best.cost_ms.saturating_add(slack_ms)
                })
            });
            preferred.unwrap_or((best.worker, candidates.reason(request)))
        }
    };
    let uncached_tokens = cost::uncached_tokens(request, worker);
    Ok(Placement { worker, reason, uncached_tokens, figures: compared.figures })
}

fn sticky(request: &PlacementRequest<'_>) -> Option<Sticky> {
    request.sticky.filter(|sticky| request.exclude != Some(sticky.worker))
}

fn stay<'a>(request: &PlacementRequest<'_>, view: &'a Snapshot, now: Instant) -> Stay<'a> {
    let Some(Sticky { worker, fixed, .. }) = sticky(request) else { return Stay::No };
    let is_reconnecting = view.agent(worker).lost_for(now).is_some_and(|time| time < RECONNECT_MAX);
    if is_reconnecting {
        return Stay::Must(worker);
    }
    let Some(home) = view.worker_table().get(worker) else { return Stay::No };
    match home.state(now, view.report_age_max()) {
        WorkerState::Lost | WorkerState::Disaggregated => Stay::No,
        _ if fixed => Stay::Must(worker),
        WorkerState::Fresh | WorkerState::Stale => Stay::May(home),
        WorkerState::Unhealthy | WorkerState::Draining => Stay::No,
    }
}

/// Returns the least gain for which the session moves.
fn gain_min(request: &PlacementRequest<'_>, view: &Snapshot, now: Instant) -> Duration {
    let is_recent = |at: Instant| now.saturating_duration_since(at) < MOVED_RECENTLY;
    let again = request.sticky.and_then(|sticky| sticky.moved_at).is_some_and(is_recent);
    view.rebind_gain_min() * if again { 2 } else { 1 }
}

/// Returns the worker's rank for a digest; the highest wins. All routers agree on it, and a worker
/// that is added or removed moves only its own share of the sessions.
fn rendezvous(digest: Digest, view: &Snapshot, worker: WorkerRef) -> u64 {
    let seed = digest.0.rotate_left(32) ^ u64::from(worker.dp_rank);
    xxh3_64_with_seed(view.agent(worker).name().as_bytes(), seed)
}

/// The best workers compared so far, best first, at most [`FIGURES_MAX`].
#[derive(Debug, Default)]
struct Compared {
    figures: Vec<Figures>,
    /// The sort key of each entry of `figures`.
    order: Vec<(u64, u32, Reverse<u64>)>,
}

impl Compared {
    fn insert(&mut self, figures: Figures, rank: impl Fn() -> u64) {
        let full = self.order.len() == FIGURES_MAX;
        if full && self.order.last().is_some_and(|last| figures.cost_ms > last.0) {
            return;
        }
        let key = (figures.cost_ms, figures.sessions, Reverse(rank()));
        let at = self.order.partition_point(|one| *one <= key);
        if full {
            if at == FIGURES_MAX {
                return;
            }
            self.order.pop();
            self.figures.pop();
        }
        self.order.insert(at, key);
        self.figures.insert(at, figures);
    }

    /// Returns the cost above which a worker is not kept.
    fn cost_ms_max(&self) -> u64 {
        let last = self.order.last().filter(|_| self.order.len() == FIGURES_MAX);
        last.map_or(u64::MAX, |last| last.0)
    }

    fn best(&self) -> Option<Figures> {
        self.figures.first().copied()
    }

    /// Returns the cost on one worker. Adds its figures to those shown if they are missing.
    fn cost_on(&mut self, worker: WorkerRef, figures: impl FnOnce() -> Figures) -> u64 {
        if let Some(one) = self.figures.iter().find(|one| one.worker == worker) {
            return one.cost_ms;
        }
        let figures = figures();
        self.figures.push(figures);
        figures.cost_ms
    }
}
