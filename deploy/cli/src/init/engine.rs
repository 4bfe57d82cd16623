//! Reads an engine's `/server_info` for `init`: its sizes, and which flags it lacks. Pure.

use contract::load::EngineRole;
use serde::Serialize;
use serde_json::Value;

use crate::flags::{self, EngineFlag};

/// Which of a host's GPUs an engine takes, by its flags.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuFlags {
    /// Such as `cuda`.
    pub device: String,
    /// The number of GPUs of all ranks on all hosts together.
    pub count: usize,
    /// `--base-gpu-id`.
    pub first: usize,
    /// `--gpu-id-step`.
    pub step: usize,
    /// `--nnodes`.
    pub hosts: usize,
}

/// An engine that answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FoundEngine {
    pub url: String,
    pub port: u16,
    pub version: String,
    /// The name for clients.
    pub model: String,
    pub page_tokens: u64,
    /// Longest prompt and answer.
    pub context_tokens: u64,
    /// The request rows of each rank.
    pub rows: u64,
    /// The pool of each rank.
    pub pool_tokens: u64,
    /// The number of DP ranks.
    pub ranks: u16,
    pub role: EngineRole,
    /// `None` unless prefill and decode are apart.
    pub bootstrap_port: Option<u16>,
    #[serde(skip)]
    pub missing: Vec<EngineFlag>,
    /// Other hosts reach its KV events.
    pub exposes_kv_events: bool,
    pub gpus: GpuFlags,
    pub wants_key: bool,
}

impl FoundEngine {
    /// The error says what is missing in an answer that isn't SGLang's.
    pub fn parse(url: &str, port: u16, info: &Value) -> Result<Self, String> {
        let number = |key: &str| info[key].as_u64();
        let text = |key: &str| info[key].as_str().map(str::to_owned);
        let missing = |key: &str| format!("{key} is missing");
        let state = &info["internal_states"][0];
        let context = number("context_length").or_else(|| state["context_length"].as_u64());
        let rows = state["effective_max_running_requests_per_dp"].as_u64();
        let rows = rows.or_else(|| number("max_running_requests"));
        let model = text("served_model_name").or_else(|| text("model_path"));
        let role = match info["disaggregation_mode"].as_str() {
            Some("prefill") => EngineRole::Prefill,
            Some("decode") => EngineRole::Decode,
            _ => EngineRole::Aggregated,
        };
        let bootstrap = number("disaggregation_bootstrap_port").and_then(|it| it.try_into().ok());
        let ranks = number("dp_size").unwrap_or(1).max(1);
        let kv_events = kv_publisher(info);
        Ok(Self {
            url: url.to_owned(),
            port,
            version: text("version").ok_or_else(|| missing("version"))?,
            model: model.ok_or_else(|| missing("served_model_name"))?,
            page_tokens: number("page_size").unwrap_or(1).max(1),
            context_tokens: context
                .or_else(|| number("max_req_input_len"))
                .ok_or_else(|| missing("context_length"))?,
            rows: rows.ok_or_else(|| missing("max_running_requests"))?,
            pool_tokens: number("max_total_num_tokens")
                .ok_or_else(|| missing("max_total_num_tokens"))?,
            ranks: u16::try_from(ranks).map_err(|_| format!("dp_size is {ranks}"))?,
            role,
            bootstrap_port: bootstrap.filter(|_| role != EngineRole::Aggregated),
            missing: missing_flags(info, role, kv_events.as_ref()),
            exposes_kv_events: kv_events.is_some_and(|it| is_exposed(&it)),
            gpus: gpu_flags(info),
            wants_key: info["api_key"].as_str().is_some_and(|key| !key.is_empty()),
        })
    }
}

/// The settings of the KV events, if the engine publishes them.
fn kv_publisher(info: &Value) -> Option<Value> {
    let config = serde_json::from_str::<Value>(info["kv_events_config"].as_str()?).ok()?;
    Some(config).filter(|config| config["publisher"] == "zmq")
}

/// Half of a pair has no use for the flags of sessions.
fn missing_flags(info: &Value, role: EngineRole, kv_events: Option<&Value>) -> Vec<EngineFlag> {
    let is_whole = role == EngineRole::Aggregated;
    let lacks = |key: &str| info[key] != true;
    let lacks_replay = kv_events.is_some_and(|config| !config["replay_endpoint"].is_string());
    let flags = [
        (is_whole && lacks("enable_streaming_session"), flags::STREAMING_SESSION),
        (is_whole && lacks("enable_session_radix_cache"), flags::SESSION_RADIX_CACHE),
        (lacks("enable_cache_report"), flags::CACHE_REPORT),
        (kv_events.is_none(), flags::KV_EVENTS),
        (lacks_replay, flags::KV_REPLAY),
    ];
    flags.into_iter().filter(|(lacks, _)| *lacks).map(|(_, flag)| flag).collect()
}

