//! Ends turns and refuses tickets, and takes sessions out of the table that no turn needs any more.

use contract::id::SessionKey;

use crate::session::table::{
    CloseResult, Effect, Error, Guard, Outcome, Queue, Session, State, Step,
    histories::running_turns::RunningTurn,
    queue::ticket::{Inside, Ticket},
};

impl Queue {
    pub(crate) fn close_session(
        &mut self,
        step: &mut Step,
        key: &SessionKey,
    ) -> Result<bool, Error> {
        begin_close(self, step, key)?;
        self.admit_waiting(step);
        Ok(self.sessions().has(key))
    }

    pub(crate) fn drain(&mut self, step: &mut Step) {
        self.refuse_waiting(step, &Error::Stopping);
        let keys = self.sessions().keys(|_| true);
        // `close_session` fails only for a session that is already closing.
        keys.iter().for_each(|key| drop(self.close_session(step, key)));
    }

    /// The engine must hold nothing of the session, or its close must have begun.
    pub(crate) fn drop_session(&mut self, step: &mut Step, key: &SessionKey, error: &Error) {
        self.sessions_mut().remove(step, key);
        let waiting = self.tickets.queue().iter();
        let rids: Vec<String> =
            waiting.filter(|rid| self.tickets[rid].key() == Some(key)).cloned().collect();
        rids.iter().for_each(|rid| self.refuse_ticket(step, rid, error.clone()));
    }

    pub(crate) fn refuse_waiting(&mut self, step: &mut Step, error: &Error) {
        while let Some(rid) = self.tickets.queue().front().cloned() {
            self.refuse_ticket(step, &rid, error.clone());
        }
    }

    /// A session that a turn asked to close has been closing since that turn's admission.
    pub(super) fn close_if_due(&mut self, step: &mut Step, key: &SessionKey) {
        let Some(session) = self.sessions().get(key) else { return };
        if !session.state.is_closing() || session.turns.running > 0 {
            return;
        }
        self.histories.pins.close_at_engine(step, key);
        self.drop_session(step, key, &Error::UnknownSession);
    }

    /// Without this, the session would stay open: its clients don't know that it was opened for
    /// them, and a router that doesn't know the session can't close it.
    pub(super) fn close_unused(&mut self, step: &mut Step, key: &SessionKey) {
        let session = self.sessions().get(key);
        let is_open_for_nothing = session.is_some_and(Session::is_open_for_nothing);
        if is_open_for_nothing && self.settings.guards.is_on(Guard::UnusedClosed) {
            let _ = begin_close(self, step, key);
        }
    }

    /// The ticket must not be inside the engine.
    pub(super) fn refuse_ticket(&mut self, step: &mut Step, rid: &str, error: Error) {
        self.forget_ticket(step, rid);
        step.push(Effect::Refused { rid: rid.to_owned(), error });
    }

    /// The ticket must not be inside the engine. A close that its turn asked for still happens.
    pub(super) fn forget_ticket(&mut self, step: &mut Step, rid: &str) {
        let Some(ticket) = self.tickets.remove(rid) else { return };
        self.tickets.orphan_followers(&ticket);
        let Some(key) = ticket.claimed_key(self.sessions()) else { return };
        if ticket.is_waiting_turn() {
            self.sessions_mut().change(step, &key, |session| session.turns.waiting -= 1);
        }
        // A session with waiting turns doesn't expire, so its idle limit may have passed meanwhile.
        let session = &self.sessions()[&key];
        let is_needed = self.tickets.iter().any(|(_, other)| other.is_of(session.generation));
        if session.state == State::Planned && !is_needed {
            self.sessions_mut().remove(step, &key);
        } else if ticket.closes_session() {
            // `begin_close` fails only for a session that is already closing.
            let _ = begin_close(self, step, &key);
        } else {
            self.close_unused(step, &key);
        }
    }

    /// The engine has answered, or the shim has reported that the incarnation is closed.
    pub(crate) fn apply_close_result(
        &mut self,
        step: &mut Step,
        incarnation: &str,
        result: CloseResult,
    ) {
        let is_tagged_again = self.tickets.has_tag(incarnation);
        if self.histories.pins.apply_close_result(step, incarnation, result, is_tagged_again) {
            self.admit_waiting(step);
        }
    }
}

