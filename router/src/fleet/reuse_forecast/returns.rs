//! Estimates the probability that an idle session returns, from observed idle times. Pure.
//!
//! The estimate is that of Aalen and Johansen over classes of idle time: of the sessions that
//! reached a class, how many returned in it, and how many ended in it. Sessions that are still idle
//! count in the classes they have passed. Until there are observations, published gaps of coding
//! agents are used.

use std::time::{Duration, Instant};

/// Lower bounds of the classes, in seconds. Finer than a factor of two, because clients have
/// timers.
const BOUNDS_S: [u64; CLASSES] = [
    0, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 120, 180, 240, 300, 420, 540, 600, 660, 780,
    900, 1200, 1800, 2700, 3600, 7200, 14_400,
];
const CLASSES: usize = 30;

/// Number of observed sessions that the published gaps count for.
const PRIOR_SESSIONS: f64 = 10.0;
/// Parameters of the published gaps, `(1 + t / 10 s)^-0.75`: half of the turns come within 10 s, 80
/// % within 60 s, 93 % within 300 s, 99.5 % within an hour.
const GAP_SCALE_S: f64 = 10.0;
const GAP_POWER: f64 = -0.75;
/// Ratio of turns that are the last of their session. Sessions have a median of 44 turns and a mean
/// of about 65.
const LAST_TURN_RATIO: f64 = 1.0 / 65.0;
/// Number of observations beyond which old ones are halved. A fleet's habits change within days.
const OBSERVATIONS_MAX: f64 = 20_000.0;
/// How often the estimate is renewed. It takes hundreds of gaps to change it.
const ESTIMATE_AGE_MAX: Duration = Duration::from_secs(5);

/// The observations, and the estimate made from them.
#[derive(Debug, Clone)]
pub(super) struct Returns {
    /// By class: number of idle times that ended in it by a return.
    returned: [f64; CLASSES],
    /// By class: number of idle times that ended in it without a return.
    ended: [f64; CLASSES],
    /// By class: probability, in thousandths, that a session that reached the class returns.
    chance_milli: [u64; CLASSES],
    /// By class: rate at which such a session returns, in millionths per second.
    rate_micro: [u64; CLASSES],
    estimated_at: Option<Instant>,
}

impl Default for Returns {
    fn default() -> Self {
        let mut returns = Self {
            returned: [0.0; CLASSES],
            ended: [0.0; CLASSES],
            chance_milli: [0; CLASSES],
            rate_micro: [0; CLASSES],
            estimated_at: None,
        };
        returns.estimate(&[0.0; CLASSES]);
        returns
    }
}

impl Returns {
    /// Records that a session returned after being idle for `idle`.
    pub(super) fn record_return(&mut self, idle: Duration) {
        self.returned[class_of(idle)] += 1.0;
        if self.returned.iter().sum::<f64>() > OBSERVATIONS_MAX {
            for count in self.returned.iter_mut().chain(&mut self.ended) {
                *count /= 2.0;
            }
        }
    }

    /// Records that a session was closed or forgotten after being idle for `idle`.
    pub(super) fn record_end(&mut self, idle: Duration) {
        self.ended[class_of(idle)] += 1.0;
    }

    /// Renews the estimate if it is old. `idle` has the idle times of the sessions that are idle
    /// now.
    pub(super) fn update_estimate(&mut self, idle: impl Iterator<Item = Duration>, now: Instant) {
        let age = self.estimated_at.map(|at| now.saturating_duration_since(at));
        if age.is_some_and(|age| age < ESTIMATE_AGE_MAX) {
            return;
        }
        self.estimated_at = Some(now);
        let mut waiting = [0.0; CLASSES];
        for idle in idle {
            waiting[class_of(idle)] += 1.0;
        }
        self.estimate(&waiting);
    }

    /// Returns the probability, in thousandths, that a session idle for `idle` returns.
    pub(super) fn chance_milli(&self, idle: Duration) -> u64 {
        self.chance_milli[class_of(idle)]
    }

