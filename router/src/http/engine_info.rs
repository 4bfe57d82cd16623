//! Serves what the engines say of themselves: `/model_info`, `/server_info` and `/v1/loads`.
//!
//! An engine's own answer has its API keys and the paths of its host. So clients get harmless
//! fields of one engine; admins get all engines' answers without the credentials.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{Extension, State},
    response::{IntoResponse as _, Response},
};
use http::uri::PathAndQuery;
use serde::Serialize;
use serde_json::{Map, Value, json};
use service::refusal::{Code, Refusal};

use super::{SharedState, respond};
use crate::{
    auth::Caller,
    placement::NoWorker,
    turn::engine_info::{EngineInfoAnswer, ask_all, ask_one},
};

/// Fields of `/model_info` that any client gets.
const MODEL_FIELDS: [&str; 14] = [
    "architectures",
    "eos_token_id",
    "has_audio_understanding",
    "has_image_understanding",
    "is_generation",
    "model_path",
    "model_type",
    "preferred_sampling_params",
    "reasoning_parser",
    "served_model_name",
    "tokenizer_path",
    "tool_call_parser",
    "vocab_size",
    "weight_version",
];
/// Fields of `/server_info`, and of its ranks' states, that any client gets.
const SERVER_FIELDS: [&str; 29] = [
    "attention_backend",
    "avg_spec_accept_length",
    "chunked_prefill_size",
    "context_length",
    "disaggregation_mode",
    "dp_size",
    "dtype",
    "effective_max_running_requests_per_dp",
    "enable_cache_report",
    "enable_lora",
    "ep_size",
    "kv_cache_dtype",
    "last_gen_throughput",
    "max_req_input_len",
    "max_running_requests",
    "max_total_num_tokens",
    "max_total_tokens",
    "memory_usage",
    "model_path",
    "page_size",
    "pp_size",
    "quantization",
    "served_model_name",
    "speculative_algorithm",
    "status",
    "tokenizer_path",
    "tp_size",
    "version",
    "weight_version",
];
const STATES_FIELD: &str = "internal_states";
/// Fields whose value may be a path of the engine's host.
const PATH_FIELDS: [&str; 2] = ["model_path", "tokenizer_path"];
/// Parts of the names of fields that hold a credential. No answer has them.
const CREDENTIAL_MARKS: [&str; 4] = ["api_key", "password", "secret", "launch_command"];

pub(super) async fn model(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
) -> Response {
    show(&shared, &caller, "/model_info", &MODEL_FIELDS).await
}

pub(super) async fn server(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
) -> Response {
    show(&shared, &caller, "/server_info", &SERVER_FIELDS).await
}

pub(super) async fn loads(State(shared): SharedState) -> Response {
    let path = PathAndQuery::from_static("/v1/loads?include=all");
    let answers = ask_all(&shared, path).await;
    Json(merge_loads(answers)).into_response()
}

/// Answers with one engine's `fields`, or to an admin with the whole answers of all engines.
async fn show(
    shared: &crate::turn::shared::Shared,
    caller: &Caller,
    path: &'static str,
    fields: &[&str],
) -> Response {
    let path = PathAndQuery::from_static(path);
    if caller.is_admin {
        return Json(merge(ask_all(shared, path).await)).into_response();
    }
    match ask_one(shared, path).await {
        None => respond(shared, Err(NoWorker::Unusable.into())),
        Some(EngineInfoAnswer { answer: Ok(answer), .. }) => {
            Json(keep_fields(&answer, fields)).into_response()
        }
        Some(EngineInfoAnswer { answer: Err(why), .. }) => {
            tracing::debug!(why, "an engine doesn't describe itself");
            let message = "the worker that was asked gave no answer; try again";
            respond(shared, Err(Refusal::new(Code::WorkerUnreachable, message)))
        }
    }
}

fn keep_fields(answer: &Value, fields: &[&str]) -> Value {
    let keep = |object: &Value| {
        let members = object.as_object().into_iter().flatten();
        let kept = members.filter(|(name, _)| fields.contains(&name.as_str()));
        let mut kept: Map<String, Value> =
            kept.map(|(name, value)| (name.clone(), value.clone())).collect();
        hide_paths(&mut kept);
        Value::Object(kept)
    };
    let mut shown = keep(answer);
    if let Some(states) = answer.get(STATES_FIELD).and_then(Value::as_array) {
        shown[STATES_FIELD] = states.iter().map(keep).collect();
    }
    shown
}

