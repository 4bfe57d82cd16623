//! Counts the engine's KV events and the blocks that its cache holds, as Prometheus metrics.
//!
//! A *block* is the unit in which routers count a prompt. The counts come from `RankCache`, one
//! for each data parallel rank of the engine. This module reads no events itself.

use blocks::block::Tier;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use service::metrics::{By, to_i64};

use super::rank_cache::{Counts, RankCache};
use crate::metrics::{RankKindLabel, RankLabel};

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabel {
    dp_rank: u32,
    tier: &'static str,
}

service::metrics! {
    pub struct Metrics {
        /// KV events of the engine, by kind; orphan, mismatch, refused and malformed ones were not
        /// applied
        events: Family<RankKindLabel, Counter> = "kv_events";
        /// Irregularities in the sequence of the engine's messages: gaps, lost messages, requested
        /// replays, restarts
        sequence_faults: Family<RankKindLabel, Counter> = "kv_order";
        /// Requests to publish the engine's whole tree again, by outcome
        tree_requests: By<Counter> = "kv_resyncs", By::label("outcome");
        /// Routing blocks resident on the engine, by tier
        blocks: Family<TierLabel, Gauge> = "kv_blocks";
        /// Memory that the agent holds to track the resident pages, bytes
        index_bytes: Family<RankLabel, Gauge> = "kv_index_bytes";
        /// Routers that watch the resident blocks
        watchers: Gauge = "kv_watchers";
    }
}

impl Metrics {
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
            self.events.get_or_create(&RankKindLabel { dp_rank, kind }).inc_by(count);
        }
        for (kind, count) in
            [("gap", gaps), ("lost", lost_messages), ("replay", replays), ("restart", restarts)]
        {
            self.sequence_faults.get_or_create(&RankKindLabel { dp_rank, kind }).inc_by(count);
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
        self.tree_requests.get(outcome).inc();
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
