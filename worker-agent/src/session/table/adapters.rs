//! Keeps pinned sessions from continuing KV of an adapter that the engine has loaded anew.
//!
//! Another may take an adapter's place under the same name, and the KV of the first is wrong for
//! it. So a load or unload closes each pinned session with KV of that name. A running turn of it
//! ends first: the engine unloads an adapter only when no request uses it.

use std::{collections::BTreeSet, time::Instant};

use contract::id::SessionKey;

use super::{GoneReason, Guard, Session, Table};
use crate::session::kv_identity::hash_adapter;

impl Session {
    fn adapter(&self) -> Option<u64> {
        self.history.kv?.adapter()
    }
}

impl Table {
    /// `name`: `None` if any may be meant.
    pub fn handle_adapter_changed(&mut self, now: Instant, name: Option<&str>) {
        let changed = name.map(hash_adapter);
        self.close_with_adapter(now, |adapter| changed.is_none_or(|changed| changed == adapter));
    }

    /// An adapter that isn't in the list was unloaded. If it comes back, it may be another.
    pub fn handle_adapters(&mut self, now: Instant, names: &[String]) {
        let loaded: BTreeSet<u64> = names.iter().map(|name| hash_adapter(name)).collect();
        self.close_with_adapter(now, |adapter| !loaded.contains(&adapter));
    }

    /// A running turn ends first.
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

    /// Only at rest, if the adapter of the session's KV was loaded or unloaded since.
    pub(super) fn close_without_adapter(&mut self, now: Instant, key: &SessionKey) {
        let Some(session) = self.sessions.get(key) else { return };
        if session.history.is_adapter_gone && session.may_continue_kv() {
            self.close_as_gone(now, key, GoneReason::AdapterChanged);
        }
    }
}
