//! Keeps the workers that cost least, and chooses among those of about the same cost. Pure.

use std::{cmp::Reverse, time::Instant};

use super::{Figures, PlacementRequest};
use crate::fleet::{conversations::Conversations, snapshot::Snapshot, worker::WorkerRef};

/// A placement reports this many, besides the session's own worker and the preferred one. A list of
/// a thousand workers would not explain the choice better.
pub(super) const FIGURES_MAX: usize = 8;
/// Costs above the least by at most this, plus a share of the least, count as about the same.
/// Equal workers with equal loads differ by as much, because their sessions were idle for different
/// times.
const NEAR_TIE_MS: u64 = 10;
/// The share of the least cost is the cost divided by this number.
const NEAR_TIE_DIVISOR: u64 = 16;
/// Longest time of that share. In the simulator `berth-sim` with Azure's prompts, the mean time to
/// the first token is 2 % worse without a bound.
const NEAR_TIE_SHARE_MS_MAX: u64 = 20;

#[derive(Debug, Default)]
pub(super) struct Compared {
    /// In any order: they are long, so they stay where they are. [`Compared::figures_of`] adds
    /// further workers at the end.
    figures: Vec<(WorkerRef, Figures)>,
    /// Where the figures of the workers that cost least are, the least cost first.
    least: Vec<(SortKey, usize)>,
}

/// Cost in milliseconds, number of sessions, and the tie-break by a hash.
pub(super) type SortKey = (u64, u32, Reverse<u64>);

impl Compared {
    pub(super) fn insert(
        &mut self,
        worker: WorkerRef,
        figures: Figures,
        tie_break: impl Fn() -> u64,
    ) {
        if figures.cost_ms > self.cost_ms_max() {
            return;
        }
        let key = (figures.cost_ms, figures.sessions, Reverse(tie_break()));
        let position = self.least.partition_point(|(other_key, _)| *other_key <= key);
        if position == FIGURES_MAX {
            return;
        }
        let place = if self.least.len() == FIGURES_MAX {
            self.least.pop().map_or(0, |(_, place)| place)
        } else {
            self.figures.len()
        };
        match self.figures.get_mut(place) {
            Some(replaced) => *replaced = (worker, figures),
            None => self.figures.push((worker, figures)),
        }
        self.least.insert(position, (key, place));
    }

    /// The cost above which a worker is not kept.
    pub(super) fn cost_ms_max(&self) -> u64 {
        self.least.get(FIGURES_MAX - 1).map_or(u64::MAX, |(last_key, _)| last_key.0)
    }

    /// Figures that are computed here are kept, so that the placement reports them.
    pub(super) fn figures_of(
        &mut self,
        worker: WorkerRef,
        compute: impl FnOnce() -> Figures,
    ) -> Figures {
        if let Some((_, known)) = self.figures.iter().find(|(other, _)| *other == worker) {
            return *known;
        }
        let figures = compute();
        self.figures.push((worker, figures));
        figures
    }

    pub(super) fn best(&self) -> Option<(WorkerRef, Figures)> {
        self.least.first().map(|(_, place)| self.figures[*place])
    }

    /// Panics if no worker was compared.
    ///
    /// A turn without a session goes to the worker with the most room, among those whose cost is
    /// about the least: the figures are not more exact than that. If it must evict on all of them,
    /// it goes where it evicts what was unused for longest, so that the fleet keeps what was used
    /// last, as a single engine would.
    pub(super) fn choose(
        &mut self,
        request: &PlacementRequest<'_>,
        view: &Snapshot,
        now: Instant,
    ) -> WorkerRef {
        let (best_worker, best) = self.best().expect("a worker was compared");
        let (Some(conversations), Some(prompt)) = (request.conversations, request.prompt) else {
            return best_worker;
        };
        let share_ms = (best.cost_ms / NEAR_TIE_DIVISOR).min(NEAR_TIE_SHARE_MS_MAX);
        let limit_ms = best.cost_ms.saturating_add(share_ms + NEAR_TIE_MS);
        let is_near = |(key, _): &&(SortKey, usize)| key.0 <= limit_ms;
        let near: Vec<usize> = self.least.iter().take_while(is_near).map(|least| least.1).collect();
        if near.len() > 1 {
            for &place in &near {
                let (worker, figures) = &mut self.figures[place];
                add_room(*worker, figures, conversations, view, now);
            }
        }
        let room = |(_, figures): &&(WorkerRef, Figures)| {
            let resident_tokens = figures.resident_tokens.unwrap_or(0);
            let needed_tokens = prompt.tokens.saturating_sub(resident_tokens);
            let free_tokens = figures.free_tokens.unwrap_or(u64::MAX);
            let pool_tokens = figures.pool_tokens.unwrap_or(u64::MAX).max(1);
            match free_tokens < needed_tokens {
                false => {
                    let left_tokens = u128::from(free_tokens - needed_tokens);
                    (0, Reverse(left_tokens * 1000 / u128::from(pool_tokens)))
                }
                true => (1, Reverse(figures.oldest_idle_ms.unwrap_or(u64::MAX).into())),
            }
        };
        let near = near.iter().map(|&place| &self.figures[place]);
        near.min_by_key(room).map_or(best_worker, |(worker, _)| *worker)
    }

    /// The least cost first, then those that [`Compared::figures_of`] added.
    pub(super) fn into_figures(self) -> Vec<(WorkerRef, Figures)> {
        let least = self.least.iter().map(|(_, place)| self.figures[*place]);
        least.chain(self.figures.iter().skip(self.least.len()).copied()).collect()
    }
}

fn add_room(
    worker: WorkerRef,
    figures: &mut Figures,
    conversations: &Conversations,
    view: &Snapshot,
    now: Instant,
) {
    let Some(stats) = view.worker_table().get(worker) else { return };
    // A load report doesn't show what was placed since. What is remembered of conversations does,
    // but it doesn't show the KV of sessions.
    let free_by_memory = stats.pool_tokens().map(|pool_tokens| {
        let used_tokens = stats.used_tokens().unwrap_or(0);
        let conversation_tokens = conversations.tokens_on(worker);
        pool_tokens.saturating_sub(used_tokens.max(conversation_tokens))
    });
    figures.free_tokens = match (free_by_memory, stats.available_tokens()) {
        (Some(by_memory), Some(reported)) => Some(by_memory.min(reported)),
        (by_memory, reported) => by_memory.or(reported),
    };
    figures.oldest_idle_ms = conversations.oldest_use_on(worker).map(|at| {
        let age_ms = now.saturating_duration_since(at).as_millis();
        u64::try_from(age_ms).unwrap_or(u64::MAX)
    });
}
