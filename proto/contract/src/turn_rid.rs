//! The request ids that agents give their turns inside the engine, which clients see in answers.
//!
//! An id names its agent and the owner of its turn, so that any router can find the engine that
//! keeps a stored response, and refuse other clients. Nothing is stored for that. As hex digits, an
//! id has a random number, so that nobody guesses an id; a hash of the agent's id; and a hash of
//! the turn's principal together with the random number. A client can't change the third part of
//! another client's id in its own favour: the engine has no turn under the id that this makes.

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_64;

/// Clients of the Responses API expect it.
pub const RESPONSE_PREFIX: &str = "resp_";

const RANDOM_DIGITS: usize = 32;
const AGENT_DIGITS: usize = 16;
const OWNER_DIGITS: usize = 24;
/// Every id has this length. The engine aborts all turns whose id begins with a given text, so no
/// id may be the beginning of another.
pub const TURN_RID_BYTES: usize = RANDOM_DIGITS + AGENT_DIGITS + OWNER_DIGITS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnRid<'a> {
    random: &'a str,
    agent: &'a str,
    owner: &'a str,
}

impl<'a> TurnRid<'a> {
    /// `random` must be a new random number.
    #[must_use]
    pub fn compose(random: u128, agent_id: &str, principal: &str) -> String {
        let random = format!("{random:032x}");
        let rid = format!("{random}{}{}", hash_agent(agent_id), hash_owner(&random, principal));
        debug_assert_eq!(rid.len(), TURN_RID_BYTES);
        rid
    }

    /// `None` for any text that [`Self::compose`] doesn't make.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != TURN_RID_BYTES || !text.bytes().all(is_digit) {
            return None;
        }
        let (random, rest) = text.split_at(RANDOM_DIGITS);
        let (agent, owner) = rest.split_at(AGENT_DIGITS);
        Some(Self { random, agent, owner })
    }

    #[must_use]
    pub fn parse_response(text: &'a str) -> Option<Self> {
        Self::parse(text.strip_prefix(RESPONSE_PREFIX)?)
    }

    #[must_use]
    pub fn names_agent(&self, agent_id: &str) -> bool {
        self.agent == hash_agent(agent_id)
    }

    #[must_use]
    pub fn is_owned_by(&self, principal: &str) -> bool {
        self.owner == hash_owner(self.random, principal)
    }
}

fn hash_agent(agent_id: &str) -> String {
    format!("{:016x}", xxh3_64(agent_id.as_bytes()))
}

fn hash_owner(random: &str, principal: &str) -> String {
    let hash = Sha256::new().chain_update(random).chain_update(principal).finalize();
    hash.iter().take(OWNER_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_its_agent_and_its_owner_and_no_others() {
        let text = TurnRid::compose(7, "w0", "alice");
        let rid = TurnRid::parse(&text).unwrap();
        assert!(rid.names_agent("w0") && !rid.names_agent("w1"));
        assert!(rid.is_owned_by("alice") && !rid.is_owned_by("bob") && !rid.is_owned_by(""));
        assert_ne!(text, TurnRid::compose(8, "w0", "alice"));
        // Also the numbers 0 and u128::MAX make ids of one length.
        for random in [0, u128::MAX] {
            assert_eq!(TurnRid::compose(random, "", "").len(), TURN_RID_BYTES);
        }
    }

    #[test]
    fn another_clients_id_stays_its_own_whatever_part_is_changed() {
        let (of_alice, of_bob) =
            (TurnRid::compose(7, "w0", "alice"), TurnRid::compose(8, "w0", "bob"));
        let owner_at = TURN_RID_BYTES - OWNER_DIGITS;
        // The owner's part of another id fits only to that id's random number.
        let mixed = format!("{}{}", &of_alice[..owner_at], &of_bob[owner_at..]);
        assert!(!TurnRid::parse(&mixed).unwrap().is_owned_by("bob"));
    }

    #[test]
    fn other_texts_are_no_ids() {
        let text = TurnRid::compose(7, "w0", "alice");
        let response = format!("resp_{text}");
        assert!(TurnRid::parse_response(&response).is_some());
        assert!(TurnRid::parse_response(&text).is_none() && TurnRid::parse(&response).is_none());
        let upper = text.to_uppercase();
        for other in ["", "resp_abc", &text[1..], &upper, &"é".repeat(TURN_RID_BYTES / 2)] {
            assert_eq!(TurnRid::parse(other), None, "{other}");
        }
    }
}
