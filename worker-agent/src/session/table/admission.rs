//! Decides which turns may go to the engine now, and keeps the queue of those that must wait.
//!
//! A turn of a pinned session reserves the KV that it may grow to. If that doesn't fit and no room
//! can be reclaimed, the turn is refused, or runs as a plain turn (on the radix tree) if the agent
//! pinned the session on its own. A plain turn is never refused for what it might need. It waits in
//! order while the engine couldn't run it anyway, and is refused only if it waited too long or the
//! queue is full.

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use contract::{id::SessionKey, load::Retention};

use super::{
    Deltas, Effect, Error, Guard, Need, Record, Row, RunMode, State, Table, Turn, TurnSession,
    asides::HistoryUse,
    check_turn,
    reclaim::{Requester, Shortage},
    shares::{TURNS_AHEAD_MAX, TurnShare},
    tickets::{Run, Ticket},
    trim_turn::Trim,
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
    need: Need,
    /// An earlier plain turn waits in line on this rank.
    must_line_up: bool,
    /// As many turns are inside this rank of the engine as may be.
    at_turn_limit: bool,
    /// The share of the engine that the turn's principal has used up.
    at_share: Option<TurnShare>,
}

impl Table {
    /// [`Effect::Admitted`] or [`Effect::Refused`] follows, at once or when there is room. Returns
    /// false if the turn has ended meanwhile.
    pub fn admit(&mut self, now: Instant, rid: &str, need: Need) -> bool {
        if !self.tickets.queue_turn(now, rid, need) {
            return false;
        }
        if let Err(error) = self.check_engine_speaks() {
            self.refuse_ticket(now, rid, error);
            return true;
        }
        self.process_queue(now);
        let queue = self.tickets.queue();
        let is_full = queue.len() > self.settings.turns_queued_max;
        if is_full && queue.back().is_some_and(|newest| newest == rid) {
            let principal = Arc::clone(&self.tickets[rid].principal);
            if let Err(error) = self.make_queue_place(now, &principal) {
                self.refuse_ticket(now, rid, error);
            }
        }
        self.debug_check();
        true
    }

    /// Principals take turns: the one with the fewest turns inside the engine comes first, with its
    /// oldest ticket.
    pub(super) fn process_queue(&mut self, now: Instant) {
        self.history_awaited_until = None;
        if self.hold_reason().is_some() {
            return;
        }
        let mut ranks_with_line = BTreeSet::new();
        self.tickets.start_queue_pass();
        for rid in self.tickets.pass_order(self.settings.guards.is_on(Guard::FairOrder)) {
            // Decisions on earlier tickets may have refused this one.
            let Some(ticket) = self.tickets.get(&rid) else { continue };
            let dp_rank = ticket.dp_rank;
            match self.decide_ticket(now, &rid, ranks_with_line.contains(&dp_rank)) {
                Ok(Verdict::ReportOpen) => self.report_open(&rid),
                Ok(Verdict::AdmitPinned { key, need }) => self.admit_pinned(now, &rid, &key, need),
                Ok(Verdict::AdmitPlain { large_tokens }) => {
                    self.admit_plain(now, &rid, large_tokens)
                }
                Ok(Verdict::Wait) => {}
                Ok(Verdict::WaitInLine) => drop(ranks_with_line.insert(dp_rank)),
                Err(error) => self.refuse_ticket(now, &rid, error),
            }
        }
    }

