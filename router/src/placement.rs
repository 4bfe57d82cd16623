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
    view::{ClusterView, WorkerRef, WorkerState},
};

/// A parent's worker is kept for its children while it costs at most this much more than the best:
/// what siblings share shows in the overlap only when the first of them has run.
pub const PARENT_SLACK_MS: u64 = 250;
/// As for a parent, but the key is a client's guess about its own prefixes.
pub const CACHE_KEY_SLACK_MS: u64 = 150;
/// A session that has just moved needs twice the gain to move again: what drove it away may have
/// been its own turn, and two workers must not play ball with it.
const MOVED_LATELY: Duration = Duration::from_secs(60);
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
    /// When it came there from another one.
    pub moved: Option<Instant>,
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
    /// All workers compared, in order; empty where nothing had to be.
    pub figures: Vec<Figures>,
}

impl Placement {
    fn unmoved(worker: WorkerRef) -> Self {
        Self { worker, reason: Reason::Sticky, uncached_tokens: None, figures: vec![] }
    }
}

/// Whether what is resident of the prompt could change the answer: a session that has to stay, or
/// whose worker was lost a moment ago, stays whatever that is.
#[must_use]
pub fn wants_prompt(question: &Question<'_>, view: &ClusterView, now: Instant) -> bool {
    let sticky = question.sticky.filter(|sticky| question.exclude != Some(sticky.worker));
    !sticky.is_some_and(|sticky| stays(sticky, view, now))
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
    let sticky = question.sticky.filter(|sticky| question.exclude != Some(sticky.worker));
    // It could stay: whether it should is a matter of cost, where that is known.
    let mut at_home = None;
    if let Some(sticky) = sticky {
        let worker = sticky.worker;
        if stays(sticky, view, now) {
            return Ok(Placement::unmoved(worker));
        }
        if matches!(view.state(worker, now), WorkerState::Fresh | WorkerState::Stale) {
            if question.prompt.is_none() {
                return Ok(Placement::unmoved(worker));
            }
            at_home = Some(worker);
        }
    }
    let candidates = fit::candidates(question, view, now)?;
    if candidates.workers.is_empty() {
        // A draining or unhealthy worker that has the session answers for itself.
        return match sticky {
            Some(Sticky { worker, .. }) if view.state(worker, now) != WorkerState::Lost => {
                Ok(Placement::unmoved(worker))
            }
            _ => Err(NoWorker::Unusable),
        };
    }
    let mut figures: Vec<Figures> =
        candidates.workers.iter().map(|&worker| cost::of(question, view, worker, now)).collect();
    let fresh = figures.len();
    if let Some(worker) = at_home.filter(|worker| !candidates.workers.contains(worker)) {
        // Stale: no newcomer goes there, but what is there is compared.
        figures.push(cost::of(question, view, worker, now));
    }
    let best = cheapest(question, view, &figures[..fresh]);
    let (at, reason) = match at_home {
        Some(worker) => {
            let own = position(&figures, worker).expect("it is compared above");
            match gains(question, view, figures[own].cost_ms, figures[best].cost_ms, now) {
                true => (best, Reason::Moved),
                false => (own, Reason::Sticky),
            }
        }
        None => chosen(question, &figures, best, &candidates),
    };
    let worker = figures[at].worker;
    let uncached_tokens = question.prompt.map(|prompt| cost::uncached(&prompt, worker));
    Ok(Placement { worker, reason, uncached_tokens, figures })
}

/// Whether the session's worker keeps it whatever the cost.
fn stays(Sticky { worker, fixed, .. }: Sticky, view: &ClusterView, now: Instant) -> bool {
    let blinks = view.agent(worker).lost_for(now).is_some_and(|time| time < BLINK_MAX);
    blinks || (fixed && view.state(worker, now) != WorkerState::Lost)
}

/// Whether a move is worth it.
fn gains(question: &Question<'_>, view: &ClusterView, own: u64, best: u64, now: Instant) -> bool {
    let lately = |at: Instant| now.saturating_duration_since(at) < MOVED_LATELY;
    let again = question.sticky.and_then(|sticky| sticky.moved).is_some_and(lately);
    let gain_min = view.rebind_gain_min() * if again { 2 } else { 1 };
    Duration::from_millis(own.saturating_sub(best)) > gain_min
}

/// The worker for a turn that is bound to none.
fn chosen(
    question: &Question<'_>,
    figures: &[Figures],
    best: usize,
    candidates: &fit::Candidates,
) -> (usize, Reason) {
    if question.sticky.is_some() {
        return (best, Reason::Rebound);
    }
    let preferred = question.prefer.and_then(|(worker, reason)| {
        let at = position(figures, worker)?;
        let parent = reason == Reason::Parent;
        let slack = if parent { PARENT_SLACK_MS } else { CACHE_KEY_SLACK_MS };
        let most = figures[best].cost_ms.saturating_add(slack);
        (figures[at].cost_ms <= most).then_some((at, reason))
    });
    match preferred {
        Some(preferred) => preferred,
        None if candidates.stale => (best, Reason::StaleView),
        None if candidates.only => (best, Reason::OnlyWorker),
        None if question.prompt.is_some() => (best, Reason::LeastCost),
        None => (best, Reason::LeastLoaded),
    }
}

fn cheapest(question: &Question<'_>, view: &ClusterView, figures: &[Figures]) -> usize {
    let least = figures.iter().map(|one| (one.cost_ms, one.sessions)).min();
    let equals = (0..figures.len()).filter(|&at| {
        let one = &figures[at];
        Some((one.cost_ms, one.sessions)) == least
    });
    let score = |&at: &usize| (Reverse(rendezvous(question.digest, view, &figures[at])), at);
    equals.min_by_key(score).expect("there is a candidate")
}

fn position(figures: &[Figures], worker: WorkerRef) -> Option<usize> {
    figures.iter().position(|one| one.worker == worker)
}

/// Highest wins: every router gives a session the same worker among equals, and a worker that
/// comes or goes moves only its own share.
fn rendezvous(digest: Digest, view: &ClusterView, figures: &Figures) -> u64 {
    xxh3_64_with_seed(view.name(figures.worker).as_bytes(), digest.0)
}
