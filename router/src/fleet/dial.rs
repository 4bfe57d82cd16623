//! Connects to the agents' control ports, with the router's certificate and proofs by its token.
//!
//! A connection uses the certificates that are in the files when it is made, a call the token that
//! is in its file when it is made. On each connection the agent first proves that it holds the
//! token, so none is made anew under a client that has one.

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

/// A host that dies silently is noticed after this time plus [`KEEPALIVE_TIMEOUT`]. At about that
/// time its silence makes its workers stale.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Default)]
pub(crate) struct AgentCredentials {
    /// `None` if no agent speaks TLS.
    pub(crate) tls: Option<ClientTls>,
    /// Shared with the agents; `None` if there is none.
    pub(crate) tokens: Option<Reloaded<Tokens>>,
}

#[derive(Debug)]
pub(crate) struct ProvenConnection {
    pub(crate) client: AgentClient,
    /// `None` without tokens.
    pub(crate) agent_id: Option<String>,
}

/// The call was not sent.
#[derive(Debug, thiserror::Error)]
#[error("the connection to the agent has ended")]
pub(crate) struct ConnectionEnded;

/// Connects once. Tonic would connect again by itself, to whatever answers then.
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

#[derive(Debug, Clone)]
pub(crate) struct AgentDialer {
    endpoint: Endpoint,
    connector: Connector,
    /// `None` without tokens.
    signer: Option<Arc<Signer>>,
}

impl AgentDialer {
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

    pub(crate) fn signer(&self) -> Option<&Arc<Signer>> {
        self.signer.as_ref()
    }

    /// The agent must prove that it holds the token, if there is one. The error is for an operator.
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

pub(crate) fn describe_status(status: &tonic::Status) -> String {
    let text = format!("{:?}: {}", status.code(), status.message());
    match std::error::Error::source(status) {
        Some(source) => format!("{text}: {}", describe_error(source)),
        None => text,
    }
}
