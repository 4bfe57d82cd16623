//! Tests placement over random fleets.
//!
//! A placement costs least and is deterministic, and the workers that are skipped early would not
//! have been chosen.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn a_choice_is_fresh_costs_least_and_is_the_same_again(
        loads in prop::collection::vec((0..80_u32, 0..1_000_000_u64, 0..300_000_u64), 1..6),
        resident_tokens in prop::collection::vec(0..60_000_u64, 6),
        silent in prop::collection::vec(any::<bool>(), 6),
        digest in any::<u64>(),
    ) {
        let now = start();
        let later = now + 4 * SECOND;
        let mut state = engines(loads.len(), now);
        for (agent, (turns, used, backlog)) in loads.iter().enumerate() {
            if !silent[agent] {
                let loaded = |rank: &mut RankLoad| {
                    rank.turns_running = *turns;
                    rank.pool_used_tokens = figure(*used);
                    rank.prefill_backlog_tokens = figure(*backlog);
                };
                report_load(&mut state, agent, loaded, later);
            }
        }
        let overlap = resident(&resident_tokens[..loads.len()]);
        let ask = PlacementRequest { prompt: prompt(60_000, &overlap), ..request(digest) };
        let view = Arc::new(state.snapshot());
        let placement = place(&ask, &view, later).unwrap();
        prop_assert_eq!(&place(&ask, &view, later).unwrap(), &placement);
        let all_silent = silent[..loads.len()].iter().all(|&silent| silent);
        prop_assert_eq!(placement.reason == Reason::StaleView, all_silent);
        let is_silent = silent[placement.worker.agent.slot()];
        prop_assert!(all_silent || !is_silent, "a silent worker was chosen");
        let cost = |(_, one): &(WorkerRef, Figures)| one.cost_ms;
        let own = placement.figures.iter().find(|one| one.0 == placement.worker).map(cost);
        prop_assert_eq!(own, placement.figures.iter().map(cost).min());
    }

    #[test]
    fn what_is_not_reckoned_to_the_end_would_not_have_been_chosen(
        loads in loads(),
        resident_tokens in prop::collection::vec(prop_oneof![3 => Just(0), 1 => 0..60_000_u64], 40),
        sessions in prop::collection::vec((0..40_usize, 0..200_000_u64, 0..2_000_u64), 0..40),
        home in prop::option::of(0..40_usize),
        (returns, has_prompt) in any::<(bool, bool)>(),
        digest in any::<u64>(),
    ) {
        let now = start();
        let mut state = engines(loads.len(), now);
        for (id, (agent, tokens, idle)) in (0..).zip(&sessions) {
            let one = session(id, *tokens, Duration::from_secs(*idle));
            state.apply(AgentKey::first(agent % loads.len()), Update::SessionChanged(one), now);
        }
        let later = now + SECOND;
        let mut leases = vec![];
        for (agent, load) in loads.iter().enumerate() {
            report_load(&mut state, agent, |rank| load.report_load(rank), later);
            let count = &state.agent_with(AgentKey::first(agent)).in_flight[0];
            leases.extend((0..load.sent).map(|_| LoadLease::acquire(count, 3_000)));
        }
        let overlap = resident(&resident_tokens[..loads.len()]);
        let ask = PlacementRequest {
            expects_more_turns: returns,
            sticky: home.and_then(|home| stays(home % loads.len())),
            prompt: prompt(60_000, &overlap).filter(|_| has_prompt),
            ..request(digest)
        };
        let view = state.snapshot();
        let later = later + SECOND / 10;
        let role = EngineRole::Aggregated;
        let found = candidates::find_candidates(&ask, &view, later, role).unwrap();
        let mut all: Vec<(_, (WorkerRef, Figures))> = found
            .workers
            .into_iter()
            .map(|stats| {
                let (worker, one) = (stats.worker(), cost::compute(&ask, &view, stats, later));
                let rank = std::cmp::Reverse(rendezvous_hash(ask.digest, &view, worker));
                ((one.cost_ms, one.sessions, rank), (worker, one))
            })
            .collect();
        all.sort_by_key(|(order, _)| *order);
        let placement = place(&ask, &view, later).unwrap();
        let least = all.iter().take(compared::FIGURES_MAX);
        let best: Vec<(WorkerRef, Figures)> = least.map(|(_, one)| *one).collect();
        let shown = placement.figures.get(..best.len());
        let unasked = ask.sticky.is_some() && !has_prompt;
        prop_assert_eq!(shown, if unasked { None } else { Some(&best[..]) });
        let gains = |home: WorkerRef| {
            let (_, (_, own)) = all.iter().find(|(_, (worker, _))| *worker == home).unwrap();
            own.cost_ms - best[0].1.cost_ms > 500
        };
        let expected = match ask.sticky {
            Some(home) if unasked || !gains(home.worker) => home.worker,
            _ => best[0].0,
        };
        prop_assert_eq!(placement.worker, expected);
    }
}

/// The figures that a worker reports, and the number of turns sent to it since.
#[derive(Debug, Clone)]
struct ReportedLoad {
    turns: u32,
    waiting: Option<u64>,
    used: Option<u64>,
    evictable: Option<u64>,
    tokens_per_s: Option<u64>,
    backlog: Option<u64>,
    sent: u32,
}

impl ReportedLoad {
    fn report_load(&self, rank: &mut RankLoad) {
        let known = |value: Option<u64>| value.and_then(figure);
        rank.turns_running = self.turns;
        rank.requests_waiting = known(self.waiting);
        rank.pool_used_tokens = known(self.used);
        rank.pool_evictable_tokens = known(self.evictable);
        rank.prefill_tokens_per_s = known(self.tokens_per_s);
        rank.prefill_backlog_tokens = known(self.backlog);
    }
}

/// Reports of a few kinds only, so that many workers cost the same.
fn loads() -> impl Strategy<Value = Vec<ReportedLoad>> {
    let kinds = prop::collection::vec(load(), 1..6);
    let picked = |kinds| prop::collection::vec(prop::sample::select(kinds), 1..40);
    kinds.prop_flat_map(picked)
}

fn load() -> impl Strategy<Value = ReportedLoad> {
    let known = |most: u64| prop::option::weighted(0.8, 0..most);
    let rate = prop::option::weighted(0.8, 1_000..50_000_u64);
    let turns = 0..80_u32;
    let figures =
        (turns, known(5), known(1_000_000), known(1_000_000), rate, known(50_000), 0..4_u32);
    figures.prop_map(|(turns, waiting, used, evictable, tokens_per_s, backlog, sent)| {
        ReportedLoad { turns, waiting, used, evictable, tokens_per_s, backlog, sent }
    })
}
