//! Updates a session when one of its turns ends.
//!
//! How a turn ended decides whether it became history, and whether the agent can be sure of that.
//! If not, the session becomes suspect: it takes no turn before its history is confirmed.

use std::time::Instant;

use contract::id::SessionKey;

use super::{
    ExpectedHistory, Guard, Outcome, Table, Usage,
    tickets::{Inside, Ticket},
    trim_turn::Trim,
};

impl Table {
    /// The turn's client has disconnected. The caller aborts the turn, which counts as inside until
    /// the engine acknowledges its end.
    pub fn abandon_turn(&mut self, now: Instant, rid: &str) {
        let Some(inside) = self.tickets.inside_mut(rid) else { return };
        inside.abandoned_since.get_or_insert(now);
        if inside.was_aborted {
            self.end_abandoned(now, rid);
        } else if !self.settings.guards.is_on(Guard::EndAcknowledged) {
            self.end_turn(now, rid, Outcome::Aborted);
        }
    }

    /// Ends a claimed turn at any stage, and closes its session if the claim asked for that. Does
    /// nothing if the turn has already ended.
    pub fn end_turn(&mut self, now: Instant, rid: &str, outcome: Outcome) {
        if self.tickets.inside_mut(rid).is_none() {
            self.forget_ticket(now, rid);
        } else if let Some(ticket) = self.tickets.remove(rid) {
            self.queue_pace.record_end(now, self.tickets.queue().len());
            self.end_turn_inside(now, rid, &ticket, outcome);
        }
        self.process_queue(now);
        self.debug_check();
    }

    fn end_turn_inside(&mut self, now: Instant, rid: &str, ticket: &Ticket, outcome: Outcome) {
        if !matches!(outcome, Outcome::Finished(_)) {
            self.tickets.orphan_followers(ticket);
        }
        let (Some(key), Some(inside)) = (self.session_of(ticket), ticket.inside()) else { return };
        self.change_session(&key, |session| {
            session.turns.running -= 1;
            session.turns.last_end = now;
        });
        let session = &self.sessions[&key];
        // If the engine restarted during the turn, the session has nothing left to update.
        let is_current = inside.incarnation.as_ref() == Some(&session.incarnation);
        if is_current && !session.state.is_gone() {
            self.settle_end(now, &key, rid, (ticket, inside), outcome);
        }
        self.close_corrupt(now, &key);
        self.close_outdated(now, &key);
        self.close_without_adapter(now, &key);
        self.close_if_due(now, &key);
    }

    fn settle_end(
        &mut self,
        now: Instant,
        key: &SessionKey,
        rid: &str,
        (ticket, inside): (&Ticket, &Inside),
        outcome: Outcome,
    ) {
        if matches!(inside.trim(), Some(Trim::Refused)) {
            return self.undo_admission(key, inside.had_no_kv());
        }
        let outcome = self.measure_full_history(key, ticket, inside, outcome);
        let is_session_pinned = self.sessions[key].is_pinned();
        if inside.runs_pinned() && is_session_pinned {
            if !self.settle_uncertain_trim(now, key, (rid, inside), outcome) {
                self.settle_pinned(now, key, rid, inside, outcome);
            }
            return;
        }
        let ran_beside = is_session_pinned || inside.is_aside;
        if let Outcome::Finished(usage) | Outcome::Unheard(usage) = outcome {
            self.change_session(key, |session| {
                session.turns.finished += 1;
                // A turn that ran beside a pinned session doesn't change the session's history.
                session.client.may_be_ahead |= ran_beside && !inside.is_aside;
                if let Some(usage) = usage.filter(|_| !ran_beside) {
                    session.record_usage(usage);
                }
            });
        }
    }

