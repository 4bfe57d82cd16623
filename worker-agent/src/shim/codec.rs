//! Decodes the messages of the shim, the plugin in the engine, and encodes commands to it. Pure.
//!
//! The shim has a socket for its reports. Another socket belongs to the trimmer, the shim's part
//! that shortens prompts. The frames of both sockets have the same form. `connection` reads and
//! writes the frames, and `trim/protocol` decodes the trimmer's. The shim's `berth_shim/wire.py` is
//! the other end of this protocol. That file has the same table, and explains the fields. Tests run
//! the two ends against each other.
//!
//! A frame is a `u32` length of the rest (2 to [`FRAME_BYTES_MAX`]), a `u8` protocol version, a
//! `u8` kind, and a body. Integers are unsigned and little-endian. A `str` is a `u16` length and as
//! many bytes of UTF-8; a `bool` is one byte, 0 or 1; a list is a `u16` count and its items.
//!
//! | kind | frame | direction | body |
//! |---|---|---|---|
//! | 1 | hello | to agent | the fields of [`Hello`] in order; `None` is an empty str |
//! | 2 | update | to agent | the fields of `Update` in order: figures, then three lists |
//! | 3 | audit | to agent | the fields of [`AuditReply`] in order; the report is the rest |
//! | 4 | trimmer | to agent | the fields of [`Trimmer`](super::trim::Trimmer) in order |
//! | 5 | planned | to agent | the fields of [`PlanReport`](super::trim::PlanReport): the question |
//! | | | | u64, 0 for `None`; the token counts u32 each; plan u8; then the texts |
//! | 16 | demote | to shim | session str |
//! | 17 | sample now | to shim | nothing |
//! | 18 | audit | to shim | number u64 |
//! | 19 | republish | to shim | nothing |
//! | 20 | run | to shim | number u64, tokens u32, session str |
//!
//! Frames 4, 5 and 20 are used only on the trimmer's socket, the others only on the shim's.
//!
//! The lists of an update have these items:
//!
//! | item | fields |
//! |---|---|
//! | session that is gone | id str |
//! | changed session | id str; flags u8 (1 holds a row, 2 in flight, 4 closing); then u32 each: |
//! | | tokens allocated, committed, protected, in the history |
//! | event | kind u8, session str, then the fields of its kind: |
//! | 1, opened | ok bool |
//! | 2, closed | |
//! | 3, committed | rid str, history tokens u32, is_retracted bool |
//! | 4, aborted | was_running bool |
//! | 5, demoted | refusal str |

use std::{str, time::Duration};

use super::{AuditReply, Hello, SessionFacts};
use crate::incarnation::INCARNATION_BYTES_MAX;

/// The version of the protocol. The agent refuses a shim with another version.
pub const VERSION: u8 = 4;
/// The maximum of the length field of a frame. The shim's largest update (256 events, 512 sessions
/// that are gone, 512 changed sessions, names of 512 bytes) has 0.8 MiB.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// The maximum bytes of a session's name. A name is the id of an incarnation, which is one life of
/// a session in the engine. The ids that clients choose may be longer, but are not sent.
const NAME_BYTES_MAX: usize = 512;
const _: () = assert!(INCARNATION_BYTES_MAX <= NAME_BYTES_MAX, "every incarnation can be named");
/// The maximum number of changed sessions in a frame. After a frame with this many, the table
/// continues in the next frame.
pub const SESSIONS_MAX: usize = 512;
/// The maximum DP rank that is accepted. Real engines have far fewer ranks.
const DP_RANK_MAX: u32 = 4095;

const KIND_HELLO: u8 = 1;
const KIND_UPDATE: u8 = 2;
const KIND_AUDITED: u8 = 3;
const KIND_DEMOTE: u8 = 16;
const KIND_SAMPLE_NOW: u8 = 17;
const KIND_AUDIT: u8 = 18;
const KIND_REPUBLISH: u8 = 19;
const KIND_RUN: u8 = 20;

