//! Checks of the engines: flags, shim, KV events, and whether the pool fits what is promised. Pure.

use contract::{
    api::Worker,
    load::{FunctionOff, Retention, RetentionOff, Source},
};
use serde_json::Value;

use super::super::{
    Check,
    Find::{Agents, Engines, Fleet, Workers},
    Found,
    facts::{Asked, Facts, setting},
    fault, warning,
};
use crate::flags;

pub const CHECKS: &[Check] = &[
    fault(
        "engine-unreadable",
        "the agent can't use the engine either",
        Agents(
            "agent.toml: engine.url = \"http://127.0.0.1:PORT\" of the engine, and its --api-key \
             in BERTH_ENGINE_API_KEY",
            |agent, _| {
                let why = agent.engine.as_ref()?.as_ref().err()?;
                let url = setting(&agent.settings, "engine.url");
                Some(format!("the engine {url} gives no /server_info: {why}"))
            },
        ),
    ),
    fault(
        "engine-key-unsent",
        "every turn gets 401 from the engine: nobody sends it the key",
        Agents(
            "agent.toml: auth.token_file; router.toml: agents.token_file, with the same token",
            sends_no_key,
        ),
    ),
    warning(
        "engine-streaming-off",
        flags::STREAMING_SESSION.why,
        Engines("start the engine with --enable-streaming-session", |worker, _| {
            lacks_flag_of(worker, Retention::Pinned)
        }),
    ),
    warning(
        "engine-radix-off",
        flags::SESSION_RADIX_CACHE.why,
        Engines("start the engine with --enable-session-radix-cache", |worker, _| {
            lacks_flag_of(worker, Retention::Tagged)
        }),
    ),
    warning(
        "engine-retention-unsafe",
        "the flag for these sessions is set, but another flag or the model rules them out",
        Fleet(find_unsafe_retentions),
    ),
    warning(
        "engine-cache-report-off",
        flags::CACHE_REPORT.why,
        Agents("start the engine with --enable-cache-report", |agent, _| {
            let is_off = agent.server_info()?["enable_cache_report"] == false;
            is_off.then(|| format!("the engine runs without {}", flags::CACHE_REPORT.name))
        }),
    ),
    warning("kv-events-off", flags::KV_EVENTS.why, Fleet(find_no_kv_events)),
    warning(
        "kv-events-unreachable",
        flags::KV_EVENTS.why,
        Engines(
            "start the engine with an \"endpoint\" in --kv-events-config that its agent reaches, \
             and \"bind\": true",
            |worker, _| why_kv_is_unknown(worker).filter(|it| !it.contains("--kv-events")),
        ),
    ),
    warning(
        "kv-replay-missing",
        flags::KV_REPLAY.why,
        Agents(
            "add \"replay_endpoint\": \"tcp://127.0.0.1:5558\" to --kv-events-config",
            |agent, _| {
                let text = agent.server_info()?["kv_events_config"].as_str()?;
                let config = serde_json::from_str::<Value>(text).ok()?;
                let lacks = config["publisher"] == "zmq" && !config["replay_endpoint"].is_string();
                lacks.then(|| "the engine publishes KV events without a replay_endpoint".into())
            },
        ),
    ),
    warning(
        "shim-silent",
        "KV figures are estimates, full histories aren't trimmed, pages aren't audited",
        Workers(flags::SHIM_FIX, |worker, facts| {
            if !worker.is_fresh() || has_shim(worker)? {
                return None;
            }
            let off = facts.agent_of(worker).and_then(|it| it.description.as_ref());
            let mut off = off.into_iter().flat_map(|it| &it.shim_functions_off);
            Some(match off.find(|off| off.function == "reports") {
                Some(off) => format!("the shim inside the engine is inert: {}", off.reason),
                None => "no figure comes from the shim inside the engine".into(),
            })
        }),
    ),
    warning(
        "shim-other-version",
        "functions of the shim are off, such as trimming full histories to what is new",
        Engines(
            "install the shim of this agent's own release, and an SGLang that has all of the \
             shim's functions (see worker-agent/shim/README.md)",
            lacks_functions,
        ),
    ),
    warning(
        "pool-too-small",
        "one session of full length takes more KV than pinned sessions may hold",
        Engines(
            "start the engine with a larger --mem-fraction-static or a smaller --context-length",
            fits_no_session,
        ),
    ),
    warning(
        "rows-too-few",
        "no session, or only one, can be pinned at a time",
        Engines("start the engine with a larger --max-running-requests", |worker, facts| {
            let reserve = facts.agent_of(worker)?.number("sessions.rows_reserve")?;
            let rows = u64::from(worker.rank.as_ref()?.rows);
            (rows < reserve + 2).then(|| {
                format!("{rows} request rows, of which sessions.rows_reserve keeps {reserve}")
            })
        }),
    ),
];

