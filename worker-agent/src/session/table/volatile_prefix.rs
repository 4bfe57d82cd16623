//! Feeds each session's tracker of volatile prefixes, and reports what the tracker finds.
//!
//! A volatile prefix is a text early in a session's prompts that differs from turn to turn, such as
//! a timestamp in the system prompt. The tracker itself is [`PrefixTracker`](super::PrefixTracker).
//! A delta is a turn that holds only new tokens, and so no beginning of a prompt.
//!
//! The starts of prompts come from `owner`, and the shim's comparisons from `trim`. What is found
//! leaves the table as [`Effect::VolatilePrefix`].

use proto::{id::SessionKey, load::VolatilePrefix};

use super::{Effect, Plan, PromptStart, Table, TrimPlan};

impl Table {
    /// Records how the prompt of a claimed turn begins. The owner calls this before
    /// [`Table::admit`].
    pub fn set_prompt_start(&mut self, rid: &str, start: PromptStart) {
        self.tickets.set_prompt_start(rid, start);
    }

    /// Compares the beginning of an admitted full history with those of the session's earlier
    /// turns. The caller leaves out deltas, which don't hold the beginning of the prompt.
    /// `is_aside`: the turn isn't of the session's conversation.
    pub(super) fn compare_prompt_start(
        &mut self,
        key: &SessionKey,
        start: PromptStart,
        is_aside: bool,
    ) {
        let newly_found = self.sessions.update(key, |session| {
            if is_aside {
                session.prefix_tracker.record_aside(start);
                return None;
            }
            session.prefix_tracker.record_prompt_start(start)
        });
        self.report_prefix(key, newly_found);
    }

    /// Passes the shim's comparison of a prompt with its session's history to the session's
    /// tracker, if the prompt doesn't continue that history.
    pub(super) fn record_divergence(&mut self, key: &SessionKey, plan: &TrimPlan) {
        if plan.decision != Plan::Diverged {
            return;
        }
        let is_longer = plan.prompt_tokens > plan.committed_tokens;
        let newly_found = self.change_session(key, |session| {
            session.prefix_tracker.record_divergence(plan.shared_tokens, is_longer)
        });
        self.report_prefix(key, newly_found);
    }

    fn report_prefix(&mut self, key: &SessionKey, newly_found: Option<VolatilePrefix>) {
        if let Some(prefix) = newly_found {
            self.effects.push(Effect::VolatilePrefix(key.clone(), prefix));
        }
    }
}
