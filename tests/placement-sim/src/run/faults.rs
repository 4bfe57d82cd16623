//! The faults of a run: late, lost or duplicate reports, and workers that crash or drain.

use std::time::Duration;

use super::{Condition, ConditionChange, Event, World};
use crate::{
    engine::{Job, Moves, Time},
    options::{Churn, DeliveryFaults, SimOptions},
    policy::{Policy, PolicyEvent},
};

/// The delay of a duplicate close.
const TWICE_DELAY: Duration = Duration::from_secs(1);
/// How long a crashed or drained worker is away: a restart with a large model.
const AWAY: Duration = Duration::from_secs(600);
/// The delay before a lost turn is sent again; a refused connection is noticed at once.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Chooses randomly which reports are lost.
#[derive(Debug)]
pub(super) struct FaultSource {
    delivery_faults: DeliveryFaults,
    rng: fastrand::Rng,
}

impl FaultSource {
    pub(super) fn new(delivery_faults: DeliveryFaults, seed: u64) -> Self {
        Self { delivery_faults, rng: fastrand::Rng::with_seed(seed ^ 0xFA17) }
    }

    /// Returns when a close requested now is delivered: never, once or twice.
    pub(super) fn close_times(&mut self, now: Time) -> Vec<Time> {
        if self.happens(self.delivery_faults.close_loss_ratio) {
            return vec![];
        }
        let mut times = vec![now];
        if self.happens(self.delivery_faults.close_twice_ratio) {
            times.push(now + TWICE_DELAY);
        }
        times
    }

    fn happens(&mut self, ratio: f64) -> bool {
        // Draws no random number for a ratio of 0, so that runs without faults are unaffected.
        ratio > 0.0 && self.rng.f64() < ratio
    }
}

/// Returns when the condition of workers changes. With [`Churn::Once`], one worker crashes at a
/// third of the run, another drains at half, and both return. With [`Churn::Join`], the worker that
/// is down at first comes at a third.
pub(super) fn changes(churn: Churn, options: &SimOptions) -> Vec<(Time, usize, ConditionChange)> {
    let (crashed, last) = (0, options.workers - 1);
    let (first, second) = (options.horizon / 3, options.horizon / 2);
    match churn {
        Churn::None | Churn::Cold => vec![],
        Churn::Join => vec![(first, last, ConditionChange::Return)],
        Churn::Once => vec![
            (first, crashed, ConditionChange::Crash),
            (first + AWAY, crashed, ConditionChange::Return),
            (second, last, ConditionChange::Drain),
            (second + AWAY, last, ConditionChange::Return),
        ],
    }
}

impl World {
    /// Reports a change of a worker's pool to the policy, with the configured delay and loss.
    pub(super) fn report_blocks(
        &mut self,
        worker: usize,
        mut moves: Moves,
        policy: &mut dyn Policy,
    ) {
        if self.options.host_unseen {
            (moves.stored_on_host, moves.removed_from_host) = (vec![], vec![]);
        }
        if moves.is_empty() {
            return;
        }
        if self.faults.happens(self.options.delivery_faults.loss_ratio) {
            return;
        }
        if self.options.delivery_faults.lag.is_zero() {
            self.deliver_blocks(worker, &moves, policy);
            return;
        }
        let epoch = self.epochs[worker];
        let at = self.now + self.options.delivery_faults.lag;
        self.push_event(at, Event::Blocks { worker, epoch, moves });
    }

    pub(super) fn deliver_blocks(&mut self, worker: usize, moves: &Moves, policy: &mut dyn Policy) {
        for worker in self.workers_with_pool_of(worker) {
            self.fleet.record_blocks(worker, moves);
            policy.observe(&PolicyEvent::Blocks { worker, moves }, &self.fleet);
        }
    }

    /// Applies a change of a worker's condition.
    pub(super) fn change_condition(
        &mut self,
        worker: usize,
        to: ConditionChange,
        policy: &mut dyn Policy,
    ) {
        self.fleet.workers[worker].condition = match to {
            ConditionChange::Crash => Condition::Down,
            ConditionChange::Drain => Condition::Draining,
            ConditionChange::Return => Condition::Up,
        };
        if to == ConditionChange::Crash {
            self.crash(worker, policy);
        }
        policy.observe(&PolicyEvent::Condition { worker, now: self.now }, &self.fleet);
    }

    /// Empties a crashed worker; its turns are sent again.
    fn crash(&mut self, worker: usize, policy: &mut dyn Policy) {
        self.epochs[worker] += 1;
        let pool = self.pool_index(worker);
        let mut lost = self.engines[worker].crash(&mut self.pools[pool]);
        let running = self.turns.iter_mut().filter(|turn| turn.worker == worker);
        lost.extend(running.filter_map(|turn| turn.running.take()));
        lost.retain(|job| !job.is_stage);
        lost.extend(self.empty_staging_queue(worker));
        self.sessions.crash(worker);
        self.fleet.forget_blocks(worker);
        self.report_load(worker, policy);
        for Job { turn, play, .. } in lost {
            self.stats.retried += 1;
            self.push_event(self.now + RETRY_DELAY, Event::Retry { turn, play });
        }
    }
}
