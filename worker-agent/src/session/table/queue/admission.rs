//! Decides which turns may go to the engine now, and keeps the queue of those that must wait.
//!
//! A turn of a pinned session reserves the KV that it may grow to. If that doesn't fit and no room
//! can be reclaimed, the turn is refused, or runs as a plain turn (on the radix tree) if the agent
//! pinned the session on its own. A plain turn is never refused for what it might need. It waits in
//! order while the engine couldn't run it anyway, and is refused only if it waited too long or the
//! queue is full.

use std::{collections::BTreeSet, sync::Arc};

use contract::{id::SessionKey, load::Retention};

use crate::session::table::{
    Deltas, Effect, Error, Guard, Histories, Need, PlannedTurn, Queue, RankCapacity, Record,
    RunMode, State, Step, TurnSession, check_turn,
    histories::{
        running_turns::{PinnedRun, RunningTurn},
        trim_turn::Trim,
        volatile_prefix,
    },
    pins::reclaim::{Requester, Shortage},
    queue::{
        history_wait::{HistoryUse, find_history},
        shares::{TURNS_AHEAD_MAX, TurnShare, at_turn_share, bound_batch},
        ticket::{Run, Ticket},
    },
};

enum Verdict {
    /// The client hears that its session is open.
    ReportOpen,
    /// The turn runs in its pinned session.
    AdmitPinned { key: SessionKey, need: Need },
    /// The turn runs on the radix tree. `large_tokens`: what it may need, if it is large.
    AdmitPlain { large_tokens: Option<u64> },
    /// Waits for what only concerns the ticket or its session. Later tickets may pass it.
    Wait,
    /// Waits for room that running turns will free. Later plain turns on this rank wait too.
    WaitInLine,
}

#[derive(Debug, Clone, Copy)]
struct PlainTurn {
    dp_rank: u32,
    capacity: RankCapacity,
    need: Need,
    /// An earlier plain turn waits in line on this rank.
    must_line_up: bool,
    /// As many turns are inside this rank of the engine as may be.
    at_turn_limit: bool,
    /// The share of the engine that the turn's principal has used up.
    at_share: Option<TurnShare>,
}

impl Queue {
    pub(crate) fn enqueue(&mut self, step: &mut Step, rid: &str, need: Need) -> bool {
        if !self.tickets.queue_turn(step.now, rid, need) {
            return false;
        }
        if let Err(error) = self.check_engine_speaks() {
            self.refuse_ticket(step, rid, error);
            return true;
        }
        self.admit_waiting(step);
        let queue = self.tickets.queue();
        let is_full = queue.len() > self.settings.turns_queued_max;
        if is_full && queue.back().is_some_and(|newest| newest == rid) {
            let principal = Arc::clone(&self.tickets[rid].principal);
            if let Err(error) = self.make_queue_place(step, &principal) {
                self.refuse_ticket(step, rid, error);
            }
        }
        true
    }

    /// Whatever may free what a ticket waits for must end in this call.
    ///
    /// Principals take turns: the one with the fewest turns inside the engine comes first, with its
    /// oldest ticket.
    pub(crate) fn admit_waiting(&mut self, step: &mut Step) {
        self.history_awaited_until = None;
        if self.hold_reason.is_some() {
            return;
        }
        let mut ranks_with_line = BTreeSet::new();
        self.histories.pins.large_turns.forget_waiting();
        for rid in self.tickets.pass_order(self.settings.guards.is_on(Guard::FairOrder)) {
            // Decisions on earlier tickets may have refused this one.
            let Some(ticket) = self.tickets.get(&rid) else { continue };
            let dp_rank = ticket.dp_rank;
            match decide_ticket(self, step, &rid, ranks_with_line.contains(&dp_rank)) {
                Ok(Verdict::ReportOpen) => report_open(self, step, &rid),
                Ok(Verdict::AdmitPinned { key, need }) => {
                    admit_pinned(self, step, &rid, &key, need);
                }
                Ok(Verdict::AdmitPlain { large_tokens }) => {
                    admit_plain(self, step, &rid, large_tokens);
                }
                Ok(Verdict::Wait) => {}
                Ok(Verdict::WaitInLine) => drop(ranks_with_line.insert(dp_rank)),
                Err(error) => self.refuse_ticket(step, &rid, error),
            }
        }
    }
}

