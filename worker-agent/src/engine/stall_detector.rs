//! Detects an engine that is stalled: requests of a rank wait, and the rank runs none. Pure.
//!
//! A *rank* is a data parallel rank of the engine. A stall happens for example when sessions that
//! the agent doesn't know hold all of a rank's KV. [`StallDetector`] gets the load samples that the
//! agent reads from the engine. It returns a text for an operator, and does nothing about a stall.

use std::time::{Duration, Instant};

use super::{RankSample, Sample};

/// Watches the load samples of one engine.
#[derive(Debug, Default)]
pub struct StallDetector {
    /// For each data parallel rank: since when it has made no progress. `None` if it makes progress
    /// or has nothing to do.
    standstills: Vec<Option<Standstill>>,
}

/// A time in which a rank's requests wait, and the rank runs none and prefills nothing.
#[derive(Debug, Clone, Copy)]
struct Standstill {
    since: Instant,
    /// The rank's count of prefilled tokens during this time.
    prefilled: u64,
}

impl StallDetector {
    /// Takes a load sample. If a rank has made no progress for `stall_max` or longer, returns a
    /// text about it for an operator.
    pub fn check_sample(&mut self, sample: &Sample, stall_max: Duration) -> Option<String> {
        self.standstills.resize(sample.ranks.len(), None);
        let mut stall_text = None;
        for (rank, standstill) in sample.ranks.iter().zip(&mut self.standstills) {
            let only_waits = rank.num_waiting_reqs > 0 && rank.num_running_reqs == 0;
            let prefilled = rank.total_prefill_uncached_tokens;
            let new_standstill = Standstill { since: sample.at, prefilled };
            *standstill = match *standstill {
                _ if !only_waits => None,
                // The engine prefills a long prompt in chunks before it counts the request as
                // running. A changed counter is therefore progress.
                Some(known) if known.prefilled != prefilled => Some(new_standstill),
                Some(known) => Some(known),
                None => Some(new_standstill),
            };
            let stalled_for =
                standstill.map(|standstill| sample.at.saturating_duration_since(standstill.since));
            if stalled_for.is_some_and(|time| time >= stall_max) {
                stall_text = Some(describe_stall(rank, stall_max));
            }
        }
        stall_text
    }
}

fn describe_stall(rank: &RankSample, time: Duration) -> String {
    format!(
        "rank {} of the engine has run nothing for {} s while {} requests wait, with {} of {} \
         tokens in use: sessions that aren't this agent's may hold its rows or its KV; close them, \
         or restart the engine",
        rank.dp_rank,
        time.as_secs(),
        rank.num_waiting_reqs,
        rank.num_used_tokens,
        rank.max_total_num_tokens,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    fn sample(at: Instant, waiting: u64, running: u64, prefilled: u64) -> Sample {
        let rank = RankSample {
            dp_rank: 0,
            num_running_reqs: running,
            num_waiting_reqs: waiting,
            num_used_tokens: 0,
            max_total_num_tokens: 100,
            total_prefill_uncached_tokens: prefilled,
            total_prefill_busy_us: None,
            num_waiting_uncached_tokens: None,
        };
        Sample { at, ranks: vec![rank], connection: None }
    }

    #[test]
    fn an_engine_that_runs_nothing_while_turns_wait_is_stuck() {
        let start = service::clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut detector = StallDetector::default();
        assert_eq!(detector.check_sample(&sample(at(0), 1, 0, 5), STALL), None);
        assert_eq!(detector.check_sample(&sample(at(9), 1, 0, 5), STALL), None);
        let reason = detector.check_sample(&sample(at(10), 3, 0, 5), STALL).unwrap();
        assert!(reason.contains("3 requests wait"), "{reason}");
        assert_eq!(detector.check_sample(&sample(at(11), 3, 1, 5), STALL), None, "it runs again");
        assert_eq!(detector.check_sample(&sample(at(12), 3, 0, 5), STALL), None, "and counts anew");
    }

    #[test]
    fn a_long_prefill_is_no_stall() {
        let start = service::clock::now();
        let mut detector = StallDetector::default();
        for second in 0..100 {
            let at = start + Duration::from_secs(second);
            assert_eq!(detector.check_sample(&sample(at, 2, 0, second / 5), STALL), None);
        }
    }
}
