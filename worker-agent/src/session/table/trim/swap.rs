//! Full histories that diverge from their session, and the swap to a new incarnation.
//!
//! The shim asks first. The old incarnation's KV then goes to the radix tree, and a new incarnation
//! takes the turn, or none does.

use std::time::Instant;

use proto::id::SessionKey;

use super::{ASTRAY_MAX, Plan, TrimPlan};
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
        self.plan == Plan::Diverged && self.at < self.committed / ASIDE_DIVISOR
    }
}

impl Table {
    /// Whether the prompt differs only because the last answer holds end tokens that its text
    /// doesn't show. Such a session is opened again with the new history and keeps its pin.
    pub(super) fn hides_ends(&self, key: &SessionKey, planned: &TrimPlan) -> bool {
        let from = self.sessions[key].whole.hides_ends_from;
        planned.plan == Plan::Diverged && from.is_some_and(|from| planned.at >= from)
    }

    /// Handles the shim's question about a turn that can't run in its session as planned. An
    /// [`Effect::AnswerQuestion`] with the answer follows. Without an answer, the shim decides by itself after
    /// two seconds.
    pub fn handle_question(&mut self, now: Instant, question: u64, planned: &TrimPlan) {
        let rid = &planned.rid;
        let Some(key) = self.marked_session(rid) else {
            self.effects.push(Effect::AnswerQuestion {
                question,
                incarnation: None,
                tokens_max: 0,
            });
            return;
        };
        self.diverged_at(&key, planned);
        let need = Need { prompt_tokens: planned.prompt, exact: true, ..self.tickets[rid].need };
        let target = self.whole_target(&key, need);
        let marked = self.marked(rid);
        (marked.question, marked.asked) = (Some(question), true);
        let too_large = planned.plan == Plan::Refused && planned.prompt > marked.tokens_max;
        let must_continue = marked.must_continue;
        marked.tokens_max = marked.tokens_max.max(planned.prompt);
        let fits = self.fits(&key, target);
        self.marked(rid).too_large = too_large;
        if !too_large && !self.hides_ends(&key, planned) {
            self.change(&key, |session| session.whole.astray += 1);
        }
        let session = &self.sessions[&key];
        let aside = session.is_auto() && planned.is_aside() && session.whole.astray == 1;
        let tired = session.is_auto() && session.whole.astray > ASTRAY_MAX;
        let stays = must_continue && !too_large;
        // A closing session may still run its last turn in more room.
        let runs = session.phase == Phase::Open
            || (session.phase == Phase::Closing && must_continue && too_large);
        if !runs || aside || stays || (!fits && !session.is_auto()) {
            self.runs_as_it_came(&key);
        } else if too_large && fits {
            self.change(&key, |session| session.reserved_tokens = target);
            self.runs_in(rid, &key);
        } else {
            self.marked(rid).reopens = (fits && !tired).then_some(target);
            self.give_up(now, rid, &key);
        }
        self.pump(now);
        self.debug_check();
    }

    /// Gives the session's KV to the radix tree, then swaps the incarnation.
    fn give_up(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        let from_nothing = self.tickets[rid].from_nothing;
        let (holds, dp_rank) = self.change(key, |session| {
            session.reserved_tokens = 0;
            session.row &= session.history_tokens > 0 && !from_nothing;
            (session.row, session.dp_rank as usize)
        });
        if holds && self.accounts[dp_rank].demotes() {
            return self.take_kv(now, key);
        }
        self.swap(now, rid, key);
    }

    /// Continues the swap after the demotion of the old incarnation. `done`: its KV is in the radix
    /// tree now. Returns false if no turn of the session waits for that.
    pub(in super::super) fn swaps(&mut self, now: Instant, key: &SessionKey, done: bool) -> bool {
        let Some(rid) = self.asking(key) else { return false };
        if done {
            self.change(key, |session| {
                session.row = false;
                session.resident_tokens = 0;
            });
        }
        self.swap(now, &rid, key);
        true
    }

