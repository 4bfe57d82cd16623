//! Finds sessions whose prompts have a volatile prefix.
//!
//! A volatile prefix is a text early in the prompts that differs from turn to turn.

use proto::{id::SessionKey, load::VolatilePrefix};

use super::{Effect, Plan, PromptStart, Table, TrimPlan};

impl Table {
    /// Records how a claimed turn's prompt begins. Must be called before [`Table::admit`].
    pub fn set_prompt_start(&mut self, rid: &str, start: PromptStart) {
        if let Some(ticket) = self.tickets.get_mut(rid) {
            ticket.prompt_start = start;
        }
    }

    /// Compares the prompt of an admitted turn with those of the session's earlier turns. Ignores
    /// deltas, and a turn that runs `beside` another one: that is usually a different conversation.
    pub(super) fn compare_prompt_start(&mut self, rid: &str, key: &SessionKey, beside: bool) {
        let ticket = self.tickets.get_mut(rid).expect("the caller has it");
        let start = std::mem::take(&mut ticket.prompt_start);
        if beside || ticket.is_delta() {
            return;
        }
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let found = session.prefix_tracker.record_start(start);
        self.report_prefix(key, found);
    }

    /// Handles the shim's comparison for a turn that can't run in its session as planned.
    pub(super) fn record_divergence(&mut self, key: &SessionKey, plan: &TrimPlan) {
        if plan.decision != Plan::Diverged {
            return;
        }
        let grew = plan.prompt_tokens > plan.committed_tokens;
        let session = self.sessions.get_mut(key).expect("the caller has seen it");
        let found = session.prefix_tracker.record_divergence(plan.shared_tokens, grew);
        self.report_change(key);
        self.report_prefix(key, found);
    }

    fn report_prefix(&mut self, key: &SessionKey, found: Option<VolatilePrefix>) {
        if let Some(found) = found {
            self.effects.push(Effect::VolatilePrefix(key.clone(), found));
        }
    }
}
