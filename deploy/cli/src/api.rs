//! The router's answers, as far as `berth` reads them. Pure.
//!
//! Members that a router leaves out are unknown, and unknown members are ignored: the versions of
//! router and `berth` may differ a little. The router's `/openapi.json` describes all.

use proto::load::RetentionOff;
use serde::Deserialize;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Fleet {
    pub workers: Vec<Worker>,
    pub unheard: Vec<UnheardAgent>,
}

/// One rank of an engine with its agent.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Worker {
    /// `agent/rank`.
    pub worker: String,
    pub agent: String,
    pub dp_rank: u32,
    /// URL of the agent's control port.
    pub control: String,
    /// `host:port` of the agent's data port.
    pub data: String,
    /// `fresh`, `stale`, `lost`, `unhealthy`, `held`, `draining` or `disaggregated`.
    pub state: String,
    /// Why the state isn't `fresh`.
    pub reason: String,
    /// The time since the agent was last heard.
    pub heartbeat_age_ms: Option<u64>,
    /// Why only a restart of the engine frees what the engine holds.
    pub restart_required: Option<String>,
    pub load: Option<Load>,
    pub kv: Kv,
    pub engine: Engine,
    /// The best is first.
    pub retentions: Vec<String>,
    pub retentions_off: Vec<RetentionOff>,
    pub rank: Option<Rank>,
}

