//! Tells which features of a session each kind of HTTP route supports.
//!
//! A session is a chain of turns (requests) that share a growing prefix. A *pinned* session keeps
//! its KV in the engine between turns. A *tagged* session's KV is in the engine's radix tree,
//! marked with the session's id.

use proto::route::Kind;

use crate::session::{RouteTurns, RunMode};

/// Returns which turns of a pinned session the route supports.
///
/// A turn may hold a full history, or a delta: only what is new. The engine appends a delta only on
/// `/generate`. The OpenAI routes accept `session_params`, which names the session, and silently
/// ignore it.
#[must_use]
pub fn route_turns(kind: Kind) -> RouteTurns {
    match kind {
        Kind::Generate => RouteTurns::DeltasAndHistories,
        Kind::Chat | Kind::Completions | Kind::Responses | Kind::Messages => {
            RouteTurns::FullHistories
        }
        Kind::Embeddings | Kind::Tokenizer | Kind::Models => RouteTurns::Nothing,
    }
}

/// Returns how a turn on this route really ran, if the session table planned `run_mode`. A turn
/// that was planned as tagged runs untagged if the route supports no tag.
#[must_use]
pub fn actual_run_mode(kind: Kind, run_mode: RunMode) -> RunMode {
    if run_mode == RunMode::Tagged && !kind.is_taggable() { RunMode::Untagged } else { run_mode }
}
