//! `/generate`: the only route that supports controller sessions.

use super::{
    super::{
        hand_off::EngineMode,
        owner::Progress,
        request::{Bootstrap, Finish, Sampling, SessionParams, SessionRef, Space, Submit},
        tokenizer,
    },
    App, AppState, JsonObject, Live, event_stream, internal_error, json_response, object,
    object_error, plain_error, sse, wall_seconds,
};
use axum::{body::Body, extract::State, http::StatusCode, response::Response};
use bytes::Bytes;
use serde_json::{Map, Value, json};
use std::{fmt::Display, sync::Arc};
use tokio::task::JoinSet;

/// The default limit of output tokens.
const MAX_NEW_TOKENS_DEFAULT: usize = 128;

/// Why a request never reached the scheduler.
#[derive(Debug)]
enum Refusal {
    /// The engine raises a ValueError: status 400, or an event when streaming.
    Value(String),
    /// The engine raises another exception: status 500, or a broken stream.
    Fault,
}

/// One parsed `/generate` body.
#[derive(Debug)]
struct Call {
    prompts: Vec<Vec<u32>>,
    batch: bool,
    stream: bool,
    rids: Vec<String>,
    rank: Option<usize>,
    sampling: Sampling,
    session: SessionRef,
    space: Space,
    priority: i64,
    bootstrap: Bootstrap,
    logprobs: Option<InputLogprobs>,
}

/// The log probabilities of the prompt's tokens for which a request asks.
#[derive(Clone, Debug)]
struct InputLogprobs {
    start: Option<usize>,
    /// Whether this engine computes the prompt.
    has_prompt: bool,
    input_ids: Vec<u32>,
}

impl InputLogprobs {
    fn read(app: &App, body: &Map<String, Value>, prompts: &[Vec<u32>]) -> Option<Self> {
        body.get("return_logprob").and_then(Value::as_bool).filter(|asks| *asks)?;
        let start = body.get("logprob_start_len").and_then(Value::as_i64);
        let has_prompt = app.config.hand_off.mode != EngineMode::Decode;
        let input_ids = prompts.first().cloned().unwrap_or_default();
        Some(Self { start: start.and_then(|at| usize::try_from(at).ok()), has_prompt, input_ids })
    }

    /// Returns the list of `meta_info`. The values are those of no model.
    fn render(&self) -> String {
        let start = self.start.filter(|_| self.has_prompt).unwrap_or(usize::MAX);
        let values = self.input_ids.iter().enumerate().skip(start).map(|(at, id)| {
            let value = if at == 0 { Value::Null } else { json!(-f64::from(id % 97) / 8.0) };
            json!([value, id, null])
        });
        Value::Array(values.collect()).to_string()
    }
}

pub(super) async fn generate(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let stream = body.get("stream").and_then(Value::as_bool).unwrap_or(false);
    match read(&app, &body, stream) {
        Ok(call) if call.stream && !call.batch => stream_one(app, call).await,
        Ok(call) => answer(app, call).await,
        Err(Refusal::Value(message)) if stream => {
            let error = object(&[
                ("message", &json!(message)),
                ("type", &json!("invalid_request_error")),
                ("code", &400),
                ("retryable", &false),
            ]);
            event_stream(Body::from(format!("data: {{\"error\":{error}}}\n\ndata: [DONE]\n\n")))
        }
        Err(Refusal::Value(message)) => plain_error(&message),
        // The engine has sent the status before it raises the exception.
        Err(Refusal::Fault) if stream => broken_stream(),
        Err(Refusal::Fault) => internal_error(),
    }
}

/// Returns a stream that breaks off before its first event.
fn broken_stream() -> Response {
    let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
    event_stream(Body::from_stream(tokio_stream::once(Err::<Bytes, _>(broken))))
}

