//! Publishes what a turn needs before its body is read: why it would be refused, or how to read it.
//!
//! The owner task decides again when the turn is claimed.

use std::sync::Arc;

use tokio::sync::watch;

use super::{Error, engine_state::EngineState};
use crate::{engine::BodyFacts, session};

/// The error is why all turns are refused.
pub(super) type OpenGate = Result<Arc<BodyFacts>, Error>;

pub(super) struct TurnGate(watch::Sender<OpenGate>);

impl TurnGate {
    pub(super) fn new(engine: &EngineState) -> Self {
        Self(watch::Sender::new(read(engine.check_up(), engine)))
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<OpenGate> {
        self.0.subscribe()
    }

    /// `usable`: whether the agent and its engine take turns.
    pub(super) fn publish(&self, usable: Result<(), Error>, engine: &EngineState) {
        let gate = read(usable, engine);
        if *self.0.borrow() != gate {
            self.0.send_modify(|published| *published = gate);
        }
    }
}

fn read(usable: Result<(), Error>, engine: &EngineState) -> OpenGate {
    usable?;
    match engine.silent_reason() {
        Some(reason) => Err(session::Error::EngineSilent(reason.clone()).into()),
        None => Ok(Arc::clone(engine.body_facts())),
    }
}
