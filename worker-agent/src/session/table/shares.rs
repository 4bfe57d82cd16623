//! Bounds what one principal may have while others want some, and makes room for those with less.
//!
//! A principal is the client that a router has authenticated. Two kinds of bounds keep one
//! principal from stopping the others:
//!
//! - *A share that yields.* A principal may use everything while no other wants it. It gives up
//!   what it has to a principal that has less (max-min fairness): places in the queue, sessions of
//!   a full table, and pinned rows and tokens (`reclaim`).
//! - *A fixed bound*, where nothing can be taken back: the sessions of one principal, the rows that
//!   pinned sessions may hold, and the turns inside the engine. The bound on turns applies only
//!   while another principal is active.

use std::time::{Duration, Instant};

use proto::id::SessionKey;
use service::refusal::Code;

use super::{Error, Guard, Session, Table};

/// The longest idle limit without a setting for it. Added to an `Instant`, a longer one might
/// overflow.
const IDLE_LIMIT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// The share of the engine that a principal has used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnShare {
    /// Its share of the rows that plain turns run in. Turns of pinned sessions still run.
    Rows,
    /// Its share of all turns inside the engine.
    All,
}

impl Table {
    /// Returns the longest idle limit that a client may ask for.
    pub(super) fn idle_cap(&self) -> Duration {
        let is_guard_on = self.settings.guards.is_on(Guard::IdleCapped);
        if is_guard_on { self.settings.shares.idle_cap } else { IDLE_LIMIT_MAX }
    }

