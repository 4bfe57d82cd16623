//! Which session has a text early in its prompts that differs from turn to turn.

use proto::{id::SessionKey, load::VolatilePrefix};

use super::{Effect, Plan, Planned, PromptStart, Table};

impl Table {
    /// Notes how a claimed turn's prompt begins. Call before [`Table::admit`].
    pub fn begins(&mut self, rid: &str, start: PromptStart) {
        if let Some(ticket) = self.tickets.get_mut(rid) {
            ticket.start = start;
        }
    }

    /// Compares a turn on its way in with its session's earlier turns. A turn `beside` another one
    /// is left out: it is another conversation, as a rule.
    pub(super) fn compare_start(&mut self, rid: &str, key: &SessionKey, beside: bool) {
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        let start = std::mem::take(&mut ticket.start);
        if beside || ticket.is_delta() {
            return;
        }
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let found = session.prefix.begins(start);
        self.tell_prefix(key, found);
    }

    /// Takes the shim's comparison of a turn that can't run in its session as it is.
    pub(super) fn diverged_at(&mut self, key: &SessionKey, planned: &Planned) {
        if planned.plan != Plan::Diverged {
            return;
        }
        let grew = planned.prompt > planned.committed;
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let found = session.prefix.diverged(planned.at, grew);
        self.touch(key);
        self.tell_prefix(key, found);
    }

    fn tell_prefix(&mut self, key: &SessionKey, found: Option<VolatilePrefix>) {
        if let Some(found) = found {
            self.effects.push(Effect::VolatilePrefix(key.clone(), found));
        }
    }
}
