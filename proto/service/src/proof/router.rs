//! The router's side: has an agent prove itself, and signs the requests and calls to it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use arc_swap::ArcSwapOption;
use contract::{
    proof,
    v1::{ProveRequest, ProveResponse, worker_agent_client::WorkerAgentClient},
};
use http::{HeaderMap, HeaderValue, Method, Request, Uri};
use prost::Message as _;
use tonic::{
    Code, Status,
    body::Body,
    transport::{self, Channel},
};
use tower_service::Service;

use super::{
    CHALLENGE_BYTES, Error, NONCE_BYTES, PROCESS_BYTES, ROUTER_BYTES, RequestProof, Stamp, decode,
    encode, hello_mac, hello_number, random, request_mac,
};
use crate::{reload::Reloaded, router_token::Tokens};

pub type AgentClient = WorkerAgentClient<SignedChannel>;

#[derive(Debug)]
pub struct Hello {
    nonce: [u8; NONCE_BYTES],
    tokens: Arc<Tokens>,
}

#[derive(Debug, PartialEq, Eq)]
struct ProvenAgent {
    agent_id: String,
    challenge: [u8; CHALLENGE_BYTES],
}

/// Signs the requests to one agent, on both of its ports.
#[derive(Debug)]
pub struct Signer {
    tokens: Reloaded<Tokens>,
    name: [u8; ROUTER_BYTES],
    next_number: AtomicU64,
    /// `None` until the agent has proven itself.
    agent: ArcSwapOption<ProvenAgent>,
}

impl Hello {
    #[must_use]
    pub fn new(tokens: Arc<Tokens>) -> Self {
        Self { nonce: random(), tokens }
    }

    #[must_use]
    pub fn message(&self) -> ProveRequest {
        let token_id = self.tokens.first().id().to_vec();
        ProveRequest { token_id, nonce: self.nonce.to_vec() }
    }

    /// Returns the message as the value of the header [`HELLO`](proof::HELLO).
    #[must_use]
    pub fn to_header(&self) -> HeaderValue {
        encode(&self.message().encode_to_vec())
    }

    /// Reads the answer in the header [`AGENT`](proof::AGENT) of a response. It is not checked.
    pub(super) fn read_answer(headers: &HeaderMap) -> Result<ProveResponse, Error> {
        let bytes = decode(headers.get(proof::AGENT).ok_or(Error::Missing)?)?;
        ProveResponse::decode(&bytes[..]).map_err(|_| Error::Malformed)
    }

    fn check(&self, answer: ProveResponse) -> Result<ProvenAgent, Error> {
        let ProveResponse { agent_id, challenge, mac } = answer;
        if !hello_mac(self.tokens.first(), &agent_id, &self.nonce, &challenge).is(&mac) {
            return Err(Error::Forged);
        }
        let challenge = challenge.try_into().map_err(|_| Error::Malformed)?;
        Ok(ProvenAgent { agent_id, challenge })
    }

    pub fn check_headers(&self, headers: &HeaderMap) -> Result<(), Error> {
        self.check(Self::read_answer(headers)?).map(drop)
    }
}

impl Signer {
    #[must_use]
    pub fn new(tokens: Reloaded<Tokens>) -> Self {
        let (name, next_number) = (random(), AtomicU64::new(0));
        Self { tokens, name, next_number, agent: ArcSwapOption::empty() }
    }

    #[must_use]
    pub fn hello(&self) -> Hello {
        Hello::new(self.tokens.load())
    }

    /// Takes the answer to a hello on the control port, from whichever agent answers there.
    pub fn accept(&self, hello: &Hello, answer: ProveResponse) -> Result<(), Error> {
        self.store(hello.check(answer)?);
        Ok(())
    }

    /// A newer answer of the same process stays: those of two connections may come in any order.
    fn store(&self, answer: ProvenAgent) {
        let answer = Arc::new(answer);
        self.agent.rcu(|known| {
            let is_newer = |known: &Arc<ProvenAgent>| {
                let process = &known.challenge[..PROCESS_BYTES];
                let number = hello_number(&answer.challenge, process);
                known.agent_id == answer.agent_id
                    && number.is_some_and(|number| {
                        Some(number) < hello_number(&known.challenge, process)
                    })
            };
            match known {
                Some(known) if is_newer(known) => Some(Arc::clone(known)),
                _ => Some(Arc::clone(&answer)),
            }
        });
    }

    /// `None` before the agent has proven itself.
    #[must_use]
    pub fn challenge(&self) -> Option<[u8; CHALLENGE_BYTES]> {
        self.agent.load().as_ref().map(|agent| agent.challenge)
    }

    /// Takes the answer to a hello on the data port, maybe of a new process of the agent. Fails if
    /// that isn't the agent that has proven itself on the control port.
    pub fn accept_again(&self, hello: &Hello, headers: &HeaderMap) -> Result<(), Error> {
        let answer = hello.check(Hello::read_answer(headers)?)?;
        let known = self.agent.load();
        if known.as_ref().is_none_or(|known| known.agent_id != answer.agent_id) {
            return Err(Error::Forged);
        }
        self.store(answer);
        Ok(())
    }

    /// Does nothing until the agent has proven itself; the agent refuses the request then.
    pub fn sign(&self, method: &Method, uri: &Uri, headers: &mut HeaderMap) {
        let agent = self.agent.load();
        let Some(ProvenAgent { agent_id, challenge }) = agent.as_deref() else { return };
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let stamp = Stamp { challenge: *challenge, router: self.name, number };
        let tokens = self.tokens.load();
        let token = tokens.first();
        let mac = request_mac(token, agent_id, &stamp, (method, uri, headers)).finish();
        let proof = RequestProof { token_id: *token.id(), stamp, mac };
        headers.insert(proof::REQUEST, proof.to_header());
    }
}

/// A channel to a control port. With a signer, each call is signed.
#[derive(Debug, Clone)]
pub struct SignedChannel {
    channel: Channel,
    signer: Option<Arc<Signer>>,
}

impl SignedChannel {
    /// With a signer, the agent has proven itself, and its id is returned too.
    pub async fn proven_client(
        channel: Channel,
        signer: Option<Arc<Signer>>,
    ) -> Result<(AgentClient, Option<String>), Status> {
        let mut client = WorkerAgentClient::new(Self { channel, signer: signer.clone() });
        let Some(signer) = signer else { return Ok((client, None)) };
        let hello = signer.hello();
        let answer = client.prove(hello.message()).await;
        let answer = answer.map_err(|status| unproven(&status))?.into_inner();
        let agent_id = answer.agent_id.clone();
        signer.accept(&hello, answer).map_err(|_| {
            Status::unauthenticated(
                "what answers doesn't hold the token of agents.token_file, so it is no agent of \
                 this fleet; check the agent's address and its auth.token_file",
            )
        })?;
        Ok((client, Some(agent_id)))
    }
}

fn unproven(status: &Status) -> Status {
    match status.code() {
        Code::Unimplemented => {
            Status::unauthenticated("what answers can't prove itself; check the agent's address")
        }
        Code::Unauthenticated => {
            Status::unauthenticated(format!("the agent didn't prove itself: {}", status.message()))
        }
        _ => status.clone(),
    }
}

impl Service<Request<Body>> for SignedChannel {
    type Response = http::Response<Body>;
    type Error = transport::Error;
    type Future = <Channel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        if let Some(signer) = &self.signer {
            signer.sign(&head.method, &head.uri, &mut head.headers);
        }
        self.channel.call(Request::from_parts(head, body))
    }
}
