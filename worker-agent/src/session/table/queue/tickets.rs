//! Keeps the turns and open requests of the table, their queue, and each rank's load of turns.
//!
//! A plain turn runs on the radix tree, outside pinned sessions. It is large if its tokens don't
//! fit into the pool beside a full pin budget. This module decides nothing and knows no sessions.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    ops::Index,
    time::Instant,
};

use crate::session::table::{
    Need, PlannedTurn, PromptStart,
    queue::{
        ticket::{ClaimedSession, Inside, Run, Stage, Ticket},
        turn_shares::TurnShares,
    },
};

#[derive(Debug, Default)]
pub(super) struct Tickets {
    tickets: BTreeMap<String, Ticket>,
    /// Oldest first.
    queue: VecDeque<String>,
    claim_count: u64,
    /// By rank. Includes ranks that no longer exist, as turns there may still have to end.
    loads: Vec<RankLoad>,
    shares: TurnShares,
    /// The turns inside the engine that may put each tag there, by incarnation id.
    tags: BTreeMap<String, u32>,
}

#[derive(Debug, Default)]
pub(super) struct RankLoad {
    pub(super) claimed: u32,
    pub(super) queued: u32,
    pub(super) running: u32,
    sequences: u64,
    plain_sequences: u64,
    /// An estimate: the length that the engine reported last, plus the turns sent and minus the
    /// turns ended since. `None` before its first report.
    engine_queue_length: Option<i64>,
    /// When a load sample first found no turn inside the engine and no close unconfirmed. `None` if
    /// the newest did not, or a turn has started since.
    idle_since: Option<Instant>,
}

impl Tickets {
    /// A ticket that awaits the open of its session is queued.
    pub(super) fn insert(&mut self, rid: &str, ticket: Ticket) {
        if matches!(ticket.stage, Stage::AwaitsOpen) {
            self.queue.push_back(rid.to_owned());
        }
        self.loads[ticket.dp_rank as usize].add(&ticket);
        self.shares.add(&ticket);
        let previous = self.tickets.insert(rid.to_owned(), ticket);
        assert!(previous.is_none(), "the id of a turn is used twice");
    }

    pub(super) fn next_order(&mut self) -> u64 {
        self.claim_count += 1;
        self.claim_count
    }

    pub(super) fn has(&self, rid: &str) -> bool {
        self.tickets.contains_key(rid)
    }

    pub(super) fn get(&self, rid: &str) -> Option<&Ticket> {
        self.tickets.get(rid)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Ticket)> {
        self.tickets.iter().map(|(rid, ticket)| (rid.as_str(), ticket))
    }

    pub(super) fn inside(&self) -> impl Iterator<Item = (&str, &Ticket, &Inside)> {
        self.iter().filter_map(|(rid, ticket)| Some((rid, ticket, ticket.inside()?)))
    }

    pub(super) fn turns_inside(&self) -> usize {
        self.loads.iter().map(|load| load.running as usize).sum()
    }

    pub(super) fn inside_mut(&mut self, rid: &str) -> Option<&mut Inside> {
        match &mut self.tickets.get_mut(rid)?.stage {
            Stage::Inside(inside) => Some(inside),
            _ => None,
        }
    }

    pub(super) fn restart_abandoned(&mut self, now: Instant) {
        for ticket in self.tickets.values_mut() {
            if let Stage::Inside(Inside { abandoned_since: Some(since), .. }) = &mut ticket.stage {
                *since = now;
            }
        }
    }

    /// The orders of the session's turns that are still inside and that their clients gave up.
    pub(super) fn abandoned_of(&self, generation: u64) -> impl Iterator<Item = u64> {
        let abandoned = self.inside().filter(|(_, _, inside)| inside.abandoned_since.is_some());
        let sessions = abandoned.filter_map(|(_, ticket, _)| ticket.session.as_ref());
        sessions.filter(move |it| it.generation == generation).map(|session| session.order)
    }

    pub(super) fn set_prompt_start(&mut self, rid: &str, start: PromptStart) {
        if let Some(Ticket { stage: Stage::Claimed(prompt_start), .. }) = self.tickets.get_mut(rid)
        {
            *prompt_start = start;
        }
    }

    /// Returns false if there is no such turn.
    pub(super) fn queue_turn(&mut self, now: Instant, rid: &str, need: Need) -> bool {
        let is_queued = self.change(rid, |ticket| {
            let Stage::Claimed(start) = &mut ticket.stage else { return false };
            ticket.stage = Stage::Queued { need, prompt_start: mem::take(start) };
            ticket.since = now;
            true
        });
        if is_queued == Some(true) {
            self.queue.push_back(rid.to_owned());
        }
        is_queued == Some(true)
    }

    pub(super) fn set_need(&mut self, rid: &str, bounded: Need) {
        self.change(rid, |ticket| {
            if let Stage::Queued { need, .. } = &mut ticket.stage {
                *need = bounded;
            }
        });
    }

