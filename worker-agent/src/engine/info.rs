//! Reads the engine's description from its `/server_info`. Pure.

use std::sync::Arc;

use contract::{
    count::COUNT_MAX,
    load::{EngineFacts, KvTransfer, ModelFiles},
};
use serde_json::Value;

use super::{
    missing::MissingFlag,
    retentions::{CacheFlags, SecondPool, Storage},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInfo {
    pub facts: EngineFacts,
    pub cache: CacheFlags,
    /// The rows of each DP rank's request table. A request that runs holds a row.
    pub rows: Vec<u32>,
    /// The pool's size on each rank.
    pub pool_tokens: u64,
    /// For example, `cuda` or `cpu`.
    pub device: String,
    /// For each rank: the bytes of its pool on one of its devices, precise to about 1 MiB.
    pub pool_bytes: Vec<Option<u64>>,
    /// The most prompt tokens of one step; `None`: whole prompts.
    pub step_tokens_max: Option<u64>,
    /// `None` until the engine monitor has found them.
    pub model_files: Option<ModelFiles>,
    pub has_lora: bool,
    /// The flag is `--enable-pd-role-switch`.
    pub can_switch_role: bool,
    /// `None` if the engine ignores priorities.
    pub priority_order: Option<PriorityOrder>,
    pub missing_flags: Vec<MissingFlag>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriorityOrder {
    GreatestFirst,
    LeastFirst,
}

/// What the body of a turn is checked and rewritten by.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BodyFacts {
    /// `None` if unknown, as in the next field.
    pub vocabulary_size: Option<u32>,
    pub served_model: Option<Arc<str>>,
    /// `None` if the engine ignores priorities.
    pub priority_order: Option<PriorityOrder>,
}

impl EngineInfo {
    pub fn body_facts(&self) -> BodyFacts {
        BodyFacts {
            vocabulary_size: self.facts.vocabulary,
            served_model: self.facts.models.first().map(|name| Arc::from(name.as_str())),
            priority_order: self.priority_order,
        }
    }
}

/// Real engines have far fewer.
const RANKS_MAX: u64 = 4096;
const BOOTSTRAP_PORT_DEFAULT: u16 = 8998;

pub(super) fn parse_info(value: &Value) -> Result<EngineInfo, String> {
    let number = |key: &str| value.get(key).and_then(Value::as_u64);
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    let required_number = |key: &str| number(key).ok_or(format!("{key} is missing"));
    let to_u32 = |key: &str, number: u64| {
        u32::try_from(number).map_err(|_| format!("{key} is out of range: {number}"))
    };
    let rank_states = value.get("internal_states").and_then(Value::as_array);
    let rows = rank_states
        .and_then(|states| states.first())
        .and_then(|state| state.get("effective_max_running_requests_per_dp"))
        .and_then(Value::as_u64)
        .or_else(|| number("max_running_requests"))
        .ok_or("effective_max_running_requests_per_dp is missing")?;
    let at_most = |key: &str, number: u64, max: u64| {
        if number > max { Err(format!("{key} is out of range: {number}")) } else { Ok(number) }
    };
    let ranks = at_most("dp_size", number("dp_size").unwrap_or(1).max(1), RANKS_MAX)?;
    let pool_tokens = required_number("max_total_num_tokens")?;
    let page_tokens = to_u32("page_size", number("page_size").unwrap_or(1).max(1))?;
    let context_tokens = number("context_length")
        .or_else(|| rank_states?.first()?.get("context_length")?.as_u64())
        .or_else(|| number("max_req_input_len"))
        .ok_or("context_length is missing")?;
    let model = text("served_model_name").or_else(|| text("model_path"));
    let seed = number("random_seed").unwrap_or(0);
    let startup_times = value.get("startup_time").map(Value::to_string).unwrap_or_default();
    let (role, can_switch_role) = (read_role(value), flag("enable_pd_role_switch"));
    // An engine in another role is another worker, with other sessions. Its KV is not offered on.
    let role_in_id = if can_switch_role { format!(" {role}") } else { String::new() };
    Ok(EngineInfo {
        facts: EngineFacts {
            version: text("version").unwrap_or("unknown").to_owned(),
            models: vec![model.ok_or("served_model_name is missing")?.to_owned()],
            page_tokens,
            context_tokens: to_u32("context_length", context_tokens)?,
            vocabulary: None,
            streaming_sessions: flag("enable_streaming_session"),
            radix_sessions: flag("enable_session_radix_cache"),
            // The engine reports no process id. These two values differ between processes: the seed
            // is random at each launch unless the operator sets it, and the startup times are
            // measured.
            instance: contract::id::short_sha256(
                format!("{seed} {startup_times}{role_in_id}").as_bytes(),
            ),
            disaggregation: role.to_owned(),
            shortens_prompts: flag("allow_auto_truncate"),
            adapters: Some(vec![]),
            transfer: read_transfer(value),
        },
        cache: read_cache_flags(value),
        rows: vec![to_u32("rows", rows)?; usize::try_from(ranks).map_err(|e| e.to_string())?],
        pool_tokens: at_most("max_total_num_tokens", pool_tokens, COUNT_MAX)?,
        device: text("device").unwrap_or("unknown").to_owned(),
        pool_bytes: rank_states.into_iter().flatten().map(pool_bytes).collect(),
        // The engine computes whole prompts if the number is -1.
        step_tokens_max: number("chunked_prefill_size").filter(|tokens| *tokens > 0),
        model_files: None,
        can_switch_role,
        has_lora: flag("enable_lora") || value.get("lora_paths").is_some_and(|it| !it.is_null()),
        priority_order: flag("enable_priority_scheduling").then(|| {
            let is_least_first = flag("schedule_low_priority_values_first");
            if is_least_first { PriorityOrder::LeastFirst } else { PriorityOrder::GreatestFirst }
        }),
        missing_flags: vec![],
    })
}

/// `null`, `prefill` or `decode`. The flags say in which role the engine has started, its
/// scheduler's state the present one.
pub(super) fn read_role(value: &Value) -> &str {
    fn mode(value: &Value) -> Option<&str> {
        value.get("disaggregation_mode").and_then(Value::as_str)
    }
    let scheduler = value.get("internal_states").and_then(|states| states.get(0));
    scheduler.and_then(mode).or_else(|| mode(value)).unwrap_or("null")
}

/// A rank's state has what was changed since the engine's start.
fn read_cache_flags(value: &Value) -> CacheFlags {
    let rank_state = value.get("internal_states").and_then(|states| states.get(0));
    let setting =
        |key: &str| rank_state.and_then(|state| state.get(key)).or_else(|| value.get(key));
    let is_on = |key: &str| setting(key).and_then(Value::as_bool).unwrap_or(false);
    let is_set = |key: &str| setting(key).is_some_and(|value| !value.is_null());
    let memory_usage = rank_state.and_then(|state| state.get("memory_usage"));
    let has_window_pool = memory_usage
        .and_then(|usage| usage.get("token_capacity_swa"))
        .is_some_and(|capacity| !capacity.is_null());
    CacheFlags {
        is_radix_cache_off: is_on("disable_radix_cache"),
        storage: if is_set("hicache_storage_backend") {
            Storage::Present
        } else if is_on("enable_hierarchical_cache") && is_set("admin_api_key") {
            Storage::Attachable
        } else {
            Storage::Absent
        },
        second_pool: if has_window_pool {
            Some(SecondPool::SlidingWindow)
        } else {
            is_on("uses_mamba_radix_cache").then_some(SecondPool::Recurrent)
        },
    }
}

/// `None` for an engine in neither prefill nor decode mode.
fn read_transfer(value: &Value) -> Option<KvTransfer> {
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    if !matches!(read_role(value), "prefill" | "decode") {
        return None;
    }
    let tp_size = value.get("tp_size").and_then(Value::as_u64).unwrap_or(1);
    let tp_size = u32::try_from(tp_size).unwrap_or(u32::MAX).max(1);
    let rank_state = value.get("internal_states").and_then(|states| states.get(0));
    let pool_tokens = value.get("max_total_num_tokens").and_then(Value::as_u64);
    // The engine reports the pool on one of the rank's devices.
    let bytes = rank_state.and_then(pool_bytes).map(|bytes| bytes.saturating_mul(tp_size.into()));
    let has_cache = value.get("disaggregation_decode_enable_radix_cache");
    Some(KvTransfer {
        bootstrap_host: None,
        bootstrap_port: value
            .get("disaggregation_bootstrap_port")
            .and_then(Value::as_u64)
            .and_then(|port| u16::try_from(port).ok())
            .unwrap_or(BOOTSTRAP_PORT_DEFAULT),
        backend: text("disaggregation_transfer_backend").unwrap_or_default().to_owned(),
        kv_dtype: text("kv_cache_dtype").unwrap_or("auto").to_owned(),
        tp_size,
        decode_cache: has_cache.and_then(Value::as_bool).unwrap_or(false),
        kv_bytes_per_token: bytes
            .zip(pool_tokens)
            .and_then(|(bytes, tokens)| bytes.checked_div(tokens).filter(|bytes| *bytes > 0)),
    })
}

/// The engine reports GiB with three decimals.
fn pool_bytes(rank_state: &Value) -> Option<u64> {
    let gib = rank_state.get("memory_usage")?.get("kvcache")?.as_f64()?;
    let milli_gib = (gib * 1000.0).round();
    // A value of 0.000 GiB, or of a million GiB and more, can't be a pool's size.
    let milli_gib = (1.0..1e9).contains(&milli_gib).then_some(milli_gib)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number between the bounds above"
    )]
    let milli_gib = milli_gib as u64;
    Some((milli_gib << 30) / 1000)
}

