//! The reports that the agents of the modelled engines would send.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use contract::{
    id::SessionKey,
    load::{
        Description, EngineFacts, Figure, HostTier, LoadReport, Rank, RankLoad, Retention, Session,
        SessionState, Source, Weights,
    },
};
use router::{
    config::Config,
    fleet::{
        state::State,
        worker::{AgentKey, WorkerRef},
    },
};

use worker_agent::ledger::token_rate::TokenRate;

use crate::{
    engine::DECODING_MAX,
    fleet::{Condition, Fleet, Worker},
};

/// The time between two samples of an engine's counters, and between two load reports.
const INTERVAL: Duration = Duration::from_millis(500);

/// What an agent has measured of its engine.
#[derive(Debug, Default)]
pub(super) struct Measured {
    rate: TokenRate,
    sampled_at: Option<Instant>,
}

impl Measured {
    /// Samples the engine's counters if the last sample is old enough. Returns the rate.
    fn sample(&mut self, worker: &Worker, now: Instant) -> Option<Figure> {
        if self.sampled_at.is_none_or(|at| now - at >= INTERVAL) {
            let busy_us = u64::try_from(worker.prefill_counters.busy.as_micros());
            let tokens = worker.prefill_counters.tokens;
            self.rate.record_sample(now, tokens, busy_us.unwrap_or(u64::MAX));
            self.sampled_at = Some(now);
        }
        let (value, at) = self.rate.tokens_per_s()?;
        let age_ms = u32::try_from((now - at).as_millis()).unwrap_or(u32::MAX);
        Some(Figure { value, source: Source::Loads, age_ms })
    }
}

/// The agents' knowledge of a session.
#[derive(Debug)]
pub(super) struct KnownSession {
    pub(super) key: SessionKey,
    /// The agents that list the session.
    pub(super) agents: BTreeSet<usize>,
    pub(super) running: u32,
    pub(super) turns: u64,
    /// The resident tokens of the last prompt, at that turn's end.
    pub(super) resident_tokens: Option<u64>,
    pub(super) input_tokens: u64,
    pub(super) idle_since: Duration,
    /// The worker that the session leaves when its running turn's answer starts.
    pub(super) left_worker: Option<usize>,
}

impl KnownSession {
    pub(super) fn new(session: usize) -> Self {
        Self {
            key: key(session),
            agents: BTreeSet::new(),
            running: 0,
            turns: 0,
            resident_tokens: None,
            input_tokens: 0,
            idle_since: Duration::ZERO,
            left_worker: None,
        }
    }

    /// Returns the session as reported by the agent that runs it or ran it last.
    pub(super) fn session(&self, retention: Retention, state: SessionState) -> Session {
        Session {
            key: self.key.clone(),
            retention,
            state,
            dp_rank: 0,
            turns: self.turns,
            turns_running: self.running,
            exclusive: false,
            resident_tokens: self.resident_tokens.map(figure),
            idle: Duration::ZERO,
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }
}

/// Returns an agent's worker; each agent has one rank.
pub(super) fn worker_ref(agent: usize) -> WorkerRef {
    WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
}

/// Returns a session's key.
pub(super) fn key(session: usize) -> SessionKey {
    SessionKey::new("sim", session.to_string()).expect("a number is a legal id")
}

/// Returns a router's state before any report.
pub(super) fn state(agents: usize) -> State {
    let workers = (0..agents).map(|agent| format!("http://worker-{agent}:1")).collect();
    State::new(&Config { workers, ..Config::default() })
}

/// Returns an agent's first message.
pub(super) fn description(agent: usize, epoch: u64, worker: &Worker, fleet: &Fleet) -> Description {
    let pool_tokens = worker.pool_blocks.saturating_mul(fleet.block_tokens);
    Description {
        agent_id: format!("worker-{agent}"),
        epoch,
        data_port: 1,
        data_tls: false,
        data_address: None,
        control_url: None,
        engine: EngineFacts {
            version: String::new(),
            models: vec!["model".to_owned()],
            page_tokens: 1,
            context_tokens: u32::MAX,
            vocabulary: None,
            streaming_sessions: true,
            radix_sessions: true,
            instance: epoch.to_string(),
            disaggregation: "null".to_owned(),
            shortens_prompts: false,
            transfer: None,
            adapters: None,
        },
        ranks: vec![Rank { dp_rank: 0, pool_tokens, rows: u32::MAX, devices: vec![] }],
        retentions: vec![Retention::Pinned, Retention::Tagged, Retention::None],
        turns_queued_per_session_max: 0,
        model_files: None,
        trim_sglang_versions: vec![],
        shim_functions_off: vec![],
        retentions_off: vec![],
    }
}

/// Returns an agent's load report.
pub(super) fn report(
    measured: &mut Measured,
    worker: &Worker,
    fleet: &Fleet,
    now: Instant,
) -> LoadReport {
    let tokens = |blocks: u64| Some(figure(blocks.saturating_mul(fleet.block_tokens)));
    let rest = worker.pool_blocks.saturating_sub(worker.active_blocks);
    let evictable = rest.saturating_sub(worker.free_blocks);
    LoadReport {
        interval: INTERVAL,
        ranks: vec![RankLoad {
            dp_rank: 0,
            turns_running: worker.outstanding,
            turns_running_max: DECODING_MAX,
            requests_running: None,
            requests_waiting: None,
            pool_used_tokens: tokens(worker.active_blocks.min(worker.pool_blocks)),
            pool_total_tokens: tokens(worker.pool_blocks),
            pinned_tokens: None,
            resident_tokens_estimate: None,
            rows_held: None,
            rows_total: None,
            sessions: 0,
            devices: vec![],
            turns_queued: 0,
            pool_available_tokens: tokens(worker.free_blocks),
            pool_evictable_tokens: tokens(evictable),
            foreign_tokens: None,
            pages: None,
            prefill_tokens_per_s: measured.sample(worker, now),
            prefill_backlog_tokens: Some(figure(worker.backlog_tokens)),
            staged_prefill: worker.staged_prefill,
            host: (worker.host_blocks > 0).then(|| HostTier {
                total_tokens: tokens(worker.host_blocks),
                used_tokens: tokens(worker.host_used_blocks),
                load_tokens_per_s: Some(figure(worker.host_load_tokens_per_s)),
                ..HostTier::default()
            }),
        }],
        unhealthy: None,
        draining: worker.condition == Condition::Draining,
        restart_required: None,
        held: None,
        weights: Weights::default(),
    }
}

fn figure(value: u64) -> Figure {
    Figure { value, source: Source::Shim, age_ms: 0 }
}
