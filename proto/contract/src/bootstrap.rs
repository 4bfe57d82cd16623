//! The header by which a router tells an agent which half of a prefill/decode pair its engine runs.
//!
//! The router sends a turn to the agents of both engines, with the same [`Bootstrap`]. Only a
//! router may send the header ([`crate::claim::TRUSTED`]): it names an address to which the decode
//! engine connects.

use http::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};

/// A [`Bootstrap`], as JSON.
pub const BOOTSTRAP: HeaderName = HeaderName::from_static("x-berth-bootstrap");

/// The engine keeps rooms as signed 64-bit numbers.
pub const ROOMS_END: u64 = 1 << 63;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Half {
    Prefill,
    Decode,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bootstrap {
    /// The receiver's engine runs this half.
    pub half: Half,
    /// The decode engine finds the prefill engine's bootstrap server there.
    pub host: String,
    pub port: u16,
    /// Number of the hand-off, unique among the turns that run; below [`ROOMS_END`]. Its remainder
    /// by the prefill engine's number of DP ranks is `prefill_rank`.
    pub room: u64,
    pub prefill_rank: u32,
}

#[derive(Debug, thiserror::Error)]
#[error("the {BOOTSTRAP} header is not the JSON of a bootstrap; only a router may send it")]
pub struct Malformed(#[source] Option<serde_json::Error>);

impl Bootstrap {
    /// `ranks` is the prefill engine's number of DP ranks. `random` may be any number.
    #[must_use]
    pub fn room_for(random: u64, rank: u32, ranks: u32) -> u64 {
        let ranks = u64::from(ranks.max(1));
        let multiple = random % (ROOMS_END / ranks) * ranks;
        multiple + u64::from(rank) % ranks
    }

    /// `None` if the host has characters that no header can carry.
    #[must_use]
    pub fn to_header(&self) -> Option<HeaderValue> {
        let text = serde_json::to_vec(self).expect("a struct of strings and numbers serialises");
        HeaderValue::from_bytes(&text).ok()
    }

    /// `None` if the turn isn't split.
    pub fn from_headers(headers: &HeaderMap) -> Result<Option<Self>, Malformed> {
        let Some(value) = headers.get(BOOTSTRAP) else { return Ok(None) };
        let bootstrap: Self =
            serde_json::from_slice(value.as_bytes()).map_err(|error| Malformed(Some(error)))?;
        if bootstrap.room >= ROOMS_END {
            return Err(Malformed(None));
        }
        Ok(Some(bootstrap))
    }

    /// JSON for the engine's body, without braces.
    #[must_use]
    pub fn members(&self) -> String {
        let host = serde_json::to_string(&self.host).expect("a string serialises");
        let Self { port, room, prefill_rank, .. } = self;
        let bootstrap =
            format!(r#""bootstrap_host":{host},"bootstrap_port":{port},"bootstrap_room":{room}"#);
        format!(r#"{bootstrap},"disagg_prefill_dp_rank":{prefill_rank}"#)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_room_has_63_bits_and_says_the_rank(random: u64, ranks in 1..300_u32, rank: u32) {
            let rank = rank % ranks;
            let room = Bootstrap::room_for(random, rank, ranks);
            prop_assert!(room < ROOMS_END);
            prop_assert_eq!(room % u64::from(ranks), u64::from(rank));
        }

        #[test]
        fn a_bootstrap_survives_the_header(host in "[a-z0-9:.\\[\\]\"\\\\-]{0,60}", port: u16) {
            let bootstrap =
                Bootstrap { half: Half::Decode, host, port, room: ROOMS_END - 1, prefill_rank: 3 };
            let mut headers = HeaderMap::new();
            headers.insert(BOOTSTRAP, bootstrap.to_header().unwrap());
            prop_assert_eq!(Bootstrap::from_headers(&headers).unwrap(), Some(bootstrap.clone()));
            let body = format!("{{{}}}", bootstrap.members());
            let value: serde_json::Value = serde_json::from_str(&body).unwrap();
            prop_assert_eq!(value["bootstrap_host"].as_str(), Some(bootstrap.host.as_str()));
        }
    }

    #[test]
    fn a_malformed_bootstrap_is_refused() {
        let room =
            r#"{"half":"prefill","host":"h","port":1,"room":9223372036854775808,"prefill_rank":0}"#;
        for text in ["", "{}", room, &room.replace("prefill\"", "both\"")] {
            let mut headers = HeaderMap::new();
            headers.insert(BOOTSTRAP, HeaderValue::from_str(text).unwrap());
            assert!(Bootstrap::from_headers(&headers).is_err(), "{text:?} was taken");
        }
        assert!(Bootstrap::from_headers(&HeaderMap::new()).unwrap().is_none());
    }
}