#[cfg(test)]
mod tests {
    use contract::load::EngineRole;

    use super::*;

    fn server_info() -> Value {
        serde_json::json!({
            "version": "0.5.23", "page_size": 16, "max_total_num_tokens": 2048,
            "context_length": 1024, "dp_size": 2, "served_model_name": "tiny",
            "enable_streaming_session": true, "enable_session_radix_cache": true,
            "random_seed": 42, "startup_time": {"total": 12.5}, "disaggregation_mode": "null",
            "internal_states": [{"effective_max_running_requests_per_dp": 8}],
        })
    }

    #[test]
    fn the_flags_of_the_cache_are_read_also_where_they_have_changed() {
        let flags = |change: Value| {
            let mut value = server_info();
            value.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            parse_info(&value).unwrap().cache
        };
        assert_eq!(flags(serde_json::json!({})), CacheFlags::default());
        let hierarchical = serde_json::json!({
            "enable_hierarchical_cache": true, "hicache_storage_backend": null,
            "admin_api_key": null,
        });
        assert_eq!(flags(hierarchical.clone()).storage, Storage::Absent);
        let mut with_key = hierarchical.clone();
        with_key["admin_api_key"] = "k".into();
        assert_eq!(flags(with_key).storage, Storage::Attachable);
        let mut attached = hierarchical;
        attached["internal_states"] = serde_json::json!([{
            "effective_max_running_requests_per_dp": 8, "hicache_storage_backend": "file",
        }]);
        assert_eq!(flags(attached).storage, Storage::Present);
        assert!(flags(serde_json::json!({ "disable_radix_cache": true })).is_radix_cache_off);
        for (change, pool) in [
            (serde_json::json!({ "uses_mamba_radix_cache": true }), Some(SecondPool::Recurrent)),
            (serde_json::json!({ "uses_mamba_radix_cache": false }), None),
            (window_pool(None), None),
            (window_pool(Some(4096)), Some(SecondPool::SlidingWindow)),
        ] {
            assert_eq!(flags(change.clone()).second_pool, pool, "{change}");
        }
        fn window_pool(tokens: Option<u64>) -> Value {
            serde_json::json!({ "internal_states": [{
                "effective_max_running_requests_per_dp": 8,
                "memory_usage": { "kvcache": 1.0, "token_capacity_swa": tokens },
            }] })
        }
    }

