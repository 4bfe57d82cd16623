//! Dispatches the HTTP requests of the data port to the code that serves turns.
//!
//! A turn is one request to a model and its answer. The routes are those of the engine that
//! [`ROUTES`] lists, those of stored responses and of `aborts`, and those that the caller adds.
//! `turn` serves each request. This module turns refusals into responses and counts them, and reads
//! no bodies.

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodFilter, get, on, post},
};
use http::StatusCode;
use proto::{
    control::CONTROL_ROUTES,
    route::{Kind, ROUTES, Route},
};
use service::refusal::{Code, Refusal};
use tracing::debug;

use super::{
    aborts, control,
    router_auth::demand_router,
    turn::{self, TurnContext},
};

/// Returns the HTTP router of the data port. It has the engine's routes, `other_routes`, and
/// `/health`, by which routers see that the agent's process answers.
pub fn app(context: TurnContext, other_routes: Router<TurnContext>) -> Router {
    let mut app = other_routes;
    for route in ROUTES {
        let methods = method_filter(route.kind);
        let handler = move |State(context): State<TurnContext>, request: Request| async move {
            Box::pin(respond(context, route, request)).await
        };
        app = app.route(route.path, on(methods, handler));
    }
    app = app
        .route("/v1/responses/{id}", get(pass_on))
        .route("/v1/responses/{id}/cancel", post(pass_on))
        .merge(aborts::routes());
    for route in CONTROL_ROUTES {
        let handler = move |State(context): State<TurnContext>, request: Request| async move {
            match control::serve(&context, route, request).await {
                Ok(response) => response,
                Err(refusal) => answer_refused(&context, refusal),
            }
        };
        let get = route.takes_get.then_some(MethodFilter::GET);
        let methods = get.map_or(MethodFilter::POST, |get| get.or(MethodFilter::POST));
        app = app.route(route.path, on(methods, handler));
    }
    app = app.route("/health", get(|| async { StatusCode::OK }));
    let router_auth = middleware::from_fn_with_state(context.clone(), demand_router);
    // The layers are around all routes before them, the fallback too.
    app.fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::disable())
        .layer(router_auth)
        .with_state(context)
}

/// Returns the HTTP methods of a kind's routes as axum takes them.
fn method_filter(kind: Kind) -> MethodFilter {
    let filters = kind.methods().iter().cloned().map(|method| {
        MethodFilter::try_from(method).expect("GET, POST and PUT are methods that axum knows")
    });
    filters.reduce(MethodFilter::or).expect("each kind has a method")
}

/// Passes a request for a stored response on to the engine. The router has checked its owner.
async fn pass_on(State(context): State<TurnContext>, request: Request) -> Response {
    let (request_head, body) = request.into_parts();
    let passed = turn::pass_through(&context, &request_head, body).await;
    passed.unwrap_or_else(|refusal| answer_refused(&context, refusal))
}

async fn unknown_route(State(context): State<TurnContext>) -> Response {
    let refusal = Refusal::new(Code::RouteUnknown, "the agent doesn't serve this route");
    answer_refused(&context, refusal)
}

async fn wrong_method(State(context): State<TurnContext>) -> Response {
    let message = "this route doesn't support this method; use one that `Allow` lists";
    answer_refused(&context, Refusal::new(Code::MethodNotAllowed, message))
}

/// Counts a refusal and converts it to a response.
fn answer_refused(context: &TurnContext, refusal: Refusal) -> Response {
    context.metrics.count_refusal(refusal.code);
    refusal.into_response()
}

/// Serves a request. A refusal becomes a response here.
async fn respond(context: TurnContext, route: Route, request: Request) -> Response {
    match turn::serve_request(&context, route, request).await {
        Ok(response) => response,
        Err(refusal) => {
            debug!(route = route.path, code = refusal.code.as_str(), "turn refused");
            answer_refused(&context, refusal)
        }
    }
}
