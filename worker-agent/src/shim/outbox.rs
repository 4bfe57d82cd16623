//! Buffers the reports of one engine rank's shim until the agent takes them. Pure.
//!
//! Figures (*facts*) and sessions are states, so a newer one replaces an older one. Events are all
//! kept in order, and come before the state that they led to. If the buffer stays full, the shim's
//! socket fills up, and the shim loses events, counts them, and later sends a full table of
//! sessions.

use std::collections::{BTreeMap, VecDeque};

use super::{
    AuditReply, RankFacts, SessionChanges, SessionFacts, ShimEvent,
    codec::{ShimMessage, Update, WireEvent},
    connection::{EndReason, PeerInfo, Protocol},
};

/// An update has at most 256 events, so the buffer holds at most 255 more than this.
pub(super) const EVENTS_MAX: usize = 1024;

#[derive(Debug)]
pub(super) struct Outbox {
    dp_rank: u32,
    next_seq: u64,
    events: VecDeque<ShimEvent>,
    /// `None` marks a session that is gone.
    changed_sessions: BTreeMap<String, Option<SessionFacts>>,
    /// If true, `changed_sessions` replaces all that the agent knows.
    begins_table: bool,
    ends_table: bool,
    /// `None` once the agent has taken the figures.
    facts: Option<RankFacts>,
    /// Otherwise a shim whose sessions change fast would seem to report no figures.
    are_facts_next: bool,
    audit_reply: Option<AuditReply>,
}

impl Outbox {
    pub(super) fn new(dp_rank: u32) -> Self {
        Self {
            dp_rank,
            next_seq: 0,
            events: VecDeque::new(),
            changed_sessions: BTreeMap::new(),
            begins_table: false,
            ends_table: false,
            facts: None,
            are_facts_next: false,
            audit_reply: None,
        }
    }

    fn has_session_changes(&self) -> bool {
        self.begins_table || self.ends_table || !self.changed_sessions.is_empty()
    }

    pub(super) fn push(&mut self, update: Update) {
        let dp_rank = self.dp_rank;
        if let Some(facts) = update.facts {
            self.facts = Some(RankFacts { dp_rank, ..facts });
        }
        self.events.extend(update.events.into_iter().map(|event| to_report(dp_rank, event)));
        if update.begins_table {
            (self.begins_table, self.ends_table) = (true, false);
            self.changed_sessions.clear();
        }
        self.ends_table |= update.ends_table;
        for id in update.gone_ids {
            if self.begins_table {
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
            !self.begins_table || self.changed_sessions.values().all(Option::is_some),
            "a full table names no session that has gone"
        );
    }
}

impl Protocol for Outbox {
    const NAME: &'static str = "shim";
    type Message = ShimMessage;
    type Report = ShimEvent;

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

