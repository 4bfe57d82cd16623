//! Answers each call of the control port that doesn't come from a router with `UNAUTHENTICATED`.
//!
//! A layer sees the call's path, which a router signs.

use std::{
    future::{Ready, ready},
    task::{Context, Poll},
};

use http::{Request, Response};
use tokio_util::either::Either;
use tonic::{Status, body::Body};
use tower::{Layer, Service};

use crate::data_port::RouterAuth;

/// The agent proves itself by this call first, so the call needs no proof.
const PROVE: &str = "/berth.agent.v1.WorkerAgent/Prove";

#[derive(Debug, Clone)]
pub(super) struct RouterCheckLayer(pub(super) RouterAuth);

#[derive(Debug, Clone)]
pub(super) struct RouterCheck<S> {
    auth: RouterAuth,
    service: S,
}

impl<S> Layer<S> for RouterCheckLayer {
    type Service = RouterCheck<S>;

    fn layer(&self, service: S) -> RouterCheck<S> {
        RouterCheck { auth: self.0.clone(), service }
    }
}

impl<S, B> Service<Request<B>> for RouterCheck<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, Ready<Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (path, method) = (request.uri(), request.method());
        if path.path() != PROVE
            && let Err(text) = self.auth.identify(method, path, request.headers())
        {
            return Either::Right(ready(Ok(Status::unauthenticated(text).into_http())));
        }
        Either::Left(self.service.call(request))
    }
}
