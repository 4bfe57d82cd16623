//! `/v1/responses` with the engine's response store, for plain text only.
//!
//! The store is in memory, and only as large as the tests make it, like the engine's. A response
//! in the background runs on after its answer.

use super::{
    App, AppState, JsonObject, Live, json_response,
    messages::{Submitted, output_item, response_body, stream_response, streams, submit},
    openai::refusal,
    validation_error,
};
use crate::owner::Progress;
use axum::{
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    response::Response,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{collections::HashMap, sync::Arc};

/// The beginning of every response's id.
const PREFIX: &str = "resp_";

/// The stored responses, by id.
#[derive(Debug, Default)]
pub(super) struct ResponseStore(Mutex<HashMap<String, Stored>>);

#[derive(Clone, Debug)]
struct Stored {
    body: Value,
    /// The conversation up to and with this response's answer.
    items: Vec<Value>,
}

/// What becomes of a response when it has ended.
#[derive(Clone, Debug)]
pub(super) struct Keeping {
    /// The conversation up to and with this request's input.
    items: Vec<Value>,
    is_kept: bool,
}

impl Keeping {
    /// Stores a response that has ended, unless it was cancelled.
    pub(super) fn store(&self, app: &App, live: &Live, progress: &Progress) {
        if !self.is_kept {
            return;
        }
        let mut store = app.responses.0.lock();
        if store.get(&live.rid).is_some_and(|stored| stored.body["status"] == "cancelled") {
            return;
        }
        let mut items = self.items.clone();
        items.push(output_item(live, progress));
        let body = response_body(app, live, progress);
        store.insert(live.rid.clone(), Stored { body, items });
    }
}

pub(super) async fn create(
    State(app): AppState,
    headers: HeaderMap,
    JsonObject(body): JsonObject,
) -> Response {
    let mut items = match body.get("input") {
        Some(Value::String(input)) => vec![json!({ "role": "user", "content": input })],
        Some(Value::Array(items)) => items.clone(),
        _ => return validation_error(&["  input: Field required".to_owned()]),
    };
    let previous = body.get("previous_response_id").and_then(Value::as_str);
    let is_background = body.get("background").and_then(Value::as_bool).unwrap_or(false);
    let is_stored = body.get("store").and_then(Value::as_bool).unwrap_or(true);
    let has_store = app.config.enable_response_store;
    if previous.is_some() && !has_store {
        return store_disabled("previous_response_id");
    }
    if is_background && !has_store {
        return store_disabled("background");
    }
    if is_background && !is_stored {
        let message = "background=true requires store=true.";
        return error(StatusCode::BAD_REQUEST, message, "store");
    }
    if let Some(id) = previous {
        match find(&app, id) {
            Ok(stored) => items.splice(0..0, stored.items).for_each(drop),
            Err(response) => return *response,
        }
    }
    let mut messages = Vec::new();
    if let Some(instructions) = body.get("instructions").filter(|v| v.is_string()) {
        messages.push(json!({ "role": "system", "content": instructions }));
    }
    messages.extend(items.iter().cloned());
    let max = body.get("max_output_tokens").and_then(Value::as_u64);
    let submitted = Submitted { headers: &headers, body: &body, messages: &messages };
    let live = match submit(&app, submitted, max, "request_id", PREFIX).await {
        Ok(live) => live,
        Err(response) => return *response,
    };
    let keeping = Keeping { items, is_kept: has_store && is_stored };
    if streams(&body) {
        return stream_response(&app, live, keeping);
    }
    if is_background {
        return run_in_background(&app, live, keeping);
    }
    let mut live = live;
    let progress = live.end().await;
    if let Some(response) = refusal(&progress) {
        return response;
    }
    keeping.store(&app, &live, &progress);
    json_response(StatusCode::OK, &response_body(&app, &live, &progress))
}

fn run_in_background(app: &Arc<App>, mut live: Live, keeping: Keeping) -> Response {
    let mut body = response_body(app, &live, &Progress::default());
    body["status"] = json!("in_progress");
    let stored = Stored { body: body.clone(), items: keeping.items.clone() };
    app.responses.0.lock().insert(live.rid.clone(), stored);
    body["status"] = json!("queued");
    let owner = Arc::clone(app);
    app.tasks.spawn(async move {
        let progress = live.end().await;
        keeping.store(&owner, &live, &progress);
    });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn retrieve(State(app): AppState, Path(id): Path<String>) -> Response {
    if !app.config.enable_response_store {
        return store_disabled("response_id");
    }
    match find(&app, &id) {
        Ok(stored) => json_response(StatusCode::OK, &stored.body),
        Err(response) => *response,
    }
}

pub(super) async fn cancel(State(app): AppState, Path(id): Path<String>) -> Response {
    if !app.config.enable_response_store {
        return store_disabled("response_id");
    }
    let stored = match find(&app, &id) {
        Ok(stored) => stored,
        Err(response) => return *response,
    };
    if stored.body["status"] != "in_progress" {
        return json_response(StatusCode::OK, &stored.body);
    }
    let mut body = stored.body;
    body["status"] = json!("cancelled");
    let cancelled = Stored { body: body.clone(), items: stored.items };
    app.responses.0.lock().insert(id.clone(), cancelled);
    app.handle.abort(id, false).await;
    json_response(StatusCode::OK, &body)
}

fn find(app: &App, id: &str) -> Result<Stored, Box<Response>> {
    if !id.starts_with(PREFIX) {
        let message =
            format!("Invalid 'response_id': '{id}'. Expected an ID that begins with 'resp'.");
        return Err(Box::new(error(StatusCode::BAD_REQUEST, &message, "response_id")));
    }
    let stored = app.responses.0.lock().get(id).cloned();
    stored.ok_or_else(|| {
        let message = format!("Response with id '{id}' not found.");
        Box::new(error(StatusCode::NOT_FOUND, &message, "response_id"))
    })
}

fn store_disabled(param: &str) -> Response {
    let message = "Response store is disabled. Stateful Responses require \
                   --enable-response-store on a standalone server; response storage is \
                   unavailable in PD mode.";
    error(StatusCode::BAD_REQUEST, message, param)
}

/// Returns an error in the form of this API, which differs from that of the engine's other routes.
fn error(status: StatusCode, message: &str, param: &str) -> Response {
    let body = json!({ "error": {
        "message": message, "type": "invalid_request_error", "param": param,
        "code": status.as_u16(),
    }});
    json_response(status, &body)
}
