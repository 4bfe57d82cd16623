//! Serves the routes by which load balancers and clients ask whether the router works.
//!
//! They need no key, and are served while the port has no connection to spare.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::get,
};
use http::StatusCode;
use service::{
    clock::now,
    refusal::{Code, Refusal},
    server::HEALTH_PATHS,
};

use super::{SharedState, respond};
use crate::{placement::NoWorker, turn::shared::Shared};

/// Routes that answer 200 as long as the process does. The other health routes ask for a worker
/// that can take turns, as an engine's own routes ask for its scheduler.
const LIVE_PATHS: [&str; 3] = ["/live", "/liveness", "/"];

pub(super) fn is_health_path(path: &str) -> bool {
    HEALTH_PATHS.contains(&path)
}

pub(super) fn routes() -> Router<Arc<Shared>> {
    HEALTH_PATHS.iter().fold(Router::new(), |routes, path| {
        let is_live_path = LIVE_PATHS.contains(path);
        let handler = get(async move |state| show(state, is_live_path));
        routes.route(path, handler)
    })
}

fn show(State(shared): SharedState, is_live_path: bool) -> Response {
    if shared.leaves.is_cancelled() && !is_live_path {
        return Refusal::new(Code::Stopping, "the router stops soon").into_response();
    }
    if is_live_path || shared.directory.view().has_usable_worker(now()) {
        return StatusCode::OK.into_response();
    }
    respond(&shared, Err(NoWorker::Unusable.into()))
}
