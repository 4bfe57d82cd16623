//! Whole histories on pinned sessions. A client that sends everything each time gets a session's
//! own KV all the same, because the shim, after the engine's tokenizer, takes off what the session
//! has. Here is which sessions are pinned for that without being asked, how much room their turns
//! get, and what becomes of a turn whose prompt isn't what the session has.
//!
//! A marked turn ([`super::TurnSession::trim`]) is inside as a pinned one until the shim
//! has told its plan. It then runs in the session or beside it, on the radix tree. Where another
//! incarnation would help the shim asks, and waits for an [`Effect::Run`]: the old one's KV goes to
//! the tree first, so that what still fits is found there.

mod continued;
mod plan;
mod room;
mod swap;

use std::time::{Duration, Instant};

use proto::{id::SessionKey, load::Retention};

pub use self::plan::{Became, Plan, Planned};
use super::{
    Deltas, Effect, Expected, Guard, Need, Outcome, Phase, Ran, Session, Stage, Table, Ticket,
    Trim, Usage,
    reclaim::{Shortage, Taker},
};

/// A session of which more turns in a row go astray is no longer pinned without being asked: its
/// client edits what it sends (drops reasoning, say) or can't be trimmed, and a pinned turn would
/// cost more than one on the tree.
const ASTRAY_MAX: u32 = 2;
/// One that gave its pin up, or could not have it, is not pinned again before: a pin's coming and
/// going costs the engine two calls.
const PIN_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// A turn that holds a whole history, inside the engine.
#[derive(Debug)]
pub(super) struct Marked {
    /// Room was kept for so many tokens of prompt.
    tokens_max: u64,
    /// It must continue its session's history, or it doesn't run.
    must_continue: bool,
    /// The shim has asked for more room than was kept for it.
    too_large: bool,
    /// It replaced a history that clients append to.
    replaced_deltas: bool,
    /// The shim has refused it: it is in no session, and changes none.
    unfit: bool,
    /// The shim's question, while it waits for an answer.
    question: Option<u64>,
    /// It has asked.
    asked: bool,
    /// The session is to be opened anew for it, with room for so many tokens.
    reopens: Option<u64>,
    /// It is the first turn of an incarnation that took another's place.
    reopened: bool,
    /// What the engine must count of its prompt, once it is planned.
    pub(super) prompt_tokens: Option<u64>,
    /// The history that the engine has with it, where the shim told.
    committed_tokens: Option<u64>,
}

impl Ticket {
    /// It is compared with what its session has.
    pub(super) fn is_marked(&self) -> bool {
        self.marked.is_some()
    }

    fn awaits_plan(&self) -> bool {
        self.pinned && self.marked.as_ref().is_some_and(|one| one.prompt_tokens.is_none())
    }

    /// Of a planned prompt, what the engine computes where so many tokens are resident.
    pub(super) fn to_compute(&self, resident_tokens: u64) -> Option<u64> {
        let prompt_tokens = self.marked.as_ref()?.prompt_tokens?;
        Some(prompt_tokens.saturating_sub(resident_tokens))
    }

    /// It holds only what is new.
    pub(super) fn is_delta(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.delta)
    }
}

impl Table {
    /// The shim trims whole histories from now on, or no more.
    pub fn trims(&mut self, now: Instant, trims: bool) {
        self.trims = trims;
        self.pump(now);
        self.debug_check();
    }

    /// How the session's turns name it where it isn't pinned.
    pub(super) fn unpinned(&self, session: &Session) -> Retention {
        match session.retention {
            Retention::Pinned if self.engine.retentions.contains(&Retention::Tagged) => {
                Retention::Tagged
            }
            Retention::Pinned => Retention::None,
            other => other,
        }
    }

    /// How its turns run outside of it.
    pub(super) fn unpinned_ran(&self, key: &SessionKey) -> Ran {
        match self.unpinned(&self.sessions[key]) {
            Retention::Tagged => Ran::Tagged,
            _ => Ran::Untagged,
        }
    }

    /// Makes a pinned session of one that is not; its next turn opens it.
    pub(super) fn pin(&mut self, now: Instant, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.reincarnate(key);
        self.change(key, |session| {
            session.retention = Retention::Pinned;
            session.phase = Phase::Planned;
            session.emptied();
        });
    }

