//! Logs and counts volatile prefixes: early prompt texts that differ from turn to turn.
//!
//! A timestamp in the system prompt is an example. Since the text changes with every turn (one
//! request of a session), the engine can't reuse the KV of the tokens after the text, and computes
//! them again. The session table finds volatile prefixes by comparing the hashes of prompts, and
//! the owner task calls this module once per session and place. Prompts are not changed.

use std::collections::HashSet;

use proto::{
    id::SessionKey,
    load::{PromptPlace, VolatilePrefix},
};
use tracing::{debug, warn};

use crate::metrics::Metrics;

/// The maximum number of warnings in the life of a process. There is one warning for each place in
/// a prompt, because a client or gateway behaves alike in all its sessions.
const WARNED_PLACES_MAX: usize = 16;

/// The places in prompts for which a warning was logged.
#[derive(Default)]
pub(super) struct PrefixWarnings(HashSet<Option<PromptPlace>>);

impl PrefixWarnings {
    /// Counts a session's volatile prefix. Logs a warning if it is the first one at its place in a
    /// prompt, and otherwise a debug message.
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
