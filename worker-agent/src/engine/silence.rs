//! Detects a silent engine: its process runs, but it has said nothing for too long.
//!
//! A hung scheduler is not visible over HTTP, because another process of the engine answers
//! `/v1/loads` from the scheduler's newest snapshot. So two kinds of signs are watched: the HTTP
//! server answers; each DP rank's scheduler takes a new snapshot, or its shim sends something, at
//! least a heartbeat each second. An answer to a turn that goes on or ends is a sign of both, but
//! only a count without a time.
//!
//! A scheduler says nothing during a step, so a long prefill is allowed for. A paused engine takes
//! no snapshots, but it is not silent: it says that it is paused. No I/O, no clock: each sign has
//! its own time.

use std::time::{Duration, Instant};

use super::LoadSample;

/// While no other sign comes, answers are looked at this many times until the engine is silent. A
/// sign in an answer counts as new at the next look.
const LOOKS_MIN: u32 = 4;

#[derive(Debug)]
pub struct SilenceDetector {
    silent_max: Duration,
    /// `None` while no process is known.
    answered_at: Option<Instant>,
    ranks: Vec<RankSigns>,
    reason: Option<String>,
    /// No sign is missing before this time. `None` while the engine is silent, or unknown.
    next_check: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct RankSigns {
    /// A time of the engine's clock.
    snapshot_us: Option<u64>,
    spoke_at: Instant,
    /// The count at the last look.
    answer_signs: u64,
}

impl SilenceDetector {
    #[must_use]
    pub fn new(silent_max: Duration) -> Self {
        Self { silent_max, answered_at: None, ranks: vec![], reason: None, next_check: None }
    }

    /// Called when the engine is down, or another process answers.
    pub fn reset(&mut self) {
        *self = Self::new(self.silent_max);
    }

    pub fn record_sample(&mut self, sample: &LoadSample) {
        self.answered_at = Some(sample.at);
        self.ranks.truncate(sample.ranks.len());
        for (index, rank) in sample.ranks.iter().enumerate() {
            let snapshot_us = rank.snapshot_us();
            match self.ranks.get_mut(index) {
                None => {
                    let (spoke_at, answer_signs) = (sample.at, 0);
                    self.ranks.push(RankSigns { snapshot_us, spoke_at, answer_signs });
                }
                // An engine whose snapshots have no time is only known to answer.
                Some(signs)
                    if signs.snapshot_us != snapshot_us
                        || snapshot_us.is_none()
                        || sample.is_paused =>
                {
                    *signs = RankSigns { snapshot_us, spoke_at: sample.at, ..*signs };
                }
                Some(_) => {}
            }
        }
        self.schedule(sample.at);
    }

    pub fn record_answers(&mut self, at: Instant, count: impl Fn(u32) -> u64) {
        for (dp_rank, signs) in (0..).zip(&mut self.ranks) {
            let answer_signs = count(dp_rank);
            if signs.answer_signs != answer_signs {
                (signs.answer_signs, signs.spoke_at) = (answer_signs, signs.spoke_at.max(at));
                self.answered_at = self.answered_at.max(Some(at));
            }
        }
    }

    /// Only what the scheduler's thread made is a sign.
    pub fn record_shim(&mut self, dp_rank: u32, at: Instant) {
        if let Some(signs) = self.ranks.get_mut(dp_rank as usize) {
            signs.spoke_at = signs.spoke_at.max(at);
        }
        self.schedule(at);
    }