    /// Returns the share of a rank that a principal has used up, while another principal is active.
    pub(super) fn is_at_turn_share(
        &self,
        now: Instant,
        principal: &str,
        dp_rank: u32,
    ) -> Option<TurnShare> {
        let shares = self.tickets.shares();
        if !shares.has_other(principal, now) || !self.settings.guards.is_on(Guard::TurnShare) {
            return None;
        }
        let inside = shares.inside(principal, dp_rank);
        let turns_max = self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.turns_max);
        if u64::from(inside.running) >= self.turn_share(turns_max.into()) {
            return Some(TurnShare::All);
        }
        let rows_max = self.turn_share(self.free_rows(dp_rank));
        (u64::from(inside.plain) >= rows_max).then_some(TurnShare::Rows)
    }

    /// Returns the part of `places` that one principal may have; at least one.
    fn turn_share(&self, places: u64) -> u64 {
        (places * u64::from(self.settings.shares.turns_milli) / 1000).max(1)
    }

    /// Makes room in the full queue for a ticket of `principal`, which may be in the queue already.
    /// If another principal has more tickets there, refuses its newest one.
    ///
    /// # Errors
    /// [`Error::OutOfRoom`] if no principal has more tickets in the queue.
    pub(super) fn make_queue_place(&mut self, now: Instant, principal: &str) -> Result<(), Error> {
        let guards = self.settings.guards;
        if !guards.is_on(Guard::QueueBound) {
            return Ok(());
        }
        let max = self.settings.turns_queued_max;
        let wait = self.queue_pace.estimate_wait(self.tickets.queue().len());
        let longest = self.tickets.newest_of_longest_queue(principal);
        let Some(yielding) = longest.filter(|_| guards.is_on(Guard::QueueShare)).cloned() else {
            let detail = format!("{max} wait already");
            return Err(Error::OutOfRoom { resource: Code::QueuePlaces, detail, wait });
        };
        let detail = format!("{max} wait already, most of them yours, and others wait too");
        let error = Error::OutOfRoom { resource: Code::QueueShare, detail, wait };
        self.refuse_ticket(now, &yielding, error);
        Ok(())
    }

    /// Makes room in the table for a session of `principal`.
    ///
    /// # Errors
    /// [`Error::OutOfRoom`] if the principal has as many sessions as it may, or the table is full
    /// of sessions that can't be closed for this principal.
    pub(super) fn make_session_place(
        &mut self,
        now: Instant,
        principal: &str,
    ) -> Result<(), Error> {
        let shares = self.settings.shares;
        let own = self.sessions.principals().sessions(principal);
        let is_share_used =
            own >= shares.principal_sessions_max && self.settings.guards.is_on(Guard::SessionShare);
        if is_share_used && !self.close_longest_idle(now, Some(principal)) {
            let detail = format!("this client has {own} open, and may have no more; close some");
            return Err(Error::OutOfRoom { resource: Code::PrincipalSessions, detail, wait: None });
        }
        let is_full = self.sessions.len() >= shares.sessions_max;
        if is_full && !self.close_longest_idle(now, None) && !self.close_for(now, principal) {
            let detail = format!("{} are open; close some", shares.sessions_max);
            return Err(Error::OutOfRoom { resource: Code::Sessions, detail, wait: None });
        }
        Ok(())
    }

    /// Closes the longest idle session of those that aren't exclusive, to make room in the table.
    /// With a `principal`, closes one of its sessions. Returns false if there is none. No client
    /// has pinned such a session or sends deltas to it, so no client relies on it. A later turn may
    /// still find the session's KV in the radix tree.
    fn close_longest_idle(&mut self, now: Instant, principal: Option<&str>) -> bool {
        let longest_idle = self.sessions.principals().longest_shared_rest(principal).cloned();
        longest_idle.is_some_and(|key| self.close_session(now, &key).is_ok())
    }

    /// Closes the longest idle session of the principal that has the most sessions, and more than
    /// `principal` would have, if the session has been idle for `demote_idle`. Its client may rely
    /// on it, so this comes last. If that principal has no such session, the next one gives way.
    /// Returns false if there is none.
    fn close_for(&mut self, now: Instant, principal: &str) -> bool {
        let principals = self.sessions.principals();
        let own = principals.sessions(principal);
        let mut longest_idle = principals.longest_rests_beyond(own + 1);
        let is_idle = |(since, _): &&(Instant, _)| *since + self.settings.demote_idle <= now;
        let closable = longest_idle.find(is_idle).map(|(_, key)| key.clone());
        drop(longest_idle);
        closable.is_some_and(|key| self.close_session(now, &key).is_ok())
    }

    /// Returns what a principal has on a rank.
    #[must_use]
    pub fn principal_view(&self, now: Instant, principal: &str, dp_rank: u32) -> PrincipalView {
        let shares = self.tickets.shares();
        let inside = shares.inside(principal, dp_rank);
        PrincipalView {
            running: inside.running,
            plain: inside.plain,
            queued: shares.queued(principal),
            rows_held: self.sessions.principals().held(principal, dp_rank).rows,
            is_at_share: self.is_at_turn_share(now, principal, dp_rank).is_some(),
        }
    }

    /// Returns the sessions at rest that hold a row of a rank.
    pub fn pins_at_rest(&self, dp_rank: u32) -> impl Iterator<Item = (&SessionKey, &Session)> {
        let holders = self.sessions.principals().row_holders(dp_rank);
        let of_key = |key| (key, &self.sessions[key]);
        holders.map(of_key).filter(|(_, session)| session.state.is_open() && session.can_expire())
    }

    /// Returns figures of how evenly principals share the table.
    #[must_use]
    pub fn share_figures(&self) -> ShareFigures {
        let principals = self.sessions.principals();
        let ranks = 0..u32::try_from(self.engine.ranks.len()).unwrap_or(u32::MAX);
        ShareFigures {
            principals: principals.count(),
            sessions_max: principals.largest(),
            pinned_rows_max: ranks.map(|dp_rank| principals.most_rows(dp_rank)).max().unwrap_or(0),
        }
    }
}

/// What one principal has on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrincipalView {
    /// The turns inside the engine.
    pub running: u32,
    /// Those of them that run on the radix tree.
    pub plain: u32,
    /// The tickets in the queue, on all ranks.
    pub queued: usize,
    /// The rows that pinned sessions hold.
    pub rows_held: u32,
    /// Whether the principal has used up its share of the turns inside the engine.
    pub is_at_share: bool,
}

/// How evenly principals share the table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShareFigures {
    /// The number of principals that have sessions.
    pub principals: usize,
    /// The sessions of the principal that has the most.
    pub sessions_max: usize,
    /// The rows of one rank that the pinned sessions of one principal hold at most.
    pub pinned_rows_max: u32,
}