/// An agent doesn't add its engine's key if its routers aren't authenticated, and routers with keys
/// remove the clients' own.
fn sends_no_key(agent: &Asked, facts: &Facts) -> Option<String> {
    let has_keys = |it: &Asked| it.is_set("auth.keys_file") || it.is_set("auth.jwt.jwks");
    let wants_key = agent.server_info()?["api_key"].as_str().is_some_and(|key| !key.is_empty());
    let knows_routers = agent.is_set("auth.token_file") || agent.is_set("tls.client_ca");
    let is_wrong = wants_key && !knows_routers && facts.routers.iter().any(has_keys);
    is_wrong.then(|| {
        "its engine has an --api-key, which the agent adds only for routers that prove themselves"
            .into()
    })
}

/// Half of a pair can pin nothing, whatever its flags are.
fn is_whole(worker: &Worker) -> bool {
    ["", "null"].contains(&worker.engine.disaggregation.as_str())
}

fn names_missing_flag(off: &RetentionOff) -> bool {
    off.retention.engine_flag().is_some_and(|flag| off.reason.contains(&format!("without {flag}")))
}

fn lacks_flag_of(worker: &Worker, retention: Retention) -> Option<String> {
    let is_off = |off: &RetentionOff| off.retention == retention && names_missing_flag(off);
    let lacks = is_whole(worker) && worker.retentions_off.iter().any(is_off);
    lacks
        .then(|| format!("the engine runs without {}", retention.engine_flag().unwrap_or_default()))
}

fn find_unsafe_retentions(facts: &Facts, found: &mut Found) {
    for worker in facts.engines().filter(|worker| is_whole(worker)) {
        for off in worker.retentions_off.iter().filter(|off| !names_missing_flag(off)) {
            let what = format!("no session can be {}: {}", off.retention.as_str(), off.reason);
            let is_shims = off.reason.contains("shim");
            let fix = if is_shims { flags::SHIM_FIX } else { "start the engine with other flags" };
            found.add(&worker.worker, what, fix);
        }
    }
}

/// Why the router doesn't know the worker's resident blocks, if it says.
fn why_kv_is_unknown(worker: &Worker) -> Option<String> {
    let is_unknown = worker.is_fresh() && worker.kv.state == "unknown";
    worker.kv.reason.clone().filter(|reason| is_unknown && !reason.is_empty())
}

fn find_no_kv_events(facts: &Facts, found: &mut Found) {
    let flag = flags::kv_events_flag(flags::KV_EVENTS_PORT, flags::KV_EVENTS_PORT + 1);
    for worker in facts.engines() {
        let why = why_kv_is_unknown(worker).filter(|it| it.contains("--kv-events-config"));
        found.add_if(&worker.worker, why, &format!("start the engine with {flag}"));
    }
}

/// `None` if there are no figures yet.
fn has_shim(worker: &Worker) -> Option<bool> {
    let used = worker.load.as_ref()?.pool_used_tokens.as_ref()?;
    Some(used.source == Source::Shim)
}

fn lacks_functions(worker: &Worker, facts: &Facts) -> Option<String> {
    let agent =
        facts.agent_of(worker)?.description.as_ref().filter(|_| has_shim(worker) == Some(true))?;
    let version = &worker.engine.version;
    // Other functions may be off because of the engine's configuration.
    let is_reported = |off: &&FunctionOff| {
        off.function == "trimming" || off.reason.contains(&format!(" on SGLang {version}"))
    };
    let off = agent.shim_functions_off.iter().filter(is_reported);
    let off: Vec<String> =
        off.map(|off| format!("{} is off: {}", off.function, off.reason)).collect();
    let trims = agent.trim_sglang_versions.contains(version);
    match off.is_empty() {
        true if trims => None,
        true => Some(format!("the shim doesn't trim on SGLang {version}")),
        false => Some(off.join("; ")),
    }
}

fn fits_no_session(worker: &Worker, facts: &Facts) -> Option<String> {
    let settings = &facts.agent_of(worker)?.settings;
    let ratio = setting(settings, "sessions.pin_budget_ratio").as_f64()?;
    let pool_tokens = worker.rank.as_ref()?.pool_tokens;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rough comparison of sizes far below 2^52"
    )]
    let budget_tokens = (pool_tokens as f64 * ratio) as u64;
    let context_tokens = u64::from(worker.engine.context_tokens);
    (budget_tokens < context_tokens).then(|| {
        format!(
            "{budget_tokens} tokens for pinned sessions (sessions.pin_budget_ratio = {ratio} of \
             {pool_tokens}), {context_tokens} of context"
        )
    })
}
