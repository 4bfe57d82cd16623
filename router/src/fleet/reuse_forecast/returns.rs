//! Estimates the probability that an idle session returns, from observed idle times. Pure.
//!
//! A session *returns* when it sends its next turn, and *ends* when it is closed or forgotten. The
//! estimate is that of Aalen and Johansen: for each class of idle times it takes the sessions whose
//! idle time reached the class, and counts how many of them returned within it and how many ended.
//! A session that is still idle counts in the classes that its idle time has passed.
//!
//! While there are few observations, a *prior* decides. It comes from published *gaps* (idle times
//! between two turns) of coding agents.

use std::time::{Duration, Instant};

use contract::gaps;

/// Lower bounds of the classes. Most classes are narrower than a factor of two, because clients
/// have timers, so many gaps have the same length.
const CLASS_BOUNDS_S: [u64; CLASS_COUNT] = [
    0, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 120, 180, 240, 300, 420, 540, 600, 660, 780,
    900, 1200, 1800, 2700, 3600, 7200, 14_400,
];
const CLASS_COUNT: usize = 30;

/// The prior weighs as much as so many observed sessions in each class.
const PRIOR_SESSIONS: f64 = 10.0;
/// Share of the turns that are the last of their session. A session has about 65 turns in the mean
/// (44 in the median).
const LAST_TURN_RATIO: f64 = 1.0 / 65.0;
/// Recorded returns beyond which all counts are halved. New observations then weigh more than old
/// ones, because a fleet's habits change within days.
const RETURNS_MAX: f64 = 20_000.0;
/// In this time, too few observations come to change the estimate much.
const ESTIMATE_AGE_MAX: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub(in crate::fleet) struct ReturnEstimator {
    returned_counts: [f64; CLASS_COUNT],
    ended_counts: [f64; CLASS_COUNT],
    /// By class: probability that a session that reached the class returns.
    chance_milli: [u64; CLASS_COUNT],
    /// By class: rate at which a session in the class returns, in millionths per second.
    rate_micro: [u64; CLASS_COUNT],
    estimated_at: Option<Instant>,
}

impl Default for ReturnEstimator {
    fn default() -> Self {
        let mut estimator = Self {
            returned_counts: [0.0; CLASS_COUNT],
            ended_counts: [0.0; CLASS_COUNT],
            chance_milli: [0; CLASS_COUNT],
            rate_micro: [0; CLASS_COUNT],
            estimated_at: None,
        };
        estimator.estimate(&[0.0; CLASS_COUNT]);
        estimator
    }
}

impl ReturnEstimator {
    pub(in crate::fleet) fn record_return(&mut self, idle_time: Duration) {
        self.returned_counts[class_of(idle_time)] += 1.0;
        if self.returned_counts.iter().sum::<f64>() > RETURNS_MAX {
            for count in self.returned_counts.iter_mut().chain(&mut self.ended_counts) {
                *count /= 2.0;
            }
        }
    }

    pub(in crate::fleet) fn record_end(&mut self, idle_time: Duration) {
        self.ended_counts[class_of(idle_time)] += 1.0;
    }

    /// Does nothing while the estimate is recent. `idle_times` are of sessions that are idle now.
    pub(in crate::fleet) fn update_estimate(
        &mut self,
        idle_times: impl Iterator<Item = Duration>,
        now: Instant,
    ) {
        let age = self.estimated_at.map(|at| now.saturating_duration_since(at));
        if age.is_some_and(|age| age < ESTIMATE_AGE_MAX) {
            return;
        }
        self.estimated_at = Some(now);
        let mut idle_counts = [0.0; CLASS_COUNT];
        for idle_time in idle_times {
            idle_counts[class_of(idle_time)] += 1.0;
        }
        self.estimate(&idle_counts);
    }

    pub(in crate::fleet) fn chance_milli(&self, idle_time: Duration) -> u64 {
        self.chance_milli[class_of(idle_time)]
    }

    pub(in crate::fleet) fn rate_micro(&self, idle_time: Duration) -> u64 {
        self.rate_micro[class_of(idle_time)]
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a chance lies between 0 and 1"
    )]
    fn estimate(&mut self, idle_counts: &[f64; CLASS_COUNT]) {
        // `passed_count` is the number of sessions whose idle time passed the whole current class.
        let mut passed_count = 0.0;
        let mut chance = 0.0;
        for class in (0..CLASS_COUNT).rev() {
            let reached_count =
                passed_count + self.returned_counts[class] + self.ended_counts[class];
            let prior_returns = PRIOR_SESSIONS * prior_return_share(class);
            let return_share =
                (self.returned_counts[class] + prior_returns) / (reached_count + PRIOR_SESSIONS);
            let end_share = self.ended_counts[class] / (reached_count + PRIOR_SESSIONS);
            chance = return_share + (1.0 - return_share - end_share) * chance;
            self.chance_milli[class] = (chance * 1e3).round() as u64;
            self.rate_micro[class] = (return_share * 1e6 / class_width_s(class)).round() as u64;
            // A session that is still idle in this class has passed all shorter classes.
            passed_count = reached_count + idle_counts[class];
        }
    }
}