fn decide_ticket(
    queue: &mut Queue,
    step: &mut Step,
    rid: &str,
    must_line_up: bool,
) -> Result<Verdict, Error> {
    let ticket = &queue.tickets[rid];
    let (dp_rank, guards) = (ticket.dp_rank, queue.settings.guards);
    let capacity = *queue.pins().capacity(dp_rank)?;
    if ticket.need().is_none() {
        return decide_open(queue, step, rid);
    }
    let need = bound_batch(queue, step.now, rid)?;
    let ticket = &queue.tickets[rid];
    let at_turn_limit = !queue.tickets.load(dp_rank).has_places(need.places(), capacity.turns_max);
    let at_share = at_turn_share(queue, step.now, &ticket.principal, dp_rank, need.places());
    let plain = PlainTurn { dp_rank, capacity, need, must_line_up, at_turn_limit, at_share };
    let Some(claimed) = &ticket.session else {
        return Ok(decide_plain(queue, step, plain));
    };
    let key = ticket.claimed_key(queue.sessions()).ok_or(Error::UnknownSession)?;
    let session = &queue.sessions()[&key];
    let shim_trims = queue.histories.shims.trims();
    check_turn(session, &claimed.claim, claimed.route_turns, shim_trims, guards)?;
    if claimed.is_orphaned && guards.is_on(Guard::LostEndSuspect) {
        return Err(Error::PredecessorFailed);
    }
    let may_be_early = session.turns.waiting > 1 && session.is_exclusive();
    if may_be_early && queue.tickets.has_earlier_claim(claimed) {
        return Ok(Verdict::Wait);
    }
    match find_history(queue, step.now, &key, rid) {
        HistoryUse::Free => decide_in_session(queue, step, rid, key, plain),
        HistoryUse::Awaited => Ok(Verdict::Wait),
        HistoryUse::Beside => Ok(decide_plain(queue, step, plain)),
    }
}

/// Nothing of the session's other turns is in the way, but for what runs in an exclusive one.
fn decide_in_session(
    queue: &mut Queue,
    step: &mut Step,
    rid: &str,
    key: SessionKey,
    plain: PlainTurn,
) -> Result<Verdict, Error> {
    let (need, guards) = (plain.need, queue.settings.guards);
    let is_delta = queue.tickets[rid].is_delta();
    let session = &queue.sessions()[&key];
    if !is_delta
        && session.turns.running == 0
        && queue.histories.prepare_for_full_history(step, &key, need)
    {
        return Ok(Verdict::Wait);
    }
    let session = &queue.sessions()[&key];
    match session.state {
        State::Planned => {
            return queue.histories.open_planned(step, &key).map(|()| Verdict::Wait);
        }
        State::Opening(_) | State::Demoting { .. } | State::Suspect { .. } => {
            return Ok(Verdict::Wait);
        }
        _ => {}
    }
    if session.is_exclusive() && session.turns.running > 0 && guards.is_on(Guard::OneTurn) {
        return Ok(Verdict::Wait);
    }
    if !session.is_pinned() {
        return Ok(decide_plain(queue, step, plain));
    }
    if plain.at_turn_limit || plain.at_share == Some(TurnShare::All) {
        return Ok(Verdict::Wait);
    }
    // The shim compares a full history, and knows what the engine takes for it.
    if is_delta && !session.has_kv_of(need.kv) && guards.is_on(Guard::KvIdentity) {
        return Err(Error::OtherKv);
    }
    let has_auto_retention = session.has_auto_retention();
    match queue.histories.make_pinned_room(step, &key, need, is_delta) {
        Ok(true) => Ok(Verdict::AdmitPinned { key, need }),
        Ok(false) => Ok(Verdict::Wait),
        // Without room, a session that the agent pinned loses its pin: the turn runs on the tree.
        Err(_) if has_auto_retention => {
            let has_yielded = queue.histories.yield_pin(step, &key);
            Ok(if has_yielded { Verdict::Wait } else { decide_plain(queue, step, plain) })
        }
        Err(error) => Err(error),
    }
}

