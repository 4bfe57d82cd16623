//! Where a turn goes. Pure: one snapshot in, a worker with its reason and the figures compared out;
//! the same inputs give the same worker in every process.
//!
//! `fit` says which workers could take the turn, `cost` what it costs on each, in milliseconds;
//! here is the choice. A session stays where it is unless another worker is better by a gain that
//! pays for the move. Among equals the one with fewer sessions takes a newcomer, then a hash of
//! both decides.

mod cost;
mod fit;
#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    time::{Duration, Instant},
};

use proto::{id::Digest, load::Retention};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub use self::{cost::Figures, fit::NoWorker};
use crate::{
    overlap::Overlap,
    view::{ClusterView, WorkerRef, WorkerState, roster::Seen},
};

/// A parent's worker is kept for its children while it costs at most this much more than the best:
/// what siblings share shows in the overlap only when the first of them has run.
pub const PARENT_SLACK_MS: u64 = 250;
/// As for a parent, but the key is a client's guess about its own prefixes.
pub const CACHE_KEY_SLACK_MS: u64 = 150;
/// A session that has just moved needs twice the gain to move again: what drove it away may have
/// been its own turn, and two workers must not play ball with it.
const MOVED_LATELY: Duration = Duration::from_secs(60);
/// Workers shown of those compared, but for the session's own and the preferred one: who looks at a
/// placement wants to know by what it was better, not a fleet of a thousand.
const FIGURES_MAX: usize = 8;
/// New tokens of a turn whose prompt was not looked at: agents add 4,000 a turn in the mean.
pub const TURN_TOKENS_ASSUMED: u64 = 4_000;
/// A session that was idle for longer is compared with its prompt: some of its KV may be gone, and
/// then it costs nothing to go where there is more room. Four in five turns come sooner.
const IDLE_SETTLED_MAX: Duration = Duration::from_secs(60);
/// A control stream that ends is dialled again within this time, while turns go on as before. A
/// worker that is really gone refuses the turn, which then goes elsewhere.
const BLINK_MAX: Duration = Duration::from_secs(1);

/// Why a worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The session is there.
    Sticky,
    /// It costs least, the prompt's resident blocks counted.
    LeastCost,
    /// It costs least by its load; what is resident of the prompt is unknown.
    LeastLoaded,
    /// The session could have stayed, but here it costs less by more than a move is worth.
    Moved,
    /// The session was elsewhere and can't stay there.
    Rebound,
    /// There is no other.
    OnlyWorker,
    /// No worker was heard of late; it costs least by what was last known.
    StaleView,
    /// The parent session is there.
    Parent,
    /// Earlier turns with this cache key went there.
    CacheKey,
}

impl Reason {
    /// The name used in headers and metrics.
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

/// Where the session is already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sticky {
    /// The worker.
    pub worker: WorkerRef,
    /// Its KV can't be made again elsewhere, or its gate is there: it stays whatever the load.
    pub fixed: bool,
    /// When its last turn ended, or now while one runs. None where nobody knows, or where what is
    /// resident isn't told block by block: there each prompt has to be looked at, to be remembered.
    pub ended: Option<Instant>,
    /// When it came there from another one.
    pub moved: Option<Instant>,
    /// Its KV there as its agent tells it, tokens.
    pub told_tokens: u64,
    /// Of it, what it holds for itself alone, tokens: pinned, and in no block that anyone tells.
    pub held_tokens: u64,
    /// What this turn adds to the one before, tokens, roughly. None: it isn't known, or this one is
    /// shorter, so that it is another history.
    pub new_tokens: Option<u64>,
}

impl Sticky {
    /// There, and nothing else is known.
    #[must_use]
    pub fn at(worker: WorkerRef) -> Self {
        Self {
            worker,
            fixed: false,
            ended: None,
            moved: None,
            told_tokens: 0,
            held_tokens: 0,
            new_tokens: None,
        }
    }
}

/// A prompt whose tokens are known, with what of it is resident where.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// All of it.
    pub tokens: u64,
    /// Tokens of a block of `overlap`.
    pub block_tokens: u64,
    /// Leading blocks by worker.
    pub overlap: &'a Overlap,
}

