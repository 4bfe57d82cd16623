//! Forecasts for the placement how much KV on each worker will be used again. Pure.
//!
//! A session's tokens count on the worker that ran its last turn, times the probability that the
//! session sends another turn. A session *abandons* KV when it moves to another worker, or when its
//! client rewrites its history. Abandoned KV counts until eviction has presumably taken it. A
//! session's *idle time* is the time since its last turn ended.

mod returns;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use contract::{
    id::{Digest, SessionKey},
    load::{Session, SessionState},
};

pub(super) use self::returns::ReturnEstimator;
use super::worker::{AgentKey, WorkerRef};

/// Within this time, new turns change the sums by about one session in a hundred. Summing 100,000
/// sessions takes a millisecond.
pub(super) const FORECAST_AGE_MAX: Duration = Duration::from_millis(250);
/// Time in which eviction is assumed to take half of the abandoned KV. The contents of a pool are
/// replaced within minutes.
const ABANDONED_HALF_LIFE: Duration = Duration::from_secs(150);
/// Rate at which a session with a running turn sends its next turn: one in 30 s. An answer takes 10
/// s. Half of the pauses after it are shorter than 10 s, and some are much longer.
const RUNNING_TURNS_MICRO_PER_S: u64 = 33_000;
/// Upper bounds of the idle-time classes. The last class has no bound.
const IDLE_BOUNDS_S: [u64; IDLE_CLASSES - 1] = [10, 30, 60, 120, 300, 600, 1800];
/// Where it is evicted, KV of conversations without a name counts as that of sessions, divided by
/// this number. In the simulator `berth-sim` with Mooncake's prompts, the mean time to the first
/// token is 5 % worse with 1, and 0.5 % better if it has no value. But then a turn would evict such
/// KV where other workers have room.
const UNNAMED_DIVISOR: u64 = 4;
pub const IDLE_CLASSES: usize = 8;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IdleClass {
    /// An upper bound of what is resident, because eviction may have taken some.
    pub tokens: u64,
    /// The tokens of each session times the probability that the session returns.
    pub wanted_tokens: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReuseDemand {
    /// Includes abandoned tokens that are not evicted yet. The tokens of sessions with a running
    /// turn count in full.
    pub wanted_tokens: u64,
    pub turns_micro_per_s: u64,
    /// Of the sessions without a running turn. The class of the shortest idle time comes first.
    pub idle_classes: [IdleClass; IDLE_CLASSES],
    /// Of the conversations without a name.
    pub unnamed_idle_classes: [IdleClass; IDLE_CLASSES],
}

impl IdleClass {
    /// Returns the tokens that are expected to be used again.
    fn add(&mut self, tokens: u64, chance_milli: u64) -> u64 {
        let wanted_tokens = tokens.saturating_mul(chance_milli) / 1000;
        self.tokens = self.tokens.saturating_add(tokens);
        self.wanted_tokens = self.wanted_tokens.saturating_add(wanted_tokens);
        wanted_tokens
    }

    pub(super) fn add_unnamed(&mut self, tokens: u64, chance_milli: u64) {
        self.add(tokens, chance_milli / UNNAMED_DIVISOR);
    }

    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            tokens: self.tokens.saturating_add(other.tokens),
            wanted_tokens: self.wanted_tokens.saturating_add(other.wanted_tokens),
        }
    }
}

impl ReuseDemand {
    pub const NOTHING: Self = Self {
        wanted_tokens: 0,
        turns_micro_per_s: 0,
        idle_classes: [IdleClass { tokens: 0, wanted_tokens: 0 }; IDLE_CLASSES],
        unnamed_idle_classes: [IdleClass { tokens: 0, wanted_tokens: 0 }; IDLE_CLASSES],
    };

    pub(super) fn add_running(&mut self, tokens: u64) {
        self.add_wanted(tokens, RUNNING_TURNS_MICRO_PER_S);
    }

