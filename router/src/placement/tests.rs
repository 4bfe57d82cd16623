//! Tests of placement through `place`.
//!
//! `random` places on random fleets, `pairs` on fleets of prefill and decode workers.

mod host_tier;
mod pairs;
mod random;
mod staged_prefill;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use blocks::block::{BlockHash, Tier, hash_after};
use blocks::index::{Index, Overlap};
use contract::{
    id::{Digest, SessionKey},
    load::{Figure, LoadReport, RankLoad, Retention, Session, SessionState, Source},
};

use super::*;
use crate::fleet::{
    conversations::{Begun, Conversations},
    lease::LoadLease,
    state::{State, Update},
    testing::{description, fleet, report, start},
    worker::AgentKey,
};

const POOL_TOKENS: u64 = 1_000_000;
const TOKENS_PER_S: u64 = 20_000;
const BLOCK_TOKENS: u64 = 64;
const SECOND: Duration = Duration::from_secs(1);

fn request(digest: u64) -> PlacementRequest<'static> {
    PlacementRequest {
        digest: Digest(digest),
        expects_more_turns: true,
        sticky: None,
        conversations: None,
        prefer: None,
        prompt: None,
        retention: None,
        model: None,
        weights: None,
        exclude: None,
        pairs: PairUse::May,
    }
}

fn at(agent: usize) -> WorkerRef {
    WorkerRef { agent: AgentKey::first(agent), dp_rank: 0 }
}

fn stays(agent: usize) -> Option<Sticky> {
    Some(Sticky::new(at(agent)))
}

fn figure(value: u64) -> Option<Figure> {
    Some(Figure { value, source: Source::Shim, age_ms: 0 })
}

/// Returns the report of an idle engine with all figures: a pool of a million tokens, and a prefill
/// rate of 20,000 tokens per second.
fn idle() -> LoadReport {
    let mut report = report(&[(0, 0)]);
    let rank = &mut report.ranks[0];
    rank.pool_total_tokens = figure(POOL_TOKENS);
    rank.pool_evictable_tokens = figure(0);
    rank.prefill_tokens_per_s = figure(TOKENS_PER_S);
    rank.prefill_backlog_tokens = figure(0);
    report
}

fn report_load(state: &mut State, agent: usize, change: impl FnOnce(&mut RankLoad), now: Instant) {
    let mut report = idle();
    change(&mut report.ranks[0]);
    state.apply(AgentKey::first(agent), Update::Report(report), now);
}

/// Returns a fleet of `count` idle engines, all heard at `now`.
fn engines(count: usize, now: Instant) -> State {
    let mut state = fleet(&vec![(0, 0); count], now);
    for agent in 0..count {
        report_load(&mut state, agent, |_| {}, now);
    }
    state
}

fn chain(blocks: u64) -> Vec<BlockHash> {
    let next = |last: &mut BlockHash, number| {
        *last = hash_after(*last, number);
        Some(*last)
    };
    (0..blocks).scan(BlockHash(7), next).collect()
}

/// Returns the overlap of a prompt, given its resident tokens by worker.
fn resident(tokens: &[u64]) -> Overlap {
    let (mut index, mut overlap) = (Index::new(1 << 26), Overlap::default());
    let most = tokens.iter().max().copied().unwrap_or(0) / BLOCK_TOKENS;
    let chain = chain(most);
    for (agent, &tokens) in tokens.iter().enumerate() {
        let blocks = usize::try_from(tokens / BLOCK_TOKENS).unwrap();
        let number = at(agent).number().unwrap();
        index.store(number, Tier::Device, None, &chain[..blocks]);
    }
    index.look_up(&chain, &mut overlap);
    overlap
}

fn prompt(tokens: u64, overlap: &Overlap) -> Option<PromptOverlap<'_>> {
    Some(PromptOverlap { tokens, block_tokens: BLOCK_TOKENS, overlap })
}

fn session(id: u64, tokens: u64, idle: Duration) -> Session {
    Session {
        key: SessionKey::new("p", id.to_string()).unwrap(),
        retention: Retention::Tagged,
        state: SessionState::Idle,
        dp_rank: 0,
        turns: 1,
        turns_running: 0,
        exclusive: false,
        resident_tokens: figure(tokens),
        idle,
        full_history: false,
        volatile_prefix: None,
        began_unix_ms: 0,
        parent: None,
    }
}

fn placed(state: &State, request: &PlacementRequest<'_>, now: Instant) -> (usize, Reason) {
    let placement = place(request, &state.snapshot(), now).unwrap();
    (placement.worker.agent.slot(), placement.reason)
}

fn figures(state: &State, request: &PlacementRequest<'_>, now: Instant, agent: usize) -> Figures {
    let placement = place(request, &state.snapshot(), now).unwrap();
    let mut compared = placement.figures.iter();
    compared.find(|one| one.0 == at(agent)).expect("the agent was compared").1
}

fn sent(state: &State, agent: usize, tokens: u64) -> LoadLease {
    LoadLease::acquire(&state.snapshot().agents[agent].in_flight[0], tokens)
}

