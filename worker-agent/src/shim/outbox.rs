//! Buffers one rank's shim reports until the receiver takes them. Pure.
//!
//! Facts and sessions are states: a newer one replaces the older one. Events are all kept, in
//! order, and come out before the state they led to. With [`EVENTS_MAX`] events the buffer accepts
//! no more messages. Then the shim's socket fills up, the shim counts the events it loses, and it
//! sends its full table afterwards.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use super::{
    AuditReply, RankFacts, SessionFacts, Sessions, ShimEvent,
    codec::{self, Body, ShimMessage, Update, WireEvent, WireEventKind},
    connection::{EndReason, PeerInfo, Protocol},
};

/// The maximum number of buffered events: those of several updates, which have at most 256 each.
pub(super) const EVENTS_MAX: usize = 1024;

/// The unread reports of one rank. See the module documentation.
#[derive(Debug)]
pub(super) struct Outbox {
    dp_rank: u32,
    next_seq: u64,
    events: VecDeque<ShimEvent>,
    /// The changed sessions; `None` marks a session that is gone.
    sessions: BTreeMap<String, Option<SessionFacts>>,
    full: bool,
    facts: Option<RankFacts>,
    audited: Option<AuditReply>,
}

impl Outbox {
    pub(super) fn new(dp_rank: u32) -> Self {
        Self {
            dp_rank,
            next_seq: 0,
            events: VecDeque::new(),
            sessions: BTreeMap::new(),
            full: false,
            facts: None,
            audited: None,
        }
    }

    fn has_sessions(&self) -> bool {
        self.full || !self.sessions.is_empty()
    }

    /// Takes in an update that was read at `at`.
    pub(super) fn push(&mut self, update: Update, at: Instant) {
        self.facts = Some(rank_facts(self.dp_rank, &update, at));
        let dp_rank = self.dp_rank;
        self.events.extend(update.events.into_iter().map(|event| to_report(dp_rank, event)));
        if update.full {
            self.full = true;
            self.sessions.clear();
        }
        for id in update.gone {
            if self.full {
                self.sessions.remove(&id);
            } else {
                self.sessions.insert(id, None);
            }
        }
        for session in update.sessions {
            self.sessions.insert(session.id.clone(), Some(session));
        }
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }

    fn check_invariants(&self) {
        assert!(
            !self.full || self.sessions.values().all(Option::is_some),
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

    fn begin(first: ShimMessage, pid: Option<u32>) -> Option<(Self, PeerInfo, ShimEvent)> {
        let ShimMessage::Hello(mut hello) = first else { return None };
        hello.seen_pid = pid;
        let info = PeerInfo {
            dp_rank: hello.dp_rank,
            works: hello.inert.is_none(),
            unpublishable: hello.unpublishable.clone(),
        };
        Some((Self::new(hello.dp_rank), info, ShimEvent::Up(*hello)))
    }

    fn receive(&mut self, message: ShimMessage, at: Instant) -> Result<(), EndReason> {
        match message {
            ShimMessage::Hello(_) => return Err(EndReason::Order),
            ShimMessage::Update(update) if update.seq != self.next_seq => {
                return Err(EndReason::Gap { found: update.seq, due: self.next_seq });
            }
            ShimMessage::Update(update) => {
                self.next_seq += 1;
                self.push(*update, at);
            }
            // If two audits were requested, only the newer result is kept.
            ShimMessage::Audited(audited) => self.audited = Some(audited),
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.events.len() < EVENTS_MAX
    }

    fn is_empty(&self) -> bool {
        let states = self.has_sessions() || self.facts.is_some() || self.audited.is_some();
        self.events.is_empty() && !states
    }

    /// Returns the events first, then the sessions, the facts, and the audit.
    fn next_report(&mut self) -> Option<ShimEvent> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if self.has_sessions() {
            let mut sessions =
                Sessions { dp_rank: self.dp_rank, full: self.full, changed: vec![], gone: vec![] };
            for (id, facts) in std::mem::take(&mut self.sessions) {
                match facts {
                    Some(facts) => sessions.changed.push(facts),
                    None => sessions.gone.push(id),
                }
            }
            self.full = false;
            return Some(ShimEvent::Sessions(sessions));
        }
        if let Some(facts) = self.facts.take() {
            return Some(ShimEvent::Facts(facts));
        }
        let dp_rank = self.dp_rank;
        self.audited.take().map(|audited| ShimEvent::Audited { dp_rank, audited })
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
        WireEventKind::Committed { rid, history, retracted } => {
            ShimEvent::Committed { dp_rank, id, rid, history_tokens: history, retracted }
        }
        WireEventKind::Aborted { released } => ShimEvent::Aborted { dp_rank, id, released },
        WireEventKind::Demoted { refusal } => {
            let refusal = Some(refusal).filter(|reason| !reason.is_empty());
            ShimEvent::Demoted { dp_rank, id, refusal }
        }
    }
}

fn rank_facts(dp_rank: u32, update: &Update, at: Instant) -> RankFacts {
    RankFacts {
        dp_rank,
        at,
        total_tokens: update.total,
        available_tokens: update.available,
        evictable_tokens: update.evictable,
        protected_tokens: update.protected,
        held_tokens: update.held,
        uncached_tokens: update.uncached,
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
        for (available, history) in [(5, 10), (4, 20)] {
            let sessions = vec![session("a", history)];
            let events = vec![closed("b")];
            outbox.push(Update { available, sessions, events, ..Update::default() }, now());
        }
        let news = drain(&mut outbox);
        let [ShimEvent::Closed { dp_rank: 3, id }, ShimEvent::Closed { .. }, sessions, facts] =
            &news[..]
        else {
            panic!("{news:?}")
        };
        assert_eq!(id, "b");
        let ShimEvent::Sessions(sessions) = sessions else { panic!("{sessions:?}") };
        assert_eq!((&sessions.changed, sessions.full), (&vec![session("a", 20)], false));
        assert!(
            matches!(facts, ShimEvent::Facts(RankFacts { available_tokens: 4, .. })),
            "{facts:?}"
        );
        assert!(outbox.is_empty());
    }

    #[test]
    fn an_empty_full_table_is_told() {
        let mut outbox = Outbox::new(0);
        outbox.push(Update { full: true, ..Update::default() }, now());
        let Some(ShimEvent::Sessions(sessions)) = outbox.next_report() else { panic!("no table") };
        assert!(sessions.full && sessions.changed.is_empty());
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
                    if sessions.full {
                        heard.clear();
                    }
                    for id in sessions.gone {
                        heard.remove(&id);
                    }
                    for facts in sessions.changed {
                        heard.insert(facts.id.clone(), facts.history_tokens);
                    }
                }
                heard.clone()
            };
            for (full, changes, take) in steps {
                let mut update = Update { full, ..Update::default() };
                if full {
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
                        update.gone.push(id);
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