/// What is to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Chooses among equals: the session's digest, or the turn's.
    pub digest: Digest,
    /// More turns will follow that begin with what this one leaves.
    pub returns: bool,
    /// Where the session is.
    pub sticky: Option<Sticky>,
    /// A worker to prefer within the reason's slack.
    pub prefer: Option<(WorkerRef, Reason)>,
    /// What it sends; None where its tokens are unknown: then load alone decides.
    pub prompt: Option<Prompt<'a>>,
    /// The retention a new session asks for.
    pub retention: Option<Retention>,
    /// The model the body names.
    pub model: Option<&'a str>,
    /// A worker that has just refused this turn.
    pub exclude: Option<WorkerRef>,
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Where the turn goes.
    pub worker: WorkerRef,
    /// Why.
    pub reason: Reason,
    /// Prompt tokens that the worker has to compute, where they are known.
    pub uncached_tokens: Option<u64>,
    /// Of the workers compared, those that cost least, the best first, then the session's own and
    /// the preferred one; empty where nothing had to be compared.
    pub figures: Vec<Figures>,
}

impl Placement {
    fn unmoved(worker: WorkerRef) -> Self {
        Self { worker, reason: Reason::Sticky, uncached_tokens: None, figures: vec![] }
    }

    /// Prompt tokens to count on the worker until its answer begins.
    #[must_use]
    pub fn tokens_expected(&self) -> u64 {
        self.uncached_tokens.unwrap_or(TURN_TOKENS_ASSUMED)
    }
}

/// What a session's worker may do with its turn.
enum Stay<'a> {
    /// Take it, whatever it costs.
    Must(WorkerRef),
    /// Take it, if no other is better.
    May(Seen<'a>),
    /// Nothing, or there is none.
    No,
}

/// Decides without the prompt, where it would hardly change it: the session has to stay, or no
/// other worker would answer sooner by the gain even if all of the prompt were resident there too.
/// None where only [`place`] can tell, or where the prompt is needed because it may be for the slow
/// lane; nobody need tokenise a prompt before that.
#[must_use]
pub fn settled(question: &Question<'_>, view: &ClusterView, now: Instant) -> Option<Placement> {
    let home = match stay(question, view, now) {
        Stay::Must(worker) => return Some(Placement::unmoved(worker)),
        Stay::May(home) => home,
        Stay::No => return None,
    };
    let gain_ms = gain_min(question, view, now).as_millis();
    let ahead_ms = |seen| u128::from(cost::ahead_ms(question, view, seen, now));
    let lately = |at: Instant| now.saturating_duration_since(at) < IDLE_SETTLED_MAX;
    let Sticky { ended, new_tokens, .. } = sticky(question)?;
    let is_long = |piece_tokens| new_tokens.is_none_or(|tokens| tokens > piece_tokens);
    if !ended.is_some_and(lately) || home.piece_tokens().is_some_and(is_long) {
        return None;
    }
    let own_ms = ahead_ms(home);
    let stays = own_ms <= gain_ms || {
        let others = fit::candidates(question, view, now).ok()?.workers;
        !others.into_iter().any(|other| ahead_ms(other) + gain_ms < own_ms)
    };
    stays.then(|| Placement::unmoved(home.worker()))
}