fn read(app: &App, body: &Map<String, Value>, stream: bool) -> Result<Call, Refusal> {
    let (prompts, batch) = prompts(body)?;
    let session = session_ref(body)?;
    let history = matches!(session, SessionRef::Controller(_));
    if !history && prompts.iter().any(Vec::is_empty) {
        return Err(Refusal::Value("input_ids cannot be empty.".to_owned()));
    }
    let params = body.get("sampling_params");
    // Only a limit in the request itself is checked, not the default.
    let asked = sampling(params, None).max_new_tokens;
    if let Some(message) = prompts.iter().find_map(|prompt| too_long(app, prompt.len(), asked)) {
        return Err(Refusal::Value(message));
    }
    let rids = match body.get("rid") {
        Some(Value::String(rid)) if batch => {
            (0..prompts.len()).map(|number| format!("{rid}_{number}")).collect()
        }
        Some(Value::String(rid)) => vec![rid.clone()],
        Some(Value::Array(rids)) if rids.len() == prompts.len() => {
            rids.iter().map(|rid| rid.as_str().unwrap_or_default().to_owned()).collect()
        }
        _ => prompts.iter().map(|_| app.new_id()).collect(),
    };
    let rank = routed_rank(app, body).map_err(Refusal::Value)?;
    let sampling = sampling(params, Some(MAX_NEW_TOKENS_DEFAULT));
    let (space, priority) = (space(body), priority(app, body));
    let bootstrap = Bootstrap::read(body);
    let logprobs = InputLogprobs::read(app, body, &prompts);
    Ok(Call {
        prompts,
        batch,
        stream,
        rids,
        rank,
        sampling,
        session,
        space,
        priority,
        bootstrap,
        logprobs,
    })
}

/// Returns the priority of the request's KV. It has the same name on all routes. A scheduler that
/// takes priorities gives the lowest to a request without one.
pub(super) fn priority(app: &App, body: &Map<String, Value>) -> i64 {
    let unsaid = if app.config.enable_priority_scheduling { i64::MIN } else { 0 };
    body.get("priority").and_then(Value::as_i64).unwrap_or(unsaid)
}

/// Checks the body's own tokens, and the output limit that the body names, against the context,
/// before the scheduler sees the request. Returns the error message if they are too many.
pub(super) fn too_long(app: &App, len: usize, asked: Option<usize>) -> Option<String> {
    let context = app.config.core.context_len;
    if len >= context {
        return Some(format!(
            "The input ({len} tokens) is longer than the model's context length ({context} tokens)."
        ));
    }
    let asked = asked?;
    let total = asked.saturating_add(len);
    (total > context).then(|| {
        format!(
            "Requested token count exceeds the model's maximum context length of {context} tokens. \
             You requested a total of {total} tokens: {len} tokens from the input messages and \
             {asked} tokens for the completion. Please reduce the number of tokens in the input \
             messages or the completion to fit within the limit."
        )
    })
}

/// Returns the rank of `routed_dp_rank` or its old name `data_parallel_rank`.
pub(super) fn routed_rank(app: &App, body: &Map<String, Value>) -> Result<Option<usize>, String> {
    let named = ["routed_dp_rank", "data_parallel_rank"];
    let Some(rank) = named.iter().find_map(|key| body.get(*key).filter(|v| !v.is_null())) else {
        return Ok(None);
    };
    let size = app.config.dp_size;
    let known = rank.as_u64().and_then(|rank| usize::try_from(rank).ok());
    let known = known.filter(|&rank| rank < size);
    known.map(Some).ok_or_else(|| format!("routed_dp_rank={rank} out of range [0, {size})"))
}

fn prompts(body: &Map<String, Value>) -> Result<(Vec<Vec<u32>>, bool), Refusal> {
    let present = |key: &str| body.get(key).filter(|value| !value.is_null());
    let bad =
        || Refusal::Value("Either text, input_ids or input_embeds should be provided.".into());
    match (present("text"), present("input_ids")) {
        (Some(Value::String(text)), None) => Ok((vec![tokenizer::encode(text)], false)),
        (Some(Value::Array(texts)), None) => {
            let encode = |text: &Value| text.as_str().map(tokenizer::encode).ok_or_else(bad);
            Ok((texts.iter().map(encode).collect::<Result<_, _>>()?, true))
        }
        (None, Some(Value::Array(ids))) if ids.first().is_some_and(Value::is_array) => {
            let lists = ids.iter().map(|list| token_ids(list).ok_or_else(bad));
            Ok((lists.collect::<Result<_, _>>()?, true))
        }
        (None, Some(ids)) => Ok((vec![token_ids(ids).ok_or_else(bad)?], false)),
        _ => Err(bad()),
    }
}

pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let id = |id: &Value| id.as_u64().map(|id| u32::try_from(id).unwrap_or(u32::MAX));
    value.as_array()?.iter().map(id).collect()
}

