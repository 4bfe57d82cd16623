//! Who decides: the interface of a placement policy and the list of those compared, with bounds on
//! what any of them can reach.
//!
//! All but `berth` are re-implementations by published descriptions, fed the same facts at the
//! same moments.

mod affinity;
mod berth;
mod hash;
mod plain;
mod published;

use std::time::Duration;

use super::{
    engine::PREFILL_TOKENS_PER_S,
    fleet::{Ask, Fleet},
    options::Mode,
};

/// Decides where turns go.
pub trait Policy {
    /// The worker for a turn; one that takes it.
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet) -> Choice;

    /// Hears what happens; most need not.
    fn hear(&mut self, _what: &Heard<'_>, _fleet: &Fleet) {}
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Where the turn goes.
    pub worker: usize,
    /// A worker that is told that the session has left it: as if it were closed there.
    pub leaves: Option<usize>,
    /// Its prompt was looked at: if it is long, the slow lane can take it.
    pub is_known: bool,
}

impl From<usize> for Choice {
    fn from(worker: usize) -> Self {
        Self { worker, leaves: None, is_known: true }
    }
}

/// What a policy may hear.
#[derive(Debug)]
pub enum Heard<'a> {
    /// A turn was sent where the policy said.
    Sent {
        /// The turn.
        ask: &'a Ask<'a>,
        /// Where.
        worker: usize,
        /// Which worker its session leaves.
        leaves: Option<usize>,
        /// When.
        now: Duration,
    },
    /// Its answer begins.
    Began {
        /// The turn.
        turn: usize,
        /// Of its session.
        session: usize,
        /// Where.
        worker: usize,
        /// When.
        now: Duration,
    },
    /// It has ended.
    Ended {
        /// The turn.
        turn: usize,
        /// Of its session.
        session: usize,
        /// Where.
        worker: usize,
        /// When.
        now: Duration,
    },
    /// A session was closed.
    Closed {
        /// Which.
        session: usize,
        /// When.
        now: Duration,
    },
    /// A worker's blocks changed.
    Blocks {
        /// Whose.
        worker: usize,
        /// Resident now.
        stored: &'a [u32],
        /// Gone.
        removed: &'a [u32],
    },
    /// A worker's figures changed.
    Load {
        /// Whose.
        worker: usize,
        /// When.
        now: Duration,
    },
    /// A worker's condition changed; one that went down is empty when it comes back.
    Condition {
        /// Whose.
        worker: usize,
        /// When.
        now: Duration,
    },
}

/// The policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Berth's own.
    Berth,
    /// The same over engines that never evict: a bound.
    Ideal,
    /// Berth's placement alone: no prompt is computed in pieces, so short ones wait for long ones.
    BerthWhole,
    /// Berth's own, told when a session is over, also where nobody closes it: what knowing it at
    /// once would give. KV that nobody will want stays until it is evicted, as ever.
    Told,
    /// Least predicted time to first token over engines that share one pool of all their tokens:
    /// what no placement over separate pools finds more of.
    Pooled,
    /// The same, and the pool evicts what will be wanted last.
    PooledClairvoyant,
    /// One after the other.
    RoundRobin,
    /// By lot.
    Random,
    /// The less loaded of two drawn by lot.
    PowerOfTwo,
    /// Fewest turns outstanding.
    LeastLoaded,
    /// Least predicted time to first token.
    LeastTtft,
    /// The session's place on a hash ring.
    ConsistentHash,
    /// The same, past workers with more than their share.
    BoundedHash,
    /// SGLang's rule: longest match unless loads differ much.
    CacheAware,
    /// Dynamo's published cost.
    Dynamo,
    /// The session's first worker; that is the least loaded.
    Sticky,
    /// The same by predicted time to first token, left when another is better by half a second.
    StickyTtft,
}

