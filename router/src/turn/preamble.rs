//! Removes a text that changes with each request from the beginning of a request's system prompt.
//!
//! Such a text is called a volatile preamble. Some clients write one, for example a line for
//! billing. An engine's prefix cache misses from the first changed token on, so a volatile preamble
//! makes the engine compute the whole conversation with every turn.
//!
//! `turn` calls [`find`] with each parsed body, and [`PreambleRange::apply`] if it has a preamble.
//! `pattern` has the table of known preambles, and finds one in a JSON string. This module is pure.
//! It doesn't read the setting `preamble`, by which an operator keeps the preambles.
//!
//! The removed part is one range of bytes, and the remaining body is valid JSON:
//!
//! - A content block that holds only the preamble is removed with its comma. A chat message that
//!   holds only the preamble is also removed, unless it is the only message. Then only the text is
//!   removed, so that an empty message remains.
//! - Otherwise the preamble's text is removed, with at most two line breaks directly after it,
//!   because gateways join blocks by one line break or by an empty line.
//! - Every other byte stays.
//!
//! Text that a user wrote is never changed. A preamble is recognized only if it is complete and
//! stands at the very beginning of a place where its client or a gateway puts it (see
//! `PreamblePlace`). If a JSON key occurs twice, the last occurrence counts, as it does for the
//! engine.

mod pattern;
#[cfg(test)]
mod tests;

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use proto::{
    body::{Object, first_element},
    route::Kind,
};
use serde_json::value::RawValue;

use self::pattern::PreambleMatch;

/// Where a preamble stands in a body: at the beginning of the system prompt. Each HTTP route has at
/// most one such place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PreamblePlace {
    /// `system` of `/v1/messages`: a string, or the first block of an array. The clients that write
    /// preambles use this route.
    System,
    /// The content of the first message of `/v1/chat/completions`, if its role is `system` or
    /// `developer`. Gateways make this message from a client's `system`.
    FirstMessage,
    /// `instructions` of `/v1/responses`, a string. Gateways make it from a client's `system`.
    Instructions,
}

impl PreamblePlace {
    fn for_path(path: &str) -> Option<Self> {
        match Kind::for_path(path)? {
            Kind::Messages => Some(Self::System),
            Kind::Chat => Some(Self::FirstMessage),
            Kind::Responses => Some(Self::Instructions),
            _ => None,
        }
    }
}

/// The part of a body that is a preamble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreambleRange {
    /// The client that is known to write this preamble.
    pub client: &'static str,
    /// The bytes to remove, as offsets into the body.
    range: Range<usize>,
}

impl PreambleRange {
    /// Removes the preamble from `body`, which must be the body that [`find`] searched. Copies the
    /// body only if its bytes are shared; otherwise moves the later bytes in place.
    #[must_use]
    pub fn apply(&self, body: Bytes) -> Bytes {
        let mut body = BytesMut::from(body);
        body.copy_within(self.range.end.., self.range.start);
        body.truncate(body.len() - self.range.len());
        body.freeze()
    }
}

/// Finds the preamble in the body of a request for `path`. Returns `None` if the body has none, as
/// is usual. Reads only the first message or block in the place where a preamble can stand.
#[must_use]
pub fn find(path: &str, body: &Object<'_>) -> Option<PreambleRange> {
    let place = PreamblePlace::for_path(path)?;
    let (client, removed_text) = match place {
        PreamblePlace::System => {
            let preamble = Preamble::find(place, body.get("system")?)?;
            (preamble.client, preamble.block.unwrap_or(preamble.text))
        }
        PreamblePlace::FirstMessage => find_in_first_message(body.get("messages")?)?,
        PreamblePlace::Instructions => {
            let preamble = Preamble::find(place, body.get("instructions")?)?;
            (preamble.client, preamble.text)
        }
    };
    Some(PreambleRange { client, range: body.range_of(removed_text) })
}

/// Returns the client that wrote the preamble, and the slice of `messages` to remove.
fn find_in_first_message(messages: &RawValue) -> Option<(&'static str, &str)> {
    let first_message = first_element(messages)?;
    let message = Object::parse(first_message.value.get().as_bytes()).ok()?;
    let role: String = serde_json::from_str(message.get("role")?.get()).ok()?;
    if role != "system" && role != "developer" {
        return None;
    }
    let preamble = Preamble::find(PreamblePlace::FirstMessage, message.get("content")?)?;
    let removed_text = match preamble.block {
        _ if preamble.is_whole_content && !first_message.is_only => first_message.with_comma,
        Some(block) if !preamble.is_whole_content => block,
        _ => preamble.text,
    };
    Some((preamble.client, removed_text))
}

/// A preamble at the beginning of a message's or system prompt's content, as slices of the body.
struct Preamble<'a> {
    client: &'static str,
    /// The preamble's text, with the line breaks after it.
    text: &'a str,
    /// The content block of the preamble with its comma, if the block holds nothing else.
    block: Option<&'a str>,
    /// Whether the content holds only the preamble.
    is_whole_content: bool,
}

impl<'a> Preamble<'a> {
    /// Looks for a preamble in `content`: in a string, or in the first block of an array if that
    /// block is a text block.
    fn find(place: PreamblePlace, content: &'a RawValue) -> Option<Self> {
        if content.get().starts_with('"') {
            let (preamble_match, text) = find_in_string(place, content)?;
            return Some(Self {
                client: preamble_match.client,
                text,
                block: None,
                is_whole_content: preamble_match.is_whole_text,
            });
        }
        let first_block = first_element(content)?;
        let block = Object::parse(first_block.value.get().as_bytes()).ok()?;
        let block_type: String = serde_json::from_str(block.get("type")?.get()).ok()?;
        if block_type != "text" {
            return None;
        }
        let (preamble_match, text) = find_in_string(place, block.get("text")?)?;
        Some(Self {
            client: preamble_match.client,
            text,
            block: preamble_match.is_whole_text.then_some(first_block.with_comma),
            is_whole_content: preamble_match.is_whole_text && first_block.is_only,
        })
    }
}

/// Looks for a preamble at the beginning of a JSON string. Returns the match, and the slice of the
/// string that holds the preamble.
fn find_in_string(place: PreamblePlace, string: &RawValue) -> Option<(PreambleMatch, &str)> {
    let string_content = string.get().strip_prefix('"')?.strip_suffix('"')?;
    let preamble_match = pattern::find(place, string_content)?;
    Some((preamble_match, &string_content[..preamble_match.raw_bytes]))
}
