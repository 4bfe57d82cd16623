//! Full histories on pinned sessions.
//!
//! A client that sends its full history with each turn can still use a pinned session's KV: after
//! the engine's tokenizer, the shim removes the tokens that the session already has. This module
//! decides which sessions the agent pins for that on its own, how much room their turns get, and
//! what happens to a turn whose prompt doesn't continue the session's history.
//!
//! A marked turn (see [`super::TurnSession::trim`]) counts as a turn of a pinned session until the
//! shim has reported its plan. The turn then runs in the session, or beside it on the radix tree.
//! If a new incarnation could help, the shim asks and waits for an [`Effect::AnswerQuestion`]. The old
//! incarnation's KV goes to the radix tree first, so that the turn finds there what it still
//! shares.

mod continued;
mod plan;
mod room;
mod swap;

use std::time::{Duration, Instant};

use proto::{id::SessionKey, load::Retention};

pub use self::plan::{TrimOutcome, TrimPlan};
use super::{
    Deltas, Effect, ExpectedHistory, Guard, Need, Outcome, Phase, RunMode, Session, Table, Ticket,
    TicketState, TrimRequest, Usage,
    reclaim::{Requester, Shortage},
};
use crate::shim::trim::Plan;

/// The longest divergence streak after which the agent still pins a session on its own. In a longer
/// streak, the client edits what it sends (drops reasoning, say) or its prompts can't be trimmed,
/// and a pinned turn would cost more than one on the radix tree.
const ASTRAY_MAX: u32 = 2;
/// The agent does not pin a session again for this long after the session lost its pin or found no
/// room for it. Each pin costs the engine an open and a close.
const PIN_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// A turn inside the engine that holds a full history, which the shim compares with the session's.
#[derive(Debug)]
pub(super) struct TrimTurn {
    /// Prompt tokens for which room is reserved.
    tokens_max: u64,
    /// Whether the turn may run only if its prompt continues the session's history.
    must_continue: bool,
    /// Whether the shim asked for more prompt tokens than are reserved.
    too_large: bool,
    /// Whether the turn replaced a history that clients append to.
    replaced_deltas: bool,
    /// Whether the shim refused the turn. A refused turn does not run and changes no session.
    unfit: bool,
    /// Number of the shim's question that is not answered yet.
    question: Option<u64>,
    /// Whether the shim has asked a question about the turn.
    asked: bool,
    /// Set if a new incarnation is to be opened for the turn: the tokens to reserve in it.
    reopens: Option<u64>,
    /// Whether the turn is the first of an incarnation that replaced another one.
    reopened: bool,
    /// The prompt tokens that the engine must report for the turn. `None` until the shim has
    /// reported a plan that runs in the session.
    pub(super) prompt_tokens: Option<u64>,
    /// Tokens of the session's history after the turn, as the shim reported them.
    committed_tokens: Option<u64>,
}

impl Ticket {
    /// Whether the turn holds a full history, which the shim compares with the session's.
    pub(super) fn is_marked(&self) -> bool {
        self.marked.is_some()
    }

    fn awaits_plan(&self) -> bool {
        self.pinned && self.marked.as_ref().is_some_and(|one| one.prompt_tokens.is_none())
    }

    /// Returns how many tokens of a planned prompt the engine computes if `resident_tokens` are
    /// resident. `None` if the prompt isn't planned.
    pub(super) fn to_compute(&self, resident_tokens: u64) -> Option<u64> {
        let prompt_tokens = self.marked.as_ref()?.prompt_tokens?;
        Some(prompt_tokens.saturating_sub(resident_tokens))
    }

    /// Whether the turn holds only new tokens.
    pub(super) fn is_delta(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.delta)
    }
}

impl Table {
    /// Sets whether the shim trims full histories from now on.
    pub fn set_trimming(&mut self, now: Instant, trims: bool) {
        self.trims = trims;
        self.pump(now);
        self.debug_check();
    }

    /// Returns the retention under which the session's turns run while it is not pinned.
    pub(super) fn unpinned(&self, session: &Session) -> Retention {
        match session.retention {
            Retention::Pinned if self.engine.retentions.contains(&Retention::Tagged) => {
                Retention::Tagged
            }
            Retention::Pinned => Retention::None,
            other => other,
        }
    }

    /// Returns how the session's turns run outside its pinned KV.
    pub(super) fn unpinned_ran(&self, key: &SessionKey) -> RunMode {
        match self.unpinned(&self.sessions[key]) {
            Retention::Tagged => RunMode::Tagged,
            _ => RunMode::Untagged,
        }
    }

    /// Turns an unpinned session into a pinned one. Its next turn opens it at the engine.
    pub(super) fn pin(&mut self, now: Instant, key: &SessionKey) {
        self.close_at_engine(now, key);
        self.reincarnate(key);
        self.change(key, |session| {
            session.retention = Retention::Pinned;
            session.phase = Phase::Planned;
            session.emptied();
        });
    }

