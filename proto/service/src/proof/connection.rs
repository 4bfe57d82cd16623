//! Connections to data ports on which the agent has proven itself, before any request is sent.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, Request, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use proto::proof;
use tokio::net::TcpStream;
use tower_service::Service;

use super::router::Hello;
use crate::{
    reload::Reloaded,
    router_token::Tokens,
    tls::client::{BoxError, Connector, with_limit},
};

/// The most bytes that are read of an answer. A refusal has some hundred.
const ANSWER_BYTES_MAX: usize = 8 << 10;

type Stream = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Connects to data ports. With tokens, each connection begins with a hello.
#[derive(Debug, Clone)]
pub struct ProvenConnector {
    connector: Connector,
    tokens: Option<Reloaded<Tokens>>,
    /// The time limit of connecting, and of the hello after it.
    connect_max: Duration,
}

impl ProvenConnector {
    /// Creates a connector. `connect_max` is the time limit of a hello.
    #[must_use]
    pub fn new(
        connector: Connector,
        tokens: Option<Reloaded<Tokens>>,
        connect_max: Duration,
    ) -> Self {
        Self { connector, tokens, connect_max }
    }
}

impl Service<Uri> for ProvenConnector {
    type Response = Stream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Stream, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.connector.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let host = uri.authority().map(ToString::to_string).unwrap_or_default();
        let connecting = self.connector.call(uri);
        let Some(tokens) = &self.tokens else { return connecting };
        let (tokens, connect_max) = (tokens.load(), self.connect_max);
        Box::pin(async move {
            let stream = connecting.await?;
            with_limit(connect_max, say_hello(stream, &host, tokens)).await
        })
    }
}

/// Has the agent at the other end prove itself, and returns the connection for requests.
async fn say_hello(stream: Stream, host: &str, tokens: Arc<Tokens>) -> Result<Stream, BoxError> {
    let hello = Hello::new(tokens);
    let request = Request::get(proof::PATH)
        .header(header::HOST, host)
        .header(proof::HELLO, hello.to_header())
        .body(Empty::<Bytes>::new())?;
    let (mut sender, connection) = http1::handshake(stream).await?;
    // The connection is idle, and ends for hyper, when its sender is gone.
    let exchange = async move {
        let answer = sender.send_request(request).await?;
        let (head, body) = answer.into_parts();
        Limited::new(body, ANSWER_BYTES_MAX).collect().await?;
        Ok::<HeaderMap, BoxError>(head.headers)
    };
    let (answer, parts) = tokio::join!(exchange, connection.without_shutdown());
    hello.check_headers(&answer?).map_err(|error| {
        format!(
            "what answers doesn't hold the token of agents.token_file ({error}), so it is no \
             agent of this fleet"
        )
    })?;
    let parts = parts?;
    if !parts.read_buf.is_empty() {
        return Err("the agent sent more than its answer".into());
    }
    Ok(parts.io)
}