/// Shortens a path of the engine's host to its last part. A name of a model hub stays.
fn hide_paths(object: &mut Map<String, Value>) {
    for field in PATH_FIELDS {
        let Some(Value::String(path)) = object.get_mut(field) else { continue };
        if path.starts_with(['/', '.', '~']) {
            let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
            *path = name.to_owned();
        }
    }
}

/// The first engine's fields stand on top, as clients of one engine expect them.
fn merge(answers: Vec<EngineInfoAnswer>) -> Value {
    let mut agents = Map::new();
    let mut merged = None;
    for EngineInfoAnswer { agent, answer } in answers {
        let shown = match answer {
            Ok(mut answer) => {
                remove_credentials(&mut answer);
                merged.get_or_insert_with(|| answer.clone());
                answer
            }
            Err(why) => json!({ "error": why }),
        };
        agents.insert(agent, shown);
    }
    let mut merged = merged.filter(Value::is_object).unwrap_or_else(|| json!({}));
    merged["agents"] = Value::Object(agents);
    merged
}

/// The loads of all engines' ranks, each with its `agent`, and why an agent gave none.
#[derive(Debug, Default, Serialize)]
struct Loads {
    loads: Vec<Value>,
    errors: BTreeMap<String, String>,
}

fn merge_loads(answers: Vec<EngineInfoAnswer>) -> Loads {
    let Loads { mut loads, mut errors } = Loads::default();
    for EngineInfoAnswer { agent, answer } in answers {
        match answer {
            Ok(mut answer) => {
                let Some(Value::Array(ranks)) = answer.get_mut("loads").map(Value::take) else {
                    continue;
                };
                loads.extend(ranks.into_iter().filter(Value::is_object).map(|mut rank| {
                    rank["agent"] = Value::from(agent.as_str());
                    rank
                }));
            }
            Err(why) => {
                errors.insert(agent, why);
            }
        }
    }
    Loads { loads, errors }
}

fn remove_credentials(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|name, _| !CREDENTIAL_MARKS.iter().any(|mark| name.contains(mark)));
            members.values_mut().for_each(remove_credentials);
        }
        Value::Array(elements) => elements.iter_mut().for_each(remove_credentials),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers() -> Vec<EngineInfoAnswer> {
        let engine = |port: u16| {
            json!({
                "port": port, "api_key": "k", "ssl_keyfile_password": "p", "version": "0.5.23",
                "launch_command": "sglang --api-key k", "model_path": "/data/models/qwen/",
                "internal_states": [{ "admin_api_key": "a", "last_gen_throughput": 7.5 }],
            })
        };
        let silent = EngineInfoAnswer { agent: "b".into(), answer: Err("no answer".into()) };
        let answer =
            |agent: &str, port| EngineInfoAnswer { agent: agent.into(), answer: Ok(engine(port)) };
        vec![answer("a", 1), silent, answer("c", 2)]
    }

    #[test]
    fn a_client_sees_listed_fields_and_no_path() {
        let answer = answers().remove(0).answer.unwrap();
        assert_eq!(
            keep_fields(&answer, &SERVER_FIELDS),
            json!({
                "version": "0.5.23", "model_path": "qwen",
                "internal_states": [{ "last_gen_throughput": 7.5 }],
            })
        );
        let hub = json!({ "model_path": "Qwen/Qwen3-8B" });
        assert_eq!(keep_fields(&hub, &MODEL_FIELDS), hub, "the name of a hub");
    }

    #[test]
    fn an_admin_sees_all_engines_without_credentials() {
        let merged = merge(answers());
        assert_eq!(merged["port"], 1, "as the first engine itself");
        assert_eq!(merged["agents"]["c"]["port"], 2);
        assert_eq!(merged["agents"]["b"]["error"], "no answer");
        let text = merged.to_string();
        assert!(!CREDENTIAL_MARKS.iter().any(|mark| text.contains(mark)), "{text}");
        assert_eq!(merge(vec![]), json!({ "agents": {} }));
    }

    #[test]
    fn the_loads_of_all_engines_are_one_list() {
        let answer = |agent: &str| EngineInfoAnswer {
            agent: agent.into(),
            answer: Ok(json!({ "loads": [{ "dp_rank": 0, "num_running_reqs": 3 }] })),
        };
        let silent = EngineInfoAnswer { agent: "b".into(), answer: Err("no answer".into()) };
        let Loads { loads, errors } = merge_loads(vec![answer("a"), silent, answer("c")]);
        let agents: Vec<&str> = loads.iter().map(|load| load["agent"].as_str().unwrap()).collect();
        assert_eq!(agents, ["a", "c"]);
        assert_eq!(errors["b"], "no answer");
    }
}