    fn settle_pinned(
        &mut self,
        now: Instant,
        key: &SessionKey,
        rid: &str,
        inside: &Inside,
        outcome: Outcome,
    ) {
        let guards = self.settings.guards;
        let history_before = self.sessions[key].history.tokens;
        let is_open = self.sessions[key].state.is_open();
        match outcome {
            Outcome::Refused if !inside.was_aborted => {
                self.undo_admission(key, inside.had_no_kv());
                self.sessions.update(key, |session| session.turns.was_last_refused = true);
            }
            // The engine rolls the history back and gives the session's KV to its radix tree. It
            // may answer such a turn as it answers one that it never ran.
            Outcome::Refused | Outcome::Aborted => {
                self.change_session(key, |session| session.state.drop_row())
            }
            Outcome::Finished(usage) => {
                self.record_growth(key, usage);
                self.note_hidden_end_tokens(key, inside, usage);
                let was_retracted = usage.is_some_and(|usage| usage.retractions > 0);
                if !is_open {
                    // A closing session needs no certain history.
                } else if usage.is_none_or(|usage| !inside.follows_history(history_before, usage))
                    && guards.is_on(Guard::HistoryChecked)
                {
                    // The shim has compared the engine's own count with its plan. The usage may be
                    // lower, because one route subtracts its template's tokens.
                    let planned_tokens = inside.planned_prompt_tokens();
                    self.make_suspect(now, key, planned_tokens.map(ExpectedHistory::AtLeast));
                } else if was_retracted && guards.is_on(Guard::RetractionSuspect) {
                    // The engine commits a partial answer when it retracts a turn from its batch,
                    // so only the engine knows the final history.
                    let history_tokens = self.sessions[key].history.tokens;
                    self.make_suspect(now, key, Some(ExpectedHistory::Exactly(history_tokens)));
                }
            }
            Outcome::Unheard(usage) => {
                self.record_growth(key, usage);
                if is_open && guards.is_on(Guard::UnheardSuspect) {
                    self.make_suspect(now, key, None);
                }
            }
            Outcome::Partial if guards.is_on(Guard::RetractionSuspect) => {
                // The reserved tokens stay counted until the session is certain.
                if is_open {
                    self.make_suspect(now, key, Some(ExpectedHistory::Exactly(history_before)));
                }
            }
            Outcome::Partial => {
                self.change_session(key, |session| session.state.release_reserved())
            }
            Outcome::Lost => {
                if guards.is_on(Guard::AbortBeforeClose) {
                    self.change_session(key, |session| session.state.note_lost_turn(rid));
                }
                if is_open && guards.is_on(Guard::LostEndSuspect) {
                    // The session can continue only if the engine committed nothing of the turn.
                    // Then the history is the one that the client knows.
                    self.make_suspect(now, key, Some(ExpectedHistory::Exactly(history_before)));
                }
            }
        }
    }

    /// The shim reports that the engine aborted a running turn of `incarnation`, so the row and KV
    /// are free. The answer may look like a refusal.
    ///
    /// The report names no turn. A late one is still true of a turn that ends as refused, as that
    /// takes no row. An abandoned turn that ends too early leaves a doubt, which the shim settles.
    pub fn handle_abort(&mut self, now: Instant, incarnation: &str) {
        let is_running = |inside: &Inside| {
            inside.runs_pinned() && inside.incarnation.as_deref() == Some(incarnation)
        };
        let running = self.tickets.inside().find(|(_, _, inside)| is_running(inside));
        let running = running.map(|(rid, ..)| rid.to_owned());
        if let Some(rid) = running
            && let Some(inside) = self.tickets.inside_mut(&rid)
        {
            inside.was_aborted = true;
            if inside.abandoned_since.is_some() {
                self.end_abandoned(now, &rid);
            }
            return;
        }
        let Some(key) = self.sessions.key_of(incarnation).cloned() else { return };
        let session = &self.sessions[&key];
        if session.turns.was_last_refused && session.state.is_open() {
            self.change_session(&key, |session| session.state.drop_row());
            self.process_queue(now);
            self.debug_check();
        }
    }

    /// On some routes the engine's answer never tells the abort, because only closing the
    /// connection aborts the turn. The report doesn't say what a retracted turn had committed
    /// before, so the shim must report the history.
    fn end_abandoned(&mut self, now: Instant, rid: &str) {
        self.end_turn(now, rid, Outcome::Lost);
    }

    /// With `ignore_eos`, the answer's text may hide end tokens.
    fn note_hidden_end_tokens(&mut self, key: &SessionKey, inside: &Inside, usage: Option<Usage>) {
        let measured_usage = usage.filter(|_| inside.need.ignores_eos);
        let answer_start = measured_usage.map(|usage| usage.prompt_tokens);
        self.sessions.update(key, |session| session.client.hidden_end_tokens_from = answer_start);
    }

    fn record_growth(&mut self, key: &SessionKey, usage: Option<Usage>) {
        self.change_session(key, |session| {
            session.turns.finished += 1;
            session.state.release_reserved();
            session.client.may_be_ahead = false;
            if let Some(usage) = usage {
                session.record_usage(usage);
            }
        });
    }
}

impl Inside {
    fn planned_prompt_tokens(&self) -> Option<u64> {
        match self.trim() {
            Some(Trim::Planned { prompt_tokens, .. }) => Some(*prompt_tokens),
            _ => None,
        }
    }

    fn follows_history(&self, history_tokens: u64, usage: Usage) -> bool {
        if let Some(planned_tokens) = self.planned_prompt_tokens() {
            return usage.prompt_tokens == planned_tokens;
        }
        let Some(sent_tokens) = usage.prompt_tokens.checked_sub(history_tokens) else {
            return false;
        };
        // The engine drops the leading BOS token of a prompt that it appends to a history.
        let was_bos_dropped = history_tokens > 0 && sent_tokens + 1 == self.need.prompt_tokens;
        !self.need.is_exact || sent_tokens == self.need.prompt_tokens || was_bos_dropped
    }
}