fn decide_open(queue: &mut Queue, step: &mut Step, rid: &str) -> Result<Verdict, Error> {
    let key = queue.tickets[rid].claimed_key(queue.sessions()).ok_or(Error::UnknownSession)?;
    match queue.sessions()[&key].state {
        State::Planned => queue.histories.open_planned(step, &key).map(|()| Verdict::Wait),
        State::Opening(_) | State::Demoting { .. } | State::Suspect { .. } => Ok(Verdict::Wait),
        State::Closing(_) | State::Gone { .. } => Err(Error::UnknownSession),
        State::Open(_) | State::Demoted | State::InTree(_) => Ok(Verdict::ReportOpen),
    }
}

fn decide_plain(queue: &mut Queue, step: &mut Step, turn: PlainTurn) -> Verdict {
    let PlainTurn { dp_rank, capacity, need, must_line_up, at_turn_limit, at_share } = turn;
    if at_share.is_some() {
        // Only the turns of this principal wait for its share.
        return Verdict::Wait;
    }
    if must_line_up || at_turn_limit {
        return Verdict::WaitInLine;
    }
    let tokens = queue.pins().free_tokens_needed(need).min(capacity.pool_tokens);
    let is_large_turn = tokens > capacity.pool_tokens - capacity.pin_tokens_max;
    let is_large_turn = is_large_turn && queue.settings.guards.is_on(Guard::LargeTurnWaits);
    if is_large_turn {
        let pins = &mut queue.histories.pins;
        let missing_tokens = pins.excess_tokens(dp_rank, tokens, capacity.pool_tokens);
        if missing_tokens > 0 {
            // Reclaim only for the first large turn of each pass over the queue. If nothing can
            // be reclaimed, the turn waits until sessions close. Meanwhile, turns that fit may
            // pass it, but turns that would pin more tokens may not.
            if pins.large_turns.note_waiting(dp_rank, tokens) {
                let shortage = Shortage::for_plain(missing_tokens, pins.held_on(dp_rank).tokens);
                queue.histories.reclaim(step, dp_rank, &shortage, Requester::Plain);
            }
            return Verdict::Wait;
        }
    }
    let free_rows = queue.pins().free_rows(dp_rank);
    let plain_sequences = queue.tickets.load(dp_rank).plain_sequences();
    let sequences = plain_sequences + u64::from(need.places());
    queue.histories.reclaim_rows_for_plain_turns(step, dp_rank, sequences, free_rows);
    let load = queue.tickets.load(dp_rank);
    if !load.has_engine_room(need.places(), free_rows, TURNS_AHEAD_MAX) {
        return Verdict::WaitInLine;
    }
    Verdict::AdmitPlain { large_tokens: is_large_turn.then_some(tokens) }
}

fn report_open(queue: &mut Queue, step: &mut Step, rid: &str) {
    let Some(ticket) = queue.tickets.remove(rid) else { return };
    let turn = describe_turn(queue, &ticket, true);
    step.push(Effect::Admitted { rid: rid.to_owned(), turn });
}

fn admit_plain(queue: &mut Queue, step: &mut Step, rid: &str, large_tokens: Option<u64>) {
    let turn = describe_turn(queue, &queue.tickets[rid], false);
    if let Some(tokens) = large_tokens {
        queue.histories.pins.large_turns.begin(queue.tickets[rid].dp_rank, tokens);
    }
    send_turn(queue, step, rid, turn, Run::Plain { large_tokens }, None);
}

