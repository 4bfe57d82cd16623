//! Serves the dashboard on the admin port: a page that shows the fleet and its sessions, live.
//!
//! The page's files are in the program; the page loads nothing else and keeps nothing. Its data
//! come from the routes of admins under `/dashboard/api`, and from a stream of events that has the
//! list of workers. One task makes that list, at most once a second and only while somebody
//! watches, and all watchers share it. A watcher that is slow misses lists, never memory.
//!
//! The admin port's gate has checked the key, the host and the origin of each request. The stream
//! ends when its key is taken away.

mod files;
mod live;

use std::sync::Arc;

use axum::{
    Extension, Router,
    routing::{delete, get, post},
};
use service::tasks::Tasks;

use self::live::LiveFleet;
use super::{fleet_sessions, placements, turns, workers};
use crate::turn::shared::Shared;

/// Starts the task that makes the lists of workers, and returns the dashboard's routes.
pub(crate) fn start(shared: &Arc<Shared>, tasks: &Tasks) -> Router {
    let live = LiveFleet::start(shared, tasks);
    let api = Router::new()
        .route("/workers", get(workers::list))
        .route("/placements", get(placements::list))
        .route("/placements/{turn}", get(placements::show))
        .route("/turns", get(turns::list))
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
