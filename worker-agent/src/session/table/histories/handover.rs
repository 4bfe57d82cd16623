//! Hands the sessions over to the next agent process, and takes them up from the last one.
//!
//! A pinned session is taken up as suspect: its turns wait until the shim reports the history that
//! the last process knew. What can't be proven is closed, and the session's next turn is told.
//! Sessions on the radix tree need no proof, because their turns send the whole conversation.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use contract::id::{Digest, SessionKey};

use crate::session::{
    handover::{HandedSession, HandedState, HandedWeights},
    journal::OpenIncarnation,
    table::{
        Doubt, EngineHistory, ExpectedHistory, GoneReason, Guard, Histories, PrefixTracker, Record,
        Row, Session, SessionEvent, ShimRequest, State, Step, Tree, TurnCounts,
    },
};

/// How long a session waits for the shim, which tries to connect to the new process once a second.
const TAKE_OVER_TIME_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Default)]
pub struct Legacy {
    pub open_incarnations: BTreeMap<String, OpenIncarnation>,
    pub tags: BTreeSet<String>,
    /// None after a crash.
    pub sessions: Vec<HandedSession>,
    pub age: Duration,
    pub is_same_engine: bool,
}

impl Histories {
    pub(crate) fn hand_over(&self, now: Instant) -> Vec<HandedSession> {
        let weights = self.weights.hand_over();
        let hand_over = |(key, session)| hand_over_session(key, session, weights, now);
        self.pins.sessions.iter().filter_map(hand_over).collect()
    }

    pub(crate) fn take_over(&mut self, step: &mut Step, legacy: Legacy) {
        let Legacy { mut open_incarnations, mut tags, sessions: mut handed, age, is_same_engine } =
            legacy;
        if let Some(session) = handed.first().filter(|_| is_same_engine) {
            self.weights.take_over(session.weights);
        }
        // If there is no room for all, those stay that came last.
        handed.sort_by_key(|session| Reverse(session.idle_ms));
        while let Some(session) = handed.pop() {
            let (sessions, shares) = (&self.pins.sessions, self.settings.shares);
            let Some(key) = session.key().filter(|key| !sessions.has(key)) else { continue };
            if sessions.len() >= shares.sessions_max {
                break;
            }
            let own = sessions.principals().sessions(key.principal());
            if own >= shares.principal_sessions_max {
                continue;
            }
            let opens = &open_incarnations;
            let state = state_to_take_over(self, step.now, &session, opens, is_same_engine);
            let keeps_incarnation = !matches!(state, State::Gone { .. });
            if keeps_incarnation {
                open_incarnations.remove(&session.incarnation);
            }
            let keeps_tag = state.tree().is_some_and(|tree| tree.has_tag);
            if keeps_tag && !tags.remove(&session.incarnation) {
                // The session's turns ran without its tag, so the journal doesn't have it.
                let incarnation = session.incarnation.clone();
                step.write_journal(Record::Tag { incarnation });
            }
            insert_handed(self, step, &key, session, age, state);
        }
        for (incarnation, left) in open_incarnations {
            self.pins.inherit_incarnation(step, incarnation, left.dp_rank, left.rid);
        }
        self.pins.inherit_tags(step, tags);
    }
}

fn state_to_take_over(
    histories: &Histories,
    now: Instant,
    handed: &HandedSession,
    open_incarnations: &BTreeMap<String, OpenIncarnation>,
    is_same_engine: bool,
) -> State {
    let lost = |reason| State::Gone { reason, tree: None };
    let is_in_journal = open_incarnations
        .get(&handed.incarnation)
        .is_some_and(|open| open.dp_rank == handed.dp_rank);
    let is_known = histories.pins.sessions.key_of(&handed.incarnation).is_some();
    match handed.state {
        HandedState::Gone { reason, is_tagged } => State::Gone {
            reason,
            tree: is_tagged.map(|is_tagged| Tree { is_tagged, ..Tree::default() }),
        },
        HandedState::InTree { is_tagged, .. } if !is_same_engine || is_known => {
            let tree = Some(Tree { is_tagged, ..Tree::default() });
            State::Gone { reason: GoneReason::EngineRestarted, tree }
        }
        HandedState::InTree { is_tagged, resident_tokens, no_pin_ms } => {
            let no_pin_before = (no_pin_ms > 0).then(|| now + Duration::from_millis(no_pin_ms));
            let resident_tokens = resident_tokens.min(histories.pins.context_tokens);
            let has_tag = is_tagged;
            State::InTree(Tree { is_tagged, has_tag, resident_tokens, no_pin_before })
        }
        _ if !is_same_engine => lost(GoneReason::EngineRestarted),
        _ if !is_in_journal || is_known => lost(GoneReason::NotTakenOver),
        HandedState::Demoted {} => unproven(histories, now, handed, None),
        HandedState::Open { resident_tokens } => {
            let row = Row { resident_tokens, ..Row::default() };
            match histories.pins.has_room_for(handed.dp_rank, resident_tokens) {
                Some(true) => unproven(histories, now, handed, Some(row)),
                // This process may hold fewer rows or tokens than the last one.
                Some(false) => lost(GoneReason::Reclaimed),
                None => lost(GoneReason::NotTakenOver),
            }
        }
    }
}

