//! Where a turn goes. Pure: one snapshot in, a worker with its reason and the figures compared out;
//! the same inputs give the same worker in every process.
//!
//! The cost of a worker is what its ledger says is taken: turns against what it admits, turns
//! waiting, and the share of the KV pool or of the rows, whichever is shorter, that a newcomer
//! would have to displace or can't have. The last keeps sessions that share a system prompt from
//! herding onto one worker. What is unknown counts as taken. Among equals the one with fewer
//! sessions takes a newcomer.

use std::time::{Duration, Instant};

use proto::{
    id::Digest,
    load::{EngineFacts, Figure, Retention},
};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::view::{Agent, ClusterView, WorkerRef, WorkerState};

/// All of a capacity.
const WHOLE_MILLI: u64 = 1000;
/// A running turn slows every other turn of its batch, while resident KV only displaces what may
/// never come back: a share of turns weighs twice a share of pool.
const TURNS_WEIGHT: u64 = 2;
/// A waiting request delays the next one by its whole prefill.
const WAITING_WEIGHT: u64 = 4;
/// A parent's worker is kept for its children while it costs at most this much more than the best:
/// a shared prefix is worth a tenth of a pool and a few turns, not a queue.
pub const PARENT_SLACK_MILLI: u64 = 300;
/// As for a parent, but the key is a client's guess about its own prefixes.
pub const CACHE_KEY_SLACK_MILLI: u64 = 200;

/// A control stream that ends is dialled again within this time, while turns go on as before. A
/// worker that is really gone refuses the turn, which then goes elsewhere.
const BLINK_MAX: Duration = Duration::from_secs(1);

/// Why a worker was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The session is there.
    Sticky,
    /// It costs least.
    LeastLoaded,
    /// The session was elsewhere and can't stay there.
    Rebound,
    /// There is no other.
    OnlyWorker,
    /// No worker was heard of late; it costs least by what was last known.
    StaleView,
    /// The parent session is there.
    Parent,
    /// Earlier turns with this cache key went there.
    CacheKey,
}

impl Reason {
    /// The name used in headers and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sticky => "sticky",
            Self::LeastLoaded => "least_loaded",
            Self::Rebound => "rebound",
            Self::OnlyWorker => "only_worker",
            Self::StaleView => "stale_view",
            Self::Parent => "parent",
            Self::CacheKey => "cache_key",
        }
    }
}

/// Where the session is already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sticky {
    /// The worker.
    pub worker: WorkerRef,
    /// Its KV can't be made again elsewhere, or its gate is there: it stays whatever the load.
    pub fixed: bool,
}

/// What is to be placed.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// Chooses among equals: the session's digest, or the turn's.
    pub digest: Digest,
    /// Where the session is.
    pub sticky: Option<Sticky>,
    /// A worker to prefer within the reason's slack.
    pub prefer: Option<(WorkerRef, Reason)>,
    /// The retention a new session asks for.
    pub retention: Option<Retention>,
    /// The model the body names.
    pub model: Option<&'a str>,
    /// A worker that has just refused this turn.
    pub exclude: Option<WorkerRef>,
}

/// What was compared of one worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// `agent/rank`.
    pub worker: String,
    /// The sum that decides.
    pub cost_milli: u64,
    /// Turns running, with those this router began since the report.
    pub turns: u32,
    /// Turns it admits; 0 when not reported.
    pub turns_max: u32,
    /// Requests waiting in its engine.
    pub waiting: Option<u64>,
    /// KV that eviction can't take, tokens.
    pub used_tokens: Option<u64>,
    /// Tagged sessions' KV at most, tokens.
    pub resident_tokens_estimate: Option<u64>,
    /// The pool, tokens.
    pub total_tokens: Option<u64>,
    /// Sessions open there, with those this router opened since the report.
    pub sessions: u32,
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Where the turn goes.
    pub worker: WorkerRef,
    /// Why.
    pub reason: Reason,
    /// All workers compared, in order; empty where nothing had to be.
    pub figures: Vec<Figures>,
}

