//! Counts claims, the sessions that began on two workers, and how long claims take.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
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

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    store: &'static str,
    result: &'static str,
}

/// Creates a histogram for an arbiter in the same network, which answers in a millisecond; the
/// deadline is 20 ms.
fn claim_histogram() -> Histogram {
    histogram::create([0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 1.0])
}

service::metrics! {
    pub(crate) struct Metrics {
        /// Requests for claims on workers of sessions, by store and result
        claims: Family<ClaimLabels, Counter> = "claims";
        /// Time that turns and opens waited for a claim
        seconds: Histogram = "claim" in "seconds", claim_histogram();
        /// Sessions placed without a claim, because no store and no agent gave one
        pub(super) unclaimed: Counter = "claims_missing";
        /// Sessions that two agents had, closed by this router at one of them
        pub(super) mended: Counter = "sessions_mended";
    }
}

impl Metrics {
    pub(super) fn count(&self, store: StoreKind, result: StoreResult) {
        let labels = ClaimLabels { store: store.as_str(), result: result.as_str() };
        self.claims.get_or_create(&labels).inc();
    }

    pub(super) fn observe(&self, waited: Duration) {
        self.seconds.observe(waited.as_secs_f64());
    }
}
