//! Serves `GET /v1/workers`, for operators: the state and figures of each worker and its devices.
//!
//! Each figure has its source and its age. `unheard` has agents that sent no description yet.

use std::time::{Duration, Instant};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse as _, Response},
};
use proto::load::{Device, Figure, PageAudit, Rank, RankLoad, Ratio};
use serde_json::{Value, json};
use service::clock::{now, whole_millis};

use super::SharedState;
use crate::{
    fleet::{
        agent::{Agent, Facts},
        membership::Phase,
        snapshot::Snapshot,
        worker::WorkerRef,
        worker_table::WorkerStats,
    },
    residency::kv_index::WorkerKv,
    turn::shared::Shared,
};

pub(super) async fn list(State(shared): SharedState) -> Response {
    Json(build_list(&shared)).into_response()
}

pub(super) fn build_list(shared: &Shared) -> Value {
    let view = shared.directory.view();
    let now = now();
    let workers: Vec<Value> = view
        .workers()
        .map(|(worker, agent, facts)| {
            let kv = shared.kv_index.worker_kv(worker);
            to_json(&view, worker, agent, facts, &kv, now)
        })
        .collect();
    let undescribed_agents: Vec<Value> = view
        .known_agents()
        .filter(|(_, agent)| agent.facts.is_none())
        .map(|(_, agent)| {
            let (state, reason) = agent.state(now, view.report_age_max());
            json!({
                "control": agent.control_url,
                "state": state,
                "reason": reason,
                "sources": agent.sources,
                "leaving": agent.phase != Phase::Member,
            })
        })
        .collect();
    json!({ "workers": workers, "unheard": undescribed_agents })
}

fn to_json(
    view: &Snapshot,
    worker: WorkerRef,
    agent: &Agent,
    facts: &Facts,
    kv: &WorkerKv,
    now: Instant,
) -> Value {
    let (state, reason) = agent.state(now, view.report_age_max());
    let report_age =
        agent.report.as_ref().map(|(_, received_at)| now.saturating_duration_since(*received_at));
    let heartbeat_age = agent.heard_at.map(|heard_at| now.saturating_duration_since(heard_at));
    let in_flight = agent.in_flight.get(worker.dp_rank as usize).map_or(0, |count| count.turns());
    json!({
        "worker": view.name(worker),
        "agent": facts.description.agent_id,
        "dp_rank": worker.dp_rank,
        "control": agent.control_url,
        "sources": agent.sources,
        "leaving": agent.phase != Phase::Member,
        "data": &*facts.data_authority,
        "role": agent.role(),
        "advertised_control": facts.description.control_url,
        "state": state,
        "reason": reason,
        "heartbeat_age_ms": heartbeat_age.map(whole_millis),
        "report_age_ms": report_age.map(whole_millis),
        "restart_required": agent.report.as_ref().map(|(report, _)| &report.restart_required),
        "weights": agent.report.as_ref().map(|(report, _)| report.weights.to_string()),
        "turns_in_flight_here": in_flight,
        "turns_estimate": view.worker_table().get(worker).map(WorkerStats::turns),
        "load": agent.rank_load(worker.dp_rank).map(|load| load_to_json(load, report_age)),
        "kv": kv,
        "engine": facts.description.engine,
        "retentions": facts.description.retentions,
        "retentions_off": facts.description.retentions_off,
        "trims": facts.description.trim_sglang_versions,
        "shim_functions_off": facts.description.shim_functions_off,
        "rank": facts.description.ranks.get(worker.dp_rank as usize).map(rank_to_json),
    })
}

fn load_to_json(load: &RankLoad, report_age: Option<Duration>) -> Value {
    let report_age_ms = report_age.map_or(0, whole_millis);
    let figure =
        |figure: Option<Figure>| figure.map(|figure| figure_to_json(figure, report_age_ms));
    let usage = load.kv_physical_usage().map(|usage| ratio_to_json(usage, report_age_ms));
    let devices: Vec<Value> =
        load.devices.iter().map(|device| device_to_json(device, report_age_ms)).collect();
    json!({
        "turns_running": load.turns_running,
        "turns_running_max": load.turns_running_max,
        "turns_queued": load.turns_queued,
        "requests_running": figure(load.requests_running),
        "requests_waiting": figure(load.requests_waiting),
        "pool_used_tokens": figure(load.pool_used_tokens),
        "pool_total_tokens": figure(load.pool_total_tokens),
        "pool_available_tokens": figure(load.pool_available_tokens),
        "pool_evictable_tokens": figure(load.pool_evictable_tokens),
        "kv_physical_usage": usage,
        "pinned_tokens": figure(load.pinned_tokens),
        "foreign_tokens": figure(load.foreign_tokens),
        "resident_tokens_estimate": figure(load.resident_tokens_estimate),
        "rows_held": figure(load.rows_held),
        "rows_total": figure(load.rows_total),
        "prefill_tokens_per_s": figure(load.prefill_tokens_per_s),
        "prefill_backlog_tokens": figure(load.prefill_backlog_tokens),
        "staged_prefill": load.staged_prefill,
        "sessions": load.sessions,
        "devices": devices,
        "pages": load.pages.clone().map(|pages| {
            let age_ms = u64::from(pages.age_ms) + report_age_ms;
            PageAudit { age_ms: u32::try_from(age_ms).unwrap_or(u32::MAX), ..pages }
        }),
    })
}

fn rank_to_json(rank: &Rank) -> Value {
    let devices: Vec<Value> = rank.devices.iter().map(|device| device_to_json(device, 0)).collect();
    json!({
        "dp_rank": rank.dp_rank,
        "pool_tokens": rank.pool_tokens,
        "rows": rank.rows,
        "devices": devices,
    })
}

/// `report_age_ms` is added to the device's ages.
fn device_to_json(device: &Device, report_age_ms: u64) -> Value {
    let mut value = serde_json::to_value(device).expect("plain fields always serialise");
    let fields = value.as_object_mut().expect("a struct is an object");
    for (name, figure) in [
        ("engine_bytes", device.engine_bytes),
        ("kv_pool_bytes", device.kv_pool_bytes),
        ("kv_used_bytes", device.kv_used_bytes),
        ("kv_pinned_bytes", device.kv_pinned_bytes),
        ("kv_reclaimable_bytes", device.kv_reclaimable_bytes),
    ] {
        if let Some(figure) = figure {
            fields.insert(name.to_owned(), figure_to_json(figure, report_age_ms));
        }
    }
    if let Some(usage) = device.kv_physical_usage() {
        fields.insert("kv_physical_usage".to_owned(), ratio_to_json(usage, report_age_ms));
    }
    if let Some(age_ms) = device.age_ms {
        fields.insert("age_ms".to_owned(), (u64::from(age_ms) + report_age_ms).into());
    }
    fields.retain(|_, value| !value.is_null());
    value
}

fn ratio_to_json(ratio: Ratio, report_age_ms: u64) -> Value {
    let Ratio { value, source, age_ms } = ratio;
    json!({ "value": value, "source": source, "age_ms": u64::from(age_ms) + report_age_ms })
}

/// `report_age_ms`, the time since the report arrived, is added to the figure's age.
fn figure_to_json(figure: Figure, report_age_ms: u64) -> Value {
    let Figure { value, source, age_ms } = figure;
    json!({ "value": value, "source": source, "age_ms": u64::from(age_ms) + report_age_ms })
}
