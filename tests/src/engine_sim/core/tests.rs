//! Tests of the core: single scenarios, and seeded random actions.

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

fn message(output: &Output) -> &str {
    match output.finish.as_ref() {
        Some(Finish::Abort { message, .. }) => message,
        other => panic!("not an abort: {other:?}"),
    }
}

const T0: Duration = Duration::ZERO;

#[test]
fn one_session_holds_what_the_engine_was_seen_to_hold() {
    let mut core = core(CoreConfig::default());
    assert!(core.open(T0, "s", true, None));
    turn(&mut core, T0, "s", ids(40, 1), 20);
    let first = one(&mut core, T0);
    assert_eq!((first.prompt_tokens, first.cached_tokens), (40, 0));
    let facts = core.facts();
    let session = &facts.sessions[0];
    assert_eq!((session.alloc_tokens, session.protected_tokens), (59, 32));
    assert_eq!((facts.session_held, facts.used()), (32, 64));

    turn(&mut core, T0, "s", ids(40, 2), 20);
    let second = one(&mut core, T0);
    assert_eq!((second.prompt_tokens, second.cached_tokens), (100, 59));
    let facts = core.facts();
    assert_eq!((facts.sessions[0].alloc_tokens, facts.session_held, facts.used()), (119, 96, 128));

    turn(&mut core, T0, "s", ids(40, 3), 500);
    for _ in 0..20 {
        core.step(T0);
    }
    core.abort("rid-000003", false);
    assert_eq!(message(&one(&mut core, T0)), "Aborted");
    let facts = core.facts();
    assert_eq!((facts.used(), facts.evictable, facts.free_rows), (0, 176, 8));

    turn(&mut core, T0, "s", ids(2, 4), 3);
    let after = one(&mut core, T0);
    assert_eq!((after.prompt_tokens, after.cached_tokens), (122, 112));
    let facts = core.facts();
    assert_eq!((facts.sessions[0].protected_tokens, facts.session_held), (112, 16));
    core.close("s");
    assert_eq!((core.facts().evictable, core.facts().used()), (176, 0));
    assert!(core.flush());
    assert_eq!(core.facts().available, core.facts().total);
}

#[test]
fn tagged_turns_hit_whole_pages() {
    let config = CoreConfig { session_radix_cache: true, ..CoreConfig::default() };
    let mut core = core(config);
    let tag = || SessionRef::Tagged("t".into());
    let mut prompt = ids(100, 1);
    let mut cached = Vec::new();
    for (grow, max_new) in [(0, 8), (24, 8), (24, 8)] {
        prompt.extend(ids(grow, 9));
        submit(&mut core, T0, tag(), prompt.clone(), max_new);
        cached.push(one(&mut core, T0).cached_tokens);
    }
    assert_eq!(cached, [0, 96, 112]);
    assert_eq!(core.facts().tagged_tokens["t"], 160);
    core.close("t");
    assert!(core.facts().tagged_tokens.is_empty());
    submit(&mut core, T0, tag(), prompt.clone(), 8);
    core.step(T0);
    core.close("t");
    assert_eq!(one(&mut core, T0).cached_tokens, 144);
    assert!(core.facts().tagged_tokens.is_empty(), "a request of the closed life does not tag");
    submit(&mut core, T0, tag(), prompt, 8);
    one(&mut core, T0);
    assert_eq!(core.facts().tagged_tokens["t"], 144, "the next request begins a new life");
}

#[test]
fn sessions_on_every_row_wedge_even_themselves() {
    let mut core = core(CoreConfig { max_running_requests: 3, ..CoreConfig::default() });
    for id in ["a", "b", "c"] {
        core.open(T0, id, true, None);
        turn(&mut core, T0, id, ids(20, 1), 4);
        one(&mut core, T0);
    }
    let key = turn(&mut core, T0, "a", ids(5, 2), 4);
    assert!(run(&mut core, T0).is_empty());
    core.close("a");
    assert!(run(&mut core, T0).is_empty(), "a close with a queued turn is deferred");
    core.close("b");
    let output = one(&mut core, T0);
    assert_eq!((output.key, output.cached_tokens), (key, 23));
}

#[test]
fn one_request_that_does_not_fit_blocks_all_behind_it() {
    let mut core = core(CoreConfig { max_total_tokens: 512, ..CoreConfig::default() });
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(300, 1), 50);
    one(&mut core, T0);
    submit(&mut core, T0, SessionRef::None, ids(200, 2), 50);
    turn(&mut core, T0, "s", ids(5, 3), 5);
    assert!(run(&mut core, T0).is_empty());
    let queued = core.abort("rid-000002", false);
    assert_eq!(message(&queued[0]), "Abort in waiting queue");
    assert_eq!(one(&mut core, T0).cached_tokens, 349);
}

