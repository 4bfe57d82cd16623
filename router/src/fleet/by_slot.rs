//! A table with an entry for each agent, by slot. Readers take no lock.

use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::worker::AgentKey;
use crate::config::AGENTS_MAX;

/// An agent finds its own entry only, never that of the slot's next agent.
#[derive(Debug)]
pub(crate) struct BySlot<T>(Vec<ArcSwapOption<(AgentKey, T)>>);

impl<T: Clone> BySlot<T> {
    pub(crate) fn new() -> Self {
        Self((0..AGENTS_MAX).map(|_| ArcSwapOption::empty()).collect())
    }

    pub(crate) fn get(&self, agent: AgentKey) -> Option<T> {
        let entry = self.0[agent.slot()].load();
        entry.as_deref().filter(|(key, _)| *key == agent).map(|(_, value)| value.clone())
    }

    /// Replaces the entry of the slot, whichever agent's it is.
    pub(crate) fn set(&self, agent: AgentKey, value: Option<T>) {
        self.0[agent.slot()].store(value.map(|value| Arc::new((agent, value))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_finds_its_own_entry_only() {
        let (table, old) = (BySlot::new(), AgentKey::first(3));
        table.set(old, Some("old"));
        assert_eq!([old, old.next(), AgentKey::first(4)].map(|it| table.get(it)), {
            [Some("old"), None, None]
        });
        table.set(old.next(), Some("new"));
        assert_eq!([old, old.next()].map(|it| table.get(it)), [None, Some("new")]);
        table.set(old.next(), None);
        assert_eq!([old, old.next()].map(|it| table.get(it)), [None, None]);
    }
}