fn session_ref(body: &Map<String, Value>) -> Result<SessionRef, Refusal> {
    let params = body.get("session_params").filter(|value| !value.is_null());
    let tag = body.get("session_id").and_then(Value::as_str);
    if params.is_some() && tag.is_some() {
        let message = "session_id and session_params cannot both be set.";
        return Err(Refusal::Value(message.to_owned()));
    }
    if let Some(tag) = tag {
        return Ok(SessionRef::Tagged(tag.to_owned()));
    }
    let Some(params) = params else { return Ok(SessionRef::None) };
    let params = params.as_object().ok_or(Refusal::Fault)?;
    // The engine expands the dict into keyword arguments, so an unknown key raises a TypeError.
    const KEYS: [&str; 5] = ["id", "rid", "offset", "replace", "drop_previous_output"];
    if params.keys().any(|key| !KEYS.contains(&key.as_str())) {
        return Err(Refusal::Fault);
    }
    let text = |key: &str| params.get(key).and_then(Value::as_str).map(str::to_owned);
    let flag = |key: &str| params.get(key).and_then(Value::as_bool).unwrap_or(false);
    let Some(id) = text("id") else { return Ok(SessionRef::None) };
    Ok(SessionRef::Controller(SessionParams {
        id,
        rid: text("rid"),
        offset: params.get("offset").and_then(Value::as_i64).unwrap_or(0),
        replace: flag("replace"),
        drop_previous_output: flag("drop_previous_output"),
    }))
}

/// Returns the cache namespace of a body. An empty `extra_key` or `cache_salt` counts as absent.
pub(super) fn space(body: &Map<String, Value>) -> Space {
    let text = |key: &str| body.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    Space {
        extra_key: text("extra_key").map(str::to_owned),
        cache_salt: text("cache_salt").map(str::to_owned),
    }
}

/// Reads the sampling parameters, by their names in `/generate`.
fn sampling(params: Option<&Value>, max_default: Option<usize>) -> Sampling {
    let get = |key: &str| params.and_then(|params| params.get(key)).filter(|v| !v.is_null());
    let max = get("max_new_tokens").and_then(Value::as_u64);
    Sampling {
        max_new_tokens: max.map_or(max_default, |max| usize::try_from(max).ok()),
        ignore_eos: get("ignore_eos").and_then(Value::as_bool).unwrap_or(false),
        greedy: get("temperature").and_then(Value::as_f64) == Some(0.0),
        stop: stops(get("stop")),
    }
}

/// Returns the token sequences of the `stop` texts.
pub(super) fn stops(value: Option<&Value>) -> Vec<Vec<u32>> {
    let texts: Vec<&str> = match value {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(texts)) => texts.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    texts.into_iter().filter(|t| !t.is_empty()).map(tokenizer::encode).collect()
}

async fn submit(app: &App, call: &Call, index: usize) -> Live {
    let submit = Submit {
        rid: call.rids[index].clone(),
        input_ids: call.prompts[index].clone(),
        sampling: call.sampling.clone(),
        session: call.session.clone(),
        space: call.space.clone(),
        priority: call.priority,
        bootstrap: Some(call.bootstrap.clone()),
        given: None,
    };
    app.submit(call.rank, call.stream, submit).await
}

async fn answer(app: Arc<App>, call: Call) -> Response {
    let mut ends = JoinSet::new();
    for index in 0..call.prompts.len() {
        let mut live = submit(&app, &call, index).await;
        ends.spawn(async move {
            let progress = live.end().await;
            (index, live, progress)
        });
    }
    let mut bodies = vec![String::new(); call.prompts.len()];
    while let Some(end) = ends.join_next().await {
        let (index, live, progress) = end.expect("waiting for an end doesn't panic");
        if let Some(response) = refusal(progress.finish.as_ref()) {
            // A refused request aborts the whole batch.
            for rid in call.rids {
                app.handle.abort(rid, false).await;
            }
            return response;
        }
        bodies[index] = render(&app, &live, &progress, call.logprobs.as_ref());
    }
    let body = if call.batch { format!("[{}]", bodies.join(",")) } else { bodies.concat() };
    json_response(StatusCode::OK, &body)
}

/// Returns the HTTP error for a refused request, or `None`.
fn refusal(finish: Option<&Finish>) -> Option<Response> {
    let Some(Finish::Abort { message, status: Some(status), .. }) = finish else { return None };
    Some(match StatusCode::from_u16(*status) {
        Ok(StatusCode::BAD_REQUEST) | Err(_) => plain_error(message),
        Ok(other) => object_error(other, &status.to_string(), message),
    })
}

