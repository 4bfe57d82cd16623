//! Dispatches the HTTP requests of the data port to the code that serves turns.
//!
//! Refusals become responses here, and are counted. This module reads no bodies.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    response::{IntoResponse, Response},
    routing::{MethodFilter, get, on, post},
};
use contract::{
    control::CONTROL_ROUTES,
    route::{ROUTES, Route},
};
use http::{StatusCode, header};
use service::{
    headers,
    refusal::{Code, Refusal},
};
use tower::{Service, ServiceExt as _};
use tracing::debug;

use super::{
    aborts, control,
    router_auth::{Caller, demand_router},
    turn::{self, TurnContext},
};

/// [`ROUTES`] are found here, all others through axum, whose layers would cost a turn a good part
/// of its time. Clones serve the same port.
#[derive(Debug, Clone)]
pub struct DataPort {
    context: Arc<TurnContext>,
    /// The router of this process calls, and needs no proof.
    is_for_own_router: bool,
    /// All but [`ROUTES`].
    other_routes: Router,
}

impl Service<Request> for DataPort {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        if self.is_for_own_router {
            request.extensions_mut().insert(Caller::Router);
        } else if let Err(answer) = demand_router(&self.context, &mut request) {
            return Box::pin(std::future::ready(Ok(answer)));
        }
        let path = request.uri().path();
        match ROUTES.into_iter().find(|route| route.path == path) {
            Some(route) => {
                let context = Arc::clone(&self.context);
                Box::pin(async move { Ok(respond(&context, route, request).await) })
            }
            None => Box::pin(self.other_routes.clone().oneshot(request)),
        }
    }
}

impl DataPort {
    /// The app for the router of the same process, which can't be reached from outside.
    #[must_use]
    pub fn for_own_router(&self) -> Self {
        Self { is_for_own_router: true, ..self.clone() }
    }
}

/// `/health` tells routers that the agent's process answers.
pub fn app(context: Arc<TurnContext>, other_routes: Router<Arc<TurnContext>>) -> DataPort {
    let mut app = other_routes
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
    // A layer is around all routes before it, the fallback too.
    let other_routes = app
        .fallback(unknown_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::clone(&context));
    DataPort { context, is_for_own_router: false, other_routes }
}

/// The router has checked who owns a stored response.
async fn pass_on(State(context): State<Arc<TurnContext>>, request: Request) -> Response {
    let (request_head, body) = request.into_parts();
    let passed = turn::pass_through(&context, request_head, body).await;
    passed.unwrap_or_else(|refusal| answer_refused(&context, refusal))
}

async fn unknown_route(State(context): State<Arc<TurnContext>>) -> Response {
    let refusal = Refusal::new(Code::RouteUnknown, "the agent doesn't serve this route");
    answer_refused(&context, refusal)
}

async fn wrong_method(State(context): State<Arc<TurnContext>>) -> Response {
    refuse_method(&context)
}

fn refuse_method(context: &TurnContext) -> Response {
    let message = "this route doesn't support this method; use one that `Allow` lists";
    answer_refused(context, Refusal::new(Code::MethodNotAllowed, message))
}

fn answer_refused(context: &TurnContext, refusal: Refusal) -> Response {
    context.metrics.count_refusal(refusal.code);
    refusal.into_response()
}

async fn respond(context: &Arc<TurnContext>, route: Route, request: Request) -> Response {
    if !route.kind.methods().contains(request.method()) {
        let mut response = refuse_method(context);
        let allow = headers::allow(route.kind.methods());
        response.headers_mut().insert(header::ALLOW, allow);
        return response;
    }
    match turn::serve_request(context, route, request).await {
        Ok(response) => response,
        Err(refusal) => {
            debug!(route = route.path, code = refusal.code.as_str(), "turn refused");
            answer_refused(context, refusal)
        }
    }
}
