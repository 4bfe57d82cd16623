//! Pins that the agent sets on its own: what they must not cost other sessions, and how they fail.

use super::{
    trim::{auto, full_history, seen, tokens_max, trim_plan, trimming},
    *,
};

#[test]
fn a_session_that_cannot_be_opened_goes_on_unpinned() {
    let mut rig = trimming();
    rig.opens = Some(vec![]);
    let first = full_history(&mut rig, &auto("s"), 400).inside();
    rig.end(&first, finished(100, 8));
    let second = full_history(&mut rig, &auto("s"), 430).waits();
    let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
    rig.table.handle_open_result(rig.now, &incarnation, &OpenResult::NotOpened("disk full".into()));
    rig.carry_out();
    let second = rig.answer(second).inside();
    assert_eq!(second.turn.run_mode, Some(RunMode::Tagged));
    rig.end(&second, finished(110, 8));
    let third = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(third.turn.run_mode, Some(RunMode::Tagged), "it isn't tried again at once");
}

#[test]
fn a_close_while_another_incarnation_opens_leaves_nothing() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    rig.opens = Some(vec![]);
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.question(&turn, Plan::Diverged, 150);
    rig.demoted();
    let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
    rig.close("s").unwrap();
    rig.table.handle_open_result(rig.now, &incarnation, &OpenResult::Unknown("timeout".into()));
    rig.carry_out();
    rig.end(&turn, finished(150, 8));
    rig.engine_closes();
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), RankTotals::default());
}

#[test]
fn room_for_a_longer_prompt_is_not_taken_from_a_large_plain_turn() {
    let mut rig = trimming();
    rig.pin("s");
    let turn = full_history(&mut rig, &auto("s"), 300).inside();
    rig.plain(1000).inside();
    rig.question(&turn, Plan::NotTrimmed, 900);
    assert_eq!(rig.answers, [(7, None, 0)]);
}

#[test]
fn a_large_turn_that_runs_beside_its_session_keeps_pinned_ones_from_growing() {
    let mut rig = trimming();
    rig.pin("s");
    let first = full_history(&mut rig, &auto("s"), 300).inside();
    rig.runs(&first, 0, 100);
    rig.pin_holding("o", 300);
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.question(&turn, Plan::NotTrimmed, 1100);
    rig.plan(&turn, Plan::NotTrimmed, 0, 1100);
    rig.demoted();
    let need =
        Need { prompt_tokens: 400, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let grows = rig.turn_that_needs(&delta("o"), need);
    let held = rig.table.totals(0).pinned_tokens;
    assert!(held + 1129 <= 1440, "{held} pinned beside a turn that needs 1129: {grows:?}");
}

#[test]
fn an_answer_that_its_client_did_not_receive_costs_its_session_nothing() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.plan(&turn, Plan::Trimmed, 148, 12);
    rig.end(&turn, Outcome::Unheard(Some(usage(160, 8))));
    let next = full_history(&mut rig, &auto("s"), 480).waits();
    seen(&mut rig, &incarnation, 168);
    let next = rig.answer(next).inside();
    assert_eq!((next.incarnation(), tokens_max(&next).is_some()), (&*incarnation, true));
}

#[test]
fn a_trimmed_turn_counts_as_the_tokens_that_are_computed() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let before = rig.now;
    rig.now += Duration::from_millis(1);
    let turn = full_history(&mut rig, &auto("s"), 640).inside();
    assert!(rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(before)) <= 160 - 147);
    rig.plan(&turn, Plan::Trimmed, 148, 12);
    assert_eq!(rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(before)), 160 - 147);
}

#[test]
fn a_small_request_beside_does_not_cost_the_session_its_pin() {
    let mut rig = trimming();
    let first = full_history(&mut rig, &auto("s"), 2300).inside();
    rig.end(&first, finished(600, 8));
    let second = full_history(&mut rig, &auto("s"), 2330).inside();
    rig.runs(&second, 0, 620);
    let main = full_history(&mut rig, &auto("s"), 2360).inside();
    let side = full_history(&mut rig, &auto("s"), 40).inside();
    rig.runs(&main, 628, 636);
    rig.end(&side, finished(10, 8));
    let next = full_history(&mut rig, &auto("s"), 2390).inside();
    assert!(tokens_max(&next).is_some());
    rig.runs(&next, 644, 660);
    // An aside may also run between two turns: a request for a title, then the conversation
    // continues.
    let title = full_history(&mut rig, &auto("s"), 700).inside();
    let (rid, incarnation) = (title.rid.clone(), title.incarnation().to_owned());
    let diverged = Plan::Diverged;
    let reported = trim_plan(rid, incarnation, diverged, [5, 668, 0, 20]);
    rig.table.handle_question(rig.now, 7, &reported);
    rig.carry_out();
    assert_eq!(rig.answers.pop().unwrap().1, None);
    rig.plan(&title, diverged, 0, 0);
    rig.end(&title, finished(20, 8));
    let next = full_history(&mut rig, &auto("s"), 2420).inside();
    let all_it_had = 668;
    assert_eq!(rig.plan(&next, Plan::Trimmed, 668, 10), (TrimOutcome::Trimmed, all_it_had));
}

