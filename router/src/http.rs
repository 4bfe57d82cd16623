//! Serves the routes of the router's data port, which clients use.

mod aborts;
mod access;
mod announcements;
mod control;
pub(crate) mod dashboard;
mod data_port;
mod engine_info;
mod errors;
mod fleet_sessions;
mod health;
mod models;
pub(crate) mod openapi;
mod page;
mod pages;
mod placements;
mod prepare;
mod recent_turns;
mod responses;
mod sessions;
mod waiting;
mod workers;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Extension, Path, Request, State, rejection::PathRejection},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{delete, get, post},
};
use service::{
    auth::admin_only_refusal,
    clock::now,
    refusal::{Code, Refusal},
    server::App,
};

use self::data_port::DataPort;
use crate::{auth::Caller, config::tables::ListenTable, turn::shared::Shared};

type SharedState = State<Arc<Shared>>;

type IdPath = Result<Path<String>, PathRejection>;

fn id(path: IdPath) -> Result<String, Refusal> {
    path.map(|Path(id)| id).map_err(|rejection| errors::path_refusal(&rejection))
}

/// Pages of `listen.cors_origins` may read the answers.
pub(crate) fn build_app(shared: Arc<Shared>, listen: &ListenTable) -> impl App + use<> {
    let routes = build_routes(&shared).with_state(Arc::clone(&shared));
    prepare::wrap(DataPort::new(shared, listen, routes), &listen.cors_origins)
}

/// Those of turns aren't among them.
fn build_routes(shared: &Arc<Shared>) -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::show))
        .route("/model_info", get(engine_info::model))
        .route("/get_model_info", get(engine_info::model))
        .route("/server_info", get(engine_info::server))
        .route("/get_server_info", get(engine_info::server))
        .route("/v1/sessions", get(sessions::list).post(sessions::open))
        .route("/v1/sessions/{id}", get(sessions::show).delete(sessions::close))
        .route("/v1/sessions/{id}/demote", post(sessions::demote))
        .route("/v1/sessions/{id}/prefetch", post(sessions::prefetch))
        .route("/open_session", post(sessions::sglang_open))
        .route("/close_session", post(sessions::sglang_close))
        .route("/abort_request", post(aborts::abort))
        .route("/v1/agents", post(announcements::announce))
        .merge(responses::routes())
        .route("/openapi.json", get(openapi::show))
        .merge(build_admin_routes(shared))
        .merge(health::routes())
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
}

fn build_admin_routes(shared: &Arc<Shared>) -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/workers", get(workers::list))
        .route("/v1/loads", get(engine_info::loads))
        .route("/v1/placements", get(placements::list))
        .route("/v1/placements/{turn}", get(placements::show))
        .route("/v1/turns", get(recent_turns::list))
        .route("/v1/fleet/sessions", get(fleet_sessions::list))
        .route("/v1/fleet/sessions/{digest}", delete(fleet_sessions::close))
        .route("/v1/fleet/sessions/{digest}/demote", post(fleet_sessions::demote))
        .merge(control::routes())
        .route_layer(middleware::from_fn_with_state(Arc::clone(shared), require_admin))
}

async fn require_admin(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    if caller.is_admin {
        return next.run(request).await;
    }
    respond(&shared, Err(admin_only_refusal("this route needs a key with admin = true")))
}

fn respond(shared: &Shared, answer: Result<Response, Refusal>) -> Response {
    answer.unwrap_or_else(|refusal| counted(shared, refusal).into_response())
}

/// Only this function counts refusals.
fn counted(shared: &Shared, refusal: Refusal) -> Refusal {
    shared.metrics.count_refusal(refusal.code);
    match refusal.code {
        Code::NoWorker | Code::NoPair | Code::WorkerUnreachable => {
            let outage = shared.directory.view().newest_outage(now());
            refusal.retry_in_outage(outage.unwrap_or_default())
        }
        _ => refusal,
    }
}

async fn unknown_route(State(shared): SharedState) -> Response {
    respond(&shared, Err(errors::route_unknown_refusal()))
}

async fn wrong_method(State(shared): SharedState) -> Response {
    respond(&shared, Err(errors::method_refusal()))
}
