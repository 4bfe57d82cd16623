//! Closes incarnations at the engine, and repeats each close until the engine has confirmed it.
//!
//! What a pinned incarnation holds stays counted until then.

use std::time::Instant;

use contract::id::SessionKey;

use super::{
    CloseResult, Doubt, Effect, Error, ExpectedHistory, GoneReason, Guard, Record, Session,
    SessionEvent, State, Table, closes::Close, shim_requests::ShimTask,
};

impl Table {
    /// Closes an incarnation that an earlier agent process left open, and counts its row until the
    /// close is confirmed.
    pub fn inherit_incarnation(
        &mut self,
        now: Instant,
        incarnation: String,
        dp_rank: u32,
        rid: Option<String>,
    ) {
        if !self.settings.guards.is_on(Guard::TakeoverCloses) {
            return;
        }
        let dp_rank = if (dp_rank as usize) < self.engine.ranks.len() { dp_rank } else { 0 };
        let close = Close::inherited(now, dp_rank, rid);
        self.closes.start(&mut self.effects, incarnation, close);
        self.debug_check();
    }

    /// The engine has answered, or the shim has reported that the session is closed.
    pub fn handle_close_result(&mut self, now: Instant, incarnation: &str, result: CloseResult) {
        let is_repeated = self.settings.guards.is_on(Guard::CloseRepeated);
        let is_tagged_again = self.tickets.has_tag(incarnation);
        let effects = &mut self.effects;
        let answered =
            self.closes.answer(now, effects, incarnation, result, is_repeated, is_tagged_again);
        let Some(answered) = answered else { return };
        if answered.is_done {
            self.effects.write_journal(Record::Closed { incarnation: incarnation.to_owned() });
        }
        if let Some(waited) = answered.freed_after {
            self.effects.push(Effect::Freed(waited));
            self.process_queue(now);
        }
        self.debug_check();
    }

    pub(super) fn close_if_due(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        if !session.state.is_closing() || session.turns.running > 0 {
            return;
        }
        self.close_at_engine(now, key);
        self.drop_session(now, key, &Error::UnknownSession);
    }

    /// Without this, the session would stay open: its clients don't know that it was opened for
    /// them, and a router that doesn't know the session can't close it.
    pub(super) fn close_unused(&mut self, now: Instant, key: &SessionKey) {
        let is_open_for_nothing = self.sessions.get(key).is_some_and(Session::is_open_for_nothing);
        if is_open_for_nothing && self.settings.guards.is_on(Guard::UnusedClosed) {
            let _ = self.begin_close(now, key);
        }
    }

    /// Keeps the pinned session in the table as gone, so that the client's next turn is told why.
    pub(super) fn close_as_gone(&mut self, now: Instant, key: &SessionKey, reason: GoneReason) {
        let event = match reason {
            GoneReason::Reclaimed => SessionEvent::Reclaimed,
            GoneReason::HistoryUnknown => SessionEvent::Doubted,
            GoneReason::KvCorrupt => SessionEvent::Corrupt,
            GoneReason::EngineRestarted => SessionEvent::EngineLost,
            GoneReason::NotTakenOver => SessionEvent::NotTakenOver,
            GoneReason::WeightsChanged => SessionEvent::WeightsChanged,
            GoneReason::AdapterChanged => SessionEvent::AdapterChanged,
        };
        self.effects.report_event(key, event);
        self.answer_run_outside(key);
        self.close_at_engine(now, key);
        self.sessions.reincarnate(key);
        self.change_session(key, |session| session.lose(reason));
    }

    /// Closes a session because the shim's answer about it did not come.
    pub(super) fn close_without_answer(&mut self, now: Instant, key: &SessionKey) {
        let reason = match self.sessions[key].state {
            State::Suspect { doubt, .. } => doubt.otherwise,
            _ => GoneReason::Reclaimed,
        };
        self.close_as_gone(now, key, reason);
    }

    /// A turn's end left the history uncertain: the shim must report the `expected` one. Without a
    /// shim or an expected history, the session is closed.
    pub(super) fn make_suspect(
        &mut self,
        now: Instant,
        key: &SessionKey,
        expected: Option<ExpectedHistory>,
    ) {
        let can_verify = self.shims.can_verify(self.sessions[key].dp_rank);
        let (true, Some(expected)) = (can_verify, expected) else {
            return self.close_as_gone(now, key, GoneReason::HistoryUnknown);
        };
        let rid = self.sessions[key].state.lost_rid();
        let request = self.request_of_shim(key, ShimTask::Inspect { rid, is_repeat: false });
        let doubt = Doubt { expected, request, otherwise: GoneReason::HistoryUnknown };
        let dp_rank = self.change_session(key, |session| {
            session.state.move_row(|row| State::Suspect { row: Some(row), doubt });
            session.dp_rank
        });
        self.send_shim_requests(now, dp_rank);
    }

    /// An audit found pages that other sessions also have, or wrote to. A running turn ends first.
    pub fn handle_corruption(&mut self, now: Instant, incarnation: &str) {
        let Some(key) = self.sessions.key_of(incarnation).cloned() else { return };
        // Corrupt pages are lost with their engine.
        self.change_session(&key, |session| {
            session.history.is_corrupt = !session.state.is_gone();
        });
        self.close_corrupt(now, &key);
        self.process_queue(now);
        self.debug_check();
    }

    pub(super) fn close_corrupt(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        let is_closed_anyway = session.state.is_closing() || session.state.is_gone();
        if session.history.is_corrupt && session.turns.running == 0 && !is_closed_anyway {
            self.close_as_gone(now, key, GoneReason::KvCorrupt);
        }
    }

    #[must_use]
    pub fn session_key(&self, incarnation: &str) -> Option<&SessionKey> {
        self.sessions.key_of(incarnation)
    }

    /// An incarnation without a pin and a tag is not open at the engine.
    pub(super) fn close_at_engine(&mut self, now: Instant, key: &SessionKey) {
        let session = &self.sessions[key];
        let incarnation = session.incarnation.clone();
        match session.state.tree() {
            None => {
                let close = Close::new(now, session.dp_rank, session.state.row().cloned());
                self.closes.start(&mut self.effects, incarnation, close);
            }
            Some(tree) if tree.has_tag => {
                self.closes.start(&mut self.effects, incarnation, Close::tag(now));
            }
            Some(_) => {}
        }
    }

    /// Returns why: the engine keeps a session half closed, or doesn't end an aborted turn.
    #[must_use]
    pub fn restart_required(&self, now: Instant) -> Option<String> {
        let stuck_after = self.settings.stuck_after;
        let stuck_closes = self.closes.stuck_count(now);
        if stuck_closes > 0 {
            return Some(format!(
                "the engine keeps {stuck_closes} sessions half closed; their rows and KV come back \
                 only when it restarts"
            ));
        }
        let abandoned = self.tickets.inside().filter_map(|(_, _, inside)| inside.abandoned_since);
        let stuck_turns = abandoned.filter(|since| *since + stuck_after <= now).count();
        (stuck_turns > 0).then(|| {
            format!(
                "the engine doesn't end {stuck_turns} aborted turns; restart it to free their rows"
            )
        })
    }
}
