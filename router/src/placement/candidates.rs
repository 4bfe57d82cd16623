//! Finds the workers that can take a turn, for the placement, which then compares their costs.

use std::time::Instant;

use contract::load::{EngineRole, Retention};

use super::{PlacementRequest, Reason, Unpaired};
use crate::fleet::{
    agent::Agent,
    snapshot::Snapshot,
    worker::{WorkerRef, WorkerState},
    worker_table::WorkerStats,
};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoWorker {
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
    #[error("no worker serves model {model:?}; served are: {offered}")]
    Model { model: String, offered: String },
    /// No worker that serves the model offers the retention. `reason` is why one of them doesn't.
    #[error(
        "no worker offers retention {}: {reason}; ask for one of these: {offered}",
        .requested.as_str()
    )]
    Retention { requested: Retention, offered: String, reason: String },
    /// No worker that fits otherwise has the weights.
    #[error("no worker has weights {wanted}; workers have: {offered}")]
    Weights { wanted: String, offered: String },
}

#[derive(Debug)]
pub(super) struct Candidates<'a> {
    /// The *fresh* ones: their agents were heard recently. If there are none, the *stale* ones. If
    /// there are none either, the *held* ones.
    pub(super) workers: Vec<WorkerStats<'a>>,
    /// Or held.
    pub(super) are_all_stale: bool,
    /// In the whole fleet.
    pub(super) has_one_worker: bool,
}

impl Candidates<'_> {
    /// For a placement that only the cost decided.
    pub(super) fn reason(&self, request: &PlacementRequest<'_>) -> Reason {
        match request.prompt {
            _ if self.are_all_stale => Reason::StaleView,
            _ if self.has_one_worker => Reason::OnlyWorker,
            Some(_) => Reason::LeastCost,
            None => Reason::LeastLoaded,
        }
    }
}

/// Fails if no known worker fits the turn, whether it is usable now or not.
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

pub(super) fn has_wanted_weights(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    worker: WorkerRef,
) -> bool {
    let Some(wanted) = request.weights else { return true };
    let report = view.agent(worker).report.as_ref();
    report.is_some_and(|(report, _)| wanted.matches(&report.weights))
}

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

fn offers_retention(request: &PlacementRequest<'_>, worker: WorkerStats<'_>) -> bool {
    request.retention.is_none_or(|retention| worker.offers(retention))
}

pub(super) fn serves_model(model: Option<&str>, view: &Snapshot, worker: WorkerStats<'_>) -> bool {
    let Some(model) = model else { return true };
    let facts = view.agent(worker.worker()).facts.as_ref();
    facts.is_some_and(|facts| facts.description.engine.serves(model))
}

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

fn join_sorted(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
