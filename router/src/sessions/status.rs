//! Determines a session's status from the agents' session tables and this router's binding. Pure.
//!
//! If a table has the session, the table decides, with two exceptions. While this router closes the
//! session, and for [`TABLE_LAG_MAX`] after that, the binding decides. If the bound agent's table
//! lacks the session, the binding decides too, but only while a turn through this router runs and
//! for [`TABLE_LAG_MAX`] after a turn or an open. In both cases the tables may be behind.

use std::{cmp::Reverse, sync::Arc, time::Instant};

use contract::{
    id::SessionKey,
    load::{Retention, Session, SessionState},
};

use super::bindings::{Binding, CloseProgress, TABLE_LAG_MAX};
use crate::fleet::{
    sessions::ReportedSession,
    snapshot::Snapshot,
    worker::{WorkerRef, WorkerState},
};

#[derive(Debug, Clone)]
pub enum SessionStatus {
    Unknown,
    /// This router placed the session, and no agent has reported it.
    Bound {
        worker: WorkerRef,
        /// A turn runs or ended less than [`TABLE_LAG_MAX`] ago. The agent's report of the session
        /// may still be on its way.
        is_recent: bool,
        placement_only: bool,
        /// The session takes one turn at a time and a turn surely runs.
        is_busy: bool,
    },
    Open {
        worker: WorkerRef,
        session: Arc<Session>,
        /// The session takes one turn at a time and a turn surely runs.
        is_busy: bool,
    },
    Closing,
    /// The session can't continue, because its KV and history are gone or out of reach. Either its
    /// engine lost it, or it is pinned on an agent that is unreachable.
    Lost {
        worker: WorkerRef,
        session: Arc<Session>,
        /// True if the agent is connected and reports the loss.
        is_agent_up: bool,
    },
}

impl SessionStatus {
    /// The worker of a session that its owner sees, and can close. An old binding to a worker whose
    /// agent doesn't report the session is none.
    #[must_use]
    pub fn owned_worker(&self) -> Option<WorkerRef> {
        match self {
            Self::Unknown
            | Self::Closing
            | Self::Bound { is_recent: false, placement_only: false, .. } => None,
            Self::Bound { worker, .. } | Self::Open { worker, .. } | Self::Lost { worker, .. } => {
                Some(*worker)
            }
        }
    }
}

#[must_use]
pub fn determine_status(
    key: &SessionKey,
    view: &Snapshot,
    binding: Option<&Binding>,
    now: Instant,
) -> SessionStatus {
    let entries = view.sessions.locate(key);
    match binding.map_or(CloseProgress::NotRequested, |binding| binding.close_progress) {
        CloseProgress::Requested => return SessionStatus::Closing,
        CloseProgress::Closed { at, is_deferred }
            if now.saturating_duration_since(at) <= TABLE_LAG_MAX =>
        {
            let still_runs = |entry: &ReportedSession| {
                matches!(entry.session.state, SessionState::Running | SessionState::Closing)
            };
            let has_turns = binding.is_some_and(|binding| binding.turns > 0);
            let is_running = has_turns || entries.iter().any(still_runs);
            return if is_deferred && is_running {
                SessionStatus::Closing
            } else {
                SessionStatus::Unknown
            };
        }
        // The lag has passed, so the tables are up to date.
        CloseProgress::Closed { .. } => {
            return status_from_table(
                preferred_entry(entries.iter(), entries, view, None, now),
                view,
                None,
            );
        }
        CloseProgress::NotRequested => {}
    }
    let Some(binding) = binding else {
        return status_from_table(
            preferred_entry(entries.iter(), entries, view, None, now),
            view,
            None,
        );
    };
    let was_just_reopened = binding.was_just_reopened(now);
    // After this router has opened the session again, an entry that is lost or closing shows the
    // session as it was before.
    let is_outdated = |entry: &ReportedSession| {
        was_just_reopened
            && entry.worker.agent == binding.worker.agent
            && matches!(entry.session.state, SessionState::Lost | SessionState::Closing)
    };
    let current_entries = || entries.iter().filter(|entry| !is_outdated(entry));
    let is_on_bound_agent =
        current_entries().any(|entry| entry.worker.agent == binding.worker.agent);
    let just_opened = binding.just_opened(view.agent(binding.worker).epoch(), now);
    let acted_recently = binding.is_recent(now) || just_opened.is_some();
    if !is_on_bound_agent && acted_recently && view.agent(binding.worker).is_up() {
        return status_from_binding(binding, just_opened, now);
    }
    match preferred_entry(current_entries(), entries, view, Some(binding.worker), now) {
        None => status_from_binding(binding, just_opened, now),
        entry => status_from_table(entry, view, Some(binding)),
    }
}

