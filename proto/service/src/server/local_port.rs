//! Hands requests to the app of a port of the same process, without a connection.

use std::{
    collections::HashMap,
    fmt,
    pin::Pin,
    sync::{Arc, OnceLock},
};

use axum::{body::Body, response::Response};
use http::{Request, Uri, uri::Authority};
use tokio_util::sync::CancellationToken;

use super::{App, answer_in_form, request_id};
use crate::refusal::Api;

/// Dropping it ends the request, as a client does that closes its connection.
pub type LocalAnswer = Pin<Box<dyn Future<Output = Response> + Send>>;

type Handler = dyn Fn(Request<Body>) -> LocalAnswer + Send + Sync;

struct Opened {
    handler: Box<Handler>,
    /// Ends it, as the port's listener ends.
    stop: CancellationToken,
}

/// One port's app. Clones lead to the same app.
#[derive(Clone, Default)]
pub struct LocalPort(Arc<OnceLock<Opened>>);

impl fmt::Debug for LocalPort {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("LocalPort").field("is_open", &self.0.get().is_some()).finish()
    }
}

impl LocalPort {
    /// From now on `app` answers, until `stop`. The first app stays.
    pub fn open(&self, app: impl App + Sync, stop: CancellationToken) {
        let handler: Box<Handler> = Box::new(move |request| Box::pin(serve(app.clone(), request)));
        let _ = self.0.set(Opened { handler, stop });
    }
}

/// A port whose app answers.
pub struct OpenPort<'a>(&'a Handler);

impl fmt::Debug for OpenPort<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("OpenPort").finish_non_exhaustive()
    }
}

impl OpenPort<'_> {
    #[must_use]
    pub fn call(&self, request: Request<Body>) -> LocalAnswer {
        (self.0)(request)
    }
}

/// Does what a connection does for its requests, but for its limits: who calls has its own.
async fn serve(mut app: impl App, mut request: Request<Body>) -> Response {
    let path = request.uri().path_and_query().cloned();
    *request.uri_mut() = path.map_or_else(Uri::default, Uri::from);
    let id = request_id::identify(request.headers_mut());
    let api = Api::for_request(request.uri().path(), request.headers());
    let Ok(response) = app.call(request).await;
    answer_in_form(response, api, id)
}

/// The ports of this process that are called without a connection, by host and port. A port that
/// has ended is called like any other, and refuses.
#[derive(Debug, Clone, Default)]
pub struct LocalPorts(HashMap<Authority, LocalPort>);

impl LocalPorts {
    #[must_use]
    pub fn new(ports: impl IntoIterator<Item = (Authority, LocalPort)>) -> Self {
        Self(ports.into_iter().collect())
    }

    /// `None` if the request's URI names no port of this process that is open.
    #[must_use]
    pub fn find(&self, uri: &Uri) -> Option<OpenPort<'_>> {
        // Usually there is none, and then nothing is hashed.
        let port = if self.0.is_empty() { None } else { self.0.get(uri.authority()?) };
        let opened = port?.0.get().filter(|opened| !opened.stop.is_cancelled());
        opened.map(|opened| OpenPort(&*opened.handler))
    }
}
