//! Bounds what one principal may have while others want some, and makes room for those with less.
//!
//! A principal may use everything while no other wants it. What can be taken back (places in the
//! queue, sessions of a full table, pinned rows and tokens) it gives up to one that has less
//! (max-min fairness). Where nothing can, there is a fixed bound: the sessions of one principal,
//! the rows of pinned sessions, and the turns inside the engine. The bound on turns holds only
//! while another principal is active.

use std::time::{Duration, Instant};

use contract::id::SessionKey;
use service::refusal::Code;

use super::{Error, Guard, Need, Session, Table};

/// Added to an `Instant`, a longer one might overflow.
const IDLE_LIMIT_MAX: Duration = Duration::from_secs(365 * 86_400);

/// The most plain turns beyond those that the engine can run now: about one prefill batch. With
/// these, the engine never waits for the agent.
pub(super) const TURNS_AHEAD_MAX: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnShare {
    /// Of the rows that plain turns run in. Turns of pinned sessions still run.
    Rows,
    /// Of all turns inside the engine.
    All,
}

impl Table {
    pub(super) fn idle_cap(&self) -> Duration {
        let is_guard_on = self.settings.guards.is_on(Guard::IdleCapped);
        if is_guard_on { self.settings.shares.idle_cap } else { IDLE_LIMIT_MAX }
    }

    /// What so many places more would exceed while another principal is active.
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

    /// Bounds a queued turn's sequences, which can't be taken back once they run, by what pinned
    /// sessions leave, or one's share of it. Returns the need with which the turn counts.
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

    /// At least one.
    fn turn_share(&self, places: u64) -> u64 {
        (places * u64::from(self.settings.shares.turns_milli) / 1000).max(1)
    }

    /// Makes room for a ticket of `principal`, which may be in the full queue already. Refuses the
    /// newest ticket of a principal that has more, and fails if none has.
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

    /// Closes only a session that isn't exclusive. No client has pinned such a session or sends
    /// deltas to it, so none relies on it. A later turn may still find its KV in the radix tree.
    fn close_longest_idle(&mut self, now: Instant, principal: Option<&str>) -> bool {
        let longest_idle = self.sessions.principals().longest_shared_rest(principal).cloned();
        longest_idle.is_some_and(|key| self.close_session(now, &key).is_ok())
    }

    /// Comes last, because a client may rely on the session: one idle for `demote_idle`, of the
    /// principal with the most sessions, more than `principal` would have.
    fn close_for(&mut self, now: Instant, principal: &str) -> bool {
        let principals = self.sessions.principals();
        let own = principals.sessions(principal);
        let mut longest_idle = principals.longest_rests_beyond(own + 1);
        let is_idle = |(since, _): &&(Instant, _)| *since + self.settings.demote_idle <= now;
        let closable = longest_idle.find(is_idle).map(|(_, key)| key.clone());
        drop(longest_idle);
        closable.is_some_and(|key| self.close_session(now, &key).is_ok())
    }

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

    pub fn pins_at_rest(&self, dp_rank: u32) -> impl Iterator<Item = (&SessionKey, &Session)> {
        let holders = self.sessions.principals().row_holders(dp_rank);
        let of_key = |key| (key, &self.sessions[key]);
        holders.map(of_key).filter(|(_, session)| session.state.is_open() && session.can_expire())
    }

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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrincipalView {
    pub running: u32,
    /// The turns inside the engine that run on the radix tree.
    pub plain: u32,
    /// The places of the tickets in the queue, on all ranks.
    pub queued: usize,
    pub rows_held: u32,
    pub is_at_share: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShareFigures {
    pub principals: usize,
    /// Of one principal.
    pub sessions_max: usize,
    /// Of one principal on one rank.
    pub pinned_rows_max: u32,
}
