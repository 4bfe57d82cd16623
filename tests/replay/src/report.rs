//! The counters of a running replay, and its final report.

use crate::client::{CallFailure, MeasuredTurn, TurnKind};
use crate::workload::Losses;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Precision and bound of the histograms: three digits, over microseconds up to four hours, take
/// about 200 KiB per histogram. A longer time counts as four hours.
const DIGITS: u8 = 3;
const MICROS_MAX: u64 = 4 * 3_600 * 1_000_000;

/// The results of a replay, final or so far. Times to the first token count from a turn's first
/// attempt, including waits after a 429. A gap is the time between two events that carry tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Seconds until the last turn's end; until now while the replay runs.
    pub seconds: f64,
    /// Turns that were answered properly.
    pub turns: u64,
    /// Turns and session calls that failed.
    pub errors: u64,
    /// Failures by kind.
    pub errors_by_kind: BTreeMap<String, u64>,
    /// Turns by how they ran in their sessions, if Berth reports it.
    pub turns_by_kind: BTreeMap<TurnKind, u64>,
    /// Retries after a 429 with `Retry-After`.
    pub retries: u64,
    /// Turns not sent because too many were in flight (open loop).
    pub dropped: u64,
    /// Turns sent too late because the previous answer was late (open loop).
    pub late: u64,
    /// Turns given up at the stop.
    pub unfinished: u64,
    /// Turns in flight now.
    pub in_flight: u64,
    /// Conversations started, including those of subagents.
    pub conversations: u64,
    /// Conversations in which every turn was attempted.
    pub conversations_finished: u64,
    /// Sessions opened explicitly.
    pub sessions_opened: u64,
    /// Sessions closed explicitly.
    pub sessions_closed: u64,
    /// Median time to the first token, in milliseconds.
    pub ttft_ms_p50: f64,
    /// 90th percentile of the time to the first token, in milliseconds.
    pub ttft_ms_p90: f64,
    /// 99th percentile of the time to the first token, in milliseconds.
    pub ttft_ms_p99: f64,
    /// Mean time to the first token, in milliseconds.
    pub ttft_ms_mean: f64,
    /// Median time between events with tokens, in milliseconds.
    pub itl_ms_p50: f64,
    /// 99th percentile of the time between events with tokens, in milliseconds.
    pub itl_ms_p99: f64,
    /// Median time of a complete turn, in milliseconds.
    pub turn_ms_p50: f64,
    /// 99th percentile of the time of a complete turn, in milliseconds.
    pub turn_ms_p99: f64,
    /// Turns per second.
    pub turns_per_s: f64,
    /// Prompt tokens, as the server counts them.
    pub input_tokens: u64,
    /// Answer tokens, as the server counts them.
    pub output_tokens: u64,
    /// Prompt tokens per second.
    pub input_tokens_per_s: f64,
    /// Answer tokens per second.
    pub output_tokens_per_s: f64,
    /// Prompt and answer tokens of the last turns of all conversations.
    pub context_tokens: u64,
    /// Prompt tokens found in a cache.
    pub cached_tokens: u64,
    /// Share of cached prompt tokens in the answers that report it; `None` if no answer did.
    pub cached_ratio: Option<f64>,
    /// Conversations shortened because a prompt exceeded the context.
    pub conversations_cut: u64,
    /// Turns lost by the shortening.
    pub turns_cut: u64,
    /// Conversations of which not even the first turn fits the context.
    pub conversations_dropped: u64,
}

/// The counters of a running replay; shared, and cheap to write.
#[derive(Debug)]
pub struct LiveCounters {
    in_flight: AtomicU64,
    stats: Mutex<Stats>,
}

/// A turn in flight, counted until this value is dropped.
#[derive(Debug)]
pub struct InFlight<'a>(&'a LiveCounters);

#[derive(Debug)]
struct Stats {
    counts: Report,
    caching_input: u64,
    ttft_us: Histogram<u64>,
    gap_us: Histogram<u64>,
    turn_us: Histogram<u64>,
    last_end: Option<Duration>,
}

impl Default for LiveCounters {
    fn default() -> Self {
        let histogram = || {
            let made = Histogram::new_with_bounds(1, MICROS_MAX, DIGITS);
            made.expect("bounds and digits are within what it takes")
        };
        let stats = Stats {
            counts: Report::default(),
            caching_input: 0,
            ttft_us: histogram(),
            gap_us: histogram(),
            turn_us: histogram(),
            last_end: None,
        };
        Self { in_flight: AtomicU64::new(0), stats: Mutex::new(stats) }
    }
}

