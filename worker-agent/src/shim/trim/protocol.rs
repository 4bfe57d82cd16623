//! Decodes the trimmer's messages, and keeps the one plan that the receiver hasn't taken yet. Pure.

use std::time::Instant;

use super::{
    super::{
        codec::{self, Body},
        connection::{EndReason, PeerInfo, Protocol},
    },
    Plan, Planned, Trimmer, TrimmerEvent,
};

const TRIMMER: u8 = 4;
const PLANNED: u8 = 5;

/// The trimmer's rank. It trims only if the engine has a single DP rank.
pub(super) const DP_RANK: u32 = 0;

/// The state of one connection: the plan that the receiver hasn't taken yet.
#[derive(Debug, Default)]
pub(super) struct Plans {
    waiting: Option<Planned>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum TrimmerMessage {
    /// The first message of a connection; sent only once.
    Trimmer(Trimmer),
    /// A plan. A final one comes before the engine gets a marked turn, and one with a question
    /// before that.
    Planned(Planned),
}

impl Protocol for Plans {
    const NAME: &'static str = "trimmer";
    type Message = TrimmerMessage;
    type Report = TrimmerEvent;

    fn decode(kind: u8, body: &mut Body<'_>) -> Result<TrimmerMessage, codec::Error> {
        match kind {
            TRIMMER => decode_trimmer(body).map(TrimmerMessage::Trimmer),
            PLANNED => decode_planned(body).map(TrimmerMessage::Planned),
            kind => Err(codec::Error::Kind(kind)),
        }
    }

    fn begin(first: TrimmerMessage, pid: Option<u32>) -> Option<(Self, PeerInfo, TrimmerEvent)> {
        let TrimmerMessage::Trimmer(mut trimmer) = first else { return None };
        trimmer.seen_pid = pid;
        let works = trimmer.inert.is_none();
        let info = PeerInfo { dp_rank: DP_RANK, works, unpublishable: None };
        Some((Self::default(), info, TrimmerEvent::Up(trimmer)))
    }

    fn receive(&mut self, message: TrimmerMessage, _at: Instant) -> Result<(), EndReason> {
        let TrimmerMessage::Planned(planned) = message else { return Err(EndReason::Order) };
        self.waiting = Some(planned);
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.waiting.is_none()
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_none()
    }

    fn next_report(&mut self) -> Option<TrimmerEvent> {
        self.waiting.take().map(TrimmerEvent::Planned)
    }

    fn end_report(&self, reason: String) -> TrimmerEvent {
        TrimmerEvent::Down { reason }
    }
}

fn decode_trimmer(body: &mut Body<'_>) -> Result<Trimmer, codec::Error> {
    Ok(Trimmer {
        pid: body.read_u32()?,
        // Set later from the socket's peer credentials.
        seen_pid: None,
        instance: u128::from_le_bytes(body.read_array()?),
        sglang: body.read_string()?,
        shim: body.read_string()?,
        inert: body.read_reason()?,
    })
}

fn decode_planned(body: &mut Body<'_>) -> Result<Planned, codec::Error> {
    let question = Some(body.read_u64()?).filter(|number| *number != 0);
    let (at, committed, sent, prompt) =
        (body.read_u32()?, body.read_u32()?, body.read_u32()?, body.read_u32()?);
    let plan = match body.read_u8()? {
        1 => Plan::Trimmed,
        2 => Plan::Retokenized,
        3 => Plan::Diverged,
        4 => Plan::Refused,
        _ => return Err(codec::Error::Value),
    };
    let (session, rid, why) = (body.read_string()?, body.read_string()?, body.read_string()?);
    Ok(Planned { question, plan, at, committed, sent, prompt, session, rid, why })
}

#[cfg(test)]
mod tests;
