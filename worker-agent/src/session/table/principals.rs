//! Counts the sessions of each principal, and the rows and tokens that they hold on each rank.
//!
//! A principal is the client that a router has authenticated; it is part of each session's key. The
//! table asks this module how much of a rank each principal holds, so that one principal can't take
//! what all need. This module decides nothing.

use std::collections::{BTreeMap, BTreeSet};

use proto::id::SessionKey;

use super::held::Held;

/// The sessions of all principals.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Principals {
    /// By principal. A principal without sessions has no entry.
    principals: BTreeMap<String, PrincipalSessions>,
    /// By rank: the sessions that hold a row. Includes ranks that no longer exist.
    row_holders: Vec<BTreeSet<SessionKey>>,
}

/// The sessions of one principal.
#[derive(Debug, Default, PartialEq, Eq)]
struct PrincipalSessions {
    sessions: usize,
    /// By rank: what the sessions hold. A rank on which they hold nothing has no entry.
    held: BTreeMap<u32, Held>,
}

impl Principals {
    /// Counts a new session, which holds nothing.
    pub(super) fn add_session(&mut self, key: &SessionKey) {
        match self.principals.get_mut(key.principal()) {
            Some(principal) => principal.sessions += 1,
            None => {
                let first = PrincipalSessions { sessions: 1, ..PrincipalSessions::default() };
                self.principals.insert(key.principal().to_owned(), first);
            }
        }
    }

    /// Forgets a session that holds nothing.
    pub(super) fn remove_session(&mut self, key: &SessionKey) {
        let Some(principal) = self.principals.get_mut(key.principal()) else { return };
        principal.sessions -= 1;
        if principal.sessions == 0 {
            self.principals.remove(key.principal());
        }
    }

    /// Notes that what a session holds has changed.
    pub(super) fn change_held(&mut self, key: &SessionKey, dp_rank: u32, from: Held, to: Held) {
        if from == to {
            return;
        }
        if let Some(principal) = self.principals.get_mut(key.principal()) {
            let held = principal.held.entry(dp_rank).or_default();
            held.rows = held.rows + to.rows - from.rows;
            held.tokens = held.tokens + to.tokens - from.tokens;
            if *held == Held::default() {
                principal.held.remove(&dp_rank);
            }
        }
        if from.rows == to.rows {
            return;
        }
        let rank = dp_rank as usize;
        if self.row_holders.len() <= rank {
            self.row_holders.resize_with(rank + 1, BTreeSet::new);
        }
        if to.rows > 0 {
            self.row_holders[rank].insert(key.clone());
        } else {
            self.row_holders[rank].remove(key);
        }
    }

    /// Returns the number of sessions of a principal.
    pub(super) fn sessions(&self, principal: &str) -> usize {
        self.principals.get(principal).map_or(0, |principal| principal.sessions)
    }

    /// Returns the number of principals that have sessions.
    pub(super) fn count(&self) -> usize {
        self.principals.len()
    }

    /// Returns the number of sessions of the principal that has the most.
    pub(super) fn largest(&self) -> usize {
        self.principals.values().map(|principal| principal.sessions).max().unwrap_or(0)
    }

    /// Returns what the sessions of a principal hold on a rank.
    pub(super) fn held(&self, principal: &str, dp_rank: u32) -> Held {
        let held =
            self.principals.get(principal).and_then(|principal| principal.held.get(&dp_rank));
        held.copied().unwrap_or_default()
    }

    /// Returns the most rows that one principal's sessions hold on a rank.
    pub(super) fn most_rows(&self, dp_rank: u32) -> u32 {
        let held = self.principals.values().filter_map(|principal| principal.held.get(&dp_rank));
        held.map(|held| held.rows).max().unwrap_or(0)
    }

    /// Returns the sessions that hold a row of a rank.
    pub(super) fn row_holders(&self, dp_rank: u32) -> impl Iterator<Item = &SessionKey> {
        self.row_holders.get(dp_rank as usize).into_iter().flatten()
    }

    /// Checks that the counts match those of `counted`, which were made from all sessions.
    pub(super) fn check_invariants(&self, counted: &Self) {
        assert_eq!(self.principals, counted.principals, "a principal's sessions are miscounted");
        let holders = |all: &Self| all.row_holders.iter().flatten().cloned().collect::<Vec<_>>();
        assert_eq!(holders(self), holders(counted), "the sessions that hold rows differ");
    }
}
