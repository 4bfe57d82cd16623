//! Hash rings: placement by the session's hash alone, whatever is resident.

use super::{Policy, PolicyChoice};
use crate::{
    replay::synth::mix,
    sim::fleet::{Fleet, TurnToPlace},
};

/// The points of each worker on the ring; shares then differ by about an eighth.
const POINTS: u64 = 64;
/// A worker with more than this multiple of the mean load is skipped.
pub(super) const SHARE_MAX: f64 = 1.25;

/// A ring, with or without a limit on each worker's load.
#[derive(Debug)]
pub(super) struct Ring {
    points: Vec<(u64, usize)>,
    share_max: Option<f64>,
}

impl Ring {
    pub(super) fn new(workers: usize, share_max: Option<f64>) -> Self {
        let mut points: Vec<(u64, usize)> = (0..workers)
            .flat_map(|worker| {
                (0..POINTS).map(move |point| (mix(mix(worker as u64, 7), point), worker))
            })
            .collect();
        points.sort_unstable();
        Self { points, share_max }
    }
}

impl Policy for Ring {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let usable = fleet.usable();
        let turns: u32 = usable.iter().map(|&worker| fleet.workers[worker].outstanding).sum();
        // The mean includes the new turn.
        let mean = f64::from(turns + 1) / usable.len() as f64;
        let most = self.share_max.map_or(f64::INFINITY, |share| (share * mean).ceil());
        let place = mix(request.session as u64, 11);
        let start = self.points.partition_point(|(point, _)| *point < place);
        let (before, after) = self.points.split_at(start);
        after
            .iter()
            .chain(before)
            .map(|(_, worker)| *worker)
            .find(|worker| {
                let load = f64::from(fleet.workers[*worker].outstanding);
                usable.contains(worker) && load < most
            })
            .unwrap_or(usable[0])
            .into()
    }
}