    fn receive(&mut self, message: ShimMessage) -> Result<(), EndReason> {
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
                self.push(*update);
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

    /// Sessions and facts take turns.
    fn next_report(&mut self) -> Option<ShimEvent> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if std::mem::take(&mut self.are_facts_next)
            && let Some(facts) = self.facts.take()
        {
            return Some(ShimEvent::Facts(facts));
        }
        if self.has_session_changes() {
            let mut sessions = SessionChanges {
                dp_rank: self.dp_rank,
                begins_table: std::mem::take(&mut self.begins_table),
                ends_table: std::mem::take(&mut self.ends_table),
                changed: vec![],
                gone_ids: vec![],
            };
            for (id, facts) in std::mem::take(&mut self.changed_sessions) {
                match facts {
                    Some(facts) => sessions.changed.push(facts),
                    None => sessions.gone_ids.push(id),
                }
            }
            self.are_facts_next = true;
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
    match event {
        WireEvent::Opened { id, ok } => ShimEvent::Opened { dp_rank, id, ok },
        WireEvent::Closed { id } => ShimEvent::Closed { dp_rank, id },
        WireEvent::Committed { id, rid, history_tokens, is_retracted } => {
            ShimEvent::Committed { dp_rank, id, rid, history_tokens, is_retracted }
        }
        WireEvent::Aborted { id, was_running } => ShimEvent::Aborted { dp_rank, id, was_running },
        WireEvent::Demoted { number, id, refusal } => {
            ShimEvent::Demoted { dp_rank, number, id, refusal }
        }
        WireEvent::Prefetched { number, tokens, refusal, .. } => {
            // No pool has more, and sums of it can't overflow.
            let tokens = tokens.min(u32::MAX.into());
            ShimEvent::Prefetched { dp_rank, number, tokens, refusal }
        }
        WireEvent::Inspected { number, session } => {
            ShimEvent::Inspected { dp_rank, number, session }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::codec::tests::no_facts, *};

    fn session(id: &str, history: u32) -> SessionFacts {
        SessionFacts { id: id.into(), history_tokens: history, ..SessionFacts::default() }
    }

    fn closed(id: &str) -> WireEvent {
        WireEvent::Closed { id: id.into() }
    }

    /// Returns an update without any event or session.
    fn update(available_tokens: u64, begins_table: bool) -> Update {
        let facts = Some(RankFacts { available_tokens, ..no_facts() });
        let (events, gone_ids, sessions) = (vec![], vec![], vec![]);
        Update { seq: 0, facts, begins_table, ends_table: false, events, gone_ids, sessions }
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
            outbox.push(Update { sessions, events, ..update(available_tokens, false) });
        }
        let news = drain(&mut outbox);
        let [ShimEvent::Closed { dp_rank: 3, id }, ShimEvent::Closed { .. }, sessions, facts] =
            &news[..]
        else {
            panic!("{news:?}")
        };
        assert_eq!(id, "b");
        let ShimEvent::Sessions(sessions) = sessions else { panic!("{sessions:?}") };
        assert_eq!((&sessions.changed, sessions.begins_table), (&vec![session("a", 20)], false));
        assert!(
            matches!(facts, ShimEvent::Facts(RankFacts { available_tokens: 4, .. })),
            "{facts:?}"
        );
        assert!(outbox.has_no_report());
    }

    #[test]
    fn an_empty_full_table_is_told() {
        let mut outbox = Outbox::new(0);
        outbox.push(update(0, true));
        let Some(ShimEvent::Sessions(sessions)) = outbox.next_report() else { panic!("no table") };
        assert!(sessions.begins_table && sessions.changed.is_empty());
        assert!(!sessions.ends_table, "more may follow");
    }

    #[test]
    fn the_end_of_a_table_is_told_once_and_not_the_end_of_one_that_began_again() {
        let mut outbox = Outbox::new(0);
        let end = || Update { ends_table: true, ..update(0, false) };
        outbox.push(update(0, true));
        outbox.push(end());
        outbox.push(update(0, true));
        let Some(ShimEvent::Sessions(sessions)) = outbox.next_report() else { panic!("no table") };
        assert!(sessions.begins_table && !sessions.ends_table);
        outbox.push(end());
        let mut reports = drain(&mut outbox).into_iter();
        let is_end = |report| matches!(report, ShimEvent::Sessions(changes) if changes.ends_table);
        assert_eq!(reports.by_ref().filter(|report| is_end(report.clone())).count(), 1);
        assert!(outbox.has_no_report());
    }

    #[test]
    fn figures_come_although_the_sessions_change_all_the_time() {
        let mut outbox = Outbox::new(0);
        let mut change = |history| {
            let sessions = vec![session("a", history)];
            outbox.push(Update { sessions, ..update(history.into(), false) });
            outbox.next_report()
        };
        let reports: Vec<_> = (0..4).filter_map(&mut change).collect();
        let is_facts = |report: &&ShimEvent| matches!(report, ShimEvent::Facts(_));
        assert_eq!(reports.iter().filter(is_facts).count(), 2, "{reports:?}");
    }

    #[test]
    fn it_stops_taking_before_it_loses() {
        let mut outbox = Outbox::new(0);
        while outbox.has_room() {
            let events = (0..256).map(|_| closed("a")).collect();
            outbox.push(Update { events, ..update(0, false) });
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
                    if sessions.begins_table {
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
                let mut update = update(0, is_full_table);
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
                outbox.push(update);
                if take {
                    prop_assert_eq!(hear(&mut outbox), said.clone());
                }
            }
            prop_assert_eq!(hear(&mut outbox), said);
        }
    }
}
