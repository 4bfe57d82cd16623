//! Counts the turns of each principal, and puts the waiting turns into a fair order.
//!
//! A batch is as many turns as it has prompts and answers. The principal with the fewest turns
//! inside the engine comes first (max-min fairness); its turns keep their order. A turn of a pinned
//! session has a row of its own, so only plain turns make a principal active.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::session::table::queue::ticket::{Run, Stage, Ticket};

/// Since its latest plain turn was sent. Half of a coding agent's pauses between turns are shorter
/// than 10 s, and three quarters shorter than this.
const ACTIVE_FOR: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(super) struct TurnShares {
    /// A principal without turns has no entry.
    principals: BTreeMap<Arc<str>, PrincipalTurns>,
    /// Whose plain turns were sent last. Two tell whether any principal but a given one is active.
    recent: [Option<(Arc<str>, Instant)>; 2],
}

#[derive(Debug, Default, PartialEq, Eq)]
struct PrincipalTurns {
    /// Turns, and requests that wait for an open.
    tickets: usize,
    /// The places of the tickets in the queue.
    queued: usize,
    /// By rank. A rank without such turns has no entry.
    inside: BTreeMap<u32, TurnsInside>,
}

/// In sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TurnsInside {
    pub(super) running: u32,
    /// Those that run on the radix tree.
    pub(super) plain: u32,
}

impl TurnShares {
    pub(super) fn add(&mut self, ticket: &Ticket) {
        let principal = match self.principals.get_mut(&ticket.principal) {
            Some(principal) => principal,
            None => self.principals.entry(Arc::clone(&ticket.principal)).or_default(),
        };
        principal.tickets += 1;
        let places = ticket.places();
        match &ticket.stage {
            Stage::AwaitsOpen | Stage::Queued { .. } => principal.queued += places as usize,
            Stage::Claimed(_) => {}
            Stage::Inside(inside) => {
                let turns = principal.inside.entry(ticket.dp_rank).or_default();
                turns.running += places;
                turns.plain += if matches!(inside.run, Run::Plain { .. }) { places } else { 0 };
            }
        }
    }

    pub(super) fn remove(&mut self, ticket: &Ticket) {
        let Some(principal) = self.principals.get_mut(&ticket.principal) else { return };
        principal.tickets -= 1;
        let places = ticket.places();
        match &ticket.stage {
            Stage::AwaitsOpen | Stage::Queued { .. } => principal.queued -= places as usize,
            Stage::Claimed(_) => {}
            Stage::Inside(inside) => {
                let turns = principal.inside.entry(ticket.dp_rank).or_default();
                turns.running -= places;
                turns.plain -= if matches!(inside.run, Run::Plain { .. }) { places } else { 0 };
                if turns.running == 0 {
                    principal.inside.remove(&ticket.dp_rank);
                }
            }
        }
        if principal.tickets == 0 {
            self.principals.remove(&ticket.principal);
        }
    }

    pub(super) fn note_plain_turn(&mut self, principal: &Arc<str>, now: Instant) {
        let is_newest = self.recent[0].as_ref().is_some_and(|(newest, _)| newest == principal);
        if !is_newest {
            self.recent.swap(0, 1);
        }
        self.recent[0] = Some((Arc::clone(principal), now));
    }

    /// A principal is active while it has a plain turn inside or a ticket in the queue, and for
    /// [`ACTIVE_FOR`] after its latest plain turn was sent.
    pub(super) fn has_other(&self, principal: &str, now: Instant) -> bool {
        let was_other_active =
            |(recent, at): &(Arc<str>, Instant)| **recent != *principal && now < *at + ACTIVE_FOR;
        let is_other_active = |(other, turns): (&Arc<str>, &PrincipalTurns)| {
            let has_plain = || turns.inside.values().any(|inside| inside.plain > 0);
            **other != *principal && (turns.queued > 0 || has_plain())
        };
        self.recent.iter().flatten().any(was_other_active)
            || self.principals.iter().any(is_other_active)
    }

    pub(super) fn inside(&self, principal: &str, dp_rank: u32) -> TurnsInside {
        let principal = self.principals.get(principal);
        principal.and_then(|principal| principal.inside.get(&dp_rank).copied()).unwrap_or_default()
    }

    pub(super) fn queued(&self, principal: &str) -> usize {
        self.principals.get(principal).map_or(0, |principal| principal.queued)
    }

    /// Returns the principal whose tickets want the most places, if more than `than`.
    pub(super) fn longest_queue(&self, than: usize) -> Option<&Arc<str>> {
        let longer = self.principals.iter().filter(|(_, principal)| principal.queued > than);
        longer.max_by_key(|(_, principal)| principal.queued).map(|(principal, _)| principal)
    }

    /// The tickets of the principal with the fewest turns inside the engine come first. Its tickets
    /// that are ahead in this order count too.
    pub(super) fn order<'a>(
        &self,
        queue: &'a VecDeque<String>,
        ticket: impl Fn(&str) -> &'a Ticket,
    ) -> Vec<String> {
        let waiting = self.principals.values().filter(|principal| principal.queued > 0).count();
        if waiting <= 1 {
            return queue.iter().cloned().collect();
        }
        let mut next_places: BTreeMap<(&str, u32), u32> = BTreeMap::new();
        let mut places: Vec<(u32, &String)> = Vec::with_capacity(queue.len());
        for rid in queue {
            let ticket = ticket(rid);
            let key = (&*ticket.principal, ticket.dp_rank);
            let place = next_places.entry(key).or_insert_with(|| self.inside(key.0, key.1).running);
            // A batch has its turn when the last of its sequences has.
            *place = place.saturating_add(ticket.places());
            places.push((*place - 1, rid));
        }
        // The sort is stable, so tickets with the same place stay in the order of their arrival.
        places.sort_by_key(|(place, _)| *place);
        places.into_iter().map(|(_, rid)| rid.clone()).collect()
    }

    pub(super) fn check_invariants<'a>(&self, tickets: impl Iterator<Item = &'a Ticket>) {
        let mut counted = Self::default();
        tickets.for_each(|ticket| counted.add(ticket));
        assert_eq!(self.principals, counted.principals, "a principal's turns are miscounted");
    }
}
