//! Routes for sessions, aborts, flushes, health, and the tokenizer.

use super::{
    super::{
        owner::{OpenSession, Standstill},
        request::{Bootstrap, Sampling, Submit},
        tokenizer,
    },
    AppState, JsonObject,
    generate::token_ids,
    json_response, plain_error, validation_error,
};
use axum::{
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Map, Value, json};
use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

/// The pause between two attempts of a flush that has a timeout.
const FLUSH_RETRY: Duration = Duration::from_millis(50);

type Object = Map<String, Value>;

/// Reads an optional field. A value of the wrong type adds a problem.
fn field<T>(
    body: &Object,
    key: &str,
    what: &str,
    problems: &mut Vec<String>,
    read: impl Fn(&Value) -> Option<T>,
) -> Option<T> {
    let value = body.get(key).filter(|value| !value.is_null())?;
    let read = read(value);
    if read.is_none() {
        problems.push(format!("  {key}: Expected `{what}`"));
    }
    read
}

fn required<T>(key: &str, value: Option<T>, problems: &mut Vec<String>) -> Option<T> {
    if value.is_none() && problems.is_empty() {
        problems.push(format!("  {key}: Field required"));
        problems.push(format!("  Object missing required field `{key}`"));
    }
    value
}

pub(super) async fn open_session(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let mut bad = Vec::new();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let capacity = field(&body, "capacity_of_str_len", "int", &mut bad, Value::as_i64);
    let id = field(&body, "session_id", "str | null", &mut bad, text);
    let streaming = field(&body, "streaming", "bool | null", &mut bad, Value::as_bool);
    let timeout = field(&body, "timeout", "float | null", &mut bad, Value::as_f64);
    if required("capacity_of_str_len", capacity, &mut bad).is_none() || !bad.is_empty() {
        return validation_error(&bad);
    }
    let streaming = streaming.unwrap_or(false);
    if streaming && !app.config.core.streaming_sessions {
        return plain_error(
            "Streaming sessions are disabled. Please relaunch with --enable-streaming-session.",
        );
    }
    let id = id.unwrap_or_else(|| app.new_id());
    // A timeout of 0 or less means at once; a timeout too large for a `Duration` means never.
    let timeout = timeout.map(|seconds| {
        Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::from_secs(1 << 40))
    });
    if app.handle.open(OpenSession { id: id.clone(), streaming, timeout }).await {
        return json_response(StatusCode::OK, &Value::String(id));
    }
    plain_error("Failed to open the session. Check if a session with the same id is still open.")
}

pub(super) async fn close_session(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let mut bad = Vec::new();
    let id = field(&body, "session_id", "str", &mut bad, |v| v.as_str().map(str::to_owned));
    match required("session_id", id, &mut bad) {
        Some(_) if app.fails_closes.load(Ordering::Relaxed) => {
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
        Some(id) => {
            app.handle.close(id).await;
            StatusCode::OK.into_response()
        }
        None => validation_error(&bad),
    }
}

pub(super) async fn abort_request(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let rid = body.get("rid").and_then(Value::as_str).unwrap_or_default().to_owned();
    let all = body.get("abort_all").and_then(Value::as_bool).unwrap_or(false);
    if all || !rid.is_empty() {
        if let Some(hand_offs) = &app.hand_offs {
            hand_offs.abort(&rid, all);
        }
        app.handle.abort(rid, all).await;
    }
    StatusCode::OK.into_response()
}

pub(super) async fn flush_cache(
    State(app): AppState,
    Query(query): Query<HashMap<String, String>>,
) -> Response {
    let timeout = query.get("timeout").and_then(|seconds| seconds.parse::<f64>().ok());
    let timeout = Duration::try_from_secs_f64(timeout.unwrap_or(0.0)).unwrap_or_default();
    let deadline = tokio::time::Instant::now() + timeout;
    loop {
        if app.handle.flush().await {
            return (StatusCode::OK, "Cache flushed.\n").into_response();
        }
        if tokio::time::Instant::now() >= deadline {
            return (StatusCode::BAD_REQUEST, "Flush cache failed.\n").into_response();
        }
        tokio::time::sleep(FLUSH_RETRY).await;
    }
}

pub(super) async fn slow_down(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let seconds = body.get("forward_sleep_time").and_then(Value::as_f64).unwrap_or(0.0);
    app.handle.slow_down(Duration::try_from_secs_f64(seconds).unwrap_or_default()).await;
    json_response(StatusCode::OK, &Value::Null)
}

/// Answers whether the scheduler is alive, not whether the engine can serve. The route submits a
/// one-token request, but any sign of the scheduler counts.
pub(super) async fn health(State(app): AppState) -> Response {
    let wait = app.config.health_wait;
    if wait.is_zero() {
        return StatusCode::OK.into_response();
    }
    let sampling = Sampling { max_new_tokens: Some(1), ..Sampling::default() };
    let rid = format!("HEALTH_CHECK_{}", app.new_id());
    // In prefill and decode mode, the engine's own requests name a host that hands nothing over.
    let host = "2.2.2.2".to_owned();
    let bootstrap = Some(Bootstrap { host, room: Some(0), ..Bootstrap::default() });
    let input_ids = vec![0];
    let submit = Submit { rid: rid.clone(), input_ids, sampling, bootstrap, ..Submit::default() };
    let probe = app.submit(None, false, submit).await;
    tokio::time::sleep(wait).await;
    let _ = app.handle.report().await;
    app.handle.abort(rid, false).await;
    drop(probe);
    StatusCode::OK.into_response()
}

pub(super) async fn ping() -> Response {
    StatusCode::OK.into_response()
}

/// Answers whether the engine runs requests. It doesn't while it is paused.
pub(super) async fn ready(State(app): AppState) -> Response {
    if app.weights.is_paused() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
        .into_response()
}

/// Lets the schedulers hang while the HTTP server answers, or go on. The engine has no such route.
pub(super) async fn hang(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let hung = body.get("hung").and_then(Value::as_bool).unwrap_or(true);
    app.handle.stand(hung.then_some(Standstill::Hung)).await;
    json_response(StatusCode::OK, &Value::Null)
}

pub(super) async fn tokenize(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let (tokens, count) = match body.get("prompt") {
        Some(Value::String(text)) => {
            let ids = tokenizer::encode(text);
            (json!(ids), json!(ids.len()))
        }
        Some(Value::Array(texts)) => {
            let texts = texts.iter().filter_map(Value::as_str);
            let ids: Vec<Vec<u32>> = texts.map(tokenizer::encode).collect();
            (json!(ids), json!(ids.iter().map(Vec::len).collect::<Vec<_>>()))
        }
        _ => return validation_error(&["  prompt: Field required".to_owned()]),
    };
    let max = app.config.core.context_len;
    let body = json!({ "tokens": tokens, "count": count, "max_model_len": max });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn detokenize(JsonObject(body): JsonObject) -> Response {
    let decode = |ids: &Value| token_ids(ids).map(|ids| tokenizer::decode(&ids, true));
    let text = match body.get("tokens") {
        Some(Value::Array(lists)) if lists.first().is_some_and(Value::is_array) => {
            json!(lists.iter().map(decode).collect::<Vec<_>>())
        }
        Some(ids) => json!(decode(ids)),
        None => return validation_error(&["  tokens: Field required".to_owned()]),
    };
    json_response(StatusCode::OK, &json!({ "text": text }))
}
