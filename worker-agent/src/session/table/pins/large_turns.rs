//! Keeps what the large plain turns of each rank need: too much to fit beside a full pin budget.

#[derive(Debug, Default)]
pub(crate) struct LargeTurns(Vec<RankLargeTurns>);

#[derive(Debug, Default)]
struct RankLargeTurns {
    /// What each running large turn may need.
    running: Vec<u64>,
    /// What the largest plain turn needs that waits for pinned sessions to give up room; 0 if none
    /// waits so.
    waiting_max: u64,
}

impl LargeTurns {
    pub(crate) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.0.len());
        self.0.resize_with(rank_count, RankLargeTurns::default);
    }

    pub(crate) fn begin(&mut self, dp_rank: u32, tokens: u64) {
        self.0[dp_rank as usize].running.push(tokens);
    }

    pub(crate) fn end(&mut self, dp_rank: u32, tokens: u64) {
        let running = &mut self.0[dp_rank as usize].running;
        let index = running.iter().position(|it| *it == tokens);
        index.map(|index| running.swap_remove(index));
    }

    /// Called before each pass over the queue.
    pub(crate) fn forget_waiting(&mut self) {
        self.0.iter_mut().for_each(|rank| rank.waiting_max = 0);
    }

    /// Returns whether the turn is the first of this pass over the queue that waits so.
    pub(crate) fn note_waiting(&mut self, dp_rank: u32, tokens: u64) -> bool {
        let rank = &mut self.0[dp_rank as usize];
        let is_first = rank.waiting_max == 0;
        rank.waiting_max = rank.waiting_max.max(tokens);
        is_first
    }

    pub(crate) fn largest(&self, dp_rank: u32) -> u64 {
        let rank = &self.0[dp_rank as usize];
        rank.running.iter().copied().max().unwrap_or(0).max(rank.waiting_max)
    }

    /// `running`: by rank, what each running large turn may need, in any order.
    pub(crate) fn check_invariants(&self, running: impl Iterator<Item = (u32, u64)>) {
        let mut counted: Vec<(u32, u64)> = running.collect();
        let ranks = (0..).zip(&self.0);
        let of_rank = |(dp_rank, rank): (u32, &RankLargeTurns)| {
            rank.running.iter().map(move |tokens| (dp_rank, *tokens)).collect::<Vec<_>>()
        };
        let mut known: Vec<(u32, u64)> = ranks.flat_map(of_rank).collect();
        counted.sort_unstable();
        known.sort_unstable();
        assert_eq!(known, counted, "the large turns differ from a fresh count");
    }
}
