//! Checks the events in one agent's load stream and turns them into updates of the fleet. Pure.
//!
//! The stream begins with the agent's description. All of its sessions follow, in one or more
//! parts: the *session table*. After that come load reports, changes of single sessions, and a new
//! description if the engine restarts. Events are numbered from 0 without gaps, and all have the
//! epoch of one agent process. After an event that breaks these rules, the caller needs a new
//! stream.

use contract::{
    id::SessionKey,
    load::{self, Description, LoadReport, Session},
    v1,
};

use super::state::Update;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An event is missing, came twice or came too late.
    #[error("expected event {want} but received event {got}")]
    Gap { want: u64, got: u64 },
    #[error("the epoch changed from {from} to {to}")]
    Epoch { from: u64, to: u64 },
    #[error("{0}")]
    Order(&'static str),
    #[error("received an invalid event")]
    Invalid(#[from] load::Error),
}

#[derive(Debug)]
enum Phase {
    Start,
    Table { description: Box<Description>, sessions: Vec<Session> },
    Live { rank_count: usize },
}

#[derive(Debug)]
pub struct LoadStreamChecker {
    phase: Phase,
    epoch: u64,
    next_sequence: u64,
    sessions_max: usize,
}

impl LoadStreamChecker {
    /// Keeps at most `sessions_max` + 1 sessions of the table. By the one above the bound, the
    /// fleet's state notices and logs that it leaves sessions out.
    #[must_use]
    pub fn new(sessions_max: usize) -> Self {
        Self { phase: Phase::Start, epoch: 0, next_sequence: 0, sessions_max }
    }

    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live { .. })
    }

    /// `None` for an event that doesn't complete an update, such as a part of the session table.
    pub fn accept(&mut self, event: v1::LoadEvent) -> Result<Option<Update>, Error> {
        if event.sequence != self.next_sequence {
            return Err(Error::Gap { want: self.next_sequence, got: event.sequence });
        }
        if self.next_sequence > 0 && event.epoch != self.epoch {
            return Err(Error::Epoch { from: self.epoch, to: event.epoch });
        }
        self.epoch = event.epoch;
        self.next_sequence += 1;
        let event = event.event.ok_or(load::Error::Missing("event"))?;
        match (std::mem::replace(&mut self.phase, Phase::Start), event) {
            (Phase::Start, v1::load_event::Event::Description(wire)) => {
                let description = Box::new(self.read_description(wire)?);
                self.phase = Phase::Table { description, sessions: vec![] };
                Ok(None)
            }
            (Phase::Table { description, mut sessions }, v1::load_event::Event::Sessions(part)) => {
                let rank_count = description.ranks.len();
                for wire in part.sessions {
                    let session = read_session(wire, rank_count)?;
                    // One session beyond the bound is kept; see `new`.
                    if sessions.len() <= self.sessions_max {
                        sessions.push(session);
                    }
                }
                if part.last {
                    self.phase = Phase::Live { rank_count };
                    return Ok(Some(Update::StreamBegan { description: *description, sessions }));
                }
                self.phase = Phase::Table { description, sessions };
                Ok(None)
            }
            (Phase::Live { rank_count }, event) => {
                self.phase = Phase::Live { rank_count };
                self.take_live_event(rank_count, event).map(Some)
            }
            (Phase::Start, _) => Err(Error::Order("the stream did not begin with a description")),
            (Phase::Table { .. }, _) => Err(Error::Order("the session table was interrupted")),
        }
    }

    fn take_live_event(
        &mut self,
        rank_count: usize,
        event: v1::load_event::Event,
    ) -> Result<Update, Error> {
        match event {
            v1::load_event::Event::Description(wire) => {
                let description = self.read_description(wire)?;
                self.phase = Phase::Live { rank_count: description.ranks.len() };
                Ok(Update::EngineRestarted(description))
            }
            v1::load_event::Event::Sessions(_) => Err(Error::Order("received two session tables")),
            v1::load_event::Event::Report(wire) => {
                let report = LoadReport::try_from(wire)?;
                if report.ranks.len() != rank_count {
                    return Err(Error::Order("received a report with other ranks than described"));
                }
                Ok(Update::Report(report))
            }
            v1::load_event::Event::Change(change) => {
                match change.change.ok_or(load::Error::Missing("change"))? {
                    v1::session_change::Change::Upsert(wire) => {
                        Ok(Update::SessionChanged(read_session(wire, rank_count)?))
                    }
                    v1::session_change::Change::Removed(key) => Ok(Update::SessionRemoved(
                        SessionKey::try_from(key).map_err(load::Error::from)?,
                    )),
                }
            }
        }
    }

    fn read_description(&self, wire: v1::Description) -> Result<Description, Error> {
        let description = Description::try_from(wire)?;
        if description.epoch != self.epoch {
            return Err(Error::Epoch { from: self.epoch, to: description.epoch });
        }
        Ok(description)
    }
}

