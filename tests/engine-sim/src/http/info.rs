//! The engine's information routes: loads, server and model facts, metrics.

use super::{
    super::{
        Config, VERSION,
        kv::{Endpoint, KvEventsConfig},
        owner::RankReport,
        tokenizer::{EOS, VOCAB_SIZE},
    },
    App, AppState, internal_error, json_response, whole_seconds,
};
use axum::{
    extract::{Query, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::{collections::HashMap, fmt::Write as _};
use tracing_subscriber::fmt::{
    format::Writer,
    time::{FormatTime as _, SystemTime},
};

const LOAD_SECTIONS: [&str; 7] = ["core", "memory", "spec", "lora", "disagg", "queues", "all"];

pub(super) async fn loads(
    State(app): AppState,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let include: Vec<&str> = query.get("include").map_or(vec!["all"], |i| i.split(',').collect());
    if include.iter().any(|section| !LOAD_SECTIONS.contains(section)) {
        return internal_error();
    }
    let reports = app.handle.report().await;
    let only = query.get("dp_rank").and_then(|rank| rank.parse::<usize>().ok());
    let wanted = |rank: &usize| only.is_none_or(|only| only == *rank);
    let loads: Vec<Value> = (0..reports.len())
        .filter(wanted)
        .map(|rank| load(&app, rank, &reports[rank], &include))
        .collect();
    if query.get("format").is_some_and(|format| format == "prometheus") {
        return prometheus_loads(&loads);
    }
    let body = json!({
        "timestamp": timestamp(), "version": VERSION, "accelerator": null,
        "num_accelerators": app.config.dp_size, "loads": loads,
    });
    json_response(StatusCode::OK, &body)
}

fn load(app: &App, rank: usize, report: &RankReport, include: &[&str]) -> Value {
    let facts = &report.facts;
    let used = facts.used();
    let busy_us = u64::try_from(facts.prefill_busy.as_micros()).unwrap_or(u64::MAX);
    let steps = report.gauges.decode_steps;
    let made_at = if app.config.snapshots_stand_still { 1.0 } else { report.made_at };
    let mut load = json!({
        "timestamp": made_at,
        "dp_rank": rank,
        "num_running_reqs": facts.running,
        "num_waiting_reqs": facts.waiting,
        "num_waiting_uncached_tokens": facts.waiting_uncached_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + facts.waiting_tokens,
        "num_active_tokens": facts.uncached,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": facts.total,
        "max_running_requests": app.config.core.max_running_requests,
        "token_usage": ratio(used, facts.total, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": facts.prefilled_tokens,
        "total_prefill_busy_us": busy_us,
        "decode_moments": [steps as f64, steps as f64, 0.0, steps as f64, 0.0, steps as f64],
    });
    let has = |section: &str| include.contains(&section) || include.contains(&"all");
    if has("memory") {
        load["memory"] = json!({
            "weight_gb": 0.0, "kv_cache_gb": pool_gib(facts.total), "graph_gb": 0.0,
            "token_capacity": facts.total
        });
    }
    if has("disagg") {
        load["disaggregation"] = json!({
            "mode": app.config.hand_off.mode.as_str(),
            "prefill_bootstrap_queue_reqs": 0, "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0, "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        });
    }
    if has("queues") {
        load["queues"] = json!({
            "waiting": facts.waiting, "grammar": 0, "paused": 0, "retracted": 0,
            "prealloc_ready": 0,
        });
    }
    load
}

fn prometheus_loads(loads: &[Value]) -> Response {
    let mut text = String::new();
    for load in loads {
        let rank = &load["dp_rank"];
        for (key, value) in load.as_object().into_iter().flatten() {
            if value.is_number() && key != "timestamp" && key != "dp_rank" {
                let _ = writeln!(text, "sglang_{key}{{dp_rank=\"{rank}\"}} {value}");
            }
        }
    }
    text_response(text)
}

/// Returns the KV size of `tokens` tokens in GiB, to three decimals. The model has two layers with
/// two heads of 16 floats each for keys and for values.
fn pool_gib(tokens: usize) -> f64 {
    ratio(tokens * 512, 1 << 30, 3)
}

/// Returns `part / whole`, rounded as the engine does: to four decimals in loads, two in metrics.
fn ratio(part: usize, whole: usize, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (part as f64 / whole as f64 * scale).round() / scale
}

/// Returns the flags of the engine's start.
fn server_args(app: &App) -> Value {
    let core = &app.config.core;
    json!({
        "model_path": app.config.model_path,
        "tokenizer_path": app.config.model_path,
        "served_model_name": app.config.model_name(),
        "page_size": core.page_size,
        "max_total_tokens": core.max_total_tokens,
        "context_length": core.context_len,
        "max_running_requests": core.max_running_requests,
        "chunked_prefill_size": core.chunked_prefill_size,
        "tp_size": app.config.hand_off.tp_size,
        "pp_size": 1,
        "dp_size": app.config.dp_size,
        "enable_streaming_session": core.streaming_sessions,
        "enable_session_radix_cache": core.session_radix_cache,
        "enable_metrics": app.config.enable_metrics,
        "enable_cache_report": app.config.enable_cache_report,
        "enable_hierarchical_cache":
            core.has_host_tier || app.config.hicache_storage_backend.is_some(),
        "hicache_ratio": core.hicache_ratio,
        "hicache_write_policy": core.hicache_write_policy.as_str(),
        "hicache_storage_backend": app.config.hicache_storage_backend,
        "uses_mamba_radix_cache": false,
        "enable_priority_scheduling": app.config.enable_priority_scheduling,
        "schedule_low_priority_values_first": false,
        "enable_lora": app.config.enable_lora,
        "enable_pd_role_switch": app.config.can_switch_role,
        "lora_paths": null,
        "disable_radix_cache": core.disable_radix_cache,
        "radix_eviction_policy": core.radix_eviction_policy.as_str(),
        "schedule_policy": "fcfs",
        "decode_log_interval": core.decode_log_interval,
        "kv_events_config": app.config.kv_events.as_ref().map(kv_events_config),
        "load_balance_method": app.config.hand_off.mode.load_balance_method(),
        "random_seed": core.seed,
        "api_key": app.config.api_key,
        "admin_api_key": null,
        "device": app.config.device,
    })
}

pub(super) async fn server_info(State(app): AppState) -> Response {
    let core = &app.config.core;
    let args = server_args(&app);
    let state = json!({
        "world_size": 1,
        "effective_max_running_requests_per_dp": core.max_running_requests,
        "last_gen_throughput": 0.0,
        "memory_usage": {
            "weight": 0.0, "kvcache": pool_gib(core.total_tokens()), "startup_available": 0.0,
            "token_capacity": core.total_tokens(), "token_capacity_swa": null, "graph": {},
        },
    });
    let mut body = args.clone();
    let merge = |into: &mut Value, from: &Value| {
        for (key, value) in from.as_object().into_iter().flatten() {
            into[key.as_str()] = value.clone();
        }
    };
    merge(&mut body, &disaggregation(&app));
    let mut internal = args;
    merge(&mut internal, &state);
    if let Some(role) = *app.role.lock() {
        internal["disaggregation_mode"] = role.into();
    }
    merge(
        &mut body,
        &json!({
            "max_total_num_tokens": core.total_tokens(),
            "max_req_input_len": core.max_req_input_len(),
            "status": "ready",
            "startup_time": { "started_at": app.started_wall },
            "version": VERSION,
            "frontend": "python",
            "launch_command": "engine-sim",
            "kv_events": app.config.kv_events.as_ref().and_then(|kv| kv_events(kv, &app.config)),
            "internal_states": vec![internal; app.config.dp_size],
        }),
    );
    json_response(StatusCode::OK, &body)
}

/// Returns the settings of prefill and decode mode.
fn disaggregation(app: &App) -> Value {
    let config = &app.config.hand_off;
    let bootstrap_port = app.hand_offs.as_ref().map(|hand_offs| hand_offs.bootstrap_port());
    json!({
        "disaggregation_mode": config.mode.as_str(),
        "disaggregation_bootstrap_port": bootstrap_port.unwrap_or(config.bootstrap_port),
        "disaggregation_transfer_backend": config.transfer_backend,
        "disaggregation_decode_enable_radix_cache": config.decode_radix_cache,
        "kv_cache_dtype": config.kv_cache_dtype,
    })
}

/// Returns the `--kv-events-config` setting as it was given.
fn kv_events_config(config: &KvEventsConfig) -> String {
    json!({
        "publisher": config.publisher, "endpoint": config.endpoint, "bind": config.bind,
        "replay_endpoint": config.replay_endpoint, "buffer_steps": config.buffer_steps,
        "topic": config.topic, "format": config.format,
    })
    .to_string()
}

/// Returns the description by which subscribers find the publishers. Like the engine, describes
/// only TCP endpoints.
fn kv_events(config: &KvEventsConfig, all: &Config) -> Option<Value> {
    let Endpoint::Tcp { host, port } = config.events_at()? else { return None };
    let mut described = json!({
        "publisher": config.publisher,
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": config.topic,
        "block_size": all.core.page_size,
        "dp_size": all.dp_size,
    });
    if let Some(Endpoint::Tcp { port, .. }) = config.replays_at() {
        described["replay_endpoint_port_base"] = json!(port);
    }
    Some(described)
}

pub(super) async fn model_info(State(app): AppState) -> Response {
    let (version, model_path) = app.weights.labels();
    let body = json!({
        "model_path": model_path,
        "tokenizer_path": app.config.model_path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": version,
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS,
    });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn models(State(app): AppState) -> Response {
    let model = app.config.model_name();
    let card = |name: &str, parent: Option<&str>, context_tokens: Option<usize>| {
        json!({
            "id": name, "object": "model", "created": whole_seconds(app.started_wall),
            "owned_by": "sglang", "root": name, "parent": parent,
            "max_model_len": context_tokens,
        })
    };
    let mut cards = vec![card(model, None, Some(app.config.core.context_len))];
    if app.config.enable_lora {
        let adapters = app.adapters.lock();
        cards.extend(adapters.iter().map(|name| card(name, Some(model), None)));
    }
    json_response(StatusCode::OK, &json!({ "object": "list", "data": cards }))
}

/// Answers `/metrics`. The gauges are deliberately as old as the engine's last report.
pub(super) async fn metrics(State(app): AppState) -> Response {
    if !app.config.enable_metrics {
        return StatusCode::NOT_FOUND.into_response();
    }
    let core = &app.config.core;
    let total = core.total_tokens();
    let mut families: Vec<(&str, &str, Vec<f64>)> = Vec::new();
    let reports = app.handle.report().await;
    let mut add = |name, kind, value: &dyn Fn(&RankReport) -> f64| {
        families.push((name, kind, reports.iter().map(value).collect()));
    };
    add("max_total_num_tokens", "gauge", &|_| total as f64);
    add("page_size", "gauge", &|_| core.page_size as f64);
    add("num_pages", "gauge", &|_| (total / core.page_size) as f64);
    add("context_len", "gauge", &|_| core.context_len as f64);
    add("num_running_reqs", "gauge", &|r| r.gauges.running as f64);
    add("num_queue_reqs", "gauge", &|r| r.gauges.waiting as f64);
    add("num_used_tokens", "gauge", &|r| r.gauges.used as f64);
    add("token_usage", "gauge", &|r| ratio(r.gauges.used, total, 2));
    add("full_token_usage", "gauge", &|r| ratio(r.gauges.used, total, 2));
    add("kv_used_tokens", "gauge", &|r| r.gauges.used as f64);
    add("kv_available_tokens", "gauge", &|r| r.gauges.available as f64);
    add("kv_evictable_tokens", "gauge", &|r| r.gauges.evictable as f64);
    add("num_retracted_reqs", "gauge", &|_| 0.0);
    if core.streaming_sessions {
        add("num_streaming_sessions", "gauge", &|r| r.gauges.sessions as f64);
        add("streaming_session_held_tokens", "gauge", &|r| r.gauges.session_held as f64);
    }
    add("prompt_tokens_total", "counter", &|r| r.totals.prompt_tokens as f64);
    add("generation_tokens_total", "counter", &|r| r.totals.generation_tokens as f64);
    add("cached_tokens_total", "counter", &|r| r.totals.cached_tokens as f64);
    add("num_requests_total", "counter", &|r| r.totals.requests as f64);
    add("num_aborted_requests_total", "counter", &|r| r.totals.aborted as f64);
    add("num_retracted_requests_total", "counter", &|r| r.gauges.retracted as f64);
    text_response(render_metrics(&app, &families))
}

fn render_metrics(app: &App, families: &[(&str, &str, Vec<f64>)]) -> String {
    let model = app.config.model_name();
    let mut text = String::new();
    for (name, kind, values) in families {
        let _ = writeln!(text, "# TYPE sglang:{name} {kind}");
        for (rank, value) in values.iter().enumerate() {
            let dp = match app.config.dp_size {
                1 => String::new(),
                _ => format!("dp_rank=\"{rank}\","),
            };
            let _ = writeln!(
                text,
                "sglang:{name}{{{dp}engine_type=\"unified\",model_name=\"{model}\",\
                 moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"}} {value:?}"
            );
        }
    }
    text
}

fn text_response(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// Returns the current time as `2026-11-21T01:10:02.556995+00:00`.
fn timestamp() -> String {
    let mut text = String::new();
    let written = SystemTime.format_time(&mut Writer::new(&mut text));
    written.expect("a string has room");
    text.replace('Z', "+00:00")
}

#[cfg(test)]
mod tests {
    #[test]
    fn timestamps_are_python_s() {
        let text = super::timestamp();
        assert_eq!((text.len(), &text[10..11], &text[26..]), (32, "T", "+00:00"), "{text}");
    }
}
