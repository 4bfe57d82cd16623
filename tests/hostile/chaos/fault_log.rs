//! The log of what was done to processes, and which failures of clients that explains. Pure.

use std::time::Instant;

use super::pinned::Life;
use crate::users::{Failure, Why};

/// What was done to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// SIGKILL, and a new process.
    Kill,
    /// SIGTERM, and a new process.
    Restart,
    /// SIGSTOP, and SIGCONT.
    Stop,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Engine(usize),
    Agent(usize),
    Router(usize),
}

/// A fault of one process.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) target: Target,
    pub(crate) kind: FaultKind,
    /// When the signal was sent.
    pub(crate) began: Instant,
    /// When the process was ready again, or went on.
    pub(crate) ended: Instant,
}

/// The faults of a run, in the order of time.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    pub(crate) faults: Vec<Fault>,
}

impl FaultLog {
    /// Whether a client knows from a failure what to do: from a refusal's code, or because its
    /// connection ended or was refused while its router was gone.
    pub(crate) fn explains(&self, failure: &Failure) -> bool {
        match &failure.why {
            Why::Refused { code, .. } => !code.is_empty() && code != "internal",
            Why::Broken(_) => self.faults.iter().any(|fault| {
                let is_meant = fault.target == Target::Router(failure.router);
                let overlaps = fault.began <= failure.ended && failure.began <= fault.ended;
                is_meant && overlaps && fault.kind != FaultKind::Stop
            }),
        }
    }

    /// Returns the faults between two moments, for messages.
    pub(crate) fn meanwhile(&self, began: Instant, ended: Instant) -> String {
        let overlapping =
            self.faults.iter().filter(|fault| fault.began <= ended && began <= fault.ended);
        let text = |fault: &Fault| {
            let (kind, target) = (fault.kind, fault.target);
            let after = fault.began.saturating_duration_since(began).as_secs_f64();
            let seconds = (fault.ended - fault.began).as_secs_f64();
            format!("{kind:?} of {target:?} after {after:.1} s for {seconds:.1} s")
        };
        overlapping.map(text).collect::<Vec<_>>().join(", ")
    }

    /// Returns all faults and failures in the order in which they began, a line each, with the
    /// seconds since the first fault.
    pub(crate) fn text(&self, failures: &[Failure]) -> String {
        let Some(start) = self.faults.first().map(|fault| fault.began) else {
            return String::new();
        };
        let mut lines: Vec<(Instant, String)> = vec![];
        for Fault { target, kind, began, ended } in &self.faults {
            let seconds = (*ended - *began).as_secs_f64();
            lines.push((*began, format!("{kind:?} of {target:?} for {seconds:.1} s")));
        }
        lines.extend(failures.iter().map(|failure| (failure.began, failure.to_string())));
        lines.sort();
        let line = |(at, text): &(Instant, String)| {
            format!("{:.2} {text}\n", at.saturating_duration_since(start).as_secs_f64())
        };
        lines.iter().map(line).collect()
    }

    /// Whether a session went on in the next process of its agent after a planned restart.
    pub(crate) fn handed_over(&self, life: &Life) -> bool {
        let restarts = self.faults.iter().filter(|fault| fault.kind == FaultKind::Restart);
        restarts.into_iter().any(|fault| {
            let Target::Agent(number) = fault.target else { return false };
            let worker = format!("w{number}/0");
            let mut turns = life.turns.iter().filter(|turn| turn.worker == worker);
            turns.any(|turn| turn.ended <= fault.began)
                && turns.any(|turn| turn.ended >= fault.ended)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use service::clock::now;

    use super::*;
    use crate::chaos::pinned::Turn;

    /// Returns a log with one fault of five seconds, ten seconds after the returned moment.
    fn log_of(target: Target, kind: FaultKind) -> (Instant, FaultLog) {
        let start = now();
        let (began, ended) = (start + Duration::from_secs(10), start + Duration::from_secs(15));
        (start, FaultLog { faults: vec![Fault { target, kind, began, ended }] })
    }

    fn broken(start: Instant, router: usize, seconds: std::ops::Range<u64>) -> Failure {
        let at = |seconds| start + Duration::from_secs(seconds);
        let why = Why::Broken("connection closed".to_owned());
        Failure { router, began: at(seconds.start), ended: at(seconds.end), why }
    }

    #[test]
    fn a_broken_connection_is_explained_by_the_end_of_its_own_router_in_its_time() {
        let (start, log) = log_of(Target::Router(1), FaultKind::Kill);
        for (router, seconds, is_explained) in
            [(1, 9..11, true), (1, 14..20, true), (0, 9..11, false), (1, 5..9, false)]
        {
            assert_eq!(log.explains(&broken(start, router, seconds)), is_explained);
        }
        for (target, kind) in [
            (Target::Router(1), FaultKind::Stop),
            (Target::Agent(1), FaultKind::Kill),
            (Target::Engine(1), FaultKind::Restart),
        ] {
            let (start, log) = log_of(target, kind);
            assert!(!log.explains(&broken(start, 1, 9..11)), "{kind:?} of {target:?}");
        }
    }

    #[test]
    fn a_refusal_needs_a_code() {
        let (start, log) = log_of(Target::Router(0), FaultKind::Kill);
        for (code, is_explained) in [("worker_silent", true), ("", false), ("internal", false)] {
            let why = Why::Refused { status: 503, code: code.to_owned(), may_repeat: false };
            let failure = Failure { why, ..broken(start, 0, 9..11) };
            assert_eq!(log.explains(&failure), is_explained, "{code}");
        }
    }

    #[test]
    fn a_session_is_handed_over_if_its_worker_ran_turns_before_and_after_a_planned_restart() {
        for (target, kind, workers, begins, is_handed_over) in [
            (Target::Agent(2), FaultKind::Restart, ["w2/0", "w2/0"], [8, 15], true),
            (Target::Agent(2), FaultKind::Restart, ["w2/0", "w2/0"], [8, 9], false),
            (Target::Agent(2), FaultKind::Restart, ["w2/0", "w2/0"], [11, 15], false),
            (Target::Agent(2), FaultKind::Restart, ["w1/0", "w1/0"], [8, 15], false),
            (Target::Agent(2), FaultKind::Restart, ["w2/0", "w1/0"], [8, 15], false),
            (Target::Agent(2), FaultKind::Kill, ["w2/0", "w2/0"], [8, 15], false),
            (Target::Engine(2), FaultKind::Restart, ["w2/0", "w2/0"], [8, 15], false),
        ] {
            let (start, log) = log_of(target, kind);
            let turn = |worker: &str, seconds| {
                let began = start + Duration::from_secs(seconds);
                let ended = began + Duration::from_secs(1);
                Turn { worker: worker.to_owned(), began, ended }
            };
            let life = Life { turns: [0, 1].map(|of| turn(workers[of], begins[of])).into() };
            assert_eq!(log.handed_over(&life), is_handed_over, "{kind:?} {target:?} {workers:?}");
        }
    }
}
