//! Keeps the last placements, so that the API can tell why a turn went to its worker. Pure.
//!
//! Bounded is the number of workers compared in all placements together, not that of placements:
//! one that compares many workers takes more memory.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use contract::id::Digest;

use super::Placement;
use crate::fleet::snapshot::Snapshot;

/// Each set of figures has about 150 bytes, so the records take 10 MiB. If each turn compares 32
/// workers, they cover the last 2,000 turns.
pub(crate) const WEIGHT_MAX: usize = 1 << 16;

#[derive(Debug, Clone)]
pub(crate) struct PlacementRecord {
    pub(crate) turn: u64,
    pub(crate) placed_at: Instant,
    pub(crate) session: Option<Digest>,
    pub(crate) placement: Placement,
}

/// A turn that was retried has several placements.
#[derive(Debug)]
pub(crate) struct RecentPlacements {
    records: BTreeMap<u64, PlacementRecord>,
    /// The places of each turn's records, oldest first. No turn has an empty list.
    by_turn: HashMap<u64, Vec<u64>>,
    next_place: u64,
    weight_sum: usize,
    weight_max: usize,
}

/// Whether the snapshot can name all workers of the placement.
fn has_names(record: &PlacementRecord, view: &Snapshot) -> bool {
    let placement = &record.placement;
    let compared = placement.figures.iter().map(|(worker, _)| *worker);
    let prefill = placement.prefill.iter().map(|prefill| prefill.worker);
    let mut workers = compared.chain(prefill).chain([placement.worker]);
    workers.all(|worker| view.has_agent(worker.agent))
}

/// A placement without figures takes memory too.
fn weight(record: &PlacementRecord) -> usize {
    1 + record.placement.figures.len()
}

impl RecentPlacements {
    #[must_use]
    pub(crate) fn new(weight_max: usize) -> Self {
        Self {
            records: BTreeMap::new(),
            by_turn: HashMap::new(),
            next_place: 1,
            weight_sum: 0,
            weight_max,
        }
    }

    pub(crate) fn add(&mut self, record: PlacementRecord) {
        self.weight_sum += weight(&record);
        self.by_turn.entry(record.turn).or_default().push(self.next_place);
        self.records.insert(self.next_place, record);
        self.next_place += 1;
        while self.weight_sum > self.weight_max
            && let Some((place, oldest)) = self.records.pop_first()
        {
            self.weight_sum -= weight(&oldest);
            let places = self.by_turn.get_mut(&oldest.turn).expect("each record's turn is known");
            places.retain(|kept| *kept != place);
            if places.is_empty() {
                self.by_turn.remove(&oldest.turn);
            }
        }
        #[cfg(debug_assertions)]
        self.check_invariants();
    }

    /// Empty if one of the turn's placements names an agent that has left the fleet.
    #[must_use]
    pub(crate) fn placements(&self, turn: u64, view: &Snapshot) -> Vec<&PlacementRecord> {
        let places = self.by_turn.get(&turn).into_iter().flatten();
        let records: Vec<_> = places.filter_map(|place| self.records.get(place)).collect();
        let is_shown = records.iter().all(|record| has_names(record, view));
        if is_shown { records } else { vec![] }
    }

    /// The first `limit` placements after the place `after`, or else the last ones; oldest first.
    /// A placement that names an agent that has left the fleet is left out.
    #[must_use]
    pub(crate) fn page(
        &self,
        after: Option<u64>,
        limit: usize,
        view: &Snapshot,
    ) -> Vec<(u64, &PlacementRecord)> {
        let is_shown = |record: &PlacementRecord| !self.placements(record.turn, view).is_empty();
        let from = match after {
            Some(place) => place.saturating_add(1),
            None => {
                let newest_first = self.records.iter().rev();
                let shown = newest_first.filter(|(_, record)| is_shown(record)).take(limit);
                shown.last().map_or(0, |(place, _)| *place)
            }
        };
        let shown = self.records.range(from..).filter(|(_, record)| is_shown(record));
        shown.take(limit).map(|(place, record)| (*place, record)).collect()
    }

