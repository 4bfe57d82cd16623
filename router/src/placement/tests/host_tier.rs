//! Tests of placement where engines keep copies of KV in the host's memory.

use contract::load::HostTier;

use super::*;

const LOAD_TOKENS_PER_S: u64 = 250_000;

fn host_tier() -> Option<HostTier> {
    Some(HostTier {
        total_tokens: figure(2 * POOL_TOKENS),
        used_tokens: figure(0),
        load_tokens_per_s: figure(LOAD_TOKENS_PER_S),
        ..HostTier::default()
    })
}

/// Returns the overlap of a prompt of which agent 0 has the first tokens on its device, and more of
/// them on its host.
fn resident_on_host(device_tokens: u64, host_tokens: u64) -> Overlap {
    let (mut index, mut overlap) = (Index::new(1 << 26), Overlap::default());
    let chain = chain(host_tokens / BLOCK_TOKENS);
    let number = at(0).number().unwrap();
    let device_blocks = usize::try_from(device_tokens / BLOCK_TOKENS).unwrap();
    index.store(number, Tier::Device, None, &chain[..device_blocks]);
    index.store(number, Tier::Host, None, &chain);
    index.look_up(&chain, &mut overlap);
    overlap
}

#[test]
fn a_prompt_on_the_host_is_loaded_and_not_computed() {
    let now = start();
    let mut state = engines(2, now);
    report_load(&mut state, 0, |rank| rank.host = host_tier(), now);
    let overlap = resident_on_host(6_400, 96_000);
    let request = PlacementRequest { prompt: prompt(100_000, &overlap), ..request(1) };
    assert_eq!(placed(&state, &request, now), (0, Reason::LeastCost));
    let figures = figures(&state, &request, now, 0);
    assert_eq!(figures.host_tokens, Some(96_000 - 6_400));
    assert_eq!(figures.resident_tokens, Some(96_000));
    assert_eq!((figures.prefill_ms, figures.load_ms), (Some(200), Some(358)));
    let placement = place(&request, &state.snapshot(), now).unwrap();
    assert_eq!(placement.ttft_expected(), Some(Duration::from_millis(358)), "both at once");
    assert_eq!(placement.uncached_tokens, Some(4_000));
}

#[test]
fn a_host_tier_that_no_agent_reports_counts_for_nothing() {
    let now = start();
    let overlap = resident_on_host(6_400, 96_000);
    let request = PlacementRequest { prompt: prompt(100_000, &overlap), ..request(1) };
    let unmeasured = HostTier { load_tokens_per_s: None, ..host_tier().unwrap() };
    for host in [None, Some(unmeasured)] {
        let mut state = engines(2, now);
        report_load(&mut state, 0, |rank| rank.host = host, now);
        let figures = figures(&state, &request, now, 0);
        assert_eq!((figures.host_tokens, figures.load_ms), (None, None));
        assert_eq!(figures.resident_tokens, Some(6_400));
    }
}

#[test]
fn kv_that_falls_to_the_host_costs_a_load_and_a_larger_host_is_less_crowded() {
    let now = start();
    let displaced = |host: Option<HostTier>| {
        let mut state = engines(1, now);
        for id in 0..5 {
            let known = Update::SessionChanged(session(id, 190_000, 60 * SECOND));
            state.apply(AgentKey::first(0), known, now);
        }
        let full = |rank: &mut RankLoad| {
            rank.pool_evictable_tokens = figure(POOL_TOKENS - 50_000);
            rank.pool_used_tokens = figure(50_000);
            rank.host = host;
        };
        // The forecast of returns is as old as the report before.
        let later = now + SECOND;
        report_load(&mut state, 0, full, later);
        let overlap = resident(&[]);
        let request = PlacementRequest { prompt: prompt(60_000, &overlap), ..request(1) };
        let figures = figures(&state, &request, later, 0);
        (figures.displacement_ms.unwrap(), figures.crowding_ms)
    };
    let (recomputed_ms, crowded_ms) = displaced(None);
    let (loaded_ms, less_crowded_ms) = displaced(host_tier());
    assert!(recomputed_ms > 1_000, "{recomputed_ms} ms");
    let ratio = recomputed_ms as f64 / loaded_ms as f64;
    assert!((ratio - 12.5).abs() < 0.5, "{recomputed_ms} ms, {loaded_ms} ms");
    let is_halved = less_crowded_ms.abs_diff(crowded_ms / 2) <= 1 + crowded_ms / 500;
    assert!(crowded_ms > 0 && is_halved, "{crowded_ms} ms, {less_crowded_ms} ms");
}
