//! Serves the routes of stored responses: `/v1/responses/{id}`.
//!
//! The engine that made a response keeps it.

use std::sync::Arc;

use axum::{
    Router,
    extract::{Extension, Request, State},
    response::Response,
    routing::{any, get, post},
};
use service::refusal::{Code, Refusal};

use super::{IdPath, SharedState, id, respond};
use crate::{
    auth::Caller,
    turn::{responses, shared::Shared},
};

const ABSENT: [&str; 2] = ["/v1/responses/compact", "/v1/responses/input_tokens"];

pub(super) fn routes() -> Router<Arc<Shared>> {
    let one = get(retrieve).delete(|state| refuse(state, "responses can't be deleted"));
    let items = get(|state| refuse(state, "a response's input items can't be listed"));
    // Routes of OpenAI's that SGLang hasn't. Clients look for 404, and no response has such an id.
    let absent = ABSENT
        .iter()
        .fold(Router::new(), |routes, path| routes.route(path, any(super::unknown_route)));
    absent
        .route("/v1/responses/{id}", one)
        .route("/v1/responses/{id}/cancel", post(pass_on))
        .route("/v1/responses/{id}/input_items", items)
}

async fn retrieve(
    state: SharedState,
    caller: Extension<Caller>,
    path: IdPath,
    request: Request,
) -> Response {
    let query = request.uri().query().unwrap_or_default();
    if query.split('&').any(|pair| pair == "stream=true") {
        return refuse(state, "a stored response can't be streamed; leave `stream` out").await;
    }
    pass_on(state, caller, path, request).await
}

async fn pass_on(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    path: IdPath,
    request: Request,
) -> Response {
    let answer = async {
        let id = id(path)?;
        let (parts, _) = request.into_parts();
        // An id that is found has only letters, digits and `_`, so the client's path is right.
        let path = parts.uri.path_and_query().cloned();
        let path = path.unwrap_or_else(|| http::uri::PathAndQuery::from_static("/"));
        let (principal, headers) = (&caller.principal, parts.headers);
        let asked =
            responses::ask_engine(&shared, principal, &id, parts.method, path, headers).await;
        asked.map_err(Refusal::from)
    };
    let answer = answer.await;
    respond(&shared, answer)
}

async fn refuse(State(shared): SharedState, message: &'static str) -> Response {
    let message = format!("the engine has no such function: {message}");
    respond(&shared, Err(Refusal::new(Code::EngineLacks, message)))
}
