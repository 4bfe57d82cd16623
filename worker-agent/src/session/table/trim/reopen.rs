//! Full histories that diverge from their session, and new incarnations that replace old ones.
//!
//! The shim asks first. The old incarnation's KV then goes to the radix tree, and a new incarnation
//! takes the turn, or none does.

use std::time::Instant;

use proto::id::SessionKey;

use super::{DIVERGENCE_STREAK_MAX, Plan, TrimPlan};
use crate::session::table::{
    Deltas, Effect, GoneReason, Need, Phase, Record, Session, Table, Ticket, TicketState,
};

/// A diverged prompt is an aside if it shares less than this part (one over this divisor) of the
/// session's history. If the next turn diverges too, the prompts aren't asides: the client has
/// shortened its history.
const ASIDE_DIVISOR: u64 = 4;

impl TrimPlan {
    /// Whether the prompt shares little of the session's history. It asks for a title of the
    /// conversation, say, or is a shortened history.
    fn is_aside(&self) -> bool {
        self.decision == Plan::Diverged
            && self.shared_tokens < self.committed_tokens / ASIDE_DIVISOR
    }
}

impl Table {
    /// Whether the prompt differs only because the last answer holds end tokens that its text
    /// doesn't show. Such a session is opened again with the new history and keeps its pin.
    pub(super) fn has_hidden_end_tokens(&self, key: &SessionKey, plan: &TrimPlan) -> bool {
        let from = self.sessions[key].full_history.hidden_end_tokens_from;
        plan.decision == Plan::Diverged && from.is_some_and(|from| plan.shared_tokens >= from)
    }

    /// Handles the shim's question about a turn that can't run in its session as planned. An
    /// [`Effect::AnswerQuestion`] with the answer follows. Without an answer, the shim decides by
    /// itself after two seconds.
    pub fn handle_question(&mut self, now: Instant, question: u64, plan: &TrimPlan) {
        let rid = &plan.rid;
        let Some(key) = self.session_awaiting_plan(rid) else {
            self.effects.push(Effect::AnswerQuestion {
                question,
                incarnation: None,
                tokens_max: 0,
            });
            return;
        };
        self.record_divergence(&key, plan);
        let need =
            Need { prompt_tokens: plan.prompt_tokens, exact: true, ..self.tickets[rid].need };
        let target = self.full_history_target(&key, need);
        let trim_turn = self.trim_turn_mut(rid);
        (trim_turn.open_question, trim_turn.has_asked) = (Some(question), true);
        let too_large = plan.decision == Plan::Refused && plan.prompt_tokens > trim_turn.tokens_max;
        let must_continue = trim_turn.must_continue;
        trim_turn.tokens_max = trim_turn.tokens_max.max(plan.prompt_tokens);
        let fits = self.fits_pinned(&key, target);
        self.trim_turn_mut(rid).is_too_large = too_large;
        if !too_large && !self.has_hidden_end_tokens(&key, plan) {
            self.change_session(&key, |session| session.full_history.divergence_streak += 1);
        }
        let session = &self.sessions[&key];
        let is_auto = session.has_auto_retention();
        let streak = session.full_history.divergence_streak;
        let is_aside = is_auto && plan.is_aside() && streak == 1;
        let streak_too_long = is_auto && streak > DIVERGENCE_STREAK_MAX;
        let keeps_history = must_continue && !too_large;
        // A closing session may still run its last turn in more room.
        let can_run = session.phase == Phase::Open
            || (session.phase == Phase::Closing && must_continue && too_large);
        if !can_run || is_aside || keeps_history || (!fits && !is_auto) {
            self.answer_outside(&key);
        } else if too_large && fits {
            self.change_session(&key, |session| session.reserved_tokens = target);
            self.answer_inside(rid, &key);
        } else {
            self.trim_turn_mut(rid).reopen_tokens = (fits && !streak_too_long).then_some(target);
            self.release_before_reopen(now, rid, &key);
        }
        self.pump(now);
        self.debug_check();
    }

    /// Gives the session's KV to the radix tree, then replaces the incarnation.
    fn release_before_reopen(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        let had_no_kv = self.tickets[rid].had_no_kv;
        let (holds, dp_rank) = self.change_session(key, |session| {
            session.reserved_tokens = 0;
            session.holds_row &= session.history_tokens > 0 && !had_no_kv;
            (session.holds_row, session.dp_rank as usize)
        });
        if holds && self.accounts[dp_rank].can_demote() {
            return self.release_kv(now, key);
        }
        self.reopen(now, rid, key);
    }

