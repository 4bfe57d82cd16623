//! Keeps the callers that wait for the owner task's answer to an admission, an opening or a plan.
//!
//! A turn (one request and its answer) waits until it is admitted, and `open_session` until its
//! session is open. An admitted turn of a session then waits to learn how it runs: in its session
//! or outside, for example. The owner task calls this module when the session table has decided.
//! All callers are kept by the request id of their turn or opening.

use std::collections::HashMap;

use proto::id::SessionKey;
use tokio::sync::oneshot;

use super::{AdmittedTurn, Error, OpenedSession, RunModeResult, TurnRun, reporter::Reporter};
use crate::session::{self, RunMode, Table, Turn};

/// The waiting callers, by request id. A caller that is gone needs no answer: it has dropped its
/// lease, and that ends the turn.
#[derive(Default)]
pub(super) struct Waiters {
    /// Callers that wait for a turn's admission or for a session's opening.
    admissions: HashMap<String, Waiter>,
    /// Tasks that pass on a turn's answer, and wait to learn how the turn runs.
    run_modes: HashMap<String, oneshot::Sender<RunModeResult>>,
}

/// A caller that waits until its turn is admitted or its session is open.
pub(super) enum Waiter {
    Turn(oneshot::Sender<Result<AdmittedTurn, Error>>),
    Open {
        key: SessionKey,
        /// Whether the session was open before.
        was_open: bool,
        reply: oneshot::Sender<Result<OpenedSession, Error>>,
    },
}

impl Waiters {
    /// Adds a caller that waits for the turn or the opening `rid`.
    pub(super) fn add(&mut self, rid: String, waiter: Waiter) {
        self.admissions.insert(rid, waiter);
    }

    /// Removes what waits for a turn that has ended.
    pub(super) fn remove_turn(&mut self, rid: &str) {
        self.admissions.remove(rid);
        self.run_modes.remove(rid);
    }

    /// Tells the caller that its turn is admitted or its session open. Returns how the turn runs,
    /// if that is known already, so that the caller has learned it too.
    pub(super) fn tell_admitted(
        &mut self,
        rid: &str,
        turn: Turn,
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
                let session = table.get(&key).map(|session| reporter.session_view(&key, session));
                let opened = session.map(|session| OpenedSession { session, was_open });
                let _ = reply.send(opened.ok_or(session::Error::UnknownSession.into()));
                None
            }
        }
    }

    /// Refuses a turn or an opening that waits.
    pub(super) fn refuse(&mut self, rid: &str, error: Error) {
        match self.admissions.remove(rid) {
            Some(Waiter::Turn(reply)) => drop(reply.send(Err(error))),
            Some(Waiter::Open { reply, .. }) => drop(reply.send(Err(error))),
            None => {}
        }
    }

    /// Tells a turn's exchange how the turn runs, or why the shim refuses it.
    pub(super) fn tell_run_mode(&mut self, rid: &str, result: RunModeResult) {
        if let Some(waiter) = self.run_modes.remove(rid) {
            let _ = waiter.send(result);
        }
    }
}
