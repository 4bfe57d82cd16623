//! Says which retentions an engine offers, and why not the others. Pure.
//!
//! A retention is how the engine keeps a session's KV between turns. Under some of the engine's
//! flags one is impossible, under others *unsafe*: a turn would crash the engine, or sessions would
//! hold memory that nobody counts. A retention to which none of the `RULES` applies is offered.

use contract::load::{EngineRole, KvTransfer, Retention, RetentionOff};
use serde_json::Value;

use super::EngineInfo;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheFlags {
    pub is_radix_cache_off: bool,
    pub storage: Storage,
    pub second_pool: Option<SecondPool>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Storage {
    #[default]
    Absent,
    Present,
    /// An administrator may attach a back end while the engine runs, after `/server_info` was read.
    Attachable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecondPool {
    /// The KV of layers that see only the last tokens.
    SlidingWindow,
    /// The states of recurrent layers, such as Mamba's.
    Recurrent,
}

/// What a shim has said. It stays true of the engine's process while the connection is down.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShimWord {
    /// Why the engine's storage isn't guarded from turns of pinned sessions; `None` if the shims of
    /// all ranks guard it.
    pub unguarded_reason: Option<String>,
    /// What a second pool holds; the inner `None` if there is none, the outer if no shim has said.
    pub second_pool: Option<Option<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The best way first. The last one is [`Retention::None`].
    pub offered: Vec<Retention>,
    pub refused: Vec<RetentionOff>,
}

/// Needed because `/server_info` doesn't tell all: its `uses_mamba_radix_cache` is false without a
/// radix cache, and for models whose states aren't in that cache. The list follows SGLang's
/// `configs/hybrid_arch.py`.
const RECURRENT_MODEL_TYPES: [&str; 25] = [
    "bailing_hybrid",
    "bailing_moe_v3_vl",
    "falcon_h1",
    "falcon_mamba",
    "glm5_next",
    "inkling_model",
    "intern_s2_preview",
    "jet_nemotron",
    "jet_vlm",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "mamba",
    "mamba2",
    "minicpm_sala",
    "nemotron_h",
    "nemotron_h_puzzle",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp",
    "zaya",
];
/// In `layer_types` of a model's config.
const RECURRENT_LAYERS: [&str; 4] = ["mamba", "linear_attention", "recurrent", "conv"];

/// A combination of the engine's version, flags and facts under which a retention is not offered.
struct Rule {
    retention: Retention,
    /// The first version of SGLang in which the combination is safe.
    mended_in: Option<[u32; 3]>,
    /// Returns the reason for an operator; `None` if the combination is not there.
    reason: fn(&EngineInfo, &ShimWord) -> Option<String>,
}

/// The first rule that applies gives the reason. The comments name places in SGLang 0.5.23, below
/// `srt`.
///
/// SGLang itself refuses to start with streaming sessions and LMCache
/// (`arg_groups/kv_cache_hook.py:462`), sharded KV (`arg_groups/kv_shard_hook.py:151`), or another
/// tree than its own (`mem_cache/registry.py:275`), so these need no rule.
const RULES: &[Rule] = &[
    // The engine refuses to open such a session (`managers/tokenizer_control_mixin.py:1038`).
    Rule {
        retention: Retention::Pinned,
        mended_in: None,
        reason: |info, _| {
            let lacks_flag = !info.facts.streaming_sessions;
            lacks_flag.then(|| missing(Retention::Pinned))
        },
    },
    // The prefill engine's copy of a history lacks the answers (`disaggregation/prefill.py:1222`),
    // and the decode engine's second turn fails an assertion (`session/streaming_session.py:214`).
    Rule {
        retention: Retention::Pinned,
        mended_in: None,
        reason: |info, _| {
            let is_half = info.facts.role() != EngineRole::Aggregated;
            is_half.then(|| {
                let mode = &info.facts.disaggregation;
                format!("with --disaggregation-mode {mode}, neither engine has a whole history")
            })
        },
    },
    // A session's second turn crashes the engine: before the turn is queued, `_prefetch_kvcache`
    // reads the turn's node of the tree, and such a turn has none (`managers/scheduler.py:3365`).
    // The lines are the same in 0.5.20 to 0.5.23. The conformance suite shows that the fault is
    // still there.
    Rule {
        retention: Retention::Pinned,
        mended_in: None,
        reason: |info, shim| {
            let why = match info.cache.storage {
                Storage::Absent => return None,
                Storage::Present => "has a --hicache-storage-backend",
                Storage::Attachable => {
                    "has --enable-hierarchical-cache and --admin-api-key, so that a storage back \
                     end may be attached while it runs"
                }
            };
            let unguarded = shim.unguarded_reason.as_ref()?;
            Some(format!(
                "the engine {why}: with one, a pinned session's second turn ends this SGLang. \
                 Berth's shim prevents that, but {unguarded}"
            ))
        },
    },
    // A session's slot holds a part of each pool (`session/streaming_session.py:249`,
    // `managers/scheduler_components/pool_stats_observer.py:203`). The pin budget, demotion and all
    // figures of Berth count the tokens of one pool. The second one is smaller: idle sessions that
    // are within every limit of the first could hold all of it.
    Rule {
        retention: Retention::Pinned,
        mended_in: None,
        reason: |info, shim| {
            let kept = match &shim.second_pool {
                Some(said) => said.clone()?,
                None => info.cache.second_pool?.as_str().to_owned(),
            };
            Some(format!(
                "the model has a second pool, for {kept}, and Berth can't count what pinned \
                 sessions hold of it"
            ))
        },
    },
    // Tags need the tracker that `--enable-session-radix-cache` adds to the tree
    // (`mem_cache/unified_cache/session_ref_tracker.py:59`).
    Rule {
        retention: Retention::Tagged,
        mended_in: None,
        reason: |info, _| {
            let lacks_flag = !info.facts.radix_sessions;
            lacks_flag.then(|| missing(Retention::Tagged))
        },
    },
    // Sessions live on decode engines; a prompt may go to any prefill engine.
    Rule {
        retention: Retention::Tagged,
        mended_in: None,
        reason: |info, _| {
            let is_prefill = info.facts.role() == EngineRole::Prefill;
            is_prefill.then(|| "a prefill engine keeps no sessions".to_owned())
        },
    },
    // Without a radix cache nothing is left that a tag could keep
    // (`mem_cache/unified_radix_cache.py:624`).
    Rule {
        retention: Retention::Tagged,
        mended_in: None,
        reason: |info, _| {
            let has_cache = |transfer: &KvTransfer| transfer.decode_cache;
            let flag = match info.facts.role() {
                EngineRole::Decode if !info.facts.transfer.as_ref().is_some_and(has_cache) => {
                    "without --disaggregation-decode-enable-radix-cache"
                }
                _ if info.cache.is_radix_cache_off => "with --disable-radix-cache",
                _ => return None,
            };
            Some(format!("the engine runs {flag}, so it has no radix cache"))
        },
    },
];

impl ShimWord {
    #[must_use]
    pub fn none_yet() -> Self {
        Self { unguarded_reason: Some("no shim has connected".to_owned()), second_pool: None }
    }
}

impl SecondPool {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SlidingWindow => "the KV of sliding-window layers",
            Self::Recurrent => "the state of recurrent layers",
        }
    }
}