    /// Continues the reopening after the demotion of the old incarnation. `done`: its KV is in the
    /// radix tree now. Returns false if no turn of the session waits for that.
    pub(in super::super) fn continue_reopen(
        &mut self,
        now: Instant,
        key: &SessionKey,
        done: bool,
    ) -> bool {
        let Some(rid) = self.rid_with_question(key) else { return false };
        if done {
            self.change_session(key, |session| {
                session.holds_row = false;
                session.resident_tokens = 0;
            });
        }
        self.reopen(now, &rid, key);
        true
    }

    /// Closes the old incarnation and opens a new one for the turn, if there is room for it.
    fn reopen(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.reincarnate(key);
        let deltas = self.change_session(key, |session| {
            session.clear_figures();
            session.full_history.client_may_be_ahead = true;
            std::mem::replace(&mut session.deltas, Deltas::Refused)
        });
        let incarnation = self.sessions[key].incarnation.clone();
        let dp_rank = self.sessions[key].dp_rank;
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        (ticket.had_no_kv, ticket.incarnation) = (false, incarnation.clone());
        self.trim_turn_mut(rid).has_replaced_deltas = deltas == Deltas::Taken;
        // The room that was free when the shim asked may be taken by now.
        let has_room = |target: &u64| {
            matches!(self.row_shortage(dp_rank), Ok(None)) && self.fits_pinned(key, *target)
        };
        let wanted = self.tickets[rid].trim_turn.as_ref().and_then(|turn| turn.reopen_tokens);
        let Some(target) = wanted.filter(has_room) else {
            self.answer_outside(key);
            return self.leave_without_incarnation(now, key);
        };
        self.trim_turn_mut(rid).reopened = true;
        self.change_session(key, |session| session.reserved_tokens = target);
        self.begin_open(key);
        self.write_journal(Record::Turn { incarnation, rid: rid.to_owned() });
    }

    /// Handles the answer to an open that was requested for a turn inside the engine. Returns false
    /// if no turn of the session is inside.
    pub(in super::super) fn finish_reopen(
        &mut self,
        now: Instant,
        key: &SessionKey,
        opened: bool,
    ) -> bool {
        let Some(session) = self.sessions.get(key).filter(|session| session.turns_running > 0)
        else {
            return false;
        };
        match self.rid_with_question(key) {
            Some(rid) if opened && session.phase == Phase::Open => self.answer_inside(&rid, key),
            _ => self.answer_outside(key),
        }
        if !opened && self.sessions[key].phase == Phase::Closing {
            // The old incarnation may be open at the engine; it is being closed under its old id.
            self.reincarnate(key);
            self.change_session(key, Session::clear_figures);
        } else if !opened {
            self.leave_without_incarnation(now, key);
        }
        true
    }

    /// Leaves a session without an incarnation at the engine, after none could be opened. An
    /// incarnation that may be open there is already being closed.
    fn leave_without_incarnation(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].has_auto_retention() {
            self.unpin_without_close(now, key);
        } else {
            self.reincarnate(key);
            self.change_session(key, |session| {
                session.clear_figures();
                session.phase = Phase::Gone(GoneReason::HistoryUnknown);
            });
            self.schedule_deadline(key);
        }
        let (session, generation) = (&self.sessions[key], self.sessions[key].generation);
        let inside = |ticket: &&mut Ticket| {
            ticket.generation == generation && ticket.state == TicketState::Inside
        };
        for ticket in self.tickets.values_mut().filter(inside) {
            ticket.incarnation.clone_from(&session.incarnation);
        }
    }

    /// Returns the id of the session's turn whose question is not answered yet.
    fn rid_with_question(&self, key: &SessionKey) -> Option<String> {
        let asks = |ticket: &Ticket| {
            ticket.key.as_ref() == Some(key)
                && ticket.trim_turn.as_ref().is_some_and(|turn| turn.open_question.is_some())
        };
        self.tickets.iter().find(|(_, ticket)| asks(ticket)).map(|(rid, _)| rid.clone())
    }

    /// Tells the shim to run the turn in its session, if its question is still open.
    fn answer_inside(&mut self, rid: &str, key: &SessionKey) {
        let incarnation = Some(self.sessions[key].incarnation.clone());
        let trim_turn = self.trim_turn_mut(rid);
        let tokens_max = trim_turn.tokens_max;
        if let Some(question) = trim_turn.open_question.take() {
            self.effects.push(Effect::AnswerQuestion { question, incarnation, tokens_max });
        }
    }

    /// Tells the shim not to run the turn in its session, if a question about one is open.
    pub(in super::super) fn answer_outside(&mut self, key: &SessionKey) {
        let Some(rid) = self.rid_with_question(key) else { return };
        if let Some(question) = self.trim_turn_mut(&rid).open_question.take() {
            self.effects.push(Effect::AnswerQuestion {
                question,
                incarnation: None,
                tokens_max: 0,
            });
        }
    }
}
