//! The OpenAI routes, which ignore `session_params` and honour `session_id`.

use super::{
    super::{
        owner::Progress,
        request::{Bootstrap, Finish, Sampling, SessionRef, Submit},
        tokenizer,
    },
    App, AppState, JsonObject, Live,
    generate::{priority, routed_rank, space, stops, text, token_ids, too_long},
    json_response, object as fields, object_error, sse, validation_error, whole_seconds,
};
use axum::{
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use serde_json::{Map, Value, json};
use std::sync::Arc;

type Object = Map<String, Value>;

/// The default limit of output tokens of `/v1/completions`.
const COMPLETION_TOKENS_DEFAULT: usize = 16;

/// The route that an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Chat,
    Completion,
}

pub(super) fn bad_request(message: &str) -> Response {
    object_error(StatusCode::BAD_REQUEST, "BadRequest", message)
}

pub(super) async fn chat(
    State(app): AppState,
    headers: HeaderMap,
    JsonObject(body): JsonObject,
) -> Response {
    let Some(messages) = body.get("messages").and_then(Value::as_array) else {
        return validation_error(&["  messages: Field required".to_owned()]);
    };
    let prompt = chat_prompt(messages);
    let limits = ["max_completion_tokens", "max_tokens"];
    let max = limits.iter().find_map(|key| body.get(*key).and_then(Value::as_u64));
    let sampling = sampling(&body, max.and_then(|max| usize::try_from(max).ok()));
    run(app, &headers, &body, Route::Chat, prompt, sampling).await
}

pub(super) async fn completions(
    State(app): AppState,
    headers: HeaderMap,
    JsonObject(body): JsonObject,
) -> Response {
    let prompt = match body.get("prompt") {
        Some(Value::String(text)) => tokenizer::encode(text),
        Some(Value::Array(list)) if list.len() == 1 && list[0].is_string() => {
            tokenizer::encode(list[0].as_str().unwrap_or_default())
        }
        Some(ids) => match token_ids(ids) {
            Some(ids) => ids,
            None => return validation_error(&["  prompt: Expected `str | list[int]`".to_owned()]),
        },
        None => return validation_error(&["  prompt: Field required".to_owned()]),
    };
    let max = body.get("max_tokens").and_then(Value::as_u64);
    let max = max.and_then(|max| usize::try_from(max).ok()).unwrap_or(COMPLETION_TOKENS_DEFAULT);
    let sampling = sampling(&body, Some(max));
    run(app, &headers, &body, Route::Completion, prompt, sampling).await
}

/// Refuses every request, because a generation model can't embed.
pub(super) async fn embeddings() -> Response {
    bad_request("This model does not appear to be an embedding model by default.")
}

/// Returns the tokens of chat messages, whose content is a string or a list of text parts.
pub(super) fn chat_prompt(messages: &[Value]) -> Vec<u32> {
    let read: Vec<(String, String)> = messages
        .iter()
        .map(|message| {
            let role = message.get("role").and_then(Value::as_str).unwrap_or("user");
            (role.to_owned(), content_text(message.get("content")))
        })
        .collect();
    tokenizer::chat(read.iter().map(|(role, content)| (role.as_str(), content.as_str())))
}

pub(super) fn content_text(content: Option<&Value>) -> String {
    match content {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            parts.iter().filter_map(|part| part.get("text")?.as_str()).collect()
        }
        _ => String::new(),
    }
}

fn sampling(body: &Object, max_new_tokens: Option<usize>) -> Sampling {
    Sampling {
        max_new_tokens,
        ignore_eos: body.get("ignore_eos").and_then(Value::as_bool).unwrap_or(false),
        greedy: body.get("temperature").and_then(Value::as_f64) == Some(0.0),
        stop: stops(body.get("stop")),
    }
}

/// Returns the requested rank. The header overrides the body.
pub(super) fn rank(
    app: &App,
    headers: &HeaderMap,
    body: &Object,
) -> Result<Option<usize>, Box<Response>> {
    let header = headers.get("x-data-parallel-rank").and_then(|value| value.to_str().ok());
    let rank = match header.and_then(|value| value.parse::<u64>().ok()) {
        Some(rank) => {
            let named = Map::from_iter([("routed_dp_rank".to_owned(), json!(rank))]);
            routed_rank(app, &named)
        }
        None => routed_rank(app, body),
    };
    rank.map_err(|message| Box::new(bad_request(&message)))
}

async fn run(
    app: Arc<App>,
    headers: &HeaderMap,
    body: &Object,
    route: Route,
    prompt: Vec<u32>,
    sampling: Sampling,
) -> Response {
    let rank = match rank(&app, headers, body) {
        Ok(rank) => rank,
        Err(response) => return *response,
    };
    if let Some(message) = too_long(&app, prompt.len(), sampling.max_new_tokens) {
        return bad_request(&message);
    }
    if prompt.is_empty() {
        return bad_request("Prompt cannot be empty");
    }
    let rid = body.get("rid").and_then(Value::as_str).map_or_else(|| app.new_id(), str::to_owned);
    let tag = body.get("session_id").and_then(Value::as_str);
    let session = tag.map_or(SessionRef::None, |tag| SessionRef::Tagged(tag.to_owned()));
    let stream = body.get("stream").and_then(Value::as_bool).unwrap_or(false);
    let submit = Submit {
        rid,
        input_ids: prompt,
        sampling,
        session,
        space: space(body),
        priority: priority(&app, body),
        bootstrap: Some(Bootstrap::read(body)),
        given: None,
    };
    let live = app.submit(rank, stream, submit).await;
    if stream {
        let options = body.get("stream_options");
        let usage = options.and_then(|o| o.get("include_usage")).and_then(Value::as_bool);
        return stream_chunks(&app, live, route, usage.unwrap_or(false));
    }
    let mut live = live;
    let progress = live.end().await;
    if let Some(response) = refusal(&progress) {
        return response;
    }
    json_response(StatusCode::OK, &complete_body(&app, &live, route, &progress))
}

