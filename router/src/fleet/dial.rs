//! Connects to the agents' control ports, with the router's certificate and token.
//!
//! `connect`, `control` and the stream of resident blocks each have a connection of their own. A
//! connection uses the certificates that are in the files when it is made, a call the token that is
//! in its file when it is made.

use std::time::Duration;

use hyper_util::client::legacy::connect::HttpConnector;
use proto::{claim, v1::worker_agent_client::WorkerAgentClient};
use service::{
    reload::Reloaded,
    router_token::Tokens,
    tls::{
        Protocol,
        client::{ClientTls, Connector},
    },
};
use tonic::{
    Request, Status,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint, Error},
};

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
    /// The tokens, of which the first is sent; `None` if there is none.
    pub(crate) tokens: Option<Reloaded<Tokens>>,
}

/// The client of a control port.
pub(crate) type AgentClient = WorkerAgentClient<InterceptedService<Channel, SendToken>>;

/// Adds the token to each call, if there is one.
#[derive(Debug, Clone)]
pub(crate) struct SendToken(Option<Reloaded<Tokens>>);

impl Interceptor for SendToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(tokens) = &self.0 {
            let token = tokens.load().to_header();
            request.metadata_mut().as_mut().insert(claim::TOKEN, token);
        }
        Ok(request)
    }
}

/// Makes connections to the control port of one agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentDialer {
    endpoint: Endpoint,
    connector: Connector,
    token: SendToken,
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
        Ok(Self { endpoint, connector, token: SendToken(credentials.tokens.clone()) })
    }

    /// Connects.
    pub(crate) async fn connect(&self) -> Result<AgentClient, Error> {
        let channel = self.endpoint.connect_with_connector(self.connector.clone()).await?;
        Ok(WorkerAgentClient::with_interceptor(channel, self.token.clone()))
    }

    /// Returns a client that connects at its first call, and again after a failure.
    pub(crate) fn connect_lazily(&self) -> AgentClient {
        let channel = self.endpoint.connect_with_connector_lazy(self.connector.clone());
        WorkerAgentClient::with_interceptor(channel, self.token.clone())
    }
}
