//! Finds the volatile preamble in a request body and cuts it out by byte range. Pure.
//!
//! A volatile preamble is a text that a client puts in front of its system prompt and changes with
//! each request. An engine's prefix cache misses from the first changed token on, so such a
//! preamble makes the engine compute the whole conversation with every turn. `pattern` has the
//! table of known preambles.
//!
//! The cut is one range of bytes, and the remaining body is valid JSON:
//!
//! - A block that holds only the preamble is removed with its comma. A chat message that holds only
//!   the preamble is also removed, unless it is the only message: then its text becomes empty.
//! - Otherwise the preamble's text is removed, with at most two line breaks directly after it,
//!   because gateways join blocks by one line break or by an empty line.
//! - Every other byte stays.
//!
//! Text that a user wrote is never changed. A preamble is recognized only if it is complete and
//! stands at the very beginning of a place where its client or a gateway puts it (see `Place`). If
//! a key occurs twice, the last occurrence is used, as the engine does.

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

/// The place of a preamble in a body: the first text of the system prompt. Each route has at most
/// one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// `system` of `/v1/messages`, a string or the first block of an array. The clients themselves
    /// write it.
    System,
    /// The content of the first message of `/v1/chat/completions`, if its role is `system` or
    /// `developer`. Gateways make this message from `system`.
    FirstMessage,
    /// `instructions` of `/v1/responses`, a string. Gateways make it from `system`.
    Instructions,
}

impl Place {
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

/// Finds the preamble in the body of a request for `path`. Returns None for most bodies. Reads only
/// the first block or message of the system prompt.
#[must_use]
pub fn find(path: &str, body: &Object<'_>) -> Option<PreambleRange> {
    let place = Place::for_path(path)?;
    let (client, part) = match place {
        Place::System => {
            let found = Found::find(place, body.get("system")?)?;
            (found.client, found.block.unwrap_or(found.text))
        }
        Place::FirstMessage => find_in_first_message(body.get("messages")?)?,
        Place::Instructions => {
            let found = Found::find(place, body.get("instructions")?)?;
            (found.client, found.text)
        }
    };
    Some(PreambleRange { client, range: body.range_of(part) })
}

/// Returns the client and the part of the messages' text to remove.
fn find_in_first_message(messages: &RawValue) -> Option<(&'static str, &str)> {
    let first = first_element(messages)?;
    let message = Object::parse(first.value.get().as_bytes()).ok()?;
    let role: String = serde_json::from_str(message.get("role")?.get()).ok()?;
    if role != "system" && role != "developer" {
        return None;
    }
    let found = Found::find(Place::FirstMessage, message.get("content")?)?;
    let part = match found.block {
        _ if found.is_whole_content && !first.is_only => first.with_comma,
        Some(block) if !found.is_whole_content => block,
        _ => found.text,
    };
    Some((found.client, part))
}

/// A preamble at the beginning of a content, in slices of the body.
struct Found<'a> {
    client: &'static str,
    /// The preamble, with the line breaks after it.
    text: &'a str,
    /// The block with its comma, if it holds only the preamble.
    block: Option<&'a str>,
    /// Whether the content holds only the preamble.
    is_whole_content: bool,
}

impl<'a> Found<'a> {
    /// Looks for a preamble in a string, or in the first block of an array if it is a text block.
    fn find(place: Place, content: &'a RawValue) -> Option<Self> {
        if content.get().starts_with('"') {
            let (known, text) = find_in_string(place, content)?;
            return Some(Self {
                client: known.client,
                text,
                block: None,
                is_whole_content: known.is_whole_text,
            });
        }
        let first = first_element(content)?;
        let block = Object::parse(first.value.get().as_bytes()).ok()?;
        let kind: String = serde_json::from_str(block.get("type")?.get()).ok()?;
        if kind != "text" {
            return None;
        }
        let (known, text) = find_in_string(place, block.get("text")?)?;
        Some(Self {
            client: known.client,
            text,
            block: known.is_whole_text.then_some(first.with_comma),
            is_whole_content: known.is_whole_text && first.is_only,
        })
    }
}

fn find_in_string(place: Place, string: &RawValue) -> Option<(PreambleMatch, &str)> {
    let inside = string.get().strip_prefix('"')?.strip_suffix('"')?;
    let known = pattern::find(place, inside)?;
    Some((known, &inside[..known.raw_bytes]))
}
