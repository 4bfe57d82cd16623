//! Keeps the figures of each rank's KV pool, and makes the load reports to routers from them.
//!
//! The figures come from four sources: the engine's description, the engine's load samples, the
//! *shim* (Berth's part inside the engine), and the session table. A rank is one data-parallel (DP)
//! rank of the engine, with a pool of its own. A session is a chain of turns (one request and its
//! answer each); a *pinned* session keeps its KV and a request row of the engine between its turns.
//! Each reported [`Figure`] names its source and its age.
//!
//! `owner` passes the samples and figures in, and sends the reports. The child `prefill` measures
//! the prefill rate. This module admits no turns (`session::table` does), does no I/O and reads no
//! clock.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use proto::load::{Device, Figure, LoadReport, Rank, RankLoad, Retention, Source};

use self::prefill::PrefillRate;
use crate::{
    engine::{EngineInfo, LoadSample, RankSample},
    gpu::{kv::Pool, tracker::Snapshot},
    session::{self, RankCapacity, RankTotals, Session, Table},
};

pub mod prefill;

/// The maximum number of DP ranks of one engine. Queues get their size from it, because they are
/// created before the agent has reached the engine.
const RANKS_MAX: u32 = 256;

/// The limits for admitting turns and sessions.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The number of request rows of each rank that pinned sessions leave free.
    pub rows_reserve: u32,
    /// The share of a rank's pool that pinned sessions may hold, 0 to 1.
    pub pin_budget_ratio: f64,
    /// The maximum number of turns inside the engine, per rank.
    pub turns_max: u32,
}

impl Limits {
    /// Returns the maximum number of turns inside the engine, over all ranks.
    #[must_use]
    pub fn turns_max_over_ranks(&self) -> usize {
        self.turns_max as usize * RANKS_MAX as usize
    }
}

/// The figures of one engine's pools, by rank.
#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    /// The request rows and the pool of each rank, from the engine's description.
    rank_sizes: Vec<RankSize>,
    /// The device name that the engine reports.
    device_name: String,
    /// For each rank: the bytes of its pool on each of its devices, as the engine reports.
    pool_bytes: Vec<Option<u64>>,
    page_tokens: u32,
    /// By rank: the bytes of a page on each of the rank's devices. The shim reads them from the
    /// pool's buffers.
    page_bytes: HashMap<u32, u64>,
    /// The newest load sample of the engine; `None` until there is one.
    sample: Option<LoadSample>,
    /// The prefill rate of each rank.
    prefill_rates: Vec<PrefillRate>,
    /// The shim's figures, by rank, for ranks that have a connected shim.
    shim_facts: HashMap<u32, PoolFacts>,
}

#[derive(Debug, Clone, Copy)]
struct RankSize {
    rows: u32,
    pool_tokens: u64,
}

/// A rank's pool and requests as the shim reads them, exact at one scheduler step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolFacts {
    /// Free tokens.
    pub available_tokens: u64,
    /// Tokens in the radix tree that the engine may evict.
    pub evictable_tokens: u64,
    /// Tokens in the radix tree that running requests or sessions lock.
    pub protected_tokens: u64,
    /// Tokens that sessions hold outside the radix tree.
    pub held_tokens: u64,
    /// Tokens that running requests hold and that are not in the radix tree yet.
    pub uncached_tokens: u64,
    /// The number of requests in the engine's running batch.
    pub running_requests: u64,
    /// The number of requests in the engine's queue.
    pub waiting_requests: u64,
    /// When the figures were read.
    pub read_at: Instant,
}

/// Whether the agent and its engine work, as load reports say it.
#[derive(Debug, Clone, Default)]
pub struct AgentHealth {
    /// Why the engine can't take turns; `None` if it can.
    pub unhealthy_reason: Option<String>,
    /// Whether the agent takes no new sessions.
    pub is_draining: bool,
    /// Why only a restart of the engine helps; `None` if none is needed.
    pub restart_reason: Option<String>,
}