/// Why bytes from a shim can't be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The length of a frame is below 2 or above [`FRAME_BYTES_MAX`].
    #[error("a frame of {0} bytes is out of bounds")]
    LengthOutOfBounds(u32),
    /// The peer uses another version of the protocol.
    #[error("the shim speaks protocol {0}, this agent {VERSION}: install the same version of both")]
    OtherVersion(u8),
    /// A frame or event has a kind that is not in the table.
    #[error("unknown kind {0}")]
    UnknownKind(u8),
    /// A field has an invalid value.
    #[error("a field has an invalid value")]
    InvalidValue,
    /// The body ends before its last field, or has bytes after it.
    #[error("a frame's body has the wrong length")]
    WrongBodyLength,
}

/// A message from a shim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ShimMessage {
    /// The first message of a connection; sent only once.
    Hello(Box<Hello>),
    /// Sent after each step in which something changed.
    Update(Box<Update>),
    /// The answer to a request for an audit.
    Audited(AuditReply),
}

/// An update of one rank. [`super::RankFacts`] explains the figures. [`super::SessionChanges`]
/// explains `is_full_table`, `gone_ids` and `sessions`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Update {
    /// The number of the update in its connection, from 0.
    pub seq: u64,
    pub events_lost: u64,
    pub samples: u64,
    pub samples_ns: u64,
    pub recounts: u64,
    pub pool_tokens: u64,
    pub available_tokens: u64,
    pub evictable_tokens: u64,
    pub protected_tokens: u64,
    pub held_tokens: u64,
    pub uncached_tokens: u64,
    pub rows_total: u32,
    pub rows_free: u32,
    pub running: u32,
    pub waiting: u32,
    pub is_full_table: bool,
    pub events: Vec<WireEvent>,
    pub gone_ids: Vec<String>,
    pub sessions: Vec<SessionFacts>,
}

/// An event of one session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WireEvent {
    pub id: String,
    pub kind: WireEventKind,
}

/// What happened to a session. [`super::ShimEvent`] explains the kinds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WireEventKind {
    Opened { ok: bool },
    Closed,
    Committed { rid: String, history_tokens: u32, is_retracted: bool },
    Aborted { was_running: bool },
    Demoted { refusal: String },
}

/// A command from the agent. [`super::ShimHandle`] explains all but `Run`, which is the trimmer's
/// and is explained at [`TrimHandle::answer`](super::trim::TrimHandle::answer).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ShimCommand {
    Demote(String),
    SampleNow,
    Audit(u64),
    Republish,
    Run { question: u64, tokens_max: u32, session: String },
}

impl ShimCommand {
    /// Encodes the command as a frame. Returns `None` if the session's name is longer than
    /// [`NAME_BYTES_MAX`].
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let (kind, body) = match self {
            Self::Demote(id) => (KIND_DEMOTE, encode_name(id)?),
            Self::SampleNow => (KIND_SAMPLE_NOW, vec![]),
            Self::Audit(number) => (KIND_AUDIT, number.to_le_bytes().to_vec()),
            Self::Republish => (KIND_REPUBLISH, vec![]),
            Self::Run { question, tokens_max, session } => {
                let (question, tokens_max) = (question.to_le_bytes(), tokens_max.to_le_bytes());
                (KIND_RUN, [&question[..], &tokens_max, &encode_name(session)?].concat())
            }
        };
        let length = u32::try_from(body.len() + 2).ok()?;
        Some([&length.to_le_bytes(), &[VERSION, kind][..], &body].concat())
    }
}

/// Encodes a name as a `str`. Returns `None` if it is longer than [`NAME_BYTES_MAX`].
fn encode_name(text: &str) -> Option<Vec<u8>> {
    let length = u16::try_from(text.len()).ok().filter(|_| text.len() <= NAME_BYTES_MAX)?;
    Some([&length.to_le_bytes(), text.as_bytes()].concat())
}

