//! Defines the parts of a binding: its claim, its open and its close. Pure.

use std::{sync::Arc, time::Instant};

use contract::load::Session;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimed {
    /// `None` if nobody gave a claim.
    pub generation: Option<u64>,
    /// Until then other routers know the binding.
    pub valid_until: Instant,
}

#[derive(Debug)]
pub struct OpenAnswer {
    pub session: Arc<Session>,
    /// The agent's epoch when it answered. Sessions that an earlier process opened are gone.
    pub epoch: Option<u64>,
    pub answered_at: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseProgress {
    NotRequested,
    Requested,
    /// The agent has agreed to close the session.
    Closed {
        at: Instant,
        /// A turn was still running. The session closes when the turn ends.
        is_deferred: bool,
    },
}
