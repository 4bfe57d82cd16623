//! What a seed decides before the run: the engine, the agent's settings, the faults.

use std::time::Duration;

use contract::load::Retention;
use fastrand::Rng;
use worker_agent::{
    guard::Guards,
    session::{ANSWER_TOKENS_MIN, EngineCapacity, RankCapacity, ShareSettings, TableSettings},
};

use engine_sim::core::{CoreConfig, WritePolicy};

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) ranks: u32,
    pub(super) core: CoreConfig,
    pub(super) rows_reserve: u32,
    pub(super) pin_rows_max: u32,
    pub(super) pin_tokens_max: u64,
    pub(super) turns_max: u32,
    pub(super) table_settings: TableSettings,
    /// Whether the shim reports which sessions the engine holds.
    pub(super) shim: bool,
    /// Whether the shim frees idle sessions' KV when asked.
    pub(super) demotes: bool,
    /// Whether the shim trims full histories, which it does only on one rank.
    pub(super) trims: bool,
    /// Whether most clients mix deltas and full histories, and many of the shim's messages about
    /// them are lost.
    pub(super) mixes: bool,
    pub(super) users: usize,
    /// Whether one client takes as much as it can get.
    pub(super) hostile: bool,
    /// How long clients act.
    pub(super) acts_for: Duration,
    /// Whether the agent is drained at the end. If not, its sessions expire.
    pub(super) drains: bool,
    /// Whether answers may be longer than what the engine reserves for them.
    pub(super) overlong_answers: bool,
    pub(super) faults: Faults,
}

/// How often each fault happens. Numbers are chances in thousandths.
#[derive(Debug, Clone)]
pub(super) struct Faults {
    pub(super) client_leaves: u32,
    pub(super) reply_lost: u32,
    pub(super) call_lost: u32,
    pub(super) connection_breaks: u32,
    /// The engine never notices a broken connection; otherwise it notices late.
    pub(super) break_unnoticed: u32,
    pub(super) agent_killed: bool,
    /// The agent is restarted as planned, and hands over.
    pub(super) agent_restarted: bool,
    /// An agent is killed before it carries out an effect.
    pub(super) killed_at_effect: u32,
    pub(super) engine_killed: bool,
    pub(super) engine_slow: bool,
    /// A plan or question that the shim sends to the agent is lost.
    pub(super) plan_lost: u32,
    /// Others use the engine too, with sessions of their own.
    pub(super) strangers: bool,
    /// Others run turns in the agent's sessions.
    pub(super) meddler: bool,
    /// The agent is asked to change the engine's weights, and to flush it.
    pub(super) controls: bool,
    /// An operator demotes sessions.
    pub(super) demotions: bool,
    /// Clients have their sessions' KV loaded from the host ahead of their turns.
    pub(super) prefetches: bool,
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

impl Faults {
    fn new(rng: &mut Rng, overlong_answers: bool) -> Self {
        let odds = |rng: &mut Rng, max: u32| if rng.bool() { rng.u32(1..max) } else { 0 };
        Faults {
            client_leaves: if overlong_answers { 400 } else { odds(rng, 300) },
            reply_lost: odds(rng, 60),
            call_lost: odds(rng, 150),
            connection_breaks: odds(rng, 250),
            break_unnoticed: odds(rng, 800),
            agent_killed: rng.u32(..3) == 0,
            agent_restarted: rng.bool(),
            killed_at_effect: if rng.u32(..3) == 0 { rng.u32(1..10) } else { 0 },
            engine_killed: rng.u32(..4) == 0,
            engine_slow: rng.u32(..3) == 0,
            plan_lost: odds(rng, 500),
            strangers: rng.u32(..3) == 0,
            meddler: rng.u32(..4) == 0,
            controls: false,
            demotions: false,
            prefetches: false,
        }
    }
}

fn table_settings(rng: &mut Rng, guards: Guards) -> TableSettings {
    let idle_ms_max = rng.u64(4_000..20_000);
    let principal_sessions_max = rng.usize(3..12);
    TableSettings {
        incarnation_prefix: String::new(),
        idle_max: ms(idle_ms_max),
        demote_idle: ms(rng.u64(0..3_000)),
        turns_queued_per_session_max: rng.u32(0..3),
        turns_queued_max: rng.usize(2..12),
        queue_wait_max: ms(rng.u64(500..5_000)),
        stuck_after: ms(15_000),
        auto_pin: rng.u32(..4) > 0,
        // In a quarter of the plans, answers grow beyond what was reserved for them. This takes no
        // random number of its own, so that each seed keeps its plan.
        answer_tokens_min: if idle_ms_max.is_multiple_of(4) { 16 } else { ANSWER_TOKENS_MIN },
        // Few, so that requests wait in line. This takes no random number of its own either.
        shim_requests_max: 2,
        shares: ShareSettings {
            sessions_max: principal_sessions_max + rng.usize(0..12),
            principal_sessions_max,
            idle_cap: ms(idle_ms_max + rng.u64(0..5_000)),
            turns_milli: *rng.choice(&[300, 500, 800]).expect("some"),
        },
        guards,
    }
}

impl Plan {
    pub(super) fn new(rng: &mut Rng, guards: Guards) -> Plan {
        let page_size = if rng.bool() { 1 } else { 16 };
        // An engine that accepts turns that may not fit retracts turns from the batch.
        let overlong_answers = rng.u32(..4) == 0;
        let pools = [512, 768, 1024, 2048, 2048, 4096, 8192];
        let pool = *rng.choice(if overlong_answers { &pools[..2] } else { &pools }).expect("some");
        // A turn that needs more than the whole pool, with the engine's rounding, waits there for
        // ever.
        let context_len = (*rng.choice(&[256, 512, 1024]).expect("some")).min(pool - 64);
        let core = CoreConfig {
            page_size,
            max_total_tokens: pool,
            context_len,
            max_running_requests: rng.usize(4..=10),
            chunked_prefill_size: *rng.choice(&[64, 256, 512]).expect("some"),
            streaming_sessions: true,
            session_radix_cache: rng.u32(..4) > 0,
            decode_log_interval: 40,
            new_token_per_mille: if overlong_answers { 0 } else { 700 },
            test_retract: overlong_answers && rng.bool(),
            prefill_tokens_per_s: *rng.choice(&[1_000.0, 5_000.0, 50_000.0]).expect("some"),
            decode_ms_per_step: *rng.choice(&[8.0, 20.0, 50.0, 100.0]).expect("some"),
            eos_per_mille: *rng.choice(&[0, 5, 30]).expect("some"),
            seed: 0,
            disable_radix_cache: false,
            kv_events: false,
            ..CoreConfig::default()
        };
        let table_settings = table_settings(rng, guards);
        let mut faults = Faults::new(rng, overlong_answers);
        let share = rng.u64(35..=85);
        let ranks = if rng.u32(..3) == 0 { 2 } else { 1 };
        let trims = ranks == 1 && rng.u32(..4) > 0;
        let mixes = trims && rng.bool();
        if mixes {
            faults.plan_lost = rng.u32(100..600);
        }
        Plan {
            ranks,
            demotes: rng.u32(..4) > 0,
            trims,
            mixes,
            rows_reserve: rng.u32(1..=2),
            pin_rows_max: rng.u32(2..=8),
            hostile: rng.u32(..3) > 0,
            pin_tokens_max: core.total_tokens() as u64 * share / 100,
            turns_max: if overlong_answers { 16 } else { rng.u32(2..=14) },
            overlong_answers,
            core,
            table_settings,
            shim: rng.bool(),
            users: rng.usize(4..=10),
            acts_for: ms(rng.u64(8_000..25_000)),
            drains: rng.bool(),
            faults,
        }
    }

