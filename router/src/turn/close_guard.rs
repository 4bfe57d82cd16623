//! Closes a session whose last turn got no answer.

use std::sync::Arc;

use proto::id::SessionKey;

use super::{request::Turn, sessions::SessionService, shared::Shared};
use crate::fleet::worker::WorkerRef;

/// Closes a session if the turn that would close it gets no answer, because perhaps no agent
/// received the turn. After an answer, the agent closes the session itself.
pub(super) struct CloseGuard {
    sessions: Arc<SessionService>,
    /// The session to close, and its worker. `None` if the turn doesn't close its session.
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

    /// Records that the turn is now sent to `worker`, which then also has its session.
    pub(super) fn move_to(&mut self, worker: WorkerRef) {
        if let Some((_, session_worker)) = &mut self.session {
            *session_worker = worker;
        }
    }

    /// Records that the answer has come.
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