    /// `prefill_time` estimates how long a rank's scheduler is in a step that began at a time.
    /// Returns true if the engine has become silent, or speaks again.
    pub fn check(&mut self, now: Instant, prefill_time: impl Fn(u32, Instant) -> Duration) -> bool {
        let Some(answered_at) = self.answered_at else { return false };
        if self.next_check.is_some_and(|next| now < next) {
            return self.set_reason(None);
        }
        let mut next_check = answered_at + self.silent_max;
        let mut reason = (next_check <= now)
            .then(|| format!("it has answered nothing for {} s", self.silent_max.as_secs_f64()));
        for (dp_rank, signs) in (0..).zip(&self.ranks) {
            let mut limit = signs.spoke_at + self.silent_max;
            if limit <= now {
                limit += prefill_time(dp_rank, signs.spoke_at);
            }
            if limit <= now {
                let silent_s = now.saturating_duration_since(signs.spoke_at).as_secs();
                reason.get_or_insert(format!(
                    "its scheduler of rank {dp_rank} has done nothing for {silent_s} s"
                ));
            }
            next_check = next_check.min(limit);
        }
        let next_look = now + self.silent_max / LOOKS_MIN;
        self.next_check = reason.is_none().then_some(next_check.min(next_look));
        self.set_reason(reason)
    }

    #[must_use]
    pub fn reason(&self) -> Option<&String> {
        self.reason.as_ref()
    }

    #[must_use]
    pub fn next_check(&self) -> Option<Instant> {
        self.next_check
    }

    /// `now` is the time of the newest sign.
    fn schedule(&mut self, now: Instant) {
        let signs = self.ranks.iter().map(|signs| signs.spoke_at).chain(self.answered_at);
        let missing_at = signs.min().map(|oldest| oldest + self.silent_max);
        let next_look = now + self.silent_max / LOOKS_MIN;
        self.next_check = missing_at.map(|missing_at| missing_at.min(next_look));
    }

