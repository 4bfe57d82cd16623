//! Decodes the messages of the shim, the plugin in the engine, and encodes commands to it.
//!
//! The trimmer's socket is at the shim's path with `.trim` appended; its frames have the same form.
//! `berth_shim/wire.py` is the other end, with classes of the same names. The tests of both ends
//! must reproduce the examples of `codec/frames.txt`.
//!
//! A frame is a little-endian `u32` length of the rest (2 to [`FRAME_BYTES_MAX`]), a `u8` protocol
//! version, and a MessagePack array: the name of the message, then its fields in the order of the
//! type that explains them. An event is such an array too, and its fields are those of the variant
//! of [`ShimEvent`](super::ShimEvent) with this name. All other structures are arrays of their
//! fields. What the agent sets itself (a rank, a time, a pid in its own namespace) isn't sent.
//!
//! | message | socket | direction | fields |
//! |---|---|---|---|
//! | `Hello` | shim | to agent | [`Hello`] |
//! | `Update` | shim | to agent | the number of the update in its connection, from 0; |
//! | | | | [`RankFacts`], nil while a full table is incomplete; the fields of |
//! | | | | [`SessionChanges`](super::SessionChanges) and the events: whether a full table |
//! | | | | begins, whether it ends, events, ids that are gone, changed [`SessionFacts`] |
//! | `Audited` | shim | to agent | [`AuditReply`] |
//! | `Trimmer` | trimmer | to agent | [`Trimmer`](super::trim::Trimmer) |
//! | `Planned` | trimmer | to agent | [`PlanReport`](super::trim::PlanReport) |
//! | `Demote` | shim | to shim | the number of the request, the session |
//! | `Prefetch` | shim | to shim | the number of the request, the session, the most tokens |
//! | `Inspect` | shim | to shim | the number of the request, the session |
//! | `SampleNow` | shim | to shim | |
//! | `Audit` | shim | to shim | the number of the request |
//! | `Republish` | shim | to shim | |
//! | `Run` | trimmer | to shim | the number of the question, the maximum number of tokens of the |
//! | | | | prompt, and the session to run the turn in; nil if the turn runs unchanged |
//!
//! `Hello` and `Trimmer` come first on their sockets, and only once. A shim sends an update at
//! least once a second, as a heartbeat of its scheduler.

use std::time::Duration;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _},
};

use super::{AuditReply, Hello, RankFacts, SessionFacts};
use crate::incarnation::INCARNATION_BYTES_MAX;

/// The agent refuses a shim with another version.
pub const VERSION: u8 = 9;
/// The shim's largest update (256 events, 512 sessions that are gone, 512 changed sessions, names
/// of 512 bytes) has 0.8 MiB.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// Bounds an incarnation's id. The ids that clients choose may be longer, but are not sent.
const NAME_BYTES_MAX: usize = 512;
const _: () = assert!(INCARNATION_BYTES_MAX <= NAME_BYTES_MAX, "every incarnation can be named");
/// Per update.
const EVENTS_MAX: usize = 256;
/// Bounds a frame's changed sessions, and those that are gone.
const SESSIONS_MAX: usize = 512;
/// Per audit.
pub(super) const AUDIT_NAMES_MAX: usize = 1000;
/// Audits take milliseconds.
const AUDIT_TIME_MAX: Duration = Duration::from_secs(3600);
/// Real engines have far fewer ranks.
const DP_RANK_MAX: u32 = 4095;
/// The depth of nested arrays, plus one. An event in the list of an update has a depth of three.
const DEPTH_LIMIT: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("a frame of {0} bytes is out of bounds")]
    LengthOutOfBounds(u32),
    #[error("the shim speaks protocol {0}, this agent {VERSION}: install the same version of both")]
    OtherVersion(u8),
    /// The text doesn't repeat the value, because it may be the name of a session.
    #[error("a frame has no valid message")]
    InvalidMessage,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "message")]
