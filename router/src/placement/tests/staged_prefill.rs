//! Tests of placement on workers that stage the prefills of long prompts.

use contract::load::StagedPrefill;

use super::*;

/// Tokens per stage of an engine with the rate measured.
const STAGE_TOKENS: u64 = 8_000;

/// Returns a queue of staged prefills with this many tokens and prompts.
pub(super) fn with(tokens: u64, prompts: u32) -> Option<StagedPrefill> {
    Some(StagedPrefill { tokens, prompts, stage_tokens: STAGE_TOKENS })
}

#[test]
fn a_settled_sessions_prompt_is_examined_where_staged_prefill_may_take_it() {
    let now = start();
    let mut state = engines(2, now);
    let settles = |state: &State, new_tokens: Option<u64>| {
        let here = Sticky { last_turn_ended: Some(now), new_tokens, ..Sticky::new(at(0)) };
        let ask = PlacementRequest { sticky: Some(here), ..request(1) };
        place_without_prompt(&ask, &state.snapshot(), now).is_some()
    };
    assert!(settles(&state, None), "there is no staged prefill");
    report_load(&mut state, 0, |rank| rank.staged_prefill = with(0, 0), now);
    assert!(settles(&state, Some(STAGE_TOKENS)));
    assert!(!settles(&state, Some(STAGE_TOKENS + 1)));
    assert!(!settles(&state, None), "the new tokens are unknown");
}

#[test]
fn prompts_in_staged_prefill_are_no_wait_for_shorter_prompts() {
    let now = start();
    let mut state = engines(2, now);
    report_load(&mut state, 1, |rank| rank.staged_prefill = with(60_000, 3), now);
    let overlap = resident(&[0, 0]);
    let wait_ms = |state: &State, tokens: u64| {
        let ask = PlacementRequest { prompt: prompt(tokens, &overlap), ..request(1) };
        figures(state, &ask, now, 1).wait_ms
    };
    assert_eq!(wait_ms(&state, STAGE_TOKENS), 0, "one stage at most");
    assert_eq!(wait_ms(&state, 16_000), 2_400, "three shorter prompts at most");
    assert_eq!(wait_ms(&state, 40_000), 3_000, "all staged prompts");
    // Prompts that this router has queued since the report count until their turns are sent.
    let mut lease = sent(&state, 1, 20_000);
    lease.begin_staged_prefill();
    assert_eq!(wait_ms(&state, 40_000), 4_000);
    lease.end_staged_prefill(2_000);
    assert_eq!(wait_ms(&state, 40_000), 3_100);
}
