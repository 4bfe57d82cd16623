//! The interface of placement policies, and the list of the compared policies and bounds.
//!
//! All policies except `berth` are implemented again from published descriptions. All get the same
//! facts at the same times.

mod affinity;
mod berth;
mod hash;
mod plain;
mod published;

use std::time::Duration;

use clap::ValueEnum as _;

use super::{
    engine::{Moves, PREFILL_TOKENS_PER_S},
    fleet::{Fleet, TurnToPlace},
    options::Mode,
};

/// Decides which worker runs a turn.
pub trait Policy {
    /// Returns a worker that accepts the turn.
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice;

    /// Handles an event; the default ignores it.
    fn observe(&mut self, _event: &PolicyEvent<'_>, _fleet: &Fleet) {}
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyChoice {
    /// The worker that runs the turn.
    pub worker: usize,
    /// The worker that the session leaves; if closes free KV, that worker frees the session's.
    pub left_worker: Option<usize>,
    /// Whether the policy looked at the prompt; only then may a long prompt be staged.
    pub examined_prompt: bool,
}

impl From<usize> for PolicyChoice {
    fn from(worker: usize) -> Self {
        Self { worker, left_worker: None, examined_prompt: true }
    }
}

/// An event that a policy can observe.
#[derive(Debug)]
pub enum PolicyEvent<'a> {
    /// A turn was sent to the worker that the policy chose.
    Sent {
        /// The turn.
        request: &'a TurnToPlace<'a>,
        /// The worker.
        worker: usize,
        /// The worker that the session leaves.
        left_worker: Option<usize>,
        /// The time.
        now: Duration,
    },
    /// The turn's answer started.
    Began {
        /// The turn.
        turn: usize,
        /// The turn's session.
        session: usize,
        /// The worker.
        worker: usize,
        /// The time.
        now: Duration,
    },
    /// The turn ended.
    Ended {
        /// The turn.
        turn: usize,
        /// The turn's session.
        session: usize,
        /// The worker.
        worker: usize,
        /// The time.
        now: Duration,
    },
    /// A session was closed.
    Closed {
        /// The session.
        session: usize,
        /// The time.
        now: Duration,
    },
    /// A worker's blocks changed.
    Blocks {
        /// The worker.
        worker: usize,
        /// The changes.
        moves: &'a Moves,
    },
    /// A worker's figures changed.
    Load {
        /// The worker.
        worker: usize,
        /// The time.
        now: Duration,
    },
    /// A worker's condition changed; a worker that was down returns empty.
    Condition {
        /// The worker.
        worker: usize,
        /// The time.
        now: Duration,
    },
}

/// The policies and bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// Berth's policy.
    Berth,
    /// Berth's policy for clients that name no session: conversations are known by their prompts.
    BerthUnnamed,
    /// Berth's policy over engines that never evict: a bound.
    Ideal,
    /// Berth's placement without staged prefill, so short prompts wait for long ones.
    BerthWhole,
    /// Berth's policy, informed of every session's end, also if no client closes the session. Shows
    /// the value of this knowledge: dead KV still stays until it is evicted.
    Told,
    /// Least predicted time to first token, over engines that share one pool of all their tokens: a
    /// bound on the KV that a placement over separate pools finds.
    Pooled,
    /// `Pooled`, with a pool that evicts what is needed last.
    PooledClairvoyant,
    /// The workers in turn.
    RoundRobin,
    /// The worker with the fewest outstanding turns.
    LeastLoaded,
    /// The worker with the least predicted time to first token.
    LeastTtft,
    /// The session's position on a hash ring.
    ConsistentHash,
    /// SGLang's rule: the longest match unless loads differ much.
    CacheAware,
    /// Dynamo's published cost.
    Dynamo,
    /// The session's first worker, chosen as the least loaded.
    Sticky,
    /// The session's last worker, unless another worker's predicted time to first token is half a
    /// second better.
    StickyTtft,
}

impl PolicyKind {
    /// The entries that are no policies but comparisons: a part of Berth, Berth with more
    /// knowledge, and one pool for all engines. Their results don't prove that no policy could do
    /// better.
    pub const BOUNDS: [Self; 4] =
        [Self::BerthWhole, Self::Told, Self::Pooled, Self::PooledClairvoyant];

    /// Returns the name in tables, which is the name in JSON.
    #[must_use]
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("no kind is hidden");
        value.get_name().replace('-', "_")
    }

    /// Whether agents stage the prefill of long prompts: with Berth, and with the bounds that it is
    /// compared to.
    #[must_use]
    pub fn has_staged_prefill(self) -> bool {
        matches!(
            self,
            Self::Berth
                | Self::BerthUnnamed
                | Self::Ideal
                | Self::Told
                | Self::Pooled
                | Self::PooledClairvoyant
        )
    }

    /// Creates a policy of this kind; `seed` determines its random choices.
    #[must_use]
    pub fn build(self, seed: u64, mode: Mode, fleet: &Fleet) -> Box<dyn Policy> {
        let workers = fleet.workers.len();
        match self {
            Self::Berth | Self::Ideal | Self::BerthWhole | Self::Told => {
                Box::new(berth::Berth::new(mode, fleet, true))
            }
            Self::BerthUnnamed => Box::new(berth::Berth::new(mode, fleet, false)),
            Self::RoundRobin => Box::new(plain::RoundRobin::default()),
            Self::LeastLoaded => Box::new(plain::LeastLoaded::new(seed)),
            Self::LeastTtft | Self::Pooled | Self::PooledClairvoyant => Box::new(plain::LeastTtft),
            Self::ConsistentHash => Box::new(hash::Ring::new(workers)),
            Self::CacheAware => Box::new(published::CacheAware::new(workers)),
            Self::Dynamo => Box::new(published::Dynamo::new(seed, workers)),
            Self::Sticky => Box::new(affinity::Sticky::new(seed)),
            Self::StickyTtft => Box::new(affinity::StickyTtft),
        }
    }
}

/// The milliseconds that each active block adds once the pool is nearly full: a rough estimate of
/// the wait for room.
const FULL_MS_EACH: f64 = 5.0;
/// The share of active blocks from which on the pool is nearly full.
const FULL_RATIO: f64 = 0.9;

/// Returns the predicted time to first token in milliseconds: earlier prompts, this prompt, and the
/// wait for room.
#[expect(clippy::cast_precision_loss, reason = "tokens and blocks are far below 2^52")]
fn ttft_ms(worker: usize, request: &TurnToPlace<'_>, fleet: &Fleet) -> f64 {
    let facts = &fleet.workers[worker];
    let tokens = fleet.tokens_before(worker, request) + fleet.uncached_tokens(worker, request);
    let active = facts.active_blocks as f64 + request.chain.len() as f64;
    let over = active - FULL_RATIO * facts.pool_blocks as f64;
    tokens as f64 * 1e3 / PREFILL_TOKENS_PER_S as f64 + FULL_MS_EACH * over.max(0.0)
}

/// Returns the worker with the least figure; the first of equals.
fn least(fleet: &Fleet, figure: impl Fn(usize) -> f64) -> usize {
    let usable = fleet.usable();
    let best = usable.into_iter().min_by(|&a, &b| figure(a).total_cmp(&figure(b)));
    best.expect("a run keeps at least one worker")
}