/// As [`Queue::close_session`], but decides on no waiting ticket.
fn begin_close(queue: &mut Queue, step: &mut Step, key: &SessionKey) -> Result<(), Error> {
    let session = queue.sessions().get(key).ok_or(Error::UnknownSession)?;
    match session.state {
        State::Closing(_) => return Err(Error::UnknownSession),
        State::Planned | State::Gone { .. } if session.turns.running == 0 => {
            queue.drop_session(step, key, &Error::UnknownSession)
        }
        _ => {
            // If the engine is still opening the session, its answer triggers the close.
            let is_opening = matches!(session.state, State::Opening(_));
            queue.histories.turns.answer_run_outside(step, key);
            queue.sessions_mut().change(step, key, |session| session.state.begin_closing());
            if !is_opening {
                queue.close_if_due(step, key);
            }
        }
    }
    Ok(())
}

impl Queue {
    pub(crate) fn abandon_turn(&mut self, step: &mut Step, rid: &str) {
        let Some(inside) = self.tickets.inside_mut(rid) else { return };
        inside.abandoned_since.get_or_insert(step.now);
        if self.histories.turns.get(rid).is_some_and(|turn| turn.was_aborted) {
            end_abandoned(self, step, rid);
        } else if !self.settings.guards.is_on(Guard::EndAcknowledged) {
            self.end_turn(step, rid, Outcome::Aborted);
        }
    }

    pub(crate) fn end_turn(&mut self, step: &mut Step, rid: &str, outcome: Outcome) {
        let turns = &mut self.histories.turns;
        if self.tickets.inside_mut(rid).is_none() {
            self.forget_ticket(step, rid);
        } else if let (Some(ticket), Some(turn)) = (self.tickets.remove(rid), turns.remove(rid)) {
            if let Some(tokens) = ticket.large_tokens() {
                self.histories.pins.large_turns.end(ticket.dp_rank, tokens);
            }
            self.pace.record_end(step.now, self.tickets.queue().len());
            end_turn_inside(self, step, rid, &ticket, &turn, outcome);
        }
        self.admit_waiting(step);
    }

    /// See [`ShimReport::Aborted`](crate::session::ShimReport::Aborted).
    pub(crate) fn apply_abort(&mut self, step: &mut Step, incarnation: &str) {
        if let Some(rid) = self.histories.turns.note_abort(incarnation) {
            let is_abandoned = |inside: &mut Inside| inside.abandoned_since.is_some();
            if self.tickets.inside_mut(&rid).is_some_and(is_abandoned) {
                end_abandoned(self, step, &rid);
            }
            return;
        }
        let Some(key) = self.sessions().key_of(incarnation).cloned() else { return };
        let session = &self.sessions()[&key];
        if session.turns.was_last_refused && session.state.is_open() {
            self.sessions_mut().change(step, &key, |session| session.state.drop_row());
            self.admit_waiting(step);
        }
    }
}

fn end_turn_inside(
    queue: &mut Queue,
    step: &mut Step,
    rid: &str,
    ticket: &Ticket,
    turn: &RunningTurn,
    outcome: Outcome,
) {
    let now = step.now;
    if !matches!(outcome, Outcome::Finished(_)) {
        queue.tickets.orphan_followers(ticket);
    }
    let Some(key) = turn.claimed_key(queue.sessions()) else { return };
    queue.sessions_mut().change(step, &key, |session| {
        session.turns.running -= 1;
        session.turns.last_end = now;
    });
    let session = &queue.sessions()[&key];
    // If the engine restarted during the turn, the session has nothing left to update.
    let is_current = turn.incarnation.as_ref() == Some(&session.incarnation);
    if is_current && !session.state.is_gone() {
        queue.histories.apply_end(step, &key, rid, turn, outcome);
    }
    queue.histories.close_unfit(step, &key);
    queue.close_if_due(step, &key);
}

/// On some routes the engine's answer never tells the abort, because only closing the
/// connection aborts the turn. The report doesn't say what a retracted turn had committed
/// before, so the shim must report the history.
fn end_abandoned(queue: &mut Queue, step: &mut Step, rid: &str) {
    queue.end_turn(step, rid, Outcome::Lost);
}
