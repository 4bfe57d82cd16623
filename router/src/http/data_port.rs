//! Serves the data port: what each request passes before its route, and its answer after it.
//!
//! Turns find their route here, all other requests through axum, whose layers would cost a turn a
//! tenth of its time: each of them copies the request, and allocates.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    Router,
    extract::{MatchedPath, Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
};
use contract::route::{Kind, ROUTES, Route};
use http::header;
use service::{
    auth::credential,
    headers,
    refusal::{Refusal, is_first_try},
    server::HeldByAnswer,
};
use tower::{Service, ServiceExt as _};

use super::{
    access, counted, errors, health,
    pages::Pages,
    prepare::decompress,
    respond,
    waiting::{self, ErrorForm},
};
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

/// Clones serve the same port.
#[derive(Debug, Clone)]
pub(super) struct DataPort {
    guard: Arc<Guard>,
    /// All but the routes of turns.
    routes: Router,
}

#[derive(Debug)]
struct Guard {
    shared: Arc<Shared>,
    pages: Pages,
}

impl DataPort {
    pub(super) fn new(shared: Arc<Shared>, listen: &ListenTable, routes: Router) -> Self {
        let pages = Pages::new(Arc::clone(&shared), listen);
        let guard = Arc::new(Guard { shared, pages });
        let layer = middleware::from_fn_with_state(Arc::clone(&guard), guard_route);
        Self { guard, routes: routes.layer(layer) }
    }
}

impl Service<Request> for DataPort {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let path = request.uri().path();
        let route = ROUTES.into_iter().find(|route| is_passed_on(route.kind) && route.path == path);
        match route {
            Some(route) => {
                let guard = Arc::clone(&self.guard);
                Box::pin(async move { Ok(guard.serve_turn(route, request).await) })
            }
            None => Box::pin(self.routes.clone().oneshot(request)),
        }
    }
}

/// The router has answers of its own to the other kinds.
fn is_passed_on(kind: Kind) -> bool {
    !matches!(kind, Kind::Models | Kind::Info)
}

async fn guard_route(
    State(guard): State<Arc<Guard>>,
    mut request: Request,
    next: Next,
) -> Response {
    // The path of a session or of a response has its id, its route has none.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let path = route.map_or_else(|| request.uri().path().into(), |route| route.as_str().to_owned());
    let entry = access::begin(&guard.shared, &mut request, &path);
    let response = if health::is_health_path(request.uri().path()) {
        next.run(request).await
    } else {
        let serve = |caller, mut request: Request| {
            request.extensions_mut().insert::<Caller>(caller);
            next.run(request)
        };
        guard.serve(entry.as_deref(), request, serve).await
    };
    access::end(entry, response)
}

impl Guard {
    async fn serve_turn(&self, route: Route, mut request: Request) -> Response {
        let entry = access::begin(&self.shared, &mut request, route.path);
        let serve = |caller, request| serve_turn(&self.shared, caller, route, request);
        let response = self.serve(entry.as_deref(), request, serve).await;
        access::end(entry, response)
    }

    /// Passes a request on whose caller is known and has a share of the requests to take.
    async fn serve<F>(
        &self,
        entry: Option<&AccessEntry>,
        mut request: Request,
        serve: impl FnOnce(Caller, Request) -> F,
    ) -> Response
    where
        F: Future<Output = Response>,
    {
        let (caller, share) = match self.admit(entry, &mut request).await {
            Ok(admitted) => admitted,
            Err(refusal) => return respond(&self.shared, Err(refusal)),
        };
        let answer = decompress(request, |request| serve(caller, request)).await;
        let mut response = respond(&self.shared, answer);
        response.extensions_mut().insert(share);
        response
    }

    /// Finds out who sends a request, and removes the credential, so that neither a later step nor
    /// an agent sees it. Where neither router nor agent needs one, it can only be the engine's; it
    /// stays.
    async fn admit(
        &self,
        entry: Option<&AccessEntry>,
        request: &mut Request,
    ) -> Result<(Caller, HeldByAnswer), Refusal> {
        let shared = &self.shared;
        self.pages.check(request)?;
        let caller = shared.auth.resolve(request.headers()).await?;
        shared.shares.take_request(&caller).map_err(turn::error::Error::RequestRate)?;
        let sharer = sharer(&caller, request.extensions());
        let share = shared.shares.requests.take(&sharer, 1, None);
        let limit = Limit::Requests;
        let share = share.map_err(|refused| turn::error::Error::Limit { limit, refused })?;
        if !shared.auth.passes_credentials() {
            credential::remove(request.headers_mut());
        }
        if let Some(entry) = entry {
            entry.set_principal(&caller.principal);
        }
        Ok((caller, HeldByAnswer::new(share)))
    }
}

pub(super) async fn serve_turn(
    shared: &Arc<Shared>,
    caller: Caller,
    route: Route,
    request: Request,
) -> Response {
    if !route.kind.methods().contains(request.method()) {
        let mut response = respond(shared, Err(errors::method_refusal()));
        let allow = headers::allow(route.kind.methods());
        response.headers_mut().insert(header::ALLOW, allow);
        return response;
    }
    let (mut parts, body) = request.into_parts();
    let (kind, trace) = (route.kind, spans::begin(&shared.traces, &mut parts, route));
    let (comment_interval, error_form) = (shared.waiting_comment, ErrorForm::new(&parts));
    let is_first_try = is_first_try(&parts.headers);
    let flags = TurnFlags::default();
    let (shared, turn_flags) = (Arc::clone(shared), flags.clone());
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