#[test]
fn tokens_become_milliseconds_at_the_measured_rate() {
    let now = start();
    let mut state = engines(2, now);
    report_load(&mut state, 1, |rank| rank.prefill_backlog_tokens = figure(50_000), now);
    let overlap = resident(&[0, 6_400]);
    let ask = PlacementRequest { prompt: prompt(40_000, &overlap), ..request(1) };
    let one = figures(&state, &ask, now, 0);
    assert_eq!((one.wait_ms, one.prefill_ms), (0, Some(2_000)), "40,000 tokens at 20,000/s");
    let other = figures(&state, &ask, now, 1);
    assert_eq!((other.wait_ms, other.prefill_ms), (2_500, Some(1_680)));
    assert_eq!(other.resident_tokens, Some(6_400));
    let parts = other.wait_ms
        + other.prefill_ms.unwrap()
        + other.displacement_ms.unwrap()
        + other.crowding_ms
        + other.blocking_ms.unwrap()
        + other.interference_ms;
    assert_eq!(other.cost_ms, parts);
}

#[test]
fn what_the_worker_has_computed_since_its_report_is_no_wait() {
    let now = start();
    let mut state = engines(1, now);
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(50_000), now);
    assert_eq!(figures(&state, &request(1), now + SECOND, 0).wait_ms, 1_500);
    assert_eq!(figures(&state, &request(1), now + 3 * SECOND, 0).wait_ms, 0);
}

#[test]
fn turns_sent_since_the_report_count() {
    let now = start();
    let state = engines(2, now);
    let overlap = resident(&[12_800, 12_800]);
    let ask = PlacementRequest { prompt: prompt(20_000, &overlap), ..request(1) };
    let (first, _) = placed(&state, &ask, now);
    let lease = sent(&state, first, 7_200);
    let after = figures(&state, &ask, now, first);
    assert_eq!((after.wait_ms, after.turns), (360, 1));
    assert_eq!(placed(&state, &ask, now), (1 - first, Reason::LeastCost));
    drop(lease);
    assert_eq!(placed(&state, &ask, now).0, first);
}

#[test]
fn a_turn_in_the_report_is_not_counted_twice() {
    let now = start();
    let mut state = engines(1, now);
    let _lease = sent(&state, 0, 10_000);
    let loaded = |rank: &mut RankLoad| {
        rank.turns_running = 1;
        rank.prefill_backlog_tokens = figure(10_000);
    };
    report_load(&mut state, 0, loaded, now);
    let one = figures(&state, &request(1), now, 0);
    assert_eq!((one.backlog_tokens, one.turns), (10_000, 1));
}

#[test]
fn sixty_four_sessions_with_one_system_prompt_spread() {
    let now = start();
    let state = engines(8, now);
    // Only the first worker has the system prompt: 15,000 of the 18,000 tokens of each prompt.
    let overlap = resident(&[14_976, 0, 0, 0, 0, 0, 0, 0]);
    let (mut leases, mut computed) = (vec![], [0; 8]);
    for digest in 0..64 {
        let ask = PlacementRequest { prompt: prompt(18_000, &overlap), ..request(digest) };
        let placement = place(&ask, &state.snapshot(), now).unwrap();
        let (agent, tokens) = (placement.worker.agent.slot(), placement.uncached_tokens.unwrap());
        leases.push(sent(&state, agent, tokens));
        computed[agent] += tokens;
    }
    let (most, sum) = (computed.iter().max().unwrap(), computed.iter().sum::<u64>());
    assert!(most * 8 * 10 <= sum * 15, "more than 1.5 times the mean: {computed:?}");
}

#[test]
fn a_herd_spreads_after_its_prompts_are_computed_too() {
    let now = start();
    let mut state = engines(4, now);
    let overlap = resident(&[14_976, 0, 0, 0]);
    let mut counts = [0; 4];
    for digest in 0..32 {
        let ask = PlacementRequest { prompt: prompt(18_000, &overlap), ..request(digest) };
        // Each turn ends before the next one comes, so only the kept KV differs between workers.
        let at = now + SECOND * u32::try_from(digest).unwrap();
        for agent in 0..4 {
            report_load(&mut state, agent, |rank| rank.pool_evictable_tokens = figure(0), at);
        }
        let (agent, _) = placed(&state, &ask, at);
        state.apply(
            AgentKey::first(agent),
            Update::SessionChanged(session(digest, 60_000, Duration::ZERO)),
            at,
        );
        counts[agent] += 1;
    }
    assert!(counts.iter().all(|&count| count >= 4), "{counts:?}");
}

#[test]
fn a_session_moves_for_the_gain_and_not_for_less() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[19_200, 19_200]);
    let ask = PlacementRequest { prompt: prompt(19_200, &overlap), sticky: stays(0), ..request(1) };
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(9_900), now);
    assert_eq!(placed(&state, &ask, now), (0, Reason::Sticky), "495 ms");
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(10_100), now);
    assert_eq!(placed(&state, &ask, now), (1, Reason::Moved), "505 ms");
    // A session that has just moved needs twice the gain.
    let is_recent = Sticky { moved_at: Some(now), ..Sticky::new(at(0)) };
    let again = PlacementRequest { sticky: Some(is_recent), ..ask };
    assert_eq!(placed(&state, &again, now), (0, Reason::Sticky));
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(20_100), now);
    assert_eq!(placed(&state, &again, now), (1, Reason::Moved));
    let later = now + MOVED_RECENTLY_MAX;
    report_load(&mut state, 1, |_| {}, later);
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(10_100), later);
    assert_eq!(placed(&state, &again, later), (1, Reason::Moved));
}

