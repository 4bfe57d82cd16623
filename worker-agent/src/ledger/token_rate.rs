//! Measures a rank's tokens per second: of prompts that it computes, of KV that it loads.
//!
//! The rate is the sum of the tokens divided by the sum of the engine's times for them, over the
//! intervals between samples. Large sums are scaled down, so old intervals lose weight. The rate is
//! meant for many tokens: every forward pass and every load has a fixed cost, so few tokens look
//! slow, and an interval with more tokens has more weight. No I/O, no clock.

use std::time::Instant;

use contract::count::COUNT_MAX;

/// An interval with fewer tokens is ignored: it measures mostly the fixed cost of a pass. At 20,000
/// tokens/s, 256 tokens take 13 ms, and the fixed cost may be 10 ms.
const INTERVAL_TOKENS_MIN: u64 = 256;
/// One disturbed short interval must not determine the rate alone.
const REPORTED_TOKENS_MIN: u64 = 1024;
/// An engine's first prompt may take ten times as long as others, because the engine compiles
/// kernels meanwhile.
const REPORTED_INTERVALS_MIN: u32 = 2;
/// Until so many tokens were measured, the engine may be warming up: an interval that is
/// [`WARM_UP_FACTOR`] times as fast as those before it replaces them.
const WARM_UP_TOKENS: u64 = 1 << 15;
const WARM_UP_FACTOR: u128 = 2;
/// Larger sums are scaled down to this. After this many tokens, an interval's weight is about a
/// third. These are a few long prompts, so that a single one doesn't determine the rate.
const TOKENS_SUM_MAX: u64 = 1 << 17;
/// The engine counts microseconds. Scaling rounds the time's sum: in femtoseconds, that changes the
/// rate by less than one token per second.
const FS_PER_US: u128 = 1_000_000_000;

#[derive(Debug, Clone, Default)]
pub struct TokenRate {
    /// Tokens and microseconds at the newest sample.
    last_counters: Option<(u64, u64)>,
    tokens_sum: u64,
    busy_fs_sum: u128,
    intervals: u32,
    /// Since the engine started, up to [`WARM_UP_TOKENS`]; never scaled down.
    measured_tokens: u64,
    measured_at: Option<Instant>,
}

impl TokenRate {
    /// If a counter has decreased, the engine was restarted, and the sums start again at 0.
    pub fn record_sample(&mut self, sampled_at: Instant, tokens_total: u64, busy_us_total: u64) {
        let counters = (tokens_total, busy_us_total);
        let last_counters = self.last_counters.replace(counters);
        let Some((tokens_before, busy_us_before)) = last_counters else { return };
        let tokens = tokens_total.checked_sub(tokens_before);
        let (Some(tokens), Some(busy_us)) = (tokens, busy_us_total.checked_sub(busy_us_before))
        else {
            *self = Self { last_counters: Some(counters), ..Self::default() };
            return;
        };
        if tokens < INTERVAL_TOKENS_MIN || busy_us == 0 {
            return;
        }
        if self.measured_tokens < WARM_UP_TOKENS && self.was_slower(tokens, busy_us) {
            // A pass whose end was noticed late makes the next one seem fast, so that one is not
            // reported alone.
            (self.tokens_sum, self.busy_fs_sum, self.intervals) = (0, 0, 0);
        }
        self.intervals = (self.intervals + 1).min(REPORTED_INTERVALS_MIN);
        self.measured_tokens = self.measured_tokens.saturating_add(tokens).min(WARM_UP_TOKENS);
        // A mean of the intervals' rates would be wrong. If the engine's scheduler notices the end
        // of a pass late, that pass gets too much time, and the next one almost none. In the sums,
        // the two errors cancel out.
        self.tokens_sum = self.tokens_sum.saturating_add(tokens);
        self.busy_fs_sum = self.busy_fs_sum.saturating_add(u128::from(busy_us) * FS_PER_US);
        if self.tokens_sum > TOKENS_SUM_MAX {
            let scaled_fs = self.busy_fs_sum.saturating_mul(u128::from(TOKENS_SUM_MAX));
            // Rounded up, so that the rate is never reported too high.
            self.busy_fs_sum = scaled_fs.div_ceil(u128::from(self.tokens_sum));
            self.tokens_sum = TOKENS_SUM_MAX;
        }
        self.measured_at = Some(sampled_at);
        debug_assert!(self.is_sound(), "{self:?}");
    }