    #[test]
    fn a_restarted_engine_is_another_instance() {
        let first = parse_info(&server_info()).unwrap();
        assert_eq!(first, parse_info(&server_info()).unwrap());
        let mut value = server_info();
        value["startup_time"]["total"] = 12.6.into();
        assert_ne!(first.facts.instance, parse_info(&value).unwrap().facts.instance);
    }

    #[test]
    fn a_pool_s_bytes_are_the_engine_s_word_and_absent_without_one() {
        let state = |gib: f64| {
            serde_json::json!({"effective_max_running_requests_per_dp": 8,
                "memory_usage": {"kvcache": gib}})
        };
        let mut value = server_info();
        value["internal_states"] = serde_json::json!([state(81.25), state(0.0), {}]);
        assert_eq!(parse_info(&value).unwrap().pool_bytes, [Some(325 << 28), None, None]);
    }

    #[test]
    fn each_rank_has_its_rows_and_what_is_missing_is_named() {
        assert_eq!(parse_info(&server_info()).unwrap().rows, [8, 8]);
        let mut value = server_info();
        value.as_object_mut().unwrap().remove("max_total_num_tokens");
        assert!(parse_info(&value).unwrap_err().contains("max_total_num_tokens"));
    }

    #[test]
    fn an_engine_in_another_role_is_another_instance() {
        let mut value = server_info();
        value["disaggregation_mode"] = "decode".into();
        let fixed = parse_info(&value).unwrap();
        assert_eq!((fixed.facts.role(), fixed.can_switch_role), (EngineRole::Decode, false));
        value["enable_pd_role_switch"] = true.into();
        let before = parse_info(&value).unwrap();
        // After a switch, only the scheduler's state has the role.
        value["internal_states"][0]["disaggregation_mode"] = "prefill".into();
        let after = parse_info(&value).unwrap();
        assert_eq!((after.facts.role(), after.can_switch_role), (EngineRole::Prefill, true));
        assert!(after.facts.transfer.is_some() && before.facts.instance != after.facts.instance);
        value["internal_states"][0]["disaggregation_mode"] = "decode".into();
        assert_eq!(parse_info(&value).unwrap(), before, "it was switched back");
    }

    #[test]
    fn an_engine_with_absurd_sizes_is_refused() {
        for key in ["dp_size", "max_total_num_tokens", "page_size", "context_length"] {
            let mut value = server_info();
            value[key] = u64::MAX.into();
            let error = parse_info(&value).unwrap_err();
            assert!(error.contains(key) && error.contains("out of range"), "{error}");
        }
    }
}