    fn decide_ticket(
        &mut self,
        now: Instant,
        rid: &str,
        must_line_up: bool,
    ) -> Result<Verdict, Error> {
        let ticket = &self.tickets[rid];
        let (dp_rank, guards) = (ticket.dp_rank, self.settings.guards);
        let turns_max = self.capacity(dp_rank)?.turns_max;
        if ticket.need().is_none() {
            return self.decide_open(now, rid);
        }
        let need = self.bound_batch(now, rid)?;
        let ticket = &self.tickets[rid];
        let at_turn_limit = !self.tickets.load(dp_rank).has_places(need.places(), turns_max);
        let principal = Arc::clone(&ticket.principal);
        let at_share = self.is_at_turn_share(now, &principal, dp_rank, need.places());
        let plain = PlainTurn { dp_rank, need, must_line_up, at_turn_limit, at_share };
        let Some(claimed) = &ticket.session else { return Ok(self.decide_plain(now, plain)) };
        let key = self.session_of(ticket).ok_or(Error::UnknownSession)?;
        let session = &self.sessions[&key];
        check_turn(session, &claimed.claim, claimed.route_turns, self.shims.trims(), guards)?;
        if claimed.is_orphaned && guards.is_on(Guard::LostEndSuspect) {
            return Err(Error::PredecessorFailed);
        }
        let may_be_early = session.turns.waiting > 1 && session.is_exclusive();
        if may_be_early && self.tickets.has_earlier_claim(claimed) {
            return Ok(Verdict::Wait);
        }
        let is_delta = ticket.is_delta();
        match self.find_history(now, &key, rid) {
            HistoryUse::Free => {}
            HistoryUse::Awaited => return Ok(Verdict::Wait),
            HistoryUse::Beside => return Ok(self.decide_plain(now, plain)),
        }
        let session = &self.sessions[&key];
        if !is_delta && session.turns.running == 0 && self.prepare_for_full_history(now, &key, need)
        {
            return Ok(Verdict::Wait);
        }
        let session = &self.sessions[&key];
        match session.state {
            State::Planned => return self.open_planned(now, &key),
            State::Opening(_) | State::Demoting { .. } | State::Suspect { .. } => {
                return Ok(Verdict::Wait);
            }
            _ => {}
        }
        if session.is_exclusive() && session.turns.running > 0 && guards.is_on(Guard::OneTurn) {
            return Ok(Verdict::Wait);
        }
        if !session.is_pinned() {
            return Ok(self.decide_plain(now, plain));
        }
        if at_turn_limit || at_share == Some(TurnShare::All) {
            return Ok(Verdict::Wait);
        }
        // The shim compares a full history, and knows what the engine takes for it.
        if is_delta && !session.has_kv_of(need.kv) && guards.is_on(Guard::KvIdentity) {
            return Err(Error::OtherKv);
        }
        let has_auto_retention = session.has_auto_retention();
        match self.decide_pinned(now, &key, need, is_delta) {
            // Without room, a session that the agent pinned loses its pin: the turn runs on the
            // tree.
            Err(_) if has_auto_retention && self.yield_pin(now, &key) => Ok(Verdict::Wait),
            Err(_) if has_auto_retention => Ok(self.decide_plain(now, plain)),
            verdict => verdict,
        }
    }

    fn decide_open(&mut self, now: Instant, rid: &str) -> Result<Verdict, Error> {
        let key = self.session_of(&self.tickets[rid]).ok_or(Error::UnknownSession)?;
        match self.sessions[&key].state {
            State::Planned => self.open_planned(now, &key),
            State::Opening(_) | State::Demoting { .. } | State::Suspect { .. } => Ok(Verdict::Wait),
            State::Closing(_) | State::Gone { .. } => Err(Error::UnknownSession),
            State::Open(_) | State::Demoted | State::InTree(_) => Ok(Verdict::ReportOpen),
        }
    }

    /// Pins a session without running turns, or takes its pin, if that makes its turns cheaper.
    /// Returns true if the turn must wait until the session's KV has gone to the radix tree.
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

