//! Runs all policies over all seeds, on as many threads as there are cores.
//!
//! The result doesn't depend on which thread ran what.

use std::sync::Arc;

use rayon::prelude::*;

use super::{
    corpus::Corpus, options::SimOptions, policy::PolicyKind, report::PolicySummary, run::run,
};

/// Runs each policy once per seed; returns summaries in the order of `kinds`.
#[must_use]
pub fn compare(
    corpus: &Arc<Corpus>,
    options: &SimOptions,
    kinds: &[PolicyKind],
    seeds: u64,
) -> Vec<PolicySummary> {
    let runs = |kind: PolicyKind| -> Vec<_> {
        (0..seeds).into_par_iter().map(|seed| run(corpus, options, kind, seed)).collect()
    };
    kinds.par_iter().map(|&kind| PolicySummary::new(kind, &runs(kind))).collect()
}