fn status_from_binding(
    binding: &Binding,
    just_opened: Option<&Arc<Session>>,
    now: Instant,
) -> SessionStatus {
    let (worker, is_busy) = (binding.worker, binding.is_busy());
    match just_opened {
        Some(session) => SessionStatus::Open { worker, session: Arc::clone(session), is_busy },
        None => SessionStatus::Bound {
            worker,
            is_recent: binding.is_recent(now),
            placement_only: binding.placement_only,
            is_busy,
        },
    }
}

fn status_from_table(
    entry: Option<&ReportedSession>,
    view: &Snapshot,
    binding: Option<&Binding>,
) -> SessionStatus {
    let Some(ReportedSession { worker, session, .. }) = entry else {
        return SessionStatus::Unknown;
    };
    let (worker, session) = (*worker, Arc::clone(session));
    let is_agent_up = view.agent(worker).is_up();
    let needs_its_worker = needs_its_worker(&session);
    let is_unreachable = !is_agent_up && needs_its_worker;
    // An agent that leaves closes its sessions itself. No client asked for that, so its next turn
    // goes to another agent if it can.
    let is_agent_leaving = !is_agent_up || view.agent(worker).was_draining;
    match session.state {
        SessionState::Closing if needs_its_worker || !is_agent_leaving => {
            return SessionStatus::Closing;
        }
        // Any other session has only lost cached KV. Any agent can take its next turn.
        SessionState::Lost if needs_its_worker => {
            return SessionStatus::Lost { worker, session, is_agent_up };
        }
        _ if is_unreachable => return SessionStatus::Lost { worker, session, is_agent_up },
        _ => {}
    }
    let is_busy = session.exclusive && binding.is_some_and(|binding| binding.unanswered_turns > 0);
    SessionStatus::Open { worker, session, is_busy }
}

fn needs_its_worker(session: &Session) -> bool {
    // A client that sends its full history in each turn can continue on any worker. A client that
    // asked for a pinned session may send only the new part of its history.
    let can_continue_anywhere = session.full_history && !session.exclusive;
    session.retention == Retention::Pinned && !can_continue_anywhere
}

/// Any worker can take the next turn of such a session.
#[must_use]
pub fn is_left_with_nothing(session: &Session) -> bool {
    session.state == SessionState::Lost && !needs_its_worker(session)
}

/// Whether this entry is the session, for an operator who sees all sessions of the fleet. Several
/// agents may have entries of it, such as one from whose engine the session has moved.
#[must_use]
pub fn is_shown(entry: &ReportedSession, view: &Snapshot, now: Instant) -> bool {
    let entries = view.sessions.locate(&entry.session.key);
    // Almost every session has one entry.
    entries.len() < 2
        || preferred_entry(entries.iter(), entries, view, None, now)
            .is_none_or(|shown| shown.worker == entry.worker)
}

/// Whether an entry is a *stray*: a session without a turn, whose history another agent has. An
/// open that got no answer leaves one, if it was then repeated at another agent. A turn with the
/// new part of a history must never run on it.
fn is_stray(entry: &ReportedSession, entries: &[ReportedSession]) -> bool {
    let has_history = |other: &ReportedSession| {
        let is_elsewhere = other.worker.agent != entry.worker.agent;
        is_elsewhere && other.session.turns > 0 && other.session.state != SessionState::Lost
    };
    is_unused(&entry.session) && needs_its_worker(&entry.session) && entries.iter().any(has_history)
}

pub fn is_unused_at(key: &SessionKey, view: &Snapshot, worker: WorkerRef) -> bool {
    let entries = view.sessions.locate(key);
    let at_worker = entries.iter().find(|entry| entry.worker.agent == worker.agent);
    view.agent(worker).is_up() && at_worker.is_some_and(|entry| is_unused(&entry.session))
}

fn is_unused(session: &Session) -> bool {
    session.turns == 0 && session.turns_running == 0
}

