//! Serves the list of models at `GET /v1/models`, and one of them at `GET /v1/models/{model}`.
//!
//! If all engines serve the same models, one engine answers: the request is placed like a turn.
//! Otherwise the router itself lists the models that the agents have reported, in the same form.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{Extension, Request, State},
    response::{IntoResponse as _, Response},
};
use proto::route::{Kind, Route};
use serde_json::{Value, json};
use service::clock::now;

use super::{IdPath, SharedState, id, respond, serve_turn};
use crate::{auth::Caller, fleet::snapshot::Snapshot, placement::NoWorker};

/// Answers with the models of the fleet.
pub(super) async fn list(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let view = shared.directory.settled_view().await;
    if view.serves_same_models() {
        let route = Route { path: "/v1/models", kind: Kind::Models };
        return serve_turn(shared, caller, route, request).await;
    }
    let models = list_models_of_workers(&view);
    if models.is_empty() {
        return respond(&shared, Err(NoWorker::Unusable.into()));
    }
    Json(json!({ "object": "list", "data": models })).into_response()
}

/// Answers with one model. Its name may contain slashes.
pub(super) async fn show(State(shared): SharedState, name: IdPath) -> Response {
    let name = match id(name) {
        Ok(name) => name,
        Err(refusal) => return respond(&shared, Err(refusal)),
    };
    let view = shared.directory.settled_view().await;
    let models = list_models_of_workers(&view);
    if let Some(model) = models.iter().find(|model| model["id"] == name.as_str()) {
        return Json(model).into_response();
    }
    if models.is_empty() {
        return respond(&shared, Err(NoWorker::Unusable.into()));
    }
    let names: Vec<&str> = models.iter().filter_map(|model| model["id"].as_str()).collect();
    respond(&shared, Err(NoWorker::Model { model: name, offered: names.join(", ") }.into()))
}

/// Lists the models of all usable workers, in the form of an engine's own list.
fn list_models_of_workers(view: &Snapshot) -> Vec<Value> {
    let now = now();
    let mut models = BTreeMap::new();
    for (.., facts) in view.workers().filter(|(worker, ..)| view.state(*worker, now).is_usable()) {
        let engine = &facts.description.engine;
        for name in engine.served_names() {
            let context_tokens = models.entry(name).or_insert(engine.context_tokens);
            // A turn may go to any worker that serves the model, so the smallest context counts.
            *context_tokens = engine.context_tokens.min(*context_tokens);
        }
    }
    let to_json = |(name, context_tokens): (&str, u32)| {
        json!({
            "id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name,
            "max_model_len": context_tokens,
        })
    };
    models.into_iter().map(to_json).collect()
}
