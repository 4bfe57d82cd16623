//! Keeps the workers that cost least, and chooses among those of about the same cost. Pure.

use std::{cmp::Reverse, time::Instant};

use super::{Figures, PlacementRequest};
use crate::fleet::{conversations::Conversations, snapshot::Snapshot, worker::WorkerRef};

/// A placement reports so many, beside the session's own worker and the preferred worker. A list of
/// a thousand workers would not explain the choice better.
pub(super) const FIGURES_MAX: usize = 8;
/// How much more than the least cost counts as about the same, beside a share of the least cost.
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
    /// The least cost first. [`Compared::figures_of`] adds further workers at the end.
    figures: Vec<Figures>,
    /// Of each sorted entry of `figures`.
    sort_keys: Vec<SortKey>,
}

/// Cost in milliseconds, number of sessions, and the tie-break by a hash.
pub(super) type SortKey = (u64, u32, Reverse<u64>);

impl Compared {
    pub(super) fn insert(&mut self, figures: Figures, tie_break: impl Fn() -> u64) {
        let is_full = self.sort_keys.len() == FIGURES_MAX;
        if is_full && self.sort_keys.last().is_some_and(|last_key| figures.cost_ms > last_key.0) {
            return;
        }
        let key = (figures.cost_ms, figures.sessions, Reverse(tie_break()));
        let position = self.sort_keys.partition_point(|other_key| *other_key <= key);
        if is_full {
            if position == FIGURES_MAX {
                return;
            }
            self.sort_keys.pop();
            self.figures.pop();
        }
        self.sort_keys.insert(position, key);
        self.figures.insert(position, figures);
    }

    /// The cost above which a worker is not kept.
    pub(super) fn cost_ms_max(&self) -> u64 {
        let last_key = self.sort_keys.last().filter(|_| self.sort_keys.len() == FIGURES_MAX);
        last_key.map_or(u64::MAX, |last_key| last_key.0)
    }

    /// Figures that are computed here are kept, so that the placement reports them.
    pub(super) fn figures_of(
        &mut self,
        worker: WorkerRef,
        compute: impl FnOnce() -> Figures,
    ) -> Figures {
        if let Some(known) = self.figures.iter().find(|figures| figures.worker == worker) {
            return *known;
        }
        let figures = compute();
        self.figures.push(figures);
        figures
    }

    pub(super) fn best(&self) -> Option<&Figures> {
        self.figures.first()
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
        let best = self.figures[0];
        let (Some(conversations), Some(prompt)) = (request.conversations, request.prompt) else {
            return best.worker;
        };
        let share_ms = (best.cost_ms / NEAR_TIE_DIVISOR).min(NEAR_TIE_SHARE_MS_MAX);
        let limit_ms = best.cost_ms.saturating_add(share_ms + NEAR_TIE_MS);
        let near_count = self.sort_keys.iter().take_while(|key| key.0 <= limit_ms).count();
        let near = &mut self.figures[..near_count];
        if near_count > 1 {
            for figures in near.iter_mut() {
                add_room(figures, conversations, view, now);
            }
        }
        let room = |figures: &&Figures| {
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
        near.iter().min_by_key(room).map_or(best.worker, |figures| figures.worker)
    }

    pub(super) fn into_figures(self) -> Vec<Figures> {
        self.figures
    }
}

fn add_room(figures: &mut Figures, conversations: &Conversations, view: &Snapshot, now: Instant) {
    let Some(stats) = view.worker_table().get(figures.worker) else { return };
    // A load report doesn't show what was placed since. What is remembered of conversations does,
    // but it doesn't show the KV of sessions.
    let remembered = stats.pool_tokens().map(|pool_tokens| {
        let used_tokens = stats.used_tokens().unwrap_or(0);
        let conversation_tokens = conversations.tokens_on(figures.worker);
        pool_tokens.saturating_sub(used_tokens.max(conversation_tokens))
    });
    figures.free_tokens = match (remembered, stats.available_tokens()) {
        (Some(remembered), Some(reported)) => Some(remembered.min(reported)),
        (remembered, reported) => remembered.or(reported),
    };
    figures.oldest_idle_ms = conversations.oldest_use_on(figures.worker).map(|at| {
        let age_ms = now.saturating_duration_since(at).as_millis();
        u64::try_from(age_ms).unwrap_or(u64::MAX)
    });
}
