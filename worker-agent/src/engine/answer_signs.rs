//! Counts the signs of life that turns' answers give, for each data parallel rank of the engine.
//!
//! Noting one is a relaxed load and a relaxed store, and reads no clock. Two signs at once may
//! count as one: the owner task only looks from time to time whether a count has changed.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Answers of ranks beyond these don't count: reports of the engine must show that they live.
const RANKS_MAX: usize = 256;

/// So many first frames of an answer don't count. On some routes the HTTP server sends about four
/// before the scheduler has the turn.
const SERVER_FRAMES_MAX: usize = 16;

#[derive(Debug, Clone)]
pub struct AnswerSigns {
    counts: Arc<[AtomicU64]>,
}

impl Default for AnswerSigns {
    fn default() -> Self {
        Self { counts: (0..RANKS_MAX).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl AnswerSigns {
    pub fn note(&self, dp_rank: u32) {
        if let Some(count) = self.counts.get(dp_rank as usize) {
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// The number differs from the last one if there were signs of the rank since.
    #[must_use]
    pub fn count(&self, dp_rank: u32) -> u64 {
        self.counts.get(dp_rank as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Clone)]
pub struct TurnSigns {
    signs: AnswerSigns,
    dp_rank: u32,
    frames: usize,
}

impl TurnSigns {
    #[must_use]
    pub fn new(signs: AnswerSigns, dp_rank: u32) -> Self {
        Self { signs, dp_rank, frames: 0 }
    }

    pub fn note_frame(&mut self) {
        if self.frames < SERVER_FRAMES_MAX {
            self.frames += 1;
        } else {
            self.signs.note(self.dp_rank);
        }
    }

    pub fn note_end(&self) {
        self.signs.note(self.dp_rank);
    }
}
