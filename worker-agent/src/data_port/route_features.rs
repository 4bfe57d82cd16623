//! Tells which features of a session each kind of HTTP route supports.
//!
//! The answers are fixed facts about SGLang's routes.

use contract::route::Kind;

use crate::session::RouteTurns;

/// The engine appends a delta only on `/generate`. The OpenAI routes accept `session_params`, which
/// names the session, and silently ignore it.
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
    use contract::route::ROUTES;

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