    fn add_idle(&mut self, tokens: u64, idle_time: Duration, returns: &ReturnEstimator) {
        let class = &mut self.idle_classes[idle_class_of(idle_time)];
        let wanted_tokens = class.add(tokens, returns.chance_milli(idle_time));
        self.add_wanted(wanted_tokens, returns.rate_micro(idle_time));
    }

    pub(super) fn add_unnamed_idle(
        &mut self,
        tokens: u64,
        idle_time: Duration,
        returns: &ReturnEstimator,
    ) {
        let chance_milli = returns.chance_milli(idle_time);
        self.unnamed_idle_classes[idle_class_of(idle_time)].add_unnamed(tokens, chance_milli);
        let wanted_tokens = tokens.saturating_mul(chance_milli) / 1000;
        self.add_wanted(wanted_tokens, returns.rate_micro(idle_time));
    }

    fn add_wanted(&mut self, wanted_tokens: u64, turns_micro_per_s: u64) {
        self.wanted_tokens = self.wanted_tokens.saturating_add(wanted_tokens);
        self.turns_micro_per_s = self.turns_micro_per_s.saturating_add(turns_micro_per_s);
    }
}

#[derive(Debug, Clone)]
pub struct ReuseForecast {
    sessions_max: usize,
    sessions: HashMap<Digest, SessionEntry>,
    abandoned: HashMap<WorkerRef, AbandonedKv>,
    return_estimator: ReturnEstimator,
    forecast_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SessionEntry {
    worker: WorkerRef,
    tokens: u64,
    /// When the last turn ended. `None` while a turn runs.
    idle_since: Option<Instant>,
    /// The worker that the session moved away from, and the tokens it abandoned there.
    abandoned: Option<(WorkerRef, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct AbandonedKv {
    tokens: u64,
    computed_at: Instant,
}

impl AbandonedKv {
    fn tokens_left(&self, now: Instant) -> u64 {
        let age_ms = now.saturating_duration_since(self.computed_at).as_millis();
        let half_lives = age_ms / ABANDONED_HALF_LIFE.as_millis();
        // Within a half-life the decline is linear. Only integers are used, so that all routers get
        // the same result.
        let tokens_at_start = self.tokens >> u32::try_from(half_lives).unwrap_or(u32::MAX).min(63);
        let elapsed_ms = u64::try_from(age_ms % ABANDONED_HALF_LIFE.as_millis()).unwrap_or(0);
        let half_life_ms = u64::try_from(ABANDONED_HALF_LIFE.as_millis()).unwrap_or(u64::MAX);
        tokens_at_start - (tokens_at_start / 2).saturating_mul(elapsed_ms) / half_life_ms
    }
}

impl ReuseForecast {
    /// Sessions beyond `sessions_max` are ignored.
    #[must_use]
    pub fn new(sessions_max: usize) -> Self {
        Self {
            sessions_max,
            sessions: HashMap::new(),
            abandoned: HashMap::new(),
            return_estimator: ReturnEstimator::default(),
            forecast_at: None,
        }
    }

    pub fn upsert(&mut self, worker: WorkerRef, session: &Session, now: Instant) {
        let is_running = session.turns_running > 0 || session.state == SessionState::Running;
        let idle_since = (!is_running).then(|| now.checked_sub(session.idle).unwrap_or(now));
        let digest = session.key.digest();
        if matches!(session.state, SessionState::Lost | SessionState::Closing) {
            return self.forget(worker.agent, digest, now);
        }
        let old_entry = self.sessions.get(&digest).copied();
        if old_entry.is_none() && self.sessions.len() >= self.sessions_max {
            return;
        }
        let mut entry = SessionEntry { worker, tokens: 0, idle_since, abandoned: None };
        if let Some(old_entry) = old_entry {
            let is_report_older = old_entry
                .idle_since
                .is_none_or(|since| idle_since.is_some_and(|reported| reported <= since));
            if old_entry.worker.agent != worker.agent && !is_running && is_report_older {
                // The session has left this worker for another agent's, so its state here is old.
                return;
            }
            if let (Some(since), true) = (old_entry.idle_since, is_running) {
                self.return_estimator.record_return(now.saturating_duration_since(since));
            }
            if old_entry.worker == worker {
                (entry.tokens, entry.abandoned) = (old_entry.tokens, old_entry.abandoned);
            } else {
                self.abandon(old_entry.worker, old_entry.tokens, now);
                entry.abandoned = Some((old_entry.worker, old_entry.tokens));
            }
        }
        if let Some(tokens) = session.resident_tokens.map(|figure| figure.value) {
            self.abandon(worker, entry.tokens.saturating_sub(tokens), now);
            entry.tokens = tokens;
        }
        self.sessions.insert(digest, entry);
    }

    /// KV that the session abandoned on this agent stops counting. Either the agent closed the
    /// session, and eviction takes its KV first, or the session had not returned for a long time.
    pub fn remove(&mut self, agent: AgentKey, key: &SessionKey, now: Instant) {
        let digest = key.digest();
        self.forget(agent, digest, now);
        let abandoned = self
            .sessions
            .get_mut(&digest)
            .and_then(|entry| entry.abandoned.take_if(|(worker, _)| worker.agent == agent));
        if let Some((worker, tokens)) = abandoned
            && let Some(abandoned_kv) = self.abandoned.get_mut(&worker)
        {
            *abandoned_kv = AbandonedKv {
                tokens: abandoned_kv.tokens_left(now).saturating_sub(tokens),
                computed_at: now,
            };
        }
    }

    /// The caller then records all sessions of the agent's new table.
    pub fn clear_agent(&mut self, agent: AgentKey) {
        self.sessions.retain(|_, entry| entry.worker.agent != agent);
        self.abandoned.retain(|worker, _| worker.agent != agent);
    }

    /// By slot, then by rank; `None` if the last forecasts are recent enough. An agent's list ends
    /// with its last rank that has demand.
    pub fn forecast_if_due(
        &mut self,
        slot_count: usize,
        now: Instant,
    ) -> Option<Vec<Vec<ReuseDemand>>> {
        let age = self.forecast_at.map(|at| now.saturating_duration_since(at));
        if age.is_some_and(|age| age < FORECAST_AGE_MAX) {
            return None;
        }
        self.forecast_at = Some(now);
        let idle_time_of =
            |entry: &SessionEntry| Some(now.saturating_duration_since(entry.idle_since?));
        self.return_estimator.update_estimate(self.sessions.values().filter_map(idle_time_of), now);
        let mut demands: Vec<Vec<ReuseDemand>> = vec![vec![]; slot_count];
        for entry in self.sessions.values() {
            let demand = demand_on(&mut demands, entry.worker);
            match idle_time_of(entry) {
                Some(idle_time) => {
                    demand.add_idle(entry.tokens, idle_time, &self.return_estimator);
                }
                None => demand.add_running(entry.tokens),
            }
        }
        self.abandoned.retain(|_, abandoned| abandoned.tokens_left(now) > 0);
        for (worker, abandoned) in &self.abandoned {
            let demand = demand_on(&mut demands, *worker);
            demand.wanted_tokens = demand.wanted_tokens.saturating_add(abandoned.tokens_left(now));
        }
        Some(demands)
    }

    /// Keeps a session whose last turn another agent's worker ran.
    fn forget(&mut self, agent: AgentKey, digest: Digest, now: Instant) {
        if let Some(entry) = self.sessions.get(&digest).copied()
            && entry.worker.agent == agent
        {
            self.sessions.remove(&digest);
            if let Some(since) = entry.idle_since {
                self.return_estimator.record_end(now.saturating_duration_since(since));
            }
        }
    }

    fn abandon(&mut self, worker: WorkerRef, tokens: u64, now: Instant) {
        if tokens > 0 {
            let old_tokens =
                self.abandoned.get(&worker).map_or(0, |abandoned| abandoned.tokens_left(now));
            self.abandoned.insert(
                worker,
                AbandonedKv { tokens: old_tokens.saturating_add(tokens), computed_at: now },
            );
        }
    }
}

/// Adds empty forecasts up to the worker's if needed.
pub(super) fn demand_on(demands: &mut [Vec<ReuseDemand>], worker: WorkerRef) -> &mut ReuseDemand {
    let ranks = &mut demands[worker.agent.slot()];
    let rank = worker.dp_rank as usize;
    if ranks.len() <= rank {
        ranks.resize(rank + 1, ReuseDemand::default());
    }
    &mut ranks[rank]
}

pub(super) fn idle_class_of(idle_time: Duration) -> usize {
    IDLE_BOUNDS_S.partition_point(|&bound| bound <= idle_time.as_secs())
}

#[cfg(test)]
mod tests {
    use contract::load::{Figure, Retention, Source};

    use super::*;
    use crate::fleet::testing::start;

    const MINUTE: Duration = Duration::from_secs(60);

    fn at(agent: usize) -> WorkerRef {
        WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
    }

    fn session(id: &str, tokens: u64, idle: Option<Duration>) -> Session {
        Session {
            key: SessionKey::new("p", id).unwrap(),
            retention: Retention::Tagged,
            state: if idle.is_some() { SessionState::Idle } else { SessionState::Running },
            dp_rank: 0,
            turns: 1,
            turns_running: u32::from(idle.is_none()),
            exclusive: false,
            resident_tokens: Some(Figure { value: tokens, source: Source::Usage, age_ms: 0 }),
            idle: idle.unwrap_or_default(),
            full_history: false,
            volatile_prefix: None,
            began_unix_ms: 0,
            parent: None,
        }
    }

    fn sums(forecast: &mut ReuseForecast, now: Instant) -> [ReuseDemand; 2] {
        let sums = forecast.forecast_if_due(2, now).expect("the previous sums are old");
        [0, 1].map(|agent| sums[agent].first().copied().unwrap_or_default())
    }

    #[test]
    fn sessions_have_a_bound() {
        let (mut forecast, now) = (ReuseForecast::new(2), start());
        for id in ["a", "b", "c", "a"] {
            forecast.upsert(at(0), &session(id, 100, None), now);
        }
        assert_eq!(forecast.forecast_if_due(1, now).unwrap()[0][0].wanted_tokens, 200);
    }

    #[test]
    fn a_worker_that_was_away_does_not_take_back_what_idles_elsewhere_since() {
        let (mut forecast, now) = (ReuseForecast::new(10), start());
        forecast.upsert(at(0), &session("s", 100, Some(Duration::ZERO)), now);
        let later = now + MINUTE;
        forecast.upsert(at(1), &session("s", 100, None), later);
        forecast.upsert(at(1), &session("s", 120, Some(Duration::ZERO)), later + MINUTE);
        // The first worker sends its table again; there the session has been idle for longer.
        forecast.upsert(at(0), &session("s", 100, Some(2 * MINUTE)), later + MINUTE);
        forecast.remove(at(0).agent, &SessionKey::new("p", "s").unwrap(), later + MINUTE);
        let sums = forecast.forecast_if_due(2, later + MINUTE).unwrap();
        assert_eq!(sums[1][0].idle_classes[0].tokens, 120);
    }

    #[test]
    fn what_runs_is_wanted_in_full_and_what_idles_by_its_chance() {
        let now = start();
        let mut forecast = ReuseForecast::new(1000);
        forecast.upsert(at(0), &session("runs", 50_000, None), now);
        forecast.upsert(at(1), &session("idles", 50_000, Some(20 * MINUTE)), now);
        let [runs, idles] = sums(&mut forecast, now);
        assert_eq!(
            (runs.wanted_tokens, runs.idle_classes),
            (50_000, [IdleClass::default(); IDLE_CLASSES])
        );
        assert!(idles.wanted_tokens > 10_000 && idles.wanted_tokens < 45_000, "{idles:?}");
        let twenty_minutes = idles.idle_classes[IDLE_CLASSES - 2];
        assert_eq!(
            (twenty_minutes.tokens, twenty_minutes.wanted_tokens),
            (50_000, idles.wanted_tokens)
        );
    }

    #[test]
    fn a_session_counts_where_it_ran_last_and_what_it_left_fades() {
        let now = start();
        let mut forecast = ReuseForecast::new(1000);
        forecast.upsert(at(0), &session("s", 80_000, Some(Duration::ZERO)), now);
        forecast.upsert(at(1), &session("s", 0, None), now);
        // The worker that the session has left reports it again, though it is no longer there.
        forecast.upsert(at(0), &session("s", 80_000, Some(MINUTE)), now);
        assert_eq!(sums(&mut forecast, now)[0].wanted_tokens, 80_000, "not evicted at first");
        let later = now + 2 * ABANDONED_HALF_LIFE;
        assert_eq!(sums(&mut forecast, later)[0].wanted_tokens, 20_000);
        forecast.remove(at(0).agent, &session("s", 0, None).key, later);
        assert_eq!(
            sums(&mut forecast, later + MINUTE)[0].wanted_tokens,
            0,
            "closed, so evicted first"
        );
    }

    #[test]
    fn a_rewritten_history_leaves_its_tokens_and_a_closed_session_none() {
        let now = start();
        let mut forecast = ReuseForecast::new(1000);
        forecast.upsert(at(0), &session("s", 90_000, None), now);
        forecast.upsert(at(0), &session("s", 30_000, None), now);
        assert_eq!(
            sums(&mut forecast, now)[0].wanted_tokens,
            90_000,
            "60,000 of them are abandoned"
        );
        forecast.remove(at(0).agent, &session("s", 0, None).key, now);
        let later = now + 30 * ABANDONED_HALF_LIFE;
        assert_eq!(sums(&mut forecast, later)[0].wanted_tokens, 0);
    }

    #[test]
    fn an_agent_that_begins_anew_is_forgotten() {
        let now = start();
        let mut forecast = ReuseForecast::new(1000);
        forecast.upsert(at(0), &session("s", 90_000, None), now);
        forecast.clear_agent(at(0).agent);
        assert_eq!(sums(&mut forecast, now)[0], ReuseDemand::default());
    }

    #[test]
    fn sums_are_not_made_for_every_word() {
        let now = start();
        let mut forecast = ReuseForecast::new(1000);
        assert!(forecast.forecast_if_due(1, now).is_some());
        assert!(forecast.forecast_if_due(1, now + FORECAST_AGE_MAX / 2).is_none());
        assert!(forecast.forecast_if_due(1, now + FORECAST_AGE_MAX).is_some());
    }

    #[test]
    fn what_an_agent_left_behind_is_not_taken_from_the_next_one_in_its_slot() {
        let (mut forecast, now) = (ReuseForecast::new(10), start());
        let (old, new) = (at(0), WorkerRef { agent: at(0).agent.next(), dp_rank: 0 });
        forecast.upsert(old, &session("s", 700, Some(Duration::ZERO)), now);
        forecast.upsert(at(1), &session("s", 700, None), now);
        forecast.clear_agent(old.agent);
        forecast.upsert(new, &session("t", 500, Some(Duration::ZERO)), now);
        forecast.upsert(at(1), &session("t", 500, None), now);
        // The next agent closes its copy of the session that the old one had.
        forecast.remove(new.agent, &session("s", 0, None).key, now);
        assert_eq!(sums(&mut forecast, now)[0].wanted_tokens, 500);
        forecast.clear_agent(old.agent);
        let later = now + MINUTE;
        assert!(sums(&mut forecast, later)[0].wanted_tokens > 0, "another agent's");
    }
}
