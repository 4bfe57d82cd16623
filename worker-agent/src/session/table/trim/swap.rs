//! A whole history that isn't what its session has: the shim asks, the session's KV goes to the
//! tree, and another incarnation takes the turn, or none does.

use std::time::Instant;

use proto::id::SessionKey;

use super::{ASTRAY_MAX, Plan, Planned};
use crate::session::table::{
    Deltas, Effect, Need, Phase, Record, Session, Stage, Table, Ticket, Why,
};

/// A prompt that has less of the session than this part is beside the matter, if the next one goes
/// on from it; if not, its history was made short.
const ASIDE_DIVISOR: u64 = 4;

impl Planned {
    /// Little of what the session has: a title for the conversation, say, or a history made short.
    fn is_aside(&self) -> bool {
        self.plan == Plan::Diverged && self.at < self.committed / ASIDE_DIVISOR
    }
}

impl Table {
    /// Whether a history differs only because the last answer holds end tokens that its text
    /// doesn't show. The session is opened again with the history, and keeps its pin.
    pub(super) fn hides_ends(&self, key: &SessionKey, planned: &Planned) -> bool {
        let from = self.sessions[key].whole.hides_ends_from;
        planned.plan == Plan::Diverged && from.is_some_and(|from| planned.at >= from)
    }

    /// The shim asks what is to become of a turn that can't run in its session as it is. An
    /// [`Effect::Run`] follows; without one the shim goes on by itself after two seconds.
    pub fn asked(&mut self, now: Instant, question: u64, planned: &Planned) {
        let rid = &planned.rid;
        let Some(key) = self.marked_session(rid) else {
            self.effects.push(Effect::Run { question, incarnation: None, tokens_max: 0 });
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
        // The last turn of a session is inside while the session waits to close.
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

    /// Gives what the session has to the tree, then takes another incarnation or none.
    fn give_up(&mut self, now: Instant, rid: &str, key: &SessionKey) {
        let from_nothing = self.tickets[rid].from_nothing;
        let (holds, dp_rank) = self.change(key, |session| {
            session.reserved_tokens = 0;
            session.row &= session.history_tokens > 0 && !from_nothing;
            (session.row, session.dp_rank as usize)
        });
        if holds && self.books[dp_rank].demotes() {
            return self.take_kv(now, key);
        }
        self.swap(now, rid, key);
    }

    /// The session's KV has gone to the tree, or can't; true where a turn waits for that.
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
        // What was free when it asked may be others' by now.
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

    /// An open's answer, where a turn of the session is inside already: true where that is so.
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
            // What may be open there is being closed under the id that it had.
            self.reincarnate(key);
            self.change(key, Session::emptied);
        } else if !opened {
            self.not_reopened(now, key);
        }
        true
    }

    /// Nothing of it is at the engine; what may be is being closed.
    fn not_reopened(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].is_auto() {
            self.unpin_closed(now, key);
        } else {
            self.reincarnate(key);
            self.change(key, |session| {
                session.emptied();
                session.phase = Phase::Gone(Why::HistoryUnknown);
            });
            self.watch(key);
        }
        let (session, born) = (&self.sessions[key], self.sessions[key].born);
        let inside = |ticket: &&mut Ticket| ticket.born == born && ticket.stage == Stage::Inside;
        for ticket in self.tickets.values_mut().filter(inside) {
            ticket.incarnation.clone_from(&session.incarnation);
        }
    }

    /// The turn of this session that waits for an answer.
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
            self.effects.push(Effect::Run { question, incarnation, tokens_max });
        }
    }

    /// Whoever asks is told to go on without the session.
    pub(in super::super) fn runs_as_it_came(&mut self, key: &SessionKey) {
        let Some(rid) = self.asking(key) else { return };
        if let Some(question) = self.marked(&rid).question.take() {
            self.effects.push(Effect::Run { question, incarnation: None, tokens_max: 0 });
        }
    }
}