    /// While the engine stays silent, the first reason stays too.
    fn set_reason(&mut self, reason: Option<String>) -> bool {
        let has_changed = self.reason.is_some() != reason.is_some();
        if has_changed {
            self.reason = reason;
        }
        has_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::RankSample;

    const SILENT: Duration = Duration::from_secs(10);

    struct Rig {
        detector: SilenceDetector,
        start: Instant,
        prefill: Duration,
    }

    impl Rig {
        fn new() -> Self {
            let detector = SilenceDetector::new(SILENT);
            Self { detector, start: service::clock::now(), prefill: Duration::ZERO }
        }

        fn at(&self, seconds: f64) -> Instant {
            self.start + Duration::from_secs_f64(seconds)
        }

        /// Takes a sample of two ranks whose snapshots have these times.
        fn sample(&mut self, seconds: f64, snapshots: [f64; 2], is_paused: bool) {
            let rank = |dp_rank, timestamp| RankSample {
                dp_rank,
                num_running_reqs: 0,
                num_waiting_reqs: 0,
                num_used_tokens: 0,
                max_total_num_tokens: 1,
                total_prefill_uncached_tokens: 0,
                total_prefill_busy_us: None,
                num_waiting_uncached_tokens: None,
                timestamp,
            };
            let ranks = vec![rank(0, snapshots[0]), rank(1, snapshots[1])];
            let at = self.at(seconds);
            self.detector.record_sample(&LoadSample { at, ranks, connection: None, is_paused });
        }

        fn is_silent(&mut self, seconds: f64) -> bool {
            let (now, prefill) = (self.at(seconds), self.prefill);
            self.detector.check(now, |_, _| prefill);
            self.detector.reason().is_some()
        }
    }

    #[test]
    fn an_engine_that_answers_nothing_is_silent_until_it_speaks_again() {
        let mut rig = Rig::new();
        assert!(!rig.is_silent(1000.0), "no process is known");
        rig.sample(0.0, [1.0, 1.0], false);
        assert!(!rig.is_silent(9.9));
        assert_eq!(rig.detector.next_check(), Some(rig.at(10.0)));
        assert!(rig.is_silent(10.0));
        assert!(rig.detector.reason().unwrap().contains("answered nothing"));
        rig.sample(30.0, [2.0, 2.0], false);
        assert!(!rig.is_silent(30.0));
    }

    #[test]
    fn a_hung_scheduler_is_seen_behind_a_server_that_answers() {
        let mut rig = Rig::new();
        for second in 0..=100 {
            let second = f64::from(second);
            rig.sample(second, [second, second.min(20.0)], false);
            assert_eq!(rig.is_silent(second), second >= 30.0, "at {second} s");
        }
        assert!(rig.detector.reason().unwrap().contains("rank 1"));
        rig.sample(101.0, [101.0, 101.0], false);
        assert!(!rig.is_silent(101.0));
    }

    #[test]
    fn a_long_prefill_is_no_silence() {
        let mut rig = Rig::new();
        rig.prefill = Duration::from_secs(15);
        for second in 0..=24 {
            rig.sample(f64::from(second), [1.0, 1.0], false);
            assert!(!rig.is_silent(f64::from(second)), "at {second} s");
        }
        rig.sample(25.0, [1.0, 1.0], false);
        assert!(rig.is_silent(25.0));
    }

    #[test]
    fn a_paused_engine_is_not_silent() {
        let mut rig = Rig::new();
        for second in 0..100 {
            rig.sample(f64::from(second), [1.0, 1.0], true);
            assert!(!rig.is_silent(f64::from(second)));
        }
        rig.sample(100.0, [1.0, 1.0], false);
        assert!(!rig.is_silent(108.0), "it goes on from here");
        assert!(rig.is_silent(109.5));
    }

    #[test]
    fn a_shims_heartbeat_is_a_sign_of_its_rank_only() {
        let mut rig = Rig::new();
        for second in 0..=9 {
            rig.sample(f64::from(second), [1.0, 1.0], false);
            rig.detector.record_shim(0, rig.at(f64::from(second)));
            rig.detector.record_shim(1, rig.at(f64::from(second).min(5.0)));
        }
        assert!(!rig.is_silent(14.9));
        rig.sample(15.0, [1.0, 1.0], false);
        assert!(rig.is_silent(15.0));
        assert!(rig.detector.reason().unwrap().contains("rank 1"));
        rig.detector.record_shim(1, rig.at(15.5));
        assert!(!rig.is_silent(15.5));
    }

    #[test]
    fn an_engine_that_answers_turns_is_not_silent_though_its_snapshots_stand_still() {
        let mut rig = Rig::new();
        for second in 0..=60 {
            let time = f64::from(second);
            if second % 2 == 0 {
                rig.sample(time, [1.0, 1.0], false);
            }
            // Rank 1 goes on with an answer until 30 s.
            let counts = [0, u64::from(second.min(30_u32))];
            rig.detector.record_answers(rig.at(time), |dp_rank| counts[dp_rank as usize]);
            rig.detector.record_shim(0, rig.at(time));
            assert_eq!(rig.is_silent(time), second >= 40, "at {second} s");
        }
        assert!(rig.detector.reason().unwrap().contains("rank 1"));
        rig.detector.record_answers(rig.at(61.0), |dp_rank| u64::from(dp_rank) * 31);
        assert!(!rig.is_silent(61.0), "it goes on");
    }

    #[test]
    fn a_server_that_sends_an_answer_answers() {
        let mut rig = Rig::new();
        rig.sample(0.0, [1.0, 1.0], false);
        let mut time = rig.detector.next_check().unwrap();
        let mut looks = 0;
        while time <= rig.at(30.0) {
            // Both ranks go on with answers until 15 s, and no sample comes.
            let count = u64::from(looks.min(5_u32));
            rig.detector.record_answers(time, |_| count);
            rig.detector.check(time, |_, _| Duration::ZERO);
            assert_eq!(rig.detector.reason().is_some(), time >= rig.at(25.0), "look {looks}");
            looks += 1;
            time = rig.detector.next_check().unwrap_or(time + SILENT);
        }
        assert!(looks > 4, "answers are looked at often enough");
    }

    #[test]
    fn an_engine_whose_snapshots_have_no_time_only_has_to_answer() {
        let mut rig = Rig::new();
        for second in 0..100 {
            rig.sample(f64::from(second), [0.0, 0.0], false);
            assert!(!rig.is_silent(f64::from(second)));
        }
    }
}
