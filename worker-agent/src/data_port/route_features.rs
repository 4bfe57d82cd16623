//! Tells which features of a session each kind of HTTP route supports.
//!
//! A session is a chain of turns (requests) that share a growing prefix. A *pinned* session keeps
//! its KV in the engine between turns. A *tagged* session's KV is in the engine's radix tree,
//! marked with the session's id. `turn` asks this function before a turn. Its answers are fixed
//! facts about SGLang's routes; the session table plans how a turn runs.

use proto::route::Kind;

use crate::session::RouteTurns;

/// Returns which turns of a pinned session the route supports.
///
/// A turn may hold a full history, or a delta: only what is new. The engine appends a delta only on
/// `/generate`. The OpenAI routes accept `session_params`, which names the session, and silently
/// ignore it.
#[must_use]
pub fn route_turns(kind: Kind) -> RouteTurns {
    match kind {
        Kind::Generate => RouteTurns::DeltasAndHistories,
        Kind::Chat | Kind::Completions | Kind::Responses => RouteTurns::FullHistories,
        Kind::Messages => RouteTurns::HistoriesTaggedByShim,
        _ => RouteTurns::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use proto::route::ROUTES;

    use super::*;
    use crate::session::RunMode;

    #[test]
    fn a_route_carries_tags_if_its_kind_does_or_the_shim_adds_them() {
        for kind in ROUTES.map(|route| route.kind).into_iter().filter(|kind| kind.is_generation()) {
            let mode = |shim_trims| route_turns(kind).run_mode(RunMode::Tagged, shim_trims);
            assert_eq!(mode(false) == RunMode::Tagged, kind.is_taggable(), "{kind:?}");
            assert_eq!(mode(true), RunMode::Tagged, "{kind:?}");
        }
    }
}
