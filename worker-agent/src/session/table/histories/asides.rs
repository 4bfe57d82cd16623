//! Tells turns of other conversations from those of their session's.
//!
//! An *aside* is a full history of another conversation: a coding agent asks for a title in its
//! main session, say. An aside runs on the radix tree, takes no place in its session, and changes
//! nothing that the agent knows of the session's history. A client that shortens its conversation
//! begins another too: its first turn runs as an aside, and the next, which continues it, is the
//! session's. If only asides come, one runs as a turn of the session, and the shim compares it: the
//! session's conversation may be over.

use contract::claim::Claim;

use crate::session::table::{Need, PromptStart, Session, State};

/// A prompt with fewer tokens than the history's divided by this can't continue the history.
const ASIDE_DIVISOR: u64 = 4;
/// Titles before, during and after a turn, and suggestions of the user's next message, are fewer.
const ASIDES_IN_A_ROW_MAX: u32 = 8;

/// Whether a turn that waits belongs to another conversation than its session's.
pub(crate) fn is_aside(
    session: &Session,
    claim: &Claim,
    need: Need,
    prompt_start: &PromptStart,
) -> bool {
    let may_be_guest = session.has_auto_retention()
        && !session.is_exclusive()
        && !claim.delta
        && !claim.open
        && !claim.close;
    // While the session opens, the engine doesn't know the tag that the turn would carry.
    let has_place_beside =
        matches!(session.state, State::Open(_) | State::InTree(_) | State::Demoted);
    may_be_guest
        && has_place_beside
        && session.turns.asides_in_a_row < ASIDES_IN_A_ROW_MAX
        && session
            .prefix_tracker
            .is_aside(prompt_start)
            .unwrap_or_else(|| is_far_shorter(session, need))
}

/// For a prompt that doesn't show how it begins.
fn is_far_shorter(session: &Session, need: Need) -> bool {
    session.is_pinned() && need.prompt_tokens < session.history.tokens / ASIDE_DIVISOR
}
