//! `/v1/messages`, and the answers of `/v1/responses`, in the engine's format for plain text only.
//!
//! Tools and reasoning are not simulated. Neither route supports sessions. `responses` has the
//! store of responses.

use super::{
    super::{
        owner::Progress,
        request::{Bootstrap, Finish, Sampling, Submit},
    },
    App, AppState, JsonObject, Live,
    generate::{text, too_long},
    json_response,
    openai::{bad_request, chat_prompt, content_text, rank, refusal},
    responses::Keeping,
    sse, validation_error, whole_seconds,
};
use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use serde_json::{Map, Value, json};
use std::sync::Arc;

type Object = Map<String, Value>;

pub(super) async fn messages(
    State(app): AppState,
    headers: HeaderMap,
    JsonObject(body): JsonObject,
) -> Response {
    let Some(messages) = with_system(&body) else {
        return validation_error(&["  messages: Field required".to_owned()]);
    };
    let Some(max) = body.get("max_tokens").and_then(Value::as_u64) else {
        return validation_error(&["  max_tokens: Field required".to_owned()]);
    };
    let submitted = Submitted { headers: &headers, body: &body, messages: &messages };
    let live = match submit(&app, submitted, Some(max), "rid", "msg_").await {
        Ok(live) => live,
        Err(response) => return *response,
    };
    if !streams(&body) {
        return complete_response(&app, live, message_body).await;
    }
    stream_message(&app, live)
}

/// Returns the messages of a conversation, with its system prompt as the first one.
fn with_system(body: &Object) -> Option<Vec<Value>> {
    let mut messages = Vec::new();
    if let Some(system) = body.get("system").filter(|v| !v.is_null()) {
        messages.push(json!({ "role": "system", "content": content_text(Some(system)) }));
    }
    messages.extend(body.get("messages")?.as_array()?.iter().cloned());
    Some(messages)
}

pub(super) async fn count_tokens(JsonObject(body): JsonObject) -> Response {
    match with_system(&body) {
        Some(messages) => {
            let count = chat_prompt(&messages).len();
            json_response(StatusCode::OK, &json!({ "input_tokens": count }))
        }
        None => validation_error(&["  messages: Field required".to_owned()]),
    }
}

pub(super) fn streams(body: &Object) -> bool {
    body.get("stream").and_then(Value::as_bool).unwrap_or(false)
}

/// A request to submit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Submitted<'a> {
    pub(super) headers: &'a HeaderMap,
    pub(super) body: &'a Object,
    /// The whole prompt.
    pub(super) messages: &'a [Value],
}

/// Submits a request. The body may have its id under `rid_key`; an id that is made has `prefix`.
pub(super) async fn submit(
    app: &App,
    submitted: Submitted<'_>,
    max: Option<u64>,
    rid_key: &str,
    prefix: &str,
) -> Result<Live, Box<Response>> {
    let Submitted { headers, body, messages } = submitted;
    let rank = rank(app, headers, body)?;
    let input_ids = chat_prompt(messages);
    let sampling = Sampling {
        max_new_tokens: max.and_then(|max| usize::try_from(max).ok()),
        greedy: body.get("temperature").and_then(Value::as_f64) == Some(0.0),
        ..Sampling::default()
    };
    if let Some(message) = too_long(app, input_ids.len(), sampling.max_new_tokens) {
        return Err(Box::new(bad_request(&message)));
    }
    let named = body.get(rid_key).and_then(Value::as_str).map(str::to_owned);
    let rid = named.unwrap_or_else(|| format!("{prefix}{}", app.new_id()));
    let bootstrap = Some(Bootstrap::read(body));
    let submit = Submit { rid, input_ids, sampling, bootstrap, ..Submit::default() };
    Ok(app.submit(rank, streams(body), submit).await)
}

async fn complete_response(
    app: &App,
    mut live: Live,
    render: fn(&App, &Live, &Progress) -> Value,
) -> Response {
    let progress = live.end().await;
    refusal(&progress)
        .unwrap_or_else(|| json_response(StatusCode::OK, &render(app, &live, &progress)))
}

fn event(name: &str, mut body: Value) -> String {
    body["type"] = json!(name);
    format!("event: {name}\ndata: {body}\n\n")
}

pub(super) fn output_item(live: &Live, progress: &Progress) -> Value {
    let part = json!({
        "type": "output_text", "text": text(progress), "annotations": [], "logprobs": null
    });
    json!({
        "id": format!("msg_{}", live.rid), "type": "message", "role": "assistant",
        "status": "completed", "content": [part],
    })
}

pub(super) fn response_body(app: &App, live: &Live, progress: &Progress) -> Value {
    let completion = progress.tokens.len();
    let status = match &progress.finish {
        None => "in_progress",
        Some(Finish::Abort { .. }) => "cancelled",
        Some(Finish::Length(_) | Finish::StopToken(_) | Finish::StopText(_)) => "completed",
    };
    let output = progress.finish.as_ref().map(|_| output_item(live, progress));
    json!({
        "id": live.rid, "object": "response", "created_at": whole_seconds(live.received_wall),
        "model": app.config.model_name(), "status": status,
        "output": output.into_iter().collect::<Vec<_>>(),
        "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
        "usage": progress.finish.as_ref().map(|_| json!({
            "input_tokens": progress.prompt_tokens,
            "input_tokens_details": { "cached_tokens": progress.cached_tokens },
            "output_tokens": completion,
            "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": progress.prompt_tokens + completion,
        })),
    })
}

