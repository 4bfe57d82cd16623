//! Handles the owner task's messages from and to the trimmer, Berth's Python part in the engine.
//!
//! Many clients send the full history with each turn (one request and its answer). The trimmer
//! compares that history with the one that the turn's session holds, and gives the engine only the
//! part that the session lacks. For each such turn it reports a plan: how the turn runs. If the
//! turn can't run in its session as it is, the trimmer first asks the agent a question, and the
//! session table answers where the turn may run.
//!
//! The turn's run mode says how the turn runs in the end: in its session or outside, for example.
//! The exchange of the turn (which passes on its answer) waits here for the run mode, or for the
//! shim's refusal. [`crate::shim::trim`] has the connection to the trimmer, and the session table
//! decides.

use service::clock::now;
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

use super::{Owner, RunModeResult};
use crate::{
    session::{self, RunMode, TrimPlan},
    shim::trim::{self, Plan},
};

impl Owner {
    pub(super) fn handle_trimmer_event(&mut self, event: trim::TrimmerEvent) {
        self.is_report_stale = true;
        match event {
            trim::TrimmerEvent::Up(trim::Trimmer { sglang, shim, inert_reason, .. }) => {
                match &inert_reason {
                    None => info!(sglang, shim, "the shim trims full histories"),
                    Some(reason) => info!(sglang, reason, "the shim trims no full histories"),
                }
                self.trimmer_version = inert_reason.is_none().then_some(sglang);
                self.table.set_trimming(now(), self.trimmer_version.is_some());
            }
            trim::TrimmerEvent::Down { reason } => {
                warn!(reason, "the engine's trimmer has disconnected");
                self.table.set_trimming(now(), false);
                self.trimmer_version = None;
            }
            trim::TrimmerEvent::Planned(report) => return self.handle_plan(&report),
        }
        self.publish_description();
    }

    fn handle_plan(&mut self, report: &trim::PlanReport) {
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
            if let Some((outcome, spared_tokens)) = self.table.handle_plan(now(), &plan) {
                self.setup.metrics.count_trimmed_turn(outcome.as_str(), spared_tokens);
            }
            return;
        };
        // A full history has diverged if it doesn't continue its session's history. Divergence is
        // counted here, because the final plan, which follows the answer, no longer shows it.
        if decision == Plan::Diverged {
            self.setup.metrics.record_divergence(report.shared_tokens.into());
        }
        self.table.handle_question(now(), question, &plan);
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
        if let Err(error) = self.setup.trimmer.answer(question_id, incarnation, prompt_tokens_max) {
            debug!(%error, "can't answer the trimmer's question");
        }
    }

    /// Counts how a turn runs, and tells the turn's exchange.
    pub(super) fn tell_run_mode(&mut self, rid: &str, run_mode: RunMode) {
        self.setup.metrics.count_run_mode(run_mode.as_str());
        if let Some(waiter) = self.run_mode_waiters.remove(rid) {
            let _ = waiter.send(Ok(run_mode));
        }
    }

    /// Tells a turn's exchange that the shim refuses the turn.
    pub(super) fn tell_refused_by_shim(&mut self, rid: &str, error: session::Error) {
        if let Some(waiter) = self.run_mode_waiters.remove(rid) {
            let _ = waiter.send(Err(error));
        }
    }

    /// Returns a receiver of an admitted turn's run mode. If `known_run_mode` is set, the receiver
    /// gets that mode at once.
    pub(super) fn run_mode_receiver(
        &mut self,
        rid: &str,
        known_run_mode: Option<RunMode>,
    ) -> oneshot::Receiver<RunModeResult> {
        let (sender, receiver) = oneshot::channel();
        self.run_mode_waiters.insert(rid.to_owned(), sender);
        if let Some(run_mode) = known_run_mode {
            self.tell_run_mode(rid, run_mode);
        }
        receiver
    }
}
