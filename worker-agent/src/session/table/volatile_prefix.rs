//! Feeds each session's tracker of volatile prefixes, and reports what the tracker finds.

use contract::{id::SessionKey, load::VolatilePrefix};

use super::{Effect, Plan, PromptStart, Table, TrimPlan};

impl Table {
    /// Must come before [`Table::admit`].
    pub fn set_prompt_start(&mut self, rid: &str, start: PromptStart) {
        self.tickets.set_prompt_start(rid, start);
    }

    /// Not for deltas, which don't hold the beginning of the prompt.
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

    /// Does nothing if the prompt continues its session's history.
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
