//! A hash ring: placement by the session's hash alone, whatever is resident.

use super::{Policy, PolicyChoice};
use replay::synth::mix;

use crate::fleet::{Fleet, TurnToPlace};

/// The points of each worker on the ring; shares then differ by about an eighth.
const POINTS: u64 = 64;

/// The workers' points in order.
#[derive(Debug)]
pub(super) struct Ring(Vec<(u64, usize)>);

impl Ring {
    pub(super) fn new(workers: usize) -> Self {
        let points =
            |worker| (0..POINTS).map(move |point| (mix(mix(worker as u64, 7), point), worker));
        let mut points: Vec<(u64, usize)> = (0..workers).flat_map(points).collect();
        points.sort_unstable();
        Self(points)
    }
}

impl Policy for Ring {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let usable = fleet.usable();
        let place = mix(request.session as u64, 11);
        let (before, after) = self.0.split_at(self.0.partition_point(|(point, _)| *point < place));
        let mut workers = after.iter().chain(before).map(|(_, worker)| *worker);
        workers.find(|worker| usable.contains(worker)).unwrap_or(usable[0]).into()
    }
}
