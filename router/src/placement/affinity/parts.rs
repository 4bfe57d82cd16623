//! Defines the parts of a binding: its claim, its open and its close. Pure.

use std::{sync::Arc, time::Instant};

use proto::load::Session;

/// What other routers know of a binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimed {
    /// The generation of the claim. `None` if nobody gave a claim.
    pub generation: Option<u64>,
    /// Until when other routers know the binding.
    pub valid_until: Instant,
}

/// An agent's positive answer to a request to open a session.
#[derive(Debug)]
pub struct OpenAnswer {
    /// The session as the agent answered.
    pub session: Arc<Session>,
    /// The agent's epoch when it answered. Each agent process has its own. Sessions that an earlier
    /// process opened are gone.
    pub epoch: Option<u64>,
    /// When the answer arrived.
    pub answered_at: Instant,
}

/// How far a close of the session through this router has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseProgress {
    /// No close was requested.
    NotRequested,
    /// The agent was asked to close the session.
    Requested,
    /// The agent has agreed to close the session.
    Closed {
        /// When the agent agreed.
        at: Instant,
        /// Whether a turn was still running. If so, the session closes when the turn ends.
        is_deferred: bool,
    },
}
