//! Tells the shim inside the engine what to do with a turn, by headers of the request.
//!
//! Headers are the only thing that all of the engine's routes pass on. The shim reads them when the
//! request arrives, and trims after the engine has tokenized the prompt.

use contract::route::Kind;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::session::PlannedTurn;

/// Marks a turn with a full history, which the shim may trim. Three words: the maximum number of
/// prompt tokens with which the turn may run in the session, the session's id in the engine, the
/// turn's id.
const TRIM_HEADER: HeaderName = HeaderName::from_static("x-override-berth-trim");
/// Added to [`TRIM_HEADER`]: the shim must refuse a turn that doesn't continue its session's
/// history. The agent aborts one that runs outside the session all the same.
const MUST_CONTINUE_HEADER: HeaderName = HeaderName::from_static("x-override-berth-must-continue");
/// The tag of the turn's KV, on a route whose body can't name a session.
const TAG_HEADER: HeaderName = HeaderName::from_static("x-override-berth-tag");

pub(super) fn add_shim_headers(headers: &mut HeaderMap, kind: Kind, turn: &PlannedTurn, rid: &str) {
    let Some(session) = &turn.session else { return };
    let tag = turn.tag().filter(|_| !kind.is_taggable());
    if let Some(tag) = tag.and_then(|tag| HeaderValue::from_str(tag).ok()) {
        headers.insert(TAG_HEADER, tag);
    }
    let Some(trim) = session.trim else { return };
    let value = format!("{} {} {rid}", trim.tokens_max, session.incarnation);
    // All three words are plain ASCII, so this can't fail.
    let Ok(value) = HeaderValue::from_str(&value) else { return };
    headers.insert(TRIM_HEADER, value);
    if trim.must_continue {
        headers.insert(MUST_CONTINUE_HEADER, HeaderValue::from_static("1"));
    }
}

pub(super) fn requires_continuation(turn: &PlannedTurn) -> bool {
    let trim = turn.session.as_ref().and_then(|session| session.trim);
    trim.is_some_and(|trim| trim.must_continue)
}
