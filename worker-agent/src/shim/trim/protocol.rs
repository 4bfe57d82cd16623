//! Decodes the trimmer's messages, and keeps the one plan that the receiver hasn't taken yet. Pure.

use std::time::Instant;

use super::{
    super::{
        codec::{self, Body},
        connection::{Caller, Ended, Talk},
    },
    News, Plan, Planned, Trimmer,
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
pub(super) enum Message {
    /// The first message of a connection; sent only once.
    Trimmer(Trimmer),
    /// A plan. A final one comes before the engine gets a marked turn, and one with a question
    /// before that.
    Planned(Planned),
}

impl Talk for Plans {
    const NAME: &'static str = "trimmer";
    type Message = Message;
    type News = News;

    fn decode(kind: u8, body: &mut Body<'_>) -> Result<Message, codec::Error> {
        match kind {
            TRIMMER => trimmer(body).map(Message::Trimmer),
            PLANNED => planned(body).map(Message::Planned),
            kind => Err(codec::Error::Kind(kind)),
        }
    }

    fn begin(first: Message, pid: Option<u32>) -> Option<(Self, Caller, News)> {
        let Message::Trimmer(mut trimmer) = first else { return None };
        trimmer.seen_pid = pid;
        let works = trimmer.inert.is_none();
        let caller = Caller { dp_rank: DP_RANK, works, unpublishable: None };
        Some((Self::default(), caller, News::Up(trimmer)))
    }

    fn take(&mut self, message: Message, _at: Instant) -> Result<(), Ended> {
        let Message::Planned(planned) = message else { return Err(Ended::Order) };
        self.waiting = Some(planned);
        Ok(())
    }

    fn accepts(&self) -> bool {
        self.waiting.is_none()
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_none()
    }

    fn pop(&mut self) -> Option<News> {
        self.waiting.take().map(News::Planned)
    }

    fn end(&self, reason: String) -> News {
        News::Down { reason }
    }
}

fn trimmer(body: &mut Body<'_>) -> Result<Trimmer, codec::Error> {
    Ok(Trimmer {
        pid: body.u32()?,
        // Set later from the socket's peer credentials.
        seen_pid: None,
        instance: u128::from_le_bytes(body.array()?),
        sglang: body.string()?,
        shim: body.string()?,
        inert: body.reason()?,
    })
}

fn planned(body: &mut Body<'_>) -> Result<Planned, codec::Error> {
    let question = Some(body.u64()?).filter(|number| *number != 0);
    let (at, committed, sent, prompt) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
    let plan = match body.u8()? {
        1 => Plan::Trimmed,
        2 => Plan::Retokenized,
        3 => Plan::Diverged,
        4 => Plan::Refused,
        _ => return Err(codec::Error::Value),
    };
    let (session, rid, why) = (body.string()?, body.string()?, body.string()?);
    Ok(Planned { question, plan, at, committed, sent, prompt, session, rid, why })
}

#[cfg(test)]
mod tests;
