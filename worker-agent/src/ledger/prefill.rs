//! Measures an engine's prefill rate from two of its counters: tokens computed, and the time taken.
//! Pure.
//!
//! Every forward pass has a fixed cost, so short prompts look slow. The rate is meant for long
//! prompts: each interval between two samples is weighted by its tokens.

use std::time::Instant;

/// Intervals with fewer tokens are ignored, because they measure the cost of a pass. At 20,000
/// tokens/s such an interval takes less than 13 ms, and a pass may take 10 ms whatever it contains.
const STRETCH_TOKENS_MIN: u64 = 256;
/// The rate is not reported before this many tokens were measured: several intervals, so that a
/// single disturbed one doesn't decide.
const TOLD_TOKENS_MIN: u64 = 1024;
/// The size of the sliding window. What was measured this many tokens ago weighs a third of what is
/// new: a few long prompts, so that the rate follows the load and not the last prompt.
const WINDOW_TOKENS: u64 = 1 << 17;
/// The time is kept at a finer unit than it is counted in. Scaling it to the window at every sample
/// then changes a rate by less than one token.
const FS_PER_US: u128 = 1_000_000_000;

/// The prefill rate of one rank.
#[derive(Debug, Clone, Default)]
pub struct PrefillRate {
    /// The counters at the last sample: tokens and microseconds.
    last: Option<(u64, u64)>,
    /// Tokens measured, at most [`WINDOW_TOKENS`].
    tokens: u64,
    /// The engine's time for these tokens, in femtoseconds.
    busy_fs: u128,
    measured: Option<Instant>,
}

impl PrefillRate {
    /// Takes the engine's counters. If they have decreased, the engine was restarted and measuring
    /// begins again.
    pub fn record_sample(&mut self, at: Instant, tokens_total: u64, busy_us_total: u64) {
        let now = (tokens_total, busy_us_total);
        let Some((tokens_before, busy_before)) = self.last.replace(now) else { return };
        let tokens = tokens_total.checked_sub(tokens_before);
        let (Some(tokens), Some(busy_us)) = (tokens, busy_us_total.checked_sub(busy_before)) else {
            *self = Self { last: Some(now), ..Self::default() };
            return;
        };
        if tokens < STRETCH_TOKENS_MIN || busy_us == 0 {
            return;
        }
        // Sums are used, not a mean of rates: after a stall, the engine counts a prefill that took
        // no time.
        self.tokens = self.tokens.saturating_add(tokens);
        self.busy_fs = self.busy_fs.saturating_add(u128::from(busy_us) * FS_PER_US);
        if self.tokens > WINDOW_TOKENS {
            let shrunk = self.busy_fs.saturating_mul(u128::from(WINDOW_TOKENS));
            // Rounded up, so that the rate is never reported too high.
            self.busy_fs = shrunk.div_ceil(u128::from(self.tokens));
            self.tokens = WINDOW_TOKENS;
        }
        self.measured = Some(at);
        debug_assert!(self.is_sound(), "{self:?}");
    }

    /// Returns the rate in tokens per second, at least 1, and when it was last measured. Returns
    /// `None` until enough tokens were measured.
    #[must_use]
    pub fn tokens_per_s(&self) -> Option<(u64, Instant)> {
        if self.tokens < TOLD_TOKENS_MIN {
            return None;
        }
        let rate = u128::from(self.tokens) * 1_000_000 * FS_PER_US / self.busy_fs.max(1);
        Some((u64::try_from(rate).unwrap_or(u64::MAX).max(1), self.measured?))
    }