#[must_use]
pub fn offer(info: &EngineInfo, shim: &ShimWord) -> Offer {
    let mut offer = Offer { offered: vec![], refused: vec![] };
    for retention in [Retention::Pinned, Retention::Tagged, Retention::None] {
        match find_reason(RULES, retention, info, shim) {
            Some(reason) => offer.refused.push(RetentionOff { retention, reason }),
            None => offer.offered.push(retention),
        }
    }
    offer
}

/// Leaves sliding windows out: of those the engine itself tells.
#[must_use]
pub fn second_pool_of(config: &Value) -> Option<SecondPool> {
    // The config of a multimodal model has that of its language model inside.
    let configs = ["text_config", "llm_config"].into_iter().filter_map(|key| config.get(key));
    let is_recurrent = |config: &Value| {
        let model_type = config.get("model_type").and_then(Value::as_str);
        let layers = config.get("layer_types").and_then(Value::as_array).into_iter().flatten();
        model_type.is_some_and(|it| RECURRENT_MODEL_TYPES.contains(&it))
            || layers.filter_map(Value::as_str).any(|layer| RECURRENT_LAYERS.contains(&layer))
    };
    configs.chain([config]).any(is_recurrent).then_some(SecondPool::Recurrent)
}

fn find_reason(
    rules: &[Rule],
    retention: Retention,
    info: &EngineInfo,
    shim: &ShimWord,
) -> Option<String> {
    // A version that can't be read may be any.
    let is_mended = |rule: &Rule| {
        rule.mended_in.is_some_and(|first| read_version(&info.facts.version) >= Some(first))
    };
    let rules = rules.iter().filter(|rule| rule.retention == retention && !is_mended(rule));
    rules.filter_map(|rule| (rule.reason)(info, shim)).next()
}

/// `None`, which is less than every version, if it doesn't begin with three numbers, as a release
/// candidate doesn't.
fn read_version(version: &str) -> Option<[u32; 3]> {
    let mut parts = version.split('.');
    let mut part = || parts.next()?.parse::<u32>().ok();
    Some([part()?, part()?, part()?])
}

fn missing(retention: Retention) -> String {
    format!("the engine runs without {}", retention.engine_flag().unwrap_or_default())
}

#[cfg(test)]
impl EngineInfo {
    pub(crate) fn example(instance: &str) -> Self {
        let facts = contract::load::EngineFacts {
            version: "0.5.23".into(),
            models: vec!["m".into()],
            page_tokens: 16,
            context_tokens: 1024,
            vocabulary: None,
            streaming_sessions: true,
            radix_sessions: true,
            instance: instance.into(),
            disaggregation: "null".into(),
            shortens_prompts: false,
            transfer: None,
            adapters: None,
        };
        Self {
            facts,
            cache: CacheFlags::default(),
            rows: vec![8],
            pool_tokens: 1024,
            device: "cpu".into(),
            pool_bytes: vec![None],
            step_tokens_max: None,
            model_files: None,
            has_lora: false,
            can_switch_role: false,
            priority_order: None,
            missing_flags: vec![],
        }
    }
}

#[cfg(test)]
mod tests;
