//! The HTTP client for the agents' data ports, with one connection pool for all agents.
//!
//! `proxy` and `staged_prefill` send their requests through [`UpstreamClient`]. It retries nothing.
//! The view task learns from it that an agent can't be reached.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, Error, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use proto::claim;
use service::{
    clock::now,
    reload::Reloaded,
    router_token::Tokens,
    tls::{Protocol, client::Connector},
};
use tokio::{sync::mpsc, time::error::Elapsed};

use crate::fleet::{dial::AgentCredentials, state::Update, worker::WorkerRef};

/// Longest time that an idle connection to an agent is kept. Agents close idle connections after
/// 30 s. The router's limit is lower, so that it sends no turn into a connection that is closing.
const CONNECTION_IDLE_MAX: Duration = Duration::from_secs(10);
/// Silence on a connection to an agent after which TCP sends a keepalive probe.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(5);
/// Time between keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Time without any TCP acknowledgement after which a connection is given up. Even a busy host's
/// kernel acknowledges at once.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(20);
/// Maximum number of idle connections kept per agent. A busy engine runs about as many turns.
const IDLE_CONNECTIONS_PER_AGENT_MAX: usize = 256;

/// Sends requests to the agents' data ports.
#[derive(Debug)]
pub(crate) struct UpstreamClient {
    client: Client<Connector, Full<Bytes>>,
    /// The tokens, of which the first is sent with each request; `None` if there is none.
    tokens: Option<Reloaded<Tokens>>,
    /// Reports to the view task that a turn couldn't reach an agent. Sends the agent's index, the
    /// update and its time.
    update_sender: mpsc::Sender<(usize, Update, Instant)>,
}

impl UpstreamClient {
    /// Creates the client. Nothing is connected until the first request. `connect_max` is the time
    /// limit of connecting to an agent.
    pub(crate) fn new(
        connect_max: Duration,
        credentials: AgentCredentials,
        update_sender: mpsc::Sender<(usize, Update, Instant)>,
    ) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(connect_max));
        // A host that loses power or network sends no reset. Without keepalive, its turns would
        // wait for an answer until their time limit.
        connector.set_keepalive(Some(KEEPALIVE_AFTER));
        connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX));
        let AgentCredentials { tls, tokens } = credentials;
        let connector = Connector::new(connector, tls, Protocol::Http1, connect_max);
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(CONNECTION_IDLE_MAX)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_PER_AGENT_MAX)
            .pool_timer(TokioTimer::new())
            .build(connector);
        Self { client, tokens, update_sender }
    }

    /// Sends a request and waits for the head of its answer, until `deadline`.
    pub(super) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
        deadline: Instant,
    ) -> Result<Result<Response<Incoming>, Error>, Elapsed> {
        if let Some(tokens) = &self.tokens {
            request.headers_mut().insert(claim::TOKEN, tokens.load().to_header());
        }
        tokio::time::timeout_at(deadline.into(), self.client.request(request)).await
    }

    /// Reports that a turn couldn't connect to a worker's data port.
    pub(super) fn report_unreachable(&self, worker: WorkerRef, reason: String) {
        // If the channel is full, the report is dropped. The next turn that fails repeats it.
        let update = (worker.agent, Update::DataPortUnreachable(reason), now());
        let _ = self.update_sender.try_send(update);
    }
}
