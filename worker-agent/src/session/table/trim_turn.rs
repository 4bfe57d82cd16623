//! Describes how far a full history in a pinned session has come: planned, refused, or neither.
//!
//! A full history is a turn that holds the whole conversation. The shim, Berth's part in the
//! engine's process, compares it with its session's history and plans how the turn runs. Before
//! that, the shim may ask where the turn may run. These types are plain values. The tickets of the
//! table hold them, and the modules `trim`, `reopen` and `must_continue` change them.

use super::TrimRequest;

/// How a turn that was admitted to its pinned session runs there.
#[derive(Debug)]
pub(super) enum Trim {
    /// The engine appends what the turn sends.
    NotNeeded,
    /// The shim compares the turn with the session's history and has reported no plan.
    Awaited(AwaitedPlan),
    /// The turn runs in its session.
    Planned {
        /// The prompt tokens that the engine must report for the turn.
        prompt_tokens: u64,
        /// Tokens of the session's history after the turn, as the shim reported them when the turn
        /// ended.
        committed_tokens: Option<u64>,
    },
    /// The shim refused the turn. It does not run and changes no session.
    Refused,
}

/// What is known of a turn before the shim's plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct AwaitedPlan {
    /// What the shim may do with the turn. Room is reserved for the `tokens_max`.
    pub(super) request: TrimRequest,
    pub(super) question: Question,
    /// Set if the turn is the first of an incarnation that replaced another one.
    pub(super) replaced: Option<Replaced>,
}

/// The shim's question where a turn may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    NotAsked,
    Open {
        number: u64,
        /// Whether the shim asked because the prompt has more tokens than are reserved.
        exceeds_reserved: bool,
        /// If a new incarnation is to be opened for the turn: the tokens to reserve in it.
        reopen_tokens: Option<u64>,
    },
    Answered {
        exceeds_reserved: bool,
    },
}

/// The history that a new incarnation replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replaced {
    /// Only full histories made it.
    FullHistories,
    /// Clients append deltas to it.
    Deltas,
}

impl AwaitedPlan {
    pub(super) fn request(&self) -> TrimRequest {
        self.request
    }

    /// Closes the shim's question. Returns its number if it was open.
    pub(super) fn close_question(&mut self) -> Option<u64> {
        let Question::Open { number, exceeds_reserved, .. } = self.question else { return None };
        self.question = Question::Answered { exceeds_reserved };
        Some(number)
    }

    /// Whether the shim asked because the prompt has more tokens than are reserved.
    pub(super) fn exceeds_reserved(&self) -> bool {
        matches!(
            self.question,
            Question::Open { exceeds_reserved: true, .. }
                | Question::Answered { exceeds_reserved: true }
        )
    }
}
