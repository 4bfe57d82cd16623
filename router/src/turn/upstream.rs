//! The HTTP client for the agents' data ports, with one connection pool for all agents.
//!
//! `proxy` and `staged_prefill` send their requests through [`UpstreamClient`]. It retries nothing.
//! The view task learns from it that an agent can't be reached. `liveness` probes the agents
//! through it. It gives up requests to agents whose pulse `liveness` has found missing.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri, uri::PathAndQuery};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client, Error, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use proto::{claim, proof};
use service::{
    clock::now,
    descriptors,
    proof::{connection::ProvenConnector, router::Signer},
    tls::{Protocol, client::Connector},
};
use tokio::sync::mpsc;

use super::pulses::Pulses;
use crate::{
    config::AGENTS_MAX,
    fleet::{agent::Facts, dial::AgentCredentials, state::Update, worker::WorkerRef},
};

/// Longest time that an idle connection to an agent is kept. Agents close idle connections after
/// 75 s by default, and never before 15 s. The router's limit is lower, so that it sends no turn
/// into a connection that is closing.
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

/// Why a request got no answer from an agent.
#[derive(Debug)]
pub(super) enum SendError {
    /// The deadline has passed.
    Late,
    /// The agent's process or host has stopped answering. `was_sent`: whether it may have received
    /// the request.
    Silent { was_sent: bool },
    /// This router had no file descriptor or port for a connection. Nothing was sent.
    NoDescriptors(Error),
    /// The connection could not be made, or broke.
    Http(Error),
}

/// How connections to agents are made.
#[derive(Debug)]
pub(crate) struct UpstreamConnections {
    /// The time limit of connecting to an agent.
    pub(crate) connect_max: Duration,
    /// The number of file descriptors for idle connections to all agents.
    pub(crate) idle_max: usize,
    /// The number of agents that share them.
    pub(crate) agents_expected: usize,
    /// What the router proves itself with.
    pub(crate) credentials: AgentCredentials,
}

/// Sends requests to the agents' data ports.
#[derive(Debug)]
pub(crate) struct UpstreamClient {
    client: Client<ProvenConnector, Full<Bytes>>,
    /// What signs the requests to each agent, by its slot. Nothing does without a token.
    signers: Vec<ArcSwapOption<Signer>>,
    /// Reports to the view task that a turn couldn't reach an agent. Sends the agent's index, the
    /// update and its time.
    update_sender: mpsc::Sender<(usize, Update, Instant)>,
    /// Which agents are silent.
    pulses: Arc<Pulses>,
}