#[test]
fn a_requested_pin_is_kept_when_an_auto_pin_needs_room() {
    let mut rig = trimming();
    rig.pin_holding("asked", 700);
    rig.wait(DEMOTE);
    rig.pinned_by_itself("s");
    drop(full_history(&mut rig, &auto("s"), 900));
    assert!(
        !rig.demotes
            .iter()
            .any(|one| *one == rig.table.sessions().get(&key("asked")).unwrap().incarnation)
    );
    let mut rig = trimming();
    let first = full_history(&mut rig, &auto("s"), 2300).inside();
    rig.end(&first, finished(600, 8));
    let second = full_history(&mut rig, &auto("s"), 2330).inside();
    rig.runs(&second, 0, 620);
    rig.pin("asks");
    let need =
        Need { prompt_tokens: 500, answer_tokens: Some(8), is_exact: true, ..Need::default() };
    let asks = rig.turn_that_needs(&delta("asks"), need).waits();
    rig.demoted();
    rig.answer(asks).inside();
}

#[test]
fn a_session_that_does_not_come_back_gives_its_kv_to_the_tree() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    rig.wait(DEMOTE - Duration::from_secs(1));
    assert!(rig.demotes.is_empty());
    rig.wait(Duration::from_secs(1));
    assert_eq!(rig.demotes, [incarnation.as_str()]);
    rig.demoted();
    assert_eq!((rig.table.totals(0).rows_held, rig.table.totals(0).pinned_tokens), (0, 0));
    let back = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(back.incarnation(), incarnation, "its history is there");
}

#[test]
fn a_prompt_that_can_never_run_in_its_session_runs_on_the_tree() {
    for asks in [false, true] {
        let mut rig = trimming();
        rig.pinned_by_itself("s");
        for turn in 0.. {
            assert!(turn < 9, "it is tried for ever");
            let turn = full_history(&mut rig, &auto("s"), 460 + turn);
            rig.demoted();
            let turn = match turn {
                rig::Answer::Waits(rid) => rig.answer(rid).inside(),
                turn => turn.inside(),
            };
            if tokens_max(&turn).is_none() {
                break;
            }
            if asks {
                // The shim asks about each turn, as if each turn used another LoRA adapter.
                rig.question(&turn, Plan::NotTrimmed, 150);
                rig.demoted();
                rig.engine_closes();
            }
            if rig.answers.pop().is_some_and(|run| run.1.is_some()) {
                rig.runs(&turn, 0, 150);
            } else {
                rig.plan(&turn, Plan::NotTrimmed, 0, 0);
                rig.end(&turn, finished(150, 8));
            }
        }
        rig.engine_closes();
        assert_eq!(rig.retention("s"), Retention::Tagged);
        assert_eq!(rig.table.totals(0).rows_held, 0);
    }
}

#[test]
fn a_session_keeps_its_kv_when_the_trimmer_disconnects() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    rig.table.set_trimming(rig.now, false);
    let turn = full_history(&mut rig, &auto("s"), 460).waits();
    assert_eq!(rig.demotes, [incarnation.as_str()], "to the tree, not away");
    rig.demoted();
    assert_eq!(rig.answer(turn).inside().turn.run_mode, Some(RunMode::Tagged));
}

#[test]
fn nothing_is_appended_after_a_turn_that_the_engine_may_have_run() {
    let mut rig = trimming();
    rig.pin("s");
    let first = full_history(&mut rig, &Claim { open: true, ..auto("s") }, 300).inside();
    rig.runs(&first, 0, 100);
    let turn = full_history(&mut rig, &auto("s"), 340).inside();
    rig.plan(&turn, Plan::Trimmed, 108, 10);
    // After the shim trimmed the prompt, a route may report a client error although the engine ran
    // it.
    rig.end(&turn, Outcome::Refused);
    assert_eq!(rig.inspections, [Some(turn.rid.clone())], "aborted, then looked at");
    seen(&mut rig, turn.turn.session.as_ref().unwrap().incarnation.clone().as_str(), 108);
    assert_eq!(rig.turn(&delta("s")).error(), Error::HistoryUnknown);
}

