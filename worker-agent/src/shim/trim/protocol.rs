//! Decodes the trimmer's messages, and holds one plan until the receiver takes it. Pure.
//!
//! The trimmer is the part of the shim that removes from a full history what the session already
//! holds. The parent module describes it and its plans. While a plan waits here, the connection
//! reads no further message, so that a slow receiver loses no plan.

use std::time::Instant;

use super::{
    super::{
        codec::{self, Body},
        connection::{EndReason, PeerInfo, Protocol},
    },
    Plan, PlanReport, Trimmer, TrimmerEvent,
};

/// The kind of the frame that carries the trimmer's first message.
const KIND_TRIMMER_HELLO: u8 = 4;
/// The kind of the frame that carries a plan.
const KIND_PLAN: u8 = 5;

/// The DP rank of every trimmer: a trimmer works only if the engine has a single DP rank.
pub(super) const DP_RANK: u32 = 0;

/// The state of one connection to a trimmer.
#[derive(Debug, Default)]
pub(super) struct TrimmerConnection {
    /// The plan that was read and that the receiver hasn't taken.
    waiting_plan: Option<PlanReport>,
}

/// A message from a trimmer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TrimmerMessage {
    /// The first message of a connection; sent only once.
    Trimmer(Trimmer),
    /// A plan for a marked turn, which is a turn that the agent asked to trim. If the plan carries
    /// a question, the turn waits for the agent's answer, and its final plan follows later.
    /// Otherwise the plan is final, and the engine gets the turn next.
    Planned(PlanReport),
}

impl Protocol for TrimmerConnection {
    const NAME: &'static str = "trimmer";
    type Message = TrimmerMessage;
    type Report = TrimmerEvent;

    fn decode(kind: u8, body: &mut Body<'_>) -> Result<TrimmerMessage, codec::Error> {
        match kind {
            KIND_TRIMMER_HELLO => decode_trimmer_hello(body).map(TrimmerMessage::Trimmer),
            KIND_PLAN => decode_plan_report(body).map(TrimmerMessage::Planned),
            kind => Err(codec::Error::UnknownKind(kind)),
        }
    }

    fn begin(hello: TrimmerMessage, pid: Option<u32>) -> Option<(Self, PeerInfo, TrimmerEvent)> {
        let TrimmerMessage::Trimmer(mut trimmer) = hello else { return None };
        trimmer.pid_in_agent_namespace = pid;
        let takes_commands = trimmer.inert_reason.is_none();
        let info = PeerInfo { dp_rank: DP_RANK, takes_commands, unpublishable_reason: None };
        Some((Self::default(), info, TrimmerEvent::Up(trimmer)))
    }

    fn receive(&mut self, message: TrimmerMessage, _read_at: Instant) -> Result<(), EndReason> {
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

fn decode_trimmer_hello(body: &mut Body<'_>) -> Result<Trimmer, codec::Error> {
    Ok(Trimmer {
        pid: body.read_u32()?,
        // `begin` sets it, from the socket's peer credentials.
        pid_in_agent_namespace: None,
        instance: u128::from_le_bytes(body.read_array()?),
        sglang: body.read_string()?,
        shim: body.read_string()?,
        inert_reason: body.read_reason()?,
    })
}

fn decode_plan_report(body: &mut Body<'_>) -> Result<PlanReport, codec::Error> {
    let question = Some(body.read_u64()?).filter(|number| *number != 0);
    let (shared_tokens, committed_tokens, appended_tokens, prompt_tokens) =
        (body.read_u32()?, body.read_u32()?, body.read_u32()?, body.read_u32()?);
    let plan = match body.read_u8()? {
        1 => Plan::Trimmed,
        2 => Plan::Retokenized,
        3 => Plan::Diverged,
        4 => Plan::Refused,
        _ => return Err(codec::Error::InvalidValue),
    };
    let (session, rid, why) = (body.read_string()?, body.read_string()?, body.read_string()?);
    Ok(PlanReport {
        question,
        plan,
        shared_tokens,
        committed_tokens,
        appended_tokens,
        prompt_tokens,
        session,
        rid,
        why,
    })
}

#[cfg(test)]
mod tests;
