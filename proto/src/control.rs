//! The engine's control routes that router and agent serve to operators and trainers.
//!
//! A trainer pauses an engine, replaces its weights and lets it go on. The router sends such a call
//! to the agents named, and each agent sends it to its engine. The agent must know what the call
//! does to the engine's KV and weights: the route's [`Effect`].
//!
//! The router proves with the header [`ADMIN`] that its caller is an admin. This module only lists
//! the routes.

use http::{HeaderName, Method};

/// Marks a request of an admin to an agent. Only a router may send it.
pub const ADMIN: HeaderName = HeaderName::from_static("x-berth-admin");

/// One control route of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlRoute {
    /// The path, the same at the engine, the agent and the router.
    pub path: &'static str,
    /// Whether the route takes GET too. Every route takes POST.
    pub takes_get: bool,
    /// What the call does to the engine.
    pub effect: Effect,
}

/// What a control call does to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing that concerns turns.
    Nothing,
    /// Frees all KV, if no request runs.
    Flush,
    /// Stops the engine from running requests.
    Pause,
    /// Lets a paused engine go on.
    Continue,
    /// Makes the weights ready to be replaced, and unfit for turns.
    BeginUpdate,
    /// Makes replaced weights fit for turns.
    EndUpdate,
    /// Replaces weights.
    Update,
    /// Gives the weights another label.
    Label,
    /// Gives the device's memory back to the system. The engine dies if a request runs.
    ReleaseMemory,
    /// Takes the device's memory again.
    ResumeMemory,
    /// Loads or unloads an adapter.
    Adapters,
}

const fn route(path: &'static str, takes_get: bool, effect: Effect) -> ControlRoute {
    ControlRoute { path, takes_get, effect }
}

/// All control routes.
pub const CONTROL_ROUTES: [ControlRoute; 19] = [
    route("/flush_cache", true, Effect::Flush),
    route("/pause_generation", false, Effect::Pause),
    route("/continue_generation", false, Effect::Continue),
    route("/begin_weight_update", false, Effect::BeginUpdate),
    route("/end_weight_update", false, Effect::EndUpdate),
    route("/init_weights_update_group", false, Effect::Nothing),
    route("/destroy_weights_update_group", false, Effect::Nothing),
    route("/update_weights_from_disk", false, Effect::Update),
    route("/update_weights_from_distributed", false, Effect::Update),
    route("/update_weights_from_tensor", false, Effect::Update),
    route("/update_weights_from_ipc", false, Effect::Update),
    route("/update_weight_version", false, Effect::Label),
    route("/get_weights_by_name", true, Effect::Nothing),
    route("/release_memory_occupation", true, Effect::ReleaseMemory),
    route("/resume_memory_occupation", true, Effect::ResumeMemory),
    route("/start_profile", true, Effect::Nothing),
    route("/stop_profile", true, Effect::Nothing),
    route("/load_lora_adapter", false, Effect::Adapters),
    route("/unload_lora_adapter", false, Effect::Adapters),
];

impl ControlRoute {
    /// Returns the route of a path, if it is one.
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        CONTROL_ROUTES.into_iter().find(|route| route.path == path)
    }

    /// Whether the route takes requests with this method.
    #[must_use]
    pub fn takes(&self, method: &Method) -> bool {
        method == Method::POST || (self.takes_get && method == Method::GET)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::Kind;

    #[test]
    fn a_control_route_stands_once_and_is_no_turn() {
        for (number, route) in CONTROL_ROUTES.iter().enumerate() {
            assert!(CONTROL_ROUTES[..number].iter().all(|earlier| earlier.path != route.path));
            assert_eq!(Kind::for_path(route.path), None);
        }
    }
}