#[test]
fn a_late_plan_affects_only_its_own_turn() {
    let mut rig = trimming();
    rig.pin("s");
    let first = full_history(&mut rig, &auto("s"), 300).inside();
    rig.runs(&first, 0, 100);
    let refused = full_history(&mut rig, &auto("s"), 340).inside();
    rig.end(&refused, Outcome::Refused);
    let next = full_history(&mut rig, &auto("s"), 340).inside();
    rig.plan(&refused, Plan::NotTrimmed, 0, 110);
    rig.runs(&next, 108, 118);
    assert_eq!(rig.run_modes[&next.rid], RunMode::Pinned);
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 126);
}

#[test]
fn a_waiting_full_history_starts_over_whatever_turn_follows() {
    let settings = TableSettings { auto_pin: true, turns_queued_per_session_max: 2, ..settings() };
    let mut rig = Rig::with(settings, engine(1));
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    rig.pin("s");
    let first = full_history(&mut rig, &Claim { open: true, ..auto("s") }, 300).inside();
    rig.runs(&first, 0, 100);
    let running = rig.turn(&delta("s")).inside();
    let waits = full_history(&mut rig, &Claim { open: true, ..auto("s") }, 340).waits();
    rig.turn(&delta("s")).waits();
    rig.end(&running, Outcome::Unheard(None));
    let waits = rig.answer(waits).inside();
    let opened = |one: &Record| match one {
        Record::Opening { incarnation, .. } => incarnation == waits.incarnation(),
        _ => false,
    };
    assert!(rig.journal.iter().any(opened));
}

#[test]
fn a_client_may_decide_what_the_agent_decided() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    assert!(!rig.turn(&delta("s")).error().to_string().contains("is pinned"), "it didn't ask");
    rig.open("s", Some(Retention::Pinned)).unwrap();
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(
        full_history(&mut rig, &auto("s"), 470).error(),
        Error::Busy,
        "one at a time, as it asked"
    );
    rig.runs(&turn, 148, 160);
    assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsOpen, "it had a history already");
    let mut rig = trimming();
    rig.pinned_by_itself("t");
    rig.open("t", Some(Retention::Tagged)).unwrap();
    assert_eq!(rig.retention("t"), Retention::Tagged);
}

#[test]
fn a_turn_that_was_stopped_may_have_waited_and_its_session_keeps_row_and_kv_until_the_shim_says() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.plan(&turn, Plan::Trimmed, 148, 12);
    rig.end(&turn, Outcome::Aborted);
    let totals = rig.table.totals(0);
    assert!(totals.rows_held == 1 && totals.pinned_tokens >= 148, "{totals:?}");
    assert_eq!(rig.inspections.len(), 1);
    seen(&mut rig, &incarnation, 148);
    let next = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(rig.plan(&next, Plan::Trimmed, 148, 12), (TrimOutcome::Trimmed, 148));
}

#[test]
fn no_delta_is_appended_to_what_a_lost_first_turn_left() {
    let mut rig = trimming();
    let incarnation = rig.pin("s");
    let first = full_history(&mut rig, &auto("s"), 300).inside();
    rig.plan(&first, Plan::Trimmed, 0, 90);
    rig.end(&first, Outcome::Lost);
    seen(&mut rig, &incarnation, 98);
    rig.table.set_trimming(rig.now, false);
    assert_eq!(rig.turn(&auto("s")).error(), Error::PinnedRouteRefused);
}

#[test]
fn a_pin_that_nothing_ran_in_gives_its_row_back() {
    let mut rig = trimming();
    let first = full_history(&mut rig, &auto("s"), 400).inside();
    rig.end(&first, finished(100, 8));
    let image = full_history(&mut rig, &auto("s"), 430).inside();
    rig.plan(&image, Plan::NotTrimmed, 0, 0);
    rig.end(&image, finished(110, 8));
    assert_eq!(rig.table.totals(0).rows_held, 1);
    rig.wait(DEMOTE);
    rig.demoted();
    assert_eq!(rig.table.totals(0).rows_held, 0);
}

