//! The agent's side: answers hellos, and checks that requests and calls come from routers.

use std::sync::atomic::{AtomicU64, Ordering};

use contract::{
    proof,
    v1::{ProveRequest, ProveResponse},
};
use http::{HeaderMap, HeaderValue, Method, Uri};
use parking_lot::Mutex;
use prost::Message as _;

use super::{
    Error, NONCE_BYTES, PROCESS_BYTES, RequestProof, announcement, decode, encode, hello_mac,
    hello_number, random, request_mac, windows::Windows,
};
use crate::{reload::Reloaded, router_token::Tokens};

/// What one agent process proves itself with, and which proofs it has taken. Both ports share it.
#[derive(Debug)]
pub struct AgentProofs {
    agent_id: String,
    tokens: Reloaded<Tokens>,
    process: [u8; PROCESS_BYTES],
    hellos: AtomicU64,
    windows: Mutex<Windows>,
}

impl AgentProofs {
    #[must_use]
    pub fn new(agent_id: String, tokens: Reloaded<Tokens>) -> Self {
        let (process, hellos, windows) = (random(), AtomicU64::new(0), Mutex::default());
        Self { agent_id, tokens, process, hellos, windows }
    }

    pub fn answer(&self, hello: &ProveRequest) -> Result<ProveResponse, Error> {
        if hello.nonce.len() != NONCE_BYTES {
            return Err(Error::Malformed);
        }
        let tokens = self.tokens.load();
        let token = tokens.find(&hello.token_id).ok_or(Error::OtherToken)?;
        let number = self.hellos.fetch_add(1, Ordering::Relaxed);
        let challenge = [&self.process[..], &number.to_le_bytes()].concat();
        let mac = hello_mac(token, &self.agent_id, &hello.nonce, &challenge).finish();
        Ok(ProveResponse { agent_id: self.agent_id.clone(), challenge, mac: mac.to_vec() })
    }

    pub fn answer_headers(&self, headers: &HeaderMap) -> Result<HeaderValue, Error> {
        let hello = decode(headers.get(proof::HELLO).ok_or(Error::Missing)?)?;
        let hello = ProveRequest::decode(&hello[..]).map_err(|_| Error::Malformed)?;
        Ok(encode(&self.answer(&hello)?.encode_to_vec()))
    }

    /// `control` is the URL of the control port. For the header [`AGENT`](proof::AGENT).
    #[must_use]
    pub fn sign_announcement(&self, control: &str) -> HeaderValue {
        announcement::sign(&self.tokens.load(), &self.agent_id, control)
    }

    /// Checks that a router signed the request or call.
    pub fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Error> {
        let tokens = self.tokens.load();
        let value = headers.get(proof::REQUEST).ok_or(Error::Missing)?;
        let RequestProof { token_id, stamp, mac } = RequestProof::from_header(value)?;
        let token = tokens.find(&token_id).ok_or(Error::OtherToken)?;
        if !request_mac(token, &self.agent_id, &stamp, (method, uri, headers)).is(&mac) {
            return Err(Error::Forged);
        }
        let hello = hello_number(&stamp.challenge, &self.process).ok_or(Error::Outdated)?;
        self.windows.lock().take(stamp.router, hello, stamp.number)
    }
}