/// Why no worker can take the turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoWorker {
    /// None is usable now.
    #[error("no worker can take turns now; try again")]
    Unusable,
    /// Nobody serves the model.
    #[error("no worker serves model {model:?}; served are: {offered}")]
    Model {
        /// As asked for.
        model: String,
        /// All served names.
        offered: String,
    },
    /// Nobody keeps sessions that way.
    #[error("no worker offers retention {asked}; offered are: {offered}")]
    Retention {
        /// As asked for.
        asked: &'static str,
        /// By any worker that serves the model.
        offered: String,
    },
}

type Candidate<'a> = (WorkerRef, &'a Agent, WorkerState);

/// Decides.
///
/// # Errors
/// When no worker fits; what is offered instead is in the error.
pub fn place(
    question: &Question<'_>,
    view: &ClusterView,
    now: Instant,
) -> Result<Placement, NoWorker> {
    let sticky = question.sticky.filter(|sticky| question.exclude != Some(sticky.worker));
    if let Some(Sticky { worker, fixed }) = sticky {
        let state = view.state(worker, now);
        let usable = matches!(state, WorkerState::Fresh | WorkerState::Stale);
        let blinks = view.agent(worker).lost_for(now).is_some_and(|time| time < BLINK_MAX);
        if usable || blinks || (fixed && state != WorkerState::Lost) {
            return Ok(Placement { worker, reason: Reason::Sticky, figures: vec![] });
        }
    }
    let fit = fitting(question, view, now)?;
    let usable: Vec<Candidate<'_>> =
        fit.iter().copied().filter(|(worker, ..)| question.exclude != Some(*worker)).collect();
    let of_state = |wanted: WorkerState| -> Vec<Candidate<'_>> {
        usable.iter().copied().filter(|(_, _, state)| *state == wanted).collect()
    };
    let fresh = of_state(WorkerState::Fresh);
    let (pool, stale) =
        if fresh.is_empty() { (of_state(WorkerState::Stale), true) } else { (fresh, false) };
    if pool.is_empty() {
        // A draining or unhealthy worker that has the session answers for itself.
        return match sticky {
            Some(Sticky { worker, .. }) if view.state(worker, now) != WorkerState::Lost => {
                Ok(Placement { worker, reason: Reason::Sticky, figures: vec![] })
            }
            _ => Err(NoWorker::Unusable),
        };
    }
    Ok(cheapest(question, view, &pool, stale, fit.len()))
}

fn cheapest(
    question: &Question<'_>,
    view: &ClusterView,
    pool: &[Candidate<'_>],
    stale: bool,
    known: usize,
) -> Placement {
    let figures: Vec<Figures> =
        pool.iter().map(|(worker, agent, _)| figures(*worker, agent)).collect();
    let score = |at: usize| {
        let tie = rendezvous(question.digest, &figures[at].worker);
        (figures[at].cost_milli, figures[at].sessions, std::cmp::Reverse(tie), pool[at].0)
    };
    let best = (0..pool.len()).min_by_key(|&at| score(at)).expect("the pool is not empty");
    let least = figures[best].cost_milli;
    let preferred = question.prefer.and_then(|(worker, reason)| {
        let at = pool.iter().position(|(candidate, ..)| *candidate == worker)?;
        let slack =
            if reason == Reason::Parent { PARENT_SLACK_MILLI } else { CACHE_KEY_SLACK_MILLI };
        (figures[at].cost_milli <= least.saturating_add(slack)).then_some((worker, reason))
    });
    let (worker, reason) = match preferred {
        _ if question.sticky.is_some() => (pool[best].0, Reason::Rebound),
        Some(preferred) => preferred,
        None if stale => (pool[best].0, Reason::StaleView),
        None if known == 1 && view.workers().count() == 1 => (pool[best].0, Reason::OnlyWorker),
        None => (pool[best].0, Reason::LeastLoaded),
    };
    Placement { worker, reason, figures }
}

/// Workers that serve the model and offer the retention, whatever their state.
fn fitting<'a>(
    question: &Question<'_>,
    view: &'a ClusterView,
    now: Instant,
) -> Result<Vec<Candidate<'a>>, NoWorker> {
    let known: Vec<_> = view.workers().collect();
    let Some((_, _, first)) = known.first() else { return Err(NoWorker::Unusable) };
    let one_fleet = known
        .iter()
        .all(|(_, _, facts)| facts.description.engine.models == first.description.engine.models);
    let serves = |engine: &EngineFacts| match question.model {
        Some(model) if !one_fleet => serves(engine, model),
        _ => true,
    };
    let (mut models, mut retentions) = (vec![], vec![]);
    let mut fit = vec![];
    let mut served = false;
    for (worker, agent, facts) in known {
        models.extend(facts.description.engine.models.iter().map(String::as_str));
        if !serves(&facts.description.engine) {
            continue;
        }
        served = true;
        let offered = &facts.description.retentions;
        retentions.extend(offered.iter().map(|retention| retention.as_str()));
        if question.retention.is_none_or(|asked| offered.contains(&asked)) {
            fit.push((worker, agent, view.state(worker, now)));
        }
    }
    if !served {
        let model = question.model.unwrap_or_default().to_owned();
        return Err(NoWorker::Model { model, offered: listed(models) });
    }
    match question.retention {
        Some(asked) if fit.is_empty() => {
            Err(NoWorker::Retention { asked: asked.as_str(), offered: listed(retentions) })
        }
        _ => Ok(fit),
    }
}

