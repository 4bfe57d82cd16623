//! Tests of the whole placement simulator: counts add up, and equal seeds give equal results.

use std::{sync::Arc, time::Duration};

use clap::ValueEnum as _;
use harness::trace_path;
use placement_sim::{
    corpus::{ConversationFilter, Corpus},
    options::{Churn, Close, DeliveryFaults, Mode, SimOptions},
    policy::PolicyKind,
    run::run,
    stats::RunStats,
    synthetic::SyntheticWorkload,
};
use replay::load;

const ALL: ConversationFilter = ConversationFilter { context_tokens_max: None, half: None };

fn build(workload: SyntheticWorkload, options: SimOptions) -> (Arc<Corpus>, SimOptions) {
    (Arc::new(Corpus::new(&workload.trace(options.workers), 512, ALL)), workload.options(options))
}

#[test]
fn every_prompt_token_is_either_found_or_computed() {
    let small = SimOptions { pool_tokens: Some(400_000), ..SimOptions::default() };
    for (workload, close) in
        [(SyntheticWorkload::Herd, Close::None), (SyntheticWorkload::Skew, Close::Free)]
    {
        let (corpus, options) = build(workload, SimOptions { close, ..small });
        for &kind in PolicyKind::value_variants() {
            let stats = run(&corpus, &options, kind, 1);
            let computed: u64 = stats.prefilled_tokens.iter().sum();
            assert_eq!(stats.matched_tokens + computed, stats.input_tokens, "{kind:?}");
            assert!(stats.ttft.len() > 200, "{kind:?} answered {} turns", stats.ttft.len());
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_counts() {
    let faults = DeliveryFaults {
        lag: Duration::from_millis(100),
        loss_ratio: 0.01,
        close_loss_ratio: 0.1,
        close_twice_ratio: 0.1,
    };
    let base = SimOptions {
        delivery_faults: faults,
        churn: Churn::Once,
        close: Close::Free,
        pool_tokens: Some(500_000),
        ..SimOptions::default()
    };
    for mode in [Mode::None, Mode::Tagged, Mode::Pinned] {
        let (corpus, options) = build(SyntheticWorkload::Skew, SimOptions { mode, ..base });
        for &kind in PolicyKind::value_variants() {
            let stats = run(&corpus, &options, kind, 7);
            assert_eq!(stats, run(&corpus, &options, kind, 7), "{kind:?} {mode:?}");
        }
    }
}

#[test]
fn engines_with_one_pool_find_at_least_what_separate_pools_keep() {
    let small = SimOptions { pool_tokens: Some(300_000), ..SimOptions::default() };
    let (corpus, options) = build(SyntheticWorkload::Skew, small);
    let hit = |kind| run(&corpus, &options, kind, 3).token_hit_ratio();
    let best = [PolicyKind::Berth, PolicyKind::Sticky, PolicyKind::CacheAware]
        .map(hit)
        .into_iter()
        .fold(0.0, f64::max);
    let (lru, clairvoyant) = (hit(PolicyKind::Pooled), hit(PolicyKind::PooledClairvoyant));
    assert!(lru >= best && clairvoyant >= lru, "{best} {lru} {clairvoyant}");
}

#[test]
fn only_the_bound_told_learns_of_ends_that_no_client_reports() {
    let small = SimOptions { workers: 3, pool_tokens: Some(60_000), ..SimOptions::default() };
    let (corpus, options) = build(SyntheticWorkload::Herd, small);
    // Users play one session after another, and each session leaves KV that is not needed again.
    let options = SimOptions { users: 9, horizon: Duration::from_secs(600), ..options };
    let counts = |close, kind| {
        let RunStats { closed, matched_tokens, prefilled_tokens, .. } =
            run(&corpus, &SimOptions { close, ..options }, kind, 3);
        (closed, matched_tokens, prefilled_tokens)
    };
    let (told, untold) =
        (counts(Close::None, PolicyKind::Told), counts(Close::None, PolicyKind::Berth));
    let computed = |(_, _, prefilled): &(u64, u64, Vec<u64>)| prefilled.iter().sum::<u64>();
    assert!(computed(&told) < computed(&untold), "{told:?} {untold:?}");
    assert_eq!(told.0, 0, "no engine closed a session");
    assert_eq!(
        counts(Close::Free, PolicyKind::Told),
        counts(Close::Free, PolicyKind::Berth),
        "every policy learns of reported ends"
    );
}

#[test]
fn lost_events_cost_recomputation_and_nothing_else() {
    let base = SimOptions { pool_tokens: Some(400_000), ..SimOptions::default() };
    let (corpus, options) = build(SyntheticWorkload::Skew, base);
    let heard = run(&corpus, &options, PolicyKind::Berth, 2);
    let delivery_faults = DeliveryFaults { loss_ratio: 0.05, ..DeliveryFaults::NONE };
    let lossy = run(&corpus, &SimOptions { delivery_faults, ..options }, PolicyKind::Berth, 2);
    assert_eq!((lossy.wedges, lossy.dropped, lossy.retried), (0, 0, 0));
    let computed: u64 = lossy.prefilled_tokens.iter().sum();
    assert_eq!(lossy.matched_tokens + computed, lossy.input_tokens);
    let (heard, lossy) = (heard.token_hit_ratio(), lossy.token_hit_ratio());
    assert!(lossy > heard - 0.05, "{lossy} of {heard}: a lost event costs one recomputation");
}

#[test]
fn a_herd_behind_one_system_prompt_spreads() {
    let (corpus, options) = build(SyntheticWorkload::Herd, SimOptions::default());
    for seed in 0..3 {
        let imbalance = run(&corpus, &options, PolicyKind::Berth, seed).prefill_imbalance();
        assert!(imbalance <= 1.5, "seed {seed}: {imbalance}");
    }
}

#[test]
fn one_endless_pool_finds_what_the_trace_repeats() {
    let Some(path) = trace_path("mooncake_conversation.jsonl.gz") else { return };
    let corpus = Arc::new(Corpus::new(&load::read_trace(&path).unwrap(), 512, ALL));
    // The rate is so low that no request comes before the request that it repeats is computed.
    let options = SimOptions { workers: 1, pool_tokens: None, rate: 0.05, ..SimOptions::default() };
    let stats = run(&corpus, &options, PolicyKind::RoundRobin, 0);
    // A direct count of the trace gives 0.3736: the share of prompt tokens that were sent before.
    assert!((stats.token_hit_ratio() - 0.3736).abs() < 0.0005, "{}", stats.token_hit_ratio());
}

#[test]
fn pins_without_a_bound_wedge_and_bounded_ones_do_not() {
    let base =
        SimOptions { mode: Mode::Pinned, pool_tokens: Some(300_000), ..SimOptions::default() };
    let wedges = |pin_budget_ratio| {
        let (corpus, options) =
            build(SyntheticWorkload::Skew, SimOptions { pin_budget_ratio, ..base });
        run(&corpus, &options, PolicyKind::Sticky, 0).wedges
    };
    assert!(wedges(1.0) > 0);
    assert_eq!(wedges(0.4), 0);
}

#[test]
fn conversations_without_names_find_what_named_ones_find() {
    for workload in [SyntheticWorkload::Light, SyntheticWorkload::SideBySide] {
        let (corpus, options) = build(workload, SimOptions::default());
        for seed in 0..3 {
            let mean_ms = |kind| run(&corpus, &options, kind, seed).ttft_ms_mean();
            let (named, unnamed) = (mean_ms(PolicyKind::Berth), mean_ms(PolicyKind::BerthUnnamed));
            assert!(unnamed <= 1.05 * named, "{workload:?}, seed {seed}: {unnamed} and {named} ms");
            let others = mean_ms(PolicyKind::CacheAware);
            assert!(
                unnamed <= 1.05 * others,
                "{workload:?}, seed {seed}: {unnamed} and {others} ms"
            );
        }
    }
}

#[test]
fn workers_that_join_or_start_cold_have_their_share() {
    // A worker joins when most sessions have begun, and stay where they are.
    for (churn, share_min) in [(Churn::Join, 0.4), (Churn::Cold, 0.6)] {
        let base = SimOptions { churn, ..SimOptions::default() };
        for workload in [SyntheticWorkload::Light, SyntheticWorkload::SideBySide] {
            let (corpus, options) = build(workload, base);
            for kind in [PolicyKind::Berth, PolicyKind::BerthUnnamed] {
                let computed = run(&corpus, &options, kind, 0).prefilled_tokens;
                let sum: u64 = computed.iter().sum();
                let share = computed[7] as f64 * 8.0 / sum as f64;
                assert!(
                    share >= share_min,
                    "{churn:?}, {workload:?}, {kind:?}: {share} of its share"
                );
            }
        }
    }
}
