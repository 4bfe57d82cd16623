//! Replaces a session's incarnation when a full history diverges from the session's history.
//!
//! If a turn can't run in its session as planned, the shim first asks where it may run.

use std::time::Instant;

use contract::id::SessionKey;

use super::{
    AwaitedPlan, DIVERGENCE_STREAK_MAX, Plan, Question, Replaced, Trim, TrimPlan, TurnAwaitingPlan,
};
use crate::session::table::{
    Deltas, Effect, GoneReason, Need, Record, State, Table, TrimRequest,
    tickets::{Inside, Run},
};

/// A diverging prompt that shares less than the history's tokens divided by this counts as an aside
/// (a request for a title, say), and runs beside its session. Only the first of several diverging
/// turns does: if the next diverges too, the client has shortened its history. Where the beginnings
/// of prompts tell, `asides` has decided before.
const ASIDE_DIVISOR: u64 = 4;

impl TrimPlan {
    /// As an aside or a shortened history does.
    fn shares_little(&self) -> bool {
        self.decision == Plan::Diverged
            && self.shared_tokens < self.committed_tokens / ASIDE_DIVISOR
    }
}

impl Table {
    /// Whether the prompt differs only in or after the newest answer, whose text may hide end
    /// tokens. Then the client has changed nothing, so the divergence streak doesn't grow.
    pub(super) fn has_hidden_end_tokens(&self, key: &SessionKey, plan: &TrimPlan) -> bool {
        let answer_start = self.sessions[key].client.hidden_end_tokens_from;
        plan.decision == Plan::Diverged
            && answer_start.is_some_and(|answer_start| plan.shared_tokens >= answer_start)
    }

    /// An [`Effect::AnswerQuestion`] follows. Without one, the shim decides after two seconds.
    pub fn handle_question(&mut self, now: Instant, question: u64, plan: &TrimPlan) {
        let rid = &plan.rid;
        let Some(turn) = self.turn_awaiting_plan(rid) else {
            return self.answer_question(question, None);
        };
        let TurnAwaitingPlan { key, need, awaited, .. } = turn;
        self.record_divergence(&key, plan);
        let need = Need { prompt_tokens: plan.prompt_tokens, is_exact: true, ..need };
        let target_tokens = self.full_history_target_tokens(&key, need);
        let TrimRequest { tokens_max, must_continue } = awaited.request;
        // More room doesn't help a prompt whose KV the session doesn't have.
        let has_other_kv = self.sessions[&key].has_other_kv(need.kv);
        let exceeds_reserved =
            plan.decision == Plan::Refused && plan.prompt_tokens > tokens_max && !has_other_kv;
        let can_fit = self.fits_pinned(&key, target_tokens);
        if !exceeds_reserved && !self.has_hidden_end_tokens(&key, plan) {
            self.change_session(&key, |session| session.client.extend_divergence_streak());
        }
        let session = &self.sessions[&key];
        let has_auto_retention = session.has_auto_retention();
        let streak = session.client.divergence_streak;
        let has_moved = session.prefix_tracker.has_moved();
        let is_aside = has_auto_retention && plan.shares_little() && streak == 1 && !has_moved;
        let is_streak_too_long = has_auto_retention && streak > DIVERGENCE_STREAK_MAX;
        let must_keep_history = must_continue && !exceeds_reserved;
        let may_reopen = can_fit && !is_streak_too_long;
        if let Some(awaited) = self.awaited_plan_mut(rid) {
            awaited.request.tokens_max = tokens_max.max(plan.prompt_tokens);
            let reopen_tokens = may_reopen.then_some(target_tokens);
            awaited.question = Question::Open { number: question, exceeds_reserved, reopen_tokens };
        }
        let session = &self.sessions[&key];
        // A closing session may still run its last turn in more room.
        let may_run_inside = session.state.is_open()
            || (session.state.is_closing() && must_continue && exceeds_reserved);
        if !may_run_inside || is_aside || must_keep_history || (!can_fit && !has_auto_retention) {
            self.answer_run_outside(&key);
        } else if exceeds_reserved && can_fit {
            self.change_session(&key, |session| session.state.reserve(target_tokens));
            self.answer_run_inside(rid, &key);
        } else {
            self.release_before_reopen(now, rid, &key);
        }
        self.process_queue(now);
        self.debug_check();
    }

    /// Gives the KV of the old incarnation to the radix tree first, if possible.
    fn release_before_reopen(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        let had_no_kv = self.tickets[rid].had_no_kv();
        let (holds_kv, dp_rank) = self.change_session(key, |session| {
            session.state.release_reserved();
            if session.history.tokens == 0 || had_no_kv {
                session.state.drop_row();
            }
            (session.state.row().is_some(), session.dp_rank)
        });
        if holds_kv && self.shims.can_demote(dp_rank) {
            return self.release_kv(now, key);
        }
        self.reopen(now, rid, key);
    }

    /// `is_demoted`: the KV is in the radix tree now. Returns false if no turn waits.
    pub(in super::super) fn continue_reopen(
        &mut self,
        now: Instant,
        key: &SessionKey,
        is_demoted: bool,
    ) -> bool {
        let Some(rid) = self.rid_with_question(key) else { return false };
        if is_demoted {
            self.change_session(key, |session| session.state.drop_row());
        }
        self.reopen(now, &rid, key);
        true
    }

