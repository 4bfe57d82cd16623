//! Describes the shim's plan for a full history, and what became of the turn.
//!
//! A trim turn is a turn with a full history (the whole conversation) that was admitted to a pinned
//! session. The shim, Berth's part in the engine's process, compares the turn's prompt with the
//! session's history, and plans how the turn runs. These types are plain values. `owner` makes a
//! [`TrimPlan`] from the shim's message, and counts each [`TrimOutcome`] in the metrics.

use crate::shim::trim::Plan;

/// The shim's plan for one trim turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrimPlan {
    /// The turn's id.
    pub rid: String,
    /// Id of the incarnation that the plan was made for.
    pub incarnation: String,
    /// How the turn is to run.
    pub decision: Plan,
    /// The number of leading tokens that the prompt shares with the session's history.
    pub shared_tokens: u64,
    /// The number of tokens of the session's history before the turn.
    pub committed_tokens: u64,
    /// The number of tokens that are appended to the session's history; 0 if the turn doesn't run
    /// in the session.
    pub appended_tokens: u64,
    /// The number of tokens of the whole prompt. 0 if the shim did not examine the prompt.
    pub prompt_tokens: u64,
}

/// What became of a trim turn. Reported once for each turn for which the shim reported a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrimOutcome {
    /// The turn continued the session's history, token id for token id.
    Trimmed,
    /// The turn continued the session's history as text, but with other token ids.
    Retokenized,
    /// The turn started a new incarnation, because the session's history was another one or was
    /// lost.
    Reopened,
    /// The turn ran beside its session (on the radix tree), because its prompt doesn't continue the
    /// session's history.
    Diverged,
    /// The turn ran beside its session for another reason. For example, the session had no room.
    Refused,
    /// The shim refused the turn. The session takes deltas, so its history must not be replaced,
    /// and the turn doesn't continue it.
    NotContinued,
    /// It is unknown what became of the turn: its session was closed or lost meanwhile, or its
    /// client disconnected.
    Gone,
}

impl TrimOutcome {
    /// Returns the name used in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trimmed => "trimmed",
            Self::Retokenized => "retokenized",
            Self::Reopened => "reopened",
            Self::Diverged => "diverged",
            Self::Refused => "refused",
            Self::NotContinued => "not_continued",
            Self::Gone => "gone",
        }
    }
}