#[test]
fn refused_overlap_unlocks_the_session_and_the_third_turn_corrupts() {
    let answer = |overlap: bool| {
        let mut core = core(CoreConfig { page_size: 1, ..CoreConfig::default() });
        core.open(T0, "s", true, None);
        turn(&mut core, T0, "s", ids(10, 1), 10);
        one(&mut core, T0);
        let live = turn(&mut core, T0, "s", ids(10, 2), 60);
        let mut tokens = Vec::new();
        let mut refusals = 0;
        let mut prompt_tokens = 0;
        for round in 0..200 {
            if overlap && (round == 10 || round == 20) {
                turn(&mut core, T0, "s", ids(23, 3), 20);
            }
            let Some(step) = core.step(T0) else { break };
            core.check_invariants();
            for output in step.outputs {
                if output.key == live {
                    tokens.extend(output.token);
                    prompt_tokens = output.prompt_tokens;
                } else if matches!(output.finish, Some(Finish::Abort { .. })) {
                    assert!(message(&output).contains("already has an active request"));
                    refusals += 1;
                }
            }
        }
        (tokens, refusals, prompt_tokens)
    };
    let (clean, none, prompt) = answer(false);
    let (dirty, refused, dirty_prompt) = answer(true);
    assert_eq!((none, refused, clean.len(), dirty.len()), (0, 1, 60, 60));
    assert_eq!((prompt, dirty_prompt), (30, 43));
    assert_ne!(clean, dirty);
}

#[test]
fn close_after_a_refused_overlap_kills_the_process() {
    let mut core = core(CoreConfig::default());
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(10, 1), 30);
    core.step(T0);
    turn(&mut core, T0, "s", ids(10, 2), 30);
    core.step(T0);
    assert!(!core.facts().sessions[0].inflight, "the refused turn cleared the live turn's flag");
    core.close("s");
    assert_eq!(core.facts().held_rows, 0, "the close released the KV of the running turn");
    run(&mut core, T0);
    assert_eq!(core.crashed(), Some("AssertionError: release_kv_cache"));
}

#[test]
fn aborted_first_turn_leaves_an_empty_session() {
    let mut core = core(CoreConfig { page_size: 1, ..CoreConfig::default() });
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(10, 1), 100);
    core.step(T0);
    core.abort("rid-000001", false);
    one(&mut core, T0);
    let mut next = vec![crate::engine_sim::tokenizer::BOS];
    next.extend(ids(9, 3));
    turn(&mut core, T0, "s", next, 5);
    let after = one(&mut core, T0);
    assert_eq!((after.prompt_tokens, after.cached_tokens), (10, 0), "BOS is kept");
}

#[test]
fn refused_and_queued_aborted_turns_keep_the_slot() {
    let mut core = core(CoreConfig::default());
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(20, 1), 10);
    one(&mut core, T0);
    let params = SessionParams { id: "s".into(), offset: 1, ..SessionParams::default() };
    submit(&mut core, T0, SessionRef::Controller(params), ids(5, 2), 5);
    assert_eq!(message(&one(&mut core, T0)), "Streaming sessions do not support offset.");
    turn(&mut core, T0, "s", ids(5, 2), 5);
    core.abort("rid-000003", false);
    turn(&mut core, T0, "s", ids(1, 2), 5);
    let after = one(&mut core, T0);
    assert_eq!((after.prompt_tokens, after.cached_tokens), (31, 29));
}

#[test]
fn long_prompts_are_prefilled_in_chunks_and_a_flush_keeps_the_history() {
    let config = CoreConfig { chunked_prefill_size: 64, ..CoreConfig::default() };
    let mut core = core(config);
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(150, 1), 1);
    let mut busy = Duration::ZERO;
    for tokens in [64, 128, 150] {
        assert_eq!(core.facts().prefilled_tokens, tokens - if tokens == 150 { 22 } else { 64 });
        busy += core.step(T0).unwrap().busy;
    }
    assert_eq!((core.step(T0), busy), (None, Duration::from_micros(1500)));
    assert!(core.flush());
    turn(&mut core, T0, "s", Vec::new(), 1);
    let after = one(&mut core, T0);
    assert_eq!((after.prompt_tokens, after.cached_tokens), (151, 0));
}

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
fn sessions_that_run_out_of_room_stay_half_closed_with_what_they_made() {
    let config =
        CoreConfig { max_total_tokens: 256, new_token_per_mille: 20, ..CoreConfig::default() };
    let mut core = core(config);
    for (id, salt) in [("a", 1), ("b", 2)] {
        core.open(T0, id, true, None);
        let params = SessionParams { id: id.to_owned(), ..SessionParams::default() };
        let mut sampling = sampling(110);
        sampling.ignore_eos = false;
        let session = SessionRef::Controller(params);
        let input_ids = ids(20, salt);
        core.submit(
            T0,
            Submit { rid: id.into(), input_ids, sampling, session, ..Submit::default() },
        );
        core.step(T0);
    }
    let ended = |step: EngineStep| step.outputs.into_iter().find(|o| o.finish.is_some());
    let end = std::iter::from_fn(|| core.step(T0)).find_map(ended).unwrap();
    assert!(message(&end).starts_with("Out of memory even after retracting"));
    core.abort("", true);
    assert!(run(&mut core, T0).is_empty());
    let made = |core: &Core, id: &str| core.facts().session(id).unwrap().history_tokens - 20;
    assert!(made(&core, "a") > 80 && made(&core, "b") > 80, "partial answers are history");
    for id in ["a", "b"] {
        core.close(id);
    }
    core.step(Duration::from_secs(5));
    let facts = core.facts();
    assert_eq!(facts.sessions.len(), 2, "no close can end these sessions");
    assert!(facts.sessions.iter().all(|s| s.closing) && facts.session_held > 0);
    assert!(core.flush());
    assert_eq!((core.facts().used(), core.facts().sessions.len()), (0, 2));
}

