//! Tells the shim inside the engine what to do with a turn, by headers of the request.
//!
//! Headers are the only thing that all of the engine's routes pass on. `turn` calls this module
//! before it sends a turn.

use http::{HeaderMap, HeaderName, HeaderValue};
use proto::route::Kind;

use crate::session::Turn;

/// Request header to the engine for a turn with a full history. Berth's shim inside the engine may
/// then trim the prompt: it gives the engine only the part that the session doesn't hold. The value
/// has three words: the maximum number of prompt tokens with which the turn may run in the session,
/// the session's id in the engine, and the turn's id.
const TRIM_HEADER: HeaderName = HeaderName::from_static("x-override-berth-trim");
/// Request header to the engine, sent with [`TRIM_HEADER`]: the shim must refuse the turn if it
/// doesn't continue its session's history. An old shim doesn't know the header, and runs such a
/// turn outside the session. The agent then aborts the turn.
const MUST_CONTINUE_HEADER: HeaderName = HeaderName::from_static("x-override-berth-must-continue");
/// Request header to the engine on a route whose body can't name a session: the tag that the shim
/// gives the turn's KV. A shim of before this header leaves the turn untagged.
const TAG_HEADER: HeaderName = HeaderName::from_static("x-override-berth-tag");

/// Adds the headers that tell the shim the turn's tag and how to handle a full history. The shim
/// reads the headers when the request arrives, and trims after the engine has tokenized the prompt.
pub(super) fn add_shim_headers(headers: &mut HeaderMap, kind: Kind, turn: &Turn, rid: &str) {
    let Some(session) = &turn.session else { return };
    let tag = turn.tag().filter(|_| !kind.is_taggable());
    if let Some(tag) = tag.and_then(|tag| HeaderValue::from_str(tag).ok()) {
        headers.insert(TAG_HEADER, tag);
    }
    let Some(trim) = session.trim else { return };
    let value = format!("{} {} {rid}", trim.tokens_max, session.incarnation);
    // This can't fail, because all three words are plain ASCII.
    let Ok(value) = HeaderValue::from_str(&value) else { return };
    headers.insert(TRIM_HEADER, value);
    if trim.must_continue {
        headers.insert(MUST_CONTINUE_HEADER, HeaderValue::from_static("1"));
    }
}

/// Whether the shim must refuse the turn if it doesn't continue its session's history.
pub(super) fn requires_continuation(turn: &Turn) -> bool {
    let trim = turn.session.as_ref().and_then(|session| session.trim);
    trim.is_some_and(|trim| trim.must_continue)
}