#[test]
fn a_session_stays_where_its_kv_is_unless_the_queue_is_longer_than_computing_it_again() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[96_000, 0]);
    let ask =
        PlacementRequest { prompt: prompt(100_000, &overlap), sticky: stays(0), ..request(1) };
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(60_000), now);
    assert_eq!(placed(&state, &ask, now), (0, Reason::Sticky), "3 s wait, 4.8 s to recompute");
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(200_000), now);
    assert_eq!(placed(&state, &ask, now), (1, Reason::Moved));
    let fixed =
        PlacementRequest { sticky: stays(0).map(|one| Sticky { fixed: true, ..one }), ..ask };
    assert_eq!(placed(&state, &fixed, now), (0, Reason::Sticky));
}

#[test]
fn what_a_session_holds_for_itself_keeps_it_where_it_is() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[0, 19_200]);
    let ask =
        PlacementRequest { prompt: prompt(100_000, &overlap), sticky: stays(0), ..request(1) };
    assert_eq!(placed(&state, &ask, now), (1, Reason::Moved), "only blocks are counted");
    let holds = Sticky { private_tokens: 96_000, ..Sticky::new(at(0)) };
    let ask = PlacementRequest { sticky: Some(holds), ..ask };
    let placement = place(&ask, &state.snapshot(), now).unwrap();
    assert_eq!((placement.worker, placement.uncached_tokens), (at(0), Some(4_000)));
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(200_000), now);
    assert_eq!(placed(&state, &ask, now), (1, Reason::Moved), "the queue is too long");
}

#[test]
fn a_session_whose_prompt_is_unknown_stays_while_its_worker_can_take_it() {
    let now = start();
    let mut state = fleet(&[(60, 9_000), (0, 0)], now);
    let mut ask = PlacementRequest { sticky: stays(0), ..request(1) };
    assert_eq!(placed(&state, &ask, now), (0, Reason::Sticky));
    let stale = now + 4 * SECOND;
    state.apply(AgentKey::first(1), Update::Report(report(&[(0, 0)])), stale);
    assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky));
    let mut sick = report(&[(0, 0)]);
    sick.unhealthy = Some("engine gone".to_owned());
    state.apply(AgentKey::first(0), Update::Report(sick.clone()), stale);
    assert_eq!(placed(&state, &ask, stale), (1, Reason::Rebound));
    ask.sticky = stays(0).map(|one| Sticky { fixed: true, ..one });
    assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky));
    state.apply(AgentKey::first(1), Update::Report(sick), stale);
    ask.sticky = stays(0);
    assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky), "no other worker is usable");
    state.apply(AgentKey::first(0), Update::AgentLost("gone".to_owned()), stale);
    assert_eq!(placed(&state, &ask, stale), (0, Reason::Sticky), "lost only just now");
    let later = stale + RECONNECT_TIME_MAX;
    assert_eq!(place(&ask, &state.snapshot(), later), Err(NoWorker::Unusable));
}

#[test]
fn a_session_is_settled_without_its_prompt_unless_a_queue_speaks_for_another_worker() {
    let now = start();
    let mut state = engines(2, now);
    let here = Sticky { last_turn_ended: Some(now), ..Sticky::new(at(0)) };
    let ask = PlacementRequest { sticky: Some(here), ..request(1) };
    let mut settles = |own: u64, other: u64, ask: &PlacementRequest<'_>| {
        report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(own), now);
        report_load(&mut state, 1, |rank| rank.prefill_backlog_tokens = figure(other), now);
        let placement = place_without_prompt(ask, &state.snapshot(), now)?;
        assert_eq!((placement.worker, placement.reason), (at(0), Reason::Sticky));
        Some(placement.tokens_expected())
    };
    assert_eq!(settles(9_900, 0, &ask), Some(TURN_TOKENS_ASSUMED), "a gain of 495 ms is too small");
    assert_eq!(settles(10_100, 0, &ask), None, "a gain of 505 ms may be enough");
    assert_eq!(settles(60_000, 51_000, &ask), Some(TURN_TOKENS_ASSUMED), "both have a queue");
    let fixed = PlacementRequest { sticky: Some(Sticky { fixed: true, ..here }), ..ask };
    assert_eq!(settles(60_000, 0, &fixed), Some(TURN_TOKENS_ASSUMED));
    let moved = PlacementRequest { sticky: Some(Sticky { moved_at: Some(now), ..here }), ..ask };
    assert_eq!(settles(19_900, 0, &moved), Some(TURN_TOKENS_ASSUMED), "twice the gain is needed");
    let untold = PlacementRequest { sticky: stays(0), ..ask };
    assert_eq!(settles(0, 0, &untold), None, "the prompt must be read to learn it");
    let ended = now.checked_sub(IDLE_WITHOUT_PROMPT_MAX).unwrap();
    let idle =
        PlacementRequest { sticky: Some(Sticky { last_turn_ended: Some(ended), ..here }), ..ask };
    assert_eq!(settles(0, 0, &idle), None, "some of its KV may be gone");
    assert_eq!(settles(0, 0, &request(1)), None, "a new session is always compared");
    let refused = PlacementRequest { exclude: Some(at(0)), ..ask };
    assert_eq!(settles(0, 0, &refused), None);
}

