//! The engine's control routes that router and agent serve to operators and trainers.
//!
//! A trainer pauses an engine, replaces its weights and lets it go on. The agent must know what
//! each call does to the engine's KV and weights: the route's [`Effect`].

use http::{HeaderName, Method};

/// Marks a request of an admin. Only a router may send it.
pub const ADMIN: HeaderName = HeaderName::from_static("x-berth-admin");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlRoute {
    /// Engine, agent and router have the same.
    pub path: &'static str,
    /// Every route takes POST.
    pub takes_get: bool,
    pub effect: Effect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Changes nothing that concerns turns.
    Nothing,
    /// Frees all KV, if no request runs.
    Flush,
    Pause,
    Continue,
    /// Makes the weights ready to be replaced, and unfit for turns.
    BeginUpdate,
    /// Makes replaced weights fit for turns.
    EndUpdate,
    Update,
    Label,
    /// Gives the device's memory back to the system. The engine dies if a request runs.
    ReleaseMemory,
    ResumeMemory,
    Adapters,
}

const fn route(path: &'static str, takes_get: bool, effect: Effect) -> ControlRoute {
    ControlRoute { path, takes_get, effect }
}

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
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        CONTROL_ROUTES.into_iter().find(|route| route.path == path)
    }

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
