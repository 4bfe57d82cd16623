//! Serves `GET /v1/workers`, for operators: the state and figures of each worker and its devices.
//!
//! `unheard` has the agents that have not described themselves yet.

use std::time::Instant;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use contract::{
    api::{Kv, UnheardAgent, Worker, Workers},
    load::RankLoad,
};
use service::clock::{now, whole_millis};

use super::SharedState;
use crate::{
    fleet::{
        agent::{Agent, Facts},
        membership::{Phase, Source},
        snapshot::Snapshot,
        worker::WorkerRef,
        worker_table::WorkerStats,
    },
    residency::{kv_index::WorkerKv, kv_stream::KvPhase},
    turn::shared::Shared,
};

pub(super) async fn list(State(shared): SharedState) -> Response {
    Json(build_list(&shared)).into_response()
}

pub(super) fn build_list(shared: &Shared) -> Workers {
    let view = shared.directory.view();
    let now = now();
    let workers = view.workers().map(|(worker, agent, facts)| {
        let kv = shared.kv_index.worker_kv(worker);
        describe(&view, worker, agent, facts, kv, now)
    });
    let undescribed_agents = view.known_agents().filter(|(_, agent)| agent.facts.is_none());
    let unheard = undescribed_agents.map(|(_, agent)| {
        let (state, reason) = agent.state(now, view.report_age_max());
        UnheardAgent {
            control: agent.control_url.clone(),
            state: state.as_str().to_owned(),
            reason,
            sources: source_names(agent),
            leaving: agent.phase != Phase::Member,
        }
    });
    Workers { workers: workers.collect(), unheard: unheard.collect() }
}

fn describe(
    view: &Snapshot,
    worker: WorkerRef,
    agent: &Agent,
    facts: &Facts,
    kv: WorkerKv,
    now: Instant,
) -> Worker {
    let (state, reason) = agent.state(now, view.report_age_max());
    let age_ms = |since: Instant| whole_millis(now.saturating_duration_since(since));
    let report = agent.report.as_ref();
    let report_age_ms = report.map(|(_, received_at)| age_ms(*received_at));
    let aged = |load: &RankLoad| {
        let report_age_ms = report_age_ms.unwrap_or(0);
        load.clone().aged(u32::try_from(report_age_ms).unwrap_or(u32::MAX))
    };
    let in_flight = agent.in_flight.get(worker.dp_rank as usize);
    let description = &facts.description;
    Worker {
        worker: view.name(worker),
        agent: description.agent_id.clone(),
        dp_rank: worker.dp_rank,
        control: agent.control_url.clone(),
        sources: source_names(agent),
        leaving: agent.phase != Phase::Member,
        data: facts.data_authority.to_string(),
        role: agent.role().as_str().to_owned(),
        advertised_control: description.control_url.clone(),
        state: state.as_str().to_owned(),
        reason,
        heartbeat_age_ms: agent.heard_at.map(age_ms),
        report_age_ms,
        restart_required: report.and_then(|(report, _)| report.restart_required.clone()),
        weights: report.map(|(report, _)| report.weights.to_string()),
        turns_in_flight_here: in_flight.map_or(0, |count| count.turns()),
        turns_estimate: view.worker_table().get(worker).map(WorkerStats::turns),
        load: agent.rank_load(worker.dp_rank).map(aged),
        kv: describe_kv(kv),
        engine: description.engine.clone(),
        retentions: description.retentions.iter().map(|it| it.as_str().to_owned()).collect(),
        retentions_off: description.retentions_off.clone(),
        trims: description.trim_sglang_versions.clone(),
        shim_functions_off: description.shim_functions_off.clone(),
        rank: description.ranks.get(worker.dp_rank as usize).cloned(),
    }
}

fn source_names(agent: &Agent) -> Vec<String> {
    agent.sources.iter().copied().map(Source::as_str).map(str::to_owned).collect()
}

fn describe_kv(kv: WorkerKv) -> Kv {
    let WorkerKv { phase, resident_blocks } = kv;
    let (state, block_tokens, reason) = match phase {
        KvPhase::Snapshot { block_tokens } => ("snapshot", Some(block_tokens), None),
        KvPhase::Live { block_tokens } => ("live", Some(block_tokens), None),
        KvPhase::Unknown { reason } => ("unknown", None, Some(reason)),
    };
    Kv { state: state.to_owned(), block_tokens, reason, resident_blocks }
}
