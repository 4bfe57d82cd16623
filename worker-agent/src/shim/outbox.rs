//! Buffers the reports of one engine rank's shim until the agent takes them. Pure.
//!
//! The shim is Berth's plugin inside the engine; the parent module describes its reports.
//! `connection` puts the shim's decoded messages into an [`Outbox`] and takes the reports out. The
//! rank's figures (*facts*) and the table of sessions are states, so a newer state replaces an
//! older one. Events are all kept in order, and the agent gets them before the state that they led
//! to.
//!
//! While the buffer has [`EVENTS_MAX`] events or more, it accepts no messages. If that lasts, the
//! shim's socket fills up, and the shim loses events and counts them. Afterwards the shim sends its
//! full table of sessions.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use super::{
    AuditReply, RankFacts, SessionChanges, SessionFacts, ShimEvent,
    codec::{self, Body, ShimMessage, Update, WireEvent, WireEventKind},
    connection::{EndReason, PeerInfo, Protocol},
};

/// The number of buffered events at which the buffer accepts no further message. An update has at
/// most 256 events, so the buffer holds at most 255 events more than this.
pub(super) const EVENTS_MAX: usize = 1024;

/// The reports of one rank that the agent hasn't taken. See the module documentation.
#[derive(Debug)]
pub(super) struct Outbox {
    dp_rank: u32,
    /// The sequence number that the next update must have.
    next_seq: u64,
    events: VecDeque<ShimEvent>,
    /// The changed sessions by id; `None` marks a session that is gone.
    changed_sessions: BTreeMap<String, Option<SessionFacts>>,
    /// Whether `changed_sessions` begins a full table, which replaces all that the agent knows.
    is_full_table: bool,
    /// The latest figures, unless the agent has taken them.
    facts: Option<RankFacts>,
    audit_reply: Option<AuditReply>,
}

impl Outbox {
    pub(super) fn new(dp_rank: u32) -> Self {
        Self {
            dp_rank,
            next_seq: 0,
            events: VecDeque::new(),
            changed_sessions: BTreeMap::new(),
            is_full_table: false,
            facts: None,
            audit_reply: None,
        }
    }

    fn has_session_changes(&self) -> bool {
        self.is_full_table || !self.changed_sessions.is_empty()
    }

    /// Buffers an update, which the agent read at `read_at`.
    pub(super) fn push(&mut self, update: Update, read_at: Instant) {
        self.facts = Some(to_rank_facts(self.dp_rank, &update, read_at));
        let dp_rank = self.dp_rank;
        self.events.extend(update.events.into_iter().map(|event| to_report(dp_rank, event)));
        if update.is_full_table {
            self.is_full_table = true;
            self.changed_sessions.clear();
        }
        for id in update.gone_ids {
            if self.is_full_table {
                self.changed_sessions.remove(&id);
            } else {
                self.changed_sessions.insert(id, None);
            }
        }
        for session in update.sessions {
            self.changed_sessions.insert(session.id.clone(), Some(session));
        }
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }

    fn check_invariants(&self) {
        assert!(
            !self.is_full_table || self.changed_sessions.values().all(Option::is_some),
            "a full table names no session that has gone"
        );
    }
}

impl Protocol for Outbox {
    const NAME: &'static str = "shim";
    type Message = ShimMessage;
    type Report = ShimEvent;

    fn decode(kind: u8, body: &mut Body<'_>) -> Result<ShimMessage, codec::Error> {
        codec::decode_message(kind, body)
    }

    fn begin(hello: ShimMessage, pid: Option<u32>) -> Option<(Self, PeerInfo, ShimEvent)> {
        let ShimMessage::Hello(mut hello) = hello else { return None };
        hello.pid_in_agent_namespace = pid;
        let info = PeerInfo {
            dp_rank: hello.dp_rank,
            takes_commands: hello.inert_reason.is_none(),
            unpublishable_reason: hello.unpublishable_reason.clone(),
        };
        Some((Self::new(hello.dp_rank), info, ShimEvent::Up(*hello)))
    }

    fn receive(&mut self, message: ShimMessage, read_at: Instant) -> Result<(), EndReason> {
        match message {
            ShimMessage::Hello(_) => return Err(EndReason::MisplacedHello),
            ShimMessage::Update(update) if update.seq != self.next_seq => {
                return Err(EndReason::UpdatesMissing {
                    received_seq: update.seq,
                    due_seq: self.next_seq,
                });
            }
            ShimMessage::Update(update) => {
                self.next_seq += 1;
                self.push(*update, read_at);
            }
            // A newer result replaces a result that the agent hasn't taken.
            ShimMessage::Audited(reply) => self.audit_reply = Some(reply),
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.events.len() < EVENTS_MAX
    }

    fn has_no_report(&self) -> bool {
        let has_states =
            self.has_session_changes() || self.facts.is_some() || self.audit_reply.is_some();
        self.events.is_empty() && !has_states
    }

    /// Takes the events first, then the sessions, the facts, and the audit's result.
    fn next_report(&mut self) -> Option<ShimEvent> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if self.has_session_changes() {
            let mut sessions = SessionChanges {
                dp_rank: self.dp_rank,
                is_full_table: self.is_full_table,
                changed: vec![],
                gone_ids: vec![],
            };
            for (id, facts) in std::mem::take(&mut self.changed_sessions) {
                match facts {
                    Some(facts) => sessions.changed.push(facts),
                    None => sessions.gone_ids.push(id),
                }
            }
            self.is_full_table = false;
            return Some(ShimEvent::Sessions(sessions));
        }
        if let Some(facts) = self.facts.take() {
            return Some(ShimEvent::Facts(facts));
        }
        let dp_rank = self.dp_rank;
        self.audit_reply.take().map(|reply| ShimEvent::Audited { dp_rank, reply })
    }