    /// Returns the start of the turn's prompt.
    pub(super) fn enter_engine(
        &mut self,
        now: Instant,
        rid: &str,
        turn: &PlannedTurn,
        run: Run,
        free_rows: u64,
    ) -> PromptStart {
        let tag = turn.tag().map(str::to_owned);
        if let Some(tag) = &tag {
            *self.tags.entry(tag.clone()).or_default() += 1;
        }
        self.queue.retain(|queued| queued != rid);
        if let (Run::Plain { .. }, Some(ticket)) = (&run, self.tickets.get(rid)) {
            self.shares.note_plain_turn(&ticket.principal, now);
        }
        let places = self.tickets.get(rid).map_or(0, |ticket| u64::from(ticket.places()));
        let entered = self.change(rid, |ticket| {
            ticket.since = now;
            let Stage::Queued { need, prompt_start } = &mut ticket.stage else { return None };
            let (need, prompt_start) = (*need, mem::take(prompt_start));
            ticket.stage = Stage::Inside(Inside { need, tag, abandoned_since: None, run });
            Some((ticket.dp_rank, prompt_start))
        });
        let (dp_rank, prompt_start) = entered.flatten().expect("the caller has seen it queued");
        let load = &mut self.loads[dp_rank as usize];
        load.idle_since = None;
        // Sequences that find a free row don't wait in the engine's queue.
        let waiting = load.plain_sequences.saturating_sub(free_rows).min(places);
        if let Some(length) = &mut load.engine_queue_length {
            *length = length.saturating_add_unsigned(waiting);
        }
        prompt_start
    }

    pub(super) fn run_beside(&mut self, rid: &str) {
        self.change_inside(rid, |inside| inside.run = Run::Plain { large_tokens: None });
    }

    pub(super) fn mark_large(&mut self, rid: &str, tokens: u64) {
        self.change_inside(rid, |inside| inside.run = Run::Plain { large_tokens: Some(tokens) });
    }

    pub(super) fn has_tag(&self, incarnation: &str) -> bool {
        self.tags.contains_key(incarnation)
    }

    pub(super) fn forget_tag(&mut self, rid: &str) {
        let Some(tag) = self.inside_mut(rid).and_then(|inside| inside.tag.take()) else { return };
        let Some(count) = self.tags.get_mut(&tag) else { return };
        *count -= 1;
        if *count == 0 {
            self.tags.remove(&tag);
        }
    }

    pub(super) fn remove(&mut self, rid: &str) -> Option<Ticket> {
        self.forget_tag(rid);
        let ticket = self.tickets.remove(rid)?;
        self.queue.retain(|queued| queued != rid);
        let load = &mut self.loads[ticket.dp_rank as usize];
        load.remove(&ticket);
        self.shares.remove(&ticket);
        if ticket.inside().is_some()
            && let Some(length) = &mut load.engine_queue_length
        {
            *length = (*length - 1).max(0);
        }
        Some(ticket)
    }

    /// Marks waiting deltas claimed after `of`: their history won't exist.
    pub(super) fn orphan_followers(&mut self, of: &Ticket) {
        let Some(of) = &of.session else { return };
        for ticket in self.tickets.values_mut().filter(|ticket| ticket.inside().is_none()) {
            let Some(session) = &mut ticket.session else { continue };
            session.is_orphaned |= session.claim.delta
                && !session.claim.open
                && session.generation == of.generation
                && session.order > of.order
                && of.order > session.abandoned_up_to;
        }
    }

    pub(super) fn has_earlier_claim(&self, than: &ClaimedSession) -> bool {
        let is_earlier = |session: &ClaimedSession| {
            session.generation == than.generation && session.order < than.order
        };
        let waiting = self.tickets.values().filter(|ticket| ticket.is_waiting_turn());
        waiting.filter_map(|ticket| ticket.session.as_ref()).any(is_earlier)
    }

    /// Oldest first.
    pub(super) fn queue(&self) -> &VecDeque<String> {
        &self.queue
    }

    pub(super) fn pass_order(&self, is_fair: bool) -> Vec<String> {
        if !is_fair {
            return self.queue.iter().cloned().collect();
        }
        self.shares.order(&self.queue, |rid| &self.tickets[rid])
    }

    /// Of the principal whose tickets want the most places, if more than those of `principal`.
    pub(super) fn newest_of_longest_queue(&self, principal: &str) -> Option<&String> {
        let longest = self.shares.longest_queue(self.shares.queued(principal))?;
        self.queue.iter().rev().find(|rid| self.tickets[*rid].principal == *longest)
    }

    pub(super) fn shares(&self) -> &TurnShares {
        &self.shares
    }

    pub(super) fn oldest_since(&self) -> Option<Instant> {
        self.queue.front().map(|rid| self[rid.as_str()].since)
    }

    pub(super) fn load(&self, dp_rank: u32) -> &RankLoad {
        &self.loads[dp_rank as usize]
    }

