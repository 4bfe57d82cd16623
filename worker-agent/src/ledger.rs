//! Keeps the figures of each rank's KV pool, and makes the load reports to routers from them.
//!
//! Each reported [`Figure`] names its source and its age. This module admits no turns, does no I/O
//! and reads no clock.
//!
//! On their way from the engine to a placement, a rank's figures change their type five times:
//!
//! | from | to | where |
//! |---|---|---|
//! | the shim's message | [`RankFacts`], which the ledger keeps | `shim/outbox.rs` |
//! | [`RankFacts`], [`RankSample`], the table's [`RankTotals`] | [`RankLoad`] | here |
//! | [`RankLoad`] | its wire form | `proto/contract/src/load/wire.rs`, for `control_port` |
//! | the wire form | [`RankLoad`], which the router keeps | `proto/contract/src/load/wire.rs` |
//! | [`RankLoad`] | a row of the worker table | `router/src/fleet/worker_table.rs` |

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use contract::{
    load::{Device, Figure, HostTier, LoadReport, Rank, RankLoad, Retention, Source, Weights},
    staged_prefill::PREFILL_TOKENS_PER_S_ASSUMED,
};

use self::token_rate::TokenRate;
use crate::{
    engine::{EngineInfo, LoadSample, RankSample},
    gpu::{kv::Pool, tracker::Snapshot},
    session::{self, RankCapacity, RankTotals, Session, Table, UnseenBy},
    shim::RankFacts,
};

pub mod token_rate;

/// The most ranks of one engine. Queues get their size from it, because they are created before
/// the agent has reached the engine.
const RANKS_MAX: u32 = 256;

/// The longest that a scheduler may be in one step. An engine that hangs after it got a long prompt
/// is noticed after this time.
const STEP_TIME_MAX: Duration = Duration::from_secs(120);
/// The prefill rate before it was measured. Slow engines, on a CPU, are as fast.
const UNMEASURED_TOKENS_PER_S: u64 = 500;

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The rows of each rank that pinned sessions leave free.
    pub rows_reserve: u32,
    /// The share of a rank's rows that pinned sessions may hold, 0 to 1.
    pub pin_rows_ratio: f64,
    /// The share of a rank's pool that pinned sessions may hold, 0 to 1.
    pub pin_budget_ratio: f64,
    /// The maximum of turns inside the engine, per rank.
    pub turns_max: u32,
    /// How fast KV comes from the host's memory, until loads were measured.
    pub host_load_bytes_per_s: u64,
}

impl Limits {
    #[must_use]
    pub fn turns_max_over_ranks(&self) -> usize {
        self.turns_max as usize * RANKS_MAX as usize
    }
}

#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    /// `None` until an engine process is known.
    engine: Option<EngineInfo>,
    sample: Option<LoadSample>,
    /// By rank: the scheduler's clock at its newest snapshot, in µs, and when a sample first had
    /// it.
    snapshots: HashMap<u32, (u64, Instant)>,
    prefill_rates: Vec<TokenRate>,
    /// By rank, while its shim is connected.
    shims: HashMap<u32, ShimFigures>,
}

#[derive(Debug, Default)]
struct ShimFigures {
    /// The bytes of a page on each of the rank's devices, which the shim reads from the pool's
    /// buffers. `None` if the shim can't tell.
    page_bytes: Option<u64>,
    facts: Option<RankFacts>,
    host_load_rate: TokenRate,
}

#[derive(Debug, Clone, Default)]
pub struct AgentHealth {
    pub unhealthy_reason: Option<String>,
    pub is_draining: bool,
    /// Why only a restart of the engine helps.
    pub restart_reason: Option<String>,
    /// False if the engine runs only prompts or only answers.
    pub runs_whole_turns: bool,
    /// Why the engine runs no turns by its operator's wish.
    pub held_reason: Option<String>,
    pub weights: Weights,
}

