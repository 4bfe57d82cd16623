//! The agent's calls to the engine besides turns: opens, closes and aborts.
//!
//! Each call's request or answer may be lost.

use std::time::Duration;

use worker_agent::session::{CloseRequest, CloseResult, OpenResult};

use super::{
    engine::{CallId, Command},
    shim::ShimRequest,
    world::{Event, World},
};

/// The agent's own time limit of a call.
const CALL_MAX: Duration = Duration::from_secs(2);
const OPEN_BACKSTOP: Duration = Duration::from_secs(86_400);
const PROBE_BACKSTOP: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(super) enum Task {
    Open {
        incarnation: String,
    },
    Close {
        close: CloseRequest,
        step: CloseStep,
    },
    Abort {
        rid: String,
    },
    /// The abort before the shim is asked for a session's history.
    AbortAndInspect {
        rid: String,
        request: ShimRequest,
    },
}

/// The step that a close has reached. After the close, the agent opens the same id again (the
/// probe), because only the answer to that says whether the engine has closed the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseStep {
    Abort,
    Close,
    Probe,
    CloseProbe,
}

/// The answer to a call, as the agent sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallAnswer {
    Yes,
    /// The engine answered with a client error.
    No,
    /// The answer was lost; the engine may have carried out the call.
    Lost,
    /// No engine process listens.
    Unreachable,
}

impl World {
    pub(super) fn call(&mut self, task: Task) {
        let Some(agent) = &self.agent else { return };
        let epoch = agent.epoch;
        let call = self.number();
        self.calls.insert(call, (epoch, task));
        self.schedule(CALL_MAX, Event::CallAnswered(call, CallAnswer::Lost));
        let lost = self.plan.faults.call_lost;
        if !self.odds(lost / 2) {
            // Shorter than the start of a new agent, so that a new agent's calls never overtake
            // those of the last agent.
            let latency = self.between(0, 8);
            self.schedule(latency, Event::CallReachesEngine(call));
        }
    }

    pub(super) fn close_at_engine(&mut self, close: CloseRequest) {
        let step = if close.rid.is_some() { CloseStep::Abort } else { CloseStep::Close };
        self.call(Task::Close { close, step });
    }

    pub(super) fn call_reaches_engine(&mut self, call: CallId) {
        // Calls that a killed agent had already sent still arrive; they are kept for that.
        let Some((_, task)) = self.calls.get(&call).cloned() else { return };
        if self.engine.is_none() {
            return self.engine_answers(call, CallAnswer::Unreachable);
        }
        self.note(|| format!("engine gets {task:?}"));
        match task {
            Task::Open { incarnation } => self.open_inside(call, &incarnation, OPEN_BACKSTOP),
            Task::Abort { rid } | Task::AbortAndInspect { rid, .. } => {
                self.abort_inside(&rid);
                self.engine_answers(call, CallAnswer::Yes);
            }
            Task::Close { close, step } => match step {
                CloseStep::Abort => {
                    self.abort_inside(close.rid.as_deref().expect("one to abort"));
                    self.engine_answers(call, CallAnswer::Yes);
                }
                CloseStep::Close | CloseStep::CloseProbe => {
                    self.trimmer.closed(&close.incarnation);
                    self.push_all(|_| Command::Close(close.incarnation.clone()));
                    self.engine_answers(call, CallAnswer::Yes);
                }
                CloseStep::Probe => self.open_inside(call, &close.incarnation, PROBE_BACKSTOP),
            },
        }
    }

    /// Opens a session on every rank. The engine's answer is that of one rank, chosen at random.
    fn open_inside(&mut self, call: CallId, id: &str, backstop: Duration) {
        let answers = self.rng.usize(..self.plan.ranks as usize);
        self.push_all(|rank| Command::Open {
            id: id.to_owned(),
            backstop,
            reply: (rank == answers).then_some(call),
        });
    }

    pub(super) fn engine_answers(&mut self, call: CallId, answer: CallAnswer) {
        let lost = self.plan.faults.call_lost;
        let latency = self.latency();
        if self.odds(lost / 2) {
            self.note(|| format!("answer to call {call} is lost"));
            self.schedule(latency, Event::CallAnswered(call, CallAnswer::Lost));
        } else {
            self.schedule(latency, Event::CallAnswered(call, answer));
        }
    }

    pub(super) fn call_answered(&mut self, call: CallId, answer: CallAnswer) {
        let Some((epoch, task)) = self.calls.remove(&call) else { return };
        if !self.is_epoch(epoch) {
            return;
        }
        self.note(|| format!("agent hears {answer:?} to {task:?}"));
        match task {
            Task::Abort { .. } => {}
            Task::AbortAndInspect { request, .. } => {
                if answer == CallAnswer::Yes {
                    self.send_request(Duration::ZERO, request);
                }
            }
            Task::Open { incarnation } => {
                let opened = match answer {
                    CallAnswer::Yes => OpenResult::Opened,
                    CallAnswer::No => OpenResult::NotOpened("refused".to_owned()),
                    CallAnswer::Unreachable => OpenResult::NotOpened("unreachable".to_owned()),
                    CallAnswer::Lost => OpenResult::Unknown("lost".to_owned()),
                };
                self.counts.opened += u64::from(opened == OpenResult::Opened);
                self.call_table(|table, now| table.handle_open_result(now, &incarnation, &opened));
            }
            Task::Close { close, step } => self.continue_close(close, step, answer),
        }
    }

    fn continue_close(&mut self, close: CloseRequest, step: CloseStep, answer: CallAnswer) {
        let next = match (step, answer) {
            (CloseStep::Abort, CallAnswer::Yes) => Some(CloseStep::Close),
            (CloseStep::Close, CallAnswer::Yes) if close.is_pinned => Some(CloseStep::Probe),
            (CloseStep::Probe, CallAnswer::Yes) => Some(CloseStep::CloseProbe),
            _ => None,
        };
        if let Some(step) = next {
            return self.call(Task::Close { close, step });
        }
        let last = step == CloseStep::CloseProbe || (step == CloseStep::Close && !close.is_pinned);
        let done = last && answer == CallAnswer::Yes;
        let closed = match (step, answer) {
            _ if done => CloseResult::Confirmed,
            (CloseStep::Probe, CallAnswer::No) => CloseResult::Kept,
            _ => CloseResult::NotYet,
        };
        if done {
            self.closing.remove(&close.incarnation);
            self.confirmed.insert(close.incarnation.clone());
        }
        if (step, answer) == (CloseStep::Probe, CallAnswer::No) {
            self.check_kept(&close.incarnation);
        }
        self.call_table(|table, now| table.handle_close_result(now, &close.incarnation, closed));
    }
}
