//! Counts what turns use and how long their steps take, and compares both with the expectation.
//!
//! `turn` passes in what it knows of a turn (one request and its answer) at its end. The tokens are
//! those that engines report: an answer without a report counts nowhere. A comparison has the label
//! `side`: `over` if more was expected than observed, else `under`.

use std::time::Duration;

use prometheus_client::metrics::{counter::Counter, histogram::Histogram};
use service::{histogram, metrics::By};

/// The tokens of a turn, as far as they are known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TurnTokenCounts {
    pub(crate) prompt: Option<u64>,
    /// The part of the prompt whose KV was there.
    pub(crate) cached: Option<u64>,
    pub(crate) output: Option<u64>,
    /// The part of the prompt that placement expected to be computed.
    pub(crate) uncached_expected: Option<u64>,
}

service::metrics! {
    pub(crate) struct TurnMetrics {
        /// Tokens of prompts, as engines report them
        prompt_tokens: Counter = "prompt_tokens";
        /// Prompt tokens whose KV was there. SGLang's OpenAI routes report them only with
        /// --enable-cache-report
        cached_tokens: Counter = "cached_tokens";
        /// Prompt tokens that engines computed, of turns whose cached tokens are reported
        computed_tokens: Counter = "computed_tokens";
        /// Tokens of answers, as engines report them
        output_tokens: Counter = "output_tokens";
        /// Time from a turn's arrival to the first byte of a successful answer's body
        first_byte: Histogram = "first_byte" in "seconds", seconds();
        /// Time from a turn's arrival to its placement
        decide: Histogram = "decide" in "seconds", short_seconds();
        /// Time that long prompts took to be computed in stages before their turns
        staged_prefill: Histogram = "staged_prefill" in "seconds", seconds();
        /// Time between two parts of a streamed answer, which have a token or more each
        gap: Histogram = "stream_gap" in "seconds", short_seconds();
        /// Time from a turn's arrival to the end of its successful answer
        turn: Histogram = "turn" in "seconds", seconds();
        /// Difference between the time from placement to the first byte that placement expected
        /// and the time that passed
        ttft_errors: By<Histogram> = "ttft_error" in "seconds", By::new("side", seconds);
        /// Difference between the prompt tokens that placement expected to be computed and those
        /// that were
        overlap_errors: By<Histogram> = "overlap_error" in "tokens", By::new("side", tokens);
    }
}

/// Creates a histogram from 5 ms to two minutes. A turn with cached KV answers in 20 ms, and one
/// with a long prefill in a minute.
fn seconds() -> Histogram {
    histogram::create([
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    ])
}

/// Creates a histogram from half a millisecond to a second: a step of a batch takes some 10 ms, a
/// decision without tokenizing less than one.
fn short_seconds() -> Histogram {
    histogram::create([0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0])
}

/// Creates a histogram of tokens, from a page to 256 Ki, each bucket four times the previous.
fn tokens() -> Histogram {
    histogram::create((0..8).map(|step| 16.0 * 4_f64.powi(step)))
}

impl TurnMetrics {
    /// Records the time from a turn's arrival to its placement.
    pub(crate) fn observe_decision(&self, elapsed: Duration) {
        self.decide.observe(elapsed.as_secs_f64());
    }

    /// Records how long a prompt was in staged prefill.
    pub(crate) fn observe_staged_prefill(&self, elapsed: Duration) {
        self.staged_prefill.observe(elapsed.as_secs_f64());
    }

    /// Records the time from a turn's arrival to the first byte of its answer's body.
    pub(crate) fn observe_first_byte(&self, elapsed: Duration) {
        self.first_byte.observe(elapsed.as_secs_f64());
    }

    /// Records the time from a turn's placement to the first byte of its answer's body, of which
    /// placement expected `expected`.
    pub(crate) fn compare_ttft(&self, expected: Duration, observed: Duration) {
        let (expected, observed) = (expected.as_secs_f64(), observed.as_secs_f64());
        compare(&self.ttft_errors, expected, observed);
    }

    /// Records the time between two parts of a streamed answer.
    pub(crate) fn observe_gap(&self, elapsed: Duration) {
        self.gap.observe(elapsed.as_secs_f64());
    }

    /// Records the time that a successful turn took.
    pub(crate) fn observe_turn(&self, elapsed: Duration) {
        self.turn.observe(elapsed.as_secs_f64());
    }

    /// Counts the tokens of a turn that has ended.
    pub(crate) fn count_tokens(&self, counts: TurnTokenCounts) {
        let TurnTokenCounts { prompt, cached, output, uncached_expected } = counts;
        let computed = prompt.zip(cached).map(|(prompt, cached)| prompt.saturating_sub(cached));
        for (counter, count) in [
            (&self.prompt_tokens, prompt),
            (&self.cached_tokens, cached),
            (&self.computed_tokens, computed),
            (&self.output_tokens, output),
        ] {
            counter.inc_by(count.unwrap_or_default());
        }
        if let (Some(expected), Some(computed)) = (uncached_expected, computed) {
            compare(&self.overlap_errors, expected as f64, computed as f64);
        }
    }
}

/// Records how far an expectation was from the observation.
fn compare(errors: &By<Histogram>, expected: f64, observed: f64) {
    let side = if expected > observed { "over" } else { "under" };
    errors.get(side).observe((expected - observed).abs());
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;
    use service::metrics::Registrar;

    use super::*;

    #[test]
    fn only_reported_tokens_count_and_errors_have_a_side() {
        let mut registry = Registry::default();
        let metrics = TurnMetrics::new(&mut Registrar::new(&mut registry));
        let counts = |prompt, cached, uncached_expected| TurnTokenCounts {
            prompt,
            cached,
            output: Some(7),
            uncached_expected,
        };
        metrics.count_tokens(counts(Some(100), Some(60), Some(50)));
        metrics.count_tokens(counts(Some(100), Some(60), Some(10)));
        metrics.count_tokens(counts(Some(1000), None, Some(1000)));
        metrics.count_tokens(counts(None, None, Some(5)));
        metrics.compare_ttft(Duration::from_secs(3), Duration::from_secs(1));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "prompt_tokens_total 1200",
            "cached_tokens_total 120",
            "computed_tokens_total 80",
            "output_tokens_total 28",
            "overlap_error_tokens_sum{side=\"over\"} 10.0",
            "overlap_error_tokens_sum{side=\"under\"} 30.0",
            "ttft_error_seconds_sum{side=\"over\"} 2.0",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} is not in {text}");
        }
    }
}
