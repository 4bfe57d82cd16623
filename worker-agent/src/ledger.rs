//! The account of the KV pool, per rank: what the engine says, what its turns' usage fields say,
//! and what follows from both; each figure with its source. Pure.

use std::time::{Duration, Instant};

use proto::load::{Device, Figure, LoadReport, Rank, RankLoad, Retention, Source};

use crate::{
    engine::{Info, RankSample, Sample},
    session::{self, Capacity, Session, Table, Totals},
};

/// DP ranks one engine may have, for sizing queues before it was reached.
const RANKS_MAX: u32 = 256;

/// What the agent lets in.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Rows per rank that pinned sessions never take.
    pub rows_reserve: u32,
    /// Share of a rank's pool that pinned sessions may hold.
    pub pin_budget_ratio: f64,
    /// Turns inside the engine, per rank.
    pub turns_max: u32,
}

impl Limits {
    /// Turns inside the engine on all ranks together.
    #[must_use]
    pub fn turns_everywhere_max(&self) -> usize {
        self.turns_max as usize * RANKS_MAX as usize
    }
}

/// The pool's account.
#[derive(Debug)]
pub struct Ledger {
    limits: Limits,
    /// Rows and tokens of each rank, from the engine's facts.
    sizes: Vec<(u32, u64)>,
    /// The engine's own word for its device.
    device: String,
    sample: Option<Sample>,
}

impl Ledger {
    /// Nothing known yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, sizes: vec![], device: String::new(), sample: None }
    }

    /// Takes the facts of an engine instance, forgets what the last one said, and answers with what
    /// the session table needs.
    pub fn engine(&mut self, info: &Info) -> session::Engine {
        self.sizes = info.rows.iter().map(|&rows| (rows, info.pool_tokens)).collect();
        self.sizes.truncate(RANKS_MAX as usize);
        self.device.clone_from(&info.device);
        self.sample = None;
        let ranks = self.sizes.iter().map(|&(rows, tokens)| Capacity {
            rows,
            rows_reserve: self.limits.rows_reserve,
            pin_tokens_max: share(tokens, self.limits.pin_budget_ratio),
            turns_max: self.limits.turns_max,
        });
        session::Engine {
            ranks: ranks.collect(),
            page_tokens: u64::from(info.facts.page_tokens),
            retentions: info.retentions(),
        }
    }

    /// Takes a load sample.
    pub fn sampled(&mut self, sample: Sample) {
        self.sample = Some(sample);
    }

    /// The ranks as described to routers.
    #[must_use]
    pub fn ranks(&self, devices: &[Device]) -> Vec<Rank> {
        (0..)
            .zip(&self.sizes)
            .map(|(dp_rank, &(rows, pool_tokens))| Rank {
                dp_rank,
                pool_tokens,
                rows,
                devices: self.devices(devices),
            })
            .collect()
    }

    /// What the ranks hold now.
    #[must_use]
    pub fn report(
        &self,
        now: Instant,
        table: &Table,
        devices: &[Device],
        interval: Duration,
        down: &Option<String>,
        draining: bool,
    ) -> LoadReport {
        let ranks = (0..).zip(&self.sizes).map(|(dp_rank, &size)| {
            let sample = self.sample.as_ref().and_then(|sample| {
                let rank = sample.ranks.iter().find(|rank| rank.dp_rank == dp_rank)?;
                Some((rank, age_ms(now, sample.at)))
            });
            self.rank(dp_rank, size, sample, &table.totals(dp_rank), devices)
        });
        LoadReport { interval, ranks: ranks.collect(), unhealthy: down.clone(), draining }
    }

    fn rank(
        &self,
        dp_rank: u32,
        (rows, pool): (u32, u64),
        sample: Option<(&RankSample, u32)>,
        totals: &Totals,
        devices: &[Device],
    ) -> RankLoad {
        let loads = |value: fn(&RankSample) -> u64| {
            sample.map(|(rank, age_ms)| Figure {
                value: value(rank),
                source: Source::Loads,
                age_ms,
            })
        };
        let ours = |value, source| Some(Figure { value, source, age_ms: 0 });
        let pinned = totals.pinned_tokens.min(pool);
        let estimate = totals.estimate_tokens.min(pool - pinned);
        RankLoad {
            dp_rank,
            turns_running: totals.turns_running,
            turns_running_max: self.limits.turns_max,
            requests_running: loads(|rank| rank.num_running_reqs),
            requests_waiting: loads(|rank| rank.num_waiting_reqs),
            pool_used_tokens: loads(|rank| rank.num_used_tokens.min(rank.max_total_num_tokens)),
            pool_total_tokens: ours(pool, Source::ServerInfo),
            pinned_tokens: ours(pinned, Source::Usage),
            resident_tokens_estimate: ours(estimate, Source::Estimate),
            rows_held: ours(u64::from(totals.rows_held.min(rows)), Source::Ledger),
            rows_total: ours(u64::from(rows), Source::ServerInfo),
            sessions: totals.sessions,
            devices: self.devices(devices),
        }
    }

    /// A worker always has a device: without readings, the one that the engine names.
    fn devices(&self, read: &[Device]) -> Vec<Device> {
        if !read.is_empty() {
            return read.to_vec();
        }
        vec![Device {
            uuid: self.device.clone(),
            name: String::new(),
            index: None,
            memory_total_bytes: None,
            memory_used_bytes: None,
            utilization_percent: None,
        }]
    }
}

/// What a session holds, with the source that its retention allows.
#[must_use]
pub fn resident(session: &Session) -> Option<Figure> {
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
fn share(tokens: u64, ratio: f64) -> u64 {
    (tokens as f64 * ratio) as u64
}
