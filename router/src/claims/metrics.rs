//! Counts claims, the sessions that began on two workers, and how long claims take.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};
use service::histogram;

/// Where a claim was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreKind {
    Agents,
    Memory,
    #[cfg(feature = "redis")]
    Redis,
    Etcd,
}

impl StoreKind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Memory => "memory",
            #[cfg(feature = "redis")]
            Self::Redis => "redis",
            Self::Etcd => "etcd",
        }
    }
}

/// What asking for a claim gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreResult {
    /// The claim is this router's.
    Granted,
    /// Another router's claim holds.
    Held,
    /// The store or the agent failed or was late, and the next place is asked.
    Failed,
    /// The store was not asked, because it has failed several times.
    Skipped,
}

impl StoreResult {
    fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Held => "held",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    store: &'static str,
    result: &'static str,
}

/// All handles. Clones share the same values.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    claims: Family<ClaimLabels, Counter>,
    seconds: Histogram,
    /// Sessions that were placed without a claim, because nobody gave one.
    pub(super) unclaimed: Counter,
    /// Sessions of two agents that this router has closed at one of them.
    pub(super) mended: Counter,
}

impl Metrics {
    /// Creates the metrics, and registers them.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            claims: Family::default(),
            // An arbiter in the same network answers in a millisecond; the deadline is 20 ms.
            seconds: histogram::create([
                0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 1.0,
            ]),
            unclaimed: Counter::default(),
            mended: Counter::default(),
        };
        let help = "Requests for claims on workers of sessions, by store and result";
        registry.register("claims", help, metrics.claims.clone());
        let help = "Time that turns and opens waited for a claim";
        registry.register_with_unit("claim", help, Unit::Seconds, metrics.seconds.clone());
        let help = "Sessions placed without a claim, because no store and no agent gave one";
        registry.register("claims_missing", help, metrics.unclaimed.clone());
        let help = "Sessions that two agents had, closed by this router at one of them";
        registry.register("sessions_mended", help, metrics.mended.clone());
        metrics
    }

    pub(super) fn count(&self, store: StoreKind, result: StoreResult) {
        let labels = ClaimLabels { store: store.as_str(), result: result.as_str() };
        self.claims.get_or_create(&labels).inc();
    }

    pub(super) fn observe(&self, waited: Duration) {
        self.seconds.observe(waited.as_secs_f64());
    }
}