impl Ledger {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            engine: None,
            sample: None,
            snapshots: HashMap::new(),
            prefill_rates: vec![],
            shims: HashMap::new(),
        }
    }

    /// Forgets the figures of the process before.
    pub fn set_engine(
        &mut self,
        info: &EngineInfo,
        retentions: Vec<Retention>,
    ) -> session::EngineCapacity {
        let mut info = info.clone();
        info.rows.truncate(RANKS_MAX as usize);
        self.sample = None;
        self.snapshots.clear();
        self.prefill_rates = vec![TokenRate::default(); info.rows.len()];
        for shim in self.shims.values_mut() {
            (shim.facts, shim.host_load_rate) = (None, TokenRate::default());
        }
        let ranks = info.rows.iter().map(|&rows| RankCapacity {
            rows,
            rows_reserve: self.limits.rows_reserve,
            pin_rows_max: rows_share(rows, self.limits.pin_rows_ratio),
            pool_tokens: info.pool_tokens,
            pin_tokens_max: share_of(info.pool_tokens, self.limits.pin_budget_ratio),
            turns_max: self.limits.turns_max,
        });
        let capacity = session::EngineCapacity {
            ranks: ranks.collect(),
            page_tokens: u64::from(info.facts.page_tokens),
            context_tokens: u64::from(info.facts.context_tokens),
            retentions,
        };
        self.engine = Some(info);
        capacity
    }

    pub fn record_sample(&mut self, sample: LoadSample) {
        for rank in &sample.ranks {
            let rate = self.prefill_rates.get_mut(rank.dp_rank as usize);
            if let (Some(rate), Some(busy_us)) = (rate, rank.total_prefill_busy_us) {
                rate.record_sample(sample.at, rank.total_prefill_uncached_tokens, busy_us);
            }
            if let Some(made_us) = rank.snapshot_us() {
                let seen = self.snapshots.entry(rank.dp_rank).or_insert((made_us, sample.at));
                if seen.0 != made_us {
                    *seen = (made_us, sample.at);
                }
            } else {
                self.snapshots.remove(&rank.dp_rank);
            }
        }
        self.sample = Some(sample);
    }

    pub fn add_shim(&mut self, dp_rank: u32, page_bytes: Option<u64>) {
        self.shims.entry(dp_rank).or_default().page_bytes = page_bytes;
    }

    pub fn record_facts(&mut self, facts: RankFacts) {
        let shim = self.shims.entry(facts.dp_rank).or_default();
        if let Some(host) = facts.host {
            shim.host_load_rate.record_sample(facts.read_at, host.loaded_tokens, host.loads_us);
        }
        shim.facts = Some(facts);
    }

    pub fn remove_shim(&mut self, dp_rank: u32) {
        self.shims.remove(&dp_rank);
    }

    #[must_use]
    pub fn describe_ranks(&self, now: Instant, gpus: &Snapshot) -> Vec<Rank> {
        let fixed_properties = |device: Device| Device {
            uuid: device.uuid,
            name: device.name,
            index: device.index,
            pci_address: device.pci_address,
            parent_uuid: device.parent_uuid,
            numa_node: device.numa_node,
            memory_total_bytes: device.memory_total_bytes,
            ..Device::default()
        };
        let describe_rank = |(engine, dp_rank, rows): (&EngineInfo, u32, u32)| {
            let devices = read_devices(now, engine, dp_rank, gpus).into_iter();
            let devices = devices.map(fixed_properties).collect();
            Rank { dp_rank, pool_tokens: engine.pool_tokens, rows, devices }
        };
        self.ranks().map(describe_rank).collect()
    }

    #[must_use]
    pub fn report(
        &self,
        now: Instant,
        table: &Table,
        gpus: &Snapshot,
        interval: Duration,
        health: AgentHealth,
    ) -> LoadReport {
        let ranks = self.ranks().map(|(engine, dp_rank, rows)| {
            let mut load = self.rank_load(now, engine, dp_rank, rows, table);
            load.devices = self.devices(now, engine, &load, gpus);
            load
        });
        LoadReport {
            interval,
            ranks: ranks.collect(),
            unhealthy: health.unhealthy_reason,
            // An engine that needs a restart holds rows or pages that it will never free, so
            // routers must open no new sessions here.
            draining: health.is_draining || health.restart_reason.is_some(),
            restart_required: health.restart_reason,
            held: health.held_reason,
            weights: health.weights,
        }
    }

    fn ranks(&self) -> impl Iterator<Item = (&EngineInfo, u32, u32)> {
        self.engine.iter().flat_map(|engine| {
            (0..).zip(&engine.rows).map(move |(dp_rank, &rows)| (engine, dp_rank, rows))
        })
    }

    fn facts(&self, dp_rank: u32) -> Option<&RankFacts> {
        self.shims.get(&dp_rank)?.facts.as_ref()
    }

    fn rank_sample(&self, dp_rank: u32) -> Option<(&RankSample, Instant)> {
        let sample = self.sample.as_ref()?;
        let rank = sample.ranks.iter().find(|rank| rank.dp_rank == dp_rank)?;
        Some((rank, sample.at))
    }

    /// The devices and the figures that the owner task's reporter adds are missing here.
    fn rank_load(
        &self,
        now: Instant,
        engine: &EngineInfo,
        dp_rank: u32,
        rows: u32,
        table: &Table,
    ) -> RankLoad {
        let (facts, sample) = (self.facts(dp_rank), self.rank_sample(dp_rank));
        let totals = table.totals(dp_rank);
        let pool_tokens = engine.pool_tokens;
        let from_shim = |value: fn(&RankFacts) -> u64| {
            let to_figure =
                |facts: &RankFacts| shim_figure(value(facts).min(pool_tokens), now, facts);
            facts.map(to_figure)
        };
        let from_sample = |value: fn(&RankSample) -> u64| {
            let to_figure = |(rank, at): (&RankSample, Instant)| Figure {
                value: value(rank),
                source: Source::Loads,
                age_ms: age_ms(now, at),
            };
            sample.map(to_figure)
        };
        let figure_now = |value, source| Some(Figure { value, source, age_ms: 0 });
        let pinned = pinned_figure(now, facts, &totals, pool_tokens);
        let foreign_tokens = totals.foreign_tokens.min(pinned.value);
        let foreign_source = if facts.is_some() { Source::Shim } else { Source::Estimate };
        let is_foreign_known = foreign_tokens > 0 || facts.is_some();
        let tree_tokens = totals.tree_tokens_estimate.min(pool_tokens - pinned.value);
        RankLoad {
            dp_rank,
            turns_running: totals.turns_running,
            turns_running_max: self.limits.turns_max,
            requests_running: from_shim(|facts| facts.running.into())
                .or_else(|| from_sample(|rank| rank.num_running_reqs)),
            requests_waiting: from_shim(|facts| facts.waiting.into())
                .or_else(|| from_sample(|rank| rank.num_waiting_reqs)),
            pool_used_tokens: from_shim(RankFacts::used_tokens).or_else(|| {
                from_sample(|rank| rank.num_used_tokens.min(rank.max_total_num_tokens))
            }),
            pool_total_tokens: figure_now(pool_tokens, Source::ServerInfo),
            pinned_tokens: Some(pinned),
            resident_tokens_estimate: figure_now(tree_tokens, Source::Estimate),
            rows_held: figure_now(u64::from(totals.rows_held.min(rows)), Source::Ledger),
            rows_total: figure_now(u64::from(rows), Source::ServerInfo),
            sessions: totals.sessions,
            turns_queued: totals.turns_queued,
            pool_available_tokens: from_shim(|facts| facts.available_tokens),
            pool_evictable_tokens: from_shim(|facts| facts.evictable_tokens),
            foreign_tokens: figure_now(foreign_tokens, foreign_source).filter(|_| is_foreign_known),
            prefill_tokens_per_s: self.prefill_rate(now, dp_rank),
            prefill_backlog_tokens: self.prefill_backlog(now, table, dp_rank),
            // `report` adds the devices; the reporter adds the page audit and the staged-prefill
            // queue.
            devices: vec![],
            pages: None,
            staged_prefill: None,
            host: facts.and_then(|facts| self.host_tier(now, engine, facts)),
        }
    }

    /// Whether the rank's engine has a host tier, as its shim says.
    pub fn has_host_tier(&self, dp_rank: u32) -> bool {
        let facts = self.shims.get(&dp_rank).and_then(|shim| shim.facts.as_ref());
        facts.is_some_and(|facts| facts.host.is_some())
    }

    fn host_tier(&self, now: Instant, engine: &EngineInfo, facts: &RankFacts) -> Option<HostTier> {
        let host = facts.host?;
        // One reading may fall between two of the engine's counters.
        let used_tokens = host.used_tokens.min(host.total_tokens);
        let figure = |tokens| Some(shim_figure(tokens, now, facts));
        Some(HostTier {
            total_tokens: figure(host.total_tokens),
            used_tokens: figure(used_tokens),
            evictable_tokens: figure(host.evictable_tokens.min(used_tokens)),
            loading_tokens: figure(host.loading_tokens),
            writing_tokens: figure(host.writing_tokens),
            load_tokens_per_s: self.host_load_rate(now, engine, facts.dp_rank),
        })
    }

    fn host_load_rate(&self, now: Instant, engine: &EngineInfo, dp_rank: u32) -> Option<Figure> {
        let measured = self.shims.get(&dp_rank)?.host_load_rate.tokens_per_s();
        if let Some((value, at)) = measured {
            return Some(Figure { value, source: Source::Shim, age_ms: age_ms(now, at) });
        }
        let pool = self.pool(engine, dp_rank)?;
        let token_bytes = pool.bytes.checked_div(pool.tokens).filter(|bytes| *bytes > 0)?;
        let value = (self.limits.host_load_bytes_per_s / token_bytes).max(1);
        Some(Figure { value, source: Source::Setting, age_ms: 0 })
    }

    fn prefill_rate(&self, now: Instant, dp_rank: u32) -> Option<Figure> {
        let (value, at) = self.prefill_rates.get(dp_rank as usize)?.tokens_per_s()?;
        Some(Figure { value, source: Source::Loads, age_ms: age_ms(now, at) })
    }

    /// Estimates how long a step that began at `began_at` may take, from the prompts that waited
    /// then or came since.
    #[must_use]
    pub fn step_time(&self, dp_rank: u32, began_at: Instant, table: &Table) -> Duration {
        let sample = self.rank_sample(dp_rank).map(|(rank, _)| rank);
        let waiting_tokens = sample.and_then(|rank| rank.num_waiting_uncached_tokens).unwrap_or(0);
        // The turns sent just before the step may not have been in its figures.
        let sent_from = began_at.checked_sub(Duration::from_secs(1)).unwrap_or(began_at);
        let tokens = waiting_tokens
            .saturating_add(table.unseen_prompt_tokens(dp_rank, UnseenBy::EngineSince(sent_from)));
        let step_tokens_max = self.engine.as_ref().and_then(|info| info.step_tokens_max);
        let tokens = tokens.min(step_tokens_max.unwrap_or(u64::MAX));
        let rate = self.prefill_rates.get(dp_rank as usize).and_then(TokenRate::tokens_per_s);
        let tokens_per_s = rate.map_or(UNMEASURED_TOKENS_PER_S, |(tokens_per_s, _)| tokens_per_s);
        let step_ms = tokens.saturating_mul(1000) / tokens_per_s.max(1);
        Duration::from_millis(step_ms).min(STEP_TIME_MAX)
    }

    /// The prompt tokens that wait to be computed, also of turns admitted since the load sample.
    fn prefill_backlog(&self, now: Instant, table: &Table, dp_rank: u32) -> Option<Figure> {
        let (rank, at) = self.rank_sample(dp_rank)?;
        let unsampled_tokens = table.unseen_prompt_tokens(dp_rank, UnseenBy::Sample(at));
        let waiting_tokens = rank.num_waiting_uncached_tokens?;
        // SGLang writes its account with its steps, and an idle engine once a second. So a sample
        // may show the prompt of a turn that has ended, and the conversation's next turn would wait
        // for it, or leave its KV.
        let seen_at = self.snapshots.get(&dp_rank).map_or(at, |(_, seen_at)| *seen_at);
        let rate = self.prefill_rates.get(dp_rank as usize).and_then(TokenRate::tokens_per_s);
        let tokens_per_s =
            rate.map_or(PREFILL_TOKENS_PER_S_ASSUMED, |(tokens_per_s, _)| tokens_per_s);
        let since_ms = age_ms(at, seen_at);
        let computed_tokens = tokens_per_s.saturating_mul(since_ms.into()) / 1000;
        let value = waiting_tokens.saturating_sub(computed_tokens).saturating_add(unsampled_tokens);
        Some(Figure { value, source: Source::Loads, age_ms: age_ms(now, at) })
    }

    /// The pool's bytes are only added if the pool is known to be on the devices.
    fn devices(
        &self,
        now: Instant,
        engine: &EngineInfo,
        load: &RankLoad,
        gpus: &Snapshot,
    ) -> Vec<Device> {
        let mut devices = read_devices(now, engine, load.dp_rank, gpus);
        if gpus.holds_pool(load.dp_rank, engine.rows.len())
            && let Some(pool) = self.pool(engine, load.dp_rank)
        {
            devices.iter_mut().for_each(|device| pool.fill_device(load, device));
        }
        devices
    }

    /// The size from the pool's buffers is more exact than the engine's description.
    fn pool(&self, engine: &EngineInfo, dp_rank: u32) -> Option<Pool> {
        let tokens = engine.pool_tokens;
        let from_buffers = self.shims.get(&dp_rank).and_then(|shim| shim.page_bytes).map(|bytes| {
            let pages = tokens / u64::from(engine.facts.page_tokens.max(1));
            (bytes.saturating_mul(pages), Source::Shim)
        });
        let from_description = engine.pool_bytes.get(dp_rank as usize).copied().flatten();
        let (bytes, source) =
            from_buffers.or(from_description.map(|bytes| (bytes, Source::ServerInfo)))?;
        Some(Pool { bytes, tokens, source })
    }
}

