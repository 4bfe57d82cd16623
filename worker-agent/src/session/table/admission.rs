//! Decides which turns may go to the engine now, and keeps the queue of those that must wait.
//!
//! A turn is one request and its answer. A turn of a pinned session runs in the KV that the session
//! keeps to itself. A plain turn runs on the engine's radix tree. Its session isn't pinned, or the
//! turn runs beside its pinned session, that is, outside the session's KV.
//!
//! The module `claims` comes before, and `ends` after. A turn of a pinned session reserves the KV
//! that it may grow to (`capacity`). If that doesn't fit and no room can be reclaimed (`reclaim`),
//! the turn is refused, or runs as a plain turn if the agent pinned the session on its own. A plain
//! turn is never refused for what it might need. It waits in order while the engine couldn't run it
//! anyway, and is refused only if it waited too long or the queue is full.

use std::time::Instant;

use proto::{id::SessionKey, load::Retention};

use super::{
    Deltas, Effect, Error, Guard, Need, Record, Row, RunMode, State, Table, Ticket, TicketState,
    TrimRequest, Turn, TurnSession, check_turn,
    rank_account::RankAccount,
    reclaim::{Requester, Shortage},
};

/// The most plain turns that the engine gets beyond those it can run now: about one prefill batch.
/// With these, the engine never waits for the agent.
const TURNS_AHEAD_MAX: u64 = 8;

/// The decision on one ticket (a turn or an open request that waits in the queue).
enum Verdict {
    /// The turn goes to the engine, or the client hears that its session is open.
    Admit,
    /// The ticket waits for something that only concerns itself or its session. Later tickets may
    /// pass it.
    Wait,
    /// The ticket waits for room that running turns will free. Later plain turns on this rank wait
    /// too, so that none passes it.
    WaitInLine,
    /// The ticket is refused and forgotten.
    Refuse(Error),
}

impl Table {
    /// Queues a claimed turn whose needs are now known. [`Effect::Admitted`] or [`Effect::Refused`]
    /// follows, at once or when there is room. Returns false if the turn has ended meanwhile.
    pub fn admit(&mut self, now: Instant, rid: &str, need: Need) -> bool {
        let Some(ticket) = self.tickets.get_mut(rid) else { return false };
        ticket.state = TicketState::Queued;
        ticket.state_since = now;
        ticket.need = need;
        let dp_rank = ticket.dp_rank;
        self.account(dp_rank).turns_claimed -= 1;
        self.account(dp_rank).totals.turns_queued += 1;
        self.queue.push_back(rid.to_owned());
        self.process_queue(now);
        let max = self.settings.turns_queued_max;
        let is_full = self.queue.len() > max && self.settings.guards.is_on(Guard::QueueBound);
        if is_full && self.queue.back().is_some_and(|newest| newest == rid) {
            let detail = format!("{max} wait already");
            self.refuse_ticket(now, rid, Error::OutOfRoom { resource: "queue_places", detail });
        }
        self.debug_check();
        true
    }

    /// Decides on every waiting ticket, oldest first.
    pub(super) fn process_queue(&mut self, now: Instant) {
        let mut has_turn_in_line = vec![false; self.accounts.len()];
        self.accounts.iter_mut().for_each(RankAccount::start_queue_pass);
        let mut position = 0;
        while let Some(rid) = self.queue.get(position).cloned() {
            let dp_rank = self.tickets[&rid].dp_rank as usize;
            let verdict = match self.decide_ticket(now, &rid, has_turn_in_line[dp_rank]) {
                Ok(verdict) => verdict,
                Err(error) => Verdict::Refuse(error),
            };
            match verdict {
                Verdict::Admit => {
                    self.queue.remove(position);
                    self.admit_ticket(now, &rid);
                }
                Verdict::Refuse(error) => self.refuse_ticket(now, &rid, error),
                Verdict::Wait => position += 1,
                Verdict::WaitInLine => {
                    has_turn_in_line[dp_rank] = true;
                    position += 1;
                }
            }
        }
    }