#[test]
fn a_route_that_counts_a_prompt_otherwise_costs_its_session_nothing() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.plan(&turn, Plan::Trimmed, 148, 12);
    rig.end(&turn, finished(157, 8));
    seen(&mut rig, &incarnation, 168);
    let next = full_history(&mut rig, &auto("s"), 480).inside();
    assert_eq!(next.incarnation(), incarnation);
    assert_eq!(rig.plan(&next, Plan::Trimmed, 168, 12), (TrimOutcome::Trimmed, 168));
}

#[test]
fn a_session_with_long_answers_is_pinned_only_with_room_for_them() {
    let mut roomy = engine(1);
    roomy.context_tokens = 200_000;
    let rank = &mut roomy.ranks[0];
    (rank.rows, rank.pool_tokens, rank.pin_tokens_max) = (16, 100_000, 70_000);
    let mut rig = Rig::with(TableSettings { auto_pin: true, ..settings() }, roomy);
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    let need = Need { prompt_tokens: 400, answer_tokens: None, ..Need::default() };
    for (id, answer, pins) in [("short", 900, true), ("long", 30_000, true), ("too", 36_000, false)]
    {
        let claim = auto(id);
        let first = rig.ask(Some(&claim), None, RouteTurns::FullHistories, need).inside();
        rig.end(&first, finished(100, answer));
        let second = rig.ask(Some(&claim), None, RouteTurns::FullHistories, need).inside();
        assert_eq!(tokens_max(&second).is_some(), pins, "{id}");
        if pins {
            rig.plan(&second, Plan::Trimmed, 0, 100);
        }
        rig.end(&second, finished(100, 8));
    }
}

/// Clients set limits far above what they expect, so a limit alone must not cost a session its pin.
#[test]
fn sessions_with_high_limits_and_short_answers_are_all_pinned() {
    let mut roomy = engine(1);
    roomy.context_tokens = 32_000;
    let rank = &mut roomy.ranks[0];
    (rank.rows, rank.pin_rows_max) = (16, 8);
    (rank.pool_tokens, rank.pin_tokens_max) = (60_000, 42_000);
    let mut rig = Rig::with(TableSettings { auto_pin: true, ..settings() }, roomy);
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    let need = Need { prompt_tokens: 24_000, answer_tokens: Some(8_000), ..Need::default() };
    let ask = |rig: &mut Rig, id: &str, need: Need| {
        let claim = auto(id);
        rig.ask(Some(&claim), None, RouteTurns::FullHistories, need).inside()
    };
    let ids = ["a", "b", "c", "d"];
    for id in ids {
        let first = ask(&mut rig, id, need);
        rig.end(&first, finished(7_000, 300));
    }
    let turns = ids.map(|id| ask(&mut rig, id, need));
    for turn in &turns {
        assert!(tokens_max(turn).is_some(), "all four run side by side in their pinned sessions");
        rig.plan(turn, Plan::Trimmed, 0, 7_000);
    }
    // An answer longer than what was reserved for it is counted when its turn has ended.
    for turn in &turns {
        rig.end(turn, finished(7_000, 4_000));
    }
    assert_eq!(rig.table.totals(0).pinned_tokens, 4 * 11_008, "whole pages");
    for is_second in [false, true] {
        let small = Need { prompt_tokens: 300, answer_tokens: Some(8), ..Need::default() };
        let turn = ask(&mut rig, "e", small);
        assert_eq!(tokens_max(&turn), None, "no room is left to pin another: {is_second}");
        rig.end(&turn, finished(100, 8));
    }
}

#[test]
fn an_answer_that_ignores_its_end_reserves_its_whole_limit() {
    let mut roomy = engine(1);
    roomy.context_tokens = 32_000;
    (roomy.ranks[0].pool_tokens, roomy.ranks[0].pin_tokens_max) = (60_000, 42_000);
    let mut rig = Rig::with(TableSettings { auto_pin: true, ..settings() }, roomy);
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    for (id, ignores_eos, reserved) in [("a", false, 2_048), ("b", true, 8_000)] {
        let first = full_history(&mut rig, &auto(id), 400).inside();
        rig.end(&first, finished(100, 8));
        let need = Need { prompt_tokens: 400, answer_tokens: Some(8_000), ..Need::default() };
        let claim = auto(id);
        let need = Need { ignores_eos, ..need };
        let turn = rig.ask(Some(&claim), None, RouteTurns::FullHistories, need).inside();
        let prompt = tokens_max(&turn).unwrap();
        assert_eq!(turn.turn.growth_tokens_max, Some(prompt + reserved), "{id}");
        rig.plan(&turn, Plan::Trimmed, 0, 100);
        rig.end(&turn, finished(100, 8));
    }
}