#[test]
fn the_best_few_are_shown_and_the_sessions_own() {
    let now = start();
    let mut state = engines(40, now);
    for agent in 0..40_u64 {
        let backlog = figure((40 - agent) * 100);
        let agent = usize::try_from(agent).unwrap();
        report_load(&mut state, agent, |rank| rank.prefill_backlog_tokens = backlog, now);
    }
    let overlap = resident(&[]);
    let ask = PlacementRequest { prompt: prompt(640, &overlap), sticky: stays(0), ..request(1) };
    let shown = place(&ask, &state.snapshot(), now).unwrap().figures;
    let agents: Vec<usize> = shown.iter().map(|one| one.0.agent.slot()).collect();
    assert_eq!(agents, [39, 38, 37, 36, 35, 34, 33, 32, 0]);
}

#[test]
fn stale_workers_take_new_sessions_only_when_all_are_stale() {
    let now = start();
    let mut state = fleet(&[(0, 0), (9, 9_000)], now);
    let later = now + 4 * SECOND;
    assert_eq!(placed(&state, &request(1), later), (0, Reason::StaleView));
    state.apply(AgentKey::first(1), Update::Report(report(&[(9, 9_000)])), later);
    assert_eq!(placed(&state, &request(1), later), (1, Reason::LeastLoaded));
    let mut draining = report(&[(0, 0)]);
    draining.draining = true;
    state.apply(AgentKey::first(0), Update::Report(draining), later);
    assert_eq!(placed(&state, &request(1), later).0, 1);
    let excluded = PlacementRequest { exclude: Some(at(1)), ..request(1) };
    assert_eq!(place(&excluded, &state.snapshot(), later), Err(NoWorker::Unusable));
}

#[test]
fn a_session_on_a_stale_worker_is_compared_and_none_moves_to_one() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[19_200, 19_200]);
    let later = now + 4 * SECOND;
    report_load(&mut state, 1, |rank| rank.prefill_backlog_tokens = figure(40_000), later);
    let mut ask =
        PlacementRequest { prompt: prompt(19_200, &overlap), sticky: stays(0), ..request(1) };
    assert_eq!(placed(&state, &ask, later), (0, Reason::Sticky), "the other has a queue");
    ask.sticky = stays(1);
    assert_eq!(placed(&state, &ask, later), (1, Reason::Sticky), "the other is stale");
}

#[test]
fn an_engine_that_does_half_of_a_turn_gets_none() {
    let now = start();
    let mut state = engines(2, now);
    let halve = |state: &mut State, agent: usize, mode: &str| {
        let mut description = description(&format!("a{agent}"), 2, 1);
        description.engine.disaggregation = mode.to_owned();
        state.apply(
            AgentKey::first(agent),
            Update::StreamBegan { description, sessions: vec![] },
            now,
        );
        report_load(state, agent, |_| {}, now);
    };
    halve(&mut state, 0, "prefill");
    // Silence doesn't turn it into a stale worker, which would take turns if all others are stale.
    let later = now + 60 * SECOND;
    for id in 0..20 {
        assert_eq!(placed(&state, &request(id), now).0, 1, "session {id}");
        assert_eq!(placed(&state, &request(id), later), (1, Reason::StaleView), "session {id}");
    }
    let home = PlacementRequest { sticky: stays(0), ..request(1) };
    assert_eq!(placed(&state, &home, now), (1, Reason::Rebound));
    let fixed = home.sticky.map(|sticky| Sticky { fixed: true, ..sticky });
    assert_eq!(
        placed(&state, &PlacementRequest { sticky: fixed, ..home }, now),
        (1, Reason::Rebound)
    );
    halve(&mut state, 1, "decode");
    let view = state.snapshot();
    assert_eq!(place(&home, &view, later), Err(NoWorker::Disaggregated));
    assert!(view.check_ready(now).is_err());
    let (shown, reason) = view.agents[1].state(now, view.report_age_max());
    assert_eq!(shown, WorkerState::Disaggregated);
    assert!(reason.contains("decode mode"), "{reason}");
}

#[test]
fn a_newcomer_goes_where_less_is_kept() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[]);
    let ask = PlacementRequest { prompt: prompt(20_000, &overlap), ..request(3) };
    let (first, _) = placed(&state, &ask, now);
    for id in 0..4 {
        state.apply(
            AgentKey::first(first),
            Update::SessionChanged(session(id, 100_000, Duration::ZERO)),
            now,
        );
    }
    report_load(
        &mut state,
        first,
        |rank| rank.pool_evictable_tokens = figure(400_000),
        now + SECOND,
    );
    assert_eq!(placed(&state, &ask, now + SECOND).0, 1 - first);
    // A request without a following turn keeps no KV on the worker.
    let once = PlacementRequest { expects_more_turns: false, ..ask };
    assert_eq!(figures(&state, &once, now + SECOND, first).crowding_ms, 0);
}

