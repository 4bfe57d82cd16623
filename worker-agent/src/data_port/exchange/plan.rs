//! Waits for the shim's plan for a turn whose answer the engine has begun.
//!
//! The plan comes from the shim on another connection than the answer. On some routes the engine
//! begins its answer before the shim has decided; [`wait`] then keeps the first frames.

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use http::StatusCode;
use http_body_util::BodyExt as _;
use tokio::{sync::oneshot, time::Instant};

use super::BodyFrame;
use crate::owner::RunModeResult;

/// Some routes send their first event before they tokenize the prompt, and the shim reports its
/// plan after that: up to two seconds later if it first asks the agent where the turn may run.
const PLAN_WAIT_MAX: Duration = Duration::from_millis(2_500);
/// The shim may need to tokenize a long prompt and then wait two seconds for the agent's answer.
const MUST_CONTINUE_PLAN_WAIT_MAX: Duration = Duration::from_secs(10);
/// The engine has given its answer or [`EARLY_FRAMES_MAX`] parts of it. The shim reported before
/// the engine had the turn, or caused the engine's error, so its report arrives soon or never.
const PLAN_WAIT_AFTER_ANSWER_MAX: Duration = Duration::from_millis(500);
/// A route that answers before tokenization sends only a few events.
const EARLY_FRAMES_MAX: usize = 16;

/// Keeps the frames that come meanwhile. `None` if it is not known in time how the turn runs.
///
/// After an error of the engine the plan doesn't matter, except for a turn that `must_continue` its
/// session's history: the shim may have refused it and so caused the error.
pub(super) async fn wait<B: http_body::Body<Data = Bytes> + Unpin>(
    mut receiver: oneshot::Receiver<RunModeResult>,
    body: &mut B,
    early_frames: &mut VecDeque<BodyFrame<B::Error>>,
    status: StatusCode,
    must_continue: bool,
) -> Option<RunModeResult> {
    let mut may_read_frame = status.is_success();
    if !may_read_frame && !must_continue {
        return receiver.try_recv().ok();
    }
    let plan_deadline = tokio::time::sleep(match (may_read_frame, must_continue) {
        (false, _) => PLAN_WAIT_AFTER_ANSWER_MAX,
        (true, true) => MUST_CONTINUE_PLAN_WAIT_MAX,
        (true, false) => PLAN_WAIT_MAX,
    });
    tokio::pin!(plan_deadline);
    loop {
        tokio::select! {
            biased;
            result = &mut receiver => return result.ok(),
            frame = body.frame(), if may_read_frame => {
                may_read_frame = frame.is_some();
                early_frames.push_back(frame);
                may_read_frame &= early_frames.len() < EARLY_FRAMES_MAX;
                let late_at = Instant::now() + PLAN_WAIT_AFTER_ANSWER_MAX;
                if !may_read_frame && !must_continue && late_at < plan_deadline.deadline() {
                    plan_deadline.as_mut().reset(late_at);
                }
            }
            () = &mut plan_deadline, if !may_read_frame || !early_frames.is_empty() => {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;
    use crate::{owner::TurnRun, session::RunMode};

    const PINNED: TurnRun = TurnRun { run_mode: RunMode::Pinned, growth_tokens_max: Some(9) };

    /// Waits for a plan that comes so long after the engine has given its whole answer. Returns
    /// the plan, and for how long the client waited.
    async fn wait_for(plan_after: Option<Duration>) -> (Option<TurnRun>, Duration) {
        let (sender, receiver) = oneshot::channel();
        let started_at = Instant::now();
        let (mut body, mut early_frames) = (Full::new(Bytes::from("{}")), VecDeque::new());
        let planning = async {
            match plan_after {
                Some(after) => tokio::time::sleep(after).await,
                None => std::future::pending().await,
            }
            sender.send(Ok(PINNED)).expect("it is waited for");
        };
        let result = {
            let waiting = wait(receiver, &mut body, &mut early_frames, StatusCode::OK, false);
            tokio::pin!(waiting, planning);
            tokio::select! {
                biased;
                result = &mut waiting => result,
                () = &mut planning => waiting.await,
            }
        };
        assert_eq!(early_frames.len(), 2, "the answer and its end are kept");
        (result.map(|result| result.expect("no refusal")), started_at.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_answer_that_overtakes_its_plan_still_says_how_its_turn_ran() {
        let late = Duration::from_millis(20);
        let (plan, waited) = wait_for(Some(late)).await;
        assert_eq!(plan, Some(PINNED));
        assert!((late..late * 2).contains(&waited), "{waited:?}");
        let (plan, waited) = wait_for(None).await;
        assert_eq!(plan, None);
        assert!(waited <= PLAN_WAIT_AFTER_ANSWER_MAX + late, "a whole answer waits {waited:?}");
    }
}
