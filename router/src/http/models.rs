//! Serves the list of models at `GET /v1/models`, and one of them at `GET /v1/models/{model}`.
//!
//! If all engines serve the same models, one engine answers: the request is placed like a turn.
//! Otherwise, or if the settings have aliases, the router itself lists the models that the agents
//! have reported, in the same form.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::{Extension, Request, State},
    response::{IntoResponse as _, Response},
};
use contract::{
    api::{Model, Models},
    load::EngineFacts,
    route::{Kind, Route},
};
use service::clock::now;

use super::{IdPath, SharedState, data_port::serve_turn, id, respond};
use crate::{auth::Caller, fleet::snapshot::Snapshot, placement::NoWorker, turn::shared::Shared};

pub(super) async fn list(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let view = shared.directory.settled_view().await;
    if view.serves_same_models() && shared.model_names.listed().next().is_none() {
        let route = Route { path: "/v1/models", kind: Kind::Models };
        return serve_turn(&shared, caller, route, request).await;
    }
    let models = usable_names(&shared, &view);
    if models.is_empty() {
        return respond(&shared, Err(NoWorker::Unusable.into()));
    }
    let data = models.iter().filter_map(|(id, name)| describe(id, name, &view)).collect();
    Json(Models { object: "list", data }).into_response()
}

/// The name may contain slashes, and may stand for another model.
pub(super) async fn show(State(shared): SharedState, name: IdPath) -> Response {
    let id = match id(name) {
        Ok(name) => name,
        Err(refusal) => return respond(&shared, Err(refusal)),
    };
    let view = shared.directory.settled_view().await;
    let names = usable_names(&shared, &view);
    let real = shared.model_names.resolve(&id, &view.engines()).map(|real| real.name);
    let name = real.as_deref().or_else(|| names.get(id.as_str()).copied());
    if let Some(model) = name.and_then(|name| describe(&id, name, &view)) {
        return Json(model).into_response();
    }
    if names.is_empty() {
        return respond(&shared, Err(NoWorker::Unusable.into()));
    }
    let offered = names.into_keys().collect::<Vec<_>>().join(", ");
    respond(&shared, Err(NoWorker::Model { model: id, offered }.into()))
}

fn usable_names<'a>(shared: &'a Shared, view: &'a Snapshot) -> BTreeMap<&'a str, &'a str> {
    let served = usable_engines(view).flat_map(EngineFacts::served_names);
    // Where an engine serves a model of an alias's name, the name means that model.
    let names: BTreeMap<&str, &str> =
        shared.model_names.listed().chain(served.map(|name| (name, name))).collect();
    let is_served = |name: &str| usable_engines(view).any(|engine| engine.serves(name));
    names.into_iter().filter(|(_, name)| is_served(name)).collect()
}

fn usable_engines(view: &Snapshot) -> impl Iterator<Item = &EngineFacts> {
    let now = now();
    let usable = view.workers().filter(move |(worker, ..)| view.state(*worker, now).is_usable());
    usable.map(|(.., facts)| &facts.description.engine)
}

fn describe(id: &str, name: &str, view: &Snapshot) -> Option<Model> {
    // A turn may go to any worker that serves the model, so the smallest context counts.
    let serving = usable_engines(view).filter(|engine| engine.serves(name));
    let context_tokens = serving.map(|engine| engine.context_tokens).min()?;
    Some(Model {
        id: id.to_owned(),
        object: "model",
        created: 0,
        owned_by: "sglang",
        root: name.to_owned(),
        max_model_len: context_tokens,
    })
}