/// The bytes that were read from a stream and not decoded: complete frames, then an incomplete one.
#[derive(Debug, Default)]
pub(super) struct Frames {
    buffer: Vec<u8>,
}

impl Frames {
    /// Appends bytes that were read.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Takes the next message, decoded by `decode`. Returns `None` if the next frame is incomplete.
    pub(super) fn take_message<M>(&mut self, decode: DecodeFn<M>) -> Result<Option<M>, Error> {
        let Some(length_bytes) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length_bytes);
        let size = usize::try_from(length).map_err(|_| Error::LengthOutOfBounds(length))?;
        if !(2..=FRAME_BYTES_MAX).contains(&size) {
            return Err(Error::LengthOutOfBounds(length));
        }
        let Some(frame) = self.buffer.get(4..4 + size) else { return Ok(None) };
        let mut body = Body { undecoded: frame };
        let version = body.read_u8()?;
        if version != VERSION {
            return Err(Error::OtherVersion(version));
        }
        let message = decode(body.read_u8()?, &mut body)?;
        if !body.undecoded.is_empty() {
            return Err(Error::WrongBodyLength);
        }
        self.buffer.drain(..4 + size);
        Ok(Some(message))
    }
}

/// A function that decodes a message from its kind and body.
pub(super) type DecodeFn<M> = fn(u8, &mut Body<'_>) -> Result<M, Error>;

/// Decodes a message from a shim.
pub(super) fn decode_message(kind: u8, body: &mut Body<'_>) -> Result<ShimMessage, Error> {
    Ok(match kind {
        KIND_HELLO => ShimMessage::Hello(Box::new(decode_hello(body)?)),
        KIND_UPDATE => ShimMessage::Update(Box::new(decode_update(body)?)),
        KIND_AUDITED => ShimMessage::Audited(decode_audited(body)?),
        kind => return Err(Error::UnknownKind(kind)),
    })
}

fn decode_hello(body: &mut Body<'_>) -> Result<Hello, Error> {
    let hello = Hello {
        pid: body.read_u32()?,
        // The caller sets it, from the socket's peer credentials.
        pid_in_agent_namespace: None,
        dp_rank: body.read_u32()?,
        page_size_tokens: body.read_u32()?,
        pool_tokens: body.read_u64()?,
        rows_total: body.read_u32()?,
        instance: u128::from_le_bytes(body.read_array()?),
        sglang: body.read_string()?,
        shim: body.read_string()?,
        inert_reason: body.read_reason()?,
        undemotable_reason: body.read_reason()?,
        unauditable_reason: body.read_reason()?,
        unpublishable_reason: body.read_reason()?,
        device: body.read_string()?,
        page_bytes: Some(body.read_u64()?).filter(|bytes| *bytes > 0),
    };
    if hello.dp_rank > DP_RANK_MAX { Err(Error::InvalidValue) } else { Ok(hello) }
}

fn decode_update(body: &mut Body<'_>) -> Result<Update, Error> {
    Ok(Update {
        seq: body.read_u64()?,
        events_lost: body.read_u64()?,
        samples: body.read_u64()?,
        samples_ns: body.read_u64()?,
        recounts: body.read_u64()?,
        pool_tokens: body.read_u64()?,
        available_tokens: body.read_u64()?,
        evictable_tokens: body.read_u64()?,
        protected_tokens: body.read_u64()?,
        held_tokens: body.read_u64()?,
        uncached_tokens: body.read_u64()?,
        rows_total: body.read_u32()?,
        rows_free: body.read_u32()?,
        running: body.read_u32()?,
        waiting: body.read_u32()?,
        is_full_table: body.read_bool()?,
        events: body.read_list(decode_event)?,
        gone_ids: body.read_list(Body::read_string)?,
        sessions: body.read_list(decode_session)?,
    })
}

fn decode_audited(body: &mut Body<'_>) -> Result<AuditReply, Error> {
    let (number, spent) = (body.read_u64()?, Duration::from_nanos(body.read_u64()?));
    let (refusal, names) = (body.read_reason()?, body.read_list(Body::read_string)?);
    let report = std::mem::take(&mut body.undecoded).to_vec();
    Ok(AuditReply { number, spent, refusal, names, report })
}

fn decode_event(body: &mut Body<'_>) -> Result<WireEvent, Error> {
    let kind_number = body.read_u8()?;
    let id = body.read_string()?;
    let kind = match kind_number {
        1 => WireEventKind::Opened { ok: body.read_bool()? },
        2 => WireEventKind::Closed,
        3 => WireEventKind::Committed {
            rid: body.read_string()?,
            history_tokens: body.read_u32()?,
            is_retracted: body.read_bool()?,
        },
        4 => WireEventKind::Aborted { was_running: body.read_bool()? },
        5 => WireEventKind::Demoted { refusal: body.read_string()? },
        number => return Err(Error::UnknownKind(number)),
    };
    Ok(WireEvent { id, kind })
}

fn decode_session(body: &mut Body<'_>) -> Result<SessionFacts, Error> {
    let id = body.read_string()?;
    let flags = body.read_u8()?;
    if flags > 7 {
        return Err(Error::InvalidValue);
    }
    Ok(SessionFacts {
        id,
        holds_row: flags & 1 != 0,
        in_flight: flags & 2 != 0,
        closing: flags & 4 != 0,
        allocated_tokens: body.read_u32()?,
        committed_tokens: body.read_u32()?,
        protected_tokens: body.read_u32()?,
        history_tokens: body.read_u32()?,
    })
}

/// The part of a frame's body that isn't decoded yet.
pub(super) struct Body<'a> {
    undecoded: &'a [u8],
}