/// Returns the HTTP error for a refused request, or `None`.
pub(super) fn refusal(progress: &Progress) -> Option<Response> {
    let Some(Finish::Abort { message, status: Some(status), .. }) = &progress.finish else {
        return None;
    };
    let status = StatusCode::from_u16(*status).unwrap_or(StatusCode::BAD_REQUEST);
    let kind = if status == StatusCode::BAD_REQUEST { "BadRequest" } else { "InternalServerError" };
    Some(object_error(status, kind, message))
}

fn complete_body(app: &App, live: &Live, route: Route, progress: &Progress) -> String {
    let content = text(progress);
    let reason = progress.finish.as_ref().map(finish_reason);
    let matched = progress.finish.as_ref().map(matched_stop);
    let (object, choice) = match route {
        Route::Chat => {
            let message = json!({
                "role": "assistant", "content": content,
                "reasoning_content": null, "tool_calls": null
            });
            (
                "chat.completion",
                json!({ "index": 0, "message": message, "logprobs": null,
                "finish_reason": reason, "matched_stop": matched }),
            )
        }
        Route::Completion => (
            "text_completion",
            json!({ "index": 0, "text": content, "logprobs": null,
                "finish_reason": reason, "matched_stop": matched }),
        ),
    };
    fields(&[
        ("id", &json!(live.rid)),
        ("object", &json!(object)),
        ("created", &whole_seconds(live.received_wall)),
        ("model", &json!(app.config.model_name())),
        ("choices", &json!([choice])),
        ("usage", &usage(app, progress)),
        ("metadata", &json!({ "weight_version": "default" })),
    ])
}

fn usage(app: &App, progress: &Progress) -> Value {
    let details = app.config.enable_cache_report;
    let completion = progress.tokens.len();
    json!({
        "prompt_tokens": progress.prompt_tokens,
        "total_tokens": progress.prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details":
            details.then(|| json!({ "cached_tokens": progress.cached_tokens })),
        "reasoning_tokens": 0,
    })
}

fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Length(_) => "length",
        Finish::StopToken(_) | Finish::StopText(_) => "stop",
        Finish::Abort { .. } => "abort",
    }
}

fn matched_stop(finish: &Finish) -> Value {
    match finish {
        Finish::StopToken(token) => json!(token),
        Finish::StopText(stop) => json!(tokenizer::decode(stop, true)),
        Finish::Length(_) | Finish::Abort { .. } => Value::Null,
    }
}

fn stream_chunks(app: &Arc<App>, live: Live, route: Route, include_usage: bool) -> Response {
    let mut sent = 0;
    let mut first = true;
    let renderer = Arc::clone(app);
    let render = move |live: &Live, progress: &Progress| {
        let chunk = |choices: Value, usage: Value| {
            let object =
                if route == Route::Chat { "chat.completion.chunk" } else { "text_completion" };
            let body = fields(&[
                ("id", &json!(live.rid)),
                ("object", &json!(object)),
                ("created", &whole_seconds(live.received_wall)),
                ("model", &json!(renderer.config.model_name())),
                ("choices", &choices),
                ("usage", &usage),
            ]);
            format!("data: {body}\n\n")
        };
        let choice = |delta: Value, reason: Value, matched: Value| {
            let key = if route == Route::Chat { "delta" } else { "text" };
            json!([{ "index": 0, key: delta, "logprobs": null,
                "finish_reason": reason, "matched_stop": matched }])
        };
        let mut out = String::new();
        if progress.tokens.is_empty() && progress.finish.is_none() {
            return out;
        }
        if let Some(error) = stream_error(progress) {
            return format!("data: {error}\n\ndata: [DONE]\n\n");
        }
        if first && route == Route::Chat {
            let delta = json!({ "role": "assistant", "content": "" });
            out.push_str(&chunk(choice(delta, Value::Null, Value::Null), Value::Null));
        }
        first = false;
        let all = text(progress);
        // The final text, without its stop text, may be shorter than the text sent so far.
        let delta = all.get(sent..).unwrap_or_default();
        if !delta.is_empty() {
            let value = match route {
                Route::Chat => json!({ "content": delta }),
                Route::Completion => json!(delta),
            };
            out.push_str(&chunk(choice(value, Value::Null, Value::Null), Value::Null));
        }
        sent = sent.max(all.len());
        if let Some(finish) = &progress.finish {
            let delta = if route == Route::Chat { json!({}) } else { json!("") };
            let last = choice(delta, json!(finish_reason(finish)), matched_stop(finish));
            out.push_str(&chunk(last, Value::Null));
            if include_usage {
                out.push_str(&chunk(json!([]), usage(&renderer, progress)));
            }
            out.push_str("data: [DONE]\n\n");
        }
        out
    };
    sse(app, live, render)
}

/// Returns the event for an error after the stream's start, when the status can't change any more.
fn stream_error(progress: &Progress) -> Option<Value> {
    let Some(Finish::Abort { message, status: Some(status), .. }) = &progress.finish else {
        return None;
    };
    let kind = if *status == 400 { "BadRequestError" } else { "InternalServerError" };
    Some(json!({ "error": {
        "object": "error", "message": message, "type": kind, "param": null, "code": status
    }}))
}
