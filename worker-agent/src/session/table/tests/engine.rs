//! What the engine does: opens and closes under way, foreign and inherited sessions, restarts.

use contract::load::RetentionOff;

use super::*;

#[test]
fn a_session_closed_while_it_opens_waits_for_the_engine_alone() {
    let mut rig = Rig::new();
    rig.opens = Some(vec![]);
    rig.open("s", Some(Retention::Pinned)).unwrap();
    assert_eq!(rig.close("s"), Ok(true));
    let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
    assert!(rig.table.next_deadline().is_none_or(|due| due > rig.now), "no busy waiting");
    rig.table.handle_open_result(rig.now, &incarnation, &OpenResult::Opened);
    rig.carry_out();
    assert_eq!(
        rig.closes,
        [CloseRequest { incarnation, rid: None, is_pinned: true, is_repeat: false }]
    );
}

#[test]
fn a_session_opened_for_a_turn_that_was_given_up_closes_unless_another_wants_it() {
    for wanted in [false, true] {
        let mut rig = Rig::new();
        rig.opens = Some(vec![]);
        let opening = Claim { open: true, ..delta("s") };
        let left = rig.turn(&opening).waits();
        rig.table.end_turn(rig.now, &left, Outcome::Aborted);
        let again = wanted.then(|| rig.turn(&opening).waits());
        let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
        rig.table.handle_open_result(rig.now, &incarnation, &OpenResult::Opened);
        rig.carry_out();
        assert_eq!(rig.closes.len(), usize::from(!wanted));
        assert_eq!(rig.is_open("s"), wanted);
        if let Some(again) = again {
            rig.answer(again).inside();
        }
    }
}

#[test]
fn an_open_that_may_have_happened_is_closed() {
    for (opened, closes) in [
        (OpenResult::Unknown("lost".into()), 1),
        (OpenResult::NotOpened("the engine says no".into()), 0),
    ] {
        let mut rig = Rig::new();
        rig.opens = Some(vec![]);
        let waiting = rig.turn(&Claim { open: true, ..delta("s") }).waits();
        let incarnation = rig.opens.as_mut().unwrap().pop().unwrap();
        rig.table.handle_open_result(rig.now, &incarnation, &opened);
        rig.carry_out();
        assert_eq!(code_of(rig.answer(waiting).error()), Code::OpenFailed);
        assert_eq!(rig.closes.len(), closes, "{opened:?}");
        rig.engine_closes();
        let last = rig.journal.last().unwrap();
        assert_eq!(last, &Record::Closed { incarnation }, "the next agent has nothing to do");
    }
}

#[test]
fn nothing_reaches_the_engine_before_the_journal() {
    let mut rig = Rig::new();
    rig.table.open_session(rig.now, "r", &opens(key("s"), Retention::Pinned)).unwrap();
    let effects = rig.table.take_effects();
    let at = |find: fn(&Effect) -> bool| effects.iter().position(find).unwrap();
    let journal = at(|effect| matches!(effect, Effect::Journal(Record::Opening { .. })));
    assert!(journal < at(|effect| matches!(effect, Effect::Open { .. })), "{effects:?}");
}

#[test]
fn an_engine_that_seems_gone_leaves_its_closes_in_the_journal() {
    let mut rig = Rig::new();
    rig.open("s", Some(Retention::Pinned)).unwrap();
    assert_eq!(rig.close("s"), Ok(false));
    rig.engine_restarts(engine(1));
    let closed = |record: &&Record| matches!(record, Record::Closed { .. });
    assert_eq!(rig.journal.iter().find(closed), None, "it may come back as the same process");
}

#[test]
fn a_lost_turn_and_corrupt_pages_are_forgotten_with_their_engine() {
    let mut rig = trim::trimming();
    let lost = rig.pin("lost");
    let turn = trim::full_history(&mut rig, &pinned("lost"), 400).inside();
    rig.end(&turn, Outcome::Lost);
    assert_eq!(rig.inspections, [Some(turn.rid)], "the turn may still run");
    let corrupt = rig.pin("corrupt");
    let turn = trim::full_history(&mut rig, &pinned("corrupt"), 400).inside();
    rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation: &corrupt });
    rig.engine_restarts(engine(1));
    rig.end(&turn, Outcome::Lost);
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    for id in ["lost", "corrupt"] {
        let turn = trim::full_history(&mut rig, &pinned(id), 400).inside();
        assert_ne!(turn.incarnation(), lost);
        rig.runs(&turn, 0, 100);
        rig.close(id).unwrap();
        let close = rig.closes.pop().expect("the new incarnation is closed");
        assert_eq!((close.incarnation.as_str(), close.rid), (turn.incarnation(), None));
    }
}

