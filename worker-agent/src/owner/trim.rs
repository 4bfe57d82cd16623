//! Handles the owner task's messages from and to the trimmer, Berth's Python part in the engine.
//!
//! Many clients send the full history with each turn (one request and its answer). The trimmer
//! compares that history with the one that the turn's session holds, and gives the engine only the
//! part that the session lacks. For each such turn it reports a plan: how the turn runs. If the
//! turn can't run in its session as it is, the trimmer first asks the agent a question, and the
//! session table answers where the turn may run.
//!
//! [`crate::shim::trim`] has the connection to the trimmer, and the session table decides. The
//! module `waiters` tells the turn's caller how the turn runs in the end.

use service::{clock::now, tasks::Tasks};
use tracing::{debug, info, warn};

use crate::{
    metrics::Metrics,
    session::{Table, TrimPlan},
    shim::trim::{self, Plan, TrimHandle},
};

/// The connection to the trimmer, and what is known of the trimmer.
pub(super) struct TrimmerLink {
    handle: TrimHandle,
    tasks: Tasks,
    /// The SGLang version reported by a connected trimmer that works; `None` without one.
    sglang_version: Option<String>,
    /// Why the connected trimmer trims nothing; `None` if it works, or without one.
    off_reason: Option<String>,
    metrics: Metrics,
}

impl TrimmerLink {
    pub(super) fn new(handle: TrimHandle, metrics: Metrics, tasks: Tasks) -> Self {
        Self { handle, tasks, sglang_version: None, off_reason: None, metrics }
    }

    /// Returns the SGLang version on which the agent trims full histories, if the agent does.
    pub(super) fn sglang_version(&self) -> Option<&str> {
        self.sglang_version.as_deref()
    }

    /// Returns why the connected trimmer trims nothing; `None` if it works, or without one.
    pub(super) fn off_reason(&self) -> Option<&str> {
        self.off_reason.as_deref()
    }

    /// Notes that a trimmer has connected. An inert one does nothing after its greeting.
    pub(super) fn connect(&mut self, table: &mut Table, trimmer: trim::Trimmer) {
        let trim::Trimmer { sglang, shim, inert_reason, .. } = trimmer;
        match &inert_reason {
            None => info!(sglang, shim, "the shim trims full histories"),
            Some(reason) => info!(sglang, reason, "the shim trims no full histories"),
        }
        self.sglang_version = inert_reason.is_none().then_some(sglang);
        self.off_reason = inert_reason;
        table.set_trimming(now(), self.sglang_version.is_some());
    }

    /// Notes that the trimmer has disconnected.
    pub(super) fn disconnect(&mut self, table: &mut Table, reason: &str) {
        warn!(reason, "the engine's trimmer has disconnected");
        table.set_trimming(now(), false);
        (self.sglang_version, self.off_reason) = (None, None);
    }

    /// Passes the trimmer's plan for a turn, or its question, to the session table.
    pub(super) fn handle_plan(&self, table: &mut Table, report: &trim::PlanReport) {
        let decision = report.plan;
        let plan = TrimPlan {
            rid: report.rid.clone(),
            incarnation: report.session.clone(),
            decision,
            shared_tokens: report.shared_tokens.into(),
            committed_tokens: report.committed_tokens.into(),
            appended_tokens: report.appended_tokens.into(),
            prompt_tokens: report.prompt_tokens.into(),
        };
        debug!(
            rid = report.rid,
            plan = ?decision,
            shared_tokens = report.shared_tokens,
            reason = report.why,
            asks = report.question.is_some(),
            "the shim has compared a full history"
        );
        let Some(question) = report.question else {
            if let Some((outcome, spared_tokens)) = table.handle_plan(now(), &plan) {
                self.metrics.count_trimmed_turn(outcome.as_str(), spared_tokens);
            }
            return;
        };
        // A full history has diverged if it doesn't continue its session's history. Divergence is
        // counted here, because the final plan, which follows the answer, no longer shows it.
        if decision == Plan::Diverged {
            self.metrics.record_divergence(report.shared_tokens.into());
        }
        table.handle_question(now(), question, &plan);
    }

    /// Answers the trimmer's question: the turn may run in `incarnation` (one life of a session in
    /// the engine) with at most `prompt_tokens_max` prompt tokens. `None`: the turn runs outside
    /// any session. If the trimmer is gone or no longer waits, the answer has no effect.
    pub(super) fn answer_question(
        &self,
        question_id: u64,
        incarnation: Option<&str>,
        prompt_tokens_max: u64,
    ) {
        let prompt_tokens_max = u32::try_from(prompt_tokens_max).unwrap_or(u32::MAX);
        let (handle, incarnation) = (self.handle.clone(), incarnation.map(str::to_owned));
        self.tasks.spawn(async move {
            if let Err(error) = handle.answer(question_id, incarnation, prompt_tokens_max).await {
                debug!(%error, "can't answer the trimmer's question");
            }
        });
    }
}