/// Whether other hosts reach the first rank's endpoint.
fn is_exposed(kv_events: &Value) -> bool {
    let endpoint = kv_events["endpoint"].as_str().unwrap_or("tcp://*:5557");
    endpoint.strip_prefix("tcp://").is_some_and(|it| {
        let host = it.rsplit_once(':').map_or(it, |(host, _)| host);
        let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
        host != "localhost" && !address.is_ok_and(|address| address.is_loopback())
    })
}

fn gpu_flags(info: &Value) -> GpuFlags {
    let number = |key: &str| info[key].as_u64().and_then(|it| usize::try_from(it).ok());
    let at_least_1 = |key: &str| number(key).unwrap_or(1).max(1);
    // With DP attention, all ranks run on the same GPUs.
    let ranks = if info["enable_dp_attention"] == true { 1 } else { at_least_1("dp_size") };
    let count = at_least_1("tp_size").saturating_mul(at_least_1("pp_size")).saturating_mul(ranks);
    GpuFlags {
        device: info["device"].as_str().unwrap_or("unknown").to_owned(),
        count,
        first: number("base_gpu_id").unwrap_or(0),
        step: at_least_1("gpu_id_step"),
        hosts: at_least_1("nnodes"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn info() -> Value {
        json!({
            "version": "0.5.23", "served_model_name": "m", "model_path": "/models/m",
            "page_size": 16, "context_length": 1024, "max_total_num_tokens": 2048,
            "dp_size": 2, "tp_size": 4, "device": "cuda", "disaggregation_mode": "null",
            "disaggregation_bootstrap_port": 8998, "api_key": null,
            "enable_streaming_session": true, "enable_session_radix_cache": true,
            "enable_cache_report": true,
            "kv_events_config": r#"{"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","replay_endpoint":"tcp://127.0.0.1:5558"}"#,
            "internal_states": [{ "effective_max_running_requests_per_dp": 8 }],
        })
    }

    fn parse(info: &Value) -> FoundEngine {
        FoundEngine::parse("http://127.0.0.1:30000", 30000, info).unwrap()
    }

    #[test]
    fn sizes_and_flags_are_read() {
        let engine = parse(&info());
        assert_eq!((engine.rows, engine.pool_tokens, engine.ranks), (8, 2048, 2));
        assert_eq!((engine.role, engine.bootstrap_port), (EngineRole::Aggregated, None));
        assert_eq!((engine.missing, engine.gpus.count), (vec![], 8));
        assert!(!engine.exposes_kv_events && !engine.wants_key);
        let mut shared = info();
        shared["enable_dp_attention"] = true.into();
        assert_eq!(parse(&shared).gpus.count, 4, "ranks share the GPUs");
    }

    #[test]
    fn each_missing_flag_is_named_and_pairs_need_none_of_sessions() {
        let silent = r#"{"publisher":"zmq","endpoint":"tcp://*:5557"}"#;
        for (key, value, flag) in [
            ("enable_streaming_session", json!(false), flags::STREAMING_SESSION),
            ("enable_session_radix_cache", json!(false), flags::SESSION_RADIX_CACHE),
            ("enable_cache_report", json!(null), flags::CACHE_REPORT),
            ("kv_events_config", json!(null), flags::KV_EVENTS),
            ("kv_events_config", json!(silent), flags::KV_REPLAY),
        ] {
            let mut info = info();
            info[key] = value;
            assert_eq!(parse(&info).missing, [flag]);
        }
        let mut prefill = info();
        prefill["disaggregation_mode"] = "prefill".into();
        prefill["enable_streaming_session"] = false.into();
        prefill["enable_session_radix_cache"] = false.into();
        let prefill = parse(&prefill);
        assert_eq!((prefill.missing, prefill.bootstrap_port), (vec![], Some(8998)));
    }

    #[test]
    fn kv_events_that_other_hosts_reach_are_noticed() {
        for (endpoint, is_exposed) in [
            ("tcp://*:5557", true),
            ("tcp://0.0.0.0:1", true),
            ("tcp://node-1:1", true),
            ("tcp://[::1]:1", false),
            ("tcp://localhost:1", false),
            ("ipc:///run/kv", false),
        ] {
            let mut info = info();
            let config = json!({ "publisher": "zmq", "endpoint": endpoint });
            info["kv_events_config"] = config.to_string().into();
            assert_eq!(parse(&info).exposes_kv_events, is_exposed, "{endpoint}");
        }
    }

    #[test]
    fn another_server_s_answer_names_what_is_missing() {
        for key in ["version", "context_length", "max_total_num_tokens"] {
            let mut info = info();
            info.as_object_mut().unwrap().remove(key);
            let why = FoundEngine::parse("u", 1, &info).unwrap_err();
            assert!(why.contains(key), "{why}");
        }
        assert!(FoundEngine::parse("u", 1, &json!({ "status": "ok" })).is_err());
        assert!(FoundEngine::parse("u", 1, &Value::Null).is_err());
    }
}