#[test]
fn a_tagged_session_whose_engine_is_lost_while_its_turn_arrives_is_not_pinned() {
    let mut rig = Rig::new();
    rig.open("s", Some(Retention::Tagged)).unwrap();
    let claim = Claim::for_session(&key("s"));
    let request = claims(&claim, RouteTurns::DeltasAndHistories);
    rig.table.claim(rig.now, "r", &request).unwrap();
    rig.engine_restarts(engine(1));
    rig.table.set_trimming(rig.now, true);
    rig.table.enqueue(rig.now, "r", Need { prompt_tokens: 8, ..Need::default() });
    rig.carry_out();
    let turn = rig.answer("r".into()).inside();
    assert_eq!(turn.turn.session.unwrap().retention, Retention::Tagged);
    let is_opening = |record: &Record| matches!(record, Record::Opening { .. });
    assert!(!rig.journal.iter().any(is_opening), "the engine opens nothing for it");
}

#[test]
fn what_an_earlier_agent_left_is_closed_before_anything_is_pinned() {
    let mut rig = Rig::new();
    rig.inherit("berth-a-0-7", Some("r"));
    rig.carry_out();
    let close = CloseRequest {
        incarnation: "berth-a-0-7".into(),
        rid: Some("r".into()),
        is_pinned: true,
        is_repeat: false,
    };
    assert_eq!(rig.closes, [close]);
    let waiting = rig.turn(&Claim { open: true, ..delta("s") }).waits();
    rig.plain(8).inside();
    rig.engine_closes();
    rig.answer(waiting).inside();
}

