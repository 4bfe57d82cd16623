//! The order of turns and answers: which turn runs first, and what late or lost answers do.

use super::*;

const SMALL: Need = Need {
    sequences: 1,
    is_clamped_batch: false,
    likely_answer_tokens: None,
    prompt_tokens: 8,
    answer_tokens: Some(8),
    is_exact: true,
    ignores_eos: false,
    resident_tokens: 0,
    kv: KvIdentity::NONE,
};

fn claim(rig: &mut Rig, claim: &Claim) -> String {
    let rid = rig.rid();
    let request = claims(claim, RouteTurns::DeltasAndHistories);
    rig.table.claim(rig.now, &rid, &request).unwrap();
    rid
}

#[test]
fn turns_of_one_session_run_in_the_order_they_were_claimed() {
    let mut rig =
        Rig::with(TableSettings { turns_queued_per_session_max: 1, ..settings() }, engine(1));
    rig.pin("s");
    let first = claim(&mut rig, &delta("s"));
    let second = claim(&mut rig, &delta("s"));
    // The body of the first turn is still being read.
    rig.table.enqueue(rig.now, &second, SMALL);
    rig.carry_out();
    rig.table.enqueue(rig.now, &first, SMALL);
    rig.carry_out();
    assert!(rig.admitted.contains_key(&first), "the later delta overtook the earlier one");
}

#[test]
fn a_delta_that_waited_is_not_appended_where_the_one_before_left_nothing() {
    let mut bad = vec![];
    for outcome in [Outcome::Refused, Outcome::Aborted] {
        let mut rig =
            Rig::with(TableSettings { turns_queued_per_session_max: 1, ..settings() }, engine(1));
        rig.pin("s");
        let first = rig.turn(&delta("s")).inside();
        let second = rig.turn(&delta("s")).waits();
        rig.end(&first, outcome);
        if matches!(rig.answer(second), Answer::In(_)) {
            bad.push(outcome);
        }
    }
    assert_eq!(bad, [], "it was written for a history with the turn before in it");
}

#[test]
fn a_burst_is_not_held_back_while_the_engine_has_rows() {
    let mut wide = engine(1);
    wide.ranks[0] =
        RankCapacity { rows: 256, turns_max: 512, pool_tokens: 100_000, ..wide.ranks[0] };
    let mut rig = Rig::with(TableSettings { turns_queued_max: 1024, ..settings() }, wide);
    rig.table.handle_load(rig.now, 0, EngineLoad { waiting_requests: 0, used_tokens: 0 });
    let held = (0..64).filter(|_| matches!(rig.plain(16), Answer::Waits(_))).count();
    assert_eq!(held, 0, "of 64 turns for an idle engine of 256 rows");
}

#[test]
fn what_was_estimated_of_others_is_over_when_a_shim_names_them() {
    let mut rig = Rig::new();
    rig.table.handle_load(rig.now, 0, EngineLoad { waiting_requests: 0, used_tokens: 500 });
    rig.now += Duration::from_secs(1);
    rig.table.handle_load(rig.now, 0, EngineLoad { waiting_requests: 0, used_tokens: 500 });
    assert_eq!(rig.table.totals(0).foreign_tokens, 500);
    rig.shim_up(true);
    let part = TablePart { begins_table: true, ends_table: true };
    rig.table.handle_shim_report(rig.now, 0, ShimReport::Sessions { part, reports: &[] });
    rig.now += Duration::from_secs(1);
    rig.table.handle_load(rig.now, 0, EngineLoad { waiting_requests: 0, used_tokens: 0 });
    assert_eq!(rig.table.totals(0).foreign_tokens, 0);
}

/// Returns the shim's report of a session whose KV is in the radix tree.
fn without_kv(id: String, history_tokens: u64) -> SessionReport {
    let (holds_row, allocated_tokens, in_flight) = (false, 0, false);
    SessionReport { id, holds_row, allocated_tokens, history_tokens, in_flight }
}