#[test]
fn kv_of_sessions_that_will_return_is_not_evicted_for_nothing() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[]);
    // Both pools are full: the first of KV without a session, the second of KV of five sessions
    // that were active a minute ago.
    let full = |rank: &mut RankLoad| {
        rank.pool_evictable_tokens = figure(POOL_TOKENS - 50_000);
        rank.pool_used_tokens = figure(50_000);
    };
    report_load(&mut state, 0, full, now);
    for id in 0..5 {
        state.apply(
            AgentKey::first(1),
            Update::SessionChanged(session(id, 190_000, 60 * SECOND)),
            now,
        );
    }
    let later = now + SECOND;
    report_load(&mut state, 1, full, later);
    let once = PlacementRequest {
        prompt: prompt(60_000, &overlap),
        expects_more_turns: false,
        ..request(1)
    };
    let (free, taken) = (figures(&state, &once, later, 0), figures(&state, &once, later, 1));
    assert_eq!(free.displacement_ms, Some(0));
    assert!(taken.displacement_ms > Some(300), "{taken:?}");
    assert_eq!(placed(&state, &once, later).0, 0);
    // KV of sessions idle for hours exceeds the pool, so it was evicted long ago.
    for id in 5..10 {
        state.apply(
            AgentKey::first(1),
            Update::SessionChanged(session(id, 190_000, 7_200 * SECOND)),
            later,
        );
    }
    let later = later + SECOND;
    report_load(&mut state, 1, full, later);
    let still = figures(&state, &once, later, 1);
    assert!(still.displacement_ms >= taken.displacement_ms, "{still:?}, {taken:?} before");
}

#[test]
fn a_long_prompt_goes_where_fewer_turns_will_come_and_wait() {
    let now = start();
    let mut state = engines(2, now);
    // Agent 0 has four sessions that return within seconds, agent 1 four that are idle for long.
    for id in 0..8 {
        let (agent, idle) = if id < 4 { (0, 2 * SECOND) } else { (1, 900 * SECOND) };
        state.apply(AgentKey::first(agent), Update::SessionChanged(session(id, 0, idle)), now);
    }
    let later = now + SECOND;
    report_load(&mut state, 0, |_| {}, later);
    let overlap = resident(&[]);
    let once = PlacementRequest {
        prompt: prompt(80_000, &overlap),
        expects_more_turns: false,
        ..request(1)
    };
    let (busy, quiet) = (figures(&state, &once, later, 0), figures(&state, &once, later, 1));
    assert!(busy.blocking_ms > Some(500) && quiet.blocking_ms < Some(200), "{busy:?} {quiet:?}");
    assert_eq!(placed(&state, &once, later).0, 1);
    let short = PlacementRequest { prompt: prompt(1_000, &overlap), ..once };
    assert!(figures(&state, &short, later, 0).blocking_ms < Some(5));
    report_load(&mut state, 0, |rank| rank.staged_prefill = staged_prefill::with(0, 0), later);
    let parts = figures(&state, &once, later, 0).blocking_ms;
    assert!(parts > Some(0) && parts < busy.blocking_ms, "{parts:?} {busy:?}");
}

#[test]
fn what_is_unknown_counts_as_taken_and_is_seen_to_be_unknown() {
    let now = start();
    let mut state = fleet(&[(0, 9_000), (0, 0)], now);
    let mut unknown = report(&[(0, 0)]);
    unknown.ranks[0].pool_used_tokens = None;
    unknown.ranks[0].pinned_tokens = None;
    state.apply(AgentKey::first(1), Update::Report(unknown), now);
    assert_eq!(placed(&state, &request(1), now), (0, Reason::LeastLoaded));
    let overlap = resident(&[]);
    let ask = PlacementRequest { prompt: prompt(1_000, &overlap), ..request(1) };
    let one = figures(&state, &ask, now, 1);
    assert_eq!((one.prefill_tokens_per_s, one.displacement_ms), (None, None));
    let blind = figures(&state, &request(1), now, 0);
    assert_eq!((blind.prefill_ms, blind.resident_tokens), (None, None));
}

#[test]
fn requests_that_wait_in_the_engine_are_a_wait_where_nobody_tells_their_tokens() {
    let now = start();
    let mut state = fleet(&[(0, 0), (0, 0)], now);
    let mut waiting = report(&[(0, 0)]);
    waiting.ranks[0].requests_waiting = figure(3);
    state.apply(AgentKey::first(0), Update::Report(waiting), now);
    assert_eq!(placed(&state, &request(1), now).0, 1);
    assert_eq!(figures(&state, &request(1), now, 0).wait_ms, 1_200);
}