    /// Opens a new incarnation if one is wanted and there is room, or lets the turn run beside.
    fn reopen(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.sessions.reincarnate(key);
        let deltas_before = self.change_session(key, |session| {
            session.begin_anew(State::Planned);
            session.client.may_be_ahead = true;
            std::mem::replace(&mut session.client.deltas, Deltas::Refused)
        });
        let incarnation = self.sessions[key].incarnation.clone();
        let dp_rank = self.sessions[key].dp_rank;
        let wanted_tokens =
            self.tickets.inside_mut(rid).and_then(|inside| inside.move_to(&incarnation));
        // The room that was free when the shim asked may be taken by now.
        let has_room = |target_tokens: &u64| {
            matches!(self.row_shortage(dp_rank), Ok(None)) && self.fits_pinned(key, *target_tokens)
        };
        let Some(target_tokens) = wanted_tokens.filter(has_room) else {
            self.answer_run_outside(key);
            return self.leave_without_incarnation(now, key);
        };
        if let Some(awaited) = self.awaited_plan_mut(rid) {
            let has_deltas = deltas_before == Deltas::Taken;
            awaited.replaced =
                Some(if has_deltas { Replaced::Deltas } else { Replaced::FullHistories });
        }
        self.begin_open(key, target_tokens);
        self.effects.write_journal(Record::Turn { incarnation, rid: rid.to_owned() });
    }

    /// For an open that a turn inside asked for. Returns false if no turn of the session is inside.
    pub(in super::super) fn finish_reopen(
        &mut self,
        now: Instant,
        key: &SessionKey,
        is_open: bool,
    ) -> bool {
        let Some(session) = self.sessions.get(key).filter(|session| session.turns.running > 0)
        else {
            return false;
        };
        match self.rid_with_question(key) {
            Some(rid) if is_open && session.state.is_open() => self.answer_run_inside(&rid, key),
            _ => self.answer_run_outside(key),
        }
        if !is_open && self.sessions[key].state.is_closing() {
            // The incarnation may be open all the same. It is being closed under its old id.
            self.sessions.reincarnate(key);
            self.change_session(key, |session| session.lose(GoneReason::HistoryUnknown));
        } else if !is_open {
            self.leave_without_incarnation(now, key);
        }
        true
    }

    /// The caller has begun the close of any incarnation that may be open at the engine.
    fn leave_without_incarnation(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].has_auto_retention() {
            self.unpin_without_close(now, key);
        } else {
            self.sessions.reincarnate(key);
            self.change_session(key, |session| {
                session.lose(GoneReason::HistoryUnknown);
            });
        }
        let session = &self.sessions[key];
        for inside in self.tickets.inside_of_mut(session.generation) {
            inside.incarnation = Some(session.incarnation.clone());
        }
    }

    fn rid_with_question(&self, key: &SessionKey) -> Option<String> {
        let has_question = |inside: &Inside| {
            matches!(
                inside.trim(),
                Some(Trim::Awaited(AwaitedPlan { question: Question::Open { .. }, .. }))
            )
        };
        let mut turns = self.tickets.inside();
        let asked =
            turns.find(|(_, ticket, inside)| ticket.key() == Some(key) && has_question(inside));
        asked.map(|(rid, ..)| rid.to_owned())
    }

    fn answer_run_inside(&mut self, rid: &str, key: &SessionKey) {
        let Some(awaited) = self.awaited_plan_mut(rid) else { return };
        let tokens_max = awaited.request.tokens_max;
        if let Some(question) = awaited.close_question() {
            let incarnation = self.sessions[key].incarnation.clone();
            self.answer_question(question, Some((incarnation, tokens_max)));
        }
    }

    /// Does nothing if no question about a turn of the session is open.
    pub(in super::super) fn answer_run_outside(&mut self, key: &SessionKey) {
        let Some(rid) = self.rid_with_question(key) else { return };
        let question = self.awaited_plan_mut(&rid).and_then(AwaitedPlan::close_question);
        if let Some(question) = question {
            self.answer_question(question, None);
        }
    }

    fn answer_question(&mut self, question: u64, run_in: Option<(String, u64)>) {
        let (incarnation, tokens_max) = run_in.unzip();
        let tokens_max = tokens_max.unwrap_or(0);
        self.effects.push(Effect::AnswerQuestion { question, incarnation, tokens_max });
    }
}

impl Inside {
    /// Returns the tokens to reserve if the turn is to run in the new incarnation.
    fn move_to(&mut self, incarnation: &str) -> Option<u64> {
        self.incarnation = Some(incarnation.to_owned());
        let Run::Pinned { had_no_kv, trim: Trim::Awaited(awaited) } = &mut self.run else {
            return None;
        };
        *had_no_kv = false;
        match awaited.question {
            Question::Open { reopen_tokens, .. } => reopen_tokens,
            Question::NotAsked | Question::Answered { .. } => None,
        }
    }
}
