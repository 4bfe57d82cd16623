//! Tests the placement of turns on pairs of a prefill and a decode worker.

use proptest::prelude::*;

use super::*;
use crate::fleet::{pairing::PairClass, testing::disaggregated};

/// The role of an agent's engine, and the size of its pages.
type Role = (EngineRole, u32);

const PREFILL: Role = (EngineRole::Prefill, 1);
const DECODE: Role = (EngineRole::Decode, 1);
const WHOLE: Role = (EngineRole::Aggregated, 1);

/// Returns a fleet of idle engines with these roles.
fn fleet_of(roles: &[Role], now: Instant) -> State {
    let mut state = engines(roles.len(), now);
    for (agent, (role, page_tokens)) in roles.iter().enumerate() {
        let mut description = description(&format!("a{agent}"), 2, 1);
        if *role != EngineRole::Aggregated {
            description = disaggregated(description, role.as_str());
        }
        description.engine.page_tokens = *page_tokens;
        state.apply(
            AgentKey::first(agent),
            Update::StreamBegan { description, sessions: vec![] },
            now,
        );
        report_load(&mut state, agent, |_| {}, now);
    }
    state
}

/// Returns the agents of a placement's prefill and decode workers.
fn pair(state: &State, ask: &PlacementRequest<'_>, now: Instant) -> (Option<usize>, usize) {
    let placement = place(ask, &state.snapshot(), now).unwrap();
    (placement.prefill.map(|prefill| prefill.worker.agent.slot()), placement.worker.agent.slot())
}

#[test]
fn a_turn_goes_to_the_prefill_worker_that_has_its_prefix_and_the_decode_worker_with_room() {
    let now = start();
    let mut state = fleet_of(&[PREFILL, PREFILL, DECODE, DECODE], now);
    let overlap = resident(&[0, 15_000, 0, 0]);
    let ask = PlacementRequest { prompt: prompt(20_000, &overlap), ..request(1) };
    report_load(&mut state, 2, |rank| rank.pool_used_tokens = figure(POOL_TOKENS - 5_000), now);
    assert_eq!(pair(&state, &ask, now), (Some(1), 3));
    // A long queue there outweighs the prefix.
    report_load(&mut state, 1, |rank| rank.prefill_backlog_tokens = figure(400_000), now);
    assert_eq!(pair(&state, &ask, now), (Some(0), 3));
}

#[test]
fn a_session_stays_on_its_decode_worker_and_moves_when_no_prefill_worker_fits_it() {
    let now = start();
    let mut state = fleet_of(&[PREFILL, DECODE, DECODE, (EngineRole::Prefill, 64)], now);
    let overlap = resident(&[0, 0, 0, 0]);
    for home in [1, 2] {
        let ask =
            PlacementRequest { prompt: prompt(1_000, &overlap), sticky: stays(home), ..request(1) };
        assert_eq!(pair(&state, &ask, now), (Some(0), home));
        let blind = PlacementRequest { prompt: None, ..ask };
        assert_eq!(pair(&state, &blind, now), (Some(0), home));
        assert_eq!(place_without_prompt(&blind, &state.snapshot(), now), None);
    }
    // The home's own kind of pages has no prefill worker any more.
    let other = disaggregated(description("a1", 3, 1), "decode");
    let mut other = other;
    other.engine.page_tokens = 16;
    state.apply(
        AgentKey::first(1),
        Update::StreamBegan { description: other, sessions: vec![] },
        now,
    );
    report_load(&mut state, 1, |_| {}, now);
    let ask = PlacementRequest { sticky: stays(1), ..request(1) };
    assert_eq!(pair(&state, &ask, now), (Some(0), 2));
}

#[test]
fn without_a_pair_a_worker_of_whole_turns_serves_and_without_that_the_reason_is_told() {
    let now = start();
    let later = now + 60 * SECOND;
    let ask = request(1);
    assert_eq!(pair(&fleet_of(&[PREFILL, DECODE, WHOLE], now), &ask, now), (Some(0), 1));
    assert_eq!(pair(&fleet_of(&[PREFILL, WHOLE], now), &ask, now), (None, 1));
    assert_eq!(pair(&fleet_of(&[DECODE, WHOLE], now), &ask, now), (None, 1));
    let refused = |roles: &[Role], ask: &PlacementRequest<'_>| {
        place(ask, &fleet_of(roles, now).snapshot(), now).unwrap_err()
    };
    assert_eq!(refused(&[PREFILL, PREFILL], &ask), NoWorker::NoPair);
    assert_eq!(refused(&[PREFILL, (EngineRole::Decode, 2)], &ask), NoWorker::NoPair);
    let several =
        PlacementRequest { pairs: PairUse::Never(Unpaired::SeveralAnswers), ..request(1) };
    let unpaired = NoWorker::Unpaired(Unpaired::SeveralAnswers);
    assert_eq!(refused(&[PREFILL, DECODE], &several), unpaired);
    assert_eq!(pair(&fleet_of(&[PREFILL, DECODE, WHOLE], now), &several, now), (None, 2));
    let model = PlacementRequest { model: Some("other"), ..request(1) };
    assert!(matches!(refused(&[PREFILL, DECODE], &model), NoWorker::Model { .. }));
    // A stale pair is better than none.
    assert_eq!(pair(&fleet_of(&[PREFILL, DECODE], now), &ask, later), (Some(0), 1));
    for (roles, is_ready) in
        [(&[PREFILL, DECODE][..], true), (&[PREFILL, PREFILL], false), (&[DECODE, WHOLE], true)]
    {
        assert_eq!(fleet_of(roles, now).snapshot().check_ready(now).is_ok(), is_ready);
    }
}