    fn swap(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.reincarnate(key);
        let deltas = self.change(key, |session| {
            session.emptied();
            session.whole.behind = true;
            std::mem::replace(&mut session.deltas, Deltas::Refused)
        });
        let incarnation = self.sessions[key].incarnation.clone();
        let dp_rank = self.sessions[key].dp_rank;
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        (ticket.from_nothing, ticket.incarnation) = (false, incarnation.clone());
        self.marked(rid).replaced_deltas = deltas == Deltas::Taken;
        // The room that was free when the shim asked may be taken by now.
        let room =
            |target: &u64| matches!(self.rows_short(dp_rank), Ok(None)) && self.fits(key, *target);
        let reopens = self.tickets[rid].marked.as_ref().and_then(|marked| marked.reopens);
        let Some(target) = reopens.filter(room) else {
            self.runs_as_it_came(key);
            return self.not_reopened(now, key);
        };
        self.marked(rid).reopened = true;
        self.change(key, |session| session.reserved_tokens = target);
        self.begin_open(key);
        self.journal(Record::Turn { incarnation, rid: rid.to_owned() });
    }

    /// Handles the answer to an open that was requested for a turn inside the engine. Returns false
    /// if no turn of the session is inside.
    pub(in super::super) fn reopened(
        &mut self,
        now: Instant,
        key: &SessionKey,
        opened: bool,
    ) -> bool {
        let Some(session) = self.sessions.get(key).filter(|session| session.running > 0) else {
            return false;
        };
        match self.asking(key) {
            Some(rid) if opened && session.phase == Phase::Open => self.runs_in(&rid, key),
            _ => self.runs_as_it_came(key),
        }
        if !opened && self.sessions[key].phase == Phase::Closing {
            // The old incarnation may be open at the engine; it is being closed under its old id.
            self.reincarnate(key);
            self.change(key, Session::emptied);
        } else if !opened {
            self.not_reopened(now, key);
        }
        true
    }

    /// Leaves a session without an incarnation at the engine, after none could be opened. An
    /// incarnation that may be open there is already being closed.
    fn not_reopened(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].is_auto() {
            self.unpin_closed(now, key);
        } else {
            self.reincarnate(key);
            self.change(key, |session| {
                session.emptied();
                session.phase = Phase::Gone(GoneReason::HistoryUnknown);
            });
            self.watch(key);
        }
        let (session, born) = (&self.sessions[key], self.sessions[key].born);
        let inside =
            |ticket: &&mut Ticket| ticket.born == born && ticket.stage == TicketState::Inside;
        for ticket in self.tickets.values_mut().filter(inside) {
            ticket.incarnation.clone_from(&session.incarnation);
        }
    }

    /// Returns the id of the session's turn whose question is not answered yet.
    fn asking(&self, key: &SessionKey) -> Option<String> {
        let asks = |ticket: &Ticket| {
            ticket.key.as_ref() == Some(key)
                && ticket.marked.as_ref().is_some_and(|one| one.question.is_some())
        };
        self.tickets.iter().find(|(_, ticket)| asks(ticket)).map(|(rid, _)| rid.clone())
    }

    fn runs_in(&mut self, rid: &str, key: &SessionKey) {
        let incarnation = Some(self.sessions[key].incarnation.clone());
        let marked = self.marked(rid);
        let tokens_max = marked.tokens_max;
        if let Some(question) = marked.question.take() {
            self.effects.push(Effect::AnswerQuestion { question, incarnation, tokens_max });
        }
    }

    /// Tells the shim not to run the turn in its session, if a question about one is open.
    pub(in super::super) fn runs_as_it_came(&mut self, key: &SessionKey) {
        let Some(rid) = self.asking(key) else { return };
        if let Some(question) = self.marked(&rid).question.take() {
            self.effects.push(Effect::AnswerQuestion {
                question,
                incarnation: None,
                tokens_max: 0,
            });
        }
    }
}
