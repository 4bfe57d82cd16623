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

use super::{Error, Guard, Need, Session, Table};

/// The longest idle limit without a setting for it. Added to an `Instant`, a longer one might
/// overflow.
const IDLE_LIMIT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// The most plain turns that the engine gets beyond those it can run now: about one prefill batch.
/// With these, the engine never waits for the agent.
pub(super) const TURNS_AHEAD_MAX: u64 = 8;

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

    /// Returns the share of a rank that a principal would exceed with so many places more, while
    /// another principal is active.
    pub(super) fn is_at_turn_share(
        &self,
        now: Instant,
        principal: &str,
        dp_rank: u32,
        places: u32,
    ) -> Option<TurnShare> {
        let shares = self.tickets.shares();
        if !shares.has_other(principal, now) || !self.settings.guards.is_on(Guard::TurnShare) {
            return None;
        }
        let inside = shares.inside(principal, dp_rank);
        let turns_max = self.engine.ranks.get(dp_rank as usize).map_or(0, |rank| rank.turns_max);
        let is_over = |held: u32, max: u64| u64::from(held) + u64::from(places) > max;
        if is_over(inside.running, self.turn_share(turns_max.into())) {
            return Some(TurnShare::All);
        }
        let rows_max = self.turn_share(self.free_rows(dp_rank));
        // A batch of as many sequences as the share has rows may find fewer: it runs alone then.
        let is_over_rows = inside.plain > 0 && is_over(inside.plain, rows_max);
        is_over_rows.then_some(TurnShare::Rows)
    }

    /// Checks that a queued turn's sequences are no more than its principal may have in the engine
    /// at once: all that pinned sessions leave of a rank, or a share of that while another
    /// principal is active. They can't be taken back once they run. Returns the need with which the
    /// turn counts.
    ///
    /// # Errors
    /// [`Error::BatchOverShare`] if they are more.
    pub(super) fn bound_batch(&mut self, now: Instant, rid: &str) -> Result<Need, Error> {
        let ticket = &self.tickets[rid];
        let need = ticket.need().unwrap_or_default();
        if need.places() <= 1 || !self.settings.guards.is_on(Guard::TurnShare) {
            return Ok(need);
        }
        let turns_max = self.capacity(ticket.dp_rank)?.turns_max;
        let places = (self.free_rows(ticket.dp_rank) + TURNS_AHEAD_MAX).min(turns_max.into());
        let has_other = self.tickets.shares().has_other(&ticket.principal, now);
        let places_max = if has_other { self.turn_share(places) } else { places };
        let places_max = u32::try_from(places_max).unwrap_or(u32::MAX);
        if need.places() > places_max && !need.is_clamped_batch {
            let sequences = need.places();
            return Err(Error::BatchOverShare { sequences, sequences_max: places_max });
        }
        let need = Need { sequences: need.places().min(places_max), ..need };
        self.tickets.set_need(rid, need);
        Ok(need)
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
            is_at_share: self.is_at_turn_share(now, principal, dp_rank, 1).is_some(),
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
