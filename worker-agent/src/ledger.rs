//! The account of the KV pool, per rank. Pure.
//!
//! It combines the engine's figures with the usage fields of turns. Each figure names its source.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::load::{Device, Figure, LoadReport, Rank, RankLoad, Retention, Source};

use self::prefill::PrefillRate;
use crate::{
    engine::{Info, RankSample, Sample},
    gpu::{fleet::Snapshot, kv::Pool},
    session::{self, RankCapacity, RankTotals, Session, Table},
};

pub mod prefill;

/// The maximum number of DP ranks of one engine. Sizes the queues before the engine is reached.
const RANKS_MAX: u32 = 256;

/// The limits for admitting turns and sessions.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Rows of each rank that pinned sessions never take.
    pub rows_reserve: u32,
    /// The share of a rank's pool that pinned sessions may hold, 0 to 1.
    pub pin_budget_ratio: f64,
    /// The maximum number of turns inside the engine, per rank.
    pub turns_max: u32,
}

impl Limits {
    /// Returns the maximum number of turns inside the engine, over all ranks.
    #[must_use]
    pub fn turns_everywhere_max(&self) -> usize {
        self.turns_max as usize * RANKS_MAX as usize
    }
}

/// The account of one engine's pools.
#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    /// The rows and the pool tokens of each rank, from the engine's description.
    rank_sizes: Vec<(u32, u64)>,
    /// The device name that the engine reports.
    device: String,
    /// Bytes of each rank's pool on each of its devices, as the engine reports.
    pool_bytes: Vec<Option<u64>>,
    page_tokens: u32,
    /// Bytes of a page on each of a rank's devices, from the pool's buffers, by rank. Reported by
    /// the shim.
    page_bytes: HashMap<u32, u64>,
    sample: Option<Sample>,
    /// The prefill rate of each rank.
    prefill_rates: Vec<PrefillRate>,
    /// The shim's figures, for ranks that have a shim.
    shim_facts: HashMap<u32, PoolFacts>,
}

/// A rank's pool as the shim reads it, exact at one scheduler step. In tokens, unless noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolFacts {
    /// Free.
    pub available: u64,
    /// Cached and evictable.
    pub evictable: u64,
    /// Cached, and locked by running requests or sessions.
    pub protected: u64,
    /// Held by sessions outside the tree.
    pub held: u64,
    /// Held by running requests and not in the tree yet.
    pub uncached: u64,
    /// The number of requests in the running batch.
    pub running: u64,
    /// The number of requests in the queue.
    pub waiting: u64,
    /// When the figures were read.
    pub at: Instant,
}

/// The state of the agent and its engine, apart from what they hold.
#[derive(Debug, Clone, Default)]
pub struct AgentHealth {
    /// Why the engine can't take turns; `None` if it can.
    pub unhealthy: Option<String>,
    /// Whether the agent takes no new sessions.
    pub draining: bool,
    /// Why only a restart of the engine helps; `None` if none is needed.
    pub restart_required: Option<String>,
}