fn admit_pinned(queue: &mut Queue, step: &mut Step, rid: &str, key: &SessionKey, need: Need) {
    let ticket = &queue.tickets[rid];
    let (is_delta, opens_session) = (ticket.is_delta(), ticket.opens_session());
    let is_trimmed = !is_delta && queue.histories.shims.trims();
    let target_tokens = queue.pins().kv_target_tokens(key, need, is_trimmed);
    // The request of a turn whose history is trimmed names the tree; the shim moves the turn into
    // the session.
    let mut turn = describe_turn(queue, ticket, !is_trimmed);
    let session = &queue.sessions()[key];
    turn.growth_tokens_max = Some(target_tokens.saturating_sub(session.history.tokens));
    let incarnation = session.incarnation.clone();
    let had_no_kv = queue.sessions_mut().change(step, key, |session| {
        if is_delta {
            session.client.deltas = Deltas::Taken;
        }
        if session.history.tokens == 0 {
            session.kv_epoch = turn.weights_epoch;
            (session.history.kv, session.history.is_adapter_gone) = (None, false);
            session.record_kv(need.kv);
        }
        session.state.reserve(target_tokens)
    });
    step.write_journal(Record::Turn { incarnation, rid: rid.to_owned() });
    let trim = if is_trimmed {
        let awaited = queue.histories.request_trim(key, need, opens_session);
        turn.run_mode = None;
        if let Some(session) = &mut turn.session {
            session.trim = Some(awaited.request);
        }
        Trim::Awaited(awaited)
    } else {
        // Without a shim that trims, a full history is admitted only to an empty session, and only
        // on `/generate`: `check_route` refuses the other routes.
        if !is_delta {
            queue.sessions_mut().update(key, |session| session.update_deltas(opens_session, None));
        }
        turn.run_mode = Some(RunMode::Pinned);
        Trim::NotNeeded
    };
    send_turn(queue, step, rid, turn, Run::Pinned, Some(PinnedRun { had_no_kv, trim }));
}

/// `in_session`: the turn runs in its session if that is pinned.
fn describe_turn(queue: &Queue, ticket: &Ticket, in_session: bool) -> PlannedTurn {
    let Histories { retentions, shims, weights, .. } = &queue.histories;
    let session = ticket.key().map(|key| (key, &queue.sessions()[key]));
    let turn_session = session.map(|(key, session)| TurnSession {
        key: key.clone(),
        incarnation: session.incarnation.clone(),
        retention: if in_session && session.is_pinned() {
            Retention::Pinned
        } else {
            retentions.unpinned(session)
        },
        trim: None,
    });
    let run_mode = |session| ticket.run_mode(retentions.unpinned_run_mode(session), shims.trims());
    let is_rank_kept = queue.settings.guards.is_on(Guard::RankOfSession);
    PlannedTurn {
        session: turn_session,
        dp_rank: if is_rank_kept { ticket.dp_rank } else { 0 },
        growth_tokens_max: None,
        weights_epoch: weights.epoch(),
        run_mode: session.map(|(_, session)| run_mode(session)),
    }
}

fn send_turn(
    queue: &mut Queue,
    step: &mut Step,
    rid: &str,
    mut turn: PlannedTurn,
    run: Run,
    pinned: Option<PinnedRun>,
) {
    let record = queue.histories.pins.begin_tag(&mut turn);
    let ticket = &queue.tickets[rid];
    let (is_delta, closes_session) = (ticket.is_delta(), ticket.closes_session());
    let free_rows = queue.pins().free_rows(ticket.dp_rank);
    queue.histories.weights.record_turn();
    let session = turn.session.as_ref().map(|session| &queue.sessions()[&session.key]);
    let is_aside = session.is_some_and(|session| ticket.is_aside(session));
    let running = RunningTurn {
        session: ticket.session.as_ref().map(|it| (it.key.clone(), it.generation)),
        incarnation: turn.session.as_ref().map(|session| session.incarnation.clone()),
        need: ticket.need().unwrap_or_default(),
        is_delta,
        opens_session: ticket.opens_session(),
        was_aborted: false,
        asks_again: false,
        is_aside,
        pinned,
    };
    queue.histories.turns.insert(rid, running);
    let start = queue.tickets.enter_engine(step.now, rid, &turn, run, free_rows);
    if let Some(TurnSession { key, .. }) = &turn.session {
        if !is_delta {
            volatile_prefix::compare_prompt_start(queue.sessions_mut(), step, key, start, is_aside);
        }
        queue.sessions_mut().change(step, key, |session| {
            session.turns.waiting -= 1;
            session.turns.running += 1;
            session.turns.is_unused = false;
            session.turns.was_last_refused = false;
            session.turns.asides_in_a_row =
                if is_aside { session.turns.asides_in_a_row + 1 } else { 0 };
            session.state.continue_in_tree();
            if closes_session {
                session.state.begin_closing();
            }
        });
    }
    let admitted = Effect::Admitted { rid: rid.to_owned(), turn };
    step.push_journaled(queue.settings.guards, record, admitted);
}