    /// Decides on one waiting ticket. `must_line_up`: an earlier plain turn waits in line on this
    /// rank.
    fn decide_ticket(
        &mut self,
        now: Instant,
        rid: &str,
        must_line_up: bool,
    ) -> Result<Verdict, Error> {
        let ticket = &self.tickets[rid];
        let (dp_rank, need) = (ticket.dp_rank, ticket.need);
        let is_turn = ticket.state != TicketState::AwaitsOpen;
        let capacity = *self.capacity(dp_rank)?;
        let at_turn_limit = self.totals(dp_rank).turns_running >= capacity.turns_max;
        let Some(key) = ticket.key.clone() else {
            return Ok(self.decide_plain(now, rid, need, must_line_up || at_turn_limit));
        };
        let guards = self.settings.guards;
        let session =
            self.sessions.get(&key).filter(|session| session.generation == ticket.generation);
        let session = session.ok_or(Error::UnknownSession)?;
        if let (Some(claim), true) = (&ticket.claim, is_turn) {
            check_turn(session, claim, ticket.route_turns, self.shim_trims, guards)?;
        }
        let runs_beside = is_turn && self.must_run_beside(&key);
        let session = &self.sessions[&key];
        if ticket.is_orphaned && guards.is_on(Guard::LostEndSuspect) {
            return Err(Error::PredecessorFailed);
        }
        if session.turns.waiting > 1 && session.is_exclusive() && self.has_earlier_claim(ticket) {
            return Ok(Verdict::Wait);
        }
        if runs_beside && !session.state.is_closing() {
            return Ok(self.decide_plain(now, rid, need, must_line_up || at_turn_limit));
        }
        let is_full_history = is_turn && !self.tickets[rid].is_delta();
        if is_full_history
            && session.turns.running == 0
            && self.prepare_for_full_history(now, &key, need)
        {
            return Ok(Verdict::Wait);
        }
        let session = &self.sessions[&key];
        match session.state {
            State::Planned => return self.open_planned(now, &key),
            State::Opening(_) | State::Demoting { .. } | State::Suspect { .. } => {
                return Ok(Verdict::Wait);
            }
            State::Closing(_) | State::Gone { .. } if !is_turn => {
                return Err(Error::UnknownSession);
            }
            _ if !is_turn => return Ok(Verdict::Admit),
            _ => {}
        }
        if session.is_exclusive() && session.turns.running > 0 && guards.is_on(Guard::OneTurn) {
            return Ok(Verdict::Wait);
        }
        if !session.is_pinned() {
            return Ok(self.decide_plain(now, rid, need, must_line_up || at_turn_limit));
        }
        if at_turn_limit {
            return Ok(Verdict::Wait);
        }
        let (has_auto_retention, is_delta) =
            (session.has_auto_retention(), self.tickets[rid].is_delta());
        match self.decide_pinned(now, &key, need, is_delta) {
            // If there is no room in a session that the agent pinned on its own, the session loses
            // its pin, and the turn runs on the radix tree.
            Err(_) if has_auto_retention && self.yield_pin(now, &key) => Ok(Verdict::Wait),
            Err(_) if has_auto_retention => Ok(self.decide_plain(now, rid, need, must_line_up)),
            verdict => verdict,
        }
    }

    /// Whether a turn must run on the radix tree, beside its session. This is so if the agent
    /// pinned the session on its own, and another turn is inside or left the history uncertain.
    fn must_run_beside(&self, key: &SessionKey) -> bool {
        let session = &self.sessions[key];
        let is_history_in_use =
            session.turns.running > 0 || matches!(session.state, State::Suspect { .. });
        session.is_pinned_by_agent() && !session.is_exclusive() && is_history_in_use
    }

    /// Prepares a session without running turns for a full history (a turn with the whole
    /// conversation). Pins the session, or takes its pin, if that makes its turns cheaper. Returns
    /// true if the turn must wait until the session's KV has gone to the radix tree.
    fn prepare_for_full_history(&mut self, now: Instant, key: &SessionKey, need: Need) -> bool {
        let session = &self.sessions[key];
        match session.state {
            State::Gone { .. } => self.start_over(now, key),
            State::Planned | State::Open(_) | State::Demoted
                if session.has_auto_retention() && self.is_pin_useless(key) =>
            {
                return self.yield_pin(now, key);
            }
            _ => {}
        }
        if matches!(self.sessions[key].state, State::InTree(_)) && self.should_pin(now, key, need) {
            self.pin(now, key);
        }
        false
    }

