//! Checks of the engines: flags, shim, KV events, and whether the pool fits what is promised. Pure.

use proto::load::{FunctionOff, RetentionOff};
use serde_json::Value;

use super::super::{
    Check, Place, Severity,
    facts::{AgentFacts, Facts, setting},
};
use crate::{
    api::Worker,
    flags::{self, EngineFlag},
};

pub const CHECKS: &[Check] = &[
    Check {
        id: "engine-unreadable",
        severity: Severity::Fault,
        why: "the agent can't use the engine either",
        find: find_unreadable,
    },
    Check {
        id: "engine-key-unsent",
        severity: Severity::Fault,
        why: "every turn gets 401 from the engine: nobody sends it the key",
        find: find_unsent_keys,
    },
    Check {
        id: "engine-streaming-off",
        severity: Severity::Warning,
        why: flags::STREAMING_SESSION.why,
        find: |facts| find_retention(facts, "pinned", flags::STREAMING_SESSION),
    },
    Check {
        id: "engine-radix-off",
        severity: Severity::Warning,
        why: flags::SESSION_RADIX_CACHE.why,
        find: |facts| find_retention(facts, "tagged", flags::SESSION_RADIX_CACHE),
    },
    Check {
        id: "engine-retention-unsafe",
        severity: Severity::Warning,
        why: "the flag for these sessions is set, but another flag or the model rules them out",
        find: find_unsafe_retentions,
    },
    Check {
        id: "engine-cache-report-off",
        severity: Severity::Warning,
        why: flags::CACHE_REPORT.why,
        find: find_no_cache_report,
    },
    Check {
        id: "kv-events-off",
        severity: Severity::Warning,
        why: flags::KV_EVENTS.why,
        find: find_no_kv_events,
    },
    Check {
        id: "kv-events-unreachable",
        severity: Severity::Warning,
        why: flags::KV_EVENTS.why,
        find: find_unreachable_kv_events,
    },
    Check {
        id: "kv-replay-missing",
        severity: Severity::Warning,
        why: flags::KV_REPLAY.why,
        find: find_no_replay,
    },
    Check {
        id: "shim-silent",
        severity: Severity::Warning,
        why: "KV figures are estimates, full histories aren't trimmed, pages aren't audited",
        find: find_silent_shims,
    },
    Check {
        id: "shim-other-version",
        severity: Severity::Warning,
        why: "functions of the shim are off, such as trimming full histories to what is new",
        find: find_other_shims,
    },
    Check {
        id: "pool-too-small",
        severity: Severity::Warning,
        why: "one session of full length takes more KV than pinned sessions may hold",
        find: find_small_pools,
    },
    Check {
        id: "rows-too-few",
        severity: Severity::Warning,
        why: "no session, or only one, can be pinned at a time",
        find: find_few_rows,
    },
];

fn find_unreadable(facts: &Facts) -> Vec<Place> {
    facts
        .agents
        .iter()
        .filter_map(|agent| {
            let Some(Err(why)) = &agent.engine else { return None };
            let url = agent.settings.as_ref().map(|it| setting(it, "engine.url").to_string());
            let what =
                format!("the engine {} gives no /server_info: {why}", url.unwrap_or_default());
            let fix = "agent.toml: engine.url = \"http://127.0.0.1:PORT\" of the engine, and its \
                       --api-key in BERTH_ENGINE_API_KEY";
            Some(Place::new(&agent.url, what, fix))
        })
        .collect()
}

/// Finds agents that don't add their engine's key, because their routers aren't authenticated,
/// where the routers remove the clients' own keys.
fn find_unsent_keys(facts: &Facts) -> Vec<Place> {
    let is_set = |settings: &Value, name: &str| {
        setting(settings, name).as_str().is_some_and(|text| !text.is_empty())
    };
    let has_keys =
        |settings: &Value| is_set(settings, "auth.keys_file") || is_set(settings, "auth.jwt.jwks");
    let removes_keys = facts.routers.iter().any(|it| it.settings.as_ref().is_some_and(has_keys));
    facts
        .agents
        .iter()
        .filter(|_| removes_keys)
        .filter_map(|agent| {
            let (Some(Ok(engine)), Some(settings)) = (&agent.engine, &agent.settings) else {
                return None;
            };
            let knows_routers =
                is_set(settings, "auth.token_file") || is_set(settings, "tls.client_ca");
            let what = "its engine has an --api-key, which the agent adds only for routers that \
                        prove themselves";
            let fix = "agent.toml: auth.token_file; router.toml: agents.token_file, with the same \
                       token";
            (is_set(engine, "api_key") && !knows_routers).then(|| Place::new(&agent.url, what, fix))
        })
        .collect()
}

