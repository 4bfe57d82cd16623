//! Closes a session whose last turn got no answer.

use std::sync::Arc;

use contract::id::SessionKey;

use super::{request::Turn, sessions::SessionService, shared::Shared};
use crate::fleet::worker::WorkerRef;

/// Perhaps no agent received a turn that gets no answer. After an answer, the agent closes the
/// session itself.
pub(super) struct CloseGuard {
    sessions: Arc<SessionService>,
    /// `None` if the turn doesn't close its session.
    session: Option<(SessionKey, WorkerRef)>,
}

impl CloseGuard {
    pub(super) fn new(shared: &Shared, turn: &Turn, worker: WorkerRef) -> Self {
        let intent = turn
            .session
            .as_ref()
            .filter(|intent| intent.closes_session && !intent.is_placement_only);
        Self {
            sessions: Arc::clone(&shared.sessions),
            session: intent.map(|intent| (intent.key.clone(), worker)),
        }
    }

    /// The session follows its turn to `worker`.
    pub(super) fn move_to(&mut self, worker: WorkerRef) {
        if let Some((_, session_worker)) = &mut self.session {
            *session_worker = worker;
        }
    }

    pub(super) fn disarm(mut self) {
        self.session = None;
    }
}

impl Drop for CloseGuard {
    fn drop(&mut self) {
        if let Some((key, worker)) = self.session.take() {
            self.sessions.close_detached(key, worker);
        }
    }
}
