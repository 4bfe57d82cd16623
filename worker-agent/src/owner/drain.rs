//! Keeps the state of a drain, in which the agent finishes its turns and leaves its sessions.
//!
//! A turn is one request and its answer. An operator may drain an agent that goes on: it reports
//! that it drains, so that routers place no new sessions there, and serves what still comes.
//!
//! The owner task begins a drain when the agent stops, and calls [`Drain::advance`] after each
//! message. The session table refuses new turns. It closes each session when its last turn has
//! ended, or leaves all open for the next agent process. This module decides when the turns that
//! still run are aborted, and when nothing is left to wait for. The owner task makes the aborts,
//! and hands over.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::{info, warn};

use super::Owner;
use service::clock::now;

/// The interval between aborts of the remaining turns after a drain's grace period. Aborts are
/// repeated because the engine forgets an abort that arrives before its turn.
const ABORT_INTERVAL: Duration = Duration::from_millis(500);
/// How long routers have to hear that the agent ends, before its connections do. They must tell a
/// planned end from a crash: only after the former may a successor take up the sessions.
const NOTICE: Duration = Duration::from_millis(200);

/// The agent's drain.
pub(super) enum Drain {
    /// The agent takes turns.
    Serving {
        /// An operator drains the agent: routers shall place no new sessions here.
        is_drained: bool,
    },
    /// Turns may run, and closes may be pending.
    Active {
        /// When the running turns are aborted next. The first time is the end of the grace period.
        next_abort_at: Instant,
        /// What becomes of the sessions.
        ending: Ending,
        /// The drain is not complete before this time, so that routers hear of it.
        notice_until: Option<Instant>,
        /// Tells the caller that the drain is complete.
        reply: oneshot::Sender<()>,
    },
    /// Nothing is left to do. After a hand-over, nothing may be done.
    Complete(Ending),
}

/// What becomes of the sessions when the agent ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// They are closed at the engine.
    Close,
    /// They stay open at the engine, and the next agent process takes them up.
    HandOver,
}

/// What is left of an agent's work, as its newest load report has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainState {
    /// Whether the agent drains, or stops.
    pub is_draining: bool,
    /// Turns inside the engine.
    pub turns_running: u32,
    /// Turns that wait in the agent.
    pub turns_queued: u32,
    /// Sessions that the agent holds.
    pub sessions: u32,
}

/// What the owner task must do for its drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainStep {
    /// Nothing yet.
    Wait,
    /// Abort the running turns, because the grace period has passed.
    AbortTurns,
    /// Call [`Drain::complete`], because nothing is left. Before, hand over the sessions if the
    /// ending is that.
    Complete(Ending),
}

impl Owner {
    /// Begins a drain. The reply is sent when nothing is left.
    pub(super) fn begin_drain(
        &mut self,
        grace_period: Duration,
        ending: Ending,
        reply: oneshot::Sender<()>,
    ) {
        info!(turns = self.table.rids_inside().count(), ?ending, "draining");
        self.drain = Drain::begin(now(), grace_period, ending, reply);
        match ending {
            Ending::Close => self.table.drain(now()),
            Ending::HandOver => self.table.begin_handover(now()),
        }
        self.publish_report(now());
    }

    /// Drains the agent for its operator, or ends that. Returns what is left.
    pub(super) fn set_drained(&mut self, wanted: bool) -> DrainState {
        if self.drain.set_drained(wanted) {
            info!(drained = wanted, "the operator drains the agent, or ends that");
            // Routers must hear it before the next turn that they place.
            self.publish_report(now());
        }
        let ranks = &self.handle.report.borrow().ranks;
        DrainState {
            is_draining: self.drain.is_reported(),
            turns_running: ranks.iter().map(|rank| rank.turns_running).sum(),
            turns_queued: ranks.iter().map(|rank| rank.turns_queued).sum(),
            sessions: ranks.iter().map(|rank| rank.sessions).sum(),
        }
    }
}

impl Drain {
    /// Begins a drain. Turns may run for `grace_period`.
    pub(super) fn begin(
        now: Instant,
        grace_period: Duration,
        ending: Ending,
        reply: oneshot::Sender<()>,
    ) -> Self {
        let notice_until = (ending == Ending::HandOver).then_some(now + NOTICE);
        Self::Active { next_abort_at: now + grace_period, ending, notice_until, reply }
    }

