//! Serves the data port, the HTTP port on which routers send turns (one request and its answer).
//!
//! [`routes`] dispatches the requests, and [`turn`] takes a turn through the agent. On the way,
//! [`request`] checks and rewrites the body, `exchange` follows the turn inside the engine, and
//! [`response_scanner`] scans the answer. `refusals` maps the agent's errors to HTTP.

mod exchange;
mod refusals;
pub mod request;
pub mod response_scanner;
pub mod routes;
pub mod turn;

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    response::{IntoResponse, Response},
    routing::{MethodFilter, on},
};
use http::StatusCode;
use proto::process::refusal::Refusal;
use tracing::debug;

use self::routes::{ROUTES, Route};
pub use self::{
    refusals::refusal,
    routes::app,
    turn::{TurnContext, send_own_turn},
};

/// Returns the router for the data port: the turns' routes, and `more` routes.
pub fn app(turns: Turns, more: Router<Turns>) -> Router {
    let mut app = more;
    for route in ROUTES {
        let method = MethodFilter::try_from(route.kind.method()).expect("GET and POST are methods");
        let serve = move |State(turns): State<Turns>, request: Request| async move {
            answer(turns, route, request).await
        };
        app = app.route(route.path, on(method, serve));
    }
    app.fallback(unknown_route).layer(DefaultBodyLimit::disable()).with_state(turns)
}

async fn unknown_route() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "unknown_route", "the agent doesn't serve this route")
}

async fn answer(turns: Turns, route: Route, request: Request) -> Response {
    match turn::pass(&turns, route, request).await {
        Ok(response) => response,
        Err(refusal) => {
            debug!(route = route.path, %refusal, "turn refused");
            turns.metrics.refused(refusal.code);
            refusal.into_response()
        }
    }
}
