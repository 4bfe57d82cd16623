//! Policies that ignore sessions.

use super::{Policy, PolicyChoice, least, ttft_ms};
use crate::fleet::{Fleet, TurnToPlace};

/// Chooses the workers in turn.
#[derive(Debug, Default)]
pub(super) struct RoundRobin(usize);

impl Policy for RoundRobin {
    fn place(&mut self, _request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let usable = fleet.usable();
        self.0 += 1;
        usable[self.0 % usable.len()].into()
    }
}

/// Chooses the worker with the fewest outstanding turns; a random one of equals.
#[derive(Debug)]
pub(super) struct LeastLoaded(fastrand::Rng);

impl LeastLoaded {
    pub(super) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }
}

impl Policy for LeastLoaded {
    fn place(&mut self, _request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let load = |worker: usize| fleet.workers[worker].outstanding;
        let usable = fleet.usable();
        let fewest = usable.iter().map(|&worker| load(worker)).min();
        let equals: Vec<usize> =
            usable.into_iter().filter(|&worker| Some(load(worker)) == fewest).collect();
        equals[self.0.usize(..equals.len())].into()
    }
}

/// Chooses the worker with the least predicted time to first token.
#[derive(Debug)]
pub(super) struct LeastTtft;

impl Policy for LeastTtft {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        least(fleet, |worker| ttft_ms(worker, request, fleet)).into()
    }
}