#[test]
fn a_full_batch_and_pinned_rows_cost() {
    let now = start();
    let mut state = engines(2, now);
    report_load(&mut state, 0, |rank| rank.turns_running = 64, now);
    assert!(figures(&state, &request(1), now, 0).wait_ms > 100);
    let full = |rank: &mut RankLoad| {
        (rank.rows_held, rank.rows_total) = (figure(60), figure(64));
    };
    report_load(&mut state, 0, full, now);
    assert_eq!(placed(&state, &request(1), now).0, 1);
}

#[test]
fn a_prompt_that_does_not_fit_beside_running_turns_waits_for_some_of_them() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[]);
    let long = PlacementRequest {
        prompt: prompt(599_000, &overlap),
        expects_more_turns: false,
        ..request(1)
    };
    report_load(&mut state, 0, |rank| rank.pool_used_tokens = figure(400_000), now);
    assert_eq!(figures(&state, &long, now, 0).wait_ms, 0, "the prompt just fits");
    report_load(&mut state, 0, |rank| rank.pool_used_tokens = figure(500_000), now);
    // A fifth of the running turns' KV must go. With the backlog below, it is two fifths.
    assert_eq!(figures(&state, &long, now, 0).wait_ms, 2_000);
    let queued = |rank: &mut RankLoad| {
        (rank.pool_used_tokens, rank.prefill_backlog_tokens) = (figure(500_000), figure(100_000));
    };
    report_load(&mut state, 0, queued, now);
    assert_eq!(figures(&state, &long, now, 0).wait_ms, 5_000, "turns end during the wait");
    let queued = |rank: &mut RankLoad| {
        (rank.pool_used_tokens, rank.prefill_backlog_tokens) = (figure(800_000), figure(1_000));
    };
    report_load(&mut state, 0, queued, now);
    assert_eq!(figures(&state, &long, now, 0).wait_ms, 5_012);
    report_load(&mut state, 1, |rank| rank.prefill_backlog_tokens = figure(40_000), now);
    assert_eq!(placed(&state, &long, now).0, 1, "a queue of two seconds costs less");
    let short = PlacementRequest { prompt: prompt(10_000, &overlap), ..long };
    assert_eq!(placed(&state, &short, now).0, 0, "a short prompt has room");
    // The session needn't bring the KV that it already holds on the worker.
    let holds = Sticky { private_tokens: 400_000, ..Sticky::new(at(0)) };
    let own = PlacementRequest { sticky: Some(holds), ..long };
    assert_eq!(figures(&state, &own, now, 0).wait_ms, 50, "only the backlog counts");
    // Pinned KV isn't freed when turns end.
    let pinned = |rank: &mut RankLoad| {
        (rank.pool_used_tokens, rank.pinned_tokens) = (figure(800_000), figure(500_000));
    };
    report_load(&mut state, 0, pinned, now);
    assert_eq!(figures(&state, &long, now, 0).wait_ms, 10_000);
    // A session is not settled on a worker without room for it. Its own last turn ended long enough
    // before the report.
    let later = now + Duration::from_secs(2);
    report_load(&mut state, 0, pinned, later);
    let is_recent =
        Sticky { reported_tokens: 300_000, last_turn_ended: Some(now), ..Sticky::new(at(0)) };
    let bare = PlacementRequest { sticky: Some(is_recent), prompt: None, ..long };
    let view = state.snapshot();
    assert_eq!(place_without_prompt(&bare, &view, later), None);
    let small = Sticky { reported_tokens: 100_000, ..is_recent };
    assert!(
        place_without_prompt(&PlacementRequest { sticky: Some(small), ..bare }, &view, later)
            .is_some()
    );
}

#[test]
fn a_turn_waits_for_no_turn_that_has_ended_since_the_report() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[]);
    let long = PlacementRequest {
        prompt: prompt(599_000, &overlap),
        expects_more_turns: false,
        ..request(1)
    };
    let [first, second] = [sent(&state, 0, 0), sent(&state, 0, 0)];
    let running = |rank: &mut RankLoad| {
        (rank.turns_running, rank.pool_used_tokens) = (2, figure(800_000));
    };
    report_load(&mut state, 0, running, now);
    let wait_ms = |state: &State| figures(state, &long, now, 0).wait_ms;
    assert_eq!(wait_ms(&state), 5_000);
    drop(first);
    assert_eq!(wait_ms(&state), 0, "the prompt just fits beside the other turn");
    drop(second);
    assert_eq!(wait_ms(&state), 0);
    // The agent knows that the session's last turn has ended, and the engine was sampled before.
    let sampled_before = |rank: &mut RankLoad| {
        rank.pool_used_tokens = Some(Figure { value: 500_000, source: Source::Loads, age_ms: 40 });
    };
    report_load(&mut state, 0, sampled_before, now + Duration::from_millis(2_000));
    let wait_ms = |ended_ms| {
        let ended = now + Duration::from_millis(ended_ms);
        let own =
            Sticky { last_turn_ended: Some(ended), reported_tokens: 500_000, ..Sticky::new(at(0)) };
        let own = PlacementRequest { sticky: Some(own), ..long };
        figures(&state, &own, now + Duration::from_millis(2_100), 0).wait_ms
    };
    assert_eq!(wait_ms(1_970), 0, "it ended after the sample");
    assert_eq!(wait_ms(1_000), 0, "the engine's account may lag by a second");
    assert_eq!(wait_ms(950), 2_000, "others hold what was used then");
}

