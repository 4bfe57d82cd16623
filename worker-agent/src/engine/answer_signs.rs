//! Counts the signs of life that turns' answers give, for each data parallel rank of the engine.
//!
//! A turn is one request and its answer. `data_port` notes each sign as an answer's bytes pass, and
//! the owner task looks only from time to time whether a count has changed. So noting is a load and
//! a store without an order or a clock. Two signs at once may count as one, which changes nothing.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The number of ranks whose signs are counted. Ranks beyond it have only their other signs.
const RANKS_MAX: usize = 256;

/// The most frames of an answer that may come from the engine's HTTP server alone. Some routes send
/// events before the scheduler has the turn; there are about four.
const SERVER_FRAMES_MAX: usize = 16;

/// The counts, shared by all tasks.
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
    /// Notes that the scheduler of a rank has made a part of an answer.
    pub fn note(&self, dp_rank: u32) {
        if let Some(count) = self.counts.get(dp_rank as usize) {
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Returns a number that differs from the last one if there were signs of the rank since.
    #[must_use]
    pub fn count(&self, dp_rank: u32) -> u64 {
        self.counts.get(dp_rank as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

/// The signs of life in the answer of one turn.
#[derive(Debug, Clone)]
pub struct TurnSigns {
    signs: AnswerSigns,
    dp_rank: u32,
    /// How many frames have come, at most [`SERVER_FRAMES_MAX`].
    frames: usize,
}

impl TurnSigns {
    /// Creates the signs of a turn that runs on this rank.
    #[must_use]
    pub fn new(signs: AnswerSigns, dp_rank: u32) -> Self {
        Self { signs, dp_rank, frames: 0 }
    }

    /// Notes that a frame of the answer has come.
    pub fn note_frame(&mut self) {
        if self.frames < SERVER_FRAMES_MAX {
            self.frames += 1;
        } else {
            self.signs.note(self.dp_rank);
        }
    }

    /// Notes that the scheduler has ended the turn.
    pub fn note_end(&self) {
        self.signs.note(self.dp_rank);
    }
}
