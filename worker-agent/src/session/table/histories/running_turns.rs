//! Keeps what each turn inside the engine does to its session's history, as far as it is known.

use std::collections::BTreeMap;

use contract::id::SessionKey;

use crate::session::table::{
    Need, Sessions,
    histories::trim_turn::{AwaitedPlan, Question, Trim},
};

/// By turn id, so that the same events always produce the same effects.
#[derive(Debug, Default)]
pub(crate) struct RunningTurns(BTreeMap<String, RunningTurn>);

#[derive(Debug)]
pub(crate) struct RunningTurn {
    /// With the generation of the session that the turn has claimed.
    pub(crate) session: Option<(SessionKey, u64)>,
    pub(crate) incarnation: Option<String>,
    pub(crate) need: Need,
    pub(crate) is_delta: bool,
    pub(crate) opens_session: bool,
    /// Whether the shim has reported that the engine aborted the turn while it ran.
    pub(crate) was_aborted: bool,
    /// Whether the engine has asked its model again for the same request, outside the session, as
    /// after it has called a tool of its own.
    pub(crate) asks_again: bool,
    /// Whether the turn belongs to another conversation than its session's, so that it changes
    /// nothing that is known of the session's history.
    pub(crate) is_aside: bool,
    /// `None` if the turn runs on the radix tree.
    pub(crate) pinned: Option<PinnedRun>,
}

/// How a turn runs in its pinned session.
#[derive(Debug)]
pub(crate) struct PinnedRun {
    /// Whether the session held no row and KV of its own at the turn's admission.
    pub(crate) had_no_kv: bool,
    pub(crate) trim: Trim,
}

impl RunningTurns {
    pub(crate) fn insert(&mut self, rid: &str, turn: RunningTurn) {
        self.0.insert(rid.to_owned(), turn);
    }

    pub(crate) fn remove(&mut self, rid: &str) -> Option<RunningTurn> {
        self.0.remove(rid)
    }

    pub(crate) fn get(&self, rid: &str) -> Option<&RunningTurn> {
        self.0.get(rid)
    }

    pub(crate) fn get_mut(&mut self, rid: &str) -> Option<&mut RunningTurn> {
        self.0.get_mut(rid)
    }

    pub(crate) fn rids(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    pub(crate) fn of_session_mut(
        &mut self,
        generation: u64,
    ) -> impl Iterator<Item = &mut RunningTurn> {
        self.0.values_mut().filter(move |turn| turn.is_of(generation))
    }

    /// Returns the turn that runs in this pinned incarnation.
    pub(crate) fn pinned_in(&self, incarnation: &str) -> impl Iterator<Item = &str> {
        let is_in = move |turn: &RunningTurn| {
            turn.pinned.is_some() && turn.incarnation.as_deref() == Some(incarnation)
        };
        self.0.iter().filter(move |(_, turn)| is_in(turn)).map(|(rid, _)| rid.as_str())
    }

    /// Returns the session's turn of which the shim has asked where it may run.
    pub(crate) fn with_question(&self, key: &SessionKey) -> Option<&str> {
        let has_question = |turn: &RunningTurn| {
            let awaits_answer = matches!(
                turn.trim(),
                Some(Trim::Awaited(AwaitedPlan { question: Question::Open { .. }, .. }))
            );
            awaits_answer && turn.key() == Some(key)
        };
        self.0.iter().find(|(_, turn)| has_question(turn)).map(|(rid, _)| rid.as_str())
    }

    pub(crate) fn awaits_plan(&self, rid: &str) -> bool {
        matches!(self.get(rid).and_then(RunningTurn::trim), Some(Trim::Awaited(_)))
    }

    pub(crate) fn awaited_plan_mut(&mut self, rid: &str) -> Option<&mut AwaitedPlan> {
        match self.get_mut(rid)?.pinned.as_mut() {
            Some(PinnedRun { trim: Trim::Awaited(awaited), .. }) => Some(awaited),
            _ => None,
        }
    }

    pub(crate) fn set_trim(&mut self, rid: &str, to: Trim) {
        if let Some(run) = self.get_mut(rid).and_then(|turn| turn.pinned.as_mut()) {
            run.trim = to;
        }
    }

    /// The turn goes on outside its pinned session.
    pub(crate) fn run_beside(&mut self, rid: &str) {
        if let Some(turn) = self.get_mut(rid) {
            turn.pinned = None;
        }
    }

    /// Returns the turn that the engine aborted while it ran in this incarnation.
    pub(crate) fn note_abort(&mut self, incarnation: &str) -> Option<String> {
        let rid = self.pinned_in(incarnation).next()?.to_owned();
        self.get_mut(&rid)?.was_aborted = true;
        Some(rid)
    }

    /// The engine asks its model again for the request of a turn that has its plan. What follows
    /// runs outside the session, so the client's history gets ahead of the session's.
    pub(crate) fn note_second_turn(&mut self, rid: &str) {
        if let Some(turn) = self.get_mut(rid)
            && matches!(turn.trim(), Some(Trim::Planned { .. }))
        {
            turn.asks_again = true;
        }
    }

    /// `was_retracted`: the engine will resume the turn, so `history_tokens` isn't final.
    pub(crate) fn note_commit(
        &mut self,
        rid: &str,
        incarnation: &str,
        history_tokens: u64,
        was_retracted: bool,
    ) {
        let Some(turn) = self.get_mut(rid) else { return };
        let ran_in = turn.incarnation.as_deref();
        if let Some(PinnedRun { trim: Trim::Planned { committed_tokens, .. }, .. }) =
            &mut turn.pinned
            && ran_in == Some(incarnation)
        {
            *committed_tokens = Some(history_tokens).filter(|_| !was_retracted);
        }
    }
}

impl RunningTurn {
    pub(crate) fn key(&self) -> Option<&SessionKey> {
        self.session.as_ref().map(|(key, _)| key)
    }

    fn is_of(&self, generation: u64) -> bool {
        self.session.as_ref().is_some_and(|(_, claimed)| *claimed == generation)
    }

    /// Returns `None` if the session that the turn has claimed is gone, or another has its key.
    pub(crate) fn claimed_key(&self, sessions: &Sessions) -> Option<SessionKey> {
        let session = sessions.get(self.key()?)?;
        self.is_of(session.generation).then(|| self.key().cloned())?
    }

    pub(crate) fn runs_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    pub(crate) fn had_no_kv(&self) -> bool {
        self.pinned.as_ref().is_some_and(|run| run.had_no_kv)
    }

    /// `None` if the turn doesn't run in its pinned session.
    pub(crate) fn trim(&self) -> Option<&Trim> {
        self.pinned.as_ref().map(|run| &run.trim)
    }
}