    fn is_sound(&self) -> bool {
        self.tokens <= WINDOW_TOKENS && (self.tokens > 0) == self.measured.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    /// The counters of an engine that takes 10 ms for a pass and 50 µs for a token.
    #[derive(Default)]
    struct Counters {
        tokens: u64,
        busy_us: u64,
    }

    impl Counters {
        fn prefill(&mut self, rate: &mut PrefillRate, at: Instant, tokens: u64) {
            self.tokens += tokens;
            self.busy_us += 10_000 + 50 * tokens;
            rate.record_sample(at, self.tokens, self.busy_us);
        }
    }

    fn start() -> Instant {
        service::clock::now()
    }

    fn told(rate: &PrefillRate) -> Option<u64> {
        rate.tokens_per_s().map(|(rate, _)| rate)
    }

    #[test]
    fn too_few_tokens_tell_no_rate() {
        let (mut rate, mut counters, at) = (PrefillRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 1000);
        assert_eq!(told(&rate), None);
        counters.prefill(&mut rate, at, 1000);
        assert_eq!(told(&rate), Some(16_666));
    }

    #[test]
    fn what_was_there_before_the_first_sample_is_no_measure() {
        let mut rate = PrefillRate::default();
        rate.record_sample(start(), 1_000_000, 1);
        assert_eq!(told(&rate), None);
    }

    #[test]
    fn tiny_prompts_do_not_make_an_engine_slow() {
        let (mut rate, mut counters, at) = (PrefillRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 20_000);
        let alone = told(&rate).unwrap();
        for _ in 0..1000 {
            counters.prefill(&mut rate, at, 20);
        }
        assert_eq!(told(&rate), Some(alone));
        for _ in 0..10 {
            counters.prefill(&mut rate, at, 300);
        }
        assert!(told(&rate).unwrap() > alone * 9 / 10, "{:?} after {alone}", told(&rate));
    }

    #[test]
    fn a_slower_engine_is_noticed_within_some_long_prompts() {
        let at = start();
        let mut rate = PrefillRate::default();
        let (mut tokens, mut busy_us) = (0, 0);
        rate.record_sample(at, 0, 0);
        for us in [50, 50, 50, 50, 200, 200, 200, 200] {
            tokens += 100_000;
            busy_us += 100_000 * us;
            rate.record_sample(at, tokens, busy_us);
        }
        let now = told(&rate).unwrap();
        assert!((5_000..7_000).contains(&now), "{now}");
    }

    #[test]
    fn the_window_s_end_costs_less_than_a_token() {
        let mut rate = PrefillRate::default();
        rate.record_sample(start(), 0, 0);
        rate.record_sample(start(), WINDOW_TOKENS + 1, 1000);
        let exact = (WINDOW_TOKENS + 1) * 1000;
        let told = told(&rate).unwrap();
        assert!((exact - 1..=exact).contains(&told), "{told} of {exact}");
    }

    #[test]
    fn a_restart_begins_anew() {
        let (mut rate, mut counters, at) = (PrefillRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 20_000);
        rate.record_sample(at, 300, 50_000_000);
        assert_eq!(told(&rate), None);
        rate.record_sample(at, 10_300, 51_000_000);
        assert_eq!(told(&rate), Some(10_000));
    }

    #[test]
    fn a_rate_is_as_old_as_its_last_stretch() {
        let (mut rate, mut counters, at) = (PrefillRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 20_000);
        counters.prefill(&mut rate, at + Duration::from_secs(9), 10);
        assert_eq!(rate.tokens_per_s().map(|(_, measured)| measured), Some(at));
    }

    proptest! {
        /// Whatever the counters do, a reported rate lies between the lowest and the highest
        /// interval's.
        #[test]
        fn it_lies_between_what_was_measured(
            stretches in prop::collection::vec((256..200_000_u64, 1_000..10_000_000_u64), 1..40),
        ) {
            let (mut rate, at) = (PrefillRate::default(), start());
            let (mut tokens, mut busy_us) = (7, 7);
            rate.record_sample(at, tokens, busy_us);
            let (mut low, mut high) = (u64::MAX, 0);
            for (more, us) in stretches {
                tokens += more;
                busy_us += us;
                rate.record_sample(at, tokens, busy_us);
                let own = more * 1_000_000 / us;
                (low, high) = (low.min(own), high.max(own));
                prop_assert!(rate.is_sound());
            }
            if let Some(told) = told(&rate) {
                // Rounded down once, and at every scaling to the window.
                prop_assert!(told + 2 >= low && told <= high.max(1), "{low} {told} {high}");
            }
        }
    }
}