/// Falls back to the device that the engine names.
fn read_devices(now: Instant, engine: &EngineInfo, dp_rank: u32, gpus: &Snapshot) -> Vec<Device> {
    let devices = gpus.devices(now, dp_rank);
    if !devices.is_empty() {
        return devices;
    }
    vec![Device { uuid: engine.device.clone(), ..Device::default() }]
}

fn pinned_figure(
    now: Instant,
    facts: Option<&RankFacts>,
    totals: &RankTotals,
    pool_tokens: u64,
) -> Figure {
    match facts {
        // While no request runs, only pinned sessions hold or lock KV. The shim counts a prefix
        // that several sessions share only once.
        Some(facts) if totals.turns_running == 0 && facts.running == 0 => {
            shim_figure(facts.locked_tokens().min(pool_tokens), now, facts)
        }
        _ => Figure {
            value: totals.pinned_tokens.min(pool_tokens),
            source: Source::Usage,
            age_ms: 0,
        },
    }
}

fn shim_figure(value: u64, now: Instant, facts: &RankFacts) -> Figure {
    Figure { value, source: Source::Shim, age_ms: age_ms(now, facts.read_at) }
}

/// A pinned session's figure comes from the engine's usage figures. Others are an estimate: the
/// engine may evict their KV from the radix tree.
#[must_use]
pub fn resident_figure(session: &Session) -> Option<Figure> {
    let source = match session.retention() {
        Retention::Pinned => Source::Usage,
        Retention::Tagged | Retention::None => Source::Estimate,
    };
    Some(Figure { value: session.resident_tokens(), source, age_ms: 0 })
}