    fn open_planned(&mut self, now: Instant, key: &SessionKey) -> Result<Verdict, Error> {
        self.check_tree_is_current()?;
        let dp_rank = self.sessions[key].dp_rank;
        if self.closes.has_inherited() {
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

    /// The caller has checked that a row is free.
    pub(super) fn begin_open(&mut self, key: &SessionKey, reserved_tokens: u64) {
        let (incarnation, idle_max, dp_rank) = self.change_session(key, |session| {
            session.state = State::Opening(Row { reserved_tokens, ..Row::default() });
            (session.incarnation.clone(), session.idle_max, session.dp_rank)
        });
        let record = Record::Opening { incarnation: incarnation.clone(), dp_rank };
        self.push_journaled(Some(record), Effect::Open { incarnation, idle_max });
    }

    /// After the effect, the engine has what `record` names.
    fn push_journaled(&mut self, record: Option<Record>, effect: Effect) {
        let (before, after) = match record {
            record if self.settings.guards.is_on(Guard::JournalFirst) => (record, None),
            record => (None, record),
        };
        before.into_iter().for_each(|record| self.effects.write_journal(record));
        self.effects.push(effect);
        after.into_iter().for_each(|record| self.effects.write_journal(record));
    }

    /// The growth must fit into the pin budget and the pool.
    fn decide_pinned(
        &mut self,
        now: Instant,
        key: &SessionKey,
        need: Need,
        is_delta: bool,
    ) -> Result<Verdict, Error> {
        self.check_tree_is_current()?;
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
        Ok(Verdict::AdmitPinned { key: key.clone(), need })
    }

    fn decide_plain(&mut self, now: Instant, turn: PlainTurn) -> Verdict {
        let PlainTurn { dp_rank, need, must_line_up, at_turn_limit, at_share } = turn;
        if at_share.is_some() {
            // Only the turns of this principal wait for its share.
            return Verdict::Wait;
        }
        if must_line_up || at_turn_limit {
            return Verdict::WaitInLine;
        }
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
                if self.tickets.load_mut(dp_rank).note_wait_for_pins(tokens) {
                    let shortage = Shortage::Tokens {
                        missing: missing_tokens,
                        held: pinned_tokens,
                        max: pinned_tokens - missing_tokens,
                    };
                    self.reclaim(now, dp_rank, &shortage, Requester::Plain);
                }
                return Verdict::Wait;
            }
        }
        let free_rows = self.free_rows(dp_rank);
        self.reclaim_rows_for_plain_turns(now, dp_rank, need.places(), free_rows);
        let load = self.tickets.load(dp_rank);
        if !load.has_engine_room(need.places(), free_rows, TURNS_AHEAD_MAX) {
            return Verdict::WaitInLine;
        }
        Verdict::AdmitPlain { large_tokens: is_large_turn.then_some(tokens) }
    }

    /// Waits for room that can be freed, or else refuses the ticket.
    fn reclaim_or_refuse(
        &mut self,
        now: Instant,
        key: &SessionKey,
        shortage: Shortage,
    ) -> Result<Verdict, Error> {
        let session = &self.sessions[key];
        let requester = if session.has_auto_retention() {
            Requester::AutoPin
        } else {
            Requester::Pinned(key.principal())
        };
        if self.reclaim(now, session.dp_rank, &shortage, requester) {
            return Ok(Verdict::Wait);
        }
        Err(shortage.into())
    }

    fn report_open(&mut self, rid: &str) {
        let Some(ticket) = self.tickets.remove(rid) else { return };
        let turn = self.describe_turn(&ticket, true);
        self.effects.push(Effect::Admitted { rid: rid.to_owned(), turn });
    }

    fn admit_plain(&mut self, now: Instant, rid: &str, large_tokens: Option<u64>) {
        let turn = self.describe_turn(&self.tickets[rid], false);
        self.send_turn(now, rid, turn, Run::Plain { large_tokens });
    }

