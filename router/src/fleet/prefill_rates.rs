//! Estimates how fast each worker computes prompts, also one that has computed none yet. Pure.
//!
//! An agent measures the rate while turns run. If only the measurement counted, a worker that was
//! never used would be assumed to be slow, and would never be used. Nor would one whose first turns
//! were slow, because the engine compiled kernels meanwhile. So a worker is expected to be as fast
//! as workers of the same *kind*. Its own measurement counts as far as it differs from its kind by
//! more than measurements of equal workers differ, and the less the older it is.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    num::NonZeroU64,
    sync::Arc,
};

use contract::load::Figure;

use super::agent::Agent;

/// How much faster or slower than its kind a worker is measured without being so. The length of the
/// prompts and other programs on the machine move the measured rate that much.
const NOISE_PERCENT: u64 = 25;
/// Time in which a measurement loses half of its weight. A worker that was slow for a while gets
/// turns again, and is measured again.
const HALF_LIFE_MS: u64 = 600_000;
const WHOLE_MILLI: u64 = 1000;

/// A hash of what makes workers equally fast: the names of their models and of their devices.
type Kind = u64;

/// In tokens per second.
#[derive(Debug, Clone, Default)]
pub(super) struct PrefillRates {
    /// The median measured rate of each kind.
    by_kind: HashMap<Kind, NonZeroU64>,
    /// The median of all measured rates. `None` if none was measured.
    of_fleet: Option<NonZeroU64>,
}

impl PrefillRates {
    pub(super) fn collect(agents: &[Arc<Agent>]) -> Self {
        let mut by_kind: HashMap<Kind, Vec<NonZeroU64>> = HashMap::new();
        for agent in agents.iter().filter(|agent| agent.is_up()) {
            for rank in agent.report.iter().flat_map(|(report, _)| &report.ranks) {
                let rate = rank.prefill_tokens_per_s.and_then(|rate| NonZeroU64::new(rate.value));
                if let (Some(rate), Some(kind)) = (rate, kind(agent, rank.dp_rank)) {
                    by_kind.entry(kind).or_default().push(rate);
                }
            }
        }
        let of_fleet = middle(by_kind.values().flatten().copied().collect());
        let by_kind = by_kind.into_iter();
        let by_kind = by_kind.filter_map(|(kind, rates)| Some((kind, middle(rates)?))).collect();
        Self { by_kind, of_fleet }
    }

    /// Whether the agent has measured a rate where none of the kind was known. Until they are
    /// collected again, that worker alone seems to be as fast as it is, and draws the turns of its
    /// equals.
    pub(super) fn lack_kind_of(&self, agent: &Agent) -> bool {
        let ranks = agent.report.iter().flat_map(|(report, _)| &report.ranks);
        ranks.filter(|rank| rank.prefill_tokens_per_s.is_some_and(|rate| rate.value > 0)).any(
            |rank| kind(agent, rank.dp_rank).is_some_and(|kind| !self.by_kind.contains_key(&kind)),
        )
    }

    pub(super) fn expected(
        &self,
        agent: &Agent,
        dp_rank: u32,
        measured: Option<Figure>,
    ) -> Option<NonZeroU64> {
        let of_kind = kind(agent, dp_rank).and_then(|kind| self.by_kind.get(&kind).copied());
        let own = measured.and_then(|rate| NonZeroU64::new(rate.value));
        match (own, of_kind.or(self.of_fleet)) {
            (Some(own), Some(typical)) => {
                Some(weigh(own, typical, measured.map_or(0, |rate| rate.age_ms)))
            }
            (own, typical) => own.or(typical),
        }
    }
}

fn kind(agent: &Agent, dp_rank: u32) -> Option<Kind> {
    let description = &agent.facts.as_ref()?.description;
    let devices = &description.ranks.get(dp_rank as usize)?.devices;
    let mut hasher = DefaultHasher::new();
    description.engine.models.hash(&mut hasher);
    devices.iter().for_each(|device| device.name.hash(&mut hasher));
    Some(hasher.finish())
}

/// The higher one of two in the middle.
fn middle(mut rates: Vec<NonZeroU64>) -> Option<NonZeroU64> {
    rates.sort_unstable();
    rates.get(rates.len() / 2).copied()
}