fn age_ms(now: Instant, measured_at: Instant) -> u32 {
    u32::try_from(now.saturating_duration_since(measured_at).as_millis()).unwrap_or(u32::MAX)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share of a pool: rounding by a token is nothing, the ratio is checked to be 0..=1"
)]
fn share_of(tokens: u64, ratio: f64) -> u64 {
    (tokens as f64 * ratio) as u64
}

/// Returns at least one row if the share isn't 0.
fn rows_share(rows: u32, ratio: f64) -> u32 {
    let share = u32::try_from(share_of(rows.into(), ratio)).unwrap_or(rows);
    if ratio > 0.0 { share.max(1) } else { 0 }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::{
        guard::Guards,
        session::{ShareSettings, TableSettings},
        shim::HostFacts,
    };

    const POOL_TOKENS: u64 = 1000;
    const PINNED: [Retention; 2] = [Retention::Pinned, Retention::None];
    const LIMITS: Limits = Limits {
        rows_reserve: 1,
        pin_rows_ratio: 0.5,
        pin_budget_ratio: 0.5,
        turns_max: 4,
        host_load_bytes_per_s: 5_000,
    };

    fn engine() -> EngineInfo {
        let mut info = EngineInfo::example("first");
        (info.facts.page_tokens, info.facts.context_tokens) = (10, 100);
        (info.pool_tokens, info.pool_bytes) = (POOL_TOKENS, vec![Some(7)]);
        info
    }

    fn table(capacity: session::EngineCapacity) -> Table {
        let settings = TableSettings {
            incarnation_prefix: "berth-".into(),
            idle_max: Duration::MAX,
            demote_idle: Duration::MAX,
            turns_queued_per_session_max: 0,
            turns_queued_max: 0,
            queue_wait_max: Duration::MAX,
            stuck_after: Duration::MAX,
            auto_pin: false,
            answer_tokens_min: 0,
            shim_requests_max: 1,
            shares: ShareSettings {
                sessions_max: 1,
                principal_sessions_max: 1,
                idle_cap: Duration::MAX,
                turns_milli: 1000,
            },
            guards: Guards::default(),
        };
        Table::new(settings, capacity)
    }

    fn facts(read_at: Instant) -> RankFacts {
        RankFacts {
            dp_rank: 0,
            read_at,
            available_tokens: 500,
            evictable_tokens: 200,
            protected_tokens: 170,
            held_tokens: 30,
            uncached_tokens: 100,
            running: 0,
            waiting: 0,
            pool_tokens: POOL_TOKENS,
            rows_total: 0,
            rows_free: 0,
            events_lost: 0,
            recounts: 0,
            samples: 0,
            samples_ns: 0,
            weight_changes: 0,
            has_old_kv: false,
            host: None,
        }
    }

    /// Returns what the ledger reports of rank 0: the source of the used tokens, and the pinned
    /// tokens.
    fn reported(ledger: &Ledger, table: &Table, now: Instant) -> (Option<Source>, Option<u64>) {
        let gpus = Snapshot::without_devices(now);
        let report = ledger.report(now, table, &gpus, Duration::ZERO, AgentHealth::default());
        let load = &report.ranks[0];
        let used_tokens = load.pool_used_tokens.map(|figure| figure.source);
        (used_tokens, load.pinned_tokens.map(|figure| figure.value))
    }

    #[test]
    fn a_prompt_is_computed_while_the_engine_s_account_of_it_stands_still() {
        let now = service::clock::now();
        let mut ledger = Ledger::new(LIMITS);
        let table = table(ledger.set_engine(&engine(), PINNED.to_vec()));
        let mut backlog = |made_s: f64, after_ms: u64| {
            let at = now + Duration::from_millis(after_ms);
            let rank = RankSample {
                dp_rank: 0,
                num_running_reqs: 1,
                num_waiting_reqs: 0,
                num_used_tokens: 0,
                max_total_num_tokens: POOL_TOKENS,
                total_prefill_uncached_tokens: 0,
                total_prefill_busy_us: None,
                num_waiting_uncached_tokens: Some(3_000),
                timestamp: made_s,
            };
            let sample = LoadSample { at, ranks: vec![rank], connection: None, is_paused: false };
            ledger.record_sample(sample);
            ledger.prefill_backlog(at, &table, 0).unwrap().value
        };
        assert_eq!([backlog(1.0, 0), backlog(1.0, 100), backlog(1.0, 500)], [3_000, 2_000, 0]);
        assert_eq!(backlog(2.0, 600), 3_000, "a new account");
        assert_eq!([backlog(0.0, 700), backlog(0.0, 800)], [3_000; 2], "its age is unknown");
    }

    #[test]
    fn a_host_tier_is_counted_and_a_new_engine_process_has_none_yet() {
        let now = service::clock::now();
        let mut ledger = Ledger::new(LIMITS);
        ledger.add_shim(0, Some(50));
        let table = table(ledger.set_engine(&engine(), PINNED.to_vec()));
        let tier = |ledger: &Ledger| {
            let gpus = Snapshot::without_devices(now);
            let report = ledger.report(now, &table, &gpus, Duration::ZERO, AgentHealth::default());
            report.ranks[0].host
        };
        assert_eq!(tier(&ledger), None);
        let host = |loaded_tokens, loads_us| HostFacts {
            total_tokens: 4000,
            used_tokens: 3000,
            evictable_tokens: 3500,
            loading_tokens: 20,
            writing_tokens: 10,
            loaded_tokens,
            loads_us,
        };
        ledger.record_facts(RankFacts { host: Some(host(0, 0)), ..facts(now) });
        let shown = tier(&ledger).unwrap();
        let value = |figure: Option<Figure>| figure.map(|figure| figure.value);
        assert_eq!(value(shown.total_tokens), Some(4000));
        assert_eq!(value(shown.evictable_tokens), Some(3000), "at most what is used");
        let rate = |tier: Option<HostTier>| {
            let rate = tier?.load_tokens_per_s?;
            Some((rate.value, rate.source))
        };
        // Pages of 10 tokens have 50 bytes, and the setting is 5,000 bytes a second.
        assert_eq!(rate(tier(&ledger)), Some((1000, Source::Setting)));
        for loads in 1..=3 {
            let host = host(2_000 * loads, 500_000 * loads);
            ledger.record_facts(RankFacts { host: Some(host), ..facts(now) });
        }
        assert_eq!(rate(tier(&ledger)), Some((4000, Source::Shim)));
        let _ = ledger.set_engine(&engine(), PINNED.to_vec());
        assert_eq!(tier(&ledger), None, "its host memory is gone with it");
        ledger.record_facts(RankFacts { host: Some(host(0, 0)), ..facts(now) });
        assert_eq!(rate(tier(&ledger)), Some((1000, Source::Setting)));
    }

    #[test]
    fn a_shims_figures_are_preferred_and_a_new_engine_process_has_none_yet() {
        let now = service::clock::now();
        let mut ledger = Ledger::new(LIMITS);
        // A shim may connect before the agent reaches the engine.
        ledger.add_shim(0, Some(3));
        let table = table(ledger.set_engine(&engine(), PINNED.to_vec()));
        assert_eq!(reported(&ledger, &table, now), (None, Some(0)));
        let facts = facts(now);
        ledger.record_facts(facts);
        assert_eq!(reported(&ledger, &table, now), (Some(Source::Shim), Some(200)));
        ledger.record_facts(RankFacts { running: 1, ..facts });
        let own_account = Some(0);
        assert_eq!(reported(&ledger, &table, now), (Some(Source::Shim), own_account));
        let _ = ledger.set_engine(&engine(), PINNED.to_vec());
        assert_eq!(reported(&ledger, &table, now), (None, own_account));
        let from_buffers = Pool { bytes: 300, tokens: POOL_TOKENS, source: Source::Shim };
        assert_eq!(ledger.pool(&engine(), 0), Some(from_buffers), "the shim is still there");
        ledger.remove_shim(0);
        let described = Pool { bytes: 7, tokens: POOL_TOKENS, source: Source::ServerInfo };
        assert_eq!(ledger.pool(&engine(), 0), Some(described));
    }
}
