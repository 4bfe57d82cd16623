//! The HTTP client for the agents' data ports, with one connection pool for all agents.
//!
//! It repeats only what was not sent, or was refused before it ran, and gives up requests to agents
//! that `liveness` has found silent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::body::Body;
use bytes::Bytes;
use contract::{claim, proof};
use http::{Request, Response, StatusCode, Uri, uri::PathAndQuery};
use http_body_util::Full;
use hyper_util::client::legacy::connect::HttpConnector;
use service::{
    clock::now,
    descriptors,
    http_client::{Error, HttpClient, IdleLimits},
    proof::{connection::ProvenConnector, router::Signer},
    server::LocalPorts,
    tls::{Protocol, client::Connector},
};

use super::agent_body::Incoming;
use crate::{
    config::AGENTS_MAX,
    fleet::{
        agent::Facts,
        by_slot::BySlot,
        dial::AgentCredentials,
        state::Update,
        view::UpdateSender,
        worker::{AgentKey, WorkerRef},
    },
};

/// Agents close idle connections after 75 s by default, and never before 15 s. With a lower limit,
/// the router sends no turn into a connection that is closing.
const CONNECTION_IDLE_MAX: Duration = Duration::from_secs(10);
const KEEPALIVE_AFTER: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Even a busy host's kernel acknowledges at once.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(20);
/// A busy engine runs about as many turns.
const IDLE_CONNECTIONS_PER_AGENT_MAX: usize = 256;

/// How often turns look whether their agent is silent. Also the least time between two probes of a
/// quiet agent.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) enum SendError {
    Late,
    /// `was_sent`: whether the agent may have received the request.
    Silent {
        was_sent: bool,
    },
    /// This router had no file descriptor or port for a connection. Nothing was sent.
    NoDescriptors(Error),
    Http(Error),
}

#[derive(Debug)]
pub(crate) struct UpstreamConnections {
    pub(crate) connect_max: Duration,
    /// File descriptors for idle connections to all agents.
    pub(crate) idle_max: usize,
    /// The agents that share those descriptors.
    pub(crate) agents_expected: usize,
    pub(crate) credentials: AgentCredentials,
    /// The data ports of agents in this process.
    pub(crate) local_ports: LocalPorts,
}

#[derive(Debug)]
pub(crate) struct UpstreamClient {
    client: HttpClient<ProvenConnector>,
    local_ports: LocalPorts,
    /// Nothing signs without a token. An entry stays until the slot's next agent has one: turns may
    /// still go to an agent that has left.
    signers: BySlot<Arc<Signer>>,
    /// Tells the view task that a turn couldn't reach an agent.
    update_sender: UpdateSender,
    pulses: Arc<Pulses>,
}

impl UpstreamClient {
    /// Nothing is connected until the first request.
    pub(crate) fn new(
        connections: UpstreamConnections,
        pulses: Arc<Pulses>,
        update_sender: UpdateSender,
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
        let idle_limits = IdleLimits {
            time_max: CONNECTION_IDLE_MAX,
            per_host_max: idle_per_agent.clamp(1, IDLE_CONNECTIONS_PER_AGENT_MAX),
        };
        let client = HttpClient::new(connector, idle_limits);
        let local_ports = connections.local_ports;
        Self { client, local_ports, signers: BySlot::new(), update_sender, pulses }
    }

    /// Waits for the head of the answer, until `deadline` or until the agent is found silent.
    pub(super) async fn send(
        &self,
        agent: AgentKey,
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

    /// Returns false if neither answer nor refusal came before `deadline`. A system that refuses
    /// the connection has ended the agent's connections, so nothing waits for them. If this router
    /// can't connect for a reason of its own, the agent is given the benefit of the doubt.
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

    /// If the agent's process is a new one, for which the proof doesn't count, has that prove
    /// itself, and sends the request again.
    async fn send_signed(
        &self,
        agent: AgentKey,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Error> {
        if let Some(port) = self.local_ports.find(request.uri()) {
            return Ok(port.call(request.map(Body::new)).await.map(Incoming::Local));
        }
        let Some(signer) = self.signers.get(agent) else {
            return self.request(request).await;
        };
        let unsigned = request.clone();
        let challenge = signer.challenge();
        sign(&signer, &mut request);
        let uri = request.uri().clone();
        let answer = self.request(request).await?;
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
        self.request(request).await
    }

    async fn request(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Error> {
        Ok(self.client.request(request).await?.map(Incoming::Remote))
    }

    /// Returns whether the agent at the host of `uri` has proven itself.
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

    pub(crate) fn set_signer(&self, agent: AgentKey, signer: Option<Arc<Signer>>) {
        self.signers.set(agent, signer);
    }

    pub(crate) fn pulses(&self) -> &Arc<Pulses> {
        &self.pulses
    }

    pub(super) fn report_unreachable(&self, worker: WorkerRef, reason: String) {
        // If the channel is full, the report is dropped. The next turn that fails repeats it.
        let update = (worker.agent, Update::DataPortUnreachable(reason), now());
        let _ = self.update_sender.try_send(update);
    }
}

/// Which agents are silent: their process or host has stopped answering. `liveness` writes it;
/// requests and answers look once in a while, and end. By the agents' slots: the stamp of the
/// agent there that is silent, or 0.
#[derive(Debug)]
pub(crate) struct Pulses(Vec<AtomicU64>);

impl Pulses {
    pub(crate) fn new() -> Self {
        Self((0..AGENTS_MAX).map(|_| AtomicU64::new(0)).collect())
    }

    pub(super) fn is_silent(&self, agent: AgentKey) -> bool {
        self.0[agent.slot()].load(Ordering::Relaxed) == agent.stamp()
    }

    pub(super) async fn wait_until_silent(&self, agent: AgentKey) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            if self.is_silent(agent) {
                return;
            }
        }
    }

    /// Returns whether the agent was silent before.
    pub(crate) fn set_silent(&self, agent: AgentKey, is_silent: bool) -> bool {
        let stamp = if is_silent { agent.stamp() } else { 0 };
        self.0[agent.slot()].swap(stamp, Ordering::Relaxed) == agent.stamp()
    }
}

fn sign(signer: &Signer, request: &mut Request<Full<Bytes>>) {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    signer.sign(&method, &uri, request.headers_mut());
}

pub(super) fn is_refused_as_stranger(response: &Response<Incoming>) -> bool {
    let code = response.headers().get(claim::REFUSAL);
    response.status() == StatusCode::UNAUTHORIZED
        && code.is_some_and(|code| code == claim::NOT_A_ROUTER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::{fleet, replace_agent, start};

    #[test]
    fn the_next_agent_of_a_slot_is_not_silent_because_the_one_before_was() {
        let mut state = fleet(&[(0, 0)], start());
        let (pulses, old) = (Pulses::new(), AgentKey::first(0));
        assert!(!pulses.set_silent(old, true) && pulses.is_silent(old));
        let new = replace_agent(&mut state, old, start());
        assert!(pulses.is_silent(old) && !pulses.is_silent(new));
        assert!(!pulses.set_silent(new, false));
        assert!(!pulses.set_silent(new, true) && !pulses.is_silent(old));
        assert!(pulses.set_silent(new, false) && !pulses.is_silent(new));
    }
}