fn weigh(own: NonZeroU64, typical: NonZeroU64, age_ms: u32) -> NonZeroU64 {
    let (own, typical) = (own.get(), typical.get());
    let with_noise = |rate: u64| rate.saturating_mul(100 + NOISE_PERCENT) / 100;
    let without_noise = |rate: u64| rate.saturating_mul(100) / (100 + NOISE_PERCENT);
    let surely =
        if own < typical { with_noise(own).min(typical) } else { without_noise(own).max(typical) };
    let half_lives = u64::from(age_ms) / HALF_LIFE_MS;
    let weight_milli = WHOLE_MILLI >> half_lives.min(63);
    // The time for a token is what is averaged: with rates, a slow worker would seem too fast.
    let (surely, typical) = (u128::from(surely), u128::from(typical));
    let (own_milli, typical_milli) = (weight_milli, WHOLE_MILLI - weight_milli);
    let divisor = u128::from(own_milli) * typical + u128::from(typical_milli) * surely;
    let rate = u128::from(WHOLE_MILLI) * surely * typical / divisor.max(1);
    NonZeroU64::new(u64::try_from(rate).unwrap_or(u64::MAX)).unwrap_or(NonZeroU64::MIN)
}

#[cfg(test)]
mod tests {
    use contract::load::Source;

    use super::*;
    use crate::fleet::{
        state::Update,
        testing::{fleet, report, start},
        worker::{AgentKey, WorkerRef},
    };

    fn rate(value: u64) -> NonZeroU64 {
        NonZeroU64::new(value).expect("not 0")
    }

    #[test]
    fn a_worker_without_a_measurement_is_as_fast_as_its_kind() {
        let now = start();
        let mut state = fleet(&[(0, 0), (0, 0), (0, 0)], now);
        let rate_of = |state: &crate::fleet::state::State, agent| {
            let worker = WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 };
            state.snapshot().worker_table().get(worker).unwrap().prefill_tokens_per_s()
        };
        assert_eq!(rate_of(&state, 2), None, "nobody was measured");
        for (agent, value) in [(0, 19_000), (1, 21_000)] {
            let mut measured = report(&[(0, 0)]);
            measured.ranks[0].prefill_tokens_per_s =
                Some(Figure { value, source: Source::Loads, age_ms: 0 });
            state.apply(
                AgentKey::first(agent),
                Update::Report(measured),
                now + super::super::reuse_forecast::FORECAST_AGE_MAX,
            );
        }
        state.apply(
            AgentKey::first(2),
            Update::Report(report(&[(0, 0)])),
            now + 3 * super::super::reuse_forecast::FORECAST_AGE_MAX,
        );
        assert_eq!([0, 1, 2].map(|agent| rate_of(&state, agent)), [Some(21_000); 3]);
    }

    #[test]
    fn equals_of_the_first_measured_worker_are_as_fast_at_once() {
        let now = start();
        let mut state = fleet(&[(0, 0), (0, 0)], now);
        let mut measured = report(&[(0, 0)]);
        measured.ranks[0].prefill_tokens_per_s =
            Some(Figure { value: 100_000, source: Source::Loads, age_ms: 0 });
        state.apply(AgentKey::first(0), Update::Report(measured), now);
        let rate_of = |agent| {
            let worker = WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 };
            state.snapshot().worker_table().get(worker).unwrap().prefill_tokens_per_s()
        };
        assert_eq!([0, 1].map(rate_of), [Some(100_000); 2]);
    }

    #[test]
    fn a_measurement_counts_beyond_the_noise_and_fades() {
        let typical = rate(20_000);
        let weighed = |own, age_ms| weigh(rate(own), typical, age_ms).get();
        assert_eq!(weighed(17_000, 0), 20_000, "equal workers differ as much");
        assert_eq!(weighed(24_000, 0), 20_000);
        assert_eq!(weighed(2_000, 0), 2_500, "a slow worker");
        assert_eq!(weighed(50_000, 0), 40_000, "a fast one");
        assert_eq!(weighed(2_000, 600_000), 4_444, "half of its weight is left");
        assert_eq!(weighed(2_000, u32::MAX), 20_000);
    }
}
