//! Proofs by which routers and agents recognize each other, without sending their shared token.
//!
//! - A router says hello with a random nonce. The agent answers with an HMAC by the token over the
//!   nonce, its id and a *challenge*. So the router knows an agent of its fleet before it sends
//!   anything else, on each connection to a data or control port.
//! - A router *signs* each request and call: an HMAC by the token over the challenge, a number, the
//!   method, the path, and the headers that only a router may send. An agent takes each number
//!   once. So a listener, or an impostor in an agent's place, can't act as a router.
//! - An agent that announces itself signs its id and its address.
//!
//! Requests are signed, not connections, because a proxy between the two may send the requests of
//! several peers over one connection. Bodies are neither signed nor encrypted: TLS does that.

pub mod agent;
pub mod announcement;
pub mod connection;
pub mod router;
mod windows;

use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use contract::{envelope::TRUSTED, proof};
use http::{HeaderMap, HeaderValue, Method, Uri};

use crate::router_token::{Mac, TOKEN_ID_BYTES, Token};

const NONCE_BYTES: usize = 32;
/// Bytes of a challenge that tell one agent process from all others.
const PROCESS_BYTES: usize = 16;
/// Bytes of a challenge: those of the agent's process, and the number of the hello.
const CHALLENGE_BYTES: usize = PROCESS_BYTES + 8;
/// Bytes of the random name of one router's connection to one agent.
const ROUTER_BYTES: usize = 16;
const MAC_BYTES: usize = 32;
/// The longest header with a proof, in characters. An agent's answer has its id, of 255 bytes at
/// most; a request's proof has 118 characters.
const HEADER_CHARS_MAX: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("it has no proof")]
    Missing,
    #[error("its proof can't be read")]
    Malformed,
    #[error("its token is another one")]
    OtherToken,
    /// It is not made by the token that it names, or it is the proof of something else.
    #[error("its proof is forged")]
    Forged,
    /// It answers a challenge of an earlier agent process, or is too old.
    #[error("its proof is outdated")]
    Outdated,
    #[error("its proof was used before")]
    Replayed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    challenge: [u8; CHALLENGE_BYTES],
    router: [u8; ROUTER_BYTES],
    number: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct RequestProof {
    token_id: [u8; TOKEN_ID_BYTES],
    stamp: Stamp,
    mac: [u8; MAC_BYTES],
}

impl RequestProof {
    fn to_header(&self) -> HeaderValue {
        let Stamp { challenge, router, number } = &self.stamp;
        let number = number.to_le_bytes();
        encode(&[&self.token_id[..], challenge, router, &number, &self.mac].concat())
    }

    fn from_header(value: &HeaderValue) -> Result<Self, Error> {
        let bytes = decode(value)?;
        let mut rest = &bytes[..];
        let proof = Self {
            token_id: take(&mut rest)?,
            stamp: Stamp {
                challenge: take(&mut rest)?,
                router: take(&mut rest)?,
                number: u64::from_le_bytes(take(&mut rest)?),
            },
            mac: take(&mut rest)?,
        };
        if rest.is_empty() { Ok(proof) } else { Err(Error::Malformed) }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Error> {
    let (taken, others) = rest.split_first_chunk().ok_or(Error::Malformed)?;
    *rest = others;
    Ok(*taken)
}

fn encode(bytes: &[u8]) -> HeaderValue {
    HeaderValue::try_from(BASE64_STANDARD_NO_PAD.encode(bytes)).expect("Base64 is legal")
}

fn decode(value: &HeaderValue) -> Result<Vec<u8>, Error> {
    if value.len() > HEADER_CHARS_MAX {
        return Err(Error::Malformed);
    }
    BASE64_STANDARD_NO_PAD.decode(value).map_err(|_| Error::Malformed)
}

fn hello_mac(token: &Token, agent_id: &str, nonce: &[u8], challenge: &[u8]) -> Mac {
    let mut mac = token.mac("berth agent");
    [agent_id.as_bytes(), nonce, challenge].iter().for_each(|part| mac.add(part));
    mac
}

fn request_mac(
    token: &Token,
    agent_id: &str,
    stamp: &Stamp,
    (method, uri, headers): (&Method, &Uri, &HeaderMap),
) -> Mac {
    let mut mac = token.mac("berth router");
    let path = uri.path_and_query().map_or("", |path| path.as_str());
    let Stamp { challenge, router, number } = stamp;
    let number = number.to_le_bytes();
    let parts = [agent_id.as_bytes(), challenge, router, &number];
    parts.iter().for_each(|part| mac.add(part));
    mac.add(method.as_str().as_bytes());
    mac.add(path.as_bytes());
    for name in &TRUSTED {
        if *name != proof::REQUEST {
            for value in headers.get_all(name) {
                mac.add(name.as_str().as_bytes());
                mac.add(value.as_bytes());
            }
        }
    }
    mac
}

/// The number of the hello that got this challenge; `None` if another process gave it.
fn hello_number(challenge: &[u8; CHALLENGE_BYTES], process: &[u8]) -> Option<u64> {
    let number = challenge.strip_prefix(process)?;
    Some(u64::from_le_bytes(number.try_into().ok()?))
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the system has random bytes");
    bytes
}

#[cfg(test)]
mod tests;