/// Returns the pairs of a prefill and a decode agent that fit.
fn all_pairs(view: &Snapshot, prefills: &[usize], decodes: &[usize]) -> Vec<(usize, usize)> {
    let class = |agent: usize| {
        PairClass::read(&view.agents[agent].facts.as_ref().unwrap().description.engine).unwrap()
    };
    let pairs = prefills.iter().flat_map(|prefill| decodes.iter().map(|it| (*prefill, *it)));
    pairs.filter(|(prefill, decode)| class(*prefill).fits(class(*decode))).collect()
}

proptest! {
    #[test]
    fn a_pair_fits_and_costs_least_and_is_the_same_again(
        kinds in prop::collection::vec((0..3_usize, 1..3_u32, 0..80_u32, 0..300_000_u64), 1..10),
        resident_tokens in prop::collection::vec(0..60_000_u64, 10),
        excluded in prop::option::of(0..10_usize),
        home in prop::option::of(0..10_usize),
        (digest, has_prompt) in any::<(u64, bool)>(),
    ) {
        let now = start();
        let roles = [EngineRole::Prefill, EngineRole::Decode, EngineRole::Aggregated];
        let all: Vec<Role> = kinds.iter().map(|kind| (roles[kind.0], kind.1)).collect();
        let mut state = fleet_of(&all, now);
        for (agent, (_, _, turns, backlog)) in kinds.iter().enumerate() {
            report_load(&mut state, agent, |rank| {
                rank.turns_running = *turns;
                rank.prefill_backlog_tokens = figure(*backlog);
            }, now);
        }
        let overlap = resident(&resident_tokens[..kinds.len()]);
        let home = home.filter(|home| *home < kinds.len());
        let ask = PlacementRequest {
            prompt: prompt(60_000, &overlap).filter(|_| has_prompt),
            exclude: excluded.map(at),
            sticky: home.and_then(stays),
            ..request(digest)
        };
        let view = state.snapshot();
        let placed = place(&ask, &view, now);
        prop_assert_eq!(&place(&ask, &view, now), &placed);
        let is_excluded = |agent: usize| excluded == Some(agent);
        let usable = |role| -> Vec<usize> {
            (0..all.len()).filter(|it| all[*it].0 == role && !is_excluded(*it)).collect()
        };
        let pairs = all_pairs(&view, &usable(EngineRole::Prefill), &usable(EngineRole::Decode));
        let Ok(placement) = placed else {
            let has_none = pairs.is_empty() && usable(EngineRole::Aggregated).is_empty();
            prop_assert!(has_none, "{:?}, although {:?}", placed, pairs);
            return Ok(());
        };
        prop_assert_ne!(excluded, Some(placement.worker.agent.slot()));
        let is_home_whole =
            home.is_some_and(|home| usable(EngineRole::Aggregated).contains(&home));
        let Some(prefill) = placement.prefill else {
            prop_assert!(pairs.is_empty() || is_home_whole, "a pair was left out: {:?}", pairs);
            prop_assert!(usable(EngineRole::Aggregated).contains(&placement.worker.agent.slot()));
            return Ok(());
        };
        let chosen = (prefill.worker.agent.slot(), placement.worker.agent.slot());
        prop_assert!(pairs.contains(&chosen), "{:?} is not of {:?}", chosen, pairs);
        let cost = |ask: &PlacementRequest<'_>, agent: usize| {
            cost::compute(ask, &view, view.worker_table().get(at(agent)).unwrap(), now).cost_ms
        };
        let bare = PlacementRequest { sticky: None, ..ask };
        let sum = |(prefill, decode): (usize, usize)| cost(&bare, prefill) + cost(&ask, decode);
        let is_decode = |home: usize| pairs.iter().any(|(_, decode)| *decode == home);
        let is_home_decode = home.is_some_and(is_decode);
        let least = pairs.iter().map(|one| sum(*one)).min().unwrap();
        // A session may stay although another pair costs a little less, and without the prompt the
        // turns of a session keep to one prefill worker.
        if has_prompt && !is_home_decode {
            prop_assert_eq!(sum(chosen), least);
        } else if has_prompt {
            prop_assert!(sum(chosen) <= least + 1_000 || Some(chosen.1) != home);
        } else if is_home_decode {
            prop_assert_eq!(Some(chosen.1), home);
        }
    }
}