/// Half of a pair can pin nothing, whatever its flags are.
fn is_whole(worker: &Worker) -> bool {
    ["", "null"].contains(&worker.engine.disaggregation.as_str())
}

fn names_missing_flag(off: &RetentionOff) -> bool {
    off.retention.engine_flag().is_some_and(|flag| off.reason.contains(&format!("without {flag}")))
}

fn find_retention(facts: &Facts, retention: &str, flag: EngineFlag) -> Vec<Place> {
    let flag = flag.name;
    let lacks = |worker: &&Worker| {
        let is_missing =
            |off: &RetentionOff| off.retention.as_str() == retention && names_missing_flag(off);
        is_whole(worker) && worker.retentions_off.iter().any(is_missing)
    };
    let found = facts.engines().filter(lacks);
    found
        .map(|worker| {
            let fix = format!("start the engine with {flag}");
            Place::new(&worker.worker, format!("the engine runs without {flag}"), fix)
        })
        .collect()
}

fn find_unsafe_retentions(facts: &Facts) -> Vec<Place> {
    let workers = facts.engines().filter(|worker| is_whole(worker));
    let unsafe_ones = workers.flat_map(|worker| {
        let off = worker.retentions_off.iter().filter(|off| !names_missing_flag(off));
        off.map(move |off| (worker, off))
    });
    unsafe_ones
        .map(|(worker, off)| {
            let what = format!("no session can be {}: {}", off.retention.as_str(), off.reason);
            let is_shims = off.reason.contains("shim");
            let fix = if is_shims { flags::SHIM_FIX } else { "start the engine with other flags" };
            Place::new(&worker.worker, what, fix)
        })
        .collect()
}

fn server_infos(facts: &Facts) -> impl Iterator<Item = (&AgentFacts, &Value)> {
    let known = facts.agents.iter().filter_map(|agent| Some((agent, agent.engine.as_ref()?)));
    known.filter_map(|(agent, engine)| Some((agent, engine.as_ref().ok()?)))
}

fn find_no_cache_report(facts: &Facts) -> Vec<Place> {
    let off = server_infos(facts).filter(|(_, info)| info["enable_cache_report"] == false);
    off.map(|(agent, _)| {
        let flag = flags::CACHE_REPORT.name;
        let what = format!("the engine runs without {flag}");
        Place::new(&agent.url, what, format!("start the engine with {flag}"))
    })
    .collect()
}

/// Workers whose resident blocks the router doesn't know, with the reason; empty: it gave none.
fn unknown_kv(facts: &Facts) -> impl Iterator<Item = (&Worker, &str)> {
    let unknown =
        facts.engines().filter(|worker| worker.is_fresh() && worker.kv.state == "unknown");
    unknown.map(|worker| (worker, worker.kv.reason.as_deref().unwrap_or_default()))
}

fn find_no_kv_events(facts: &Facts) -> Vec<Place> {
    let off = unknown_kv(facts).filter(|(_, reason)| reason.contains("--kv-events-config"));
    off.map(|(worker, reason)| {
        let flag = flags::kv_events_flag(flags::KV_EVENTS_PORT, flags::KV_EVENTS_PORT + 1);
        let fix = format!("start the engine with {flag}");
        Place::new(&worker.worker, reason, fix)
    })
    .collect()
}

fn find_unreachable_kv_events(facts: &Facts) -> Vec<Place> {
    let reasons = unknown_kv(facts).filter(|(_, it)| !it.is_empty() && !it.contains("--kv-events"));
    reasons
        .map(|(worker, reason)| {
            let fix = "start the engine with an \"endpoint\" in --kv-events-config that its agent \
                       reaches, and \"bind\": true";
            Place::new(&worker.worker, reason, fix)
        })
        .collect()
}