/// Those of a session that is open on `worker`, on connected agents.
pub fn strays(key: &SessionKey, view: &Snapshot, worker: WorkerRef) -> Vec<WorkerRef> {
    let entries = view.sessions.locate(key);
    let strays = entries.iter().filter(|entry| {
        let is_elsewhere = entry.worker.agent != worker.agent;
        is_elsewhere && view.agent(entry.worker).is_up() && is_stray(entry, entries)
    });
    strays.map(|entry| entry.worker).collect()
}

/// A session of several agents, at rest on all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    pub keeper: WorkerRef,
    /// The workers at which the session is to be closed.
    pub others: Vec<WorkerRef>,
}

/// Decides which of several connected agents keeps a session. All routers that have the same tables
/// decide alike: the one with a history wins, then one that its agent still takes turns for, then
/// the older one, then the lower agent id.
///
/// `None` if one of them must not be closed: a turn runs, or two have a history that can't be made
/// again. Also if an agent doesn't say when the session began.
#[must_use]
pub fn judge_split(key: &SessionKey, view: &Snapshot, now: Instant) -> Option<Split> {
    let entries = view.sessions.locate(key).iter();
    let live: Vec<_> = entries.filter(|entry| view.agent(entry.worker).is_up()).collect();
    let is_at_rest = |entry: &&ReportedSession| {
        let Session { state, turns_running, began_unix_ms, .. } = *entry.session;
        matches!(state, SessionState::Idle | SessionState::Demoted)
            && turns_running == 0
            && began_unix_ms > 0
    };
    let is_precious =
        |entry: &&&ReportedSession| entry.session.turns > 0 && needs_its_worker(&entry.session);
    let precious_count = live.iter().filter(is_precious).count();
    if live.len() < 2 || !live.iter().all(is_at_rest) || precious_count > 1 {
        return None;
    }
    // Only what the agents themselves report: routers may disagree about what they can reach.
    let is_left =
        |worker| matches!(view.state(worker, now), WorkerState::Draining | WorkerState::Unhealthy);
    let keeper = live.iter().min_by_key(|entry| {
        let Session { turns, began_unix_ms, .. } = *entry.session;
        let (worker, name) = (entry.worker, view.agent(entry.worker).name());
        (!is_precious(entry), is_left(worker), turns == 0, began_unix_ms, name)
    });
    let keeper = keeper?.worker;
    let others = live.iter().map(|entry| entry.worker).filter(|worker| *worker != keeper);
    Some(Split { keeper, others: others.collect() })
}

