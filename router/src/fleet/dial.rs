//! Connects to the agents' control ports, with the router's certificate and proofs by its token.
//!
//! `connect`, `control` and the stream of resident blocks each have a connection of their own. A
//! connection uses the certificates that are in the files when it is made, a call the token that is
//! in its file when it is made. On each connection the agent first proves that it holds the token,
//! so none is made anew under a client that has one.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use service::{
    log::describe_error,
    proof::router::{AgentClient, SignedChannel, Signer},
    reload::Reloaded,
    router_token::Tokens,
    tls::{
        Protocol,
        client::{ClientTls, Connector},
    },
};
use tonic::transport::{Endpoint, Error};
use tower::Service;

/// Time between two HTTP/2 pings. A host that dies silently is noticed after this time plus
/// [`KEEPALIVE_TIMEOUT`]. At about that time its silence makes its workers stale.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Time for the answer to a ping. Without an answer the connection is closed.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the router proves itself with, and what it recognizes agents by.
#[derive(Debug, Clone, Default)]
pub(crate) struct AgentCredentials {
    /// The certificates; `None` if no agent speaks TLS.
    pub(crate) tls: Option<ClientTls>,
    /// The tokens that the router shares with its agents; `None` if there is none.
    pub(crate) tokens: Option<Reloaded<Tokens>>,
}

/// A connection to an agent that has proven itself, if it must.
#[derive(Debug)]
pub(crate) struct ProvenConnection {
    pub(crate) client: AgentClient,
    /// The id that the agent has proven; `None` without tokens.
    pub(crate) agent_id: Option<String>,
}

/// The connection of a client has ended. What was called was not sent.
#[derive(Debug, thiserror::Error)]
#[error("the connection to the agent has ended")]
pub(crate) struct ConnectionEnded;

/// A connector that connects once. Tonic would connect again by itself, to whatever answers then.
#[derive(Debug, Clone)]
struct OneConnection {
    connector: Connector,
    is_used: Arc<AtomicBool>,
}

impl Service<Uri> for OneConnection {
    type Response = <Connector as Service<Uri>>::Response;
    type Error = <Connector as Service<Uri>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.connector.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        if self.is_used.swap(true, Ordering::Relaxed) {
            return Box::pin(std::future::ready(Err(ConnectionEnded.into())));
        }
        self.connector.call(uri)
    }
}

/// Makes connections to the control port of one agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentDialer {
    endpoint: Endpoint,
    connector: Connector,
    /// Signs the requests to the agent; `None` without tokens.
    signer: Option<Arc<Signer>>,
}

impl AgentDialer {
    /// Describes the control port at the URL `control`, with keepalive so that a dead host is
    /// noticed.
    ///
    /// # Errors
    /// If the URL is invalid. The check of the settings rejects such a URL earlier.
    pub(crate) fn new(
        control: &str,
        credentials: &AgentCredentials,
        connect_max: Duration,
    ) -> Result<Self, Error> {
        let endpoint = Endpoint::from_shared(control.to_owned())?
            .connect_timeout(connect_max)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        let tls = credentials.tls.clone();
        let connector = Connector::new(HttpConnector::new(), tls, Protocol::Http2, connect_max);
        let signer = credentials.tokens.clone().map(|tokens| Arc::new(Signer::new(tokens)));
        Ok(Self { endpoint, connector, signer })
    }

    /// Returns what signs the requests to the agent; `None` without tokens.
    pub(crate) fn signer(&self) -> Option<&Arc<Signer>> {
        self.signer.as_ref()
    }

    /// Connects, and has the agent prove that it holds the token, if there is one.
    ///
    /// # Errors
    /// Why not, for an operator.
    pub(crate) async fn connect(&self) -> Result<ProvenConnection, String> {
        let connector =
            OneConnection { connector: self.connector.clone(), is_used: Arc::default() };
        let channel = self.endpoint.connect_with_connector(connector).await;
        let channel = channel.map_err(|error| describe_error(&error))?;
        let proven = SignedChannel::proven_client(channel, self.signer.clone()).await;
        let (client, agent_id) = proven.map_err(|status| describe_status(&status))?;
        Ok(ProvenConnection { client, agent_id })
    }
}

/// Formats the status of a failed call, and what it comes from, on one line.
pub(crate) fn describe_status(status: &tonic::Status) -> String {
    let text = format!("{:?}: {}", status.code(), status.message());
    match std::error::Error::source(status) {
        Some(source) => format!("{text}: {}", describe_error(source)),
        None => text,
    }
}
