//! Tells which features of a session each kind of HTTP route supports.
//!
//! A session is a chain of turns (requests) that share a growing prefix. A *pinned* session keeps
//! its KV in the engine between turns. A *tagged* session's KV is in the engine's radix tree,
//! marked with the session's id. `turn` asks these functions before and after a turn. They are
//! fixed facts about SGLang's routes; the session table plans how a turn runs.

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
        _ => RouteTurns::Nothing,
    }
}

/// Returns how a turn really ran that the session table planned as `planned_run_mode`. A turn that
/// was planned as tagged runs untagged on a route without tags.
#[must_use]
pub fn actual_run_mode(kind: Kind, planned_run_mode: RunMode) -> RunMode {
    if planned_run_mode == RunMode::Tagged && !kind.is_taggable() {
        RunMode::Untagged
    } else {
        planned_run_mode
    }
}