    /// Takes the pin from a session that the agent pinned on its own, and closes it at the engine.
    pub(super) fn unpin(&mut self, now: Instant, key: &SessionKey) {
        if self.sessions[key].phase != Phase::Planned {
            self.close_at_engine(now, key);
        }
        self.unpin_closed(now, key);
    }

    /// Takes the pin from a session of which nothing is open at the engine, or whose close has
    /// begun.
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

    /// Applies the retention that a client asks for to a session whose retention the agent chose.
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

    /// Whether a pin is useless to the session: the shim doesn't trim, or the divergence streak is
    /// too long.
    pub(super) fn is_useless_pin(&self, key: &SessionKey) -> bool {
        !self.trims || self.sessions[key].whole.astray > ASTRAY_MAX
    }

    /// Whether the agent pinned the session on its own, no turn of it runs or waits, and the shim
    /// can demote it.
    pub(super) fn is_idle_auto(&self, session: &Session) -> bool {
        let pinned = session.is_auto() && session.retention == Retention::Pinned && session.row;
        let rests = pinned && session.phase == Phase::Open && session.can_expire();
        rests && self.accounts[session.dp_rank as usize].demotes()
    }

    /// Prepares a session that has lost everything at the engine for a turn with its full history.
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

    /// Takes the pin from a session that the agent pinned on its own and that has no room for its
    /// turn. Returns true if its KV goes to the radix tree first, so that the turn must wait.
    pub(super) fn gives_way(&mut self, now: Instant, key: &SessionKey) -> bool {
        let session = &self.sessions[key];
        let demotes = self.accounts[session.dp_rank as usize].demotes();
        if session.row && session.history_tokens > 0 && demotes {
            self.take_kv(now, key);
            return true;
        }
        self.unpin(now, key);
        false
    }

    /// Marks an admitted turn for trimming. Returns what the shim is told.
    pub(super) fn mark(&mut self, rid: &str, key: &SessionKey) -> TrimRequest {
        let tokens_max = self.whole_tokens(key, self.tickets[rid].need);
        let opens = self.tickets[rid].is_opening();
        let guarded = self.rules.guards.hold(Guard::FullHistoryContinues);
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let reopened = std::mem::take(&mut session.whole.anew);
        let must_continue = session.deltas == Deltas::Taken && !opens && guarded;
        let marked = TrimTurn {
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
        TrimRequest { tokens_max, must_continue }
    }

    /// Returns the session of a marked turn that is inside the engine and has no plan yet.
    fn marked_session(&self, rid: &str) -> Option<SessionKey> {
        let ticket = self.tickets.get(rid)?;
        let inside = ticket.stage == TicketState::Inside && ticket.awaits_plan();
        let key = ticket.key.clone().filter(|_| inside)?;
        let same = self.sessions.get(&key).is_some_and(|session| session.born == ticket.born);
        same.then_some(key)
    }

    fn marked(&mut self, rid: &str) -> &mut TrimTurn {
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.marked.as_mut().expect("the caller has seen it")
    }

    /// Handles the shim's final plan for a marked turn, reported before the engine gets the turn.
    ///
    /// Returns what became of the turn, and how many tokens the engine need not compute again
    /// because of its session. Returns `None` if that was reported before.
    pub fn handle_plan(&mut self, now: Instant, planned: &TrimPlan) -> Option<(TrimOutcome, u64)> {
        let Some(key) = self.marked_session(&planned.rid) else {
            let known = self.tickets.get(&planned.rid).is_some_and(|ticket| !ticket.awaits_plan());
            return (!known).then_some((TrimOutcome::Gone, 0));
        };
        let rid = &planned.rid;
        self.marked(rid).question = None;
        let mine = self.sessions[&key].incarnation == planned.incarnation;
        let became = match planned.plan {
            // The incarnation was closed or lost meanwhile; the turn's end settles the rest.
            Plan::Trimmed | Plan::Healed if !mine => (TrimOutcome::Gone, 0),
            Plan::Trimmed => self.runs_inside(rid, &key, planned, TrimOutcome::Trimmed),
            Plan::Healed => self.runs_inside(rid, &key, planned, TrimOutcome::Healed),
            Plan::Diverged | Plan::Refused if self.marked(rid).must_continue => {
                self.not_continued(&key, rid, planned)
            }
            Plan::Diverged => self.runs_beside(now, &key, planned, TrimOutcome::Diverged),
            Plan::Refused => self.runs_beside(now, &key, planned, TrimOutcome::Refused),
        };
        self.pump(now);
        self.debug_check();
        Some(became)
    }

    fn runs_inside(
        &mut self,
        rid: &str,
        key: &SessionKey,
        planned: &TrimPlan,
        became: TrimOutcome,
    ) -> (TrimOutcome, u64) {
        let prompt_tokens = planned.committed.saturating_add(planned.sent);
        let marked = self.marked(rid);
        marked.prompt_tokens = Some(prompt_tokens);
        let (ran, became) = if marked.reopened {
            (RunMode::Reopened, TrimOutcome::Reopened)
        } else {
            (RunMode::Pinned, became)
        };
        let ticket = &self.tickets[rid];
        let (need, from_nothing) = (ticket.need, ticket.from_nothing);
        let answer = self.answer_tokens(key, need);
        let target = prompt_tokens.saturating_add(answer).min(self.engine.context_tokens);
        self.change(key, |session| {
            // The exact figure is known now, so the rest of the reservation is released.
            session.reserved_tokens = session.reserved_tokens.min(target);
            if planned.committed > 0 {
                session.whole.astray = 0;
                session.prefix.continued();
            }
        });
        self.history_begins_with(rid, key);
        self.effects.push(Effect::RunModeKnown { rid: rid.to_owned(), ran });
        (became, if from_nothing { 0 } else { planned.committed })
    }

    fn runs_beside(
        &mut self,
        now: Instant,
        key: &SessionKey,
        planned: &TrimPlan,
        became: TrimOutcome,
    ) -> (TrimOutcome, u64) {
        let rid = &planned.rid;
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.pinned = false;
        let asked = ticket.marked.as_ref().is_some_and(|marked| marked.asked);
        let (dp_rank, from_nothing) = (ticket.dp_rank, ticket.from_nothing);
        let need = Need { prompt_tokens: planned.prompt, exact: true, ..ticket.need };
        self.account(dp_rank).turned_plain();
        let ran = self.unpinned_ran(key);
        self.effects.push(Effect::RunModeKnown { rid: rid.clone(), ran });
        if self.sessions[key].retention == Retention::Pinned {
            self.undo(key, from_nothing);
            let counts = !asked && !self.hides_ends(key, planned);
            self.change(key, |session| session.whole.astray += u32::from(counts));
        }
        self.turned_large(now, rid, key, need);
        (became, 0)
    }

    /// Handles a turn that runs beside its pinned session and may need more than pinned sessions
    /// leave of the pool. Such a turn would wait in the engine forever, so pinned sessions give up
    /// KV: its own session first, then others.
    fn turned_large(&mut self, now: Instant, rid: &str, key: &SessionKey, need: Need) {
        let dp_rank = self.sessions[key].dp_rank;
        let Ok(&capacity) = self.capacity(dp_rank) else { return };
        let tokens = self.wanted_by_engine(need).min(capacity.pool_tokens);
        if tokens <= capacity.pool_tokens - capacity.pin_tokens_max {
            return;
        }
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        ticket.large_tokens = Some(tokens);
        self.account(dp_rank).turned_large(tokens);
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
            self.reclaim(now, dp_rank, &shortage, Requester::Client);
        }
    }