    /// Whether an earlier claimed turn of the same session is not inside yet.
    fn has_earlier_claim(&self, ticket: &Ticket) -> bool {
        let is_earlier = |other: &Ticket| {
            other.generation == ticket.generation
                && other.claim_order < ticket.claim_order
                && matches!(other.state, TicketState::Claimed | TicketState::Queued)
        };
        ticket.state != TicketState::AwaitsOpen && self.tickets.values().any(is_earlier)
    }

    /// Opens a pinned session that the engine doesn't know yet, if a row is free and the pin budget
    /// isn't used up. Otherwise reclaims room or refuses.
    fn open_planned(&mut self, now: Instant, key: &SessionKey) -> Result<Verdict, Error> {
        let dp_rank = self.sessions[key].dp_rank;
        if self.is_taking_over() {
            // What the engine holds is unknown until the previous agent's sessions are closed.
            return Ok(Verdict::Wait);
        }
        if let Some(shortage) = self.row_shortage(dp_rank)? {
            return self.reclaim_or_refuse(now, key, shortage);
        }
        let (pinned_tokens, budget) = self.pinned_and_budget(dp_rank)?;
        if pinned_tokens >= budget && self.settings.guards.is_on(Guard::PinBudget) {
            let missing = pinned_tokens - budget + 1;
            let shortage = Shortage::Tokens { missing, held: pinned_tokens, max: budget };
            return self.reclaim_or_refuse(now, key, shortage);
        }
        self.begin_open(key, 0);
        Ok(Verdict::Wait)
    }

    /// Journals the session's incarnation, then asks the engine to open the incarnation. The caller
    /// has checked that a row is free.
    pub(super) fn begin_open(&mut self, key: &SessionKey, reserved_tokens: u64) {
        let (incarnation, idle_max, dp_rank) = self.change_session(key, |session| {
            session.state = State::Opening(Row { reserved_tokens, ..Row::default() });
            (session.incarnation.clone(), session.idle_max, session.dp_rank)
        });
        let record = Record::Opening { incarnation: incarnation.clone(), dp_rank };
        let open = Effect::Open { incarnation, idle_max };
        if self.settings.guards.is_on(Guard::JournalFirst) {
            self.write_journal(record);
            self.effects.push(open);
        } else {
            self.effects.push(open);
            self.write_journal(record);
        }
    }

    /// Decides on a turn that runs in its pinned session. Its growth must fit into the pin budget
    /// and the pool.
    fn decide_pinned(
        &mut self,
        now: Instant,
        key: &SessionKey,
        need: Need,
        is_delta: bool,
    ) -> Result<Verdict, Error> {
        let guards = self.settings.guards;
        let session = &self.sessions[key];
        let dp_rank = session.dp_rank;
        let holds_row = session.state.row().is_some();
        let session_tokens_now =
            if holds_row { self.round_to_pages(session.resident_tokens()) } else { 0 };
        let target_tokens = self.round_to_pages(self.kv_target_tokens(key, need, is_delta));
        if !holds_row && let Some(shortage) = self.row_shortage(dp_rank)? {
            return self.reclaim_or_refuse(now, key, shortage);
        }
        let (pinned_tokens, budget) = self.pinned_and_budget(dp_rank)?;
        if target_tokens > budget && guards.is_on(Guard::PinBudget) {
            return Err(Error::TooLarge { tokens_needed: target_tokens, tokens_max: budget });
        }
        let pinned_tokens_after = pinned_tokens - session_tokens_now + target_tokens;
        let pool_room = self.pinnable_tokens(dp_rank, self.capacity(dp_rank)?.pool_tokens);
        let pinned_tokens_max =
            if guards.is_on(Guard::PinBudget) { budget.min(pool_room) } else { u64::MAX };
        if pinned_tokens_after > pinned_tokens_max {
            let missing = pinned_tokens_after - pinned_tokens_max;
            let shortage =
                Shortage::Tokens { missing, held: pinned_tokens, max: pinned_tokens_max };
            return self.reclaim_or_refuse(now, key, shortage);
        }
        Ok(Verdict::Admit)
    }