pub(super) enum ShimMessage {
    /// Sent only once.
    Hello(Box<Hello>),
    /// Sent after each step in which something changed.
    Update(Box<Update>),
    Audited(AuditReply),
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Update {
    /// The first update of a connection has 0.
    pub seq: u64,
    /// `None` while the shim has not read all sessions of a full table.
    pub facts: Option<RankFacts>,
    pub begins_table: bool,
    pub ends_table: bool,
    #[serde(deserialize_with = "decode_list::<EVENTS_MAX, _, _>")]
    pub events: Vec<WireEvent>,
    #[serde(deserialize_with = "decode_list::<SESSIONS_MAX, _, _>")]
    pub gone_ids: Vec<String>,
    #[serde(deserialize_with = "decode_list::<SESSIONS_MAX, _, _>")]
    pub sessions: Vec<SessionFacts>,
}

/// [`super::ShimEvent`] explains the kinds.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "event")]
pub(super) enum WireEvent {
    Opened { id: String, ok: bool },
    Closed { id: String },
    Committed { id: String, rid: String, history_tokens: u32, is_retracted: bool },
    Aborted { id: String, was_running: bool },
    Demoted { number: u64, id: String, refusal: Option<String> },
    Prefetched { number: u64, id: String, tokens: u64, refusal: Option<String> },
    Inspected { number: u64, session: Option<SessionFacts> },
}

/// See [`super::ShimHandle`], and for `Run`
/// [`TrimHandle::answer`](super::trim::TrimHandle::answer).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "command")]
pub(super) enum ShimCommand {
    Demote { number: u64, session: String },
    Prefetch { number: u64, session: String, tokens_max: u64 },
    Inspect { number: u64, session: String },
    SampleNow,
    Audit { number: u64 },
    Republish,
    Run { question: u64, tokens_max: u32, session: Option<String> },
}

impl ShimCommand {
    /// `None` if the session's name is longer than [`NAME_BYTES_MAX`].
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        if let Self::Demote { session, .. }
        | Self::Prefetch { session, .. }
        | Self::Inspect { session, .. }
        | Self::Run { session: Some(session), .. } = self
            && session.len() > NAME_BYTES_MAX
        {
            return None;
        }
        let message = rmp_serde::to_vec(self).expect("a command has only numbers and texts");
        let length = u32::try_from(1 + message.len()).expect("a command has one short name");
        Some([&length.to_le_bytes(), &[VERSION][..], &message].concat())
    }
}

/// Bytes that were read and not decoded; the last frame may be incomplete.
#[derive(Debug, Default)]
pub(super) struct Frames {
    buffer: Vec<u8>,
}

impl Frames {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// `None` if the next frame is incomplete.
    pub(super) fn take_message<M: DeserializeOwned>(&mut self) -> Result<Option<M>, Error> {
        let Some(length_bytes) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length_bytes);
        let size = usize::try_from(length).map_err(|_| Error::LengthOutOfBounds(length))?;
        if !(2..=FRAME_BYTES_MAX).contains(&size) {
            return Err(Error::LengthOutOfBounds(length));
        }
        let Some(frame) = self.buffer.get(4..4 + size) else { return Ok(None) };
        if frame[0] != VERSION {
            return Err(Error::OtherVersion(frame[0]));
        }
        let message = decode_message(&frame[1..])?;
        self.buffer.drain(..4 + size);
        Ok(Some(message))
    }
}

fn decode_message<M: DeserializeOwned>(mut bytes: &[u8]) -> Result<M, Error> {
    let mut decoder = rmp_serde::Deserializer::new(&mut bytes);
    decoder.set_max_depth(DEPTH_LIMIT);
    let message = M::deserialize(&mut decoder).map_err(|_| Error::InvalidMessage)?;
    if bytes.is_empty() { Ok(message) } else { Err(Error::InvalidMessage) }
}

pub(super) fn decode_list<'de, const MAX: usize, T, D>(decoder: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let items = Vec::deserialize(decoder)?;
    if items.len() > MAX {
        return Err(D::Error::invalid_length(items.len(), &"a shorter list"));
    }
    Ok(items)
}

pub(super) fn decode_dp_rank<'de, D: Deserializer<'de>>(decoder: D) -> Result<u32, D::Error> {
    let dp_rank = u32::deserialize(decoder)?;
    if dp_rank > DP_RANK_MAX {
        return Err(D::Error::custom("the DP rank is too large"));
    }
    Ok(dp_rank)
}

pub(super) fn decode_audit_time<'de, D: Deserializer<'de>>(
    decoder: D,
) -> Result<Duration, D::Error> {
    Duration::deserialize(decoder).map(|spent| spent.min(AUDIT_TIME_MAX))
}

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    use super::{Frames, ShimMessage};

    /// Returns the number of messages and whether the stream ended in an error.
    #[must_use]
    pub fn decode_stream(stream: &[u8], step: usize) -> (usize, bool) {
        let (mut frames, mut messages) = (Frames::default(), 0);
        for piece in stream.chunks(step) {
            frames.push(piece);
            loop {
                match frames.take_message::<ShimMessage>() {
                    Ok(Some(_)) => messages += 1,
                    Ok(None) => break,
                    Err(_) => return (messages, true),
                }
            }
        }
        (messages, false)
    }
}

#[cfg(test)]
pub(super) mod tests;
