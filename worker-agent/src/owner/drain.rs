//! Keeps the state of a drain, in which the agent finishes its turns and closes all sessions.
//!
//! A turn is one request and its answer. The owner task begins a drain when the agent stops, and
//! calls [`Drain::advance`] after each message. The session table refuses new turns, and closes
//! each session when its last turn has ended. This module decides when the turns that still run
//! are aborted, and tells the caller when no turn and no close is left. The owner task makes the
//! aborts.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::warn;

/// The interval between aborts of the remaining turns after a drain's grace period. Aborts are
/// repeated because the engine forgets an abort that arrives before its turn.
const ABORT_INTERVAL: Duration = Duration::from_millis(500);

/// The agent's drain.
pub(super) enum Drain {
    /// The agent takes turns.
    NotBegun,
    /// Turns may run, and closes may be pending.
    Active {
        /// When the running turns are aborted next. The first time is the end of the grace period.
        next_abort_at: Instant,
        /// Tells the caller that the drain is complete.
        reply: oneshot::Sender<()>,
    },
    /// The caller was told that the drain is complete.
    Complete,
}

impl Drain {
    /// Whether a drain has begun, so that the agent takes nothing new.
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self, Self::NotBegun)
    }

    /// Returns when [`Self::advance`] must be called next, if no turn or close ends before.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Active { next_abort_at, .. } => Some(*next_abort_at),
            Self::NotBegun | Self::Complete => None,
        }
    }

    /// Completes the drain when nothing is left. Returns whether the running turns must be aborted,
    /// because the grace period has passed.
    pub(super) fn advance(
        &mut self,
        now: Instant,
        turns_running: usize,
        closes_pending: usize,
        has_engine: bool,
    ) -> bool {
        let Self::Active { next_abort_at, .. } = self else { return false };
        // Without an engine, no close can be confirmed, so the drain doesn't wait for closes.
        if turns_running == 0 && (closes_pending == 0 || !has_engine) {
            if let Self::Active { reply, .. } = std::mem::replace(self, Self::Complete) {
                let _ = reply.send(());
            }
            return false;
        }
        if now < *next_abort_at {
            return false;
        }
        *next_abort_at = now + ABORT_INTERVAL;
        warn!(turns = turns_running, "the drain's time limit has passed; aborting turns");
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_aborted_again_and_again_after_the_grace_period() {
        let start = service::clock::now();
        let (reply, mut answer) = oneshot::channel();
        let mut drain = Drain::Active { next_abort_at: start + 4 * ABORT_INTERVAL, reply };
        assert!(!drain.advance(start, 1, 1, true));
        for repeats in [4, 5] {
            let now = start + repeats * ABORT_INTERVAL;
            assert_eq!(drain.next_deadline(), Some(now));
            assert!(drain.advance(now, 1, 1, true));
            assert!(!drain.advance(now, 1, 1, true), "not twice");
        }
        assert!(!drain.advance(start, 0, 1, true));
        assert!(answer.try_recv().is_err(), "a close is pending");
        assert!(!drain.advance(start, 0, 0, true));
        assert!(answer.try_recv().is_ok());
        assert!(drain.has_begun() && drain.next_deadline().is_none());
    }

    #[test]
    fn without_an_engine_it_waits_for_no_close() {
        let start = service::clock::now();
        let (reply, mut answer) = oneshot::channel();
        let mut drain = Drain::Active { next_abort_at: start, reply };
        drain.advance(start, 0, 3, false);
        assert!(answer.try_recv().is_ok());
    }
}
