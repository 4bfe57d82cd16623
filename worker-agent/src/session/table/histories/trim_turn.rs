//! Describes a full history in a pinned session: the shim's plan, and how far the turn has come.

use crate::{session::table::TrimRequest, shim::trim::Plan};

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

#[derive(Debug)]
pub(crate) enum Trim {
    /// The engine appends what the turn sends.
    NotNeeded,
    /// The shim has reported no plan.
    Awaited(AwaitedPlan),
    Planned {
        /// What the engine must report for the turn.
        prompt_tokens: u64,
        /// Of the session after the turn, as the shim reported when the turn ended.
        committed_tokens: Option<u64>,
    },
    /// The turn does not run and changes no session.
    Refused,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct AwaitedPlan {
    /// Room is reserved for the `tokens_max`.
    pub(crate) request: TrimRequest,
    pub(crate) question: Question,
    /// Set if the turn is the first of an incarnation that replaced another one.
    pub(crate) replaced: Option<Replaced>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    NotAsked,
    Open {
        number: u64,
        /// Whether the shim asked because the prompt has more tokens than are reserved.
        exceeds_reserved: bool,
        /// To reserve in a new incarnation for the turn, if one is to be opened.
        reopen_tokens: Option<u64>,
    },
    Answered {
        exceeds_reserved: bool,
    },
}

/// The history that a new incarnation replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replaced {
    FullHistories,
    /// Clients append deltas to it.
    Deltas,
}

impl AwaitedPlan {
    /// Returns the question's number if it was open.
    pub(crate) fn close_question(&mut self) -> Option<u64> {
        let Question::Open { number, exceeds_reserved, .. } = self.question else { return None };
        self.question = Question::Answered { exceeds_reserved };
        Some(number)
    }

    pub(crate) fn exceeds_reserved(&self) -> bool {
        matches!(
            self.question,
            Question::Open { exceeds_reserved: true, .. }
                | Question::Answered { exceeds_reserved: true }
        )
    }
}