    fn admit_pinned(&mut self, now: Instant, rid: &str, key: &SessionKey, need: Need) {
        let ticket = &self.tickets[rid];
        let (is_delta, opens_session) = (ticket.is_delta(), ticket.opens_session());
        let is_trimmed = !is_delta && self.shims.trims();
        let target_tokens = self.kv_target_tokens(key, need, is_delta);
        let mut turn = self.describe_turn(ticket, !is_trimmed);
        let session = &self.sessions[key];
        turn.growth_tokens_max = Some(target_tokens.saturating_sub(session.history.tokens));
        let incarnation = session.incarnation.clone();
        let had_no_kv = self.change_session(key, |session| {
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
        self.effects.write_journal(Record::Turn { incarnation, rid: rid.to_owned() });
        let trim = if is_trimmed {
            let awaited = self.request_trim(key, need, opens_session);
            turn.run_mode = None;
            turn.session = turn
                .session
                .map(|session| TurnSession { trim: Some(awaited.request()), ..session });
            Trim::Awaited(awaited)
        } else {
            // Without a shim that trims, a full history is admitted only to an empty session.
            self.update_deltas(key, opens_session, None);
            turn.run_mode = Some(RunMode::Pinned);
            Trim::NotNeeded
        };
        self.send_turn(now, rid, turn, Run::Pinned { had_no_kv, trim });
    }

    /// `in_session`: the turn runs in its session if that is pinned.
    fn describe_turn(&self, ticket: &Ticket, in_session: bool) -> Turn {
        let session = ticket.key().map(|key| (key, &self.sessions[key]));
        let turn_session = session.map(|(key, session)| TurnSession {
            key: key.clone(),
            incarnation: session.incarnation.clone(),
            retention: if in_session && session.is_pinned() {
                Retention::Pinned
            } else {
                self.unpinned_retention(session)
            },
            trim: None,
        });
        let run_mode =
            |session| ticket.run_mode(self.unpinned_run_mode(session), self.shims.trims());
        let is_rank_kept = self.settings.guards.is_on(Guard::RankOfSession);
        Turn {
            session: turn_session,
            dp_rank: if is_rank_kept { ticket.dp_rank } else { 0 },
            growth_tokens_max: None,
            weights_epoch: self.weights.epoch(),
            run_mode: session.map(|(_, session)| run_mode(session)),
        }
    }

    fn send_turn(&mut self, now: Instant, rid: &str, mut turn: Turn, run: Run) {
        let record = self.begin_tag(&mut turn);
        let ticket = &self.tickets[rid];
        let (is_delta, closes_session) = (ticket.is_delta(), ticket.closes_session());
        let free_rows = self.free_rows(ticket.dp_rank);
        self.weights.record_turn();
        let session = turn.session.as_ref().map(|session| &self.sessions[&session.key]);
        let is_aside = session.is_some_and(|session| self.is_aside(session, ticket));
        let start = self.tickets.enter_engine(now, rid, &turn, (run, is_aside), free_rows);
        if let Some(TurnSession { key, .. }) = &turn.session {
            if !is_delta {
                self.compare_prompt_start(key, start, is_aside);
            }
            self.change_session(key, |session| {
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
        self.push_journaled(record, Effect::Admitted { rid: rid.to_owned(), turn });
    }

    /// The ticket must not be inside the engine.
    pub(super) fn refuse_ticket(&mut self, now: Instant, rid: &str, error: Error) {
        self.forget_ticket(now, rid);
        self.effects.push(Effect::Refused { rid: rid.to_owned(), error });
    }

    /// The ticket must not be inside the engine. A close that its turn asked for still happens.
    pub(super) fn forget_ticket(&mut self, now: Instant, rid: &str) {
        let Some(ticket) = self.tickets.remove(rid) else { return };
        self.tickets.orphan_followers(&ticket);
        let Some(key) = self.session_of(&ticket) else { return };
        if ticket.is_waiting_turn() {
            self.change_session(&key, |session| session.turns.waiting -= 1);
        }
        // A session with waiting turns doesn't expire, so its idle limit may have passed meanwhile.
        let session = &self.sessions[&key];
        let is_needed = self.tickets.iter().any(|(_, other)| other.is_of(session.generation));
        if session.state == State::Planned && !is_needed {
            self.sessions.remove(&mut self.effects, &key);
        } else if ticket.closes_session() {
            // `begin_close` fails only for a session that is already closing.
            let _ = self.begin_close(now, &key);
        } else {
            self.close_unused(now, &key);
        }
    }

    /// Returns `None` if the session that the ticket has claimed is gone, or another has its key.
    pub(super) fn session_of(&self, ticket: &Ticket) -> Option<SessionKey> {
        let session = self.sessions.get(ticket.key()?)?;
        ticket.is_of(session.generation).then(|| ticket.key().cloned())?
    }
}