    /// Returns the rate, in millionths per second, at which a session idle for `idle` returns.
    pub(super) fn rate_micro(&self, idle: Duration) -> u64 {
        self.rate_micro[class_of(idle)]
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a chance lies between 0 and 1"
    )]
    fn estimate(&mut self, waiting: &[f64; CLASSES]) {
        // From the last class back; `beyond` counts the sessions that passed the current class.
        let mut beyond = 0.0;
        let mut chance = 0.0;
        for class in (0..CLASSES).rev() {
            let reached = beyond + self.returned[class] + self.ended[class];
            let prior = PRIOR_SESSIONS * prior_hazard(class);
            let returns = (self.returned[class] + prior) / (reached + PRIOR_SESSIONS);
            let ends = self.ended[class] / (reached + PRIOR_SESSIONS);
            chance = returns + (1.0 - returns - ends) * chance;
            self.chance_milli[class] = (chance * 1e3).round() as u64;
            self.rate_micro[class] = (returns * 1e6 / width_s(class)).round() as u64;
            // A session that waits in this class has passed all classes before it.
            beyond = reached + waiting[class];
        }
    }
}

/// Returns the width of a class in seconds. The last class is as wide as all before it together.
fn width_s(class: usize) -> f64 {
    let from = BOUNDS_S[class];
    BOUNDS_S.get(class + 1).map_or(from, |to| to - from) as f64
}

/// Returns the share of the sessions reaching a class that return in it, by the published gaps.
fn prior_hazard(class: usize) -> f64 {
    let later = |bound: u64| (1.0 + bound as f64 / GAP_SCALE_S).powf(GAP_POWER);
    let from = later(BOUNDS_S[class]);
    let to = BOUNDS_S.get(class + 1).map_or(0.0, |&bound| later(bound));
    let alive = (1.0 - LAST_TURN_RATIO) * from;
    (1.0 - LAST_TURN_RATIO) * (from - to) / (alive + LAST_TURN_RATIO)
}

fn class_of(idle: Duration) -> usize {
    BOUNDS_S.partition_point(|&bound| bound <= idle.as_secs()) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::start;

    fn chance(returns: &Returns, seconds: u64) -> u64 {
        returns.chance_milli(Duration::from_secs(seconds))
    }

    #[test]
    fn without_own_gaps_the_published_ones_count() {
        let returns = Returns::default();
        let chances: Vec<u64> = [0, 60, 600, 3600].map(|idle| chance(&returns, idle)).into();
        assert!(chances.is_sorted_by(|a, b| a > b), "{chances:?}");
        assert!(chances[0] > 970 && (600..850).contains(&chances[2]), "{chances:?}");
    }

    #[test]
    fn a_fleet_that_always_returns_within_a_minute_is_believed() {
        let mut returns = Returns::default();
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
        let mut returns = Returns::default();
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
        let mut returns = Returns::default();
        for _ in 0..500 {
            returns.record_return(Duration::from_secs(300));
            returns.record_end(Duration::ZERO);
        }
        returns.update_estimate(std::iter::empty(), start());
        assert!(chance(&returns, 240) > 950, "{}", chance(&returns, 240));
    }

    #[test]
    fn chances_fall_the_longer_a_session_is_idle() {
        let mut returns = Returns::default();
        for gap in 0..2_000_u64 {
            returns.record_return(Duration::from_secs(gap * gap % 4_001));
            returns.record_end(Duration::from_secs(gap * 7 % 9_001));
        }
        returns.update_estimate([Duration::from_secs(5000)].into_iter(), start());
        // All but the last class, which no session reached.
        let reached = &BOUNDS_S[..CLASSES - 1];
        let all: Vec<u64> = reached.iter().map(|&bound| chance(&returns, bound)).collect();
        assert!(all.is_sorted_by(|a, b| a >= b), "{all:?}");
    }
}