#[test]
fn sessions_of_others_count_as_pinned() {
    let mut rig = Rig::new();
    let load = EngineLoad { waiting_requests: 0, used_tokens: 800 };
    rig.table.handle_load(rig.now, 0, load);
    rig.wait(Duration::from_secs(1));
    rig.table.handle_load(rig.now, 0, load);
    assert_eq!(rig.table.totals(0).foreign_tokens, 800);
    rig.pin("s");
    let need =
        Need { prompt_tokens: 300, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let refused = rig.turn_that_needs(&delta("s"), need).error();
    assert!(is_short(&refused, Code::PinTokens), "{refused}");
    rig.table.handle_load(rig.now, 0, EngineLoad { waiting_requests: 0, used_tokens: 0 });
    rig.turn_that_needs(&delta("s"), need).inside();
}

#[test]
fn the_shim_names_sessions_of_others() {
    let mut rig = Rig::new();
    rig.shim_up(false);
    let foreign = SessionReport {
        id: "someone".into(),
        holds_row: true,
        allocated_tokens: 90,
        history_tokens: 91,
        in_flight: false,
    };
    rig.report(&foreign, false);
    let totals = rig.table.totals(0);
    assert_eq!((totals.foreign_rows, totals.foreign_tokens, totals.rows_held), (1, 96, 1));
    rig.pin("a");
    rig.pin("b");
    assert!(is_short(&rig.open("c", Some(Retention::Pinned)).unwrap_err(), Code::Rows));
    rig.table.handle_shim_report(rig.now, 0, ShimReport::SessionGone { id: "someone" });
    rig.pin("c");
}

#[test]
fn an_engine_without_the_mode_says_what_it_offers() {
    let retentions = vec![Retention::None];
    let mut rig = Rig::with(settings(), EngineCapacity { retentions, ..engine(1) });
    let reason = "the engine lacks a flag".to_owned();
    let off = RetentionOff { retention: Retention::Pinned, reason };
    assert!(rig.table.set_retentions(vec![Retention::None], vec![off.clone()]));
    assert!(!rig.table.set_retentions(vec![Retention::None], vec![off]), "nothing has changed");
    let refused = rig.open("s", Some(Retention::Pinned)).unwrap_err().to_string();
    assert!(refused.contains("lacks a flag; ask for one of these: none"), "{refused}");
    let turn = rig.turn(&Claim::for_session(&key("s"))).inside();
    assert_eq!(turn.turn.session.unwrap().retention, Retention::None, "auto falls back");
}

#[test]
fn a_pinned_session_goes_on_when_pins_are_offered_no_more() {
    let mut rig = Rig::new();
    rig.pin("old");
    rig.table.set_retentions(vec![Retention::None], vec![]);
    assert!(rig.open("new", Some(Retention::Pinned)).is_err());
    let turn = rig.turn(&delta("old")).inside();
    assert_eq!(turn.turn.session.unwrap().retention, Retention::Pinned);
}

#[test]
fn idle_time_counts_from_the_end_of_a_turn() {
    let mut rig = Rig::new();
    let turn = rig.turn(&Claim::for_session(&key("s"))).inside();
    rig.wait(10 * IDLE);
    assert!(rig.is_open("s"), "a running session never expires");
    rig.end(&turn, finished(20, 5));
    rig.wait(IDLE - Duration::from_millis(1));
    assert!(rig.is_open("s"));
    rig.wait(Duration::from_millis(1));
    assert!(!rig.is_open("s"));
}

#[test]
fn no_idle_time_is_too_long() {
    let idle_cap = Duration::from_secs(365 * 86_400);
    let mut rig = Rig::with_settings(|settings| settings.shares.idle_cap = idle_cap);
    let claim = Claim { idle_ms_max: Some(u64::MAX), ..Claim::for_session(&key("s")) };
    let turn = rig.turn(&claim).inside();
    rig.end(&turn, finished(20, 5));
    rig.open_for("o", None, Some(Duration::MAX)).unwrap();
    rig.wait(1000 * IDLE);
    assert!(rig.is_open("s") && rig.is_open("o"));
}

#[test]
fn an_engine_that_comes_back_smaller_keeps_no_session_on_a_rank_it_lost() {
    let mut rig = Rig::with(settings(), engine(2));
    let claim = Claim::for_session(&key("s"));
    let on_second = Some(&claim);
    let need = Need::default();
    let turn = rig.ask(on_second, Some(1), RouteTurns::DeltasAndHistories, need).inside();
    rig.engine_restarts(engine(1));
    rig.end(&turn, Outcome::Lost);
    let next = rig.ask(on_second, None, RouteTurns::DeltasAndHistories, need).inside();
    assert_eq!(next.turn.dp_rank, 0, "it starts anew where there is a rank");
}

#[test]
fn an_engine_restart_loses_pinned_sessions_and_forgives_others() {
    let mut rig = Rig::new();
    rig.pin_holding("p", 20);
    rig.pin_holding("closing", 20);
    let turn = rig.turn(&Claim::for_session(&key("t"))).inside();
    let before = turn.incarnation().to_owned();
    rig.end(&turn, finished(20, 5));
    rig.close("closing").unwrap();
    rig.closes.clear();
    rig.engine_restarts(engine(1));
    let totals = rig.table.totals(0);
    let held = (totals.rows_held, totals.pinned_tokens, totals.tree_tokens_estimate);
    assert_eq!(held, (0, 0, 0), "no ghost is left in the ledger");
    assert_eq!(rig.turn(&delta("p")).error(), Error::Lost);
    assert_ne!(rig.turn(&Claim::for_session(&key("t"))).inside().incarnation(), before);
    assert_eq!(rig.close("p"), Ok(false));
    assert_eq!(rig.closes, [], "the engine has nothing to close");
    assert!(!rig.is_open("p"));
}

#[test]
fn a_lost_session_opens_anew_with_a_whole_history() {
    let mut rig = Rig::new();
    let before = rig.pin_holding("p", 20);
    rig.engine_restarts(engine(1));
    let turn = rig.turn(&Claim { open: true, ..pinned("p") }).inside();
    assert_ne!(turn.incarnation(), before);
}

#[test]
fn a_turn_that_means_to_be_the_first_never_follows_another() {
    let mut rig = Rig::new();
    let opening = Claim { open: true, ..delta("s") };
    let first = rig.turn(&opening).inside();
    rig.end(&first, Outcome::Aborted);
    let first = rig.turn(&opening).inside();
    rig.end(&first, finished(8, 8));
    assert_eq!(rig.turn(&opening).error(), Error::HasHistory, "a retry would be appended twice");
    rig.engine_restarts(engine(1));
    assert_eq!(rig.turn(&opening).error(), Error::Lost, "its history is gone, and it may mean it");
}

#[test]
fn a_drain_refuses_what_waits_and_closes_what_is_open() {
    let mut rig = Rig::new();
    rig.pin_holding("idle", 20);
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let waits = rig.plain(1).waits();
    rig.table.drain(rig.now);
    rig.carry_out();
    assert_eq!(rig.answer(waits).error(), Error::Stopping);
    inside.iter().for_each(|turn| rig.end(turn, Outcome::Finished(None)));
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), RankTotals::default());
    assert_eq!(rig.table.unfinished().closes, 0);
}
