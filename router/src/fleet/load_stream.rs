//! Checks the order of events in one agent's load stream. Pure.
//!
//! The stream must begin with a description and the whole session table. Load reports and session
//! changes follow. All events must have one epoch and consecutive numbers. An event that breaks
//! these rules ends the stream. A new stream begins with a complete description and table.

use proto::{
    id::SessionKey,
    load::{self, Description, LoadReport, Session},
    v1,
};

use super::state::Update;

/// Why a stream can't be followed any further.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An event is missing or came twice.
    #[error("expected event {want} but received event {got}")]
    Gap {
        /// The expected number.
        want: u64,
        /// The received number.
        got: u64,
    },
    /// The agent process behind the stream changed.
    #[error("the epoch changed from {from} to {to}")]
    Epoch {
        /// The epoch of the previous events.
        from: u64,
        /// The epoch of this event.
        to: u64,
    },
    /// An event that may not come at this point of the stream.
    #[error("{0}")]
    Order(&'static str),
    /// An event that can't be decoded.
    #[error("received an invalid event")]
    Invalid(#[from] load::Error),
}

/// The position in the stream.
#[derive(Debug)]
enum Phase {
    Start,
    Table { description: Box<Description>, sessions: Vec<Session> },
    Live { ranks: usize },
}

/// Checks one stream.
#[derive(Debug)]
pub struct LoadStream {
    phase: Phase,
    epoch: u64,
    next: u64,
    sessions_max: usize,
}

impl LoadStream {
    /// Creates the checker for a new stream. Keeps one session more than `sessions_max` of its
    /// table at most, so that the view notices the excess.
    #[must_use]
    pub fn new(sessions_max: usize) -> Self {
        Self { phase: Phase::Start, epoch: 0, next: 0, sessions_max }
    }

    /// Whether the session table is complete.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live { .. })
    }

    /// Checks the next event. Returns the update for the view, if the event completes one.
    ///
    /// # Errors
    /// If the event breaks the order, so that a new stream is needed.
    pub fn accept(&mut self, event: v1::LoadEvent) -> Result<Option<Update>, Error> {
        if event.sequence != self.next {
            return Err(Error::Gap { want: self.next, got: event.sequence });
        }
        if self.next > 0 && event.epoch != self.epoch {
            return Err(Error::Epoch { from: self.epoch, to: event.epoch });
        }
        self.epoch = event.epoch;
        self.next += 1;
        let event = event.event.ok_or(load::Error::Missing("event"))?;
        match (&mut self.phase, event) {
            (Phase::Start, v1::load_event::Event::Description(wire)) => {
                let description = self.description(wire)?;
                self.phase = Phase::Table { description: Box::new(description), sessions: vec![] };
                Ok(None)
            }
            (Phase::Table { .. }, v1::load_event::Event::Sessions(part)) => self.table(part),
            (Phase::Live { .. }, event) => self.live(event).map(Some),
            (Phase::Start, _) => Err(Error::Order("the stream did not begin with a description")),
            (Phase::Table { .. }, _) => Err(Error::Order("the session table was interrupted")),
        }
    }

    fn table(&mut self, part: v1::SessionTable) -> Result<Option<Update>, Error> {
        let Phase::Table { description, sessions } = &mut self.phase else {
            return Err(Error::Order("received a session table out of order"));
        };
        let ranks = description.ranks.len();
        for wire in part.sessions {
            let session = session(wire, ranks)?;
            // One session beyond the bound is kept, so that the view notices the excess and warns.
            if sessions.len() <= self.sessions_max {
                sessions.push(session);
            }
        }
        if !part.last {
            return Ok(None);
        }
        let began = std::mem::replace(&mut self.phase, Phase::Live { ranks });
        let Phase::Table { description, sessions } = began else {
            unreachable!("the phase was a table a few lines above");
        };
        Ok(Some(Update::Began { description: *description, sessions }))
    }

    fn live(&mut self, event: v1::load_event::Event) -> Result<Update, Error> {
        let Phase::Live { ranks } = self.phase else {
            return Err(Error::Order("received an event before the session table"));
        };
        match event {
            v1::load_event::Event::Description(wire) => {
                let description = self.description(wire)?;
                self.phase = Phase::Live { ranks: description.ranks.len() };
                Ok(Update::Described(description))
            }
            v1::load_event::Event::Sessions(_) => Err(Error::Order("received two session tables")),
            v1::load_event::Event::Report(wire) => {
                let report = LoadReport::try_from(wire)?;
                if report.ranks.len() != ranks {
                    return Err(Error::Order("received a report with other ranks than described"));
                }
                Ok(Update::Report(report))
            }
            v1::load_event::Event::Change(change) => {
                match change.change.ok_or(load::Error::Missing("change"))? {
                    v1::session_change::Change::Upsert(wire) => {
                        Ok(Update::Upsert(session(wire, ranks)?))
                    }
                    v1::session_change::Change::Removed(key) => {
                        Ok(Update::Removed(SessionKey::try_from(key).map_err(load::Error::from)?))
                    }
                }
            }
        }
    }

    fn description(&self, wire: v1::Description) -> Result<Description, Error> {
        let description = Description::try_from(wire)?;
        if description.epoch != self.epoch {
            return Err(Error::Epoch { from: self.epoch, to: description.epoch });
        }
        Ok(description)
    }
}

fn session(wire: v1::Session, ranks: usize) -> Result<Session, Error> {
    let session = Session::try_from(wire)?;
    if session.dp_rank as usize >= ranks {
        return Err(Error::Order("received a session on a rank that was not described"));
    }
    Ok(session)
}

#[cfg(test)]
mod tests {
    use proto::load::Description;
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

    fn live() -> LoadStream {
        let mut stream = LoadStream::new(10);
        assert!(stream.accept(event(5, 0, described(5))).unwrap().is_none());
        assert!(stream.accept(event(5, 1, table(&["a"], 0, false))).unwrap().is_none());
        assert!(!stream.is_live());
        let began = stream.accept(event(5, 2, table(&["b"], 1, true))).unwrap();
        let Some(Update::Began { sessions, .. }) = began else { panic!("{began:?}") };
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
            Some(Update::Described(_))
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
        assert!(LoadStream::new(10).accept(event(5, 0, table(&[], 0, true))).is_err());
        assert!(LoadStream::new(10).accept(event(5, 1, described(5))).is_err());
        let mut early = LoadStream::new(10);
        early.accept(event(5, 0, described(5))).unwrap();
        assert!(early.accept(event(5, 1, reported(2))).is_err());
        let mut foreign = LoadStream::new(10);
        foreign.accept(event(5, 0, described(5))).unwrap();
        assert!(foreign.accept(event(5, 1, table(&["a"], 2, true))).is_err());
    }

    #[test]
    fn a_table_beyond_the_bound_is_cut() {
        let mut stream = LoadStream::new(1);
        stream.accept(event(5, 0, described(5))).unwrap();
        let began = stream.accept(event(5, 1, table(&["a", "b", "c"], 0, true))).unwrap();
        let Some(Update::Began { sessions, .. }) = began else { panic!("{began:?}") };
        assert_eq!(sessions.len(), 2, "one more than the bound");
    }
}