    #[must_use]
    pub fn tokens_per_s(&self) -> Option<(u64, Instant)> {
        if self.tokens_sum < REPORTED_TOKENS_MIN || self.intervals < REPORTED_INTERVALS_MIN {
            return None;
        }
        let rate = u128::from(self.tokens_sum) * 1_000_000 * FS_PER_US / self.busy_fs_sum.max(1);
        Some((u64::try_from(rate).unwrap_or(COUNT_MAX).clamp(1, COUNT_MAX), self.measured_at?))
    }

    fn was_slower(&self, tokens: u64, busy_us: u64) -> bool {
        let busy_fs = u128::from(busy_us) * FS_PER_US;
        let so_far = self.busy_fs_sum.saturating_mul(tokens.into());
        so_far > WARM_UP_FACTOR.saturating_mul(busy_fs).saturating_mul(self.tokens_sum.into())
    }

    fn is_sound(&self) -> bool {
        self.tokens_sum <= TOKENS_SUM_MAX && (self.tokens_sum > 0) == self.measured_at.is_some()
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
        fn prefill(&mut self, rate: &mut TokenRate, at: Instant, tokens: u64) {
            self.tokens += tokens;
            self.busy_us += 10_000 + 50 * tokens;
            rate.record_sample(at, self.tokens, self.busy_us);
        }
    }

    fn start() -> Instant {
        service::clock::now()
    }

    fn told(rate: &TokenRate) -> Option<u64> {
        rate.tokens_per_s().map(|(rate, _)| rate)
    }

    #[test]
    fn too_few_tokens_tell_no_rate() {
        let (mut rate, mut counters, at) = (TokenRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 1000);
        assert_eq!(told(&rate), None);
        counters.prefill(&mut rate, at, 1000);
        assert_eq!(told(&rate), Some(16_666));
    }

    #[test]
    fn what_was_there_before_the_first_sample_is_no_measure() {
        let mut rate = TokenRate::default();
        rate.record_sample(start(), 1_000_000, 1);
        assert_eq!(told(&rate), None);
    }

    #[test]
    fn tiny_prompts_do_not_make_an_engine_slow() {
        let (mut rate, mut counters, at) = (TokenRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 10_000);
        counters.prefill(&mut rate, at, 10_000);
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
        let mut rate = TokenRate::default();
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
    fn scaling_the_sums_costs_less_than_a_token() {
        let mut rate = TokenRate::default();
        rate.record_sample(start(), 0, 0);
        rate.record_sample(start(), 256, 2);
        rate.record_sample(start(), TOKENS_SUM_MAX + 1, 1000);
        let exact = (TOKENS_SUM_MAX + 1) * 1000;
        let told = told(&rate).unwrap();
        assert!((exact - 1..=exact).contains(&told), "{told} of {exact}");
    }

    #[test]
    fn a_restart_begins_anew() {
        let (mut rate, mut counters, at) = (TokenRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 20_000);
        rate.record_sample(at, 300, 50_000_000);
        assert_eq!(told(&rate), None);
        rate.record_sample(at, 10_300, 51_000_000);
        assert_eq!(told(&rate), None, "the first prompt of an engine may be slow");
        rate.record_sample(at, 20_300, 52_000_000);
        assert_eq!(told(&rate), Some(10_000));
    }

    #[test]
    fn a_slow_first_prompt_is_forgotten_with_the_second() {
        let (mut rate, at) = (TokenRate::default(), start());
        rate.record_sample(at, 0, 0);
        rate.record_sample(at, 4_000, 4_000_000);
        assert_eq!(told(&rate), None);
        rate.record_sample(at, 8_000, 4_400_000);
        assert_eq!(told(&rate), None, "it may be too fast");
        rate.record_sample(at, 12_000, 4_800_000);
        assert_eq!(told(&rate), Some(10_000));
        // Once it is warm, a fast prompt is one of many.
        rate.record_sample(at, 52_000, 8_800_000);
        rate.record_sample(at, 53_000, 8_820_000);
        assert!((10_000..10_500).contains(&told(&rate).unwrap()), "{:?}", told(&rate));
    }

    #[test]
    fn a_rate_is_as_old_as_its_last_stretch() {
        let (mut rate, mut counters, at) = (TokenRate::default(), Counters::default(), start());
        rate.record_sample(at, 0, 0);
        counters.prefill(&mut rate, at, 10_000);
        counters.prefill(&mut rate, at, 10_000);
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
            let (mut rate, at) = (TokenRate::default(), start());
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
                // Rounded down once, and at every scaling of the sums.
                prop_assert!(told + 2 >= low && told <= high.max(1), "{low} {told} {high}");
            }
        }
    }
}
