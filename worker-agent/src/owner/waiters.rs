//! Keeps the callers that wait until a turn is admitted, a session is open, or a run mode is known.
//!
//! The keys are the request ids of turns and openings.

use std::collections::HashMap;

use contract::id::SessionKey;
use tokio::sync::oneshot;

use super::{AdmittedTurn, Error, OpenedSession, RunModeResult, TurnRun, reporter::Reporter};
use crate::session::{self, PlannedTurn, RunMode, Table};

/// A caller that is gone needs no answer: its lease, which it has dropped, ends the turn.
#[derive(Default)]
pub(super) struct Waiters {
    admissions: HashMap<String, Waiter>,
    run_modes: HashMap<String, oneshot::Sender<RunModeResult>>,
}

pub(super) enum Waiter {
    Turn(oneshot::Sender<Result<AdmittedTurn, Error>>),
    Open {
        key: SessionKey,
        /// Whether the session was open before the request.
        was_open: bool,
        reply: oneshot::Sender<Result<OpenedSession, Error>>,
    },
}

impl Waiters {
    pub(super) fn add(&mut self, rid: String, waiter: Waiter) {
        self.admissions.insert(rid, waiter);
    }

    pub(super) fn remove_turn(&mut self, rid: &str) {
        self.admissions.remove(rid);
        self.run_modes.remove(rid);
    }

    /// Also returns how the turn runs, if that is known already.
    pub(super) fn tell_admitted(
        &mut self,
        rid: &str,
        turn: PlannedTurn,
        table: &Table,
        reporter: &Reporter,
    ) -> Option<RunMode> {
        match self.admissions.remove(rid)? {
            Waiter::Turn(reply) => {
                let known_run_mode = turn.run_mode.filter(|_| turn.session.is_some());
                let run_mode = turn.session.is_some().then(|| {
                    let (sender, receiver) = oneshot::channel();
                    self.run_modes.insert(rid.to_owned(), sender);
                    receiver
                });
                if let Some(run_mode) = known_run_mode {
                    let growth_tokens_max = turn.growth_tokens_max;
                    self.tell_run_mode(rid, Ok(TurnRun { run_mode, growth_tokens_max }));
                }
                drop(reply.send(Ok(AdmittedTurn { turn, run_mode })));
                known_run_mode
            }
            Waiter::Open { key, was_open, reply } => {
                let session =
                    table.sessions().get(&key).map(|session| reporter.session_view(&key, session));
                let opened = session.map(|session| OpenedSession { session, was_open });
                let _ = reply.send(opened.ok_or(session::Error::UnknownSession.into()));
                None
            }
        }
    }

    pub(super) fn refuse(&mut self, rid: &str, error: Error) {
        match self.admissions.remove(rid) {
            Some(Waiter::Turn(reply)) => drop(reply.send(Err(error))),
            Some(Waiter::Open { reply, .. }) => drop(reply.send(Err(error))),
            None => {}
        }
    }

    pub(super) fn tell_run_mode(&mut self, rid: &str, result: RunModeResult) {
        if let Some(waiter) = self.run_modes.remove(rid) {
            let _ = waiter.send(result);
        }
    }
}