impl Ledger {
    /// Returns a ledger without figures, for an engine that is not known yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            rank_sizes: vec![],
            device_name: String::new(),
            pool_bytes: vec![],
            page_tokens: 1,
            page_bytes: HashMap::new(),
            sample: None,
            prefill_rates: vec![],
            shim_facts: HashMap::new(),
        }
    }

    /// Sets the description of an engine process, and forgets the figures of the process before.
    /// Returns the engine's capacity for the session table.
    pub fn set_engine(&mut self, info: &EngineInfo) -> session::EngineCapacity {
        let pool_tokens = info.pool_tokens;
        self.rank_sizes = info.rows.iter().map(|&rows| RankSize { rows, pool_tokens }).collect();
        self.rank_sizes.truncate(RANKS_MAX as usize);
        self.device_name.clone_from(&info.device);
        self.pool_bytes.clone_from(&info.pool_bytes);
        self.page_tokens = info.facts.page_tokens.max(1);
        self.sample = None;
        self.prefill_rates = vec![PrefillRate::default(); self.rank_sizes.len()];
        self.shim_facts.clear();
        let ranks = self.rank_sizes.iter().map(|&RankSize { rows, pool_tokens }| RankCapacity {
            rows,
            rows_reserve: self.limits.rows_reserve,
            pool_tokens,
            pin_tokens_max: share_of(pool_tokens, self.limits.pin_budget_ratio),
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
    pub fn record_sample(&mut self, sample: LoadSample) {
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
        (0..)
            .zip(&self.rank_sizes)
            .map(|(dp_rank, &RankSize { rows, pool_tokens })| Rank {
                dp_rank,
                pool_tokens,
                rows,
                devices: self
                    .devices(now, dp_rank, gpus)
                    .into_iter()
                    .map(fixed_properties)
                    .collect(),
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
            let facts =
                self.shim_facts.get(&dp_rank).map(|facts| (facts, age_ms(now, facts.read_at)));
            let totals = table.totals(dp_rank);
            let mut load = self.rank_load(dp_rank, size, sample, facts, &totals);
            self.add_prefill_figures(now, table, &mut load);
            load.devices = self.devices(now, dp_rank, gpus);
            self.add_pool_bytes(&mut load, size.pool_tokens, gpus);
            load
        });
        LoadReport {
            interval,
            ranks: ranks.collect(),
            unhealthy: health.unhealthy_reason,
            // An engine that needs a restart holds rows or pages that it will never free. So
            // routers must open no new sessions here, as if the agent drained.
            draining: health.is_draining || health.restart_reason.is_some(),
            restart_required: health.restart_reason,
        }
    }

    /// Returns the load of a rank. `sample` and `facts` come with their age in milliseconds.
    fn rank_load(
        &self,
        dp_rank: u32,
        RankSize { rows, pool_tokens }: RankSize,
        sample: Option<(&RankSample, u32)>,
        facts: Option<(&PoolFacts, u32)>,
        totals: &RankTotals,
    ) -> RankLoad {
        let figure = |value, source, age_ms| Figure { value, source, age_ms };
        let from_shim = |value: fn(&PoolFacts) -> u64| {
            facts.map(|(facts, age)| figure(value(facts).min(pool_tokens), Source::Shim, age))
        };
        let from_sample = |value: fn(&RankSample) -> u64| {
            sample.map(|(rank, age)| figure(value(rank), Source::Loads, age))
        };
        let figure_now = |value, source| Some(figure(value, source, 0));
        let pinned = match facts {
            // While no request runs, only pinned sessions hold or lock KV. The shim counts a prefix
            // that several sessions share only once.
            Some((facts, age_ms)) if totals.turns_running == 0 && facts.running_requests == 0 => {
                let value =
                    facts.protected_tokens.saturating_add(facts.held_tokens).min(pool_tokens);
                Figure { value, source: Source::Shim, age_ms }
            }
            _ => figure(totals.pinned_tokens.min(pool_tokens), Source::Usage, 0),
        };
        // Foreign sessions are those in the engine that this agent did not open.
        let foreign_tokens = totals.foreign_tokens.min(pinned.value);
        let foreign_source = if facts.is_some() { Source::Shim } else { Source::Estimate };
        let tree_tokens = totals.tree_tokens_estimate.min(pool_tokens - pinned.value);
        RankLoad {
            dp_rank,
            turns_running: totals.turns_running,
            turns_running_max: self.limits.turns_max,
            requests_running: from_shim(|facts| facts.running_requests)
                .or_else(|| from_sample(|rank| rank.num_running_reqs)),
            requests_waiting: from_shim(|facts| facts.waiting_requests)
                .or_else(|| from_sample(|rank| rank.num_waiting_reqs)),
            pool_used_tokens: from_shim(|facts| {
                let locked = facts.protected_tokens.saturating_add(facts.held_tokens);
                locked.saturating_add(facts.uncached_tokens)
            })
            .or_else(|| from_sample(|rank| rank.num_used_tokens.min(rank.max_total_num_tokens))),
            pool_total_tokens: figure_now(pool_tokens, Source::ServerInfo),
            pinned_tokens: Some(pinned),
            resident_tokens_estimate: figure_now(tree_tokens, Source::Estimate),
            rows_held: figure_now(u64::from(totals.rows_held.min(rows)), Source::Ledger),
            rows_total: figure_now(u64::from(rows), Source::ServerInfo),
            sessions: totals.sessions,
            devices: vec![],
            turns_queued: totals.turns_queued,
            pool_available_tokens: from_shim(|facts| facts.available_tokens),
            pool_evictable_tokens: from_shim(|facts| facts.evictable_tokens),
            foreign_tokens: (foreign_tokens > 0 || facts.is_some()).then_some(Figure {
                value: foreign_tokens,
                source: foreign_source,
                age_ms: 0,
            }),
            // The owner task sets this from the newest page audit.
            pages: None,
            // `add_prefill_figures` sets these two.
            prefill_tokens_per_s: None,
            prefill_backlog_tokens: None,
            // The owner task sets this from the queues of staged prefill.
            staged_prefill: None,
        }
    }

    /// Adds the rank's prefill rate, and its backlog: the prompt tokens that wait to be computed.
    /// The backlog also counts turns that the agent has admitted since the load sample.
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
        let engine_backlog = rank.and_then(|rank| rank.num_waiting_uncached_tokens);
        load.prefill_backlog_tokens = engine_backlog.map(|tokens| Figure {
            value: tokens.saturating_add(table.unsampled_prompt_tokens(load.dp_rank, sample.at)),
            source: Source::Loads,
            age_ms: age_ms(now, sample.at),
        });
    }

    /// Returns the rank's devices. If no GPU was read for the rank, this is the device that the
    /// engine names.
    fn devices(&self, now: Instant, dp_rank: u32, gpus: &Snapshot) -> Vec<Device> {
        let read_devices = gpus.devices(now, dp_rank);
        if !read_devices.is_empty() {
            return read_devices;
        }
        vec![Device { uuid: self.device_name.clone(), ..Device::default() }]
    }

    /// Adds the pool's bytes to each of the rank's devices, if the pool is known to be on them.
    fn add_pool_bytes(&self, load: &mut RankLoad, pool_tokens: u64, gpus: &Snapshot) {
        let from_buffers = self.page_bytes.get(&load.dp_rank).map(|bytes| {
            let pages = pool_tokens / u64::from(self.page_tokens);
            (bytes.saturating_mul(pages), Source::Shim)
        });
        let from_description = self.pool_bytes.get(load.dp_rank as usize).copied().flatten();
        let pool_bytes = from_buffers.or(from_description.map(|bytes| (bytes, Source::ServerInfo)));
        let is_on_gpus = gpus.holds_pool(load.dp_rank, self.rank_sizes.len());
        let Some((bytes, source)) = pool_bytes.filter(|_| is_on_gpus) else { return };
        let pool = Pool { bytes, tokens: pool_tokens, source };
        let mut devices = std::mem::take(&mut load.devices);
        devices.iter_mut().for_each(|device| pool.fill_device(load, device));
        load.devices = devices;
    }
}

/// Returns the tokens that a session holds in the pool. For a pinned session the engine's usage
/// figures tell them. For other sessions they are an estimate, because their KV is in the radix
/// tree, where the engine may evict it.
#[must_use]
pub fn resident_figure(session: &Session) -> Option<Figure> {
    let source = match session.retention {
        Retention::Pinned => Source::Usage,
        Retention::Tagged | Retention::None => Source::Estimate,
    };
    Some(Figure { value: session.resident_tokens, source, age_ms: 0 })
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
