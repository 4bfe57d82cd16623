//! Ends histories: a session whose KV must not be continued is closed, and its client is told why.
//!
//! Older weights, another adapter under the same name, corrupt pages and a doubt that was not
//! cleared are such reasons. A running turn ends first: the engine unloads an adapter, for example,
//! only when no request uses it.

use std::collections::BTreeSet;

use contract::id::SessionKey;

use crate::session::{
    kv_identity::hash_adapter,
    table::{GoneReason, Guard, Histories, KvChange, Session, SessionEvent, Sessions, State, Step},
};

impl Session {
    fn adapter(&self) -> Option<u64> {
        self.history.kv?.adapter()
    }
}

impl Histories {
    /// `runs_turns`: turns are inside the engine, and it isn't paused. Returns whether turns that
    /// wait may have to be decided anew.
    pub(crate) fn apply_kv_change(
        &mut self,
        step: &mut Step,
        change: KvChange<'_>,
        runs_turns: bool,
    ) -> bool {
        match change {
            KvChange::Flushed => self.handle_flush(step, runs_turns),
            KvChange::Weights { is_counted, was_flushed } => {
                self.handle_weights_changed(step, is_counted, was_flushed, runs_turns);
            }
            KvChange::WeightsCounted { report, is_changing } => {
                return self.handle_weights_report(step, report, is_changing);
            }
            KvChange::WeightsSettled => return self.settle_weights(step),
            KvChange::Adapter(name) => {
                let changed = name.map(hash_adapter);
                let is_changed = |adapter| changed.is_none_or(|changed| changed == adapter);
                return close_with_adapter(self, step, is_changed);
            }
            KvChange::Adapters(names) => {
                let loaded: BTreeSet<u64> = names.iter().map(|name| hash_adapter(name)).collect();
                let is_changed = |adapter| !loaded.contains(&adapter);
                return close_with_adapter(self, step, is_changed);
            }
            KvChange::Corrupt { incarnation } => {
                let key = self.pins.sessions.key_of(incarnation).cloned();
                let Some(key) = key else { return false };
                handle_corruption(self, step, &key);
            }
        }
        true
    }

    /// Keeps the pinned session in the table as gone, so that the client's next turn is told why.
    pub(crate) fn close_as_gone(&mut self, step: &mut Step, key: &SessionKey, reason: GoneReason) {
        let event = match reason {
            GoneReason::Reclaimed => SessionEvent::Reclaimed,
            GoneReason::HistoryUnknown => SessionEvent::Doubted,
            GoneReason::KvCorrupt => SessionEvent::Corrupt,
            GoneReason::EngineRestarted => SessionEvent::EngineLost,
            GoneReason::NotTakenOver => SessionEvent::NotTakenOver,
            GoneReason::WeightsChanged => SessionEvent::WeightsChanged,
            GoneReason::AdapterChanged => SessionEvent::AdapterChanged,
        };
        step.report_event(key, event);
        self.turns.answer_run_outside(step, key);
        self.pins.close_at_engine(step, key);
        self.pins.sessions.reincarnate(key);
        self.pins.sessions.change(step, key, |session| session.lose(reason));
    }

    /// Closes a session because the shim's answer about it did not come.
    pub(crate) fn close_without_answer(&mut self, step: &mut Step, key: &SessionKey) {
        let reason = match self.pins.sessions[key].state {
            State::Suspect { doubt, .. } => doubt.otherwise,
            _ => GoneReason::Reclaimed,
        };
        self.close_as_gone(step, key, reason);
    }

    pub(super) fn close_all_with_kv(&mut self, step: &mut Step, reason: GoneReason) {
        let keys = self.pins.sessions.keys(Session::may_continue_kv);
        keys.iter().for_each(|key| self.close_as_gone(step, key, reason));
    }

    /// Closes a session after a turn of it, if its KV may not be continued any more.
    pub(crate) fn close_unfit(&mut self, step: &mut Step, key: &SessionKey) {
        close_corrupt(self, step, key);
        close_outdated(self, step, key);
        close_without_adapter(self, step, key);
    }
}

pub(super) fn forget_tree_kv(sessions: &mut Sessions, step: &mut Step) {
    let in_tree =
        |session: &Session| session.state.tree().is_some_and(|tree| tree.resident_tokens > 0);
    for key in sessions.keys(in_tree) {
        sessions.change(step, &key, |session| session.state.forget_tree_kv());
    }
}

/// The weights may have changed during the session's last turn.
fn close_outdated(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    let Some(session) = histories.pins.sessions.get(key) else { return };
    let is_outdated = session.kv_epoch < histories.weights.epoch() && session.may_continue_kv();
    if is_outdated && histories.settings.guards.is_on(Guard::WeightsFence) {
        histories.close_as_gone(step, key, GoneReason::WeightsChanged);
    }
}

/// An audit found pages that other sessions also have, or wrote to. A running turn ends first.
fn handle_corruption(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    // Corrupt pages are lost with their engine.
    histories.pins.sessions.change(step, key, |session| {
        session.history.is_corrupt = !session.state.is_gone();
    });
    close_corrupt(histories, step, key);
}

fn close_corrupt(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    let Some(session) = histories.pins.sessions.get(key) else { return };
    let is_closed_anyway = session.state.is_closing() || session.state.is_gone();
    if session.history.is_corrupt && session.turns.running == 0 && !is_closed_anyway {
        histories.close_as_gone(step, key, GoneReason::KvCorrupt);
    }
}

/// A running turn ends first. Returns false if that is switched off.
fn close_with_adapter(
    histories: &mut Histories,
    step: &mut Step,
    is_changed: impl Fn(u64) -> bool,
) -> bool {
    if !histories.settings.guards.is_on(Guard::KvIdentity) {
        return false;
    }
    let keys = histories.pins.sessions.keys(|session| session.adapter().is_some_and(&is_changed));
    for key in keys {
        histories.pins.sessions.update(&key, |session| session.history.is_adapter_gone = true);
        close_without_adapter(histories, step, &key);
    }
    true
}

/// Only at rest, if the adapter of the session's KV was loaded or unloaded since.
fn close_without_adapter(histories: &mut Histories, step: &mut Step, key: &SessionKey) {
    let Some(session) = histories.pins.sessions.get(key) else { return };
    if session.history.is_adapter_gone && session.may_continue_kv() {
        histories.close_as_gone(step, key, GoneReason::AdapterChanged);
    }
}

/// The engine has ended, and all rows, KV and histories with it. Returns all sessions.
pub(super) fn lose_all(sessions: &mut Sessions, step: &mut Step) -> Vec<SessionKey> {
    let keys = sessions.keys(|_| true);
    for key in &keys {
        let is_lost_already =
            matches!(sessions[key].state, State::Gone { reason: GoneReason::EngineRestarted, .. });
        if !is_lost_already {
            step.report_event(key, SessionEvent::EngineLost);
        }
        // A running turn still ends under its old incarnation id.
        if sessions[key].turns.running == 0 {
            sessions.reincarnate(key);
        }
        sessions.change(step, key, |session| session.lose(GoneReason::EngineRestarted));
    }
    keys
}