#[test]
fn a_session_is_not_crowded_out_by_its_own_kv() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[499_200, 19_200]);
    state.apply(
        AgentKey::first(0),
        Update::SessionChanged(session(1, 500_000, Duration::ZERO)),
        now,
    );
    let later = now + SECOND;
    report_load(&mut state, 0, |rank| rank.pool_evictable_tokens = figure(500_000), later);
    let reported = Sticky { reported_tokens: 500_000, ..Sticky::new(at(0)) };
    let ask = PlacementRequest {
        prompt: prompt(500_000, &overlap),
        sticky: Some(reported),
        ..request(1)
    };
    assert_eq!(figures(&state, &ask, later, 0).crowding_ms, 0, "the pool has only its own KV");
    let other = PlacementRequest { sticky: None, ..ask };
    assert!(figures(&state, &other, later, 0).crowding_ms > 5_000, "it is full for others");
    state.apply(
        AgentKey::first(0),
        Update::SessionChanged(session(2, 200_000, Duration::ZERO)),
        later,
    );
    let later = later + SECOND;
    report_load(&mut state, 0, |_| {}, later);
    let crowding_ms = figures(&state, &ask, later, 0).crowding_ms;
    assert!((2_000..4_000).contains(&crowding_ms), "{crowding_ms} for the second session's KV");
    // A long prompt doesn't reduce what is counted of other sessions' KV.
    let grows = PlacementRequest { prompt: prompt(900_000, &overlap), ..ask };
    let [long, short] = [&grows, &ask].map(|one| figures(&state, one, later, 0).wanted_tokens);
    assert_eq!(long, short);
}

#[test]
fn what_lies_beyond_patience_counts_fourfold() {
    let now = start();
    let mut state = engines(2, now);
    let overlap = resident(&[0, 0]);
    let ask = PlacementRequest {
        prompt: prompt(100_000, &overlap),
        expects_more_turns: false,
        ..request(1)
    };
    let of = |state: &State, agent| {
        let one = figures(state, &ask, now, agent);
        (one.wait_ms, one.prefill_ms, one.impatience_ms)
    };
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(100_000), now);
    assert_eq!(of(&state, 0), (5_000, Some(5_000), 0));
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(140_000), now);
    assert_eq!(of(&state, 0), (7_000, Some(5_000), 6_000));
    // Sparing other sessions' KV is worth some waiting, but no wait beyond the patience.
    for id in 0..10 {
        state.apply(
            AgentKey::first(1),
            Update::SessionChanged(session(id, 100_000, 60 * SECOND)),
            now,
        );
    }
    let later = now + SECOND;
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(40_000), later);
    report_load(&mut state, 1, |rank| rank.pool_evictable_tokens = figure(POOL_TOKENS), later);
    assert_eq!(placed(&state, &ask, later).0, 0);
    report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(120_000), later);
    let long = PlacementRequest { prompt: prompt(300_000, &overlap), ..ask };
    let each = [0, 1].map(|agent| figures(&state, &long, later, agent));
    let [spares, takes] = each.map(|one| one.cost_ms - one.impatience_ms);
    assert!(spares < takes, "{each:?}");
    assert_eq!(placed(&state, &long, later).0, 1);
}

#[test]
fn turns_beside_it_cost_a_little() {
    let now = start();
    let mut state = engines(2, now);
    report_load(&mut state, 0, |rank| rank.turns_running = 10, now);
    assert_eq!(placed(&state, &request(1), now).0, 1);
    assert_eq!(figures(&state, &request(1), now, 0).interference_ms, 50);
}

#[test]
fn sessions_opened_since_the_report_count() {
    let now = start();
    let state = fleet(&[(0, 0), (0, 0), (0, 0)], now);
    let mut opened = [0; 3];
    for digest in 0..9 {
        let (agent, _) = placed(&state, &request(digest), now);
        state.snapshot().agents[agent].in_flight[0].count_open_request();
        opened[agent] += 1;
    }
    assert_eq!(opened, [3, 3, 3], "equal workers get equal shares");
}

#[test]
fn equals_are_chosen_by_digest_alike_everywhere_and_evenly() {
    let now = start();
    let state = fleet(&[(0, 0); 4], now);
    let mut counts = BTreeMap::new();
    for digest in 0..400 {
        let chosen = placed(&state, &request(digest), now);
        assert_eq!(chosen, placed(&fleet(&[(0, 0); 4], now), &request(digest), now));
        *counts.entry(chosen.0).or_insert(0) += 1;
    }
    assert!(counts.len() == 4 && counts.values().all(|&count| count > 60), "{counts:?}");
}

