//! Chooses the worker for a turn. Pure.
//!
//! The same request and snapshot give the same worker in every process. `candidates` finds the
//! workers that can take the turn, `cost` computes the turn's cost on each, and this module
//! chooses:
//!
//! - A session stays on the worker that has its KV, unless a move gains enough time.
//! - A new session goes to the worker with the least cost. Of equal workers, the one with fewer
//!   sessions wins, then the one that a hash of session and worker prefers.
//! - A turn without a session goes there too, but of workers with about the same cost the one with
//!   the most room gets it. Its conversation then stays as a session does.

mod candidates;
mod compared;
mod cost;
pub(crate) mod pair;
pub(crate) mod recent;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

pub use contract::api::Figures;
use contract::{
    id::Digest,
    load::{EngineRole, Retention, WantedWeights},
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::compared::Compared;
pub use self::{
    candidates::NoWorker,
    pair::{PairUse, PrefillPlacement, Unpaired},
};
use crate::{
    fleet::{
        conversations::Conversations,
        snapshot::Snapshot,
        worker::{WorkerRef, WorkerState},
        worker_table::WorkerStats,
    },
    residency::PromptOverlap,
};

/// The most extra cost at which a child session still goes to its parent's worker. Only after
/// the first child has run there does the prefix that children share lower the cost.
pub const PARENT_SLACK_MS: u64 = 250;
/// The most extra cost at which a turn still goes to the worker of its cache key. Less than
/// [`PARENT_SLACK_MS`], because a cache key is only a client's guess about shared prefixes.
pub const CACHE_KEY_SLACK_MS: u64 = 150;
/// Time after a move in which a session needs twice the gain to move again. Its own turn may have
/// caused the load that it moved away from, so it could bounce between two workers.
const MOVED_RECENTLY_MAX: Duration = Duration::from_secs(60);
/// For a turn whose prompt is unknown. Coding agents add 4,000 tokens per turn on average.
pub const TURN_TOKENS_ASSUMED: u64 = 4_000;
/// Longest idle time after which a session's turn may be placed without its prompt. Later, some of
/// its KV may have been evicted, so a move to a worker with more room may cost nothing. Four in
/// five turns come sooner.
const IDLE_WITHOUT_PROMPT_MAX: Duration = Duration::from_secs(60);
/// Time for which the loss of an agent's control stream is ignored. The router usually connects
/// again by then, and turns still work. If the worker is really gone, the turn fails to connect and
/// is placed elsewhere.
const RECONNECT_TIME_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    Sticky,
    LeastCost,
    /// The worker costs least by its load alone, because the prompt is unknown.
    LeastLoaded,
    /// The session could have stayed on its worker, but the turn is faster here by the required
    /// gain.
    Moved,
    /// The session was on another worker and can't stay there.
    Rebound,
    OnlyWorker,
    /// All load reports are too old. The worker costs least by its last one.
    StaleView,
    Parent,
    /// Earlier turns with the same cache key went to this worker.
    CacheKey,
    /// The turn continues a response that is stored on this worker.
    Response,
    /// Another router has placed the session on this worker.
    Claimed,
}

impl Reason {
    /// In headers and metrics.
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
            Self::Response => "response",
            Self::Claimed => "claimed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sticky {
    pub worker: WorkerRef,
    /// The session must stay, whatever the load: its KV can't be rebuilt elsewhere, or this
    /// worker's agent lets its turns run one at a time.
    pub fixed: bool,
    /// Now if a turn runs. `None` if unknown, or if the worker doesn't report its blocks: then the
    /// router has to read each prompt, to remember which blocks it has sent there.
    pub last_turn_ended: Option<Instant>,
    pub moved_at: Option<Instant>,
    pub reported_tokens: u64,
    /// The part of `reported_tokens` that is pinned, and so in none of the reported blocks.
    pub private_tokens: u64,
    /// Roughly what this turn adds to the previous one's. `None` if unknown, or if this turn is
    /// shorter: then its history is a different one.
    pub new_tokens: Option<u64>,
}

