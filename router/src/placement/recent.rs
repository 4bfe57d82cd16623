//! Keeps the last placements, so that the API can tell why a turn went to its worker. Pure.
//!
//! The tasks of turns add each placement, and the HTTP API reads them by the number of the turn. A
//! placement chooses the worker for a turn (one request and its answer). The record of a placement
//! has a set of figures for each compared worker. A placement that compares many workers takes more
//! memory. So the number of sets is bounded, not the number of placements. The oldest placements
//! are removed first.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Instant,
};

use proto::id::Digest;

use super::Placement;

/// Maximum weight of the kept records; see [`weight`]. Each set of figures has about 150 bytes, so
/// the records take 10 MiB. If each turn compares 32 workers, they cover the last 2,000 turns.
pub(crate) const WEIGHT_MAX: usize = 1 << 16;

/// One placement decision, as the API shows it later.
#[derive(Debug, Clone)]
pub(crate) struct PlacementRecord {
    /// When the turn was placed.
    pub(crate) placed_at: Instant,
    /// The digest of the turn's session. `None` if the turn has no session.
    pub(crate) session: Option<Digest>,
    /// The decision and the figures compared for it.
    pub(crate) placement: Placement,
}

/// The last placements by turn. A turn that was retried has several placements.
#[derive(Debug)]
pub(crate) struct RecentPlacements {
    /// The records by the number of their turn, oldest first.
    by_turn: HashMap<u64, Vec<PlacementRecord>>,
    /// The turn's number for each record, oldest record first.
    turn_order: VecDeque<u64>,
    /// Sum of the kept records' weights.
    weight_sum: usize,
    weight_max: usize,
}

/// Returns the weight of a record: the number of its sets of figures, plus one. A placement without
/// figures takes memory too.
fn weight(record: &PlacementRecord) -> usize {
    1 + record.placement.figures.len()
}

impl RecentPlacements {
    /// Creates an empty history whose records weigh at most `weight_max` together.
    #[must_use]
    pub(crate) fn new(weight_max: usize) -> Self {
        Self { by_turn: HashMap::new(), turn_order: VecDeque::new(), weight_sum: 0, weight_max }
    }

    /// Adds a turn's placement and removes the oldest placements beyond the bound.
    pub(crate) fn add(&mut self, turn: u64, record: PlacementRecord) {
        self.weight_sum += weight(&record);
        self.by_turn.entry(turn).or_default().push(record);
        self.turn_order.push_back(turn);
        while self.weight_sum > self.weight_max {
            let Some(oldest_turn) = self.turn_order.pop_front() else { break };
            let records =
                self.by_turn.get_mut(&oldest_turn).expect("each turn in order has records");
            self.weight_sum -= weight(&records.remove(0));
            if records.is_empty() {
                self.by_turn.remove(&oldest_turn);
            }
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
    }

    /// Returns a turn's decisions, oldest first. Empty if none are kept.
    #[must_use]
    pub(crate) fn placements(&self, turn: u64) -> &[PlacementRecord] {
        self.by_turn.get(&turn).map_or(&[], Vec::as_slice)
    }

    /// Checks the bound and the sums.
    ///
    /// # Panics
    /// If an invariant is broken.
    /// Removes the placements that chose or compared a worker of an agent that has left the fleet.
    /// Another agent will have its slot, and would be shown instead.
    pub(crate) fn forget_agent(&mut self, agent: usize) {
        let names_agent = |record: &PlacementRecord| {
            let compared = record.placement.figures.iter().map(|figures| figures.worker);
            compared.chain([record.placement.worker]).any(|worker| worker.agent == agent)
        };
        let turns: HashSet<u64> = self
            .by_turn
            .iter()
            .filter(|(_, records)| records.iter().any(names_agent))
            .map(|(turn, _)| *turn)
            .collect();
        self.turn_order.retain(|turn| !turns.contains(turn));
        for turn in turns {
            let records = self.by_turn.remove(&turn).unwrap_or_default();
            self.weight_sum -= records.iter().map(weight).sum::<usize>();
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
    }

    #[cfg(any(test, debug_assertions))]
    fn check_invariants(&self) {
        let records = || self.by_turn.values().flatten();
        assert_eq!(self.weight_sum, records().map(weight).sum::<usize>());
        assert_eq!(self.turn_order.len(), records().count());
        assert!(self.weight_sum <= self.weight_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::testing::{fleet, start},
        placement::{PairUse, PlacementRequest, place},
    };

    /// Returns a placement for which this many workers were compared.
    fn placement(compared: usize) -> Placement {
        let view = fleet(&[(0, 0)], start()).snapshot();
        let request = PlacementRequest {
            digest: Digest(1),
            expects_more_turns: false,
            sticky: None,
            prefer: None,
            prompt: None,
            retention: None,
            model: None,
            weights: None,
            exclude: None,
            pairs: PairUse::May,
        };
        let placed = place(&request, &view, start()).expect("the fleet has a worker");
        let figures = vec![placed.figures[0]; compared];
        Placement { figures, ..placed }
    }

    fn record(figures: usize) -> PlacementRecord {
        PlacementRecord { placed_at: start(), session: None, placement: placement(figures) }
    }

    #[test]
    fn the_last_placements_are_kept_by_turn() {
        let mut recent = RecentPlacements::new(20);
        recent.add(7, record(4));
        recent.add(8, record(0));
        recent.add(7, record(3));
        assert_eq!(
            (recent.placements(7).len(), recent.placements(8).len(), recent.placements(9).len()),
            (2, 1, 0)
        );
        // Their weights sum up to 10. The next record exceeds the bound, so the first one of turn 7
        // goes.
        recent.add(9, record(10));
        assert_eq!(
            (recent.placements(7).len(), recent.placements(8).len(), recent.placements(9).len()),
            (1, 1, 1)
        );
        recent.add(10, record(19));
        assert_eq!(
            (recent.placements(7).len(), recent.placements(8).len(), recent.placements(9).len()),
            (0, 0, 0)
        );
        assert_eq!(recent.placements(10).len(), 1);
    }

    #[test]
    fn a_placement_larger_than_all_that_is_kept_is_not() {
        let mut recent = RecentPlacements::new(3);
        recent.add(1, record(2));
        recent.add(2, record(3));
        assert!(recent.placements(1).is_empty() && recent.placements(2).is_empty());
        recent.add(3, record(0));
        assert_eq!(recent.placements(3).len(), 1);
    }
}