    /// Gives the engine a host tier, on which idle KV falls, with a policy by this number. It takes
    /// no random number, so that each seed keeps the rest of its plan.
    pub(super) fn add_host_tier(&mut self, number: u64) {
        let policies =
            [WritePolicy::WriteThrough, WritePolicy::WriteBack, WritePolicy::WriteThroughSelective];
        self.core.has_host_tier = true;
        self.core.hicache_write_policy = policies[(number % 3) as usize];
        self.core.hicache_ratio = 2.0;
        // So slow that turns come meanwhile.
        self.core.host_load_tokens_per_s = 2_000.0;
        self.faults.prefetches = true;
    }

    /// Whether the agent may reserve less for an answer than its limit.
    pub(super) fn grows_beyond_reservations(&self) -> bool {
        let settings = &self.table_settings;
        let is_below_limits = settings.answer_tokens_min < self.core.context_len as u64;
        settings.auto_pin && self.trims && is_below_limits
    }

    /// Returns the engine's facts as the agent's table gets them.
    pub(super) fn engine(&self) -> EngineCapacity {
        let capacity = RankCapacity {
            rows: u32::try_from(self.core.max_running_requests).expect("few rows"),
            rows_reserve: self.rows_reserve,
            pin_rows_max: self.pin_rows_max,
            pool_tokens: self.core.total_tokens() as u64,
            pin_tokens_max: self.pin_tokens_max,
            turns_max: self.turns_max,
        };
        let tagged = self.core.session_radix_cache.then_some(Retention::Tagged);
        let retentions = [Some(Retention::Pinned), tagged, Some(Retention::None)];
        EngineCapacity {
            ranks: vec![capacity; self.ranks as usize],
            page_tokens: self.core.page_size as u64,
            context_tokens: self.core.context_len as u64,
            retentions: retentions.into_iter().flatten().collect(),
        }
    }
}