    #[cfg(any(test, debug_assertions))]
    fn check_invariants(&self) {
        assert_eq!(self.weight_sum, self.records.values().map(weight).sum::<usize>());
        assert_eq!(self.records.len(), self.by_turn.values().map(Vec::len).sum::<usize>());
        assert!(self.records.keys().all(|place| *place < self.next_place));
        assert!(self.by_turn.values().flatten().all(|place| self.records.contains_key(place)));
        assert!(self.weight_sum <= self.weight_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fleet::{
            testing::{fleet, replace_agent, start},
            worker::{AgentKey, WorkerRef},
        },
        placement::{PairUse, PlacementRequest, place},
    };

    fn view() -> Snapshot {
        fleet(&[(0, 0)], start()).snapshot()
    }

    /// Returns how many placements of a turn are shown.
    fn count(recent: &RecentPlacements, turn: u64) -> usize {
        recent.placements(turn, &view()).len()
    }

    /// Returns a placement for which this many workers were compared.
    fn placement(compared: usize) -> Placement {
        let view = view();
        let request = PlacementRequest {
            digest: Digest(1),
            expects_more_turns: false,
            sticky: None,
            conversations: None,
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

    fn record(turn: u64, figures: usize) -> PlacementRecord {
        PlacementRecord { turn, placed_at: start(), session: None, placement: placement(figures) }
    }

    /// Returns the turns of a page.
    fn turns(recent: &RecentPlacements, after: Option<u64>, limit: usize) -> Vec<u64> {
        recent.page(after, limit, &view()).iter().map(|(_, record)| record.turn).collect()
    }

    #[test]
    fn pages_show_each_placement_once_and_begin_with_the_last_ones() {
        let mut recent = RecentPlacements::new(6);
        assert!(turns(&recent, None, 3).is_empty() && turns(&recent, Some(0), 3).is_empty());
        for turn in 1..=4 {
            recent.add(record(turn, 0));
        }
        assert_eq!(turns(&recent, None, 3), [2, 3, 4]);
        assert_eq!(turns(&recent, Some(0), 3), [1, 2, 3]);
        let (place, _) = recent.page(Some(0), 3, &view())[2];
        assert_eq!(turns(&recent, Some(place), 3), [4]);
        // Of seven, the first one exceeds the bound.
        for turn in 5..=7 {
            recent.add(record(turn, 0));
        }
        assert_eq!(turns(&recent, Some(place), 9), [4, 5, 6, 7]);
        assert_eq!(turns(&recent, Some(0), 9), [2, 3, 4, 5, 6, 7]);
        assert!(turns(&recent, Some(u64::MAX), 9).is_empty());
    }

    #[test]
    fn the_last_placements_are_kept_by_turn() {
        let mut recent = RecentPlacements::new(20);
        recent.add(record(7, 4));
        recent.add(record(8, 0));
        recent.add(record(7, 3));
        assert_eq!([7, 8, 9].map(|turn| count(&recent, turn)), [2, 1, 0]);
        // Their weights sum up to 10. The next record exceeds the bound, so the first one of turn 7
        // goes.
        recent.add(record(9, 10));
        assert_eq!([7, 8, 9].map(|turn| count(&recent, turn)), [1, 1, 1]);
        recent.add(record(10, 19));
        assert_eq!([7, 8, 9].map(|turn| count(&recent, turn)), [0, 0, 0]);
        assert_eq!(count(&recent, 10), 1);
    }

    #[test]
    fn a_placement_larger_than_all_that_is_kept_is_not() {
        let mut recent = RecentPlacements::new(3);
        recent.add(record(1, 2));
        recent.add(record(2, 3));
        assert_eq!([1, 2].map(|turn| count(&recent, turn)), [0, 0]);
        recent.add(record(3, 0));
        assert_eq!(count(&recent, 3), 1);
    }

    #[test]
    fn placements_that_name_an_agent_that_has_left_are_not_shown() {
        let mut state = fleet(&[(0, 0), (0, 0)], start());
        let mut recent = RecentPlacements::new(100);
        let at = |agent| WorkerRef { agent, dp_rank: 0 };
        let (old, other) = (AgentKey::first(0), AgentKey::first(1));
        for (turn, worker) in [(1, old), (2, other), (3, old), (4, other), (4, other)] {
            let placement = Placement { worker: at(worker), ..placement(0) };
            recent.add(PlacementRecord { placement, ..record(turn, 0) });
        }
        let mut compared = placement(2);
        compared.worker = at(other);
        recent.add(PlacementRecord { placement: compared, ..record(5, 0) });
        let view = state.snapshot();
        assert_eq!(recent.page(None, 9, &view).len(), 6);
        let new = replace_agent(&mut state, old, start());
        recent.add(PlacementRecord {
            placement: Placement { worker: at(new), ..placement(0) },
            ..record(4, 0)
        });
        let view = state.snapshot();
        let turns = |after, limit| -> Vec<u64> {
            let page = recent.page(after, limit, &view);
            page.iter().map(|(_, record)| record.turn).collect()
        };
        assert_eq!((turns(None, 9), turns(None, 2)), (vec![2, 4, 4, 4], vec![4, 4]));
        assert_eq!(turns(Some(0), 2), [2, 4]);
        let counts = [1, 2, 4, 5].map(|turn| recent.placements(turn, &view).len());
        assert_eq!(counts, [0, 1, 3, 0]);
    }
}
