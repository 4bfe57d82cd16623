//! Volatile preambles: text that a client puts in front of its system prompt and changes with each
//! request. An engine's prefix cache misses from the first changed token on, so such a preamble
//! makes the engine compute the whole conversation with every turn. This module finds one and cuts
//! it out of the body by byte range. Pure; `pattern` has the table of known preambles.
//!
//! The cut is one range of bytes, and what is left is valid JSON:
//!
//! - A block that holds only the preamble is removed with its comma. So is a chat message, unless
//!   it is the only message: then the message stays and its text is empty.
//! - Otherwise the preamble's text is removed, with at most two line breaks directly behind it:
//!   gateways join blocks by one line break or by an empty line.
//! - Every other byte stays.
//!
//! Text that a user wrote is never touched. A preamble counts only where its client or a gateway
//! puts it (see `Place`), at the very beginning, and complete. Of duplicate keys the last one
//! counts, as it does for the engine.

mod pattern;
#[cfg(test)]
mod tests;

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use proto::body::{Object, first_element};
use serde_json::value::RawValue;

use self::pattern::Match;

/// Where a body may have a preamble: in the first text of the system prompt. Each route has one
/// such place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// `system` of `/v1/messages`, which the clients themselves fill: a string, or the first block
    /// of an array.
    System,
    /// The content of the first message of `/v1/chat/completions`, if its role is `system` or
    /// `developer`. Gateways make it of `system`.
    FirstMessage,
    /// `instructions` of `/v1/responses`, a string. Gateways make it of `system`.
    Instructions,
}

impl Place {
    fn of(path: &str) -> Option<Self> {
        match path {
            "/v1/messages" => Some(Self::System),
            "/v1/chat/completions" => Some(Self::FirstMessage),
            "/v1/responses" => Some(Self::Instructions),
            _ => None,
        }
    }
}

/// The part of a body that is a preamble.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// The client that is known to write it.
    pub client: &'static str,
    /// What goes, as offsets into the body.
    range: Range<usize>,
}

impl Cut {
    /// Removes the preamble from the body that it was found in. Moves the bytes behind it in place
    /// where nobody else holds them.
    #[must_use]
    pub fn apply(&self, body: Bytes) -> Bytes {
        let mut body = BytesMut::from(body);
        body.copy_within(self.range.end.., self.range.start);
        body.truncate(body.len() - self.range.len());
        body.freeze()
    }
}

/// Finds the preamble of a request for `path`; None for most bodies. Reads only the first block or
/// message of the system prompt.
#[must_use]
pub fn find(path: &str, body: &Object<'_>) -> Option<Cut> {
    let place = Place::of(path)?;
    let (client, part) = match place {
        Place::System => {
            let found = Found::at(place, body.get("system")?)?;
            (found.client, found.block.unwrap_or(found.text))
        }
        Place::FirstMessage => in_first_message(body.get("messages")?)?,
        Place::Instructions => {
            let found = Found::at(place, body.get("instructions")?)?;
            (found.client, found.text)
        }
    };
    Some(Cut { client, range: body.range_of(part) })
}

/// Returns the client and what goes of the messages' text.
fn in_first_message(messages: &RawValue) -> Option<(&'static str, &str)> {
    let first = first_element(messages)?;
    let message = Object::parse(first.value.get().as_bytes()).ok()?;
    let role: String = serde_json::from_str(message.get("role")?.get()).ok()?;
    if role != "system" && role != "developer" {
        return None;
    }
    let found = Found::at(Place::FirstMessage, message.get("content")?)?;
    let part = match found.block {
        _ if found.is_all && !first.is_only => first.with_comma,
        Some(block) if !found.is_all => block,
        _ => found.text,
    };
    Some((found.client, part))
}

/// A preamble at the beginning of a content, in slices of the body.
struct Found<'a> {
    client: &'static str,
    /// The preamble, with the line breaks behind it.
    text: &'a str,
    /// The block that holds only the preamble, with its comma.
    block: Option<&'a str>,
    /// Whether the content has nothing else.
    is_all: bool,
}

impl<'a> Found<'a> {
    /// Looks at a string, or at the first block of an array if that is a text.
    fn at(place: Place, content: &'a RawValue) -> Option<Self> {
        if content.get().starts_with('"') {
            let (known, text) = in_string(place, content)?;
            return Some(Self { client: known.client, text, block: None, is_all: known.is_all });
        }
        let first = first_element(content)?;
        let block = Object::parse(first.value.get().as_bytes()).ok()?;
        let kind: String = serde_json::from_str(block.get("type")?.get()).ok()?;
        if kind != "text" {
            return None;
        }
        let (known, text) = in_string(place, block.get("text")?)?;
        Some(Self {
            client: known.client,
            text,
            block: known.is_all.then_some(first.with_comma),
            is_all: known.is_all && first.is_only,
        })
    }
}

fn in_string(place: Place, string: &RawValue) -> Option<(Match, &str)> {
    let inside = string.get().strip_prefix('"')?.strip_suffix('"')?;
    let known = pattern::find(place, inside)?;
    Some((known, &inside[..known.raw_bytes]))
}
