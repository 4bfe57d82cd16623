//! Which workers could take a turn, whatever it costs: they serve its model, offer its retention,
//! and are heard.

use std::time::Instant;

use proto::load::EngineFacts;

use super::{Question, Reason};
use crate::view::{ClusterView, Facts, WorkerRef, WorkerState};

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

/// The workers to choose from.
#[derive(Debug)]
pub(super) struct Candidates {
    /// Heard of late, or if there are none such, all that are connected.
    pub(super) workers: Vec<WorkerRef>,
    /// None was heard of late.
    pub(super) stale: bool,
    /// The fleet has no other worker.
    pub(super) only: bool,
}

impl Candidates {
    /// Why one of them was taken that nothing spoke for but its cost.
    pub(super) fn reason(&self, question: &Question<'_>) -> Reason {
        match question.prompt {
            _ if self.stale => Reason::StaleView,
            _ if self.only => Reason::OnlyWorker,
            Some(_) => Reason::LeastCost,
            None => Reason::LeastLoaded,
        }
    }
}

/// Finds them.
pub(super) fn candidates(
    question: &Question<'_>,
    view: &ClusterView,
    now: Instant,
) -> Result<Candidates, NoWorker> {
    let (mut fresh, mut stale) = (Vec::with_capacity(view.agents.len()), vec![]);
    let (mut known, mut fitting) = (0, 0);
    for (worker, _, facts) in view.workers() {
        known += 1;
        if !serves(question, view, &facts.description.engine) || !offers(question, facts) {
            continue;
        }
        fitting += 1;
        if question.exclude == Some(worker) {
            continue;
        }
        match view.state(worker, now) {
            WorkerState::Fresh => fresh.push(worker),
            WorkerState::Stale => stale.push(worker),
            WorkerState::Lost | WorkerState::Unhealthy | WorkerState::Draining => {}
        }
    }
    if fitting == 0 {
        return Err(missing(question, view));
    }
    let all_stale = fresh.is_empty();
    let workers = if all_stale { stale } else { fresh };
    Ok(Candidates { workers, stale: all_stale, only: known == 1 })
}

fn offers(question: &Question<'_>, facts: &Facts) -> bool {
    question.retention.is_none_or(|asked| facts.description.retentions.contains(&asked))
}

/// An adapter is named `model:adapter`.
fn serves(question: &Question<'_>, view: &ClusterView, engine: &EngineFacts) -> bool {
    let Some(model) = question.model.filter(|_| !view.is_one_fleet()) else { return true };
    let base = model.split_once(':').map_or(model, |(base, _)| base);
    engine.models.iter().any(|served| served == model || served == base)
}

/// What of the question nobody fits.
fn missing(question: &Question<'_>, view: &ClusterView) -> NoWorker {
    let all = || view.workers().map(|(_, _, facts)| &facts.description);
    let serving = || all().filter(|description| serves(question, view, &description.engine));
    match (question.model, question.retention) {
        _ if all().next().is_none() => NoWorker::Unusable,
        (Some(model), _) if serving().next().is_none() => {
            let names = all().flat_map(|one| one.engine.models.iter().map(String::as_str));
            NoWorker::Model { model: model.to_owned(), offered: listed(names.collect()) }
        }
        (_, Some(asked)) => {
            let names = serving().flat_map(|one| one.retentions.iter().map(|way| way.as_str()));
            NoWorker::Retention { asked: asked.as_str(), offered: listed(names.collect()) }
        }
        (_, None) => NoWorker::Unusable,
    }
}

fn listed(mut names: Vec<&str>) -> String {
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}
