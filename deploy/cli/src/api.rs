//! The router's answers, as far as `berth` reads them. Pure.
//!
//! Members that a router leaves out are unknown, and unknown members are ignored: the versions of
//! router and `berth` may differ a little. The router's document `/openapi.json` describes all.

use proto::load::RetentionOff;
use serde::Deserialize;

/// The answer of `GET /v1/workers`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Fleet {
    /// All workers.
    pub workers: Vec<Worker>,
    /// The agents that were never heard.
    pub unheard: Vec<UnheardAgent>,
}

/// A worker: one rank of an engine with its agent. Its many fields: one for each member that is
/// shown or checked.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Worker {
    /// The name, `agent/rank`.
    pub worker: String,
    /// The agent's id.
    pub agent: String,
    /// The rank.
    pub dp_rank: u32,
    /// URL of the agent's control port.
    pub control: String,
    /// Address of the agent's data port.
    pub data: String,
    /// `fresh`, `stale`, `lost`, `unhealthy`, `held`, `draining` or `disaggregated`.
    pub state: String,
    /// Why the state isn't `fresh`.
    pub reason: String,
    /// Milliseconds since the agent was last heard.
    pub heartbeat_age_ms: Option<u64>,
    /// Why only a restart of the engine frees what the engine holds.
    pub restart_required: Option<String>,
    /// The figures of the last load report.
    pub load: Option<Load>,
    /// What the router knows of the resident blocks.
    pub kv: Kv,
    /// The engine.
    pub engine: Engine,
    /// The retentions that the engine offers, best first.
    pub retentions: Vec<String>,
    /// The other retentions, and why each is not offered.
    pub retentions_off: Vec<RetentionOff>,
    /// The fixed sizes of the rank.
    pub rank: Option<Rank>,
}

/// An agent that the router knows by its address alone.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct UnheardAgent {
    /// URL of the control port.
    pub control: String,
    /// The state.
    pub state: String,
    /// Why the agent isn't heard.
    pub reason: String,
}

/// A number with its source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Figure {
    /// The number.
    pub value: u64,
    /// Where the number comes from, such as `shim`.
    pub source: String,
    /// Milliseconds since the number was read.
    pub age_ms: u64,
}

/// A part of a whole, 0 to 1, with its source.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Ratio {
    /// The part.
    pub value: f64,
    /// Where the number comes from, such as `shim`.
    pub source: String,
    /// Milliseconds since the number was read.
    pub age_ms: u64,
}

/// The load of one rank. Its many fields: one for each figure that is shown or checked.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Turns inside the engine.
    pub turns_running: u32,
    /// Turns that wait in the agent.
    pub turns_queued: u32,
    /// Requests that wait in the engine.
    pub requests_waiting: Option<Figure>,
    /// KV that eviction can't free.
    pub pool_used_tokens: Option<Figure>,
    /// The pool.
    pub pool_total_tokens: Option<Figure>,
    /// Free KV.
    pub pool_available_tokens: Option<Figure>,
    /// Cached KV that eviction can free.
    pub pool_evictable_tokens: Option<Figure>,
    /// KV of pinned sessions.
    pub pinned_tokens: Option<Figure>,
    /// The part of `pinned_tokens` that is not the agent's.
    pub foreign_tokens: Option<Figure>,
    /// Request rows of pinned sessions.
    pub rows_held: Option<Figure>,
    /// All request rows.
    pub rows_total: Option<Figure>,
    /// Prompt tokens that the engine computes in a second.
    pub prefill_tokens_per_s: Option<Figure>,
    /// Open sessions.
    pub sessions: u32,
    /// The GPUs with their readings.
    pub devices: Vec<Device>,
    /// The newest page audit.
    pub pages: Option<Pages>,
}

/// A page audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Pages {
    /// Pages by owner.
    pub classes: Option<PageCounts>,
    /// The kinds of fault that were looked for.
    pub findings: Vec<FaultCount>,
}

/// Pages by owner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PageCounts {
    /// Pages of the radix tree that a turn or session uses: eviction can't free them.
    pub cached_in_use: u64,
}

/// A kind of fault of the page audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FaultCount {
    /// The kind.
    pub kind: String,
    /// How often it was found.
    pub count: u64,
}

/// A GPU or a MIG slice. Its many fields: one for each reading that is shown or checked.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Device {
    /// UUID from NVML, or the engine's name of its device.
    pub uuid: String,
    /// Marketing name.
    pub name: String,
    /// Index in the agent's NVML; absent without NVML.
    pub index: Option<u32>,
    /// UUID of the GPU to which a MIG slice belongs.
    pub parent_uuid: Option<String>,
    /// Device memory, bytes.
    pub memory_total_bytes: Option<u64>,
    /// Used device memory, bytes.
    pub memory_used_bytes: Option<u64>,
    /// Share of time in which a kernel ran, percent.
    pub utilization_percent: Option<u32>,
    /// Temperature.
    pub temperature_celsius: Option<u32>,
    /// Power.
    pub power_milliwatts: Option<u32>,
    /// Memory of the engine's processes, bytes.
    pub engine_bytes: Option<Figure>,
    /// The KV pool's bytes on this device.
    pub kv_pool_bytes: Option<Figure>,
    /// The part of that pool that is not free.
    pub kv_physical_usage: Option<Ratio>,
    /// Why work on the device fails.
    pub unhealthy: Option<String>,
    /// Milliseconds since NVML was read.
    pub age_ms: Option<u64>,
}