    /// Decides on a plain turn. `must_line_up`: see [`Self::decide_ticket`].
    fn decide_plain(&mut self, now: Instant, rid: &str, need: Need, must_line_up: bool) -> Verdict {
        if must_line_up {
            return Verdict::WaitInLine;
        }
        let dp_rank = self.tickets[rid].dp_rank;
        let capacity = self.engine.ranks[dp_rank as usize];
        let tokens = self.free_tokens_needed(need).min(capacity.pool_tokens);
        let is_large_turn = tokens > capacity.pool_tokens - capacity.pin_tokens_max;
        let is_large_turn = is_large_turn && self.settings.guards.is_on(Guard::LargeTurnWaits);
        if is_large_turn {
            let pinned_tokens = self.totals(dp_rank).pinned_tokens;
            let missing_tokens = (pinned_tokens + tokens).saturating_sub(capacity.pool_tokens);
            if missing_tokens > 0 {
                // Reclaim only for the first large turn of each pass over the queue. If nothing can
                // be reclaimed, the turn waits until sessions close. Meanwhile, turns that fit may
                // pass it, but turns that would pin more tokens may not.
                if self.account(dp_rank).note_wait_for_pins(tokens) {
                    let shortage = Shortage::Tokens {
                        missing: missing_tokens,
                        held: pinned_tokens,
                        max: pinned_tokens - missing_tokens,
                    };
                    self.reclaim(now, dp_rank, &shortage, Requester::Client);
                }
                return Verdict::Wait;
            }
        }
        if !self.accounts[dp_rank as usize].has_engine_room(&capacity, TURNS_AHEAD_MAX) {
            return Verdict::WaitInLine;
        }
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.large_tokens = is_large_turn.then_some(tokens);
        Verdict::Admit
    }

    /// Starts to free room for a pinned session, so that the session's ticket can wait. Refuses the
    /// ticket if not enough room can be freed.
    fn reclaim_or_refuse(
        &mut self,
        now: Instant,
        key: &SessionKey,
        shortage: Shortage,
    ) -> Result<Verdict, Error> {
        let session = &self.sessions[key];
        let requester =
            if session.has_auto_retention() { Requester::AutoPin } else { Requester::Client };
        if self.reclaim(now, session.dp_rank, &shortage, requester) {
            return Ok(Verdict::Wait);
        }
        Err(shortage.into())
    }

    /// Admits a ticket. If it is a turn, the turn goes to the engine. If it is a client's open
    /// request, the client hears that the session is open.
    fn admit_ticket(&mut self, now: Instant, rid: &str) {
        let ticket = &self.tickets[rid];
        let (dp_rank, key) = (ticket.dp_rank, ticket.key.clone());
        let (is_open_request, closes_session) =
            (ticket.state == TicketState::AwaitsOpen, ticket.closes_session());
        let mut turn = Turn { session: None, dp_rank, growth_tokens_max: None, run_mode: None };
        if let Some(key) = &key {
            let session = &self.sessions[key];
            let runs_beside = !is_open_request && self.must_run_beside(key);
            let runs_pinned = session.is_pinned() && !runs_beside;
            turn.session = Some(TurnSession {
                key: key.clone(),
                incarnation: session.incarnation.clone(),
                retention: if runs_pinned {
                    Retention::Pinned
                } else {
                    self.unpinned_retention(session)
                },
                trim: None,
            });
            if runs_pinned && !is_open_request {
                self.admit_pinned(rid, key, &mut turn);
            } else {
                turn.run_mode = Some(self.unpinned_run_mode(key));
            }
            if !is_open_request {
                self.compare_prompt_start(rid, key, runs_beside);
                self.change_session(key, |session| {
                    session.turns.waiting -= 1;
                    session.turns.running += 1;
                    session.turns.is_unused = false;
                    session.continue_in_tree();
                    if closes_session {
                        session.begin_closing();
                    }
                });
            }
        }
        if !self.settings.guards.is_on(Guard::RankOfSession) {
            turn.dp_rank = 0;
        }
        if is_open_request {
            self.tickets.remove(rid);
        } else {
            self.count_as_inside(now, rid, &turn);
        }
        self.effects.push(Effect::Admitted { rid: rid.to_owned(), turn });
    }

