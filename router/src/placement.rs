//! Chooses the worker for a turn. Pure.
//!
//! A turn is one request and its answer. A session is an ordered list of turns that share a growing
//! prefix. A worker is one rank of an engine. A placement takes a turn's request and one snapshot
//! of the fleet. It returns a worker, the reason, and the figures that were compared. The same
//! inputs give the same worker in every process. The folder `turn` calls this module, binds the
//! session to the worker, and sends the turn. The fleet simulator calls this module too.
//!
//! `candidates` finds the workers that can take the turn. `cost` computes the turn's cost on each
//! of them, in milliseconds. This module compares the costs and chooses:
//!
//! - A session stays on the worker that has its KV, unless a move gains enough time.
//! - A new session goes to the worker with the least cost. Of equal workers, the one with fewer
//!   sessions wins, then the one that a hash of session and worker prefers.
//! - So does a turn without a session, but of workers with about the same cost the one with the
//!   most room gets it. Its conversation then stays as a session does.
//!
//! If the fleet has engines that run only a part of each turn, its module `pair` chooses two.
//!
//! Other modules of this folder hold what the choice depends on, and its results: [`affinity`] (the
//! worker to which this router bound each session), [`session_status`] (a session's status, from
//! the agents' session tables and the binding), and `recent` (the last placements, for clients that
//! ask for the reason).

pub mod affinity;
mod candidates;
mod compared;
mod cost;
pub(crate) mod pair;
pub(crate) mod recent;
pub mod session_status;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use proto::{
    id::Digest,
    load::{EngineRole, Retention, WantedWeights},
};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::compared::Compared;
pub use self::{
    candidates::NoWorker,
    cost::Figures,
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

/// The most extra cost, in milliseconds, at which a child session still goes to its parent's
/// worker. Children of one parent share a prefix. It is resident on a worker, and so lowers the
/// cost there, only after one of them has run.
pub const PARENT_SLACK_MS: u64 = 250;
/// The most extra cost, in milliseconds, at which a turn still goes to the worker of its cache key.
/// It is less than [`PARENT_SLACK_MS`], because a cache key is only a client's guess about shared
/// prefixes.
pub const CACHE_KEY_SLACK_MS: u64 = 150;
/// Time after a move in which a session needs twice the gain to move again. The session's own turn
/// may have caused the load that it moved away from. Without this rule, the session could bounce
/// between two workers.
const MOVED_RECENTLY_MAX: Duration = Duration::from_secs(60);
/// Assumed number of new tokens in a turn whose prompt is unknown. Coding agents add 4,000 tokens
/// per turn on average.
pub const TURN_TOKENS_ASSUMED: u64 = 4_000;
/// Longest idle time after which a session's turn may be placed without its prompt. Later, some of
/// the session's KV may have been evicted, so a move to a worker with more room may cost nothing.
/// Four in five turns come sooner.
const IDLE_WITHOUT_PROMPT_MAX: Duration = Duration::from_secs(60);
/// Time for which the loss of an agent's control stream is ignored. The router usually connects
/// again within this time, and turns still work meanwhile. If the worker is really gone, the turn
/// fails to connect and is placed elsewhere.
const RECONNECT_TIME_MAX: Duration = Duration::from_secs(1);

/// Why a worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The session is on this worker.
    Sticky,
    /// The worker costs least. The cost takes into account which part of the prompt is resident.
    LeastCost,
    /// The worker costs least by its load alone, because the prompt is unknown.
    LeastLoaded,
    /// The session could have stayed on its worker, but the turn is faster here by the required
    /// gain.
    Moved,
    /// The session was on another worker and can't stay there.
    Rebound,
    /// The fleet has only this worker.
    OnlyWorker,
    /// All workers' last load reports are too old. This worker costs least by its last report.
    StaleView,
    /// The parent session is on this worker.
    Parent,
    /// Earlier turns with the same cache key went to this worker.
    CacheKey,
    /// The turn continues a response that is stored on this worker.
    Response,
    /// Another router has placed the session on this worker.
    Claimed,
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
            Self::Response => "response",
            Self::Claimed => "claimed",
        }
    }
}

/// The worker that already has the turn's session, and what is known of the session there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sticky {
    /// The worker.
    pub worker: WorkerRef,
    /// Whether the session must stay, whatever the load. Its KV can't be rebuilt elsewhere, or this
    /// worker's agent lets its turns run one at a time.
    pub fixed: bool,
    /// When the session's last turn ended, or now if a turn runs. `None` if that is unknown. Also
    /// `None` if the worker doesn't report its blocks, because the router must then read each
    /// prompt to remember its blocks.
    pub last_turn_ended: Option<Instant>,
    /// When the session moved to this worker from another.
    pub moved_at: Option<Instant>,
    /// Tokens of the session's KV on the worker, as its agent reports it.
    pub reported_tokens: u64,
    /// The part of `reported_tokens` that is pinned. It is private to the session and in no block
    /// that the worker reports.
    pub private_tokens: u64,
    /// Rough number of tokens that this turn adds to the previous turn's. `None` if that is
    /// unknown. Also `None` if this turn is shorter than the previous one: then its history is a
    /// different one.
    pub new_tokens: Option<u64>,
}