#[test]
fn a_request_that_does_not_fit_shuts_the_queue_until_one_has_left() {
    let config = CoreConfig { max_total_tokens: 256, ..CoreConfig::default() };
    let mut core = core(config);
    submit(&mut core, T0, SessionRef::None, ids(20, 1), 100);
    core.step(T0);
    let big = submit(&mut core, T0, SessionRef::None, ids(100, 2), 100);
    core.step(T0);
    core.abort_queued(big);
    // The request would fit and is first in the queue.
    submit(&mut core, T0, SessionRef::None, ids(4, 3), 4);
    core.step(T0);
    assert_eq!((core.facts().running, core.facts().waiting), (1, 1));
    assert_eq!(run(&mut core, T0).len(), 2);
}

#[test]
fn two_first_turns_in_one_batch_kill_the_process() {
    let mut core = core(CoreConfig::default());
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(10, 1), 10);
    turn(&mut core, T0, "s", ids(10, 1), 10);
    core.step(T0);
    assert!(core.crashed().is_some());
}

#[test]
fn unknown_tokens_kill_the_process() {
    let mut core = core(CoreConfig::default());
    submit(&mut core, T0, SessionRef::None, vec![5000], 4);
    core.step(T0);
    assert!(core.crashed().is_some());
    assert_eq!(core.step(T0), None);
}

#[test]
fn close_while_a_turn_runs_waits_for_the_reaper() {
    let mut core = core(CoreConfig::default());
    core.open(T0, "s", true, None);
    turn(&mut core, T0, "s", ids(10, 1), 10);
    core.step(T0);
    core.close("s");
    assert!(!core.open(T0, "s", true, None));
    turn(&mut core, T0, "s", ids(10, 1), 10);
    let ends = run(&mut core, Duration::from_millis(500));
    assert_eq!(message(&ends[0]), "Invalid request: close was requested for session s");
    assert_eq!(core.facts().held_rows, 1);
    let due = core.next_deadline().unwrap();
    assert!(due < Duration::from_millis(1100));
    core.step(due);
    assert_eq!((core.facts().held_rows, core.next_deadline()), (0, None));
    assert!(core.open(due, "s", true, None));
}

#[test]
fn timeout_counts_from_the_start_of_the_turn() {
    let mut core = core(CoreConfig::default());
    core.open(T0, "s", true, Some(Duration::from_secs(3)));
    let start = Duration::from_secs(2);
    turn(&mut core, start, "s", ids(10, 1), 10);
    run(&mut core, start);
    core.step(Duration::from_millis(4900));
    assert_eq!(core.facts().sessions.len(), 1);
    let due = core.next_deadline().unwrap();
    assert!(due > Duration::from_secs(5) && due < Duration::from_millis(6000), "{due:?}");
    core.step(due);
    assert!(core.facts().sessions.is_empty());
}

#[test]
fn decode_without_room_retracts_plain_requests_and_completes() {
    let config =
        CoreConfig { max_total_tokens: 256, new_token_per_mille: 20, ..CoreConfig::default() };
    let mut core = core(config);
    for salt in 0..3 {
        let rid = format!("plain-{salt}");
        let mut sampling = sampling(90);
        sampling.ignore_eos = false;
        core.submit(T0, Submit { rid, input_ids: ids(20, salt), sampling, ..Submit::default() });
        core.step(T0);
    }
    let ends = run(&mut core, T0);
    assert_eq!(ends.len(), 3);
    assert!(ends.iter().any(|o| o.retractions > 0));
    assert!(ends.iter().all(|o| o.finish == Some(Finish::Length(90))));
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