impl Ledger {
    /// Creates an account of an unknown engine.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            rank_sizes: vec![],
            device: String::new(),
            pool_bytes: vec![],
            page_tokens: 1,
            page_bytes: HashMap::new(),
            sample: None,
            prefill_rates: vec![],
            shim_facts: HashMap::new(),
        }
    }

    /// Sets the description of an engine process and forgets the previous process. Returns what the
    /// session table needs of it.
    pub fn set_engine(&mut self, info: &Info) -> session::EngineCapacity {
        self.rank_sizes = info.rows.iter().map(|&rows| (rows, info.pool_tokens)).collect();
        self.rank_sizes.truncate(RANKS_MAX as usize);
        self.device.clone_from(&info.device);
        self.pool_bytes.clone_from(&info.pool_bytes);
        self.page_tokens = info.facts.page_tokens.max(1);
        self.sample = None;
        self.prefill_rates = vec![PrefillRate::default(); self.rank_sizes.len()];
        self.shim_facts.clear();
        let ranks = self.rank_sizes.iter().map(|&(rows, tokens)| RankCapacity {
            rows,
            rows_reserve: self.limits.rows_reserve,
            pool_tokens: tokens,
            pin_tokens_max: share_of(tokens, self.limits.pin_budget_ratio),
            turns_max: self.limits.turns_max,
        });
        session::EngineCapacity {
            ranks: ranks.collect(),
            page_tokens: u64::from(info.facts.page_tokens),
            context_tokens: u64::from(info.facts.context_tokens),
            retentions: info.retentions(),
        }
    }

    /// Takes a load sample of the engine.
    pub fn record_sample(&mut self, sample: Sample) {
        for rank in &sample.ranks {
            let rate = self.prefill_rates.get_mut(rank.dp_rank as usize);
            if let (Some(rate), Some(busy_us)) = (rate, rank.total_prefill_busy_us) {
                rate.record_sample(sample.at, rank.total_prefill_uncached_tokens, busy_us);
            }
        }
        self.sample = Some(sample);
    }

    /// Sets a rank's figures from the shim; `None` when the shim has disconnected.
    pub fn set_shim_facts(&mut self, dp_rank: u32, facts: Option<PoolFacts>) {
        match facts {
            Some(facts) => drop(self.shim_facts.insert(dp_rank, facts)),
            None => drop(self.shim_facts.remove(&dp_rank)),
        }
    }

    /// Sets the bytes of a rank's page as its shim reports them; `None` if unknown.
    pub fn set_page_bytes(&mut self, dp_rank: u32, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => drop(self.page_bytes.insert(dp_rank, bytes)),
            None => drop(self.page_bytes.remove(&dp_rank)),
        }
    }

    /// Returns the description of the ranks for routers, including device names.
    #[must_use]
    pub fn describe_ranks(&self, now: Instant, gpus: &Snapshot) -> Vec<Rank> {
        let identity = |device: Device| Device {
            uuid: device.uuid,
            name: device.name,
            index: device.index,
            pci_address: device.pci_address,
            parent_uuid: device.parent_uuid,
            numa_node: device.numa_node,
            memory_total_bytes: device.memory_total_bytes,
            ..Device::default()
        };
        (0..)
            .zip(&self.rank_sizes)
            .map(|(dp_rank, &(rows, pool_tokens))| Rank {
                dp_rank,
                pool_tokens,
                rows,
                devices: self.devices(now, dp_rank, gpus).into_iter().map(identity).collect(),
            })
            .collect()
    }

    /// Returns the load report of all ranks.
    #[must_use]
    pub fn report(
        &self,
        now: Instant,
        table: &Table,
        gpus: &Snapshot,
        interval: Duration,
        health: AgentHealth,
    ) -> LoadReport {
        let ranks = (0..).zip(&self.rank_sizes).map(|(dp_rank, &size)| {
            let sample = self.sample.as_ref().and_then(|sample| {
                let rank = sample.ranks.iter().find(|rank| rank.dp_rank == dp_rank)?;
                Some((rank, age_ms(now, sample.at)))
            });
            let facts = self.shim_facts.get(&dp_rank).map(|facts| (facts, age_ms(now, facts.at)));
            let totals = table.totals(dp_rank);
            let mut load = self.rank_load(dp_rank, size, sample, facts, &totals);
            self.add_prefill_figures(now, table, &mut load);
            load.devices = self.devices(now, dp_rank, gpus);
            self.add_pool_bytes(&mut load, size.1, gpus);
            load
        });
        LoadReport {
            interval,
            ranks: ranks.collect(),
            unhealthy: health.unhealthy,
            // Rows and pages that the engine will never free reduce what new sessions could get.
            draining: health.draining || health.restart_required.is_some(),
            restart_required: health.restart_required,
        }
    }

    fn rank_load(
        &self,
        dp_rank: u32,
        (rows, pool): (u32, u64),
        sample: Option<(&RankSample, u32)>,
        facts: Option<(&PoolFacts, u32)>,
        totals: &RankTotals,
    ) -> RankLoad {
        let shim = |value: fn(&PoolFacts) -> u64| {
            facts.map(|(facts, age_ms)| Figure {
                value: value(facts).min(pool),
                source: Source::Shim,
                age_ms,
            })
        };
        let loads = |value: fn(&RankSample) -> u64| {
            sample.map(|(rank, age_ms)| Figure {
                value: value(rank),
                source: Source::Loads,
                age_ms,
            })
        };
        let fresh = |value, source| Some(Figure { value, source, age_ms: 0 });
        let pinned = match facts {
            // With nothing running, protected and held KV is pinned; shared prefixes count once.
            Some((facts, age_ms)) if totals.turns_running == 0 && facts.running == 0 => {
                let value = facts.protected.saturating_add(facts.held).min(pool);
                Figure { value, source: Source::Shim, age_ms }
            }
            _ => Figure { value: totals.pinned_tokens.min(pool), source: Source::Usage, age_ms: 0 },
        };
        let foreign = totals.foreign_tokens.min(pinned.value);
        let foreign_from = if facts.is_some() { Source::Shim } else { Source::Estimate };
        let pinned_tokens = pinned.value;
        let estimate = totals.tree_tokens_estimate.min(pool - pinned_tokens);
        RankLoad {
            dp_rank,
            turns_running: totals.turns_running,
            turns_running_max: self.limits.turns_max,
            requests_running: shim(|facts| facts.running)
                .or_else(|| loads(|rank| rank.num_running_reqs)),
            requests_waiting: shim(|facts| facts.waiting)
                .or_else(|| loads(|rank| rank.num_waiting_reqs)),
            pool_used_tokens: shim(|facts| {
                let locked = facts.protected.saturating_add(facts.held);
                locked.saturating_add(facts.uncached)
            })
            .or_else(|| loads(|rank| rank.num_used_tokens.min(rank.max_total_num_tokens))),
            pool_total_tokens: fresh(pool, Source::ServerInfo),
            pinned_tokens: Some(pinned),
            resident_tokens_estimate: fresh(estimate, Source::Estimate),
            rows_held: fresh(u64::from(totals.rows_held.min(rows)), Source::Ledger),
            rows_total: fresh(u64::from(rows), Source::ServerInfo),
            sessions: totals.sessions,
            devices: vec![],
            turns_queued: totals.turns_queued,
            pool_available_tokens: shim(|facts| facts.available),
            pool_evictable_tokens: shim(|facts| facts.evictable),
            foreign_tokens: (foreign > 0 || facts.is_some()).then_some(Figure {
                value: foreign,
                source: foreign_from,
                age_ms: 0,
            }),
            // Set by the page audit, by `add_prefill_figures`, and by staged prefill.
            pages: None,
            prefill_tokens_per_s: None,
            prefill_backlog_tokens: None,
            staged_prefill: None,
        }
    }

    /// Adds the rank's prefill rate and its backlog of prompt tokens.
    fn add_prefill_figures(&self, now: Instant, table: &Table, load: &mut RankLoad) {
        let rate =
            self.prefill_rates.get(load.dp_rank as usize).and_then(PrefillRate::tokens_per_s);
        load.prefill_tokens_per_s = rate.map(|(value, at)| Figure {
            value,
            source: Source::Loads,
            age_ms: age_ms(now, at),
        });
        let Some(sample) = &self.sample else { return };
        let rank = sample.ranks.iter().find(|rank| rank.dp_rank == load.dp_rank);
        let waiting = rank.and_then(|rank| rank.num_waiting_uncached_tokens);
        load.prefill_backlog_tokens = waiting.map(|waiting| Figure {
            value: waiting.saturating_add(table.unsampled_prompt_tokens(load.dp_rank, sample.at)),
            source: Source::Loads,
            age_ms: age_ms(now, sample.at),
        });
    }

    /// Returns the rank's devices. Without GPU readings it is the device that the engine names.
    fn devices(&self, now: Instant, dp_rank: u32, gpus: &Snapshot) -> Vec<Device> {
        let read_devices = gpus.devices(now, dp_rank);
        if !read_devices.is_empty() {
            return read_devices;
        }
        vec![Device { uuid: self.device.clone(), ..Device::default() }]
    }

    /// Adds the pool's bytes to each device, if the pool is known to be on it.
    fn add_pool_bytes(&self, load: &mut RankLoad, tokens: u64, gpus: &Snapshot) {
        let from_buffers = self.page_bytes.get(&load.dp_rank).map(|bytes| {
            let pages = tokens / u64::from(self.page_tokens);
            (bytes.saturating_mul(pages), Source::Shim)
        });
        let from_description = self.pool_bytes.get(load.dp_rank as usize).copied().flatten();
        let pool_bytes = from_buffers.or(from_description.map(|bytes| (bytes, Source::ServerInfo)));
        let is_on_gpus = gpus.holds_pool(load.dp_rank, self.rank_sizes.len());
        let Some((bytes, source)) = pool_bytes.filter(|_| is_on_gpus) else { return };
        let pool = Pool { bytes, tokens, source };
        let mut devices = std::mem::take(&mut load.devices);
        devices.iter_mut().for_each(|device| pool.fill_device(load, device));
        load.devices = devices;
    }
}

/// Returns the tokens that a session holds. The source follows from its retention.
#[must_use]
pub fn resident_figure(session: &Session) -> Option<Figure> {
    let source = match session.retention {
        Retention::Pinned => Source::Usage,
        Retention::Tagged | Retention::None => Source::Estimate,
    };
    Some(Figure { value: session.resident_tokens, source, age_ms: 0 })
}

fn age_ms(now: Instant, at: Instant) -> u32 {
    u32::try_from(now.saturating_duration_since(at).as_millis()).unwrap_or(u32::MAX)
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