impl UpstreamClient {
    /// Creates the client. Nothing is connected until the first request.
    pub(crate) fn new(
        connections: UpstreamConnections,
        pulses: Arc<Pulses>,
        update_sender: mpsc::Sender<(usize, Update, Instant)>,
    ) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(connections.connect_max));
        // A host that loses power or network sends no reset. Without keepalive, its turns would
        // wait for an answer until their time limit.
        connector.set_keepalive(Some(KEEPALIVE_AFTER));
        connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
        connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX));
        let AgentCredentials { tls, tokens } = connections.credentials;
        let connect_max = connections.connect_max;
        let connector = Connector::new(connector, tls, Protocol::Http1, connect_max);
        let connector = ProvenConnector::new(connector, tokens, connect_max);
        let idle_per_agent = connections.idle_max / connections.agents_expected.max(1);
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(CONNECTION_IDLE_MAX)
            .pool_max_idle_per_host(idle_per_agent.clamp(1, IDLE_CONNECTIONS_PER_AGENT_MAX))
            .pool_timer(TokioTimer::new())
            .build(connector);
        let signers = (0..AGENTS_MAX).map(|_| ArcSwapOption::empty()).collect();
        Self { client, signers, update_sender, pulses }
    }

    /// Sends a request to an agent and waits for the head of its answer, until `deadline` or until
    /// the agent is found silent.
    pub(super) async fn send(
        &self,
        agent: usize,
        request: Request<Full<Bytes>>,
        deadline: Instant,
    ) -> Result<Response<Incoming>, SendError> {
        if self.pulses.is_silent(agent) {
            return Err(SendError::Silent { was_sent: false });
        }
        let answer = tokio::time::timeout_at(deadline.into(), self.send_signed(agent, request));
        tokio::select! {
            biased;
            answer = answer => match answer {
                Ok(Ok(response)) => Ok(response),
                Ok(Err(error)) if error.is_connect() && descriptors::is_shortage(&error) => {
                    Err(SendError::NoDescriptors(error))
                }
                Ok(Err(error)) => Err(SendError::Http(error)),
                Err(_) => Err(SendError::Late),
            },
            () = self.pulses.wait_until_silent(agent) => {
                Err(SendError::Silent { was_sent: true })
            }
        }
    }

    /// Asks a data port for its health. Returns false if neither answer nor refusal came before
    /// `deadline`. A system that refuses the connection has ended the agent's connections, so
    /// nothing waits for them. If this router can't connect for a reason of its own, the agent is
    /// given the benefit of the doubt.
    pub(super) async fn probe(&self, facts: &Facts, deadline: Instant) -> bool {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = facts.data_uri(PathAndQuery::from_static("/health"));
        // Unsigned: a refusal proves as well that the agent answers.
        match tokio::time::timeout_at(deadline.into(), self.client.request(request)).await {
            Ok(Ok(_)) => true,
            // The time limit of connecting is shorter than the deadline.
            Ok(Err(error)) => {
                let kind = descriptors::system_error(&error).map(std::io::Error::kind);
                kind != Some(std::io::ErrorKind::TimedOut)
            }
            Err(_) => false,
        }
    }

    /// Sends a request with the proof that it comes from a router. If the agent's process is a new
    /// one, for which the proof doesn't count, has that prove itself, and sends the request again.
    async fn send_signed(
        &self,
        agent: usize,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Error> {
        let Some(signer) = self.signers[agent].load_full() else {
            return self.client.request(request).await;
        };
        let unsigned = request.clone();
        let challenge = signer.challenge();
        sign(&signer, &mut request);
        let uri = request.uri().clone();
        let answer = self.client.request(request).await?;
        if !is_refused_as_stranger(&answer) {
            return Ok(answer);
        }
        // Another request may have learned the new challenge meanwhile.
        let is_proven = signer.challenge() != challenge || self.say_hello(&signer, uri).await;
        if !is_proven {
            return Ok(answer);
        }
        let mut request = unsigned;
        sign(&signer, &mut request);
        self.client.request(request).await
    }

    /// Has the agent prove itself on the data port of the host of `uri`. Returns whether it did.
    async fn say_hello(&self, signer: &Signer, uri: Uri) -> bool {
        let hello = signer.hello();
        let mut parts = uri.into_parts();
        parts.path_and_query = Some(PathAndQuery::from_static(proof::PATH));
        let mut request = Request::new(Full::default());
        *request.uri_mut() = Uri::from_parts(parts).expect("only its path was replaced");
        request.headers_mut().insert(proof::HELLO, hello.to_header());
        let answer = self.client.request(request).await;
        answer.is_ok_and(|answer| signer.accept_again(&hello, answer.headers()).is_ok())
    }

    /// Sets what signs the requests to the agent of a slot.
    pub(crate) fn set_signer(&self, agent: usize, signer: Option<Arc<Signer>>) {
        self.signers[agent].store(signer);
    }

    /// Returns which agents are silent.
    pub(crate) fn pulses(&self) -> &Arc<Pulses> {
        &self.pulses
    }

    /// Reports that a turn couldn't connect to a worker's data port.
    pub(super) fn report_unreachable(&self, worker: WorkerRef, reason: String) {
        // If the channel is full, the report is dropped. The next turn that fails repeats it.
        let update = (worker.agent, Update::DataPortUnreachable(reason), now());
        let _ = self.update_sender.try_send(update);
    }
}

/// Adds the proof that a request comes from a router.
fn sign(signer: &Signer, request: &mut Request<Full<Bytes>>) {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    signer.sign(&method, &uri, request.headers_mut());
}

/// Whether the agent has refused a request because it doesn't recognize this router.
pub(super) fn is_refused_as_stranger(response: &Response<Incoming>) -> bool {
    let code = response.headers().get(claim::REFUSAL);
    response.status() == StatusCode::UNAUTHORIZED
        && code.is_some_and(|code| code == claim::NOT_A_ROUTER)
}
