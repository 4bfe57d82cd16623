//! Serves the routes of the router's data port, which clients use.

mod aborts;
mod access;
mod announcements;
mod control;
pub(crate) mod dashboard;
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
    routing::{MethodFilter, delete, get, on, post},
};
use contract::route::{Kind, ROUTES, Route};
use service::{
    auth::{admin_only_refusal, credential},
    clock::now,
    refusal::{Code, Refusal, is_first_try},
    server::HeldByAnswer,
};

use self::{pages::Pages, waiting::ErrorForm};
use crate::{
    auth::Caller,
    config::tables::ListenTable,
    turn::{
        self,
        access_log::AccessEntry,
        arrival::{Arrival, TurnFlags, sharer},
        error::Limit,
        shared::Shared,
        spans,
    },
};

type SharedState = State<Arc<Shared>>;

type IdPath = Result<Path<String>, PathRejection>;

fn id(path: IdPath) -> Result<String, Refusal> {
    path.map(|Path(id)| id).map_err(|rejection| errors::path_refusal(&rejection))
}

/// Pages of `listen.cors_origins` may read the answers.
pub(crate) fn build_routes(shared: Arc<Shared>, listen: &ListenTable) -> Router {
    let pages = Pages::new(Arc::clone(&shared), listen);
    let mut routes = Router::new();
    for Route { path, kind } in ROUTES.into_iter().filter(|route| is_passed_on(route.kind)) {
        let filters = kind.methods().iter().cloned().map(|method| {
            MethodFilter::try_from(method).expect("POST and PUT are methods that axum knows")
        });
        let methods = filters.reduce(MethodFilter::or).expect("each kind has a method");
        let handler = move |State(shared): SharedState,
                            Extension(caller): Extension<Caller>,
                            request: Request| {
            serve_turn(shared, caller, Route { path, kind }, request)
        };
        routes = routes.route(path, on(methods, handler));
    }
    let access_layer = middleware::from_fn_with_state(Arc::clone(&shared), access::log);
    let routes = routes
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
        .merge(build_admin_routes(&shared))
        .merge(health::routes())
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), prepare::decompress))
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), identify_caller))
        .layer(middleware::from_fn_with_state(pages, pages::guard))
        .layer(access_layer)
        .with_state(shared);
    prepare::wrap(routes, &listen.cors_origins)
}

/// The router has answers of its own to the other kinds.
fn is_passed_on(kind: Kind) -> bool {
    !matches!(kind, Kind::Models | Kind::Info)
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

/// Finds out who sends a request, and removes the credential, so that neither a later step nor an
/// agent sees it. Where neither router nor agent needs one, it can only be the engine's; it stays.
async fn identify_caller(State(shared): SharedState, mut request: Request, next: Next) -> Response {
    if health::is_health_path(request.uri().path()) {
        return next.run(request).await;
    }
    match shared.auth.resolve(request.headers()).await {
        Ok(caller) => {
            if let Err(wait) = shared.shares.take_request(&caller) {
                let error = turn::error::Error::RequestRate(wait);
                return respond(&shared, Err(error.into()));
            }
            let sharer = sharer(&caller, request.extensions());
            let share = match shared.shares.requests.take(&sharer, 1, None) {
                Ok(share) => share,
                Err(refused) => {
                    let error = turn::error::Error::Limit { limit: Limit::Requests, refused };
                    return respond(&shared, Err(error.into()));
                }
            };
            if !shared.auth.passes_credentials() {
                credential::remove(request.headers_mut());
            }
            if let Some(entry) = request.extensions().get::<Arc<AccessEntry>>() {
                entry.set_principal(&caller.principal);
            }
            request.extensions_mut().insert(caller);
            let mut response = next.run(request).await;
            response.extensions_mut().insert(HeldByAnswer::new(share));
            response
        }
        Err(error) => respond(&shared, Err(error.into())),
    }
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

async fn serve_turn(
    shared: Arc<Shared>,
    caller: Caller,
    route: Route,
    request: Request,
) -> Response {
    let (mut parts, body) = request.into_parts();
    let (kind, trace) = (route.kind, spans::begin(&shared.traces, &mut parts, route));
    let (comment_interval, error_form) = (shared.waiting_comment, ErrorForm::new(&parts));
    let is_first_try = is_first_try(&parts.headers);
    let flags = TurnFlags::default();
    let turn_flags = flags.clone();
    let turn = Box::pin(async move {
        let arrival = Arrival::new(&shared, kind, caller, parts, turn_flags.clone());
        let answer = turn::pipeline::run(&shared, arrival, body).await;
        answer.map_err(|error| {
            let may_repeat = is_first_try && turn_flags.is_idempotent();
            let refusal = counted(&shared, error.into()).allow_repeat(may_repeat);
            spans::refuse(&trace, refusal.code.as_str(), refusal.code.status().as_u16());
            refusal
        })
    });
    match comment_interval {
        None => turn.await.unwrap_or_else(Refusal::into_response),
        Some(interval) => waiting::answer(turn, &flags, interval, error_form).await,
    }
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