impl Kind {
    /// No policies, but what to hold them against: a part of ours, one that knows more, and one
    /// pool for all engines. What these reach is no proof that no policy could reach more.
    pub const BOUNDS: [Self; 4] =
        [Self::BerthWhole, Self::Told, Self::Pooled, Self::PooledClairvoyant];

    /// The name in tables and JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Berth => "berth",
            Self::Ideal => "ideal",
            Self::BerthWhole => "berth_whole",
            Self::Told => "told",
            Self::Pooled => "pooled",
            Self::PooledClairvoyant => "pooled_clairvoyant",
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::PowerOfTwo => "power_of_two",
            Self::LeastLoaded => "least_loaded",
            Self::LeastTtft => "least_ttft",
            Self::ConsistentHash => "consistent_hash",
            Self::BoundedHash => "bounded_hash",
            Self::CacheAware => "cache_aware",
            Self::Dynamo => "dynamo",
            Self::Sticky => "sticky",
            Self::StickyTtft => "sticky_ttft",
        }
    }

    /// Whether agents compute long prompts in pieces: ours do, and so do those of the bounds on it.
    #[must_use]
    pub fn has_lanes(self) -> bool {
        matches!(
            self,
            Self::Berth | Self::Ideal | Self::Told | Self::Pooled | Self::PooledClairvoyant
        )
    }

    /// A policy of this kind that draws its lots from `seed`.
    #[must_use]
    pub fn build(self, seed: u64, mode: Mode, fleet: &Fleet) -> Box<dyn Policy> {
        let workers = fleet.workers.len();
        match self {
            Self::Berth | Self::Ideal | Self::BerthWhole | Self::Told => {
                Box::new(berth::Berth::new(mode, fleet))
            }
            Self::RoundRobin => Box::new(plain::RoundRobin::default()),
            Self::Random => Box::new(plain::Random::new(seed)),
            Self::PowerOfTwo => Box::new(plain::PowerOfTwo::new(seed)),
            Self::LeastLoaded => Box::new(plain::LeastLoaded::new(seed)),
            Self::LeastTtft | Self::Pooled | Self::PooledClairvoyant => Box::new(plain::LeastTtft),
            Self::ConsistentHash => Box::new(hash::Ring::new(workers, None)),
            Self::BoundedHash => Box::new(hash::Ring::new(workers, Some(hash::SHARE_MAX))),
            Self::CacheAware => Box::new(published::CacheAware::new(workers)),
            Self::Dynamo => Box::new(published::Dynamo::new(seed, workers)),
            Self::Sticky => Box::new(affinity::Sticky::new(seed)),
            Self::StickyTtft => Box::new(affinity::StickyTtft),
        }
    }
}

/// Milliseconds that each active block adds once the pool is nearly full: what a turn waits for
/// room, roughly.
const FULL_MS_EACH: f64 = 5.0;
/// Nearly full.
const FULL_RATIO: f64 = 0.9;

/// Predicted time to first token, milliseconds: prompts before this one, this one, and room.
#[expect(clippy::cast_precision_loss, reason = "tokens and blocks are far below 2^52")]
fn ttft_ms(worker: usize, ask: &Ask<'_>, fleet: &Fleet) -> f64 {
    let facts = &fleet.workers[worker];
    let tokens = fleet.tokens_before(worker, ask) + fleet.uncached_tokens(worker, ask);
    let active = facts.active_blocks as f64 + ask.chain.len() as f64;
    let over = active - FULL_RATIO * facts.pool_blocks as f64;
    tokens as f64 * 1e3 / PREFILL_TOKENS_PER_S as f64 + FULL_MS_EACH * over.max(0.0)
}

/// The worker with the least of a figure; the first of equals.
fn least(fleet: &Fleet, figure: impl Fn(usize) -> f64) -> usize {
    let usable = fleet.usable();
    let best = usable.into_iter().min_by(|&a, &b| figure(a).total_cmp(&figure(b)));
    best.expect("a run keeps at least one worker")
}