impl Sticky {
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

#[derive(Debug, Clone, Copy)]
pub struct PlacementRequest<'a> {
    /// Of the session, or of a turn without one. It chooses among workers of equal cost.
    pub digest: Digest,
    /// Whether more turns are expected that begin with this turn's prompt and answer.
    pub expects_more_turns: bool,
    pub sticky: Option<Sticky>,
    /// The conversations of turns without a session; `None` for a turn that has one.
    pub conversations: Option<&'a Conversations>,
    /// Chosen if it costs more than the best worker by at most [`PARENT_SLACK_MS`] or
    /// [`CACHE_KEY_SLACK_MS`].
    pub prefer: Option<(WorkerRef, Reason)>,
    /// `None` if its blocks, or where they are, are unknown; then the load alone decides.
    pub prompt: Option<PromptOverlap<'a>>,
    pub retention: Option<Retention>,
    pub model: Option<&'a str>,
    pub weights: Option<&'a WantedWeights>,
    /// A worker that has just refused this turn.
    pub exclude: Option<WorkerRef>,
    pub pairs: PairUse,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Of a pair, the decode worker.
    pub worker: WorkerRef,
    pub reason: Reason,
    pub uncached_tokens: Option<u64>,
    /// The workers that cost least, in order of cost. The session's own worker and the preferred
    /// worker follow, if they are not among them. Empty if nothing was compared.
    pub figures: Vec<(WorkerRef, Figures)>,
    /// `None` if `worker` runs the whole turn.
    pub prefill: Option<PrefillPlacement>,
}

impl Placement {
    fn stay_on(worker: WorkerRef) -> Self {
        Self::without_comparison(worker, Reason::Sticky)
    }

    pub(crate) fn without_comparison(worker: WorkerRef, reason: Reason) -> Self {
        Self { worker, reason, uncached_tokens: None, figures: vec![], prefill: None }
    }

    /// `None` if the workers were not compared by the prompt, or if a pair runs the turn.
    #[must_use]
    pub fn ttft_expected(&self) -> Option<Duration> {
        let (_, figures) = self.figures.iter().find(|(worker, _)| *worker == self.worker)?;
        let prefill_ms = figures.prefill_ms.filter(|_| self.prefill.is_none())?;
        let prompt_ms = prefill_ms.max(figures.load_ms.unwrap_or(0));
        Some(Duration::from_millis(figures.wait_ms + prompt_ms))
    }

    /// Counts as load of the worker until its answer begins.
    #[must_use]
    pub fn tokens_expected(&self) -> u64 {
        self.uncached_tokens.unwrap_or(TURN_TOKENS_ASSUMED)
    }
}

enum Stay<'a> {
    Must(WorkerRef),
    May(WorkerStats<'a>),
    No,
}