#[test]
fn only_the_answer_to_its_own_request_ends_a_demotion() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    rig.pin_holding("a", 20);
    rig.pin("b");
    rig.pin("c");
    rig.wait(DEMOTE);
    rig.now += Duration::from_millis(1);
    let _ = rig.table.open_session(rig.now, "o", &opens(key("d"), Retention::Pinned));
    rig.carry_out();

    let id = rig.demotes[0].clone();
    let who = rig.table.sessions().key_of(&id).unwrap().clone();
    let is_demoting =
        |rig: &Rig| matches!(rig.table.sessions().get(&who).unwrap().state, State::Demoting { .. });
    // A report may describe the session before its first turn.
    rig.report(&without_kv(id.clone(), 21), true);
    rig.table.handle_shim_report(
        rig.now,
        0,
        ShimReport::Demotion { number: 1_000, is_demoted: true },
    );
    assert!(is_demoting(&rig), "neither of these is the answer");
    rig.answer_demotion(&id, true);
    assert_eq!(rig.table.sessions().get(&who).unwrap().state, State::Demoted);
}

#[test]
fn opens_are_bounded_too() {
    let mut rig = Rig::new();
    rig.opens = Some(vec![]);
    let refused = (0..100).filter(|_| rig.open("s", Some(Retention::Pinned)).is_err()).count();
    assert!(refused > 0, "{} wait, 4 may", rig.table.totals(0).turns_queued);
}

#[test]
fn a_close_asked_twice_is_counted_once() {
    let mut rig = Rig::new();
    rig.inherit("berth-a-0-1", None);
    rig.table.handle_open_result(rig.now, "berth-a-0-1", &OpenResult::Unknown("lost".into()));
    rig.carry_out();
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), RankTotals::default());
}

#[test]
fn an_engine_restart_is_told_once() {
    let mut rig = Rig::new();
    rig.pin("s");
    let mut told = 0;
    for _ in 0..2 {
        rig.table.handle_engine_lost(rig.now, engine(1));
        let lost = |one: &&Effect| matches!(one, Effect::SessionEvent(_, SessionEvent::EngineLost));
        told += rig.table.take_effects().iter().filter(lost).count();
    }
    assert_eq!(told, 1);
}

#[test]
fn a_session_that_someone_else_closed_is_not_appended_to() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let id = rig.pin_holding("s", 20);
    rig.table.handle_shim_report(rig.now, 0, ShimReport::SessionGone { id: &id });
    rig.carry_out();
    assert_eq!(rig.table.totals(0).rows_held, 0);
    assert!(!matches!(rig.turn(&delta("s")), Answer::In(_)));
}

#[test]
fn a_turn_that_waits_learns_at_once_that_someone_else_closed_its_session() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let id = rig.pin_holding("s", 20);
    for _ in 0..6 {
        rig.plain(8).inside();
    }
    let rid = rig.turn(&delta("s")).waits();
    rig.table.handle_shim_report(rig.now, 0, ShimReport::SessionGone { id: &id });
    rig.carry_out();
    assert!(rig.refused.contains_key(&rid));
}

#[test]
fn a_refused_turn_gives_the_row_back_that_it_would_have_taken() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 20);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Aborted);
    assert_eq!(rig.table.totals(0).rows_held, 0);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Refused);
    assert_eq!(rig.table.totals(0).rows_held, 0);
}

#[test]
fn claims_spread_over_ranks_before_their_bodies_are_there() {
    let mut rig = Rig::with(settings(), engine(2));
    for n in 0..10 {
        let claim_ = Claim::for_session(&key(&format!("s{n}")));
        claim(&mut rig, &claim_);
    }
    let on_0 = rig.table.sessions().iter().filter(|(_, one)| one.dp_rank == 0).count();
    assert_eq!(on_0, 5);
}

