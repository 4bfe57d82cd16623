//! Carries one event through the owners: its time, and what the owner task must do because of it.

use std::time::Instant;

use contract::id::SessionKey;

use super::{Effect, Guard, Guards, Record, SessionEvent};

#[derive(Debug)]
pub(crate) struct Step {
    pub(super) now: Instant,
    effects: Vec<Effect>,
}

impl Step {
    /// `effects`: those of earlier events, which nobody has taken yet.
    pub(super) fn new(now: Instant, effects: Vec<Effect>) -> Self {
        Self { now, effects }
    }

    pub(super) fn into_effects(self) -> Vec<Effect> {
        self.effects
    }

    pub(super) fn push(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    pub(super) fn write_journal(&mut self, record: Record) {
        self.push(Effect::Journal(record));
    }

    pub(super) fn report_event(&mut self, key: &SessionKey, event: SessionEvent) {
        self.push(Effect::SessionEvent(key.clone(), event));
    }

    /// After the effect, the engine has what `record` names.
    pub(super) fn push_journaled(
        &mut self,
        guards: Guards,
        record: Option<Record>,
        effect: Effect,
    ) {
        let (before, after) = match record {
            record if guards.is_on(Guard::JournalFirst) => (record, None),
            record => (None, record),
        };
        before.into_iter().for_each(|record| self.write_journal(record));
        self.push(effect);
        after.into_iter().for_each(|record| self.write_journal(record));
    }

    /// Consecutive changes of one session are reported once.
    pub(super) fn report_change(&mut self, key: &SessionKey) {
        if !matches!(self.effects.last(), Some(Effect::SessionChanged(changed)) if changed == key) {
            self.push(Effect::SessionChanged(key.clone()));
        }
    }
}
