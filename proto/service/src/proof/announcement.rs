//! The proof of an agent that announces itself to a router.
//!
//! An agent signs its id and its address, so a process without the token can neither announce
//! itself nor have an agent's proof count for an address of its own.

use contract::proof;
use http::{HeaderMap, HeaderValue};

use super::{Error, MAC_BYTES, decode, encode};
use crate::router_token::{Mac, Token, Tokens};

/// `control` is the URL of the control port. For the header [`AGENT`](proof::AGENT).
#[must_use]
pub fn sign(tokens: &Tokens, agent_id: &str, control: &str) -> HeaderValue {
    let token = tokens.first();
    encode(&[&token.id()[..], &mac(token, agent_id, control).finish()].concat())
}

pub fn check(
    tokens: &Tokens,
    agent_id: &str,
    control: &str,
    headers: &HeaderMap,
) -> Result<(), Error> {
    let bytes = decode(headers.get(proof::AGENT).ok_or(Error::Missing)?)?;
    let (id, sent) = bytes.split_last_chunk::<MAC_BYTES>().ok_or(Error::Malformed)?;
    let token = tokens.find(id).ok_or(Error::OtherToken)?;
    if mac(token, agent_id, control).is(sent) { Ok(()) } else { Err(Error::Forged) }
}

fn mac(token: &Token, agent_id: &str, control: &str) -> Mac {
    let mut mac = token.mac("berth announcement");
    [agent_id, control].iter().for_each(|part| mac.add(part.as_bytes()));
    mac
}