    /// Reserves the KV that a turn of a pinned session may grow to, and completes `turn`.
    fn admit_pinned(&mut self, rid: &str, key: &SessionKey, turn: &mut Turn) {
        let ticket = &self.tickets[rid];
        let (need, is_delta) = (ticket.need, ticket.is_delta());
        let target_tokens = self.kv_target_tokens(key, need, is_delta);
        let session = &self.sessions[key];
        turn.growth_tokens_max = Some(target_tokens.saturating_sub(session.history.tokens));
        let incarnation = session.incarnation.clone();
        let had_no_kv = self.change_session(key, |session| {
            if is_delta {
                session.client.deltas = Deltas::Taken;
            }
            session.reserve(target_tokens)
        });
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        (ticket.is_pinned, ticket.had_no_kv) = (true, had_no_kv);
        self.write_journal(Record::Turn { incarnation, rid: rid.to_owned() });
        if is_delta || !self.shim_trims {
            // Without a shim that trims, a full history is admitted only if the session has no
            // history.
            self.update_deltas(rid, key);
            turn.run_mode = Some(RunMode::Pinned);
            return;
        }
        let retention = self.unpinned_retention(&self.sessions[key]);
        let trim: TrimRequest = self.mark_for_trimming(rid, key);
        let turn_session = turn.session.as_mut().expect("a pinned turn has one");
        (turn_session.retention, turn_session.trim) = (retention, Some(trim));
    }

    /// Counts a turn as inside the engine.
    fn count_as_inside(&mut self, now: Instant, rid: &str, turn: &Turn) {
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.state = TicketState::Inside;
        ticket.state_since = now;
        if let Some(session) = &turn.session {
            ticket.incarnation.clone_from(&session.incarnation);
        }
        let (dp_rank, large_tokens) = (ticket.dp_rank, ticket.large_tokens);
        let rows = self.engine.ranks[dp_rank as usize].rows;
        let account = self.account(dp_rank);
        account.totals.turns_queued -= 1;
        account.totals.turns_running += 1;
        account.count_start(turn.growth_tokens_max.is_some(), large_tokens, rows);
    }

    /// Refuses a ticket that is not inside the engine, and forgets it.
    pub(super) fn refuse_ticket(&mut self, now: Instant, rid: &str, error: Error) {
        self.forget_ticket(now, rid);
        self.effects.push(Effect::Refused { rid: rid.to_owned(), error });
    }

    /// Removes a ticket that is not inside the engine from the table, the queue and all counts. If
    /// the ticket's turn also asked to close its session, the close still takes effect.
    pub(super) fn forget_ticket(&mut self, now: Instant, rid: &str) {
        let ticket = self.tickets.remove(rid).expect("the caller has it");
        self.queue.retain(|queued| queued != rid);
        match ticket.state {
            TicketState::Queued => self.account(ticket.dp_rank).totals.turns_queued -= 1,
            TicketState::Claimed => self.account(ticket.dp_rank).turns_claimed -= 1,
            TicketState::AwaitsOpen | TicketState::Inside => {}
        }
        self.orphan_followers(&ticket);
        let Some(key) = ticket.key.clone() else { return };
        if self.sessions.get(&key).is_none_or(|session| session.generation != ticket.generation) {
            return;
        }
        if ticket.state != TicketState::AwaitsOpen {
            self.change_session(&key, |session| session.turns.waiting -= 1);
        }
        // A session with waiting turns doesn't expire, so its idle limit may have passed meanwhile.
        self.schedule_deadline(&key);
        let needs_session =
            |other: &Ticket| other.generation == ticket.generation && other.key.is_some();
        let is_planned = self.sessions[&key].state == State::Planned;
        if is_planned && !self.tickets.values().any(needs_session) {
            self.remove_session(&key);
        } else if ticket.closes_session() {
            // `begin_close` fails only for a session that is already closing.
            let _ = self.begin_close(now, &key);
        } else {
            self.close_unused(now, &key);
        }
    }

    /// Refuses all tickets in the queue.
    pub(super) fn refuse_waiting(&mut self, now: Instant, error: &Error) {
        while let Some(rid) = self.queue.front().cloned() {
            self.refuse_ticket(now, &rid, error.clone());
        }
    }

    /// Refuses tickets that have waited too long.
    pub(super) fn refuse_overdue(&mut self, now: Instant) {
        let wait_max = self.settings.queue_wait_max;
        let mut has_refused = false;
        while let Some(rid) = self.queue.front().cloned() {
            let is_overdue = self.tickets[&rid].state_since + wait_max <= now;
            if !is_overdue || !self.settings.guards.is_on(Guard::QueueTime) {
                break;
            }
            has_refused = true;
            let detail = format!("it waited {} ms for room", wait_max.as_millis());
            self.refuse_ticket(now, &rid, Error::OutOfRoom { resource: "queue_time", detail });
        }
        if has_refused {
            self.process_queue(now);
        }
    }
}