#[test]
fn a_parents_worker_is_preferred_within_its_slack() {
    let now = start();
    let mut state = engines(2, now);
    let mut ask = PlacementRequest { prefer: Some((at(0), Reason::Parent)), ..request(1) };
    let mut queue = |tokens: u64, ask: &PlacementRequest<'_>| {
        report_load(&mut state, 0, |rank| rank.prefill_backlog_tokens = figure(tokens), now);
        placed(&state, ask, now)
    };
    assert_eq!(queue(4_900, &ask), (0, Reason::Parent));
    assert_eq!(queue(5_100, &ask), (1, Reason::LeastLoaded));
    ask.prefer = Some((at(0), Reason::CacheKey));
    assert_eq!(queue(2_900, &ask), (0, Reason::CacheKey));
    assert_eq!(queue(3_100, &ask), (1, Reason::LeastLoaded));
}

#[test]
fn a_turn_goes_where_its_model_is_served() {
    let now = start();
    let mut state = fleet(&[(0, 0), (0, 9_000)], now);
    let mut ask = PlacementRequest { model: Some("m"), ..request(1) };
    assert_eq!(placed(&state, &ask, now).0, 0);
    ask.model = Some("other");
    let refused = place(&ask, &state.snapshot(), now).unwrap_err();
    assert_eq!(refused.to_string(), "no worker serves model \"other\"; served are: m");
    let mut other = description("a1", 2, 1);
    other.engine.models = vec!["other".to_owned()];
    other.engine.adapters = Some(vec!["sql".to_owned()]);
    other.retentions = vec![Retention::None];
    state.apply(
        AgentKey::first(1),
        Update::StreamBegan { description: other, sessions: vec![] },
        now,
    );
    state.apply(AgentKey::first(1), Update::Report(report(&[(0, 9_000)])), now);
    for model in ["other", "other:sql"] {
        ask.model = Some(model);
        assert_eq!(placed(&state, &ask, now).0, 1, "{model}");
    }
    // A session leaves a worker that lacks its turn's model, unless it can't.
    ask.sticky = Some(Sticky::new(at(0)));
    assert_eq!(placed(&state, &ask, now), (1, Reason::Rebound));
    assert_eq!(place_without_prompt(&ask, &state.snapshot(), now), None);
    ask.sticky = Some(Sticky { fixed: true, ..Sticky::new(at(0)) });
    assert_eq!(placed(&state, &ask, now).0, 0, "its engine says that it has no such model");
    ask.sticky = None;
    ask.retention = Some(Retention::Pinned);
    let refused = place(&ask, &state.snapshot(), now).unwrap_err().to_string();
    assert!(refused.contains("no worker offers retention pinned: start an engine"), "{refused}");
    assert!(refused.contains("ask for one of these: none"), "{refused}");
    assert!(refused.contains("--enable-streaming-session"), "{refused}");
    ask.model = Some("third");
    let refused = place(&ask, &state.snapshot(), now).unwrap_err();
    assert_eq!(refused.to_string(), "no worker serves model \"third\"; served are: m, other, sql");
}

#[test]
fn the_only_worker_and_none() {
    let now = start();
    assert_eq!(placed(&fleet(&[(0, 0)], now), &request(1), now), (0, Reason::OnlyWorker));
    assert_eq!(place(&request(1), &fleet(&[], now).snapshot(), now), Err(NoWorker::Unusable));
}

/// Records a prompt of so many tokens, which a worker has answered.
fn record_prompt(table: &mut Conversations, number: u64, tokens: u64, agent: usize, now: Instant) {
    let chain = [BlockHash(number)];
    let worker = at(agent);
    let begun = Begun { chain: &chain, prompt_tokens: tokens, uncached_tokens: tokens, worker };
    let id = table.begin_turn(&begun, now).expect("it has a block");
    table.record_answer(id, POOL_TOKENS);
    table.end_turn(id, now);
}

#[test]
fn a_conversation_begins_where_the_most_room_is_or_else_where_the_oldest_kv_is() {
    let now = start();
    let mut state = fleet(&[(0, 0), (0, 0), (0, 0)], now);
    (0..3).for_each(|agent| report_load(&mut state, agent, |_| {}, now));
    let (view, overlap) = (state.snapshot(), Overlap::default());
    let mut table = Conversations::new(100);
    let choices = |table: &Conversations| -> Vec<WorkerRef> {
        let placed = (0..20).map(|digest| {
            let conversations = Some(table);
            let ask = PlacementRequest { prompt: prompt(100_000, &overlap), ..request(digest) };
            place(&PlacementRequest { conversations, ..ask }, &view, now + 9 * SECOND).unwrap()
        });
        placed.map(|placement| placement.worker).collect()
    };
    for (number, (agent, tokens)) in (0..).zip([(2, 400_000), (0, 300_000), (1, 500_000)]) {
        let used_at = now + u32::try_from(number).unwrap() * SECOND;
        record_prompt(&mut table, number, tokens, agent, used_at);
    }
    assert_eq!(choices(&table), vec![at(0); 20]);
    for (number, (agent, tokens)) in (10..).zip([(0, 650_000), (1, 450_000), (2, 550_000)]) {
        record_prompt(&mut table, number, tokens, agent, now + 5 * SECOND);
    }
    assert_eq!(choices(&table), vec![at(2); 20], "its first prompt is the oldest");
}
