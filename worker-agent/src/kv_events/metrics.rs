//! Counts the engine's KV events and the blocks that its cache holds, as Prometheus metrics.
//!
//! A *block* is the unit in which routers count a prompt. The counts come from `RankCache`, one
//! for each data parallel rank of the engine. This module reads no events itself.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use proto::block::Tier;

use super::rank_cache::{Counts, RankCache};

/// Handles of all KV metrics. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    events: Family<KindLabel, Counter>,
    sequence_faults: Family<KindLabel, Counter>,
    tree_requests: Family<OutcomeLabel, Counter>,
    blocks: Family<TierLabel, Gauge>,
    index_bytes: Family<RankLabel, Gauge>,
    watchers: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    dp_rank: u32,
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    dp_rank: u32,
    tier: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RankLabel {
    dp_rank: u32,
}

impl Metrics {
    /// Creates the metrics and registers them under `registry`.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            events: Family::default(),
            sequence_faults: Family::default(),
            tree_requests: Family::default(),
            blocks: Family::default(),
            index_bytes: Family::default(),
            watchers: Gauge::default(),
        };
        let help = "KV events of the engine, by kind; orphan, mismatch, refused and malformed \
                    ones were not applied";
        registry.register("kv_events", help, metrics.events.clone());
        let help = "Irregularities in the sequence of the engine's messages: gaps, lost messages, \
                    requested replays, restarts";
        registry.register("kv_order", help, metrics.sequence_faults.clone());
        let help = "Requests to publish the engine's whole tree again, by outcome";
        registry.register("kv_resyncs", help, metrics.tree_requests.clone());
        let help = "Routing blocks resident on the engine, by tier";
        registry.register("kv_blocks", help, metrics.blocks.clone());
        let help = "Memory that the agent holds to track the resident pages, bytes";
        registry.register("kv_index_bytes", help, metrics.index_bytes.clone());
        let help = "Routers that watch the resident blocks";
        registry.register("kv_watchers", help, metrics.watchers.clone());
        metrics
    }

    /// Adds a rank's event counts since the last call, and sets its resident blocks and memory.
    pub(super) fn update(&self, dp_rank: u32, rank: &mut RankCache) {
        let Counts {
            stored,
            removed,
            cleared,
            malformed,
            gaps,
            lost_messages,
            replays,
            restarts,
            orphans,
            mismatches,
            refused,
        } = rank.take_counts();
        for (kind, count) in [
            ("stored", stored),
            ("removed", removed),
            ("cleared", cleared),
            ("orphan", orphans),
            ("mismatch", mismatches),
            ("refused", refused),
            ("malformed", malformed),
        ] {
            self.events.get_or_create(&KindLabel { dp_rank, kind }).inc_by(count);
        }
        for (kind, count) in
            [("gap", gaps), ("lost", lost_messages), ("replay", replays), ("restart", restarts)]
        {
            self.sequence_faults.get_or_create(&KindLabel { dp_rank, kind }).inc_by(count);
        }
        for (tier, blocks) in rank.resident_blocks() {
            let tier = tier_name(tier);
            self.blocks.get_or_create(&TierLabel { dp_rank, tier }).set(to_i64(blocks));
        }
        let bytes = to_i64(rank.bytes() as u64);
        self.index_bytes.get_or_create(&RankLabel { dp_rank }).set(bytes);
    }

    /// Removes a rank's gauges. The caller does this while the rank's state is unknown, because a
    /// gauge of zero would state that nothing is resident.
    pub(super) fn remove_rank(&self, dp_rank: u32) {
        for tier in [Tier::Device, Tier::Host].map(tier_name) {
            self.blocks.remove(&TierLabel { dp_rank, tier });
        }
        self.index_bytes.remove(&RankLabel { dp_rank });
    }

    /// Counts one request to publish the engine's radix tree again.
    pub(super) fn count_tree_request(&self, outcome: &'static str) {
        self.tree_requests.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Changes the number of watchers by `change`.
    pub(super) fn add_watchers(&self, change: i64) {
        self.watchers.inc_by(change);
    }
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
    }
}

fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