/// An agent that the router knows by its address alone.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct UnheardAgent {
    pub control: String,
    pub state: String,
    pub reason: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Figure {
    pub value: u64,
    /// The origin, such as `shim`.
    pub source: String,
    pub age_ms: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Ratio {
    /// 0 to 1.
    pub value: f64,
    /// The origin, such as `shim`.
    pub source: String,
    pub age_ms: u64,
}

/// Of one rank.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Load {
    pub turns_running: u32,
    /// Turns that wait in the agent.
    pub turns_queued: u32,
    /// Requests that wait in the engine.
    pub requests_waiting: Option<Figure>,
    /// KV that eviction can't free.
    pub pool_used_tokens: Option<Figure>,
    pub pool_total_tokens: Option<Figure>,
    pub pool_available_tokens: Option<Figure>,
    /// Cached KV that eviction can free.
    pub pool_evictable_tokens: Option<Figure>,
    pub pinned_tokens: Option<Figure>,
    /// The part of `pinned_tokens` that is not the agent's.
    pub foreign_tokens: Option<Figure>,
    pub rows_held: Option<Figure>,
    pub rows_total: Option<Figure>,
    pub prefill_tokens_per_s: Option<Figure>,
    pub sessions: u32,
    pub devices: Vec<Device>,
    pub pages: Option<Pages>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Pages {
    pub classes: Option<PageCounts>,
    /// The kinds of fault that were looked for.
    pub findings: Vec<FaultCount>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PageCounts {
    /// Pages of the radix tree that a turn or session uses: eviction can't free them.
    pub cached_in_use: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FaultCount {
    pub kind: String,
    pub count: u64,
}

/// A GPU or a MIG slice.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Device {
    /// UUID from NVML, or the engine's name of its device.
    pub uuid: String,
    pub name: String,
    /// Index in the agent's NVML; absent without it.
    pub index: Option<u32>,
    pub parent_uuid: Option<String>,
    pub memory_total_bytes: Option<u64>,
    pub memory_used_bytes: Option<u64>,
    /// Share of time in which a kernel ran.
    pub utilization_percent: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub power_milliwatts: Option<u32>,
    /// Memory of the engine's processes.
    pub engine_bytes: Option<Figure>,
    pub kv_pool_bytes: Option<Figure>,
    /// The part of the KV pool on this device that is not free.
    pub kv_physical_usage: Option<Ratio>,
    /// Why work on the device fails.
    pub unhealthy: Option<String>,
    /// The time since NVML was read.
    pub age_ms: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Kv {
    /// `live`, `snapshot` or `unknown`.
    pub state: String,
    pub reason: Option<String>,
    pub resident_blocks: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Engine {
    pub version: String,
    pub models: Vec<String>,
    pub page_tokens: u64,
    /// Longest prompt and answer.
    pub context_tokens: u64,
    pub vocabulary: Option<u64>,
    /// Identifies the engine's process.
    pub instance: String,
    /// `null`, `prefill` or `decode`.
    pub disaggregation: String,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Rank {
    pub pool_tokens: u64,
    pub rows: u32,
    /// They have no readings.
    pub devices: Vec<Device>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FleetSessions {
    /// The first sessions by the order that was asked for.
    pub sessions: Vec<Session>,
    /// Sessions that aren't among those and started some of them, directly or not.
    pub parents: Vec<Session>,
    pub total: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Session {
    /// Names the session among those of all clients.
    pub digest: String,
    pub session_id: String,
    pub principal: String,
    /// It holds the session's KV.
    pub worker: String,
    /// `pinned`, `tagged` or `none`.
    pub retention: String,
    pub state: String,
    /// Finished turns.
    pub turns: u64,
    pub turns_running: u32,
    pub resident_tokens: Option<u64>,
    /// The time since the last turn, when the agent reported it.
    pub idle_ms_at_report: u64,
    /// The time since the last turn, where the router knows.
    pub idle_ms: Option<u64>,
    /// Digest of the session that started this one.
    pub parent: Option<String>,
    pub whole_history: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PlacementPage {
    /// The oldest is first.
    pub placements: Vec<Placement>,
    /// Where the next page begins.
    pub next: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Placement {
    pub turn: String,
    /// Digest.
    pub session: Option<String>,
    pub worker: String,
    pub reason: String,
    /// Prompt tokens that the worker must compute.
    pub uncached_tokens: Option<u64>,
    pub age_ms: u64,
    pub compared: Vec<serde_json::Value>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Turn {
    pub turn: String,
    /// Digest.
    pub session: Option<String>,
    pub worker: Option<String>,
    pub reason: Option<String>,
    pub retention: Option<String>,
    pub status: Option<u16>,
    /// The time since the turn began.
    pub age_ms: u64,
    pub ttft_ms: Option<u64>,
    pub duration_ms: Option<u64>,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub output_tokens: Option<u64>,
    /// Absent while the turn runs.
    pub outcome: Option<String>,
}

/// A KV pool by who holds it, in tokens. The parts add up to the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolParts {
    pub pinned: u64,
    /// Prefixes of the radix tree that turns or sessions use, by the last page audit.
    pub locked: u64,
    /// KV of running turns; with the locked prefixes, if no audit is known.
    pub running: u64,
    /// Cached KV that eviction can free.
    pub evictable: u64,
    pub free: u64,
}

impl PoolParts {
    #[must_use]
    pub fn total(&self) -> u64 {
        self.pinned + self.locked + self.running + self.evictable + self.free
    }
}

impl Session {
    /// The time since the last turn: now, or at the last report if an agent listed the session.
    #[must_use]
    pub fn idle_ms(&self) -> u64 {
        self.idle_ms.unwrap_or(self.idle_ms_at_report)
    }
}

impl Worker {
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.state == "fresh"
    }

    /// `None` if the pool's size or use is unknown.
    #[must_use]
    pub fn pool_parts(&self) -> Option<PoolParts> {
        let load = self.load.as_ref()?;
        let value = |figure: &Option<Figure>| figure.as_ref().map(|figure| figure.value);
        let total = value(&load.pool_total_tokens)?;
        // The figures are of different moments. Each part takes at most what the others left.
        let mut rest = total;
        let mut take = |wanted: u64| {
            let part = wanted.min(rest);
            rest -= part;
            part
        };
        let used = value(&load.pool_used_tokens)?;
        let pinned = take(value(&load.pinned_tokens).unwrap_or(0));
        let in_use = take(used.saturating_sub(pinned));
        let evictable = take(value(&load.pool_evictable_tokens).unwrap_or(0));
        let classes = load.pages.as_ref().and_then(|pages| pages.classes);
        let locked_pages = classes.map_or(0, |classes| classes.cached_in_use);
        let locked = locked_pages.saturating_mul(self.engine.page_tokens.max(1)).min(in_use);
        Some(PoolParts { pinned, locked, running: in_use - locked, evictable, free: rest })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn figure(value: u64) -> Option<Figure> {
        Some(Figure { value, ..Figure::default() })
    }

    fn worker(total: u64, used: u64, pinned: u64, evictable: u64, locked_pages: u64) -> Worker {
        let classes = Some(PageCounts { cached_in_use: locked_pages });
        let load = Load {
            pool_total_tokens: figure(total),
            pool_used_tokens: figure(used),
            pinned_tokens: figure(pinned),
            pool_evictable_tokens: figure(evictable),
            pages: Some(Pages { classes, findings: vec![] }),
            ..Load::default()
        };
        let engine = Engine { page_tokens: 16, ..Engine::default() };
        Worker { load: Some(load), engine, ..Worker::default() }
    }

    #[test]
    fn the_pool_is_split_by_who_holds_it() {
        let parts = worker(1000, 500, 300, 200, 5).pool_parts().unwrap();
        let expected =
            PoolParts { pinned: 300, locked: 80, running: 120, evictable: 200, free: 300 };
        assert_eq!(parts, expected);
        assert_eq!(Worker::default().pool_parts(), None, "nothing is known");
    }

    proptest! {
        #[test]
        fn the_parts_are_never_more_than_the_pool(
            total: u64, used: u64, pinned: u64, evictable: u64, locked: u64
        ) {
            let parts = worker(total, used, pinned, evictable, locked).pool_parts().unwrap();
            prop_assert_eq!(parts.total(), total);
        }
    }
}