/// The last class has no upper bound. Its width is assumed to equal its lower bound.
fn class_width_s(class: usize) -> f64 {
    let lower_s = CLASS_BOUNDS_S[class];
    CLASS_BOUNDS_S.get(class + 1).map_or(lower_s, |upper_s| upper_s - lower_s) as f64
}

/// Share of the sessions whose idle time reaches the class that return within it, by the published
/// gaps.
fn prior_return_share(class: usize) -> f64 {
    let share_of_longer_gaps = |bound| gaps::longer_share(Duration::from_secs(bound));
    let reaching_share = share_of_longer_gaps(CLASS_BOUNDS_S[class]);
    let passing_share =
        CLASS_BOUNDS_S.get(class + 1).map_or(0.0, |&bound| share_of_longer_gaps(bound));
    let will_return = (1.0 - LAST_TURN_RATIO) * reaching_share;
    (1.0 - LAST_TURN_RATIO) * (reaching_share - passing_share) / (will_return + LAST_TURN_RATIO)
}

fn class_of(idle_time: Duration) -> usize {
    CLASS_BOUNDS_S.partition_point(|&bound| bound <= idle_time.as_secs()) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::start;

    fn chance(returns: &ReturnEstimator, seconds: u64) -> u64 {
        returns.chance_milli(Duration::from_secs(seconds))
    }

    #[test]
    fn without_own_gaps_the_published_ones_count() {
        let returns = ReturnEstimator::default();
        let chances: Vec<u64> = [0, 60, 600, 3600].map(|idle| chance(&returns, idle)).into();
        assert!(chances.is_sorted_by(|a, b| a > b), "{chances:?}");
        assert!(chances[0] > 970 && (600..850).contains(&chances[2]), "{chances:?}");
    }

    #[test]
    fn a_fleet_that_always_returns_within_a_minute_is_believed() {
        let mut returns = ReturnEstimator::default();
        for _ in 0..500 {
            returns.record_return(Duration::from_secs(50));
        }
        // Sessions that ended and were forgotten.
        for _ in 0..100 {
            returns.record_end(Duration::from_secs(3600));
        }
        returns.update_estimate(std::iter::empty(), start());
        assert!(chance(&returns, 40) > 750, "{}", chance(&returns, 40));
        assert!(chance(&returns, 600) < 120, "{}", chance(&returns, 600));
    }

    #[test]
    fn returns_come_at_the_pace_that_was_seen() {
        let mut returns = ReturnEstimator::default();
        for _ in 0..10_000 {
            returns.record_return(Duration::from_secs(50));
        }
        returns.update_estimate(std::iter::empty(), start());
        let rate = |seconds| returns.rate_micro(Duration::from_secs(seconds));
        assert!((45_000..=50_000).contains(&rate(50)), "all return within 20 s: {}", rate(50));
        assert!(rate(20) < 500 && rate(1_000) < 5_000, "{} {}", rate(20), rate(1_000));
    }

    #[test]
    fn what_is_closed_says_nothing_about_those_that_stay() {
        let mut returns = ReturnEstimator::default();
        for _ in 0..500 {
            returns.record_return(Duration::from_secs(300));
            returns.record_end(Duration::ZERO);
        }
        returns.update_estimate(std::iter::empty(), start());
        assert!(chance(&returns, 240) > 950, "{}", chance(&returns, 240));
    }

    #[test]
    fn chances_fall_the_longer_a_session_is_idle() {
        let mut returns = ReturnEstimator::default();
        for gap in 0..2_000_u64 {
            returns.record_return(Duration::from_secs(gap * gap % 4_001));
            returns.record_end(Duration::from_secs(gap * 7 % 9_001));
        }
        returns.update_estimate([Duration::from_secs(5000)].into_iter(), start());
        // All but the last class, which no session reached.
        let reached = &CLASS_BOUNDS_S[..CLASS_COUNT - 1];
        let all: Vec<u64> = reached.iter().map(|&bound| chance(&returns, bound)).collect();
        assert!(all.is_sorted_by(|a, b| a >= b), "{all:?}");
    }
}
