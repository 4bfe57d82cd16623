//! Finds the workers that can take a turn, for the placement, which then compares their costs.
//!
//! A *turn* is one request and its answer. A *worker* is one data-parallel rank of an engine, and
//! an *agent* runs beside each engine. A worker can take a turn if its agent is connected and its
//! engine is healthy and not draining. The engine must also run the part of the turn that is asked
//! for, serve the turn's model, and offer the turn's *retention*, that is, the way to keep the
//! session's KV between turns. The parent module calls this one. `cost` then says which of the
//! workers to prefer.

use std::time::Instant;

use proto::load::{EngineRole, Retention};

use super::{PlacementRequest, Reason, Unpaired};
use crate::fleet::{
    agent::Agent,
    snapshot::Snapshot,
    worker::{WorkerRef, WorkerState},
    worker_table::WorkerStats,
};

/// Why no worker can take the turn.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoWorker {
    /// No worker is usable now.
    #[error("no worker can take turns now; try again")]
    Unusable,
    /// No engine runs whole turns, and none can form a pair.
    #[error(
        "every engine runs in prefill or decode mode, and no two of them can run a turn together; \
         GET /v1/workers says why: start engines that fit, or one without --disaggregation-mode"
    )]
    Disaggregated,
    /// No engine runs whole turns, and a half of each pair can't be used now.
    #[error("no pair of a prefill and a decode engine can take turns now; try again")]
    NoPair,
    /// No engine runs whole turns, and the turn needs one.
    #[error(transparent)]
    Unpaired(Unpaired),
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
        "no worker offers retention {}: {reason}; ask for one of these: {offered}",
        .requested.as_str()
    )]
    Retention {
        /// The retention that was asked for.
        requested: Retention,
        /// The retentions that workers serving the model offer.
        offered: String,
        /// Why one of these workers doesn't offer it.
        reason: String,
    },
    /// No worker that fits otherwise has the weights.
    #[error("no worker has weights {wanted}; workers have: {offered}")]
    Weights {
        /// The weights that were asked for.
        wanted: String,
        /// The weights of the workers.
        offered: String,
    },
}

/// The workers to choose from.
#[derive(Debug)]
pub(super) struct Candidates<'a> {
    /// The workers that can take the turn and are *fresh*: their agents were heard recently. If
    /// there are none, the *stale* ones; see [`WorkerState::Stale`]. If there are none either, the
    /// *held* ones.
    pub(super) workers: Vec<WorkerStats<'a>>,
    /// Whether all of `workers` are stale or held.
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

/// Finds the workers with this role that can take the turn.
///
/// # Errors
/// If no known worker fits the turn, whether it is usable now or not.
pub(super) fn find_candidates<'a>(
    request: &PlacementRequest<'_>,
    view: &'a Snapshot,
    now: Instant,
    role: EngineRole,
) -> Result<Candidates<'a>, NoWorker> {
    check_fixed_weights(request, view)?;
    let workers = view.worker_table().workers();
    let worker_count = workers.len();
    let model = view.required_model(request.model);
    let (mut fresh, mut stale) = (Vec::with_capacity(worker_count), vec![]);
    let (mut held, mut suitable_count) = (vec![], 0);
    let mut other_weights = vec![];
    for worker in workers {
        let state = worker.state(now, view.report_age_max());
        let can_run = worker.role() == role && state != WorkerState::Disaggregated;
        if !can_run || !serves_model(model, view, worker) || !offers_retention(request, worker) {
            continue;
        }
        if !has_wanted_weights(request, view, worker.worker()) {
            other_weights.push(worker.worker());
            continue;
        }
        suitable_count += 1;
        if request.exclude == Some(worker.worker()) {
            continue;
        }
        match state {
            WorkerState::Fresh => fresh.push(worker),
            WorkerState::Stale => stale.push(worker),
            WorkerState::Held => held.push(worker),
            WorkerState::Lost
            | WorkerState::Unhealthy
            | WorkerState::Draining
            | WorkerState::Disaggregated => {}
        }
    }
    if suitable_count == 0 && !other_weights.is_empty() {
        return Err(no_weights(request, view, &other_weights));
    }
    if suitable_count == 0 {
        return Err(explain_no_worker(request, view, now, role));
    }
    let are_all_stale = fresh.is_empty();
    // On an engine that its operator holds back, a turn waits for a while.
    let second_choice = if stale.is_empty() { held } else { stale };
    let workers = if are_all_stale { second_choice } else { fresh };
    Ok(Candidates { workers, are_all_stale, has_one_worker: worker_count == 1 })
}

/// Whether the worker's engine has the weights that the turn asks for, if it asks for some.
pub(super) fn has_wanted_weights(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    worker: WorkerRef,
) -> bool {
    let Some(wanted) = request.weights else { return true };
    let report = view.agent(worker).report.as_ref();
    report.is_some_and(|(report, _)| wanted.matches(&report.weights))
}

/// Refuses a turn whose session must stay on a worker with other weights than it asks for.
///
/// # Errors
/// If the worker of the turn's session has other weights.
fn check_fixed_weights(request: &PlacementRequest<'_>, view: &Snapshot) -> Result<(), NoWorker> {
    match request.sticky {
        Some(sticky) if sticky.fixed && !has_wanted_weights(request, view, sticky.worker) => {
            Err(no_weights(request, view, &[sticky.worker]))
        }
        _ => Ok(()),
    }
}

fn no_weights(request: &PlacementRequest<'_>, view: &Snapshot, workers: &[WorkerRef]) -> NoWorker {
    let reports = workers.iter().filter_map(|worker| view.agent(*worker).report.as_ref());
    let offered: Vec<String> = reports.map(|(report, _)| report.weights.to_string()).collect();
    NoWorker::Weights {
        wanted: request.weights.map(ToString::to_string).unwrap_or_default(),
        offered: join_sorted(offered.iter().map(String::as_str).collect()),
    }
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
fn explain_no_worker(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
    role: EngineRole,
) -> NoWorker {
    let can_run = |worker, agent: &Agent| {
        agent.role() == role && view.state(worker, now) != WorkerState::Disaggregated
    };
    let descriptions = || {
        let workers = view.workers().filter(move |(worker, agent, _)| can_run(*worker, agent));
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
            let mut reasons = serving_agents().flat_map(|agent| &agent.retentions_off);
            let said = reasons.find(|off| off.retention == retention);
            let missing_flag = || {
                let flag = retention.engine_flag().unwrap_or("other flags");
                format!("start an engine with {flag}")
            };
            NoWorker::Retention {
                requested: retention,
                offered: join_sorted(names.collect()),
                reason: said.map_or_else(missing_flag, |off| off.reason.clone()),
            }
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
