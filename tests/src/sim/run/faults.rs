//! The faults of a run: late, lost or duplicate reports, and workers that crash or drain.

use std::time::Duration;

use super::{Change, Condition, Event, World};
use crate::sim::{
    engine::{Job, Time},
    options::{Hearing, Options},
    policy::{Heard, Policy},
};

/// The delay of a duplicate close.
const TWICE_DELAY: Duration = Duration::from_secs(1);
/// How long a crashed or drained worker is away: a restart with a large model.
const AWAY: Duration = Duration::from_secs(600);
/// The delay before a lost turn is sent again; a refused connection is noticed at once.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Chooses randomly which reports are lost.
#[derive(Debug)]
pub(super) struct Faults {
    hearing: Hearing,
    lots: fastrand::Rng,
}

impl Faults {
    pub(super) fn new(hearing: Hearing, seed: u64) -> Self {
        Self { hearing, lots: fastrand::Rng::with_seed(seed ^ 0xFA17) }
    }

    /// Returns when a close requested now is delivered: never, once or twice.
    pub(super) fn close(&mut self, now: Time) -> Vec<Time> {
        if self.happens(self.hearing.close_loss_ratio) {
            return vec![];
        }
        let mut times = vec![now];
        if self.happens(self.hearing.close_twice_ratio) {
            times.push(now + TWICE_DELAY);
        }
        times
    }

    fn happens(&mut self, ratio: f64) -> bool {
        // Draws no random number for a ratio of 0, so that runs without faults are unaffected.
        ratio > 0.0 && self.lots.f64() < ratio
    }
}

/// Returns the churn: one worker crashes at a third of the run, another drains at half; both
/// return.
pub(super) fn churn(options: &Options) -> [(Time, usize, Change); 4] {
    let (crashed, drained) = (0, options.workers - 1);
    let (first, second) = (options.horizon / 3, options.horizon / 2);
    [
        (first, crashed, Change::Crash),
        (first + AWAY, crashed, Change::Return),
        (second, drained, Change::Drain),
        (second + AWAY, drained, Change::Return),
    ]
}

impl World {
    /// Reports a change of a worker's pool to the policy, with the configured delay and loss.
    pub(super) fn tell_blocks(
        &mut self,
        worker: usize,
        stored: Vec<u32>,
        removed: Vec<u32>,
        policy: &mut dyn Policy,
    ) {
        if stored.is_empty() && removed.is_empty() {
            return;
        }
        if self.faults.happens(self.options.hearing.loss_ratio) {
            return;
        }
        if self.options.hearing.lag.is_zero() {
            self.hear_blocks(worker, &stored, &removed, policy);
            return;
        }
        let life = self.lives[worker];
        let at = self.now + self.options.hearing.lag;
        self.schedule(at, Event::Blocks { worker, life, stored, removed });
    }

    pub(super) fn hear_blocks(
        &mut self,
        worker: usize,
        stored: &[u32],
        removed: &[u32],
        policy: &mut dyn Policy,
    ) {
        for worker in self.sharing(worker) {
            self.fleet.hear(worker, stored, removed);
            policy.hear(&Heard::Blocks { worker, stored, removed }, &self.fleet);
        }
    }

    /// Applies a change of a worker's condition.
    pub(super) fn change(&mut self, worker: usize, to: Change, policy: &mut dyn Policy) {
        self.fleet.workers[worker].condition = match to {
            Change::Crash => Condition::Down,
            Change::Drain => Condition::Draining,
            Change::Return => Condition::Up,
        };
        if to == Change::Crash {
            self.crash(worker, policy);
        }
        policy.hear(&Heard::Condition { worker, now: self.now }, &self.fleet);
    }

    /// Empties a crashed worker; its turns are sent again.
    fn crash(&mut self, worker: usize, policy: &mut dyn Policy) {
        self.lives[worker] += 1;
        let pool = self.pool_of(worker);
        let mut lost = self.engines[worker].crash(&mut self.pools[pool]);
        let running = self.turns.iter_mut().filter(|turn| turn.worker == worker);
        lost.extend(running.filter_map(|turn| turn.running.take()));
        lost.retain(|job| !job.is_ahead);
        lost.extend(self.empty_staged_prefill(worker));
        self.sessions.crash(worker);
        self.fleet.forget(worker);
        self.look(worker, policy);
        for Job { turn, play, .. } in lost {
            self.tally.retried += 1;
            self.schedule(self.now + RETRY_DELAY, Event::Again { turn, play });
        }
    }
}