/// An adapter is named `model:adapter`.
fn serves(engine: &EngineFacts, model: &str) -> bool {
    let base = model.split_once(':').map_or(model, |(base, _)| base);
    engine.models.iter().any(|served| served == model || served == base)
}

fn listed(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

fn figures(worker: WorkerRef, agent: &Agent) -> Figures {
    let load = agent.rank_load(worker.dp_rank);
    let value = |figure: Option<Figure>| figure.map(|figure| figure.value);
    let turns = agent.turns_estimate(worker.dp_rank);
    let turns_max = load.map_or(0, |load| load.turns_running_max);
    let waiting = load.and_then(|load| value(load.requests_waiting));
    let used = load.and_then(|load| value(load.pool_used_tokens));
    let pinned = load.and_then(|load| value(load.pinned_tokens));
    let resident = load.and_then(|load| value(load.resident_tokens_estimate));
    let total = load.and_then(|load| value(load.pool_total_tokens));
    // Used includes pinned; the larger of both counts while their samples differ in age.
    let taken = match (used, pinned) {
        (None, None) => None,
        (used, pinned) => used.max(pinned).map(|taken| taken.saturating_add(resident.unwrap_or(0))),
    };
    let opens = agent.opens_since_report(worker.dp_rank);
    let rows_milli = load
        .and_then(|load| Some((load.rows_held?.value, load.rows_total?.value)))
        .map_or(0, |(held, rows)| share_milli(Some(held + u64::from(opens)), Some(rows)));
    let cost_milli = share_milli(Some(u64::from(turns)), Some(u64::from(turns_max)))
        .saturating_mul(TURNS_WEIGHT)
        .saturating_add(
            waiting
                .map_or(0, |waiting| share_milli(Some(waiting), Some(u64::from(turns_max))))
                .saturating_mul(WAITING_WEIGHT),
        )
        .saturating_add(share_milli(taken, total).max(rows_milli).min(WHOLE_MILLI));
    Figures {
        worker: format!("{}/{}", agent.name(), worker.dp_rank),
        cost_milli,
        turns,
        turns_max,
        waiting,
        used_tokens: used,
        resident_tokens_estimate: resident,
        total_tokens: total,
        sessions: load.map_or(0, |load| load.sessions).saturating_add(opens),
    }
}

/// Part of a whole in thousandths; what is unknown counts as all of it.
fn share_milli(part: Option<u64>, whole: Option<u64>) -> u64 {
    match (part, whole) {
        (Some(part), Some(whole)) if whole > 0 => part.saturating_mul(WHOLE_MILLI) / whole,
        _ => WHOLE_MILLI,
    }
}

/// Highest wins: every router gives a session the same worker among equals, and a worker that
/// comes or goes moves only its own share.
fn rendezvous(digest: Digest, worker: &str) -> u64 {
    xxh3_64_with_seed(worker.as_bytes(), digest.0)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, time::Duration};

    use proptest::prelude::*;

    use super::*;
    use crate::{
        testing::{description, fleet, report, start},
        view::{State, Update},
    };

    fn question(digest: u64) -> Question<'static> {
        Question {
            digest: Digest(digest),
            sticky: None,
            prefer: None,
            retention: None,
            model: None,
            exclude: None,
        }
    }

    fn at(agent: usize) -> WorkerRef {
        WorkerRef { agent, dp_rank: 0 }
    }

    fn placed(state: &State, question: &Question<'_>, now: Instant) -> (usize, Reason) {
        let placement = place(question, &state.snapshot(), now).unwrap();
        (placement.worker.agent, placement.reason)
    }

    #[test]
    fn the_least_loaded_takes_a_new_session_and_its_figures_are_kept() {
        let now = start();
        let state = fleet(&[(8, 0), (0, 1_000), (0, 9_000)], now);
        let placement = place(&question(1), &state.snapshot(), now).unwrap();
        assert_eq!((placement.worker, placement.reason), (at(1), Reason::LeastLoaded));
        let costs: Vec<u64> = placement.figures.iter().map(|one| one.cost_milli).collect();
        assert_eq!(costs, [250, 100, 900]);
    }

    #[test]
    fn what_is_unknown_counts_as_taken() {
        let now = start();
        let mut state = fleet(&[(0, 9_000), (0, 0)], now);
        let mut unknown = report(&[(0, 0)]);
        unknown.ranks[0].pool_used_tokens = None;
        unknown.ranks[0].pinned_tokens = None;
        state.apply(1, Update::Report(unknown), now);
        assert_eq!(placed(&state, &question(1), now), (0, Reason::LeastLoaded));
    }

    #[test]
    fn sessions_opened_since_the_report_count() {
        let now = start();
        let state = fleet(&[(0, 0), (0, 0), (0, 0)], now);
        let mut opened = [0; 3];
        for digest in 0..9 {
            let (agent, _) = placed(&state, &question(digest), now);
            state.snapshot().agents[agent].in_flight[0].note_open();
            opened[agent] += 1;
        }
        assert_eq!(opened, [3, 3, 3], "equal workers get equal shares");
    }

    #[test]
    fn turns_begun_since_the_report_count() {
        let now = start();
        let state = fleet(&[(0, 0), (0, 10)], now);
        let view = state.snapshot();
        let lease = crate::lease::Lease::acquire(&view.agents[0].in_flight[0]);
        assert_eq!(placed(&state, &question(1), now).0, 1);
        drop(lease);
        assert_eq!(placed(&state, &question(1), now).0, 0);
    }

    #[test]
    fn equals_are_chosen_by_digest_alike_everywhere_and_evenly() {
        let now = start();
        let state = fleet(&[(0, 0); 4], now);
        let mut counts = BTreeMap::new();
        for digest in 0..400 {
            let chosen = placed(&state, &question(digest), now);
            assert_eq!(chosen, placed(&fleet(&[(0, 0); 4], now), &question(digest), now));
            *counts.entry(chosen.0).or_insert(0) += 1;
        }
        assert!(counts.len() == 4 && counts.values().all(|&count| count > 60), "{counts:?}");
    }

    #[test]
    fn a_session_stays_while_its_worker_can_take_it() {
        let now = start();
        let mut state = fleet(&[(60, 9_000), (0, 0)], now);
        let mut ask = question(1);
        ask.sticky = Some(Sticky { worker: at(0), fixed: false });
        assert_eq!(placed(&state, &ask, now), (0, Reason::Sticky));
        let stale = now + Duration::from_secs(4);
        state.apply(1, Update::Report(report(&[(0, 0)])), stale);
        assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky));
        let mut sick = report(&[(0, 0)]);
        sick.unhealthy = Some("engine gone".to_owned());
        state.apply(0, Update::Report(sick.clone()), stale);
        assert_eq!(placed(&state, &ask, stale), (1, Reason::Rebound));
        ask.sticky = Some(Sticky { worker: at(0), fixed: true });
        assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky));
        state.apply(1, Update::Report(sick), stale);
        ask.sticky = Some(Sticky { worker: at(0), fixed: false });
        assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky));
        state.apply(0, Update::Lost("gone".to_owned()), stale);
        assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky), "a blink moves nobody");
        let later = stale + BLINK_MAX;
        assert_eq!(place(&ask, &state.snapshot(), later), Err(NoWorker::Unusable));
    }

    #[test]
    fn stale_workers_take_new_sessions_only_when_all_are_stale() {
        let now = start();
        let mut state = fleet(&[(0, 0), (9, 9_000)], now);
        let later = now + Duration::from_secs(4);
        assert_eq!(placed(&state, &question(1), later), (0, Reason::StaleView));
        state.apply(1, Update::Report(report(&[(9, 9_000)])), later);
        assert_eq!(placed(&state, &question(1), later), (1, Reason::LeastLoaded));
        let mut draining = report(&[(0, 0)]);
        draining.draining = true;
        state.apply(0, Update::Report(draining), later);
        assert_eq!(placed(&state, &question(1), later).0, 1);
        let mut excluded = question(1);
        excluded.exclude = Some(at(1));
        assert_eq!(place(&excluded, &state.snapshot(), later), Err(NoWorker::Unusable));
    }

    #[test]
    fn a_parents_worker_is_preferred_within_its_slack() {
        let now = start();
        let mut ask = question(1);
        ask.prefer = Some((at(0), Reason::Parent));
        assert_eq!(placed(&fleet(&[(0, 2_900), (0, 0)], now), &ask, now), (0, Reason::Parent));
        let busy = fleet(&[(0, 3_100), (0, 0)], now);
        assert_eq!(placed(&busy, &ask, now), (1, Reason::LeastLoaded));
        ask.prefer = Some((at(0), Reason::CacheKey));
        assert_eq!(placed(&fleet(&[(0, 1_900), (0, 0)], now), &ask, now), (0, Reason::CacheKey));
    }

    #[test]
    fn the_model_matters_only_where_models_differ() {
        let now = start();
        let mut state = fleet(&[(0, 0), (0, 9_000)], now);
        let mut ask = question(1);
        ask.model = Some("other");
        assert_eq!(placed(&state, &ask, now).0, 0, "one model: any name goes");
        let mut other = description("a1", 2, 1);
        other.engine.models = vec!["other".to_owned()];
        other.retentions = vec![Retention::None];
        state.apply(1, Update::Began { description: other, sessions: vec![] }, now);
        state.apply(1, Update::Report(report(&[(0, 9_000)])), now);
        assert_eq!(placed(&state, &ask, now).0, 1);
        ask.model = Some("other:adapter");
        assert_eq!(placed(&state, &ask, now).0, 1);
        ask.retention = Some(Retention::Pinned);
        let refused = place(&ask, &state.snapshot(), now).unwrap_err();
        assert_eq!(refused.to_string(), "no worker offers retention pinned; offered are: none");
        ask.model = Some("third");
        let refused = place(&ask, &state.snapshot(), now).unwrap_err();
        assert_eq!(refused.to_string(), "no worker serves model \"third\"; served are: m, other");
    }

    #[test]
    fn the_only_worker_and_none() {
        let now = start();
        assert_eq!(placed(&fleet(&[(0, 0)], now), &question(1), now), (0, Reason::OnlyWorker));
        assert_eq!(place(&question(1), &fleet(&[], now).snapshot(), now), Err(NoWorker::Unusable));
    }

    proptest! {
        #[test]
        fn a_choice_is_fresh_and_never_costs_more_than_another(
            loads in prop::collection::vec((0..80_u32, 0..10_000_u64), 1..6),
            silent in prop::collection::vec(any::<bool>(), 6),
            digest in any::<u64>(),
        ) {
            let now = start();
            let later = now + Duration::from_secs(4);
            let mut state = fleet(&loads, now);
            for (agent, load) in loads.iter().enumerate().filter(|(agent, _)| !silent[*agent]) {
                state.apply(agent, Update::Report(report(&[*load])), later);
            }
            let view = state.snapshot();
            let placement = place(&question(digest), &view, later).unwrap();
            let all_silent = silent[..loads.len()].iter().all(|&silent| silent);
            prop_assert_eq!(placement.reason == Reason::StaleView, all_silent);
            let chosen = view.name(placement.worker);
            let cost = |one: &Figures| one.cost_milli;
            let own = placement.figures.iter().find(|one| one.worker == chosen).map(cost);
            prop_assert_eq!(own, placement.figures.iter().map(cost).min());
        }
    }
}