    /// Whether the agent stops, so that it takes nothing new.
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self, Self::Serving { .. })
    }

    /// Whether routers hear that the agent drains.
    pub(super) fn is_reported(&self) -> bool {
        !matches!(self, Self::Serving { is_drained: false })
    }

    /// Drains the agent for its operator, or ends that. Returns whether that changed anything: an
    /// agent that stops can't be asked to go on.
    pub(super) fn set_drained(&mut self, wanted: bool) -> bool {
        match self {
            Self::Serving { is_drained } if *is_drained != wanted => {
                *is_drained = wanted;
                true
            }
            Self::Serving { .. } | Self::Active { .. } | Self::Complete(_) => false,
        }
    }

    /// Whether the sessions are the next agent process's now.
    pub(super) fn has_handed_over(&self) -> bool {
        matches!(self, Self::Complete(Ending::HandOver))
    }

    /// Returns what becomes of the sessions; `None` before a drain, and when it is complete.
    pub(super) fn ending(&self) -> Option<Ending> {
        match self {
            Self::Active { ending, .. } => Some(*ending),
            Self::Serving { .. } | Self::Complete(_) => None,
        }
    }

    /// Returns when [`Self::advance`] must be called next, if no turn or close ends before.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Active { next_abort_at, notice_until, .. } => {
                Some(notice_until.map_or(*next_abort_at, |until| until.min(*next_abort_at)))
            }
            Self::Serving { .. } | Self::Complete(_) => None,
        }
    }

    /// Returns what must be done. `pending` is the number of closes that the engine has not
    /// confirmed, or of sessions that can't be handed over yet.
    pub(super) fn advance(
        &mut self,
        now: Instant,
        turns_running: usize,
        pending: usize,
        has_engine: bool,
    ) -> DrainStep {
        let Self::Active { next_abort_at, ending, notice_until, .. } = self else {
            return DrainStep::Wait;
        };
        if notice_until.is_some_and(|until| now < until) {
            return DrainStep::Wait;
        }
        *notice_until = None;
        // Without an engine, nothing that is pending can end, so the drain doesn't wait for it.
        if turns_running == 0 && (pending == 0 || !has_engine) {
            return DrainStep::Complete(*ending);
        }
        if now < *next_abort_at {
            return DrainStep::Wait;
        }
        *next_abort_at = now + ABORT_INTERVAL;
        warn!(turns = turns_running, "the drain's time limit has passed; aborting turns");
        DrainStep::AbortTurns
    }

    /// Tells the caller that nothing is left.
    pub(super) fn complete(&mut self) {
        let Some(ending) = self.ending() else { return };
        if let Self::Active { reply, .. } = std::mem::replace(self, Self::Complete(ending)) {
            let _ = reply.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(start: Instant, grace_period: Duration) -> (Drain, oneshot::Receiver<()>) {
        let (reply, answer) = oneshot::channel();
        (Drain::begin(start, grace_period, Ending::Close, reply), answer)
    }

    #[test]
    fn an_operator_drains_an_agent_that_serves_and_not_one_that_stops() {
        let mut serving = Drain::Serving { is_drained: false };
        assert!(!serving.is_reported());
        assert!(serving.set_drained(true) && !serving.set_drained(true));
        assert!(serving.is_reported() && !serving.has_begun());
        assert!(serving.set_drained(false) && !serving.is_reported());
        let (mut stopping, _answer) = drain(service::clock::now(), Duration::ZERO);
        assert!(!stopping.set_drained(false) && stopping.is_reported());
    }

    #[test]
    fn routers_have_time_to_hear_of_a_hand_over() {
        let start = service::clock::now();
        let (reply, _answer) = oneshot::channel();
        let mut drain = Drain::begin(start, 4 * ABORT_INTERVAL, Ending::HandOver, reply);
        assert_eq!(drain.advance(start, 0, 0, true), DrainStep::Wait);
        assert_eq!(drain.next_deadline(), Some(start + NOTICE));
        let done = DrainStep::Complete(Ending::HandOver);
        assert_eq!(drain.advance(start + NOTICE, 1, 0, true), DrainStep::Wait, "a turn runs");
        assert_eq!(drain.next_deadline(), Some(start + 4 * ABORT_INTERVAL));
        assert_eq!(drain.advance(start + NOTICE, 0, 0, true), done);
        drain.complete();
        assert!(drain.has_handed_over());
    }

    #[test]
    fn turns_are_aborted_again_and_again_after_the_grace_period() {
        let start = service::clock::now();
        let (mut drain, mut answer) = drain(start, 4 * ABORT_INTERVAL);
        assert_eq!(drain.advance(start, 1, 1, true), DrainStep::Wait);
        for repeats in [4, 5] {
            let now = start + repeats * ABORT_INTERVAL;
            assert_eq!(drain.next_deadline(), Some(now));
            assert_eq!(drain.advance(now, 1, 1, true), DrainStep::AbortTurns);
            assert_eq!(drain.advance(now, 1, 1, true), DrainStep::Wait, "not twice");
        }
        assert_eq!(drain.advance(start, 0, 1, true), DrainStep::Wait, "a close is pending");
        assert_eq!(drain.advance(start, 0, 0, true), DrainStep::Complete(Ending::Close));
        assert!(answer.try_recv().is_err());
        drain.complete();
        assert!(answer.try_recv().is_ok());
        assert!(drain.has_begun() && drain.next_deadline().is_none());
    }

    #[test]
    fn without_an_engine_it_waits_for_no_close() {
        let start = service::clock::now();
        let (mut drain, _answer) = drain(start, Duration::ZERO);
        assert_eq!(drain.advance(start, 0, 3, false), DrainStep::Complete(Ending::Close));
    }
}