    fn over(&self, dp_rank: u32, tokens: u64, pool_tokens: u64) -> u64 {
        (self.totals(dp_rank).pinned_tokens + tokens).saturating_sub(pool_tokens)
    }

    /// Undoes the admission of a turn that did nothing to its session.
    pub(super) fn undo(&mut self, key: &SessionKey, from_nothing: bool) {
        self.change(key, |session| {
            session.reserved_tokens = 0;
            if from_nothing && session.history_tokens > 0 {
                // The KV that was in the radix tree before the turn still is.
                session.row = false;
                if session.phase == Phase::Open {
                    session.phase = Phase::Demoted;
                }
            }
        });
    }

    /// Handles the shim's report that a turn became history of `incarnation`, which now has
    /// `history_tokens`. If the turn was `retracted`, the engine will resume it from there and the
    /// figure isn't final.
    pub fn handle_commit(&mut self, incarnation: &str, history_tokens: u64, retracted: bool) {
        let mut tickets = self.tickets.values_mut();
        let found = tickets.find(|ticket| ticket.pinned && ticket.incarnation == incarnation);
        if let Some(marked) = found.and_then(|ticket| ticket.marked.as_mut()) {
            marked.committed_tokens = Some(history_tokens).filter(|_| !retracted);
        }
    }

    /// Records the token counts of a finished full history, and returns the outcome. If the route
    /// reported no usage, the outcome gets the shim's figures.
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
        // A turn beside a pinned session usually has another prompt than the session's next turn.
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

    /// Settles the end of a marked turn that leaves the session's history uncertain: the plan or
    /// the end is unknown. Returns false if nothing is uncertain, or the turn isn't marked.
    ///
    /// The session becomes suspect, and any history that the shim's session table reports is
    /// accepted, because the shim compares each later full history with it. Deltas are refused
    /// until a full history has run.
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
            // On most routes an abort looks the same for a running turn and for a turn in the
            // engine's queue. In the second case the session keeps its row and KV.
            Outcome::Aborted => false,
            // The engine may have run a planned turn, whatever the route reported.
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
            self.doubt(now, key, Some(ExpectedHistory::AtLeast(0)));
        }
        true
    }
}