fn find_no_replay(facts: &Facts) -> Vec<Place> {
    let publishing = server_infos(facts).filter_map(|(agent, info)| {
        let text = info["kv_events_config"].as_str()?;
        Some((agent, serde_json::from_str::<Value>(text).ok()?))
    });
    publishing
        .filter(|(_, config)| {
            config["publisher"] == "zmq" && !config["replay_endpoint"].is_string()
        })
        .map(|(agent, _)| {
            let what = "the engine publishes KV events without a replay_endpoint";
            let fix = "add \"replay_endpoint\": \"tcp://127.0.0.1:5558\" to --kv-events-config";
            Place::new(&agent.url, what, fix)
        })
        .collect()
}

/// `None` if there are no figures yet.
fn has_shim(worker: &Worker) -> Option<bool> {
    let used = worker.load.as_ref()?.pool_used_tokens.as_ref()?;
    Some(used.source == "shim")
}

fn find_silent_shims(facts: &Facts) -> Vec<Place> {
    let silent =
        facts.workers().filter(|worker| worker.is_fresh() && has_shim(worker) == Some(false));
    silent
        .map(|worker| {
            let is_inert = |off: &&FunctionOff| off.function == "reports";
            let off =
                agent_of(facts, worker).and_then(|it| it.shim_functions_off.iter().find(is_inert));
            let what = off.map_or_else(
                || "no figure comes from the shim inside the engine".to_owned(),
                |off| format!("the shim inside the engine is inert: {}", off.reason),
            );
            Place::new(&worker.worker, what, flags::SHIM_FIX)
        })
        .collect()
}

fn find_other_shims(facts: &Facts) -> Vec<Place> {
    facts
        .engines()
        .filter(|worker| has_shim(worker) == Some(true))
        .filter_map(|worker| {
            let agent = agent_of(facts, worker)?;
            let version = &worker.engine.version;
            // Other functions may be off because of the engine's configuration.
            let is_reported = |off: &&FunctionOff| {
                off.function == "trimming" || off.reason.contains(&format!(" on SGLang {version}"))
            };
            let off = agent.shim_functions_off.iter().filter(is_reported);
            let mut what: Vec<String> =
                off.map(|off| format!("{} is off: {}", off.function, off.reason)).collect();
            if what.is_empty() && !agent.trims.as_ref()?.contains(version) {
                what.push(format!("the shim doesn't trim on SGLang {version}"));
            }
            let fix = "install the shim of this agent's own release, and an SGLang that has all of \
                       the shim's functions (see worker-agent/shim/README.md)";
            (!what.is_empty()).then(|| Place::new(&worker.worker, what.join("; "), fix))
        })
        .collect()
}

fn agent_of<'a>(facts: &'a Facts, worker: &Worker) -> Option<&'a AgentFacts> {
    facts.agents.iter().find(|it| it.agent_id.as_ref() == Some(&worker.agent))
}

fn settings_of<'a>(facts: &'a Facts, worker: &Worker) -> Option<&'a Value> {
    agent_of(facts, worker)?.settings.as_ref()
}

fn find_small_pools(facts: &Facts) -> Vec<Place> {
    facts
        .engines()
        .filter_map(|worker| {
            let ratio =
                setting(settings_of(facts, worker)?, "sessions.pin_budget_ratio").as_f64()?;
            let pool_tokens = worker.rank.as_ref()?.pool_tokens;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a rough comparison of sizes far below 2^52"
            )]
            let budget_tokens = (pool_tokens as f64 * ratio) as u64;
            let context_tokens = worker.engine.context_tokens;
            let what = format!(
                "{budget_tokens} tokens for pinned sessions (sessions.pin_budget_ratio = {ratio} \
                 of {pool_tokens}), {context_tokens} of context"
            );
            let fix = "start the engine with a larger --mem-fraction-static or a smaller \
                       --context-length";
            (budget_tokens < context_tokens).then(|| Place::new(&worker.worker, what, fix))
        })
        .collect()
}

fn find_few_rows(facts: &Facts) -> Vec<Place> {
    facts
        .engines()
        .filter_map(|worker| {
            let settings = settings_of(facts, worker)?;
            let reserve = setting(settings, "sessions.rows_reserve").as_u64()?;
            let rows = u64::from(worker.rank.as_ref()?.rows);
            let what =
                format!("{rows} request rows, of which sessions.rows_reserve keeps {reserve}");
            let fix = "start the engine with a larger --max-running-requests";
            (rows < reserve + 2).then(|| Place::new(&worker.worker, what, fix))
        })
        .collect()
}
