//! Counts the sessions of each principal, and the rows and tokens that they hold on each rank.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use contract::id::SessionKey;

use crate::session::table::{Session, room::Room, sessions::keys_by_time::KeysByTime};

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Principals {
    /// A principal without sessions has no entry.
    principals: BTreeMap<String, PrincipalSessions>,
    /// By the number of their sessions.
    by_size: BTreeSet<(usize, String)>,
    shared_at_rest: KeysByTime,
    /// By rank: the sessions that hold a row. Includes ranks that no longer exist.
    row_holders: Vec<BTreeSet<SessionKey>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct PrincipalSessions {
    sessions: usize,
    /// By rank. A rank on which the sessions hold nothing has no entry.
    held: BTreeMap<u32, Room>,
    /// By the end of the last turn.
    shared_at_rest: KeysByTime,
    exclusive_at_rest: KeysByTime,
}

/// A session that has no turn, and that may be closed or will expire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RestingSession {
    since: Instant,
    is_exclusive: bool,
}

impl RestingSession {
    /// `None` if the session is not at rest.
    pub(crate) fn from_session(session: &Session) -> Option<Self> {
        let rest = Self { since: session.turns.last_end, is_exclusive: session.is_exclusive() };
        session.can_expire().then_some(rest)
    }
}

impl Principals {
    /// The session must hold nothing.
    pub(crate) fn add_session(&mut self, key: &SessionKey) {
        let principal = match self.principals.get_mut(key.principal()) {
            Some(principal) => principal,
            None => self.principals.entry(key.principal().to_owned()).or_default(),
        };
        principal.sessions += 1;
        let sessions = principal.sessions;
        self.resize(key.principal(), sessions - 1, sessions);
    }

    /// The session must hold nothing, and not be counted as at rest.
    pub(crate) fn remove_session(&mut self, key: &SessionKey) {
        let Some(principal) = self.principals.get_mut(key.principal()) else { return };
        principal.sessions -= 1;
        let sessions = principal.sessions;
        if sessions == 0 {
            self.principals.remove(key.principal());
        }
        self.resize(key.principal(), sessions + 1, sessions);
    }

    fn resize(&mut self, principal: &str, from: usize, to: usize) {
        if from > 0 {
            self.by_size.remove(&(from, principal.to_owned()));
        }
        if to > 0 {
            self.by_size.insert((to, principal.to_owned()));
        }
    }

    pub(crate) fn change_resting(
        &mut self,
        key: &SessionKey,
        from: Option<RestingSession>,
        to: Option<RestingSession>,
    ) {
        if from == to {
            return;
        }
        let since = |resting: Option<RestingSession>, is_exclusive| {
            resting.filter(|it| it.is_exclusive == is_exclusive).map(|it| it.since)
        };
        self.shared_at_rest.change(key, since(from, false), since(to, false));
        if let Some(principal) = self.principals.get_mut(key.principal()) {
            principal.shared_at_rest.change(key, since(from, false), since(to, false));
            principal.exclusive_at_rest.change(key, since(from, true), since(to, true));
        }
    }

    /// Returns the shared session that is at rest longest: of one principal, or of all.
    pub(crate) fn longest_shared_rest(&self, principal: Option<&str>) -> Option<&SessionKey> {
        let at_rest = match principal {
            None => Some(&self.shared_at_rest),
            Some(principal) => {
                self.principals.get(principal).map(|principal| &principal.shared_at_rest)
            }
        };
        at_rest.and_then(KeysByTime::first).map(|(_, key)| key)
    }

    /// Returns the session that is at rest longest, and since when, of each principal with more
    /// than `sessions` sessions. The principal with the most comes first.
    pub(crate) fn longest_rests_beyond(
        &self,
        sessions: usize,
    ) -> impl Iterator<Item = &(Instant, SessionKey)> {
        let larger = self.by_size.iter().rev().take_while(move |(count, _)| *count > sessions);
        larger.filter_map(|(_, principal)| {
            let principal = self.principals.get(principal)?;
            let rests = [&principal.shared_at_rest, &principal.exclusive_at_rest];
            rests.into_iter().filter_map(KeysByTime::first).min()
        })
    }

    pub(crate) fn change_held(&mut self, key: &SessionKey, dp_rank: u32, from: Room, to: Room) {
        if from == to {
            return;
        }
        if let Some(principal) = self.principals.get_mut(key.principal()) {
            let held = principal.held.entry(dp_rank).or_default();
            held.rows = held.rows + to.rows - from.rows;
            held.tokens = held.tokens + to.tokens - from.tokens;
            if *held == Room::default() {
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

    pub(crate) fn sessions(&self, principal: &str) -> usize {
        self.principals.get(principal).map_or(0, |principal| principal.sessions)
    }

    pub(crate) fn count(&self) -> usize {
        self.principals.len()
    }

    pub(crate) fn largest(&self) -> usize {
        self.by_size.last().map_or(0, |(sessions, _)| *sessions)
    }

    pub(crate) fn held(&self, principal: &str, dp_rank: u32) -> Room {
        let held =
            self.principals.get(principal).and_then(|principal| principal.held.get(&dp_rank));
        held.copied().unwrap_or_default()
    }

    pub(crate) fn most_rows(&self, dp_rank: u32) -> u32 {
        let held = self.principals.values().filter_map(|principal| principal.held.get(&dp_rank));
        held.map(|held| held.rows).max().unwrap_or(0)
    }

    pub(crate) fn row_holders(&self, dp_rank: u32) -> impl Iterator<Item = &SessionKey> {
        self.row_holders.get(dp_rank as usize).into_iter().flatten()
    }

    /// `counted` was made from all sessions.
    pub(crate) fn check_invariants(&self, counted: &Self) {
        assert_eq!(self.principals, counted.principals, "a principal's sessions are miscounted");
        assert_eq!(self.by_size, counted.by_size, "the order of the principals is wrong");
        let (known, found) = (&self.shared_at_rest, &counted.shared_at_rest);
        assert_eq!(known, found, "the order of the sessions at rest is wrong");
        let holders = |all: &Self| all.row_holders.iter().flatten().cloned().collect::<Vec<_>>();
        assert_eq!(holders(self), holders(counted), "the sessions that hold rows differ");
    }
}
