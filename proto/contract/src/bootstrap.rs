//! Which half of a prefill/decode pair an agent's engine runs, and how the halves find each other.
//!
//! The router sends a turn to the agents of both engines, with the same [`Bootstrap`] in its
//! envelopes. Only a router may say it: it names an address to which the decode engine connects.

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

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
    #[serde(deserialize_with = "read_room")]
    pub room: u64,
    pub prefill_rank: u32,
}

impl Bootstrap {
    /// `ranks` is the prefill engine's number of DP ranks. `random` may be any number.
    #[must_use]
    pub fn room_for(random: u64, rank: u32, ranks: u32) -> u64 {
        let ranks = u64::from(ranks.max(1));
        let multiple = random % (ROOMS_END / ranks) * ranks;
        multiple + u64::from(rank) % ranks
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

fn read_room<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let room = u64::deserialize(deserializer)?;
    if room < ROOMS_END { Ok(room) } else { Err(D::Error::custom("a room has 63 bits")) }
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
        fn an_engine_gets_the_members_as_json(host in "[a-z0-9:.\\[\\]\"\\\\-]{0,60}", port: u16) {
            let bootstrap =
                Bootstrap { half: Half::Decode, host, port, room: ROOMS_END - 1, prefill_rank: 3 };
            let body = format!("{{{}}}", bootstrap.members());
            let value: serde_json::Value = serde_json::from_str(&body).unwrap();
            prop_assert_eq!(value["bootstrap_host"].as_str(), Some(bootstrap.host.as_str()));
        }
    }
}
