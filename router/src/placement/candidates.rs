//! Finds the workers that can take a turn, whatever it costs.
//!
//! Their engine must run whole turns, serve the turn's model and offer its retention, and their
//! agent must be connected.

use std::time::Instant;

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
    /// No worker offers the retention.
    #[error("no worker offers retention {asked}; offered are: {offered}")]
    Retention {
        /// The retention that was asked for.
        asked: &'static str,
        /// The retentions that workers serving the model offer.
        offered: String,
    },
}

/// The workers to choose from.
#[derive(Debug)]
pub(super) struct Candidates<'a> {
    /// All fresh workers; if there are none, all stale ones.
    pub(super) workers: Vec<WorkerStats<'a>>,
    /// Whether all of them are stale.
    pub(super) stale: bool,
    /// Whether the fleet has only one worker.
    pub(super) only: bool,
}

impl Candidates<'_> {
    /// Returns the reason for a placement that only the cost decided.
    pub(super) fn reason(&self, request: &PlacementRequest<'_>) -> Reason {
        match request.prompt {
            _ if self.stale => Reason::StaleView,
            _ if self.only => Reason::OnlyWorker,
            Some(_) => Reason::LeastCost,
            None => Reason::LeastLoaded,
        }
    }
}

/// Finds the workers that can take the turn.
pub(super) fn find_candidates<'a>(
    request: &PlacementRequest<'_>,
    view: &'a Snapshot,
    now: Instant,
) -> Result<Candidates<'a>, NoWorker> {
    let workers = view.worker_table().workers();
    let known = workers.len();
    let (mut fresh, mut stale) = (Vec::with_capacity(known), vec![]);
    let mut suitable = 0;
    for worker in workers {
        let state = worker.state(now, view.report_age_max());
        let runs_whole_turns = state != WorkerState::Disaggregated;
        if !runs_whole_turns || !serves(request, view, worker) || !offers(request, worker) {
            continue;
        }
        suitable += 1;
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
    if suitable == 0 {
        return Err(explain_none(request, view, now));
    }
    let all_stale = fresh.is_empty();
    let workers = if all_stale { stale } else { fresh };
    Ok(Candidates { workers, stale: all_stale, only: known == 1 })
}

fn offers(request: &PlacementRequest<'_>, worker: WorkerStats<'_>) -> bool {
    request.retention.is_none_or(|asked| worker.offers(asked))
}

fn serves(request: &PlacementRequest<'_>, view: &Snapshot, worker: WorkerStats<'_>) -> bool {
    let Some(model) = request.model.filter(|_| !view.serves_same_models()) else { return true };
    let facts = view.agent(worker.worker()).facts.as_ref();
    facts.is_some_and(|facts| facts.description.engine.serves(model))
}

/// Returns which requirement of the turn no worker fits.
fn explain_none(request: &PlacementRequest<'_>, view: &Snapshot, now: Instant) -> NoWorker {
    let runs_whole_turns = |worker| view.state(worker, now) != WorkerState::Disaggregated;
    let all = || {
        let workers = view.workers().filter(move |(worker, ..)| runs_whole_turns(*worker));
        workers.map(|(_, _, facts)| &facts.description)
    };
    let model = request.model.filter(|_| !view.serves_same_models());
    let serving = || all().filter(|one| model.is_none_or(|name| one.engine.serves(name)));
    match (request.model, request.retention) {
        _ if view.workers().next().is_none() => NoWorker::Unusable,
        _ if all().next().is_none() => NoWorker::Disaggregated,
        (Some(model), _) if serving().next().is_none() => {
            let names = all().flat_map(|one| one.engine.models.iter().map(String::as_str));
            NoWorker::Model { model: model.to_owned(), offered: join_sorted(names.collect()) }
        }
        (_, Some(asked)) => {
            let names = serving().flat_map(|one| one.retentions.iter().map(|way| way.as_str()));
            NoWorker::Retention { asked: asked.as_str(), offered: join_sorted(names.collect()) }
        }
        (_, None) => NoWorker::Unusable,
    }
}

fn join_sorted(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
