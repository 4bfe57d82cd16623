//! Logs and counts volatile prefixes: early prompt texts that differ from turn to turn.
//!
//! For example, a timestamp in the system prompt keeps the engine from reusing the KV after it.

use std::collections::HashSet;

use contract::{
    id::SessionKey,
    load::{PromptPlace, VolatilePrefix},
};
use tracing::{debug, warn};

use crate::metrics::Metrics;

/// One warning for each place in a prompt: a client or gateway behaves alike in all its sessions.
const WARNED_PLACES_MAX: usize = 16;

#[derive(Default)]
pub(super) struct PrefixWarnings(HashSet<Option<PromptPlace>>);

impl PrefixWarnings {
    /// Called once per session and place. Only the first one at a place is a warning.
    pub(super) fn report(&mut self, key: &SessionKey, prefix: VolatilePrefix, metrics: &Metrics) {
        let place = prefix.place;
        let role = place.map_or("prompt", |place| place.role.as_str());
        metrics.count_volatile_prefix(role);
        let (message, block) = (place.map(|place| place.message), place.map(|place| place.block));
        let (session, token_index) = (key.digest(), prefix.token_index);
        if self.0.len() < WARNED_PLACES_MAX && self.0.insert(place) {
            warn!(
                %session,
                token_index,
                role,
                message,
                block,
                "a text early in a session's prompts differs from turn to turn, so that all after \
                 it is computed again: have its client or a gateway keep that text constant, leave \
                 it out, or move it to the newest message"
            );
        } else {
            debug!(%session, token_index, role, message, block, "volatile prefix");
        }
    }
}