    /// Makes a session that nobody asked to pin what it was before.
    pub(super) fn unpin(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].phase != Phase::Planned {
            self.close_at_engine(now, key);
        }
        self.unpin_closed(now, key);
    }

    /// The same, where nothing of it is at the engine or that is closed already.
    pub(super) fn unpin_closed(&mut self, now: Instant, key: &SessionKey) {
        self.reincarnate(key);
        let retention = self.unpinned(&self.sessions[key]);
        self.change(key, |session| {
            session.retention = retention;
            session.phase = Phase::Open;
            session.emptied();
            session.whole.pin_after = Some(now + PIN_AGAIN_AFTER);
        });
        self.watch(key);
    }

    /// The client says how a session is to be kept that the agent decided on so far.
    pub(super) fn decide(&mut self, now: Instant, key: &SessionKey, wanted: Retention) {
        let session = &self.sessions[key];
        let pinned = session.retention == Retention::Pinned;
        let at_rest = matches!(session.phase, Phase::Open | Phase::Demoted);
        if pinned && wanted != Retention::Pinned && at_rest {
            self.unpin(now, key);
        } else if pinned != (wanted == Retention::Pinned) {
            return;
        }
        self.change(key, |session| {
            session.wanted = Some(wanted);
            session.exclusive |= session.retention == Retention::Pinned;
        });
    }

    /// Is a pin of no use to this session? Nobody trims, or what it sends can't be trimmed.
    pub(super) fn is_useless_pin(&self, key: &SessionKey) -> bool {
        !self.trims || self.sessions[key].whole.astray > ASTRAY_MAX
    }

    /// Nobody asked to pin it, and nothing of it runs.
    pub(super) fn is_idle_auto(&self, session: &Session) -> bool {
        let pinned = session.is_auto() && session.retention == Retention::Pinned && session.row;
        let rests = pinned && session.phase == Phase::Open && session.can_expire();
        rests && self.books[session.dp_rank as usize].demotes()
    }

    /// A session that has lost everything goes on with a whole history.
    pub(super) fn begin_anew(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].is_auto() {
            return self.unpin_closed(now, key);
        }
        self.reincarnate(key);
        self.change(key, |session| {
            session.phase = Phase::Planned;
            session.deltas = Deltas::Refused;
            session.whole.anew = session.turns > 0;
            session.whole.behind |= session.turns > 0;
        });
    }

    /// Room for a turn can't be had: one that nobody asked to pin gives way. True: its KV is on its
    /// way to the tree first.
    pub(super) fn gives_way(&mut self, now: Instant, key: &SessionKey) -> bool {
        let session = &self.sessions[key];
        let demotes = self.books[session.dp_rank as usize].demotes();
        if session.row && session.history_tokens > 0 && demotes {
            self.take_kv(now, key);
            return true;
        }
        self.unpin(now, key);
        false
    }

    /// Marks a turn on its way in; answers with what the shim is told.
    pub(super) fn mark(&mut self, rid: &str, key: &SessionKey) -> Trim {
        let tokens_max = self.whole_tokens(key, self.tickets[rid].need);
        let opens = self.tickets[rid].is_opening();
        let guarded = self.rules.guards.hold(Guard::FullHistoryContinues);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let reopened = std::mem::take(&mut session.whole.anew);
        let must_continue = session.deltas == Deltas::Taken && !opens && guarded;
        let marked = Marked {
            tokens_max,
            must_continue,
            too_large: false,
            replaced_deltas: false,
            unfit: false,
            question: None,
            asked: false,
            reopens: None,
            reopened,
            prompt_tokens: None,
            committed_tokens: None,
        };
        self.tickets.get_mut(rid).expect("the caller has it").marked = Some(marked);
        Trim { tokens_max, must_continue }
    }

    /// The session of a marked turn that is inside, and of which no plan was told yet.
    fn marked_session(&self, rid: &str) -> Option<SessionKey> {
        let ticket = self.tickets.get(rid)?;
        let inside = ticket.stage == Stage::Inside && ticket.awaits_plan();
        let key = ticket.key.clone().filter(|_| inside)?;
        let same = self.sessions.get(&key).is_some_and(|session| session.born == ticket.born);
        same.then_some(key)
    }

    fn marked(&mut self, rid: &str) -> &mut Marked {
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.marked.as_mut().expect("the caller has seen it")
    }

    /// The shim's last word on a marked turn, before the engine gets it. Answers with what became
    /// of the turn, and with the tokens that need not be computed again because of it; with nothing
    /// where that was said before.
    pub fn planned(&mut self, now: Instant, planned: &Planned) -> Option<(Became, u64)> {
        let Some(key) = self.marked_session(&planned.rid) else {
            let known = self.tickets.get(&planned.rid).is_some_and(|ticket| !ticket.awaits_plan());
            return (!known).then_some((Became::Gone, 0));
        };
        let rid = &planned.rid;
        self.marked(rid).question = None;
        let mine = self.sessions[&key].incarnation == planned.incarnation;
        let became = match planned.plan {
            // What it goes on from is closed or lost meanwhile; its end will tell.
            Plan::Trimmed | Plan::Healed if !mine => (Became::Gone, 0),
            Plan::Trimmed => self.runs_inside(rid, &key, planned, Became::Trimmed),
            Plan::Healed => self.runs_inside(rid, &key, planned, Became::Healed),
            Plan::Diverged | Plan::Refused if self.marked(rid).must_continue => {
                self.not_continued(&key, rid, planned)
            }
            Plan::Diverged => self.runs_beside(now, &key, planned, Became::Diverged),
            Plan::Refused => self.runs_beside(now, &key, planned, Became::Refused),
        };
        self.pump(now);
        self.debug_check();
        Some(became)
    }

    fn runs_inside(
        &mut self,
        rid: &str,
        key: &SessionKey,
        planned: &Planned,
        became: Became,
    ) -> (Became, u64) {
        let prompt_tokens = planned.committed.saturating_add(planned.sent);
        let marked = self.marked(rid);
        marked.prompt_tokens = Some(prompt_tokens);
        let (ran, became) =
            if marked.reopened { (Ran::Reopened, Became::Reopened) } else { (Ran::Pinned, became) };
        let ticket = &self.tickets[rid];
        let (need, from_nothing) = (ticket.need, ticket.from_nothing);
        let answer = self.answer_tokens(key, need);
        let target = prompt_tokens.saturating_add(answer).min(self.engine.context_tokens);
        self.change(key, |session| {
            // What was kept for a bound is given back now that the figure is known.
            session.reserved_tokens = session.reserved_tokens.min(target);
            if planned.committed > 0 {
                session.whole.astray = 0;
                session.prefix.continued();
            }
        });
        self.history_begins_with(rid, key);
        self.effects.push(Effect::Ran { rid: rid.to_owned(), ran });
        (became, if from_nothing { 0 } else { planned.committed })
    }

    fn runs_beside(
        &mut self,
        now: Instant,
        key: &SessionKey,
        planned: &Planned,
        became: Became,
    ) -> (Became, u64) {
        let rid = &planned.rid;
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.pinned = false;
        let asked = ticket.marked.as_ref().is_some_and(|marked| marked.asked);
        let (dp_rank, from_nothing) = (ticket.dp_rank, ticket.from_nothing);
        let need = Need { prompt_tokens: planned.prompt, exact: true, ..ticket.need };
        self.book(dp_rank).turned_plain();
        let ran = self.unpinned_ran(key);
        self.effects.push(Effect::Ran { rid: rid.clone(), ran });
        if self.sessions[key].retention == Retention::Pinned {
            self.undo(key, from_nothing);
            let counts = !asked && !self.hides_ends(key, planned);
            self.change(key, |session| session.whole.astray += u32::from(counts));
        }
        self.turned_large(now, rid, key, need);
        (became, 0)
    }

    /// A plain turn is in the engine that was let in as a pinned one: where pinned sessions hold
    /// what it needs it would wait there for ever, so they give it, its own first.
    fn turned_large(&mut self, now: Instant, rid: &str, key: &SessionKey, need: Need) {
        let dp_rank = self.sessions[key].dp_rank;
        let Ok(&capacity) = self.capacity(dp_rank) else { return };
        let tokens = self.wanted_by_engine(need).min(capacity.pool_tokens);
        if tokens <= capacity.pool_tokens - capacity.pin_tokens_max {
            return;
        }
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.large_tokens = Some(tokens);
        self.book(dp_rank).turned_large(tokens);
        let mut over = self.over(dp_rank, tokens, capacity.pool_tokens);
        let session = &self.sessions[key];
        let holds = session.retention == Retention::Pinned && session.row;
        if over > 0 && holds && session.phase == Phase::Open {
            over = over.saturating_sub(self.pages_of(session.resident_tokens));
            self.take_kv(now, key);
        }
        if over > 0 {
            let held = self.totals(dp_rank).pinned_tokens;
            let shortage = Shortage::Tokens { short: over, held, max: held - over.min(held) };
            self.reclaim(now, dp_rank, &shortage, Taker::Anyone);
        }
    }

    fn over(&self, dp_rank: u32, tokens: u64, pool_tokens: u64) -> u64 {
        (self.totals(dp_rank).pinned_tokens + tokens).saturating_sub(pool_tokens)
    }

    /// A turn that was let in did nothing to its session.
    pub(super) fn undo(&mut self, key: &SessionKey, from_nothing: bool) {
        self.change(key, |session| {
            session.reserved_tokens = 0;
            if from_nothing && session.history_tokens > 0 {
                // What was in the tree before it still is.
                session.row = false;
                if session.phase == Phase::Open {
                    session.phase = Phase::Demoted;
                }
            }
        });
    }

    /// The engine has made a session's turn history; `retracted`: to go on from there.
    pub fn committed(&mut self, incarnation: &str, history_tokens: u64, retracted: bool) {
        let mut tickets = self.tickets.values_mut();
        let found = tickets.find(|ticket| ticket.pinned && ticket.incarnation == incarnation);
        if let Some(marked) = found.and_then(|ticket| ticket.marked.as_mut()) {
            marked.committed_tokens = Some(history_tokens).filter(|_| !retracted);
        }
    }

    /// Takes from a turn's end what its prompt and its answer were. Routes that don't report usage
    /// leave that to the shim.
    pub(super) fn measured(
        &mut self,
        key: &SessionKey,
        ticket: &Ticket,
        outcome: Outcome,
    ) -> Outcome {
        let told = ticket.marked.as_ref().and_then(|marked| {
            let prompt_tokens = marked.prompt_tokens?;
            let completion_tokens = marked.committed_tokens?.checked_sub(prompt_tokens)?;
            Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() })
        });
        let outcome = match outcome {
            Outcome::Finished(None) => Outcome::Finished(told),
            Outcome::Unheard(None) => Outcome::Unheard(told),
            outcome => outcome,
        };
        // What ran beside a pinned session is another prompt than its next one, as a rule.
        let beside = self.sessions[key].retention == Retention::Pinned && !ticket.pinned;
        let whole = ticket.claim.as_ref().is_some_and(|claim| !claim.delta) && !beside;
        if let (true, Outcome::Finished(Some(usage)) | Outcome::Unheard(Some(usage))) =
            (whole, outcome)
        {
            let tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
            let measured = Some((ticket.need.prompt_tokens, tokens));
            self.change(key, |session| {
                session.whole.measured = measured;
                let longest = session.whole.answer_tokens_max.max(usage.completion_tokens);
                session.whole.answer_tokens_max = longest;
            });
        }
        outcome
    }

    /// The end of a marked turn that leaves doubt: nobody told where it ran, or nobody heard how it
    /// ended. The shim compares whatever comes next with what the engine has, so the engine's own
    /// account is taken as it is; only what is new must not be appended to it. False: no doubt.
    pub(super) fn settle_marked(
        &mut self,
        now: Instant,
        key: &SessionKey,
        (rid, ticket): (&str, &Ticket),
        outcome: Outcome,
    ) -> bool {
        let planned = ticket.marked.as_ref().is_some_and(|one| one.prompt_tokens.is_some());
        let clear = match outcome {
            Outcome::Finished(usage) => planned && usage.is_some(),
            // Most routes don't tell a turn that was stopped from one that waited in the engine's
            // queue, where its session keeps row and KV.
            Outcome::Aborted => false,
            // What the engine was to run it may have run, whatever the route made of its answer.
            Outcome::Refused => !planned,
            Outcome::Unheard(_) | Outcome::Partial | Outcome::Lost => false,
        };
        let guarded = planned || self.rules.guards.hold(Guard::PlanTold);
        if ticket.marked.is_none() || clear || !guarded {
            return false;
        }
        let open = self.sessions[key].phase == Phase::Open;
        let may_run = matches!(outcome, Outcome::Refused | Outcome::Partial | Outcome::Lost);
        let ran = matches!(outcome, Outcome::Finished(_) | Outcome::Unheard(_));
        self.change(key, |session| {
            session.turns += u64::from(ran);
            session.whole.behind = true;
            if may_run {
                session.lost_rid = Some(rid.to_owned());
            }
        });
        if open {
            self.doubt(now, key, Some(Expected::AtLeast(0)));
        }
        true
    }
}
