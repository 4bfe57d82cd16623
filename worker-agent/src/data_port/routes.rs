//! Which session features each route supports.

use proto::route::Kind;

use crate::session::{Appends, Ran};

/// Returns which turns of a pinned session the route supports. The OpenAI routes accept
/// `session_params` and silently ignore it.
#[must_use]
pub fn supported_appends(kind: Kind) -> Appends {
    match kind {
        Kind::Generate => Appends::Possible,
        Kind::Chat | Kind::Completions | Kind::Responses | Kind::Messages => Appends::Trimmed,
        Kind::Embeddings | Kind::Tokenizer | Kind::Models => Appends::Never,
    }
}

/// Returns how the turn really ran: untagged, if the route supports no tag.
#[must_use]
pub fn actual_run(kind: Kind, ran: Ran) -> Ran {
    if ran == Ran::Tagged && !kind.is_taggable() { Ran::Untagged } else { ran }
}
