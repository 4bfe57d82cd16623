//! Chooses which agents hold the claim of a session. Pure.
//!
//! Every router must ask the same agent about one session, without asking other routers. So
//! *rendezvous hashing* gives each live agent a weight for the session, however a router numbers
//! the agents. The heaviest is the session's *arbiter*. If an agent leaves, only its own sessions
//! get another one: the next heaviest.

use contract::placement_claim::PlacementClaimKey;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fleet::{membership::Phase, snapshot::Snapshot, worker::AgentKey};

/// Two have to answer, and two more hardly fail at once.
pub(super) const ARBITERS_MAX: usize = 4;

/// Returns agents, best first.
pub(super) fn arbiters(key: PlacementClaimKey, view: &Snapshot) -> Vec<AgentKey> {
    let live = view.agents.iter().filter(|agent| {
        // An agent that drains or leaves will be gone soon, and its claims with it.
        agent.is_up() && !agent.was_draining && agent.phase == Phase::Member
    });
    let mut weighed: Vec<_> =
        live.map(|agent| (weight(key, agent.name()), agent.name(), agent.key)).collect();
    weighed.sort_unstable_by(|one, other| other.cmp(one));
    weighed.truncate(ARBITERS_MAX);
    weighed.into_iter().map(|(.., agent)| agent).collect()
}

/// Routers of all versions must compute the same.
fn weight(key: PlacementClaimKey, agent_id: &str) -> u64 {
    let [first, second] = [&key.0[..8], &key.0[8..]]
        .map(|half| u64::from_le_bytes(half.try_into().expect("a half has eight bytes")));
    xxh3_64_with_seed(agent_id.as_bytes(), first ^ second)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use contract::id::SessionKey;

    use super::*;
    use crate::fleet::{
        state::Update,
        testing::{fleet, start},
    };

    fn key(number: u32) -> PlacementClaimKey {
        PlacementClaimKey::from(&SessionKey::new("p", format!("s{number}")).unwrap())
    }

    #[test]
    fn sessions_spread_over_all_agents_and_stay_when_another_agent_leaves() {
        let mut state = fleet(&[(0, 0); 4], start());
        let of_all = |view: &Snapshot| -> Vec<_> {
            (0..1000).map(|number| arbiters(key(number), view)).collect()
        };
        let before = of_all(&state.snapshot());
        let mut counts = HashMap::new();
        before.iter().for_each(|order| *counts.entry(order[0]).or_insert(0) += 1);
        assert!(counts.len() == 4 && counts.values().all(|&count| count > 180), "{counts:?}");
        state.apply(AgentKey::first(2), Update::AgentLost("gone".to_owned()), start());
        for (before, after) in before.iter().zip(of_all(&state.snapshot())) {
            let without: Vec<_> =
                before.iter().copied().filter(|agent| agent.slot() != 2).collect();
            assert!(after.starts_with(&without), "{before:?} became {after:?}");
        }
    }

    #[test]
    fn weights_are_the_same_in_every_version() {
        // What an older router computes; a change would split sessions during an upgrade.
        assert_eq!(weight(PlacementClaimKey([0; 16]), "w0"), xxh3_64_with_seed(b"w0", 0));
        let mut half = [0; 16];
        half[0] = 1;
        assert_eq!(weight(PlacementClaimKey(half), "w0"), xxh3_64_with_seed(b"w0", 1));
    }
}
