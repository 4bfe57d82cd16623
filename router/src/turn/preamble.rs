//! Removes a text that changes with each request from the beginning of a request's system prompt.
//!
//! An engine's prefix cache misses from the first changed token on, so such a *volatile preamble*
//! makes the engine compute the whole conversation with every turn. One range of bytes is removed,
//! and the remaining body is valid JSON:
//!
//! - A content block that holds only the preamble is removed with its comma. A chat message that
//!   holds only the preamble is also removed, unless it is the only one: then it stays, empty.
//! - Otherwise the text is removed, with at most two line breaks directly after it.
//!
//! Text that a user wrote is never changed: a preamble must be complete and stand at the very
//! beginning of a `PreamblePlace`. Of a JSON key's occurrences the last counts, as for the
//! engine. Pure.

mod pattern;
#[cfg(test)]
mod tests;

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use contract::{
    body::{Object, first_element},
    route::Kind,
};
use serde_json::value::RawValue;

use self::pattern::PreambleMatch;

/// The beginning of the system prompt. Each HTTP route has at most one such place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PreamblePlace {
    /// `system` of `/v1/messages`: a string, or the first block of an array.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreambleRange {
    /// The client that is known to write this preamble.
    pub client: &'static str,
    /// The bytes to remove, as offsets into the body.
    range: Range<usize>,
}

impl PreambleRange {
    /// `body` must be the one that [`find`] searched. Copies it only if its bytes are shared.
    #[must_use]
    pub fn apply(&self, body: Bytes) -> Bytes {
        let mut body = BytesMut::from(body);
        body.copy_within(self.range.end.., self.range.start);
        body.truncate(body.len() - self.range.len());
        body.freeze()
    }
}

/// Reads only the first message or block in the place where a preamble can stand.
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

/// Returns the client, and the slice of `messages` to remove.
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

/// Slices of the body.
struct Preamble<'a> {
    client: &'static str,
    /// With the line breaks after it.
    text: &'a str,
    /// The preamble's block with its comma, if the block holds nothing else.
    block: Option<&'a str>,
    is_whole_content: bool,
}

impl<'a> Preamble<'a> {
    /// `content` is a string, or an array whose first block is read if it is a text block.
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

/// Also returns the slice of the string that holds the preamble.
fn find_in_string(place: PreamblePlace, string: &RawValue) -> Option<(PreambleMatch, &str)> {
    let string_content = string.get().strip_prefix('"')?.strip_suffix('"')?;
    let preamble_match = pattern::find(place, string_content)?;
    Some((preamble_match, &string_content[..preamble_match.raw_bytes]))
}