pub(super) fn stream_response(app: &Arc<App>, live: Live, keeping: Keeping) -> Response {
    let renderer = Arc::clone(app);
    let (mut sent, mut first, mut sequence) = (0, true, 0u64);
    sse(app, live, move |live, progress| {
        let mut out = String::new();
        if progress.tokens.is_empty() && progress.finish.is_none() {
            return out;
        }
        let item_id = format!("msg_{}", live.rid);
        let mut push = |name: &str, mut body: Value| {
            body["sequence_number"] = json!(sequence);
            sequence += 1;
            out.push_str(&event(name, body));
        };
        if std::mem::take(&mut first) {
            let begun = Progress { finish: None, ..progress.clone() };
            let response = response_body(&renderer, live, &begun);
            push("response.created", json!({ "response": response.clone() }));
            push("response.in_progress", json!({ "response": response }));
            let item = json!({ "id": item_id, "type": "message", "role": "assistant",
                "status": "in_progress", "content": [] });
            push("response.output_item.added", json!({ "output_index": 0, "item": item }));
            let part = json!({ "type": "output_text", "text": "", "annotations": [] });
            push(
                "response.content_part.added",
                json!({ "item_id": item_id, "output_index": 0, "content_index": 0, "part": part }),
            );
        }
        let all = text(progress);
        let at = json!({ "item_id": item_id, "output_index": 0, "content_index": 0 });
        let with = |key: &str, value: Value| {
            let mut body = at.clone();
            body[key] = value;
            body
        };
        if let Some(delta) = all.get(sent..).filter(|delta| !delta.is_empty()) {
            push("response.output_text.delta", with("delta", json!(delta)));
        }
        sent = sent.max(all.len());
        if progress.finish.is_some() {
            keeping.store(&renderer, live, progress);
            let item = output_item(live, progress);
            push("response.output_text.done", with("text", json!(all)));
            push("response.content_part.done", with("part", item["content"][0].clone()));
            push("response.output_item.done", json!({ "output_index": 0, "item": item }));
            let response = response_body(&renderer, live, progress);
            push("response.completed", json!({ "response": response }));
        }
        out
    })
}

fn stop_reason(progress: &Progress) -> Value {
    match &progress.finish {
        None => Value::Null,
        Some(Finish::Length(_)) => json!("max_tokens"),
        Some(Finish::StopText(_)) => json!("stop_sequence"),
        Some(Finish::StopToken(_) | Finish::Abort { .. }) => json!("end_turn"),
    }
}

fn message_usage(app: &App, progress: &Progress) -> Value {
    let mut usage = json!({
        "input_tokens": progress.prompt_tokens, "output_tokens": progress.tokens.len()
    });
    if app.config.enable_cache_report {
        // Here `input_tokens` excludes the tokens that were read from the cache.
        usage["input_tokens"] = json!(progress.prompt_tokens - progress.cached_tokens);
        usage["cache_read_input_tokens"] = json!(progress.cached_tokens);
    }
    usage
}

fn message_body(app: &App, live: &Live, progress: &Progress) -> Value {
    let done = progress.finish.is_some();
    let content = done.then(|| json!({ "type": "text", "text": text(progress) }));
    json!({
        "id": live.rid, "type": "message", "role": "assistant",
        "content": content.into_iter().collect::<Vec<_>>(),
        "model": app.config.model_name(),
        "stop_reason": stop_reason(progress), "stop_sequence": null,
        "usage": message_usage(app, progress),
    })
}

fn stream_message(app: &Arc<App>, live: Live) -> Response {
    let renderer = Arc::clone(app);
    let (mut sent, mut first) = (0, true);
    sse(app, live, move |live, progress| {
        let mut out = String::new();
        if progress.tokens.is_empty() && progress.finish.is_none() {
            return out;
        }
        if std::mem::take(&mut first) {
            let begun = Progress { finish: None, tokens: Vec::new(), ..progress.clone() };
            let message = message_body(&renderer, live, &begun);
            out.push_str(&event("message_start", json!({ "message": message })));
            let block = json!({ "type": "text", "text": "" });
            let body = json!({ "index": 0, "content_block": block });
            out.push_str(&event("content_block_start", body));
        }
        let all = text(progress);
        if let Some(delta) = all.get(sent..).filter(|delta| !delta.is_empty()) {
            let delta = json!({ "type": "text_delta", "text": delta });
            out.push_str(&event("content_block_delta", json!({ "index": 0, "delta": delta })));
        }
        sent = sent.max(all.len());
        if progress.finish.is_some() {
            out.push_str(&event("content_block_stop", json!({ "index": 0 })));
            let delta = json!({ "stop_reason": stop_reason(progress), "stop_sequence": null });
            let usage = message_usage(&renderer, progress);
            out.push_str(&event("message_delta", json!({ "delta": delta, "usage": usage })));
            out.push_str(&event("message_stop", json!({})));
        }
        out
    })
}
