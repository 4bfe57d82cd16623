//! The share of a running request's remaining output that admission reserves.
//!
//! The share falls with every decode step that finds room, and a retraction raises it again.

/// The ratio 1.0 in millionths.
const ONE: usize = 1_000_000;
/// The engine's `SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`, in hundredths.
const LOWEST_OF_INITIAL: usize = 14;
/// The engine's `SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS`.
const DECAY_STEPS: usize = 600;
/// The engine's `SGLANG_RETRACT_DECODE_STEPS`: a retraction makes room for this many decode steps.
const RETRACT_STEPS: usize = 20;

/// A ratio from 0 to 1, in millionths.
#[derive(Debug)]
pub(super) struct NewTokenRatio {
    initial: usize,
    current: usize,
}

impl NewTokenRatio {
    pub(super) fn new(per_mille: usize) -> NewTokenRatio {
        let initial = per_mille.min(1000) * (ONE / 1000);
        NewTokenRatio { initial, current: initial }
    }

    /// Lowers the ratio by one step, after a decode step that had room.
    pub(super) fn decay(&mut self) {
        let lowest = self.initial * LOWEST_OF_INITIAL / 100;
        let step = (self.initial - lowest) / DECAY_STEPS;
        self.current = self.current.saturating_sub(step).max(lowest);
    }

    /// Restores the initial ratio, when no request runs any more.
    pub(super) fn reset(&mut self) {
        self.current = self.initial;
    }

    /// Sets the ratio after a retraction. `left` requests still run; they have produced `made` of
    /// the `asked` output tokens.
    pub(super) fn retracted(&mut self, left: usize, made: usize, asked: usize) {
        self.current = ((made + RETRACT_STEPS * left) * ONE / (asked + 1)).min(ONE);
    }

    /// Returns the number of tokens to reserve out of `tokens`, rounded down.
    pub(super) fn scale(&self, tokens: usize) -> usize {
        tokens * self.current / ONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_bolder_until_a_retraction() {
        let mut ratio = NewTokenRatio::new(700);
        assert_eq!(ratio.scale(1000), 700);
        for _ in 0..1000 {
            ratio.decay();
        }
        assert_eq!(ratio.scale(1000), 98);
        ratio.retracted(2, 100, 279);
        assert_eq!(ratio.scale(1000), 500);
        ratio.reset();
        assert_eq!(ratio.scale(1000), 700);
    }
}