impl<'a> Body<'a> {
    fn take(&mut self, size: usize) -> Result<&'a [u8], Error> {
        let (taken, undecoded) =
            self.undecoded.split_at_checked(size).ok_or(Error::WrongBodyLength)?;
        self.undecoded = undecoded;
        Ok(taken)
    }

    pub(super) fn read_array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        self.take(N)?.try_into().map_err(|_| Error::WrongBodyLength)
    }

    pub(super) fn read_u8(&mut self) -> Result<u8, Error> {
        self.read_array().map(u8::from_le_bytes)
    }

    fn read_u16(&mut self) -> Result<u16, Error> {
        self.read_array().map(u16::from_le_bytes)
    }

    pub(super) fn read_u32(&mut self) -> Result<u32, Error> {
        self.read_array().map(u32::from_le_bytes)
    }

    pub(super) fn read_u64(&mut self) -> Result<u64, Error> {
        self.read_array().map(u64::from_le_bytes)
    }

    fn read_bool(&mut self) -> Result<bool, Error> {
        match self.read_u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Error::InvalidValue),
        }
    }

    pub(super) fn read_string(&mut self) -> Result<String, Error> {
        let length = self.read_u16()?;
        let bytes = self.take(length.into())?;
        str::from_utf8(bytes).map(str::to_owned).map_err(|_| Error::InvalidValue)
    }

    /// Reads a reason; an empty one becomes `None`.
    pub(super) fn read_reason(&mut self) -> Result<Option<String>, Error> {
        self.read_string().map(|reason| Some(reason).filter(|reason| !reason.is_empty()))
    }

    /// Reads a list, whose items `read_item` reads. Allocates as items are read, because the count
    /// in the frame may be false.
    fn read_list<T>(
        &mut self,
        read_item: fn(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let count = self.read_u16()?;
        let mut items = vec![];
        for _ in 0..count {
            items.push(read_item(self)?);
        }
        Ok(items)
    }
}

#[cfg(test)]
pub(super) mod tests;
