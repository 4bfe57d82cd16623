//! Runs all policies over all seeds, on as many threads as there are cores.
//!
//! The result doesn't depend on which thread ran what.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use parking_lot::Mutex;

use super::{
    corpus::Corpus, options::SimOptions, policy::PolicyKind, report::PolicySummary, run,
    stats::RunStats,
};

/// Runs each policy once per seed; returns summaries in the order of `kinds`.
#[must_use]
pub fn compare(
    corpus: &Arc<Corpus>,
    options: &SimOptions,
    kinds: &[PolicyKind],
    seeds: u64,
) -> Vec<PolicySummary> {
    let plan: Vec<(PolicyKind, u64)> =
        kinds.iter().flat_map(|&kind| (0..seeds).map(move |seed| (kind, seed))).collect();
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<RunStats>>> = plan.iter().map(|_| Mutex::default()).collect();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(kind, seed)) = plan.get(at) else { break };
            let stats = run::run(corpus, options, kind, seed);
            *results[at].lock() = Some(stats);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let mut done = results
        .into_iter()
        .map(|result| result.into_inner().expect("every run of the plan was run"));
    let per_kind = usize::try_from(seeds).expect("seeds are few");
    kinds
        .iter()
        .map(|kind| {
            let of_kind: Vec<RunStats> = done.by_ref().take(per_kind).collect();
            PolicySummary::new(kind.as_str(), &of_kind)
        })
        .collect()
}
