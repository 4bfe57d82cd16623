//! What the owner tells of a text early in a session's prompts that differs from turn to turn.

use proto::{id::SessionKey, load::VolatilePrefix};
use tracing::{debug, warn};

use super::Owner;

/// Places that are warned of in the life of a process. One client or gateway behaves alike in all
/// of its sessions, so a place is named once.
const WARNED_PLACES_MAX: usize = 16;

impl Owner {
    pub(super) fn volatile_prefix(&mut self, key: &SessionKey, found: VolatilePrefix) {
        let place = found.place;
        let role = place.map_or("prompt", |place| place.role.as_str());
        self.setup.metrics.volatile_prefix(role);
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