fn read_session(wire: v1::Session, rank_count: usize) -> Result<Session, Error> {
    let session = Session::try_from(wire)?;
    if session.dp_rank as usize >= rank_count {
        return Err(Error::Order("received a session on a rank that was not described"));
    }
    Ok(session)
}

#[cfg(test)]
mod tests {
    use contract::load::Description;
    use v1::load_event::Event;

    use super::*;
    use crate::fleet::testing::{description, report};

    fn event(epoch: u64, sequence: u64, event: Event) -> v1::LoadEvent {
        v1::LoadEvent { epoch, sequence, event: Some(event) }
    }

    fn described(epoch: u64) -> Event {
        Event::Description(Description::into(description("a", epoch, 2)))
    }

    fn table(ids: &[&str], dp_rank: u32, last: bool) -> Event {
        let session = |id: &&str| v1::Session {
            key: Some(v1::SessionKey { principal: "p".into(), id: (*id).into() }),
            retention: 1,
            state: 2,
            dp_rank,
            ..Default::default()
        };
        Event::Sessions(v1::SessionTable { sessions: ids.iter().map(session).collect(), last })
    }

    fn reported(ranks: usize) -> Event {
        Event::Report(report(&vec![(0, 0); ranks]).into())
    }

    fn live() -> LoadStreamChecker {
        let mut stream = LoadStreamChecker::new(10);
        assert!(stream.accept(event(5, 0, described(5))).unwrap().is_none());
        assert!(stream.accept(event(5, 1, table(&["a"], 0, false))).unwrap().is_none());
        assert!(!stream.is_live());
        let began = stream.accept(event(5, 2, table(&["b"], 1, true))).unwrap();
        let Some(Update::StreamBegan { sessions, .. }) = began else { panic!("{began:?}") };
        assert_eq!(sessions.len(), 2);
        assert!(stream.is_live());
        stream
    }

    #[test]
    fn a_stream_in_order_is_followed() {
        let mut stream = live();
        assert!(matches!(
            stream.accept(event(5, 3, reported(2))).unwrap(),
            Some(Update::Report(_))
        ));
        assert!(matches!(
            stream.accept(event(5, 4, described(5))).unwrap(),
            Some(Update::EngineRestarted(_))
        ));
    }

    #[test]
    fn whatever_breaks_the_order_ends_the_stream() {
        let bad = [
            event(5, 4, reported(2)),
            event(5, 2, reported(2)),
            event(6, 3, reported(2)),
            event(5, 3, reported(1)),
            event(5, 3, table(&[], 0, true)),
            event(5, 3, described(6)),
            v1::LoadEvent { epoch: 5, sequence: 3, event: None },
        ];
        for event in bad {
            let text = format!("{event:?}");
            assert!(live().accept(event).is_err(), "taken: {text}");
        }
        assert!(LoadStreamChecker::new(10).accept(event(5, 0, table(&[], 0, true))).is_err());
        assert!(LoadStreamChecker::new(10).accept(event(5, 1, described(5))).is_err());
        let mut early = LoadStreamChecker::new(10);
        early.accept(event(5, 0, described(5))).unwrap();
        assert!(early.accept(event(5, 1, reported(2))).is_err());
        let mut foreign = LoadStreamChecker::new(10);
        foreign.accept(event(5, 0, described(5))).unwrap();
        assert!(foreign.accept(event(5, 1, table(&["a"], 2, true))).is_err());
    }

    #[test]
    fn a_table_beyond_the_bound_is_cut() {
        let mut stream = LoadStreamChecker::new(1);
        stream.accept(event(5, 0, described(5))).unwrap();
        let began = stream.accept(event(5, 1, table(&["a", "b", "c"], 0, true))).unwrap();
        let Some(Update::StreamBegan { sessions, .. }) = began else { panic!("{began:?}") };
        assert_eq!(sessions.len(), 2, "one more than the bound");
    }
}
