//! Tests of the whole placement simulator: counts add up, and equal seeds give equal results.

use std::{env, io::Write as _, path::PathBuf, sync::Arc, time::Duration};

use clap::ValueEnum as _;
use tests::{
    replay::load,
    sim::{
        corpus::{Choice, Corpus},
        made::Made,
        options::{Churn, Close, Hearing, Mode, Options},
        policy::Kind,
        run::run,
        tally::Tally,
    },
};

const ALL: Choice = Choice { context_tokens_max: None, half: None };

fn made(made: Made, options: Options) -> (Arc<Corpus>, Options) {
    (Arc::new(Corpus::new(&made.trace(options.workers), 512, ALL)), made.load(options))
}

/// Returns the path of a trace, or prints why there is none and returns `None`.
fn trace(name: &str) -> Option<PathBuf> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let folder = env::var_os("BERTH_TRACES").map_or_else(beside, PathBuf::from);
    let path = folder.join(name);
    if path.is_file() {
        return Some(path);
    }
    skip(&format!("no {}; set BERTH_TRACES", path.display()));
    None
}

/// Prints why a test is skipped.
fn skip(reason: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

#[test]
fn every_prompt_token_is_either_found_or_computed() {
    let small = Options { pool_tokens: Some(400_000), ..Options::default() };
    for (workload, close) in [(Made::Herd, Close::None), (Made::Skew, Close::Free)] {
        let (corpus, options) = made(workload, Options { close, ..small });
        for &kind in Kind::value_variants() {
            let tally = run(&corpus, &options, kind, 1);
            let computed: u64 = tally.prefilled_tokens.iter().sum();
            assert_eq!(tally.matched_tokens + computed, tally.input_tokens, "{kind:?}");
            assert!(tally.ttft.len() > 200, "{kind:?} answered {} turns", tally.ttft.len());
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_counts() {
    let faults = Hearing {
        lag: Duration::from_millis(100),
        loss_ratio: 0.01,
        close_loss_ratio: 0.1,
        close_twice_ratio: 0.1,
    };
    let base = Options {
        hearing: faults,
        churn: Churn::Once,
        close: Close::Free,
        pool_tokens: Some(500_000),
        ..Options::default()
    };
    for mode in [Mode::None, Mode::Tagged, Mode::Pinned] {
        let (corpus, options) = made(Made::Skew, Options { mode, ..base });
        for &kind in Kind::value_variants() {
            let tally = run(&corpus, &options, kind, 7);
            assert_eq!(tally, run(&corpus, &options, kind, 7), "{kind:?} {mode:?}");
        }
    }
}

#[test]
fn engines_with_one_pool_find_at_least_what_separate_pools_keep() {
    let small = Options { pool_tokens: Some(300_000), ..Options::default() };
    let (corpus, options) = made(Made::Skew, small);
    let hit = |kind| run(&corpus, &options, kind, 3).token_hit_ratio();
    let best =
        [Kind::Berth, Kind::Sticky, Kind::CacheAware].map(hit).into_iter().fold(0.0, f64::max);
    let (lru, clairvoyant) = (hit(Kind::Pooled), hit(Kind::PooledClairvoyant));
    assert!(lru >= best && clairvoyant >= lru, "{best} {lru} {clairvoyant}");
}

#[test]
fn who_is_told_of_ends_that_nobody_tells_hears_them_alone() {
    let small = Options { workers: 3, pool_tokens: Some(60_000), ..Options::default() };
    let (corpus, options) = made(Made::Herd, small);
    // Users play one session after another, and each session leaves KV that is not needed again.
    let options = Options { users: 9, horizon: Duration::from_secs(600), ..options };
    let of = |close, kind| {
        let Tally { closed, matched_tokens, prefilled_tokens, .. } =
            run(&corpus, &Options { close, ..options }, kind, 3);
        (closed, matched_tokens, prefilled_tokens)
    };
    let (told, untold) = (of(Close::None, Kind::Told), of(Close::None, Kind::Berth));
    let computed = |(_, _, prefilled): &(u64, u64, Vec<u64>)| prefilled.iter().sum::<u64>();
    assert!(computed(&told) < computed(&untold), "{told:?} {untold:?}");
    assert_eq!(told.0, 0, "engines are told nothing");
    assert_eq!(of(Close::Free, Kind::Told), of(Close::Free, Kind::Berth), "all know it");
}

#[test]
fn lost_events_cost_recomputation_and_nothing_else() {
    let base = Options { pool_tokens: Some(400_000), ..Options::default() };
    let (corpus, options) = made(Made::Skew, base);
    let heard = run(&corpus, &options, Kind::Berth, 2);
    let hearing = Hearing { loss_ratio: 0.05, ..Hearing::PERFECT };
    let lossy = run(&corpus, &Options { hearing, ..options }, Kind::Berth, 2);
    assert_eq!((lossy.wedges, lossy.dropped, lossy.retried), (0, 0, 0));
    let computed: u64 = lossy.prefilled_tokens.iter().sum();
    assert_eq!(lossy.matched_tokens + computed, lossy.input_tokens);
    let (heard, lossy) = (heard.token_hit_ratio(), lossy.token_hit_ratio());
    assert!(lossy > heard - 0.05, "{lossy} of {heard}: what was lost is computed once");
}

#[test]
fn a_herd_behind_one_system_prompt_spreads() {
    let (corpus, options) = made(Made::Herd, Options::default());
    for seed in 0..3 {
        let imbalance = run(&corpus, &options, Kind::Berth, seed).prefill_imbalance();
        assert!(imbalance <= 1.5, "seed {seed}: {imbalance}");
    }
}

#[test]
fn one_endless_pool_finds_what_the_trace_repeats() {
    let Some(path) = trace("mooncake_conversation.jsonl.gz") else { return };
    let corpus = Arc::new(Corpus::new(&load::trace(&path).unwrap(), 512, ALL));
    // The rate is so low that no request comes before the request that it repeats is computed.
    let options = Options { workers: 1, pool_tokens: None, rate: 0.05, ..Options::default() };
    let tally = run(&corpus, &options, Kind::RoundRobin, 0);
    // A direct count of the trace gives 0.3736: the share of prompt tokens that were sent before.
    assert!((tally.token_hit_ratio() - 0.3736).abs() < 0.0005, "{}", tally.token_hit_ratio());
}

#[test]
fn pins_without_a_bound_wedge_and_bounded_ones_do_not() {
    let base = Options { mode: Mode::Pinned, pool_tokens: Some(300_000), ..Options::default() };
    let wedges = |pin_budget_ratio| {
        let (corpus, options) = made(Made::Skew, Options { pin_budget_ratio, ..base });
        run(&corpus, &options, Kind::Sticky, 0).wedges
    };
    assert!(wedges(1.0) > 0);
    assert_eq!(wedges(0.4), 0);
}