async fn stream_one(app: Arc<App>, call: Call) -> Response {
    let live = submit(&app, &call, 0).await;
    let renderer = Arc::clone(&app);
    sse(&app, live, move |live, progress| {
        if progress.tokens.is_empty() && progress.finish.is_none() {
            return String::new();
        }
        let done = if progress.finish.is_some() { "data: [DONE]\n\n" } else { "" };
        let text = render(&renderer, live, progress, call.logprobs.as_ref());
        format!("data: {text}\n\n{done}")
    })
}

/// Returns the text so far, without the stop text and without an incomplete last character.
pub(super) fn text(progress: &Progress) -> String {
    let mut tokens = progress.tokens.as_slice();
    if let Some(Finish::StopText(stop)) = &progress.finish {
        tokens = &tokens[..tokens.len() - stop.len()];
    }
    tokenizer::decode(tokens, progress.finish.is_some())
}

fn render(app: &App, live: &Live, progress: &Progress, logprobs: Option<&InputLogprobs>) -> String {
    let reason = progress.finish.as_ref().map_or_else(|| "null".to_owned(), finish_reason);
    let cached = progress.cached_tokens;
    let (device, host) = (cached - progress.host_tokens, progress.host_tokens);
    let prompt_tokens = app.config.prompt_tokens_said.unwrap_or(progress.prompt_tokens as u64);
    let rank = json!((app.config.dp_size > 1).then_some(progress.rank));
    let meta = [
        ("id", json!(live.rid).to_string()),
        ("finish_reason", reason),
        ("prompt_tokens", prompt_tokens.to_string()),
        ("weight_version", "\"default\"".to_owned()),
        ("num_retractions", progress.retractions.to_string()),
        ("storage_prefetch_wait", "0.0".to_owned()),
        ("storage_staging_wait", "0.0".to_owned()),
        ("reasoning_tokens", "0".to_owned()),
        ("completion_tokens", progress.tokens.len().to_string()),
        ("cached_tokens", cached.to_string()),
        ("cached_tokens_details", object(&[("device", &device), ("host", &host)])),
        ("dp_rank", rank.to_string()),
        ("request_received_ts", json!(live.received_wall).to_string()),
    ];
    let ending = if progress.finish.is_some() { ending(live, progress) } else { Vec::new() };
    let sent = [("response_sent_to_client_ts", json!(wall_seconds()).to_string())];
    let logprobs = logprobs.map(|logprobs| ("input_token_logprobs", logprobs.render()));
    let meta = meta.into_iter().chain(logprobs);
    let meta: Vec<(&str, String)> = meta.chain(ending).chain(sent).collect();
    let meta: Vec<(&str, &dyn Display)> = meta.iter().map(|(k, v)| (*k, v as _)).collect();
    object(&[
        ("text", &json!(text(progress))),
        ("output_ids", &json!(progress.tokens)),
        ("meta_info", &object(&meta)),
    ])
}

/// Returns the fields that only the final answer of a request has.
fn ending(live: &Live, progress: &Progress) -> Vec<(&'static str, String)> {
    let completion = progress.tokens.len();
    let latency = live.received.elapsed().as_secs_f64();
    let first = progress.first_token.map(|at| at.duration_since(live.received).as_secs_f64());
    let throughput = first.map(|first| completion as f64 / (latency - first).max(1e-6));
    let version = json!([{ "version": "default", "start": 0, "end": completion }]);
    vec![
        ("weight_versions", version.to_string()),
        ("queue_time", "0.0".to_owned()),
        ("e2e_latency", json!(latency).to_string()),
        ("first_token_latency", json!(first).to_string()),
        ("request_finished_ts", json!(live.received_wall + latency).to_string()),
        ("decode_throughput", json!(throughput).to_string()),
    ]
}

fn finish_reason(finish: &Finish) -> String {
    match finish {
        Finish::Length(length) => object(&[("type", &"\"length\""), ("length", length)]),
        Finish::StopToken(token) => object(&[("type", &"\"stop\""), ("matched", token)]),
        Finish::StopText(stop) => {
            let text = json!(tokenizer::decode(stop, true));
            object(&[("type", &"\"stop\""), ("matched", &text)])
        }
        Finish::Abort { message, queued: true, .. } => {
            object(&[("type", &"\"abort\""), ("message", &json!(message))])
        }
        Finish::Abort { message, status, .. } => {
            let kind = (*status == Some(400)).then_some("BadRequestError");
            object(&[
                ("type", &"\"abort\""),
                ("message", &json!(message)),
                ("status_code", &json!(status)),
                ("err_type", &json!(kind)),
            ])
        }
    }
}
