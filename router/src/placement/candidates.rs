//! Finds the workers that can take a turn, for the placement, which then compares their costs.
//!
//! A *turn* is one request and its answer. A *worker* is one data-parallel rank of an engine, and
//! an *agent* runs beside each engine. A worker can take a turn if its agent is connected and its
//! engine is healthy and not draining. The engine must also run both prefill and decode, serve the
//! turn's model, and offer the turn's *retention*, that is, the way to keep the session's KV
//! between turns. The parent module calls this one. `cost` then says which of the workers to
//! prefer.

use std::time::Instant;

use proto::load::Retention;

use super::{PlacementRequest, Reason};
use crate::fleet::{snapshot::Snapshot, worker::WorkerState, worker_table::WorkerStats};

/// Why no worker can take the turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoWorker {
    /// No worker is usable now.
    #[error("no worker can take turns now; try again")]
    Unusable,
    /// No engine runs whole turns: all only prefill or only decode.
    #[error(
        "every engine runs in prefill or decode mode, and pairs are not served yet: start engines \
         without --disaggregation-mode"
    )]
    Disaggregated,
    /// No worker serves the model.
    #[error("no worker serves model {model:?}; served are: {offered}")]
    Model {
        /// The model that was asked for.
        model: String,
        /// The names of all served models.
        offered: String,
    },
    /// No worker that serves the model offers the retention.
    #[error(
        "no worker offers retention {}; offered are: {offered}; start an engine with {}, or ask \
         for one of these",
        .requested.as_str(),
        .requested.engine_flag().unwrap_or("other flags")
    )]
    Retention {
        /// The retention that was asked for.
        requested: Retention,
        /// The retentions that workers serving the model offer.
        offered: String,
    },
}

/// The workers to choose from.
#[derive(Debug)]
pub(super) struct Candidates<'a> {
    /// The workers that can take the turn and are *fresh*: their agents were heard recently. If
    /// there are none, the *stale* ones; see [`WorkerState::Stale`].
    pub(super) workers: Vec<WorkerStats<'a>>,
    /// Whether all of `workers` are stale.
    pub(super) are_all_stale: bool,
    /// Whether the fleet has only one worker.
    pub(super) has_one_worker: bool,
}

impl Candidates<'_> {
    /// Returns the reason to record for a placement that only the cost decided.
    pub(super) fn reason(&self, request: &PlacementRequest<'_>) -> Reason {
        match request.prompt {
            _ if self.are_all_stale => Reason::StaleView,
            _ if self.has_one_worker => Reason::OnlyWorker,
            Some(_) => Reason::LeastCost,
            None => Reason::LeastLoaded,
        }
    }
}

/// Finds the workers that can take the turn.
///
/// # Errors
/// If no known worker fits the turn, whether it is usable now or not.
pub(super) fn find_candidates<'a>(
    request: &PlacementRequest<'_>,
    view: &'a Snapshot,
    now: Instant,
) -> Result<Candidates<'a>, NoWorker> {
    let workers = view.worker_table().workers();
    let worker_count = workers.len();
    let model = view.required_model(request.model);
    let (mut fresh, mut stale) = (Vec::with_capacity(worker_count), vec![]);
    let mut suitable_count = 0;
    for worker in workers {
        let state = worker.state(now, view.report_age_max());
        let runs_whole_turns = state != WorkerState::Disaggregated;
        if !runs_whole_turns
            || !serves_model(model, view, worker)
            || !offers_retention(request, worker)
        {
            continue;
        }
        suitable_count += 1;
        if request.exclude == Some(worker.worker()) {
            continue;
        }
        match state {
            WorkerState::Fresh => fresh.push(worker),
            WorkerState::Stale => stale.push(worker),
            WorkerState::Lost
            | WorkerState::Unhealthy
            | WorkerState::Draining
            | WorkerState::Disaggregated => {}
        }
    }
    if suitable_count == 0 {
        return Err(explain_no_worker(request, view, now));
    }
    let are_all_stale = fresh.is_empty();
    let workers = if are_all_stale { stale } else { fresh };
    Ok(Candidates { workers, are_all_stale, has_one_worker: worker_count == 1 })
}

/// Whether the worker offers the turn's retention, if the turn asks for one.
fn offers_retention(request: &PlacementRequest<'_>, worker: WorkerStats<'_>) -> bool {
    request.retention.is_none_or(|retention| worker.offers(retention))
}

/// Whether the worker's engine serves the model that a turn requires, if it requires one.
pub(super) fn serves_model(model: Option<&str>, view: &Snapshot, worker: WorkerStats<'_>) -> bool {
    let Some(model) = model else { return true };
    let facts = view.agent(worker.worker()).facts.as_ref();
    facts.is_some_and(|facts| facts.description.engine.serves(model))
}

/// Returns which requirement of the turn no worker fits.
fn explain_no_worker(request: &PlacementRequest<'_>, view: &Snapshot, now: Instant) -> NoWorker {
    let runs_whole_turns = |worker| view.state(worker, now) != WorkerState::Disaggregated;
    let descriptions = || {
        let workers = view.workers().filter(move |(worker, ..)| runs_whole_turns(*worker));
        workers.map(|(_, _, facts)| &facts.description)
    };
    let model = view.required_model(request.model);
    let serving_agents =
        || descriptions().filter(|agent| model.is_none_or(|name| agent.engine.serves(name)));
    match (request.model, request.retention) {
        _ if view.workers().next().is_none() => NoWorker::Unusable,
        _ if descriptions().next().is_none() => NoWorker::Disaggregated,
        (Some(model), _) if serving_agents().next().is_none() => {
            let names = descriptions().flat_map(|agent| agent.engine.served_names());
            NoWorker::Model { model: model.to_owned(), offered: join_sorted(names.collect()) }
        }
        (_, Some(retention)) => {
            let names = serving_agents()
                .flat_map(|agent| agent.retentions.iter().map(|offered| offered.as_str()));
            NoWorker::Retention { requested: retention, offered: join_sorted(names.collect()) }
        }
        (_, None) => NoWorker::Unusable,
    }
}

/// Joins the names in order, without repeating any.
fn join_sorted(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
