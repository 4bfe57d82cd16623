//! Defines the trimmer's messages, and holds one plan until the receiver takes it. Pure.
//!
//! While a plan waits here, the connection reads no further message, so that a slow receiver loses
//! no plan.

use serde::Deserialize;

use super::{
    super::connection::{EndReason, PeerInfo, Protocol},
    PlanReport, Trimmer, TrimmerEvent,
};

/// A trimmer works only if the engine has a single DP rank.
pub(super) const DP_RANK: u32 = 0;

#[derive(Debug, Default)]
pub(super) struct TrimmerConnection {
    waiting_plan: Option<PlanReport>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "message")]
pub(super) enum TrimmerMessage {
    /// Sent only once.
    Trimmer(Trimmer),
    /// With a question, the turn waits for the answer, and its final plan follows later. Otherwise
    /// the plan is final, and the engine gets the turn next.
    Planned(PlanReport),
}

impl Protocol for TrimmerConnection {
    const NAME: &'static str = "trimmer";
    type Message = TrimmerMessage;
    type Report = TrimmerEvent;

    fn begin(hello: TrimmerMessage, pid: Option<u32>) -> Option<(Self, PeerInfo, TrimmerEvent)> {
        let TrimmerMessage::Trimmer(mut trimmer) = hello else { return None };
        trimmer.pid_in_agent_namespace = pid;
        let takes_commands = trimmer.inert_reason.is_none();
        let info = PeerInfo { dp_rank: DP_RANK, takes_commands, unpublishable_reason: None };
        Some((Self::default(), info, TrimmerEvent::Up(trimmer)))
    }

    fn receive(&mut self, message: TrimmerMessage) -> Result<(), EndReason> {
        let TrimmerMessage::Planned(plan) = message else { return Err(EndReason::MisplacedHello) };
        self.waiting_plan = Some(plan);
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.waiting_plan.is_none()
    }

    fn has_no_report(&self) -> bool {
        self.waiting_plan.is_none()
    }

    fn next_report(&mut self) -> Option<TrimmerEvent> {
        self.waiting_plan.take().map(TrimmerEvent::Planned)
    }

    fn end_report(&self, reason: String) -> TrimmerEvent {
        TrimmerEvent::Down { reason }
    }
}

#[cfg(test)]
mod tests;
