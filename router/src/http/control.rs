//! Serves the engines' control routes for admins: pauses, flushes and updates of the weights.

mod merge;

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Extension, Request, State},
    response::Response,
    routing::{MethodFilter, MethodRouter, on},
};
use contract::control::{CONTROL_ROUTES, ControlRoute};
use service::refusal::{Code, Refusal};

use super::{SharedState, respond};
use crate::{
    auth::Caller,
    turn::{self, arrival, body::Compression, control::ControlRequest, shared::Shared},
};

pub(super) fn routes() -> axum::Router<Arc<Shared>> {
    let add = |routes: axum::Router<Arc<Shared>>, route: ControlRoute| {
        routes.route(route.path, handler(route))
    };
    CONTROL_ROUTES.into_iter().fold(axum::Router::new(), add)
}

fn handler(route: ControlRoute) -> MethodRouter<Arc<Shared>> {
    let get = route.takes_get.then_some(MethodFilter::GET);
    on(get.map_or(MethodFilter::POST, |get| get.or(MethodFilter::POST)), serve)
}

async fn serve(
    State(shared): SharedState,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Response {
    let answer = run(&shared, &caller, request).await;
    respond(&shared, answer)
}

async fn run(shared: &Shared, caller: &Caller, request: Request) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    let sharer = arrival::sharer(caller, &parts.extensions);
    let compression = Compression::find(&parts.extensions);
    let reading = shared.bodies.read(body, &sharer, compression, || None);
    let held_body = reading.await.map_err(Refusal::from)?;
    let control = ControlRequest {
        method: parts.method,
        uri: parts.uri,
        headers: parts.headers,
        body: held_body.bytes.clone(),
    };
    let answers = turn::control::run(shared, control).await.map_err(|error| refusal(&error))?;
    Ok(merge::merge(answers).map(Body::from))
}

fn refusal(error: &turn::control::Error) -> Refusal {
    use turn::control::Error;
    let code = match error {
        Error::NoAgent => Code::NoWorker,
        Error::UnknownWorker { .. } => Code::WorkerUnknown,
        Error::Bodies(_) => Code::InvalidJson,
    };
    Refusal::new(code, error.to_string())
}
