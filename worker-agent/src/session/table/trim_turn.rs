//! Describes how far a full history in a pinned session has come: planned, refused, or neither.

use super::TrimRequest;

#[derive(Debug)]
pub(super) enum Trim {
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
pub(super) struct AwaitedPlan {
    /// Room is reserved for the `tokens_max`.
    pub(super) request: TrimRequest,
    pub(super) question: Question,
    /// Set if the turn is the first of an incarnation that replaced another one.
    pub(super) replaced: Option<Replaced>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
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
pub(super) enum Replaced {
    FullHistories,
    /// Clients append deltas to it.
    Deltas,
}

impl AwaitedPlan {
    pub(super) fn request(&self) -> TrimRequest {
        self.request
    }

    /// Returns the question's number if it was open.
    pub(super) fn close_question(&mut self) -> Option<u64> {
        let Question::Open { number, exceeds_reserved, .. } = self.question else { return None };
        self.question = Question::Answered { exceeds_reserved };
        Some(number)
    }

    pub(super) fn exceeds_reserved(&self) -> bool {
        matches!(
            self.question,
            Question::Open { exceeds_reserved: true, .. }
                | Question::Answered { exceeds_reserved: true }
        )
    }
}
