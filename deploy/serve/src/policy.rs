//! Decides whether an engine that ended is started again, and when. Pure.

use std::time::Duration;

use crate::args::Restart;

const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// An engine that ran for so long has no fault that every start shows.
const LONG_RUN: Duration = Duration::from_secs(600);
/// In a row, without a time of [`LONG_RUN`].
const RESTARTS_MAX: u32 = 8;

/// How an engine's process ended by itself.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    pub is_success: bool,
    /// It had answered before.
    pub was_ready: bool,
    pub ran_for: Duration,
}

#[derive(Debug)]
pub struct RestartPolicy {
    restart: Restart,
    in_a_row: u32,
    was_ever_ready: bool,
}

impl RestartPolicy {
    #[must_use]
    pub fn new(restart: Restart) -> Self {
        Self { restart, in_a_row: 0, was_ever_ready: false }
    }

    /// The pause before the next start; `None` if there is none. An engine that was never ready is
    /// set wrong, and would end again.
    pub fn next(&mut self, ended: Ended) -> Option<Duration> {
        self.was_ever_ready |= ended.was_ready;
        if ended.ran_for >= LONG_RUN {
            self.in_a_row = 0;
        }
        let is_wanted = self.restart == Restart::OnFailure && !ended.is_success;
        if !is_wanted || !self.was_ever_ready || self.in_a_row == RESTARTS_MAX {
            return None;
        }
        let pause = PAUSE_MIN.saturating_mul(1 << self.in_a_row).min(PAUSE_MAX);
        self.in_a_row += 1;
        Some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRASH: Ended =
        Ended { is_success: false, was_ready: true, ran_for: Duration::from_secs(60) };

    #[test]
    fn only_failures_of_an_engine_that_was_ready_are_tried_again() {
        let next = |restart, ended| RestartPolicy::new(restart).next(ended);
        assert_eq!(next(Restart::OnFailure, CRASH), Some(PAUSE_MIN));
        assert_eq!(next(Restart::Never, CRASH), None);
        assert_eq!(next(Restart::OnFailure, Ended { is_success: true, ..CRASH }), None);
        assert_eq!(next(Restart::OnFailure, Ended { was_ready: false, ..CRASH }), None);
    }

    #[test]
    fn pauses_grow_and_tries_end_unless_the_engine_runs_long() {
        let mut policy = RestartPolicy::new(Restart::OnFailure);
        policy.next(CRASH);
        let at_start = Ended { was_ready: false, ..CRASH };
        let pauses: Vec<_> = std::iter::from_fn(|| policy.next(at_start)).collect();
        assert_eq!(pauses.len() + 1, RESTARTS_MAX as usize);
        assert!(pauses.is_sorted() && pauses.last() == Some(&PAUSE_MAX), "{pauses:?}");
        let long = Ended { ran_for: LONG_RUN, ..CRASH };
        assert_eq!(policy.next(long), Some(PAUSE_MIN));
    }
}