/// Decides.
///
/// # Errors
/// When no worker fits; what is offered instead is in the error.
pub fn place(
    question: &Question<'_>,
    view: &ClusterView,
    now: Instant,
) -> Result<Placement, NoWorker> {
    let stays = match stay(question, view, now) {
        Stay::Must(worker) => return Ok(Placement::unmoved(worker)),
        // Whether it should move is a matter of cost, and that is not known.
        Stay::May(home) if question.prompt.is_none() => {
            return Ok(Placement::unmoved(home.worker()));
        }
        Stay::May(home) => Some(home),
        Stay::No => None,
    };
    let candidates = fit::candidates(question, view, now)?;
    let mut compared = Compared::default();
    for &seen in &candidates.workers {
        let worker = seen.worker();
        // An agent runs a session's turns on the rank that has it, wherever they are sent.
        let other_rank = |home: WorkerRef| home.agent == worker.agent && home != worker;
        if stays.is_some_and(|home| other_rank(home.worker())) {
            continue;
        }
        let rank = || rendezvous(question.digest, view, worker);
        if let Some(figures) = cost::within(question, view, seen, compared.cost_ms_max(), now) {
            compared.offer(figures, rank);
        }
    }
    let Some(best) = compared.best() else {
        // A draining or unhealthy worker that has the session answers for itself.
        let answers = |worker| {
            let state = view.state(worker, now);
            !matches!(state, WorkerState::Lost | WorkerState::Disaggregated)
        };
        return match sticky(question) {
            Some(Sticky { worker, .. }) if answers(worker) => Ok(Placement::unmoved(worker)),
            _ => Err(NoWorker::Unusable),
        };
    };
    let mut cost_there =
        |seen: Seen<'_>| compared.of(seen.worker(), || cost::of(question, view, seen, now));
    let (worker, reason) = match stays {
        // A stale one too: no newcomer goes there, but what is there is compared.
        Some(home) => {
            let gain = Duration::from_millis(cost_there(home).saturating_sub(best.cost_ms));
            match gain > gain_min(question, view, now) {
                true => (best.worker, Reason::Moved),
                false => (home.worker(), Reason::Sticky),
            }
        }
        None if question.sticky.is_some() => (best.worker, Reason::Rebound),
        None => {
            let preferred = question.prefer.filter(|(worker, reason)| {
                let slack_ms =
                    if *reason == Reason::Parent { PARENT_SLACK_MS } else { CACHE_KEY_SLACK_MS };
                let seen = candidates.workers.iter().find(|seen| seen.worker() == *worker);
                seen.is_some_and(|seen| cost_there(*seen) <= best.cost_ms.saturating_add(slack_ms))
            });
            preferred.unwrap_or((best.worker, candidates.reason(question)))
        }
    };
    let uncached_tokens = cost::uncached(question, worker);
    Ok(Placement { worker, reason, uncached_tokens, figures: compared.figures })
}

fn sticky(question: &Question<'_>) -> Option<Sticky> {
    question.sticky.filter(|sticky| question.exclude != Some(sticky.worker))
}

fn stay<'a>(question: &Question<'_>, view: &'a ClusterView, now: Instant) -> Stay<'a> {
    let Some(Sticky { worker, fixed, .. }) = sticky(question) else { return Stay::No };
    let blinks = view.agent(worker).lost_for(now).is_some_and(|time| time < BLINK_MAX);
    if blinks {
        return Stay::Must(worker);
    }
    let Some(home) = view.roster().get(worker) else { return Stay::No };
    match home.state(now, view.report_age_max()) {
        WorkerState::Lost | WorkerState::Disaggregated => Stay::No,
        _ if fixed => Stay::Must(worker),
        WorkerState::Fresh | WorkerState::Stale => Stay::May(home),
        WorkerState::Unhealthy | WorkerState::Draining => Stay::No,
    }
}

/// What a move must gain.
fn gain_min(question: &Question<'_>, view: &ClusterView, now: Instant) -> Duration {
    let lately = |at: Instant| now.saturating_duration_since(at) < MOVED_LATELY;
    let again = question.sticky.and_then(|sticky| sticky.moved).is_some_and(lately);
    view.rebind_gain_min() * if again { 2 } else { 1 }
}

/// Highest wins: every router gives a session the same worker among equals, and a worker that
/// comes or goes moves only its own share.
fn rendezvous(digest: Digest, view: &ClusterView, worker: WorkerRef) -> u64 {
    let seed = digest.0.rotate_left(32) ^ u64::from(worker.dp_rank);
    xxh3_64_with_seed(view.agent(worker).name().as_bytes(), seed)
}

/// The best of the workers compared so far, the best first: as many as are worth showing.
#[derive(Debug, Default)]
struct Compared {
    figures: Vec<Figures>,
    /// Of the figures, what they are ordered by.
    order: Vec<(u64, u32, Reverse<u64>)>,
}

impl Compared {
    fn offer(&mut self, figures: Figures, rank: impl Fn() -> u64) {
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

    /// What costs more is not kept.
    fn cost_ms_max(&self) -> u64 {
        let last = self.order.last().filter(|_| self.order.len() == FIGURES_MAX);
        last.map_or(u64::MAX, |last| last.0)
    }

    fn best(&self) -> Option<Figures> {
        self.figures.first().copied()
    }

    /// The cost on one worker, which is shown too.
    fn of(&mut self, worker: WorkerRef, figures: impl FnOnce() -> Figures) -> u64 {
        if let Some(one) = self.figures.iter().find(|one| one.worker == worker) {
            return one.cost_ms;
        }
        let figures = figures();
        self.figures.push(figures);
        figures.cost_ms
    }
}
