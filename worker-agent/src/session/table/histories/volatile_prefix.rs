//! Feeds each session's tracker of volatile prefixes, and reports what the tracker finds.

use contract::{id::SessionKey, load::VolatilePrefix};

use crate::{
    session::table::{Effect, PromptStart, Sessions, Step, TrimPlan},
    shim::trim::Plan,
};

/// Not for deltas, which don't hold the beginning of the prompt.
pub(crate) fn compare_prompt_start(
    sessions: &mut Sessions,
    step: &mut Step,
    key: &SessionKey,
    start: PromptStart,
    is_aside: bool,
) {
    let newly_found = sessions.update(key, |session| {
        if is_aside {
            session.prefix_tracker.record_aside(start);
            return None;
        }
        session.prefix_tracker.record_prompt_start(start)
    });
    report_prefix(step, key, newly_found);
}

/// Does nothing if the prompt continues its session's history.
pub(super) fn record_divergence(
    sessions: &mut Sessions,
    step: &mut Step,
    key: &SessionKey,
    plan: &TrimPlan,
) {
    if plan.decision != Plan::Diverged {
        return;
    }
    let is_longer = plan.prompt_tokens > plan.committed_tokens;
    let newly_found = sessions.change(step, key, |session| {
        session.prefix_tracker.record_divergence(plan.shared_tokens, is_longer)
    });
    report_prefix(step, key, newly_found);
}

fn report_prefix(step: &mut Step, key: &SessionKey, newly_found: Option<VolatilePrefix>) {
    if let Some(prefix) = newly_found {
        step.push(Effect::VolatilePrefix(key.clone(), prefix));
    }
}