#[test]
fn a_turn_that_opens_its_session_is_the_last_beside_another() {
    let mut rig = Rig::new();
    rig.turn(&Claim::for_session(&key("s"))).inside();
    let open = Claim { open: true, ..Claim::for_session(&key("s")) };
    rig.turn(&open).inside();
    let third = rig.turn(&Claim::for_session(&key("s")));
    assert!(!matches!(third, Answer::In(_)), "opened, and three turns inside");
}

#[test]
fn a_large_turn_that_waits_is_not_overtaken_by_growing_pins() {
    let mut rig = Rig::new();
    rig.pin_holding("a", 400);
    rig.pin_holding("b", 200);
    let _large = rig.plain(1000).waits();
    let need =
        Need { prompt_tokens: 300, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let newcomer = rig.turn_that_needs(&Claim { open: true, ..delta("c") }, need);
    assert!(!matches!(newcomer, Answer::In(_)), "each newcomer makes the large one wait longer");
}

#[test]
fn a_chat_without_a_limit_goes_where_the_engine_would_run_it() {
    let mut real = engine(1);
    real.context_tokens = 131_072;
    real.ranks[0] = RankCapacity {
        rows: 256,
        rows_reserve: 1,
        pin_rows_max: 128,
        pool_tokens: 400_000,
        pin_tokens_max: 280_000,
        turns_max: 512,
    };
    let mut rig = Rig::with(settings(), real);
    rig.pin("a");
    for id in ["a", "b", "c"] {
        let need = Need { prompt_tokens: 92_000, ..SMALL };
        let turn = rig.turn_that_needs(&Claim { open: id != "a", ..delta(id) }, need).inside();
        rig.end(&turn, finished(92_000, 1));
    }
    // 276,000 tokens are pinned and 124,000 free. SGLang needs 1,000 + min(rest, 4,096) tokens.
    let chat = Need { prompt_tokens: 1000, answer_tokens: None, ..Need::default() };
    let first = rig.ask(None, None, RouteTurns::Nothing, chat);
    let small = rig.plain(10);
    assert!(matches!((&first, &small), (Answer::In(_), Answer::In(_))), "{first:?} {small:?}");
}

#[test]
fn a_verified_session_has_no_lost_turn() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let id = rig.pin_holding("s", 20);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Lost);
    // The turn was aborted, so the engine has given the row back.
    rig.answer_inspection(&without_kv(id, 21));
    rig.carry_out();
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().state.lost_rid(), None);
    assert_eq!(rig.table.totals(0).rows_held, 0);
}

#[test]
fn what_fits_passes_a_large_turn_that_waits() {
    let mut rig = Rig::new();
    rig.pin_holding("a", 600);
    rig.plain(1000).waits();
    rig.plain(8).inside();
}

#[test]
fn nothing_runs_on_kv_that_an_audit_found_corrupt() {
    let mut rig =
        Rig::with(TableSettings { turns_queued_per_session_max: 1, ..settings() }, engine(1));
    let (idle, busy) = (rig.pin_holding("idle", 20), rig.pin_holding("busy", 20));
    let turn = rig.turn(&delta("busy")).inside();
    let next = rig.turn(&delta("busy")).waits();
    rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation: "nobody-1" });
    rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation: &idle });
    rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation: &busy });
    rig.carry_out();
    let closed: Vec<&str> = rig.closes.iter().map(|close| close.incarnation.as_str()).collect();
    assert_eq!(closed, [idle.as_str()], "a turn that runs ends first");
    assert_eq!(code_of(rig.turn(&delta("idle")).error()), Code::KvCorrupt);
    rig.end(&turn, finished(29, 8));
    assert_eq!(rig.closes.last().unwrap().incarnation, busy);
    assert_eq!(rig.answer(next).error(), Error::KvCorrupt, "what waited is not appended");
    assert_eq!(rig.turn(&delta("busy")).error(), Error::KvCorrupt);
    assert_ne!(rig.pin("busy"), busy, "a new incarnation is the way out");
    rig.turn(&delta("busy")).inside();
}
