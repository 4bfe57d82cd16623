//! Routes of trainers: pauses, updates of the weights, and the device's memory.
//!
//! The simulated model has no weights, so an update changes only what the routes report, and
//! flushes. As in the engine, an update waits until no request runs, and requests wait for it. A
//! paused engine is updated at once.

use super::{
    super::owner::Standstill, App, AppState, JsonObject, json_response, object_error,
    validation_error,
};
use axum::{
    body::Bytes,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// The most requests that run at once.
const RUNNING_MAX: u32 = 1 << 16;
/// The pause between two aborts of all requests, until none runs.
const ABORT_PAUSE: Duration = Duration::from_millis(20);

const MEMORY_TAGS: [&str; 3] = ["kv_cache", "weights", "cuda_graph"];

/// The weights and what belongs to them.
#[derive(Debug)]
pub(in super::super) struct Weights {
    state: Mutex<WeightsState>,
    /// Each request holds a permit while it runs, and an update all permits while it lasts.
    running: Arc<Semaphore>,
    /// Whether new requests wait.
    is_paused: watch::Sender<bool>,
}

#[derive(Debug)]
struct WeightsState {
    version: String,
    model_path: String,
    /// How often the weights have changed.
    changes: u64,
    is_session_open: bool,
    released: BTreeSet<String>,
}

impl Weights {
    pub(super) fn new(model_path: &str) -> Weights {
        let state = WeightsState {
            version: "default".to_owned(),
            model_path: model_path.to_owned(),
            changes: 0,
            is_session_open: false,
            released: BTreeSet::new(),
        };
        let is_paused = watch::Sender::new(false);
        let running = Arc::new(Semaphore::new(RUNNING_MAX as usize));
        Weights { state: Mutex::new(state), running, is_paused }
    }

    /// Waits until a request may run. The request keeps the permit until it ends.
    pub(super) async fn enter(&self) -> OwnedSemaphorePermit {
        // The sender lives as long as the weights.
        let _ = self.is_paused.subscribe().wait_for(|is_paused| !is_paused).await;
        Arc::clone(&self.running).acquire_owned().await.expect("it is never closed")
    }

    pub(super) fn is_paused(&self) -> bool {
        *self.is_paused.borrow()
    }

    pub(in super::super) fn changes(&self) -> u64 {
        self.state.lock().changes
    }

    /// Returns the version and the path of the model.
    pub(super) fn labels(&self) -> (String, String) {
        let state = self.state.lock();
        (state.version.clone(), state.model_path.clone())
    }
}

fn outcome(success: bool, message: &str) -> Response {
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    json_response(status, &json!({ "success": success, "message": message }))
}

pub(super) async fn pause_generation(
    State(app): AppState,
    JsonObject(body): JsonObject,
) -> Response {
    let mode = body.get("mode").and_then(Value::as_str).unwrap_or("abort");
    app.weights.is_paused.send_replace(true);
    match mode {
        "abort" => loop {
            app.handle.abort(String::new(), true).await;
            if app.weights.running.available_permits() == RUNNING_MAX as usize {
                break;
            }
            tokio::time::sleep(ABORT_PAUSE).await;
        },
        "in_place" | "retract" => app.handle.stand(Some(Standstill::Paused)).await,
        _ => return validation_error(&["  mode: Invalid enum value".to_owned()]),
    }
    let body = json!({ "message": "Generation paused successfully.", "status": "ok" });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn continue_generation(
    State(app): AppState,
    JsonObject(_): JsonObject,
) -> Response {
    app.handle.stand(None).await;
    app.weights.is_paused.send_replace(false);
    let body = json!({ "message": "Generation continued successfully.", "status": "ok" });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn begin_weight_update(
    State(app): AppState,
    JsonObject(_): JsonObject,
) -> Response {
    let mut state = app.weights.state.lock();
    if state.is_session_open {
        return outcome(
            false,
            "a weight-update session is already open; call end_weight_update() first",
        );
    }
    state.is_session_open = true;
    outcome(true, "Success")
}

pub(super) async fn end_weight_update(State(app): AppState, JsonObject(_): JsonObject) -> Response {
    let mut state = app.weights.state.lock();
    if !state.is_session_open {
        return outcome(
            false,
            "no weight-update session is open; call begin_weight_update() first",
        );
    }
    state.is_session_open = false;
    state.changes += 1;
    outcome(true, "Success")
}

pub(super) async fn update_from_disk(
    State(app): AppState,
    JsonObject(body): JsonObject,
) -> Response {
    let Some(path) = body.get("model_path").and_then(Value::as_str) else {
        return validation_error(&["  model_path: Field required".to_owned()]);
    };
    let (success, message) = if path.contains("missing") {
        (false, format!("Failed to get model config: {path} is not a local folder."))
    } else {
        update(&app, &body, Some(path)).await
    };
    let status = if success { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    let body = json!({ "success": success, "message": message, "num_paused_requests": 0 });
    json_response(status, &body)
}

pub(super) async fn update_from_distributed(
    State(app): AppState,
    JsonObject(body): JsonObject,
) -> Response {
    update_in_session(&app, &body, "update_weights_from_distributed").await
}

pub(super) async fn update_from_tensor(
    State(app): AppState,
    JsonObject(body): JsonObject,
) -> Response {
    update_in_session(&app, &body, "update_weights_from_tensor").await
}

pub(super) async fn update_from_ipc(
    State(app): AppState,
    JsonObject(body): JsonObject,
) -> Response {
    let (success, message) = update(&app, &body, None).await;
    outcome(success, &message)
}

async fn update_in_session(app: &App, body: &Map<String, Value>, name: &str) -> Response {
    if !app.weights.state.lock().is_session_open {
        let message =
            format!("{name} must run between begin_weight_update() and end_weight_update()");
        return outcome(false, &message);
    }
    let (success, message) = update(app, body, None).await;
    outcome(success, &message)
}

/// Changes the weights when no request runs, or at once if the engine is paused. Then flushes.
async fn update(app: &App, body: &Map<String, Value>, path: Option<&str>) -> (bool, String) {
    let flag = |key: &str, default| body.get(key).and_then(Value::as_bool).unwrap_or(default);
    let text = |key: &str| body.get(key).and_then(Value::as_str);
    if flag("abort_all_requests", false) {
        app.handle.abort(String::new(), true).await;
    }
    let running = &app.weights.running;
    let all = if app.weights.is_paused() { 0 } else { RUNNING_MAX };
    let _permits = running.acquire_many(all).await.expect("it is never closed");
    {
        let mut state = app.weights.state.lock();
        state.changes += 1;
        if let Some(path) = path {
            path.clone_into(&mut state.model_path);
        }
    }
    if flag("flush_cache", true) && !app.handle.flush().await {
        let message = "Weights were updated, but the cache was not flushed because requests are \
                       still running or queued. Retract or finish them, then call /flush_cache.";
        return (false, message.to_owned());
    }
    if let Some(version) = text("weight_version") {
        version.clone_into(&mut app.weights.state.lock().version);
    }
    (true, "Succeeded to update model weights.".to_owned())
}

pub(super) async fn update_version(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let Some(version) = body.get("new_version").and_then(Value::as_str) else {
        return validation_error(&["  new_version: Field required".to_owned()]);
    };
    if body.get("abort_all_requests").and_then(Value::as_bool).unwrap_or(true) {
        app.handle.abort(String::new(), true).await;
    }
    version.clone_into(&mut app.weights.state.lock().version);
    let message = format!("Weight version updated to {version}");
    let body = json!({ "success": true, "message": message, "new_version": version });
    json_response(StatusCode::OK, &body)
}

pub(super) async fn update_group(JsonObject(_): JsonObject) -> Response {
    outcome(true, "Succeeded to initialize custom process group.")
}

/// Returns one number, which tells how often the weights have changed.
pub(super) async fn by_name(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    match body.get("name").and_then(Value::as_str) {
        Some(_) => json_response(StatusCode::OK, &json!([[app.weights.changes()]])),
        None => validation_error(&["  name: Field required".to_owned()]),
    }
}

fn tags(body: &Map<String, Value>) -> Vec<String> {
    let listed = body.get("tags").and_then(Value::as_array).cloned().unwrap_or_default();
    let listed: Vec<String> =
        listed.iter().filter_map(|tag| tag.as_str().map(str::to_owned)).collect();
    if listed.is_empty() { MEMORY_TAGS.map(str::to_owned).to_vec() } else { listed }
}

/// Releases memory. As in the engine, the process ends if a request runs.
pub(super) async fn release_memory(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let tags = tags(&body);
    let runs = app.handle.report().await.iter().any(|rank| rank.facts.running > 0);
    if runs || (tags.iter().any(|tag| tag == "kv_cache") && !app.handle.flush().await) {
        app.killed.cancel();
        return std::future::pending().await;
    }
    app.weights.state.lock().released.extend(tags);
    json_response(StatusCode::OK, &Value::Null)
}

/// Takes memory back. As in the engine, the process ends if it was not released.
pub(super) async fn resume_memory(State(app): AppState, JsonObject(body): JsonObject) -> Response {
    let are_released = {
        let mut state = app.weights.state.lock();
        tags(&body).iter().all(|tag| state.released.remove(tag))
    };
    if !are_released {
        app.killed.cancel();
        return std::future::pending().await;
    }
    json_response(StatusCode::OK, &Value::Null)
}

pub(super) async fn start_profile() -> Response {
    (StatusCode::OK, "Start profiling.\n").into_response()
}

pub(super) async fn stop_profile() -> Response {
    (StatusCode::OK, "Stop profiling. This will take some time.\n").into_response()
}

/// Loads an adapter, which answers ignore.
pub(super) async fn load_adapter(State(app): AppState, body: Bytes) -> Response {
    change_adapters(&app, &body, |loaded, name| {
        let is_new = !loaded.iter().any(|own| own == name);
        loaded.extend(is_new.then(|| name.to_owned()));
        is_new
    })
}

/// Unloads an adapter.
pub(super) async fn unload_adapter(State(app): AppState, body: Bytes) -> Response {
    change_adapters(&app, &body, |loaded, name| {
        let before = loaded.len();
        loaded.retain(|own| own != name);
        loaded.len() < before
    })
}

/// Changes the adapters by the request's name. Refuses what `change` doesn't do, and anything
/// without `--enable-lora`.
fn change_adapters(
    app: &App,
    body: &Bytes,
    change: impl FnOnce(&mut Vec<String>, &str) -> bool,
) -> Response {
    let Ok(body) = serde_json::from_slice::<Map<String, Value>>(body) else {
        return object_error(StatusCode::BAD_REQUEST, "Bad Request", "the body is no object");
    };
    let name = body.get("lora_name").and_then(Value::as_str).unwrap_or_default();
    let message = if !app.config.enable_lora {
        "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.".to_owned()
    } else if change(&mut app.adapters.lock(), name) {
        let body = json!({ "success": true, "error_message": "", "loaded_adapters": {} });
        return json_response(StatusCode::OK, &body);
    } else {
        format!("LoRA adapter '{name}' is loaded already, or not loaded.")
    };
    let body = json!({ "success": false, "error_message": message, "loaded_adapters": null });
    json_response(StatusCode::BAD_REQUEST, &body)
}
