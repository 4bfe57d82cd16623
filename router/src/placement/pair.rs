//! Chooses a prefill and a decode worker for a turn that two engines run together. Pure.
//!
//! The session belongs to the decode worker, and stays there as on any worker. The decode worker's
//! cost has the time to transfer the part of the prompt that it lacks, and the cost of its best
//! prefill worker, so a decode worker whose partners are busy is chosen less. A turn that no pair
//! can take goes to a worker that runs whole turns, if there is one.

use std::{cmp::Reverse, time::Instant};

use contract::load::EngineRole;

use super::{
    CACHE_KEY_SLACK_MS, Figures, NoWorker, Placement, PlacementRequest, candidates,
    compared::SortKey, cost, place_in_role, rendezvous_hash, sticky,
};
use crate::fleet::{
    pairing::PairClass, snapshot::Snapshot, worker::WorkerRef, worker_table::WorkerStats,
};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PairUse {
    #[default]
    May,
    /// Only an engine that runs whole turns can run it.
    Never(Unpaired),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unpaired {
    /// A hand-off has one prompt and one answer.
    #[error(
        "a pair of a prefill and a decode engine runs one prompt with one answer: send the prompts \
         one by one with n = 1"
    )]
    SeveralAnswers,
    /// The answer begins with the prompt and its log probabilities, in a form that isn't merged.
    #[error(
        "a pair of a prefill and a decode engine can't echo the prompt: leave `echo` out, or ask \
         /generate with return_logprob and logprob_start_len"
    )]
    Echo,
    #[error("no engine takes this request: every engine runs in prefill or decode mode")]
    NotGenerated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillPlacement {
    pub worker: WorkerRef,
    pub uncached_tokens: Option<u64>,
    pub figures: Figures,
}

pub(super) fn place(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, NoWorker> {
    let place_whole = || place_in_role(request, view, now, EngineRole::Aggregated, |_| Some(0));
    if let PairUse::Never(reason) = request.pairs {
        return place_whole().map_err(|error| match error {
            NoWorker::Disaggregated => NoWorker::Unpaired(reason),
            other => other,
        });
    }
    let session_role = sticky(request).map(|sticky| view.agent(sticky.worker).role());
    if session_role == Some(EngineRole::Aggregated)
        && let Ok(placement) = place_whole()
    {
        return Ok(placement);
    }
    let pair_error = match place_pair(request, view, now) {
        Ok(placement) => return Ok(placement),
        Err(error) => error,
    };
    place_whole().map_err(|error| match error {
        NoWorker::Disaggregated => pair_error,
        other => other,
    })
}

/// Adds the prefill half to the placement of a turn that must run on a given decode worker. Returns
/// any other placement as it is.
pub(crate) fn complete(
    placement: Placement,
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, NoWorker> {
    if view.agent(placement.worker).role() != EngineRole::Decode {
        return Ok(placement);
    }
    let prefills = Prefills::find(request, view, now)?;
    add_prefill(placement, &prefills, request, view)
}

fn place_pair(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    now: Instant,
) -> Result<Placement, NoWorker> {
    let prefills = Prefills::find(request, view, now)?;
    let cost_ms = |decode: WorkerStats<'_>| Some(prefills.best_for(decode)?.figures.cost_ms);
    let decode = place_in_role(request, view, now, EngineRole::Decode, cost_ms);
    let decode = decode.map_err(|error| match error {
        NoWorker::Unusable | NoWorker::Disaggregated => NoWorker::NoPair,
        other => other,
    })?;
    add_prefill(decode, &prefills, request, view)
}

fn add_prefill(
    decode: Placement,
    prefills: &Prefills,
    request: &PlacementRequest<'_>,
    view: &Snapshot,
) -> Result<Placement, NoWorker> {
    let stats = view.worker_table().get(decode.worker);
    let best = stats.and_then(|stats| prefills.best_for(stats)).ok_or(NoWorker::NoPair)?;
    let Prefill { worker, figures } = best;
    let stats = view.worker_table().get(worker);
    let parts = stats.and_then(|stats| cost::prompt_parts(request, stats));
    let uncached_tokens = parts.map(|parts| parts.uncached_tokens);
    let prefill = PrefillPlacement { worker, uncached_tokens, figures };
    Ok(Placement { prefill: Some(prefill), ..decode })
}

#[derive(Debug)]
struct Prefills {
    /// Real fleets have a few classes.
    by_class: Vec<(PairClass, Choice)>,
}

#[derive(Debug, Clone, Copy)]
struct Choice {
    least: (SortKey, Prefill),
    /// The one that the session's digest prefers.
    preferred: (u64, Prefill),
}

#[derive(Debug, Clone, Copy)]
struct Prefill {
    worker: WorkerRef,
    figures: Figures,
}

impl Prefills {
    fn find(
        request: &PlacementRequest<'_>,
        view: &Snapshot,
        now: Instant,
    ) -> Result<Self, NoWorker> {
        // No session and no retention is on a prefill worker.
        let request = PlacementRequest { sticky: None, retention: None, ..*request };
        let candidates = candidates::find_candidates(&request, view, now, EngineRole::Prefill)
            .map_err(|error| match error {
                NoWorker::Unusable | NoWorker::Disaggregated => NoWorker::NoPair,
                other => other,
            })?;
        let mut by_class: Vec<(PairClass, Choice)> = vec![];
        for stats in candidates.workers {
            let Some(class) = stats.pair_class() else { continue };
            let worker = stats.worker();
            let figures = cost::compute(&request, view, stats, now);
            let prefill = Prefill { worker, figures };
            let hash = rendezvous_hash(request.digest, view, worker);
            let key = (figures.cost_ms, figures.sessions, Reverse(hash));
            match by_class.iter_mut().find(|(known, _)| *known == class) {
                Some((_, choice)) => choice.add(key, hash, prefill),
                None => {
                    let choice = Choice { least: (key, prefill), preferred: (hash, prefill) };
                    by_class.push((class, choice));
                }
            }
        }
        // Without the prompt, the turns of a session keep to one worker, which has its prefix.
        if request.prompt.is_none() {
            by_class.iter_mut().for_each(|(_, choice)| choice.prefer());
        }
        Ok(Self { by_class })
    }

    fn best_for(&self, decode: WorkerStats<'_>) -> Option<Prefill> {
        let class = decode.pair_class()?;
        let fitting = self.by_class.iter().filter(|(other, _)| class.fits(*other));
        fitting.map(|(_, choice)| choice.least).min_by_key(|(key, _)| *key).map(|(_, best)| best)
    }
}

impl Choice {
    fn add(&mut self, key: SortKey, hash: u64, prefill: Prefill) {
        if key < self.least.0 {
            self.least = (key, prefill);
        }
        if hash > self.preferred.0 {
            self.preferred = (hash, prefill);
        }
    }

    fn prefer(&mut self) {
        let (hash, prefill) = self.preferred;
        let Figures { cost_ms, sessions, .. } = prefill.figures;
        if cost_ms <= self.least.1.figures.cost_ms.saturating_add(CACHE_KEY_SLACK_MS) {
            self.least = ((cost_ms, sessions, Reverse(hash)), prefill);
        }
    }
}
