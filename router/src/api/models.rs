//! `GET /v1/models`: as an engine says it, and of a fleet of several models all of them.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use serde_json::{Value, json};

use super::{Desk, conclude, errors, serve};
use crate::{
    placement::NoWorker,
    shared::now,
    turn::Kind,
    view::{ClusterView, WorkerState},
};

pub(super) async fn list(State(shared): Desk, request: Request) -> Response {
    let view = shared.settled_view().await;
    if view.is_one_fleet() {
        return serve(shared, Kind::Plain, request).await;
    }
    let models = all(&view);
    if models.is_empty() {
        return conclude(&shared, Err(errors::no_worker(&NoWorker::Unusable)));
    }
    Json(json!({ "object": "list", "data": models })).into_response()
}

/// In the form of an engine's own list; what it says of itself beyond that differs by worker.
fn all(view: &ClusterView) -> Vec<Value> {
    let at = now();
    let takes = |worker| matches!(view.state(worker, at), WorkerState::Fresh | WorkerState::Stale);
    let mut models = BTreeMap::new();
    for (.., facts) in view.workers().filter(|(worker, ..)| takes(*worker)) {
        let engine = &facts.description.engine;
        for name in &engine.models {
            let context_tokens = models.entry(name.as_str()).or_insert(engine.context_tokens);
            // A turn may go to any of those that serve it.
            *context_tokens = engine.context_tokens.min(*context_tokens);
        }
    }
    let shown = |(name, context_tokens): (&str, u32)| {
        json!({
            "id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name,
            "max_model_len": context_tokens,
        })
    };
    models.into_iter().map(shown).collect()
}