/// Prefers, in this order: a connected agent, an entry of which something is left, the agent of
/// `bound_worker`, an entry that isn't lost, the entry with the most recent turn, and the lowest
/// worker. Only the bound agent's entry may be a stray.
fn preferred_entry<'a>(
    entries: impl Iterator<Item = &'a ReportedSession>,
    all: &[ReportedSession],
    view: &Snapshot,
    bound_worker: Option<WorkerRef>,
    now: Instant,
) -> Option<&'a ReportedSession> {
    let is_bound = |entry: &ReportedSession| {
        bound_worker.is_some_and(|worker| worker.agent == entry.worker.agent)
    };
    let usable = entries.filter(|entry| is_bound(entry) || !is_stray(entry, all));
    usable.max_by_key(|entry| {
        (
            view.agent(entry.worker).is_up(),
            !is_left_with_nothing(&entry.session),
            is_bound(entry),
            entry.session.state != SessionState::Lost,
            Reverse(entry.idle(now)),
            Reverse(entry.worker),
        )
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use contract::load::LoadReport;

    use super::*;
    use crate::{
        fleet::{
            state::{State, Update},
            testing::{description, fleet, replace_agent, report, start},
            worker::AgentKey,
        },
        sessions::bindings::{Bindings, OpenAnswer},
    };

    fn key() -> SessionKey {
        SessionKey::new("p", "s").unwrap()
    }

    fn at(agent: usize) -> WorkerRef {
        WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
    }

    fn session(retention: Retention, state: SessionState, turns_running: u32) -> Session {
        Session {
            key: key(),
            retention,
            state,
            dp_rank: 0,
            turns: 1,
            turns_running,
            exclusive: retention == Retention::Pinned,
            resident_tokens: None,
            idle: Duration::ZERO,
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    fn idle(retention: Retention) -> Update {
        Update::SessionChanged(session(retention, SessionState::Idle, 0))
    }

    fn opened(state: &State, now: Instant) -> OpenAnswer {
        let session = Arc::new(session(Retention::Pinned, SessionState::Idle, 0));
        OpenAnswer { session, epoch: state.snapshot().agent(at(0)).epoch(), answered_at: now }
    }

    fn status(state: &State, bindings: &Bindings, now: Instant) -> SessionStatus {
        determine_status(&key(), &state.snapshot(), bindings.get(&key(), now), now)
    }

    fn worker(status: &SessionStatus) -> usize {
        match status {
            SessionStatus::Open { worker, .. } | SessionStatus::Bound { worker, .. } => {
                worker.agent.slot()
            }
            other => panic!("nowhere: {other:?}"),
        }
    }

    fn setup() -> (State, Bindings, Instant) {
        let now = start();
        (fleet(&[(0, 0), (0, 0)], now), Bindings::new(8, Duration::from_secs(60)), now)
    }

    #[test]
    fn a_first_turn_under_way_binds_before_any_table_knows() {
        let (mut state, mut bindings, now) = setup();
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Unknown));
        bindings.begin_turn(&key(), at(1), false, now).unwrap();
        assert_eq!(worker(&status(&state, &bindings, now)), 1);
        // An old entry on another agent doesn't replace the binding.
        state.apply(AgentKey::first(0), idle(Retention::Tagged), now);
        assert_eq!(worker(&status(&state, &bindings, now)), 1);
        bindings.end_turn(&key(), now);
        let later = now + TABLE_LAG_MAX + Duration::from_secs(1);
        assert_eq!(worker(&status(&state, &bindings, later)), 0, "the tables count after the lag");
    }

    #[test]
    fn an_open_counts_until_the_table_has_had_its_time() {
        let (state, mut bindings, now) = setup();
        bindings.record_open(at(0), opened(&state, now), now).unwrap();
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Open { .. }));
        let later = now + TABLE_LAG_MAX + Duration::from_secs(1);
        assert!(matches!(
            status(&state, &bindings, later),
            SessionStatus::Bound { is_recent: false, placement_only: false, .. }
        ));
    }

    #[test]
    fn a_session_that_went_with_its_engine_goes_on_if_nobody_asked_to_pin_it() {
        let (mut state, bindings, now) = setup();
        let lost = session(Retention::Pinned, SessionState::Lost, 0);
        let whole = Session { full_history: true, exclusive: false, ..lost.clone() };
        state.apply(AgentKey::first(0), Update::SessionChanged(lost), now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Lost { .. }));
        state.apply(AgentKey::first(0), Update::SessionChanged(whole), now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Open { .. }));
    }

    #[test]
    fn a_session_that_went_on_elsewhere_is_there_and_is_shown_once() {
        let (mut state, mut bindings, now) = setup();
        bindings.begin_turn(&key(), at(0), false, now).unwrap();
        bindings.end_turn(&key(), now);
        let lost = session(Retention::Tagged, SessionState::Lost, 0);
        state.apply(AgentKey::first(0), Update::SessionChanged(lost), now);
        let shown = |state: &State| -> Vec<WorkerRef> {
            let view = state.snapshot();
            let entries = view.sessions.iter().filter(|entry| is_shown(entry, &view, now));
            entries.map(|entry| entry.worker).collect()
        };
        assert_eq!(shown(&state), [at(0)], "its operator sees that it is lost");
        // Another router has sent its next turn elsewhere.
        state.apply(AgentKey::first(1), idle(Retention::Tagged), now);
        assert_eq!(worker(&status(&state, &bindings, now)), 1);
        assert_eq!(shown(&state), [at(1)]);
    }

    #[test]
    fn of_two_entries_the_one_with_the_most_recent_turn_counts() {
        let (mut state, bindings, now) = setup();
        // Both were idle for no time when they were reported.
        state.apply(AgentKey::first(0), idle(Retention::Tagged), now);
        let later = now + Duration::from_secs(1);
        state.apply(AgentKey::first(1), idle(Retention::Tagged), later);
        assert_eq!(worker(&status(&state, &bindings, later)), 1);
    }

    #[test]
    fn a_session_that_had_to_leave_its_worker_stays_where_it_went() {
        let (mut state, _, now) = setup();
        for (agent, began_unix_ms) in [(0, 10), (1, 20)] {
            let session = session(Retention::Tagged, SessionState::Idle, 0);
            let entry = Session { began_unix_ms, full_history: true, ..session };
            state.apply(AgentKey::first(agent), Update::SessionChanged(entry), now);
        }
        let keeper = |state: &State| judge_split(&key(), &state.snapshot(), now).unwrap().keeper;
        assert_eq!(keeper(&state), at(0), "the older one");
        let draining = LoadReport { draining: true, ..report(&[(0, 0)]) };
        state.apply(AgentKey::first(0), Update::Report(draining), now);
        assert_eq!(keeper(&state), at(1), "a draining agent gets no turns");
    }

    #[test]
    fn what_the_agent_before_has_opened_is_not_open() {
        let (mut state, mut bindings, now) = setup();
        bindings.record_open(at(0), opened(&state, now), now).unwrap();
        let began = Update::StreamBegan { description: description("a0", 2, 1), sessions: vec![] };
        state.apply(AgentKey::first(0), began, now);
        assert!(matches!(
            status(&state, &bindings, now),
            SessionStatus::Bound { is_recent: false, .. }
        ));
        bindings.record_open(at(0), opened(&state, now), now).unwrap();
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Open { .. }));
    }

    #[test]
    fn a_session_that_a_leaving_agent_closes_goes_on_elsewhere() {
        let (mut state, bindings, now) = setup();
        let leaving = LoadReport { draining: true, ..report(&[(1, 0)]) };
        let close = |state: &mut State, retention| {
            let closing = session(retention, SessionState::Closing, 1);
            state.apply(AgentKey::first(0), Update::SessionChanged(closing), now);
        };
        close(&mut state, Retention::Tagged);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Closing), "a client's");
        state.apply(AgentKey::first(0), Update::Report(leaving), now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Open { .. }));
        // The client of a pinned session may rely on the history there.
        close(&mut state, Retention::Pinned);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Closing));
    }

    #[test]
    fn a_close_hides_the_session_from_the_moment_it_is_asked() {
        let (mut state, mut bindings, now) = setup();
        state.apply(AgentKey::first(0), idle(Retention::Tagged), now);
        bindings.record_close_request(&key(), at(0), now).unwrap();
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Closing));
        bindings.record_close(&key(), false, now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Unknown));
        let running = session(Retention::Tagged, SessionState::Running, 1);
        state.apply(AgentKey::first(0), Update::SessionChanged(running), now);
        bindings.record_close(&key(), true, now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Closing));
        state.apply(AgentKey::first(0), Update::SessionRemoved(key()), now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Unknown));
    }

    #[test]
    fn a_session_opened_anew_is_not_judged_by_its_life_before() {
        let (mut state, mut bindings, now) = setup();
        let lost = session(Retention::Pinned, SessionState::Lost, 0);
        state.apply(AgentKey::first(0), Update::SessionChanged(lost.clone()), now);
        assert!(matches!(
            status(&state, &bindings, now),
            SessionStatus::Lost { is_agent_up: true, .. }
        ));
        bindings.record_close_request(&key(), at(0), now).unwrap();
        bindings.record_close(&key(), false, now);
        bindings.begin_turn(&key(), at(0), false, now).unwrap();
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Bound { .. }));
        bindings.end_turn(&key(), now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Bound { .. }));
        state.apply(AgentKey::first(0), idle(Retention::Pinned), now);
        assert!(matches!(status(&state, &bindings, now), SessionStatus::Open { .. }));
        // The session is lost again, after the table's lag.
        state.apply(AgentKey::first(0), Update::SessionChanged(lost), now);
        let later = now + TABLE_LAG_MAX + Duration::from_secs(1);
        assert!(matches!(status(&state, &bindings, later), SessionStatus::Lost { .. }));
    }

    #[test]
    fn only_a_turn_whose_answer_has_not_begun_is_surely_running() {
        let (mut state, mut bindings, now) = setup();
        let running = session(Retention::Pinned, SessionState::Running, 1);
        state.apply(AgentKey::first(0), Update::SessionChanged(running), now);
        let busy = |bindings: &Bindings| match status(&state, bindings, now) {
            SessionStatus::Open { is_busy, .. } => is_busy,
            other => panic!("{other:?}"),
        };
        assert!(!busy(&bindings), "another router's turn may have ended since");
        bindings.begin_turn(&key(), at(0), false, now).unwrap();
        assert!(busy(&bindings), "the answer has not begun");
        bindings.record_answer(&key());
        assert!(!busy(&bindings), "the client may have the whole answer already");
        bindings.end_turn(&key(), now);
        assert!(!busy(&bindings));
    }

    #[test]
    fn pinned_sessions_of_a_lost_agent_are_lost_and_tagged_ones_are_not() {
        let (mut state, bindings, now) = setup();
        state.apply(AgentKey::first(0), idle(Retention::Pinned), now);
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), now);
        assert!(matches!(
            status(&state, &bindings, now),
            SessionStatus::Lost { is_agent_up: false, .. }
        ));
        state.apply(AgentKey::first(1), idle(Retention::Tagged), now);
        assert_eq!(worker(&status(&state, &bindings, now)), 1, "a connected agent's entry is used");
        state.apply(AgentKey::first(1), Update::AgentLost("gone".to_owned()), now);
        // The agent comes back as the same process, and its table is relearned.
        let sessions = vec![session(Retention::Pinned, SessionState::Idle, 0)];
        state.apply(
            AgentKey::first(0),
            Update::StreamBegan { description: description("a0", 1, 1), sessions },
            now,
        );
        assert_eq!(worker(&status(&state, &bindings, now)), 0);
        // The agent comes back as a new process, which knows no sessions.
        let began = Update::StreamBegan { description: description("a0", 2, 1), sessions: vec![] };
        state.apply(AgentKey::first(0), began, now);
        assert_eq!(worker(&status(&state, &bindings, now)), 1);
    }

    #[test]
    fn a_session_never_continues_on_an_empty_one_of_its_name() {
        let (mut state, bindings, now) = setup();
        state.apply(AgentKey::first(0), idle(Retention::Pinned), now);
        let empty = Session { turns: 0, ..session(Retention::Pinned, SessionState::Idle, 0) };
        state.apply(AgentKey::first(1), Update::SessionChanged(empty), now);
        assert_eq!(worker(&status(&state, &bindings, now)), 0);
        assert_eq!(strays(&key(), &state.snapshot(), at(0)), [at(1)]);
        state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), now);
        assert!(matches!(
            status(&state, &bindings, now),
            SessionStatus::Lost { is_agent_up: false, worker, .. } if worker == at(0)
        ));
    }

    #[test]
    fn a_session_whose_agent_has_left_is_as_one_that_was_never_bound() {
        let now = start();
        let (mut state, mut bindings) =
            (fleet(&[(0, 0), (0, 0)], now), Bindings::new(4, TABLE_LAG_MAX));
        let old = at(0);
        bindings.begin_turn(&key(), old, false, now).unwrap();
        let old_view = state.snapshot();
        let new = WorkerRef { agent: replace_agent(&mut state, old.agent, now), dp_rank: 0 };
        let view = state.snapshot();
        let status = |bindings: &mut Bindings, view: &Snapshot| {
            determine_status(&key(), view, bindings.resolve(&key(), view, now), now)
        };
        // A turn still runs there, so the session is on no other worker yet.
        let SessionStatus::Bound { worker, .. } = status(&mut bindings, &view) else { panic!() };
        assert_eq!((worker, view.state(worker, now)), (old, WorkerState::Lost));
        bindings.record_answer(&key());
        bindings.end_turn(&key(), now);
        assert!(matches!(status(&mut bindings, &view), SessionStatus::Unknown));
        assert!(bindings.is_empty(), "it was dropped when it was met");
        // The next agent of the slot has a session of this name: that one counts, without a past.
        bindings.begin_turn(&key(), new, false, now).unwrap();
        assert_eq!(bindings.get(&key(), now).unwrap().moved_at, None);
        bindings.end_turn(&key(), now);
        state.apply(new.agent, idle(Retention::Tagged), now);
        let SessionStatus::Open { worker, .. } = status(&mut bindings, &state.snapshot()) else {
            panic!()
        };
        assert_eq!(worker, new);
        assert!(!is_unused_at(&key(), &state.snapshot(), old));
        // A decision by a snapshot from before the agent joined leaves the binding alone.
        assert!(bindings.resolve(&key(), &old_view, now).is_some());
        assert!(bindings.resolve(&key(), &view, now).is_some());
        assert_eq!(strays(&key(), &state.snapshot(), old), []);
    }
}
