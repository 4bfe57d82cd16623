//! Describes the shim's plan for a full history, and what became of the turn.

use crate::shim::trim::Plan;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrimPlan {
    pub rid: String,
    pub incarnation: String,
    pub decision: Plan,
    /// Leading tokens that the prompt shares with the session's history.
    pub shared_tokens: u64,
    /// The session's history before the turn.
    pub committed_tokens: u64,
    /// 0 if the turn doesn't run in the session.
    pub appended_tokens: u64,
    /// Of the whole prompt; 0 if the shim did not examine it.
    pub prompt_tokens: u64,
}

/// Reported once for each turn for which the shim reported a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrimOutcome {
    /// Continued the session's history, token id for token id.
    Trimmed,
    /// Continued the session's history as text, but with other token ids.
    Retokenized,
    /// Started a new incarnation: the session's history was another one or was lost.
    Reopened,
    /// Ran beside its session, because the prompt doesn't continue the history.
    Diverged,
    /// Ran beside its session for another reason, such as a lack of room.
    Refused,
    /// Refused, because the session takes deltas and its history must not be replaced.
    NotContinued,
    /// Its session was closed or lost meanwhile, or its client disconnected.
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
