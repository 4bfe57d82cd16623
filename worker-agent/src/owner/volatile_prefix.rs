//! Logs and counts volatile prefixes: early prompt texts that differ from turn to turn.

use proto::{id::SessionKey, load::VolatilePrefix};
use tracing::{debug, warn};

use super::Owner;

/// The maximum number of places to warn about in the life of a process. A client or gateway behaves
/// alike in all its sessions, so each place is warned about once.
const WARNED_PLACES_MAX: usize = 16;

impl Owner {
    pub(super) fn report_volatile_prefix(&mut self, key: &SessionKey, found: VolatilePrefix) {
        let place = found.place;
        let role = place.map_or("prompt", |place| place.role.as_str());
        self.setup.metrics.count_volatile_prefix(role);
        let (message, block) = (place.map(|place| place.message), place.map(|place| place.block));
        let (session, token_index) = (key.digest(), found.token_index);
        let room = self.warned_places.len() < WARNED_PLACES_MAX;
        if room && self.warned_places.insert(place) {
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
