//! Keeps a drain's state: the agent finishes its turns, then closes or hands over its sessions.
//!
//! This module only decides; the owner task makes the aborts, and hands over. An operator's drain
//! lets the agent go on: it serves what still comes.

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::oneshot;
use tracing::{info, warn};

use super::Owner;
use service::clock::now;

/// Aborts are repeated because the engine forgets one that arrives before its turn.
const ABORT_INTERVAL: Duration = Duration::from_millis(500);
/// Routers must tell a planned end from a crash: only after the former may a successor take up the
/// sessions. So they hear of it before the agent's connections end. A router or an agent on a busy
/// machine may stand still for hundreds of milliseconds.
const NOTICE: Duration = Duration::from_secs(1);

pub(super) enum Drain {
    Serving {
        /// An operator's drain: routers shall place no new sessions here.
        is_drained: bool,
    },
    Active {
        /// At first the end of the grace period.
        next_abort_at: Instant,
        ending: Ending,
        /// Until this time, the drain is not complete, so that routers hear of it.
        notice_until: Option<Instant>,
        reply: oneshot::Sender<()>,
    },
    /// After a hand-over, sessions belong to the next agent process.
    Complete(Ending),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    Close,
    /// The sessions stay open at the engine for the next agent process.
    HandOver,
}

/// The admin port's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DrainState {
    /// True also if the agent stops.
    #[serde(rename = "draining")]
    pub is_draining: bool,
    /// Inside the engine.
    pub turns_running: u32,
    /// In the agent.
    pub turns_queued: u32,
    pub sessions: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainStep {
    Wait,
    /// The grace period has passed.
    AbortTurns,
    /// Call [`Drain::complete`], after handing over the sessions if the ending is that.
    Complete(Ending),
}

impl Owner {
    /// The reply is sent when nothing is left.
    pub(super) fn begin_drain(
        &mut self,
        grace_period: Duration,
        ending: Ending,
        reply: oneshot::Sender<()>,
    ) {
        info!(turns = self.table.queue().rids_inside().count(), ?ending, "draining");
        self.drain = Drain::begin(now(), grace_period, ending, reply);
        match ending {
            Ending::Close => self.table.drain(now()),
            Ending::HandOver => self.table.begin_handover(now()),
        }
        self.publish_report(now());
    }

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
    pub(super) fn begin(
        now: Instant,
        grace_period: Duration,
        ending: Ending,
        reply: oneshot::Sender<()>,
    ) -> Self {
        let notice_until = (ending == Ending::HandOver).then_some(now + NOTICE);
        Self::Active { next_abort_at: now + grace_period, ending, notice_until, reply }
    }

    /// An agent that stops takes nothing new.
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self, Self::Serving { .. })
    }

    pub(super) fn is_reported(&self) -> bool {
        !matches!(self, Self::Serving { is_drained: false })
    }

    /// Returns whether that changed anything: an agent that stops can't be asked to go on.
    pub(super) fn set_drained(&mut self, wanted: bool) -> bool {
        match self {
            Self::Serving { is_drained } if *is_drained != wanted => {
                *is_drained = wanted;
                true
            }
            Self::Serving { .. } | Self::Active { .. } | Self::Complete(_) => false,
        }
    }

    pub(super) fn has_handed_over(&self) -> bool {
        matches!(self, Self::Complete(Ending::HandOver))
    }

    /// `None` before a drain, and when it is complete.
    pub(super) fn ending(&self) -> Option<Ending> {
        match self {
            Self::Active { ending, .. } => Some(*ending),
            Self::Serving { .. } | Self::Complete(_) => None,
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Active { next_abort_at, notice_until, .. } => {
                // Even a shorter grace period has no end before it.
                Some(notice_until.unwrap_or(*next_abort_at))
            }
            Self::Serving { .. } | Self::Complete(_) => None,
        }
    }

    /// `pending` counts unconfirmed closes, or sessions that can't be handed over yet.
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
        let (reply, _answer) = oneshot::channel();
        let short = Drain::begin(start, NOTICE / 2, Ending::HandOver, reply);
        assert_eq!(short.next_deadline(), Some(start + NOTICE), "nothing happens earlier");
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
