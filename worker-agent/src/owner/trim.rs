//! Handles the owner task's messages from and to the trimmer, Berth's Python part in the engine.
//!
//! If a turn can't run in its session as it is, the trimmer first asks where it may run. The
//! session table decides.

use service::{clock::now, tasks::Tasks};
use tracing::{debug, info, warn};

use crate::{
    metrics::Metrics,
    session::{Table, TrimPlan},
    shim::trim::{self, Plan, TrimHandle},
};

pub(super) struct TrimmerLink {
    handle: TrimHandle,
    tasks: Tasks,
    /// `None` without a connected trimmer that works.
    sglang_version: Option<String>,
    /// `None` if the connected trimmer works, or without one.
    off_reason: Option<String>,
    metrics: Metrics,
}

impl TrimmerLink {
    pub(super) fn new(handle: TrimHandle, metrics: Metrics, tasks: Tasks) -> Self {
        Self { handle, tasks, sglang_version: None, off_reason: None, metrics }
    }

    pub(super) fn sglang_version(&self) -> Option<&str> {
        self.sglang_version.as_deref()
    }

    pub(super) fn off_reason(&self) -> Option<&str> {
        self.off_reason.as_deref()
    }

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

    pub(super) fn disconnect(&mut self, table: &mut Table, reason: &str) {
        warn!(reason, "the engine's trimmer has disconnected");
        table.set_trimming(now(), false);
        (self.sglang_version, self.off_reason) = (None, None);
    }

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
        // Divergence is counted here, because the final plan, which follows the answer, no longer
        // shows it.
        if decision == Plan::Diverged {
            self.metrics.record_divergence(report.shared_tokens.into());
        }
        table.handle_question(now(), question, &plan);
    }

    /// The turn may run in `incarnation`; `None` means outside any session. An answer that nobody
    /// waits for has no effect.
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
