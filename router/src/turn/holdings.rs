//! What a turn holds until its end, and the order in which it gives that back.

use std::{mem, sync::Arc};

use contract::id::SessionKey;

use super::{
    placer::{Chosen, ConversationHold, assignment::Assignment},
    recorder::TurnRecorder,
    request::Turn,
    shared::Shared,
};
use crate::{
    fleet::{lease::LoadLease, worker::WorkerRef},
    sessions::{directory::BindingHold, lifecycle::Lifecycle},
    shares::Share,
};

/// What a placed turn holds to its end. Every way out of a turn drops it once: the end of the
/// answer's body, a client that leaves, a refusal, a lost worker, a time limit. What ends earlier
/// is elsewhere: the request's body until an answer begins, the prefill half's load until that
/// half ends.
///
/// The fields drop from top to bottom. Whoever sees one given back, sees all those above it given
/// back too.
#[derive(Debug)]
pub(super) struct Holdings {
    /// First, so that the turn is on record when the session's next turn can begin.
    pub(super) recorder: TurnRecorder,
    /// Before the binding, so that a turn that comes now finds the session closing.
    close: CloseGuard,
    /// Before the binding too: the session's next turn must not find this one's load.
    pub(super) lease: LoadLease,
    pub(super) hold: Option<BindingHold>,
    pub(super) conversation: Option<ConversationHold>,
    /// Last, so that a turn that takes this place finds nothing of this one.
    _share: Share,
}

impl Holdings {
    /// Returns also where the turn goes.
    pub(super) fn new(
        recorder: TurnRecorder,
        close: CloseGuard,
        chosen: Chosen,
        share: Share,
    ) -> (Self, Assignment) {
        let Chosen { assignment, lease, hold, conversation, .. } = chosen;
        (Self { recorder, close, lease, hold, conversation, _share: share }, assignment)
    }

    /// The turn goes to a second worker.
    pub(super) fn move_to(&mut self, chosen: Chosen) -> Assignment {
        let Chosen { assignment, lease, .. } = chosen;
        self.recorder.move_to(&assignment);
        self.close.move_to(assignment.to.worker);
        // The first worker's load ends here.
        drop(mem::replace(&mut self.lease, lease));
        if let Some(conversation) = &self.conversation {
            conversation.rebind(assignment.to.worker);
        }
        assignment
    }

    /// An agent has answered. If it has claimed the turn, it also closes the session, even if it
    /// refuses the turn later.
    pub(super) fn leave_close_to_agent(&mut self) {
        self.close.disarm();
    }
}

/// Closes a session whose last turn got no answer: perhaps no agent received it. After an answer,
/// the agent closes the session itself.
#[derive(Debug)]
pub(super) struct CloseGuard {
    sessions: Arc<Lifecycle>,
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
    fn move_to(&mut self, worker: WorkerRef) {
        if let Some((_, session_worker)) = &mut self.session {
            *session_worker = worker;
        }
    }

    fn disarm(&mut self) {
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
