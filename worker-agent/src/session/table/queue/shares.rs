//! Bounds what one principal may have while others want some, and makes room for those with less.
//!
//! A principal may use everything while no other wants it. What can be taken back (places in the
//! queue, sessions of a full table, pinned rows and tokens) it gives up to one that has less
//! (max-min fairness). Where nothing can, there is a fixed bound: the sessions of one principal,
//! the rows of pinned sessions, and the turns inside the engine. The bound on turns holds only
//! while another principal is active.

use std::time::Instant;

use service::refusal::Code;

use crate::session::table::{Error, Guard, Need, Queue, RankTotals, Step};

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

impl Queue {
    /// Makes room for a ticket of `principal`, which may be in the full queue already. Refuses the
    /// newest ticket of a principal that has more, and fails if none has.
    pub(super) fn make_queue_place(
        &mut self,
        step: &mut Step,
        principal: &str,
    ) -> Result<(), Error> {
        let guards = self.settings.guards;
        if !guards.is_on(Guard::QueueBound) {
            return Ok(());
        }
        let max = self.settings.turns_queued_max;
        let wait = self.pace.estimate_wait(self.tickets.queue().len());
        let longest = self.tickets.newest_of_longest_queue(principal);
        let Some(yielding) = longest.filter(|_| guards.is_on(Guard::QueueShare)).cloned() else {
            let detail = format!("{max} wait already");
            return Err(Error::OutOfRoom { resource: Code::QueuePlaces, detail, wait });
        };
        let detail = format!("{max} wait already, most of them yours, and others wait too");
        let error = Error::OutOfRoom { resource: Code::QueueShare, detail, wait };
        self.refuse_ticket(step, &yielding, error);
        Ok(())
    }
}

pub(crate) fn totals(queue: &Queue, dp_rank: u32) -> RankTotals {
    let pins = queue.pins();
    let (held, foreign) = (pins.held_on(dp_rank), pins.foreign_on(dp_rank));
    let (sessions, load) = (queue.sessions().rank(dp_rank), queue.tickets.load(dp_rank));
    RankTotals {
        sessions: sessions.sessions,
        rows_held: held.rows,
        pinned_tokens: held.tokens,
        tree_tokens_estimate: sessions.tree_tokens,
        turns_running: load.running,
        turns_queued: load.queued,
        foreign_rows: foreign.rows,
        foreign_tokens: foreign.tokens,
    }
}

pub(crate) fn principal_view(
    queue: &Queue,
    now: Instant,
    principal: &str,
    dp_rank: u32,
) -> PrincipalView {
    let shares = queue.tickets.shares();
    let inside = shares.inside(principal, dp_rank);
    PrincipalView {
        running: inside.running,
        plain: inside.plain,
        queued: shares.queued(principal),
        rows_held: queue.sessions().principals().held(principal, dp_rank).rows,
        is_at_share: at_turn_share(queue, now, principal, dp_rank, 1).is_some(),
    }
}

/// What so many places more would exceed while another principal is active.
pub(super) fn at_turn_share(
    queue: &Queue,
    now: Instant,
    principal: &str,
    dp_rank: u32,
    places: u32,
) -> Option<TurnShare> {
    let shares = queue.tickets.shares();
    if !shares.has_other(principal, now) || !queue.settings.guards.is_on(Guard::TurnShare) {
        return None;
    }
    let inside = shares.inside(principal, dp_rank);
    let turns_max = queue.pins().capacity(dp_rank).map_or(0, |rank| rank.turns_max);
    let is_over = |held: u32, max: u64| u64::from(held) + u64::from(places) > max;
    if is_over(inside.running, turn_share(queue, turns_max.into())) {
        return Some(TurnShare::All);
    }
    let rows_max = turn_share(queue, queue.pins().free_rows(dp_rank));
    // A batch of as many sequences as the share has rows may find fewer: it runs alone then.
    let is_over_rows = inside.plain > 0 && is_over(inside.plain, rows_max);
    is_over_rows.then_some(TurnShare::Rows)
}

/// Bounds a queued turn's sequences, which can't be taken back once they run, by what pinned
/// sessions leave, or one's share of it. Returns the need with which the turn counts.
pub(super) fn bound_batch(queue: &mut Queue, now: Instant, rid: &str) -> Result<Need, Error> {
    let ticket = &queue.tickets[rid];
    let need = ticket.need().unwrap_or_default();
    if need.places() <= 1 || !queue.settings.guards.is_on(Guard::TurnShare) {
        return Ok(need);
    }
    let pins = queue.pins();
    let turns_max = pins.capacity(ticket.dp_rank)?.turns_max;
    let places = (pins.free_rows(ticket.dp_rank) + TURNS_AHEAD_MAX).min(turns_max.into());
    let has_other = queue.tickets.shares().has_other(&ticket.principal, now);
    let places_max = if has_other { turn_share(queue, places) } else { places };
    let places_max = u32::try_from(places_max).unwrap_or(u32::MAX);
    if need.places() > places_max && !need.is_clamped_batch {
        let sequences = need.places();
        return Err(Error::BatchOverShare { sequences, sequences_max: places_max });
    }
    let need = Need { sequences: need.places().min(places_max), ..need };
    queue.tickets.set_need(rid, need);
    Ok(need)
}

/// At least one.
fn turn_share(queue: &Queue, places: u64) -> u64 {
    (places * u64::from(queue.settings.shares.turns_milli) / 1000).max(1)
}