/// Saves tokenizing the prompt where the turn stays on its session's worker whatever the prompt is:
/// because it must, or because the last turn ended recently and no other worker would be faster by
/// the required gain even with the whole prompt resident. `None` if [`place`] has to decide with
/// the prompt. It also has to if the prompt may need staged prefill.
#[must_use]
pub fn place_without_prompt(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Option<Placement> {
    // Not in a pair, whose prefill worker is chosen by the prompt.
    let session_worker = match decide_stay(request, view, now, EngineRole::Aggregated) {
        Stay::Must(worker) => return Some(Placement::stay_on(worker)),
        Stay::May(session_worker) => session_worker,
        Stay::No => return None,
    };
    let required_gain_ms = required_gain(request, view, now).as_millis();
    let queue_cost_ms = |stats| u128::from(cost::queue_cost_ms(request, view, stats, now));
    let is_recent = |at: Instant| now.saturating_duration_since(at) < IDLE_WITHOUT_PROMPT_MAX;
    let Sticky { last_turn_ended, new_tokens, .. } = sticky(request)?;
    let is_long = |stage_tokens| new_tokens.is_none_or(|tokens| tokens > stage_tokens);
    if !last_turn_ended.is_some_and(is_recent) || session_worker.stage_tokens().is_some_and(is_long)
    {
        return None;
    }
    let session_worker_ms = queue_cost_ms(session_worker);
    let stays = session_worker_ms <= required_gain_ms || {
        let role = EngineRole::Aggregated;
        let others = candidates::find_candidates(request, view, now, role).ok()?.workers;
        !others.into_iter().any(|other| queue_cost_ms(other) + required_gain_ms < session_worker_ms)
    };
    stays.then(|| Placement::stay_on(session_worker.worker()))
}

pub fn place(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, NoWorker> {
    if view.has_pairs() {
        return pair::place(request, view, now);
    }
    place_in_role(request, view, now, EngineRole::Aggregated, |_| Some(0))
}

/// `partner_cost_ms` returns what the worker's partner adds to the cost, or `None` if the worker
/// needs a partner and has none.
fn place_in_role(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
    role: EngineRole,
    partner_cost_ms: impl Fn(WorkerStats<'_>) -> Option<u64>,
) -> Result<Placement, NoWorker> {
    let session_worker = match decide_stay(request, view, now, role) {
        Stay::Must(worker) => return Ok(Placement::stay_on(worker)),
        Stay::May(session_worker) if partner_cost_ms(session_worker).is_none() => None,
        // Without a prompt the costs of a move are unknown, so the session stays.
        Stay::May(session_worker) if request.prompt.is_none() => {
            return Ok(Placement::stay_on(session_worker.worker()));
        }
        Stay::May(session_worker) => Some(session_worker),
        Stay::No => None,
    };
    let mut candidates = candidates::find_candidates(request, view, now, role)?;
    candidates.workers.retain(|stats| partner_cost_ms(*stats).is_some());
    let partner_ms = |stats: WorkerStats<'_>| partner_cost_ms(stats).unwrap_or(0);
    let mut compared = Compared::default();
    for &stats in &candidates.workers {
        let worker = stats.worker();
        // Leave out the other ranks of the session's agent. The agent runs a turn on the rank that
        // has its session, whichever rank the router chooses.
        let is_other_rank = |rank: WorkerRef| rank.agent == worker.agent && rank != worker;
        let is_session = request.conversations.is_none();
        if is_session && session_worker.is_some_and(|stats| is_other_rank(stats.worker())) {
            continue;
        }
        let tie_break = || rendezvous_hash(request.digest, view, worker);
        if let Some(figures) =
            cost::compute_up_to(request, view, stats, compared.cost_ms_max(), now)
        {
            compared.insert(worker, plus(figures, partner_ms(stats)), tie_break);
        }
    }
    let Some((best, Figures { cost_ms: best_ms, .. })) = compared.best() else {
        return place_on_unusable(request, view, now, role);
    };
    let compute =
        |stats: WorkerStats<'_>| plus(cost::compute(request, view, stats, now), partner_ms(stats));
    let (worker, reason) = match session_worker {
        // Even a stale one, which is no candidate for others.
        Some(session_worker) => {
            let stay = compared.figures_of(session_worker.worker(), || compute(session_worker));
            let gain = Duration::from_millis(stay.cost_ms.saturating_sub(best_ms));
            match gain > required_gain(request, view, now) {
                true => (best, Reason::Moved),
                false => (session_worker.worker(), Reason::Sticky),
            }
        }
        None if request.sticky.is_some() => (compared.choose(request, view, now), Reason::Rebound),
        None => {
            let preferred = request.prefer.filter(|(worker, reason)| {
                let stats = candidates.workers.iter().find(|stats| stats.worker() == *worker);
                let figures = stats.map(|stats| compared.figures_of(*worker, || compute(*stats)));
                let limit_ms = best_ms.saturating_add(preference_slack_ms(*reason));
                figures.is_some_and(|figures| figures.cost_ms <= limit_ms)
            });
            let reason = candidates.reason(request);
            preferred.unwrap_or_else(|| (compared.choose(request, view, now), reason))
        }
    };
    let parts =
        view.worker_table().get(worker).and_then(|stats| cost::prompt_parts(request, stats));
    let uncached_tokens = parts.map(|parts| parts.uncached_tokens);
    let figures = compared.into_figures();
    Ok(Placement { worker, reason, uncached_tokens, figures, prefill: None })
}

fn plus(figures: Figures, partner_ms: u64) -> Figures {
    Figures { cost_ms: figures.cost_ms.saturating_add(partner_ms), ..figures }
}

fn preference_slack_ms(reason: Reason) -> u64 {
    if reason == Reason::Parent { PARENT_SLACK_MS } else { CACHE_KEY_SLACK_MS }
}

/// A draining or unhealthy agent gets the turns of its sessions all the same, and refuses them with
/// the true reason.
fn place_on_unusable(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
    role: EngineRole,
) -> Result<Placement, NoWorker> {
    let can_answer = |worker| {
        let state = view.state(worker, now);
        view.agent(worker).role() == role
            && !matches!(state, WorkerState::Lost | WorkerState::Disaggregated)
    };
    match sticky(request) {
        Some(Sticky { worker, .. }) if can_answer(worker) => Ok(Placement::stay_on(worker)),
        _ => Err(NoWorker::Unusable),
    }
}

/// `None` also if the worker has just refused the turn.
fn sticky(request: &PlacementRequest<'_>) -> Option<Sticky> {
    request.sticky.filter(|sticky| request.exclude != Some(sticky.worker))
}

fn decide_stay<'a>(
    request: &PlacementRequest<'_>,
    view: &'a Snapshot,
    now: Instant,
    role: EngineRole,
) -> Stay<'a> {
    let Some(Sticky { worker, fixed, .. }) = sticky(request) else { return Stay::No };
    if view.agent(worker).role() != role {
        return Stay::No;
    }
    let is_reconnecting =
        view.agent(worker).lost_for(now).is_some_and(|time| time < RECONNECT_TIME_MAX);
    if is_reconnecting {
        return Stay::Must(worker);
    }
    if !candidates::has_wanted_weights(request, view, worker) {
        return Stay::No;
    }
    let Some(stats) = view.worker_table().get(worker) else { return Stay::No };
    match stats.state(now, view.report_age_max()) {
        WorkerState::Lost | WorkerState::Disaggregated => Stay::No,
        _ if fixed => Stay::Must(worker),
        _ if !candidates::serves_model(view.required_model(request.model), view, stats) => Stay::No,
        // A session waits on an engine that its operator holds back.
        WorkerState::Fresh | WorkerState::Stale | WorkerState::Held => Stay::May(stats),
        WorkerState::Unhealthy | WorkerState::Draining => Stay::No,
    }
}

fn required_gain(request: &PlacementRequest<'_>, view: &Snapshot, now: Instant) -> Duration {
    let is_recent = |at: Instant| now.saturating_duration_since(at) < MOVED_RECENTLY_MAX;
    let has_just_moved = request.sticky.and_then(|sticky| sticky.moved_at).is_some_and(is_recent);
    view.rebind_gain_min() * if has_just_moved { 2 } else { 1 }
}

/// The worker with the highest value wins. All routers get the same values. A worker that is added
/// or removed changes the choice only for its own share of the digests.
fn rendezvous_hash(digest: Digest, view: &Snapshot, worker: WorkerRef) -> u64 {
    let seed = digest.0.rotate_left(32) ^ u64::from(worker.dp_rank);
    xxh3_64_with_seed(view.agent(worker).name().as_bytes(), seed)
}
