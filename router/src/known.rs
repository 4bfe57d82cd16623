//! What the router knows of one session: the agents' tables and its own bindings reconciled. Pure.
//!
//! The tables win where they know a session; a binding wins while its turn runs or its deed is
//! younger than the tables' lag, because then the tables may not have heard of it yet.

use std::{cmp::Reverse, sync::Arc, time::Instant};

use proto::{
    id::SessionKey,
    load::{Retention, Session, SessionState},
};

use crate::{
    affinity::{Binding, Closing, TABLE_LAG},
    view::{ClusterView, WorkerRef, sessions::Located},
};

/// Where a session stands.
#[derive(Debug, Clone)]
pub enum Standing {
    /// Nobody knows it.
    Unknown,
    /// It was placed by this router; no agent has reported it.
    Bound {
        /// Where its turns go.
        worker: WorkerRef,
        /// A turn runs or has just ended, so that the agent's report may be on its way.
        recent: bool,
        /// One turn at a time and one runs.
        busy: bool,
    },
    /// An agent holds it.
    Open {
        /// Where.
        worker: WorkerRef,
        /// As last reported.
        session: Arc<Session>,
        /// One turn at a time and one runs.
        busy: bool,
    },
    /// It goes when its running turn ends.
    Closing,
    /// Its KV and history are gone: the engine restarted, or its agent can't be reached and the
    /// session is pinned there.
    Lost {
        /// Where it was.
        worker: WorkerRef,
        /// The agent is there and remembers the loss; false when the agent itself is gone.
        agent_up: bool,
    },
}

/// Reconciles.
#[must_use]
pub fn standing(
    key: &SessionKey,
    view: &ClusterView,
    binding: Option<&Binding>,
    now: Instant,
) -> Standing {
    let located = view.sessions.locate(key);
    match binding.map_or(Closing::No, |binding| binding.closing) {
        Closing::Asked => return Standing::Closing,
        Closing::Closed { at, deferred } if now.saturating_duration_since(at) <= TABLE_LAG => {
            let ends = |one: &Located| {
                matches!(one.session.state, SessionState::Running | SessionState::Closing)
            };
            let runs = binding.is_some_and(|binding| binding.turns > 0) || located.iter().any(ends);
            return if deferred && runs { Standing::Closing } else { Standing::Unknown };
        }
        // The tables have had their time: they know better now.
        Closing::Closed { .. } => return of_table(best(located, view, None), view, None, now),
        Closing::No => {}
    }
    let Some(binding) = binding else {
        return of_table(best(located, view, None), view, None, now);
    };
    let at_binding = located.iter().find(|one| one.worker.agent == binding.worker.agent);
    let fresh_deed = binding.is_recent(now) || binding.just_opened(now).is_some();
    if at_binding.is_none() && fresh_deed && view.agent(binding.worker).is_up() {
        return of_binding(binding, now);
    }
    if located.is_empty() {
        return of_binding(binding, now);
    }
    of_table(best(located, view, Some(binding.worker)), view, Some(binding), now)
}

fn of_binding(binding: &Binding, now: Instant) -> Standing {
    let (worker, busy) = (binding.worker, binding.exclusive && binding.turns > 0);
    match binding.just_opened(now) {
        Some(session) => Standing::Open { worker, session: Arc::clone(session), busy },
        None => Standing::Bound { worker, recent: binding.is_recent(now), busy },
    }
}

fn of_table(
    one: Option<&Located>,
    view: &ClusterView,
    binding: Option<&Binding>,
    now: Instant,
) -> Standing {
    let Some(Located { worker, session }) = one else { return Standing::Unknown };
    let agent_up = view.agent(*worker).is_up();
    let gone = !agent_up && (session.retention == Retention::Pinned);
    match session.state {
        SessionState::Closing => return Standing::Closing,
        SessionState::Lost => return Standing::Lost { worker: *worker, agent_up },
        _ if gone => return Standing::Lost { worker: *worker, agent_up },
        SessionState::Opening | SessionState::Idle | SessionState::Running => {}
    }
    let ours = binding.is_some_and(|binding| binding.turns > 0);
    // A turn that just ended through this router may still run in the table: the agent's gate
    // decides then, and no client that waited for its answer is told it is busy.
    let theirs = session.turns_running > 0 && !binding.is_some_and(|held| held.is_recent(now));
    let exclusive = session.exclusive || binding.is_some_and(|binding| binding.exclusive);
    let busy = exclusive && (ours || theirs);
    Standing::Open { worker: *worker, session: Arc::clone(session), busy }
}

/// The entry to believe where several agents have one: who is there, then where this router sent
/// it, then who has not lost it, then who had it last.
fn best<'a>(
    located: &'a [Located],
    view: &ClusterView,
    bound: Option<WorkerRef>,
) -> Option<&'a Located> {
    located.iter().max_by_key(|one| {
        (
            view.agent(one.worker).is_up(),
            bound.is_some_and(|bound| bound.agent == one.worker.agent),
            one.session.state != SessionState::Lost,
            Reverse(one.session.idle),
            Reverse(one.worker),
        )
    })
}
