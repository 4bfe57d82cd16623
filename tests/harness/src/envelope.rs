//! The header in which a router tells an agent of a turn, for tests in a router's place.

use serde_json::{Value, json};

/// The header's name.
pub const ENVELOPE: &str = "x-berth-turn-envelope";

/// Returns the header of a turn in a session. `claim` has the session's members and its principal.
#[must_use]
pub fn envelope_of(claim: &Value) -> String {
    let mut session = claim.clone();
    let principal = session.as_object_mut().and_then(|members| members.remove("principal"));
    json!({"principal": principal, "session": session}).to_string()
}
