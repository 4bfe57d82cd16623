//! Tests of turns that the engine aborted while they ran, and answered as if it had refused them.

use super::{trim::seen, *};

/// Returns the rows and the tokens that the pinned sessions hold.
fn held(rig: &Rig) -> (u32, u64) {
    let totals = rig.table.totals(0);
    (totals.rows_held, totals.pinned_tokens)
}

fn rig() -> (Rig, String) {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let incarnation = rig.pin_holding("s", 24);
    assert_eq!(held(&rig), (1, 32));
    (rig, incarnation)
}

#[test]
fn an_engine_that_is_held_back_needs_no_restart_for_what_it_has_not_ended() {
    let mut rig = Rig::new();
    let turn = rig.plain(8).inside();
    rig.table.set_hold(rig.now, Some("it is paused".to_owned()));
    rig.table.abandon_turn(rig.now, &turn.rid);
    let stuck_after = settings().stuck_after;
    rig.now += 2 * stuck_after;
    assert_eq!(rig.table.restart_required(rig.now), None);
    rig.table.set_hold(rig.now, None);
    assert_eq!(rig.table.restart_required(rig.now), None, "it had no time to end the turn");
    rig.now += stuck_after;
    assert!(rig.table.restart_required(rig.now).is_some());
}

#[test]
fn a_turn_that_ran_frees_its_row_when_the_shim_says_that_it_was_aborted() {
    for is_late in [false, true] {
        let (mut rig, incarnation) = rig();
        let turn = rig.turn(&delta("s")).inside();
        if !is_late {
            rig.table.handle_shim_report(
                rig.now,
                0,
                ShimReport::Aborted { incarnation: &incarnation },
            );
        }
        rig.end(&turn, Outcome::Refused);
        if is_late {
            assert_eq!(held(&rig), (1, 32), "it looks refused");
            rig.table.handle_shim_report(
                rig.now,
                0,
                ShimReport::Aborted { incarnation: &incarnation },
            );
        }
        assert_eq!(held(&rig), (0, 0), "late: {is_late}");
        let next = rig.turn(&delta("s")).inside();
        rig.end(&next, finished(33, 5));
        assert_eq!(held(&rig), (1, 48), "the session goes on with its history");
    }
}

#[test]
fn a_turn_that_never_ran_keeps_what_its_session_holds() {
    let (mut rig, incarnation) = rig();
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Refused);
    assert_eq!(held(&rig), (1, 32));
    // A late report of an earlier turn says nothing of a session whose next turn has run.
    let next = rig.turn(&delta("s")).inside();
    rig.end(&next, finished(33, 5));
    rig.table.handle_shim_report(rig.now, 0, ShimReport::Aborted { incarnation: &incarnation });
    assert_eq!(held(&rig), (1, 48));
}

#[test]
fn a_turn_whose_client_has_left_ends_when_the_shim_says_so() {
    for report_first in [false, true] {
        let (mut rig, incarnation) = rig();
        let turn = rig.turn(&delta("s")).inside();
        if report_first {
            rig.table.handle_shim_report(
                rig.now,
                0,
                ShimReport::Aborted { incarnation: &incarnation },
            );
            rig.table.abandon_turn(rig.now, &turn.rid);
        } else {
            rig.table.abandon_turn(rig.now, &turn.rid);
        }
        let next = rig.turn(&delta("s")).waits();
        assert_eq!(rig.turn(&delta("s")).error(), Error::Busy, "one may wait for that end");
        if !report_first {
            rig.table.handle_shim_report(
                rig.now,
                0,
                ShimReport::Aborted { incarnation: &incarnation },
            );
        }
        rig.carry_out();
        assert_eq!(rig.answer(next.clone()), Answer::Waits(next.clone()), "what was committed?");
        seen(&mut rig, &incarnation, 25);
        let next = rig.answer(next).inside();
        // The agent may wait longer for the engine's answer. Its end changes nothing then.
        rig.end(&turn, Outcome::Lost);
        rig.end(&next, finished(33, 5));
        assert_eq!(held(&rig), (1, 48), "the report came first: {report_first}");
    }
}

#[test]
fn a_turn_that_was_retracted_before_its_client_left_leaves_nothing_to_append_to() {
    let (mut rig, incarnation) = rig();
    let turn = rig.turn(&delta("s")).inside();
    rig.table.abandon_turn(rig.now, &turn.rid);
    rig.table.handle_shim_report(rig.now, 0, ShimReport::Aborted { incarnation: &incarnation });
    let next = rig.turn(&delta("s")).waits();
    // The engine had committed the prompt and a part of the answer.
    seen(&mut rig, &incarnation, 36);
    assert!(matches!(rig.answer(next), Answer::No(_)), "it would be appended to a part of that");
}

#[test]
fn a_delta_that_counts_on_a_waiting_one_is_not_run_without_it() {
    let settings = TableSettings { turns_queued_per_session_max: 2, ..settings() };
    let mut rig = Rig::with(settings, engine(1));
    rig.shim_up(true);
    let incarnation = rig.pin_holding("s", 24);
    let given_up = rig.turn(&delta("s")).inside();
    rig.table.abandon_turn(rig.now, &given_up.rid);
    let second = rig.turn(&delta("s")).waits();
    let third = rig.turn(&delta("s")).waits();
    rig.table.handle_shim_report(rig.now, 0, ShimReport::Aborted { incarnation: &incarnation });
    rig.carry_out();
    seen(&mut rig, &incarnation, 25);
    let second = rig.answer(second).inside();
    rig.end(&second, Outcome::Refused);
    assert_eq!(rig.answer(third).error(), Error::PredecessorFailed);
}