impl Sticky {
    /// Creates the value for a worker about which nothing else is known.
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
    /// The digest of the session, or of a turn without a session. It chooses among workers of equal
    /// cost.
    pub digest: Digest,
    /// Whether more turns are expected that begin with this turn's prompt and answer.
    pub expects_more_turns: bool,
    /// The worker that has the session.
    pub sticky: Option<Sticky>,
    /// The conversations without a name. `None` for a turn with a session: its agent reports that.
    pub conversations: Option<&'a Conversations>,
    /// A worker to prefer, and why. It is chosen if it costs more than the best worker by at most
    /// [`PARENT_SLACK_MS`] or [`CACHE_KEY_SLACK_MS`].
    pub prefer: Option<(WorkerRef, Reason)>,
    /// The turn's prompt. `None` if its blocks, or where they are, are unknown; then the load alone
    /// decides.
    pub prompt: Option<PromptOverlap<'a>>,
    /// The retention that a new session asks for.
    pub retention: Option<Retention>,
    /// The model that the request body names.
    pub model: Option<&'a str>,
    /// The weights that the worker's engine must have.
    pub weights: Option<&'a WantedWeights>,
    /// A worker that has just refused this turn.
    pub exclude: Option<WorkerRef>,
    /// Whether a pair of a prefill and a decode worker may run the turn.
    pub pairs: PairUse,
}

/// A placement decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The worker that gets the turn; of a pair, the decode worker.
    pub worker: WorkerRef,
    /// Why the worker was chosen.
    pub reason: Reason,
    /// Prompt tokens that the worker has to compute, if known.
    pub uncached_tokens: Option<u64>,
    /// The compared workers that cost least, in the order of their cost. The session's own worker
    /// and the preferred worker follow, if they are not among them. Empty if nothing was compared.
    pub figures: Vec<Figures>,
    /// The other half of the pair that runs the turn. `None` if the worker runs the whole turn.
    pub prefill: Option<PrefillPlacement>,
}

impl Placement {
    fn stay_on(worker: WorkerRef) -> Self {
        Self::without_comparison(worker, Reason::Sticky)
    }

    /// Returns the placement on a worker that was compared with no other.
    pub(crate) fn without_comparison(worker: WorkerRef, reason: Reason) -> Self {
        Self { worker, reason, uncached_tokens: None, figures: vec![], prefill: None }
    }

    /// Returns the expected time to the first byte of the answer. `None` if the workers were not
    /// compared by the prompt, or if a pair runs the turn.
    #[must_use]
    pub fn ttft_expected(&self) -> Option<Duration> {
        let figures = self.figures.iter().find(|figures| figures.worker == self.worker)?;
        let prefill_ms = figures.prefill_ms.filter(|_| self.prefill.is_none())?;
        Some(Duration::from_millis(figures.wait_ms + prefill_ms))
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
/// That saves tokenizing the prompt. The turn stays on its session's worker if the session must
/// stay there. It also stays if its last turn ended recently and no other worker would be faster by
/// the required gain, even with the whole prompt resident. Returns `None` if [`place`] has to
/// decide with the prompt, or if the prompt may need staged prefill (computing a long prompt in
/// stages before its turn).
#[must_use]
pub fn place_without_prompt(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Option<Placement> {
    // A pair's prefill worker is chosen by the prompt.
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

/// Places a turn.
///
/// # Errors
/// If no worker fits. The error says what the workers offer instead.
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

/// Places a turn on a worker whose engine runs this part of it. `partner_cost_ms` returns what the
/// worker's partner adds to the cost, or `None` if the worker needs a partner and has none.
///
/// # Errors
/// If no worker fits.
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
            compared.insert(figures.plus(partner_ms(stats)), tie_break);
        }
    }
    let Some(&Figures { worker: best, cost_ms: best_ms, .. }) = compared.best() else {
        return place_on_unusable(request, view, now, role);
    };
    let compute =
        |stats: WorkerStats<'_>| cost::compute(request, view, stats, now).plus(partner_ms(stats));
    let (worker, reason) = match session_worker {
        // The session's worker may be stale, and so no candidate. Its cost is compared all the
        // same.
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
    let uncached_tokens = cost::uncached_tokens(request, worker);
    let figures = compared.into_figures();
    Ok(Placement { worker, reason, uncached_tokens, figures, prefill: None })
}

/// Returns how much more than the best worker a preferred one may cost.
fn preference_slack_ms(reason: Reason) -> u64 {
    if reason == Reason::Parent { PARENT_SLACK_MS } else { CACHE_KEY_SLACK_MS }
}

/// Places a turn for which no worker is usable. If an agent is draining or unhealthy, it gets the
/// turns of its sessions all the same, and refuses them with the true reason.
///
/// # Errors
/// If the turn has no session, or its agent can't answer.
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

/// Returns the worker that has the session, unless it has just refused the turn.
fn sticky(request: &PlacementRequest<'_>) -> Option<Sticky> {
    request.sticky.filter(|sticky| request.exclude != Some(sticky.worker))
}

/// Finds out whether a turn stays on its session's worker, whose engine must have this role.
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

/// Returns how much faster a turn must be elsewhere, so that its session moves.
fn required_gain(request: &PlacementRequest<'_>, view: &Snapshot, now: Instant) -> Duration {
    let is_recent = |at: Instant| now.saturating_duration_since(at) < MOVED_RECENTLY_MAX;
    let has_just_moved = request.sticky.and_then(|sticky| sticky.moved_at).is_some_and(is_recent);
    view.rebind_gain_min() * if has_just_moved { 2 } else { 1 }
}

/// Returns how much a digest prefers a worker; the worker with the highest value wins.
///
/// This is rendezvous hashing. All routers get the same values. A worker that is added or removed
/// changes the choice only for its own share of the digests.
fn rendezvous_hash(digest: Digest, view: &Snapshot, worker: WorkerRef) -> u64 {
    let seed = digest.0.rotate_left(32) ^ u64::from(worker.dp_rank);
    xxh3_64_with_seed(view.agent(worker).name().as_bytes(), seed)
}