    pub(super) fn load_mut(&mut self, dp_rank: u32) -> &mut RankLoad {
        &mut self.loads[dp_rank as usize]
    }

    pub(super) fn forget_load_samples(&mut self) {
        let forget =
            |load: &mut RankLoad| (load.engine_queue_length, load.idle_since) = (None, None);
        self.loads.iter_mut().for_each(forget);
    }

    pub(super) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.loads.len());
        self.loads.resize_with(rank_count, RankLoad::default);
    }

    pub(super) fn check_invariants(&self) {
        let mut loads = Vec::new();
        loads.resize_with(self.loads.len(), RankLoad::default);
        self.tickets.values().for_each(|ticket| loads[ticket.dp_rank as usize].add(ticket));
        for (stored, counted) in self.loads.iter().zip(&loads) {
            assert_eq!(stored.counts(), counted.counts(), "the loads differ from a fresh count");
        }
        let waits =
            |ticket: &&Ticket| matches!(ticket.stage, Stage::AwaitsOpen | Stage::Queued { .. });
        let waiting = self.tickets.values().filter(waits).count();
        assert_eq!(self.queue.len(), waiting, "the queue differs from the waiting tickets");
        self.shares.check_invariants(self.tickets.values());
        let mut tags = BTreeMap::<String, u32>::new();
        for tag in self.inside().filter_map(|(_, _, inside)| inside.tag.clone()) {
            *tags.entry(tag).or_default() += 1;
        }
        assert_eq!(tags, self.tags, "the tags of turns differ from a fresh count");
    }

    fn change<T>(&mut self, rid: &str, change: impl FnOnce(&mut Ticket) -> T) -> Option<T> {
        let ticket = self.tickets.get_mut(rid)?;
        let load = &mut self.loads[ticket.dp_rank as usize];
        load.remove(ticket);
        self.shares.remove(ticket);
        let result = change(ticket);
        load.add(ticket);
        self.shares.add(ticket);
        Some(result)
    }

    fn change_inside(&mut self, rid: &str, change: impl FnOnce(&mut Inside)) {
        self.change(rid, |ticket| {
            if let Stage::Inside(inside) = &mut ticket.stage {
                change(inside);
            }
        });
    }
}

impl Index<&str> for Tickets {
    type Output = Ticket;

    fn index(&self, rid: &str) -> &Ticket {
        &self.tickets[rid]
    }
}

impl RankLoad {
    fn add(&mut self, ticket: &Ticket) {
        match &ticket.stage {
            Stage::AwaitsOpen => {}
            Stage::Claimed(_) => self.claimed += 1,
            Stage::Queued { .. } => self.queued += 1,
            Stage::Inside(inside) => {
                self.running += 1;
                self.sequences += u64::from(ticket.places());
                if let Run::Plain { .. } = inside.run {
                    self.plain_sequences += u64::from(ticket.places());
                }
            }
        }
    }

    fn remove(&mut self, ticket: &Ticket) {
        match &ticket.stage {
            Stage::AwaitsOpen => {}
            Stage::Claimed(_) => self.claimed -= 1,
            Stage::Queued { .. } => self.queued -= 1,
            Stage::Inside(inside) => {
                self.running -= 1;
                self.sequences -= u64::from(ticket.places());
                if let Run::Plain { .. } = inside.run {
                    self.plain_sequences -= u64::from(ticket.places());
                }
            }
        }
    }

    pub(super) fn plain_sequences(&self) -> u64 {
        self.plain_sequences
    }

    fn counts(&self) -> [u64; 5] {
        let turns = [self.claimed, self.queued, self.running].map(u64::from);
        let [claimed, queued, running] = turns;
        [claimed, queued, running, self.sequences, self.plain_sequences]
    }

    pub(super) fn has_places(&self, places: u32, turns_max: u32) -> bool {
        self.sequences + u64::from(places) <= u64::from(turns_max)
    }

    /// Returns since when the rank has no turn inside the engine and no close under way.
    pub(super) fn sample(
        &mut self,
        now: Instant,
        engine_queue_length: i64,
        has_pending_close: bool,
    ) -> Option<Instant> {
        self.engine_queue_length = Some(engine_queue_length);
        let is_idle = self.running == 0 && !has_pending_close;
        self.idle_since = is_idle.then(|| self.idle_since.unwrap_or(now));
        self.idle_since
    }

    /// Plain sequences may be `turns_ahead` more than `free_rows`, with fewer than `turns_ahead` in
    /// the engine's own queue. A batch that is larger than that may come alone.
    pub(super) fn has_engine_room(&self, places: u32, free_rows: u64, turns_ahead: u64) -> bool {
        let engine_waiting =
            self.engine_queue_length.map_or(0, |length| u64::try_from(length).unwrap_or(0));
        let has_rows = self.plain_sequences == 0
            || self.plain_sequences + u64::from(places) <= free_rows + turns_ahead;
        has_rows && engine_waiting < turns_ahead
    }
}