fn unproven(
    histories: &Histories,
    now: Instant,
    handed: &HandedSession,
    row: Option<Row>,
) -> State {
    if !histories.settings.guards.is_on(Guard::HandoverVerified) {
        return row.map_or(State::Demoted, State::Open);
    }
    let doubt = Doubt {
        expected: ExpectedHistory::Exactly(handed.history_tokens),
        // The shim is asked as soon as it is there.
        request: ShimRequest { number: None, until: Some(now + TAKE_OVER_TIME_MAX) },
        otherwise: GoneReason::NotTakenOver,
    };
    State::Suspect { row, doubt }
}

fn insert_handed(
    histories: &mut Histories,
    step: &mut Step,
    key: &SessionKey,
    handed: HandedSession,
    age: Duration,
    state: State,
) {
    let now = step.now;
    let (is_gone, was_open) = (state.is_gone(), handed.is_open());
    let idle = Duration::from_millis(handed.idle_ms).saturating_add(age);
    let last_end = now.checked_sub(idle).unwrap_or(now);
    let turns = TurnCounts {
        finished: handed.turns_finished,
        began: last_end,
        last_end,
        ..TurnCounts::new(now)
    };
    let kv_epoch = histories.weights.epoch();
    let last_rank = histories.pins.ranks().end.saturating_sub(1);
    let sessions = &mut histories.pins.sessions;
    let idle_cap = sessions.idle_cap();
    if !is_gone {
        sessions.adopt_prefix(&handed.incarnation);
    }
    sessions.insert(step, key, |fresh_incarnation, generation| Session {
        dp_rank: handed.dp_rank.min(last_rank),
        incarnation: if is_gone { fresh_incarnation } else { handed.incarnation },
        generation,
        state,
        kv_epoch,
        chooser: handed.chooser,
        sharing: handed.sharing,
        turns,
        history: EngineHistory {
            tokens: if is_gone { 0 } else { handed.history_tokens },
            kv: handed.kv.filter(|_| !is_gone),
            ..EngineHistory::default()
        },
        client: handed.client,
        prefix_tracker: PrefixTracker::default(),
        idle_max: Duration::from_millis(handed.idle_ms_max).min(idle_cap),
        parent: handed.parent.map(Digest),
    });
    if is_gone && was_open {
        step.report_event(key, SessionEvent::NotTakenOver);
    }
}

/// `None` if the next process need know nothing.
fn hand_over_session(
    key: &SessionKey,
    session: &Session,
    weights: HandedWeights,
    now: Instant,
) -> Option<HandedSession> {
    let to_ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let gone = |reason| HandedState::Gone { reason, is_tagged: None };
    let state = match &session.state {
        // A closing session is closed by the next process, as the journal has it.
        State::Planned | State::Opening(_) | State::Closing(_) => return None,
        _ if session.turns.running > 0 => gone(GoneReason::NotTakenOver),
        State::Open(_) if session.history.is_corrupt => gone(GoneReason::KvCorrupt),
        State::Open(row) => HandedState::Open { resident_tokens: row.resident_tokens },
        State::Demoted => HandedState::Demoted {},
        State::Demoting { .. } | State::Suspect { .. } => gone(GoneReason::NotTakenOver),
        State::InTree(tree) => HandedState::InTree {
            is_tagged: tree.is_tagged,
            resident_tokens: tree.resident_tokens,
            no_pin_ms: tree.no_pin_before.map_or(0, |at| to_ms(at.saturating_duration_since(now))),
        },
        State::Gone { reason, tree } => HandedState::Gone {
            reason: *reason,
            is_tagged: tree.as_ref().map(|tree| tree.is_tagged),
        },
    };
    Some(HandedSession {
        principal: key.principal().to_owned(),
        id: key.id().to_owned(),
        dp_rank: session.dp_rank,
        incarnation: session.incarnation.clone(),
        state,
        chooser: session.chooser,
        sharing: session.sharing,
        turns_finished: session.turns.finished,
        idle_ms: to_ms(session.idle(now)),
        idle_ms_max: to_ms(session.idle_max),
        history_tokens: session.history.tokens,
        client: session.client,
        parent: session.parent.map(|parent| parent.0),
        kv: session.history.kv,
        weights,
    })
}
