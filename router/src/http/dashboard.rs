//! Serves the dashboard on the admin port: a page that shows the fleet and its sessions, live.
//!
//! The page loads nothing from outside the program and keeps nothing. One task makes the list of
//! workers, at most once a second and only while somebody watches; a slow watcher misses lists. The
//! admin port's gate has checked each request; a stream ends when its key is taken away.

mod files;
mod live;

use std::sync::Arc;

use axum::{
    Extension, Router,
    routing::{delete, get, post},
};
use service::tasks::Tasks;

use self::live::LiveFleet;
use super::{fleet_sessions, placements, recent_turns, workers};
use crate::turn::shared::Shared;

pub(crate) fn start(shared: &Arc<Shared>, tasks: &Tasks) -> Router {
    let live = LiveFleet::start(shared, tasks);
    let api = Router::new()
        .route("/workers", get(workers::list))
        .route("/placements", get(placements::list))
        .route("/placements/{turn}", get(placements::show))
        .route("/turns", get(recent_turns::list))
        .route("/sessions", get(fleet_sessions::list))
        .route("/sessions/{digest}", delete(fleet_sessions::close))
        .route("/sessions/{digest}/demote", post(fleet_sessions::demote))
        .with_state(Arc::clone(shared));
    Router::new()
        .route("/dashboard", get(files::show_page))
        .route("/dashboard/page/{name}", get(files::show_file))
        .route("/dashboard/events", get(async move |Extension(pass)| live.subscribe(pass)))
        .nest("/dashboard/api", api)
}