    fn end_report(&self, reason: String) -> ShimEvent {
        ShimEvent::Down { dp_rank: self.dp_rank, reason }
    }
}

fn to_report(dp_rank: u32, event: WireEvent) -> ShimEvent {
    let id = event.id;
    match event.kind {
        WireEventKind::Opened { ok } => ShimEvent::Opened { dp_rank, id, ok },
        WireEventKind::Closed => ShimEvent::Closed { dp_rank, id },
        WireEventKind::Committed { rid, history_tokens, is_retracted } => {
            ShimEvent::Committed { dp_rank, id, rid, history_tokens, is_retracted }
        }
        WireEventKind::Aborted { was_running } => ShimEvent::Aborted { dp_rank, id, was_running },
        WireEventKind::Demoted { refusal } => {
            let refusal = Some(refusal).filter(|reason| !reason.is_empty());
            ShimEvent::Demoted { dp_rank, id, refusal }
        }
    }
}

fn to_rank_facts(dp_rank: u32, update: &Update, read_at: Instant) -> RankFacts {
    RankFacts {
        dp_rank,
        read_at,
        pool_tokens: update.pool_tokens,
        available_tokens: update.available_tokens,
        evictable_tokens: update.evictable_tokens,
        protected_tokens: update.protected_tokens,
        held_tokens: update.held_tokens,
        uncached_tokens: update.uncached_tokens,
        rows_total: update.rows_total,
        rows_free: update.rows_free,
        running: update.running,
        waiting: update.waiting,
        events_lost: update.events_lost,
        recounts: update.recounts,
        samples: update.samples,
        samples_ns: update.samples_ns,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use service::clock::now;

    use super::*;

    fn session(id: &str, history: u32) -> SessionFacts {
        SessionFacts { id: id.into(), history_tokens: history, ..SessionFacts::default() }
    }

    fn closed(id: &str) -> WireEvent {
        WireEvent { id: id.into(), kind: WireEventKind::Closed }
    }

    fn drain(outbox: &mut Outbox) -> Vec<ShimEvent> {
        std::iter::from_fn(|| outbox.next_report()).collect()
    }

    #[test]
    fn events_stay_and_states_are_the_newest() {
        let mut outbox = Outbox::new(3);
        for (available_tokens, history) in [(5, 10), (4, 20)] {
            let sessions = vec![session("a", history)];
            let events = vec![closed("b")];
            outbox.push(Update { available_tokens, sessions, events, ..Update::default() }, now());
        }
        let news = drain(&mut outbox);
        let [ShimEvent::Closed { dp_rank: 3, id }, ShimEvent::Closed { .. }, sessions, facts] =
            &news[..]
        else {
            panic!("{news:?}")
        };
        assert_eq!(id, "b");
        let ShimEvent::Sessions(sessions) = sessions else { panic!("{sessions:?}") };
        assert_eq!((&sessions.changed, sessions.is_full_table), (&vec![session("a", 20)], false));
        assert!(
            matches!(facts, ShimEvent::Facts(RankFacts { available_tokens: 4, .. })),
            "{facts:?}"
        );
        assert!(outbox.has_no_report());
    }

    #[test]
    fn an_empty_full_table_is_told() {
        let mut outbox = Outbox::new(0);
        outbox.push(Update { is_full_table: true, ..Update::default() }, now());
        let Some(ShimEvent::Sessions(sessions)) = outbox.next_report() else { panic!("no table") };
        assert!(sessions.is_full_table && sessions.changed.is_empty());
    }

    #[test]
    fn it_stops_taking_before_it_loses() {
        let mut outbox = Outbox::new(0);
        while outbox.has_room() {
            let events = (0..256).map(|_| closed("a")).collect();
            outbox.push(Update { events, ..Update::default() }, now());
        }
        let events = drain(&mut outbox).len();
        assert!((EVENTS_MAX..EVENTS_MAX + 257).contains(&events), "{events}");
        assert!(outbox.has_room());
    }

    fn a_step() -> impl Strategy<Value = (bool, Vec<(u8, Option<u32>)>, bool)> {
        (any::<bool>(), prop::collection::vec((0..6_u8, any::<Option<u32>>()), 0..5), any::<bool>())
    }

    proptest! {
        /// The receiver ends up with the shim's table, whatever updates its pace merges.
        #[test]
        fn joined_updates_lead_to_the_same_table(steps in prop::collection::vec(a_step(), 0..20)) {
            let mut outbox = Outbox::new(0);
            let (mut said, mut heard) = (BTreeMap::new(), BTreeMap::new());
            let mut hear = |outbox: &mut Outbox| {
                for news in drain(outbox) {
                    let ShimEvent::Sessions(sessions) = news else { continue };
                    if sessions.is_full_table {
                        heard.clear();
                    }
                    for id in sessions.gone_ids {
                        heard.remove(&id);
                    }
                    for facts in sessions.changed {
                        heard.insert(facts.id.clone(), facts.history_tokens);
                    }
                }
                heard.clone()
            };
            for (is_full_table, changes, take) in steps {
                let mut update = Update { is_full_table, ..Update::default() };
                if is_full_table {
                    said.clear();
                }
                // The shim never puts an id in both lists.
                for (id, history) in changes.into_iter().collect::<BTreeMap<_, _>>() {
                    let id = id.to_string();
                    if let Some(history) = history {
                        update.sessions.push(session(&id, history));
                        said.insert(id, history);
                    } else {
                        said.remove(&id);
                        update.gone_ids.push(id);
                    }
                }
                outbox.push(update, now());
                if take {
                    prop_assert_eq!(hear(&mut outbox), said.clone());
                }
            }
            prop_assert_eq!(hear(&mut outbox), said);
        }
    }
}
