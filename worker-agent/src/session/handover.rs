//! Defines what an agent process hands over to its successor: the state of its sessions.
//!
//! A planned restart of the agent leaves the sessions open at the engine. The old process writes
//! their state into the journal, and the next one takes them up. The state has counts, flags and
//! ids, and no text. This module does no I/O: `journal` writes the values as JSON, and
//! `table::handover` makes them and takes them up.
//!
//! A change of these types that an older or newer agent would misread needs another
//! [`HANDOVER_VERSION`]. An agent that doesn't know the version closes the sessions instead, as
//! after a crash.

use std::time::Duration;

use proto::{count, id::SessionKey};
use serde::{Deserialize, Serialize};
use service::clock::BootTime;

use super::{
    KvIdentity,
    lifecycle::GoneReason,
    state::{Chooser, ClientHistory, Sharing},
};

/// The longest age of a hand-over by the wall clock. Sessions are idle for hours at most.
const WALL_CLOCK_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// The version of the types below.
pub const HANDOVER_VERSION: u32 = 1;

/// What one agent process hands over to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handover {
    /// When the sessions were handed over.
    pub at: Moment,
    /// The sessions.
    pub sessions: Vec<HandedSession>,
}

/// A moment by clocks that the next process can read too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// The wall clock, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The clock of the machine's boot. `None` if it can't be read, or if an earlier version of the
    /// agent wrote the moment.
    pub boot: Option<BootTime>,
}

impl Moment {
    /// Returns the time from `earlier` to this moment, as the clock of the boot tells it. The wall
    /// clock may have been set meanwhile, so it counts only after another boot, and then for at
    /// most a day.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Duration {
        if let (Some(now), Some(then)) = (&self.boot, &earlier.boot)
            && now.boot_id == then.boot_id
        {
            return Duration::from_millis(now.ms.saturating_sub(then.ms));
        }
        let age = Duration::from_millis(self.unix_ms.saturating_sub(earlier.unix_ms));
        age.min(WALL_CLOCK_AGE_MAX)
    }
}

/// One session. Its many fields: one for each fact that the next process needs.
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
    /// Tokens of the history that the engine has committed.
    #[serde(deserialize_with = "count::read")]
    pub(super) history_tokens: u64,
    pub(super) client: ClientHistory,
    /// The digest of the session that started this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) parent: Option<u64>,
    /// Which KV the session has; `None` if that isn't known, as after an agent that didn't say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kv: Option<KvIdentity>,
    /// What the agent knew of the engine's weights; the same for all sessions.
    #[serde(default)]
    pub(super) weights: HandedWeights,
}

/// What an agent process knew of its engine's weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HandedWeights {
    /// The weights epoch.
    #[serde(deserialize_with = "count::read")]
    pub(super) epoch: u64,
    /// The number of changes that the shim had counted, or would count; `None` if it is unknown.
    #[serde(default, deserialize_with = "count::read_option")]
    pub(super) counted: Option<u64>,
}

/// How the engine keeps a session, as far as a state without turns tells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum HandedState {
    /// Pinned, with a request row and KV of its own.
    Open {
        #[serde(deserialize_with = "count::read")]
        resident_tokens: u64,
    },
    /// Pinned. The engine has the history, but no KV of the session's own.
    Demoted {},
    /// Not pinned. `no_pin_ms`: the agent doesn't pin the session before this time has passed.
    InTree { is_tagged: bool, resident_tokens: u64, no_pin_ms: u64 },
    /// The engine has nothing of the session. `is_tagged`: `None` if the session is pinned.
    Gone { reason: GoneReason, is_tagged: Option<bool> },
}

impl HandedSession {
    /// Returns the session's key, if it is valid.
    pub(super) fn key(&self) -> Option<SessionKey> {
        SessionKey::new(self.principal.clone(), self.id.clone()).ok()
    }

    /// Whether the session is open at the engine as a pinned one.
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
        let older = moment(1_000_000_000, None);
        assert_eq!(rebooted.since(&older), seconds(30), "an earlier version wrote it");
    }
}
