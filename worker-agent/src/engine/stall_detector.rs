//! Detects a stalled engine: requests of a data parallel rank wait, and the rank runs none.
//!
//! For example, sessions that the agent didn't open hold all of a rank's KV. No I/O, no clock: a
//! sample has its own time.

use std::time::{Duration, Instant};

use super::{LoadSample, RankSample};

#[derive(Debug, Default)]
pub struct StallDetector {
    /// `None` for a rank that makes progress or has nothing to do.
    standstills: Vec<Option<Standstill>>,
}

/// A time in which a rank's requests wait, and the rank runs none and prefills nothing.
#[derive(Debug, Clone, Copy)]
struct Standstill {
    since: Instant,
    prefilled_tokens: u64,
}

impl StallDetector {
    /// The text is for an operator.
    pub fn check_sample(&mut self, sample: &LoadSample, stall_max: Duration) -> Option<String> {
        self.standstills.resize(sample.ranks.len(), None);
        let mut stall_text = None;
        for (rank, standstill) in sample.ranks.iter().zip(&mut self.standstills) {
            let waits_and_runs_none = rank.num_waiting_reqs > 0 && rank.num_running_reqs == 0;
            let prefilled_tokens = rank.total_prefill_uncached_tokens;
            let new_standstill = Standstill { since: sample.at, prefilled_tokens };
            *standstill = match *standstill {
                _ if !waits_and_runs_none || sample.is_paused => None,
                // The engine prefills a long prompt in chunks before it counts the request as
                // running. A changed counter is therefore progress.
                Some(ongoing) if ongoing.prefilled_tokens != prefilled_tokens => {
                    Some(new_standstill)
                }
                Some(ongoing) => Some(ongoing),
                None => Some(new_standstill),
            };
            let standstill_time =
                standstill.map(|standstill| sample.at.saturating_duration_since(standstill.since));
            if standstill_time.is_some_and(|duration| duration >= stall_max) {
                stall_text = Some(describe_stall(rank, stall_max));
            }
        }
        stall_text
    }
}

fn describe_stall(rank: &RankSample, stalled_for_min: Duration) -> String {
    format!(
        "rank {} of the engine has run nothing for {} s while {} requests wait, with {} of {} \
         tokens in use: sessions that aren't this agent's may hold its rows or its KV; close them, \
         or restart the engine",
        rank.dp_rank,
        stalled_for_min.as_secs(),
        rank.num_waiting_reqs,
        rank.num_used_tokens,
        rank.max_total_num_tokens,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(10);

    fn sample(at: Instant, waiting: u64, running: u64, prefilled: u64) -> LoadSample {
        let rank = RankSample {
            dp_rank: 0,
            num_running_reqs: running,
            num_waiting_reqs: waiting,
            num_used_tokens: 0,
            max_total_num_tokens: 100,
            total_prefill_uncached_tokens: prefilled,
            total_prefill_busy_us: None,
            num_waiting_uncached_tokens: None,
            timestamp: 0.0,
        };
        LoadSample { at, ranks: vec![rank], connection: None, is_paused: false }
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
