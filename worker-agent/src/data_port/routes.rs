//! Dispatches the HTTP requests of the data port to the code that serves turns.
//!
//! Refusals become responses here, and are counted. This module reads no bodies.

use std::sync::Arc;

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::{MethodFilter, get, on, post},
};
use contract::{
    control::CONTROL_ROUTES,
    route::{Kind, ROUTES, Route},
};
use http::StatusCode;
use service::refusal::{Code, Refusal};
use tracing::debug;

use super::{
    aborts, control,
    router_auth::demand_router,
    turn::{self, TurnContext},
};

/// `/health` tells routers that the agent's process answers.
pub fn app(context: Arc<TurnContext>, other_routes: Router<Arc<TurnContext>>) -> Router {
    let mut app = other_routes;
    for route in ROUTES {
        let methods = method_filter(route.kind);
        let handler = move |State(context): State<Arc<TurnContext>>, request: Request| async move {
            Box::pin(respond(context, route, request)).await
        };
        app = app.route(route.path, on(methods, handler));
    }
    app = app
        .route("/v1/responses/{id}", get(pass_on))
        .route("/v1/responses/{id}/cancel", post(pass_on))
        .merge(aborts::routes());
    for route in CONTROL_ROUTES {
        let handler = move |State(context): State<Arc<TurnContext>>, request: Request| async move {
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
    let router_auth = middleware::from_fn_with_state(Arc::clone(&context), demand_router);
    // A layer is around all routes before it, the fallback too.
    app.fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::disable())
        .layer(router_auth)
        .with_state(context)
}

fn method_filter(kind: Kind) -> MethodFilter {
    let filters = kind.methods().iter().cloned().map(|method| {
        MethodFilter::try_from(method).expect("GET, POST and PUT are methods that axum knows")
    });
    filters.reduce(MethodFilter::or).expect("each kind has a method")
}

/// The router has checked who owns a stored response.
async fn pass_on(State(context): State<Arc<TurnContext>>, request: Request) -> Response {
    let (request_head, body) = request.into_parts();
    let passed = turn::pass_through(&context, &request_head, body).await;
    passed.unwrap_or_else(|refusal| answer_refused(&context, refusal))
}

async fn unknown_route(State(context): State<Arc<TurnContext>>) -> Response {
    let refusal = Refusal::new(Code::RouteUnknown, "the agent doesn't serve this route");
    answer_refused(&context, refusal)
}

async fn wrong_method(State(context): State<Arc<TurnContext>>) -> Response {
    let message = "this route doesn't support this method; use one that `Allow` lists";
    answer_refused(&context, Refusal::new(Code::MethodNotAllowed, message))
}

fn answer_refused(context: &TurnContext, refusal: Refusal) -> Response {
    context.metrics.count_refusal(refusal.code);
    refusal.into_response()
}

async fn respond(context: Arc<TurnContext>, route: Route, request: Request) -> Response {
    match turn::serve_request(&context, route, request).await {
        Ok(response) => response,
        Err(refusal) => {
            debug!(route = route.path, code = refusal.code.as_str(), "turn refused");
            answer_refused(&context, refusal)
        }
    }
}
