//! Remembers names that may be those of requests, until they come again and so name a session.

use contract::id::SessionKey;
use service::clock::now;

use super::Placer;
use crate::{
    fleet::worker::WorkerRef,
    turn::request::{HintKind, SessionIntent, Turn},
};

impl Placer {
    pub(in crate::turn) fn has_seen_name(&self, key: &SessionKey) -> bool {
        self.names_seen_once.lock().get(key, now()).is_some()
    }

    /// Returns where the turn ran that first had the session's name, if it ran without the session.
    pub(super) fn worker_of_name(&self, intent: &SessionIntent) -> Option<WorkerRef> {
        intent.hint.filter(|hint| *hint == HintKind::SessionOrRequest)?;
        Some(self.names_seen_once.lock().get(&intent.key, now())?.worker)
    }

    /// Also forgets a name that has begun a session.
    pub(super) fn remember_name(&self, turn: &Turn, worker: WorkerRef) {
        let begun = turn.session.as_ref().filter(|intent| intent.hint.is_some());
        if turn.name_seen_once.is_none() && begun.is_none() {
            return;
        }
        let mut names = self.names_seen_once.lock();
        if let Some(intent) = begun {
            names.forget(&intent.key);
        }
        if let Some(key) = &turn.name_seen_once
            && names.begin_turn(key, worker, false, now()).is_ok()
        {
            names.end_turn(key, now());
        }
    }
}
