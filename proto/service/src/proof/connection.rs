//! Connections to data ports on which the agent has proven itself, before any request is sent.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use contract::proof;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

use super::router::Hello;
use crate::{
    descriptors,
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

/// Whether an agent's port is full or it stops: that says nothing against it.
#[must_use]
pub fn is_busy(error: &(dyn std::error::Error + 'static)) -> bool {
    descriptors::system_error(error).map(io::Error::kind) == Some(io::ErrorKind::ResourceBusy)
}

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
        Ok::<_, BoxError>(head)
    };
    let (answer, parts) = tokio::join!(exchange, connection.without_shutdown());
    let head = answer?;
    // An agent whose port is full, or that stops, has nothing to prove.
    let closes = head.headers.get(header::CONNECTION).is_some_and(|value| value == "close");
    if closes && (head.status == StatusCode::OK || head.status == StatusCode::SERVICE_UNAVAILABLE) {
        let text = "the agent has no place for a connection, or stops";
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, text).into());
    }
    hello.check_headers(&head.headers).map_err(|error| {
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

#[cfg(test)]
mod tests {
    use hyper_util::client::legacy::connect::HttpConnector;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;
    use crate::tls::Protocol;

    /// Connects to a port that answers the hello with `answer`, and returns why that fails.
    async fn refusal(answer: &'static [u8]) -> BoxError {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let agent = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(answer).await.unwrap();
        };
        let time_max = Duration::from_secs(60);
        let http = Connector::new(HttpConnector::new(), None, Protocol::Http1, time_max);
        let tokens = Tokens::parse("tokens", &[b'x'; 32]).unwrap();
        let mut connector = ProvenConnector::new(http, Some(Reloaded::fixed(tokens)), time_max);
        tokio::join!(connector.call(uri), agent).0.map(drop).unwrap_err()
    }

    #[tokio::test]
    async fn an_agent_without_a_place_is_no_impostor() {
        let full = b"HTTP/1.1 503 Full\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        assert!(is_busy(&*refusal(full).await));
        let stranger = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        let error = refusal(stranger).await;
        assert!(!is_busy(&*error) && error.to_string().contains("no agent of this fleet"));
        assert!(!is_busy(&*refusal(b"SSH-2.0-OpenSSH_9.2\r\n").await));
    }
}
