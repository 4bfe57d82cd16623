//! Keeps pinned sessions from continuing KV of an adapter that the engine has loaded anew.
//!
//! An adapter is known by its name, and another may take its place under the same name. The KV that
//! the first has computed is wrong for the second. So when an adapter is loaded or unloaded, each
//! pinned session that has KV of that name is closed at the engine, as after a change of the
//! weights (`weights`). A turn that is inside the engine meanwhile ends first: the engine unloads
//! an adapter only when no request uses it.
//!
//! The owner task says which adapters were loaded or unloaded, and which the engine has. This
//! module does no I/O, and keeps nothing of adapters that no session uses.

use std::{collections::BTreeSet, time::Instant};

use proto::id::SessionKey;

use super::{GoneReason, Guard, Session, Table};
use crate::session::kv_identity::hash_adapter;

impl Session {
    /// Returns the hash of the name of the adapter that has computed the session's pinned KV.
    fn adapter(&self) -> Option<u64> {
        self.history.kv?.adapter()
    }
}

impl Table {
    /// Handles the load or unload of an adapter. `name`: `None` if any may be meant.
    pub fn handle_adapter_changed(&mut self, now: Instant, name: Option<&str>) {
        let changed = name.map(hash_adapter);
        self.close_with_adapter(now, |adapter| changed.is_none_or(|changed| changed == adapter));
    }

    /// Handles the list of all adapters that the engine has. One that isn't there was unloaded. If
    /// it comes back, it may be another.
    pub fn handle_adapters(&mut self, now: Instant, names: &[String]) {
        let loaded: BTreeSet<u64> = names.iter().map(|name| hash_adapter(name)).collect();
        self.close_with_adapter(now, |adapter| !loaded.contains(&adapter));
    }

    /// Closes each pinned session at the engine that has KV of such an adapter. If a turn of it
    /// runs, the session is closed when the turn ends.
    fn close_with_adapter(&mut self, now: Instant, is_changed: impl Fn(u64) -> bool) {
        if !self.settings.guards.is_on(Guard::KvIdentity) {
            return;
        }
        let keys = self.sessions.keys(|session| session.adapter().is_some_and(&is_changed));
        for key in keys {
            self.sessions.update(&key, |session| session.history.is_adapter_gone = true);
            self.close_without_adapter(now, &key);
        }
        self.process_queue(now);
        self.debug_check();
    }

    /// Closes a pinned session at rest at the engine if its KV is of an adapter that was loaded or
    /// unloaded since.
    pub(super) fn close_without_adapter(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        if session.history.is_adapter_gone && session.may_continue_kv() {
            self.close_as_gone(now, key, GoneReason::AdapterChanged);
        }
    }
}