/// What the router knows of a worker's resident blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Kv {
    /// `live`, `snapshot` or `unknown`.
    pub state: String,
    /// Why the blocks are unknown.
    pub reason: Option<String>,
    /// Number of resident blocks.
    pub resident_blocks: u64,
}

/// An engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Engine {
    /// SGLang's version.
    pub version: String,
    /// The served models.
    pub models: Vec<String>,
    /// Tokens of a page.
    pub page_tokens: u64,
    /// Longest prompt and answer.
    pub context_tokens: u64,
    /// The size of the vocabulary.
    pub vocabulary: Option<u64>,
    /// Identity of the engine's process.
    pub instance: String,
    /// `null`, `prefill` or `decode`.
    pub disaggregation: String,
}

/// The fixed sizes of a rank.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Rank {
    /// The pool, tokens.
    pub pool_tokens: u64,
    /// The request rows.
    pub rows: u32,
    /// The GPUs, without readings.
    pub devices: Vec<Device>,
}

/// The answer of `GET /v1/fleet/sessions`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct FleetSessions {
    /// The first sessions by the order that was asked for.
    pub sessions: Vec<Session>,
    /// Sessions that aren't among those and started some of them, directly or not.
    pub parents: Vec<Session>,
    /// How many sessions were found.
    pub total: u64,
}

/// A session. Its many fields: one for each member that is shown or sorted by.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Session {
    /// The digest that names it among the sessions of all clients.
    pub digest: String,
    /// The id that the client gave it.
    pub session_id: String,
    /// The name of its client.
    pub principal: String,
    /// The worker that holds its KV.
    pub worker: String,
    /// `pinned`, `tagged` or `none`.
    pub retention: String,
    /// `idle`, `running` or another state.
    pub state: String,
    /// Finished turns.
    pub turns: u64,
    /// Turns inside the engine.
    pub turns_running: u32,
    /// Tokens of KV.
    pub resident_tokens: Option<u64>,
    /// Milliseconds since the last turn, when the agent reported it.
    pub idle_ms_at_report: u64,
    /// Milliseconds since the last turn, where the router knows.
    pub idle_ms: Option<u64>,
    /// The digest of the session that started this one.
    pub parent: Option<String>,
    /// Whether the client sends its full history with each turn.
    pub whole_history: bool,
}

/// The answer of `GET /v1/placements`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PlacementPage {
    /// The placements, oldest first.
    pub placements: Vec<Placement>,
    /// Where the next page begins.
    pub next: Option<String>,
}

/// The placement of a turn.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Placement {
    /// The turn's id.
    pub turn: String,
    /// The session's digest.
    pub session: Option<String>,
    /// The worker.
    pub worker: String,
    /// Why the worker was chosen.
    pub reason: String,
    /// Prompt tokens that the worker must compute.
    pub uncached_tokens: Option<u64>,
    /// Milliseconds since then.
    pub age_ms: u64,
    /// The workers that were compared.
    pub compared: Vec<serde_json::Value>,
}

/// The answer of `GET /v1/turns`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TurnPage {
    /// The turns, oldest first.
    pub turns: Vec<Turn>,
    /// Where the next page begins.
    pub next: Option<String>,
}

/// A turn. Its many fields: one for each member that is shown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Turn {
    /// The turn's id.
    pub turn: String,
    /// The session's digest.
    pub session: Option<String>,
    /// The worker.
    pub worker: Option<String>,
    /// Why the worker was chosen.
    pub reason: Option<String>,
    /// `pinned`, `tagged` or `none`.
    pub retention: Option<String>,
    /// The HTTP status of the answer.
    pub status: Option<u16>,
    /// Milliseconds since the turn began.
    pub age_ms: u64,
    /// Milliseconds to the first token.
    pub ttft_ms: Option<u64>,
    /// Milliseconds of the whole turn.
    pub duration_ms: Option<u64>,
    /// Tokens of the prompt.
    pub prompt_tokens: Option<u64>,
    /// Those that were cached.
    pub cached_tokens: Option<u64>,
    /// Tokens of the answer.
    pub output_tokens: Option<u64>,
    /// How the turn ended; absent while it runs.
    pub outcome: Option<String>,
}

/// A KV pool by who holds it. The parts add up to the whole. Tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolParts {
    /// Of pinned sessions.
    pub pinned: u64,
    /// Prefixes of the radix tree that turns or sessions use, by the last page audit.
    pub locked: u64,
    /// Of running turns; with the locked prefixes, if no audit is known.
    pub running: u64,
    /// Cached KV that eviction can free.
    pub evictable: u64,
    /// Free.
    pub free: u64,
}

impl PoolParts {
    /// Returns all parts together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.pinned + self.locked + self.running + self.evictable + self.free
    }
}

impl Session {
    /// Returns the milliseconds since the last turn; at its last report, if the router doesn't say.
    #[must_use]
    pub fn idle_ms(&self) -> u64 {
        self.idle_ms.unwrap_or(self.idle_ms_at_report)
    }
}

impl Worker {
    /// Whether the worker takes all turns.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.state == "fresh"
    }

    /// Returns the parts of the KV pool. `None` if its size or use is unknown.
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
