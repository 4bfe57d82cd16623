//! Defines what an agent process hands over to its successor: the state of its sessions.
//!
//! The state has counts, flags and ids, and no text. A change of these types that an older or newer
//! agent would misread needs another [`HANDOVER_VERSION`]. An agent that doesn't know the version
//! closes the sessions instead, as after a crash.

use std::time::Duration;

use contract::{count, id::SessionKey};
use serde::{Deserialize, Serialize};
use service::clock::BootTime;

use super::{
    KvIdentity,
    lifecycle::GoneReason,
    state::{Chooser, ClientHistory, Sharing},
};

/// Caps an age by the wall clock. Sessions are idle for hours at most.
const WALL_CLOCK_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

pub const HANDOVER_VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handover {
    pub at: Moment,
    pub sessions: Vec<HandedSession>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// Milliseconds since 1970.
    pub unix_ms: u64,
    /// `None` if it can't be read.
    pub boot: Option<BootTime>,
}

impl Moment {
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Duration {
        if let (Some(now), Some(then)) = (&self.boot, &earlier.boot)
            && now.boot_id == then.boot_id
        {
            return Duration::from_millis(now.ms.saturating_sub(then.ms));
        }
        // The wall clock may have been set meanwhile, so it counts only if the boots differ or
        // one isn't known.
        let age = Duration::from_millis(self.unix_ms.saturating_sub(earlier.unix_ms));
        age.min(WALL_CLOCK_AGE_MAX)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandedSession {
    pub(super) principal: String,
    pub(super) id: String,
    pub(super) dp_rank: u32,
    pub(super) incarnation: String,
    pub(super) state: HandedState,
    pub(super) chooser: Chooser,
    pub(super) sharing: Sharing,
    #[serde(deserialize_with = "count::read")]
    pub(super) turns_finished: u64,
    /// The time without a turn up to the hand-over.
    pub(super) idle_ms: u64,
    pub(super) idle_ms_max: u64,
    #[serde(deserialize_with = "count::read")]
    pub(super) history_tokens: u64,
    pub(super) client: ClientHistory,
    /// The digest of the session that started this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) parent: Option<u64>,
    /// Which KV the session has; `None` if that isn't known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv: Option<KvIdentity>,
    /// The same for all sessions.
    pub(super) weights: HandedWeights,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HandedWeights {
    #[serde(deserialize_with = "count::read")]
    pub(super) epoch: u64,
    /// The shim's count of changes at the hand-over; `None` if unknown.
    #[serde(deserialize_with = "count::read_option")]
    pub(super) counted: Option<u64>,
    /// Whether the radix tree may have KV of older weights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_tree_stale: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum HandedState {
    /// Pinned, with a row and KV.
    Open {
        #[serde(deserialize_with = "count::read")]
        resident_tokens: u64,
    },
    /// Pinned, without a row or KV of its own. The engine has the history.
    Demoted {},
    /// `no_pin_ms`: the agent doesn't pin the session before this time has passed.
    InTree { is_tagged: bool, resident_tokens: u64, no_pin_ms: u64 },
    /// The engine has nothing. `is_tagged`: `None` if the session was pinned.
    Gone { reason: GoneReason, is_tagged: Option<bool> },
}

impl HandedSession {
    /// Returns `None` if it is not valid.
    pub(super) fn key(&self) -> Option<SessionKey> {
        SessionKey::new(self.principal.clone(), self.id.clone()).ok()
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, HandedState::Open { .. } | HandedState::Demoted {})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_makes_no_session_older_or_younger() {
        let moment = |unix_ms, boot: Option<(&str, u64)>| Moment {
            unix_ms,
            boot: boot.map(|(boot_id, ms)| BootTime { boot_id: boot_id.to_owned(), ms }),
        };
        let seconds = Duration::from_secs;
        let handed = moment(1_000_000_000, Some(("a", 50_000)));
        for unix_ms in [0, 1_000_000_000, 9_000_000_000] {
            assert_eq!(moment(unix_ms, Some(("a", 57_000))).since(&handed), seconds(7));
        }
        let rebooted = moment(1_000_030_000, Some(("b", 20_000)));
        assert_eq!(rebooted.since(&handed), seconds(30), "another boot's clock says nothing");
        assert_eq!(moment(9_000_000_000, None).since(&handed), WALL_CLOCK_AGE_MAX);
        assert_eq!(moment(0, None).since(&handed), seconds(0));
        let unread = moment(1_000_000_000, None);
        assert_eq!(rebooted.since(&unread), seconds(30), "the boot's clock could not be read");
    }
}