impl LiveCounters {
    /// Returns the report so far, at time `elapsed` after the start.
    pub fn report(&self, elapsed: Duration) -> Report {
        let mut report = self.stats.lock().report(elapsed);
        report.in_flight = self.in_flight.load(Ordering::Relaxed);
        report
    }

    /// Returns the final report, whose duration ends with the last turn.
    pub fn final_report(&self, elapsed: Duration) -> Report {
        let stats = self.stats.lock();
        stats.report(stats.last_end.unwrap_or(elapsed))
    }

    pub(crate) fn begin_turn(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self)
    }

    /// Counts an answered turn. `sent_tokens` is its prompt length if the server doesn't report
    /// one.
    pub(crate) fn count_turn(&self, measured: &MeasuredTurn, sent_tokens: u64, now: Duration) {
        let mut stats = self.stats.lock();
        let reply = &measured.finished.reply;
        let input = if reply.prompt_tokens > 0 { reply.prompt_tokens } else { sent_tokens };
        stats.last_end = Some(now);
        stats.counts.turns += 1;
        if let Some(kind) = measured.kind {
            *stats.counts.turns_by_kind.entry(kind).or_default() += 1;
        }
        stats.counts.input_tokens += input;
        stats.counts.output_tokens += reply.output_tokens;
        if let Some(cached) = measured.finished.cached_tokens {
            stats.counts.cached_tokens += cached;
            stats.caching_input += input;
        }
        stats.turn_us.saturating_record(micros(measured.total));
        if let Some(ttft) = measured.first_token {
            stats.ttft_us.saturating_record(micros(ttft));
        }
        for gap in &measured.gaps {
            stats.gap_us.saturating_record(micros(*gap));
        }
    }

    pub(crate) fn count_failure(&self, call: &str, failure: &CallFailure, now: Duration) {
        let mut stats = self.stats.lock();
        stats.last_end = Some(now);
        stats.counts.errors += 1;
        *stats.counts.errors_by_kind.entry(format!("{call}{failure}")).or_default() += 1;
    }

    /// Changes a figure that is counted directly.
    pub(crate) fn count(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.stats.lock().counts);
    }

    pub(crate) fn set_losses(&self, losses: Losses) {
        self.count(|report| {
            report.conversations_cut = losses.shortened;
            report.turns_cut = losses.turns;
            report.conversations_dropped = losses.dropped;
        });
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
impl Stats {
    fn report(&self, elapsed: Duration) -> Report {
        let ms = |histogram: &Histogram<u64>, quantile: f64| {
            round(histogram.value_at_quantile(quantile) as f64 / 1e3)
        };
        let seconds = elapsed.as_secs_f64();
        let per_second = |count: u64| round(count as f64 / seconds.max(1e-6));
        let counts = &self.counts;
        let cached = counts.cached_tokens as f64 / self.caching_input.max(1) as f64;
        Report {
            seconds: round(seconds),
            ttft_ms_p50: ms(&self.ttft_us, 0.50),
            ttft_ms_p90: ms(&self.ttft_us, 0.90),
            ttft_ms_p99: ms(&self.ttft_us, 0.99),
            ttft_ms_mean: round(self.ttft_us.mean() / 1e3),
            itl_ms_p50: ms(&self.gap_us, 0.50),
            itl_ms_p99: ms(&self.gap_us, 0.99),
            turn_ms_p50: ms(&self.turn_us, 0.50),
            turn_ms_p99: ms(&self.turn_us, 0.99),
            turns_per_s: per_second(counts.turns),
            input_tokens_per_s: per_second(counts.input_tokens),
            output_tokens_per_s: per_second(counts.output_tokens),
            cached_ratio: (self.caching_input > 0).then(|| (cached * 1e4).round() / 1e4),
            ..counts.clone()
        }
    }
}

impl Report {
    /// Formats the report as a table.
    pub fn table(&self) -> String {
        let mut rows: Vec<(&str, String)> = vec![
            ("time", format!("{:.1} s", self.seconds)),
            ("turns", format!("{} ({:.2}/s)", self.turns, self.turns_per_s)),
            (
                "conversations",
                format!("{} begun, {} finished", self.conversations, self.conversations_finished),
            ),
            ("ttft p50/p90/p99", {
                let (p50, p90, p99) = (self.ttft_ms_p50, self.ttft_ms_p90, self.ttft_ms_p99);
                format!("{p50:.1} / {p90:.1} / {p99:.1} ms")
            }),
            ("itl p50/p99", format!("{:.2} / {:.2} ms", self.itl_ms_p50, self.itl_ms_p99)),
            ("turn p50/p99", format!("{:.1} / {:.1} ms", self.turn_ms_p50, self.turn_ms_p99)),
            ("input tokens", format!("{} ({:.0}/s)", self.input_tokens, self.input_tokens_per_s)),
            (
                "output tokens",
                format!("{} ({:.0}/s)", self.output_tokens, self.output_tokens_per_s),
            ),
            (
                "cached input",
                self.cached_ratio
                    .map_or("not reported".to_owned(), |ratio| format!("{:.2} %", ratio * 100.0)),
            ),
            ("final context tokens", self.context_tokens.to_string()),
        ];
        if !self.turns_by_kind.is_empty() {
            let kinds = self.turns_by_kind.iter().map(|(kind, count)| format!("{kind} {count}"));
            rows.push(("turns by kind", kinds.collect::<Vec<_>>().join(", ")));
        }
        rows.push(("errors", self.errors.to_string()));
        let kinds = self.errors_by_kind.iter().map(|(kind, count)| format!("{kind} {count}"));
        rows.extend(kinds.map(|kind| ("", kind)));
        let rare = [
            ("retries after 429", self.retries),
            ("dropped (in-flight max)", self.dropped),
            ("late", self.late),
            ("given up at stop", self.unfinished),
            ("sessions opened", self.sessions_opened),
            ("sessions closed", self.sessions_closed),
            ("conversations cut", self.conversations_cut),
            ("turns cut off", self.turns_cut),
            ("conversations too long", self.conversations_dropped),
        ];
        let seen = rare.into_iter().filter(|(_, count)| *count > 0);
        rows.extend(seen.map(|(name, count)| (name, count.to_string())));
        let mut table = String::new();
        for (name, value) in rows {
            let _ = writeln!(table, "{name:<24}{value}");
        }
        table
    }

    /// Formats the report in one line.
    pub fn line(&self) -> String {
        let cached = self.cached_ratio.map_or(0.0, |ratio| ratio * 100.0);
        format!(
            "{} turns, {:.1}/s, {} in flight, ttft p50 {:.0} p99 {:.0} ms, cached {cached:.1} %, \
             {} errors",
            self.turns,
            self.turns_per_s,
            self.in_flight,
            self.ttft_ms_p50,
            self.ttft_ms_p99,
            self.errors,
        )
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::FinishedAnswer;
    use crate::dialog::AnswerContent;

    fn measured(millis: u64, cached_tokens: Option<u64>) -> MeasuredTurn {
        let reply =
            AnswerContent { prompt_tokens: 100, output_tokens: 10, ..AnswerContent::default() };
        MeasuredTurn {
            finished: FinishedAnswer { reply, cached_tokens },
            kind: (millis > 90).then_some(TurnKind::Pinned),
            first_token: Some(Duration::from_millis(millis)),
            gaps: vec![Duration::from_millis(5); 9],
            total: Duration::from_millis(millis + 45),
        }
    }

    #[test]
    fn figures_are_those_of_the_turns() {
        let live = LiveCounters::default();
        for millis in 1..=100 {
            live.count_turn(
                &measured(millis, (millis <= 50).then_some(90)),
                7,
                Duration::from_secs(10),
            );
        }
        live.count_failure("open_", &CallFailure::Timeout, Duration::from_secs(20));
        let report = live.final_report(Duration::from_secs(30));
        assert_eq!((report.turns, report.input_tokens, report.output_tokens), (100, 10_000, 1000));
        assert_eq!((report.seconds, report.turns_per_s, report.errors), (20.0, 5.0, 1));
        assert_eq!(report.errors_by_kind["open_timeout"], 1);
        assert_eq!(report.turns_by_kind, BTreeMap::from([(TurnKind::Pinned, 10)]));
        assert!(report.table().contains("pinned 10"), "{}", report.table());
        // The ratio covers only the half of the answers that report cached tokens.
        assert_eq!(report.cached_ratio, Some(0.9));
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.01;
        assert!(near(report.ttft_ms_p50, 50.0) && near(report.ttft_ms_p99, 99.0), "{report:?}");
        assert!(near(report.itl_ms_p50, 5.0) && near(report.turn_ms_p50, 95.0), "{report:?}");
        assert!(report.table().contains("open_timeout 1"));
    }

    #[test]
    fn turns_in_flight_are_counted_until_their_drop() {
        let live = LiveCounters::default();
        let turn = live.begin_turn();
        assert_eq!(live.report(Duration::ZERO).in_flight, 1);
        drop(turn);
        assert_eq!(live.report(Duration::ZERO).in_flight, 0);
    }
}
