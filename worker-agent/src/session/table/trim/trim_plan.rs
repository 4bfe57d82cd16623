//! The shim's plan for a full history, and how the turn ran.

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
    /// Leading tokens that the prompt shares with the session's history.
    pub shared_tokens: u64,
    /// Tokens of the session's history.
    pub committed_tokens: u64,
    /// Tokens that are appended to the session's history.
    pub appended_tokens: u64,
    /// Tokens of the whole prompt.
    pub prompt_tokens: u64,
}

/// What became of a trim turn. Reported once for each turn for which the shim reported a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrimOutcome {
    /// The turn continued the session's history, token id for token id.
    Trimmed,
    /// Retokenized: the turn continued the session's history as text, but with other token ids.
    Retokenized,
    /// The turn started a new incarnation: the session's history was another one, or was lost.
    Reopened,
    /// The turn ran beside its session, because its prompt is another history.
    Diverged,
    /// The turn ran beside its session, because it couldn't run in it.
    Refused,
    /// The shim refused the turn, because it doesn't continue a session that takes deltas.
    NotContinued,
    /// Unknown: the session was closed or lost meanwhile, or the turn's client disconnected.
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
