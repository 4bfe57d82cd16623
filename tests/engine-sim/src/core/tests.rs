//! Tests of the core: answers, and seeded random actions.
//!
//! What the core holds, refuses and crashes by is tested by the conformance suite.

use super::{super::request::*, *};

fn core(config: CoreConfig) -> Core {
    Core::new(config)
}

fn ids(count: usize, salt: u32) -> Vec<u32> {
    (0..count).map(|i| (u32::try_from(i).unwrap() * 7 + salt) % 250).collect()
}

fn sampling(max_new: usize) -> Sampling {
    Sampling { max_new_tokens: Some(max_new), ignore_eos: true, ..Sampling::default() }
}

fn turn(core: &mut Core, now: Duration, session: &str, input: Vec<u32>, max_new: usize) -> ReqKey {
    let params = SessionParams { id: session.to_owned(), ..SessionParams::default() };
    submit(core, now, SessionRef::Controller(params), input, max_new)
}

fn submit(
    core: &mut Core,
    now: Duration,
    session: SessionRef,
    input_ids: Vec<u32>,
    max_new: usize,
) -> ReqKey {
    let rid = format!("rid-{:06}", core.next_key);
    core.submit(
        now,
        Submit { rid, input_ids, sampling: sampling(max_new), session, ..Submit::default() },
    )
}

/// Steps until nothing moves. Returns the final output of each request, in order.
fn run(core: &mut Core, now: Duration) -> Vec<Output> {
    let mut ends = Vec::new();
    while let Some(step) = core.step(now) {
        ends.extend(step.outputs.into_iter().filter(|o| o.finish.is_some()));
        if core.crashed().is_none() {
            core.check_invariants();
        }
    }
    ends
}

fn one(core: &mut Core, now: Duration) -> Output {
    let mut ends = run(core, now);
    assert_eq!(ends.len(), 1, "{ends:?}");
    ends.remove(0)
}

const T0: Duration = Duration::ZERO;

#[test]
fn stop_sequences_and_eos_end_an_answer_and_count() {
    let mut core = core(CoreConfig { page_size: 1, ..CoreConfig::default() });
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(20, 1), 6);
    let mut tokens = Vec::new();
    while let Some(step) = core.step(T0) {
        tokens.extend(step.outputs.into_iter().filter_map(|o| o.token));
    }
    core.close("s");
    core.open(T0, "s", true, None);
    let mut stopping = sampling(50);
    stopping.stop = vec![tokens[2..4].to_vec()];
    let session = SessionRef::Controller(SessionParams { id: "s".into(), ..Default::default() });
    let rid = "stops".to_owned();
    let input_ids = ids(20, 1);
    core.submit(T0, Submit { rid, input_ids, sampling: stopping, session, ..Submit::default() });
    let end = one(&mut core, T0);
    assert_eq!(end.finish, Some(Finish::StopText(tokens[2..4].to_vec())));
    turn(&mut core, T0, "s", ids(1, 1), 1);
    let after = one(&mut core, T0);
    assert_eq!((after.prompt_tokens, after.cached_tokens), (25, 23));
}

#[test]
fn same_context_gives_same_answer_whatever_the_caches_hold() {
    let answers: Vec<Vec<u32>> = [1, 16]
        .into_iter()
        .map(|page_size| {
            let mut core = core(CoreConfig { page_size, ..CoreConfig::default() });
            let mut tokens = Vec::new();
            for _ in 0..2 {
                submit(&mut core, T0, SessionRef::None, ids(50, 1), 30);
                while let Some(step) = core.step(T0) {
                    tokens.extend(step.outputs.into_iter().filter_map(|o| o.token));
                }
            }
            tokens
        })
        .collect();
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0][..30], answers[0][30..]);
}

/// Runs weighted random actions on a small pool and returns all outputs. A well-behaved caller
/// never overlaps two turns of a session. Any other caller may crash the engine, but only in the
/// engine's own ways; until then no page is lost.
fn random_run(seed: u64, well_behaved: bool) -> String {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut core = core(CoreConfig {
        page_size: [1, 4, 16][rng.usize(..3)],
        max_total_tokens: 512,
        context_len: 256,
        max_running_requests: 6,
        chunked_prefill_size: 64,
        session_radix_cache: true,
        eos_per_mille: 20,
        new_token_per_mille: 300,
        ..CoreConfig::default()
    });
    let mut now = T0;
    let mut trace = String::new();
    for step in 0..600 {
        now += Duration::from_millis(rng.u64(..200));
        let id = format!("s{}", rng.u32(..5));
        match rng.u32(..100) {
            0..8 => {
                let timeout = (rng.u32(..4) == 0).then(|| Duration::from_secs(rng.u64(..9)));
                core.open(now, &id, rng.u32(..5) > 0, timeout);
            }
            8..12 => core.close(&id),
            12..30 => {
                let busy = core.sessions.get(&id).is_some_and(|s| s.has_unfinished());
                if !busy || !well_behaved {
                    turn(&mut core, now, &id, ids(rng.usize(1..40), rng.u32(..9)), rng.usize(..50));
                }
            }
            30..36 => {
                let tag = SessionRef::Tagged(format!("t{}", rng.u32(..3)));
                submit(&mut core, now, tag, ids(rng.usize(1..120), rng.u32(..3)), 20);
            }
            36..42 => {
                let input = ids(rng.usize(1..300), rng.u32(..3));
                submit(&mut core, now, SessionRef::None, input, 30);
            }
            42..46 => {
                core.abort(&format!("rid-{:06}", rng.u64(..core.next_key + 1)), false);
            }
            46..47 => {
                core.flush();
            }
            _ => {
                if let Some(step) = core.step(now) {
                    trace.push_str(&format!("{:?}", step.outputs));
                }
            }
        }
        if core.crashed().is_some() {
            assert!(!well_behaved, "seed {seed} step {step}: {:?}", core.crashed());
            return trace;
        }
        core.check_invariants();
    }
    if !well_behaved {
        return trace;
    }
    settle(&mut core, now, seed);
    trace
}

/// Closes every session, flushes the caches, and checks that no page or row is left in use.
fn settle(core: &mut Core, mut now: Duration, seed: u64) {
    for _ in 0..40 {
        core.abort("", true);
        run(core, now);
        for id in core.sessions.keys().cloned().collect::<Vec<_>>() {
            core.close(&id);
        }
        now += Duration::from_secs(2);
    }
    run(core, now);
    let facts = core.facts();
    let stuck = core.sessions.values().filter(|s| s.has_unfinished()).count();
    assert_eq!(facts.sessions.len(), stuck, "seed {seed}: only half-closed sessions stay");
    assert!(core.flush(), "seed {seed}");
    core.check_invariants();
    let facts = core.facts();
    assert_eq!((facts.available, facts.free_rows), (facts.total, facts.rows), "seed {seed}");
}

#[test]
fn random_actions_conserve_pages() {
    for seed in 0..64 {
        random_run(seed, true);
    }
}

#[test]
fn reckless_callers_crash_it_only_as_the_engine_crashes() {
    for seed in 0..64 {
        random_run(seed, false);
    }
}

#[test]
fn same_seed_gives_the_same_trace() {
    assert_eq!(random_run(7, true), random_run(7, true));
}
