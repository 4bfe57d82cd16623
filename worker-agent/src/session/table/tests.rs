//! Tests of the table's promises, case by case.
//!
//! The package `session-sim` drives the table with random events, against an engine that
//! misbehaves.

mod aborted;
mod asides;
mod auto_pin;
mod demotion;
mod engine;
mod handover;
mod kv_identity;
mod lifecycle;
mod must_continue;
mod order;
pub(super) mod owners;
mod rig;
mod shares;
mod shim_requests;
mod tags;
mod trim;
mod volatile_prefix;
mod weights;

use std::time::Duration;

use contract::{claim::Claim, load::Retention};
use service::refusal::Code;

use self::rig::{Answer, Inside, Rig, claims, claims_nothing, opens};
use super::*;
use crate::{
    guard::Guards,
    session::{KvIdentity, ShareSettings},
    shim::trim::Plan,
};

const IDLE: Duration = Duration::from_secs(60);
const DEMOTE: Duration = Duration::from_secs(20);
const QUEUE: Duration = Duration::from_secs(10);
const STUCK: Duration = Duration::from_secs(30);

pub(super) fn engine(ranks: usize) -> EngineCapacity {
    let capacity = RankCapacity {
        rows: 4,
        rows_reserve: 1,
        pin_rows_max: 3,
        pool_tokens: 1440,
        pin_tokens_max: 1008,
        turns_max: 6,
    };
    let retentions = vec![Retention::Pinned, Retention::Tagged, Retention::None];
    EngineCapacity {
        ranks: vec![capacity; ranks],
        page_tokens: 16,
        context_tokens: 1200,
        retentions,
    }
}

pub(super) fn settings() -> TableSettings {
    TableSettings {
        incarnation_prefix: "berth-a-1".into(),
        idle_max: IDLE,
        demote_idle: DEMOTE,
        turns_queued_per_session_max: 0,
        turns_queued_max: 4,
        queue_wait_max: QUEUE,
        stuck_after: STUCK,
        auto_pin: false,
        answer_tokens_min: crate::session::ANSWER_TOKENS_MIN,
        shim_requests_max: crate::session::SHIM_REQUESTS_MAX,
        shares: ShareSettings {
            sessions_max: 64,
            principal_sessions_max: 64,
            idle_cap: 10 * IDLE,
            turns_milli: 500,
        },
        guards: Guards::default(),
    }
}

pub(super) fn key(id: &str) -> SessionKey {
    SessionKey::new("p", id).unwrap()
}

fn usage(prompt_tokens: u64, completion_tokens: u64) -> Usage {
    Usage { prompt_tokens, completion_tokens, ..Usage::default() }
}

fn finished(prompt_tokens: u64, completion_tokens: u64) -> Outcome {
    Outcome::Finished(Some(usage(prompt_tokens, completion_tokens)))
}

fn pinned(id: &str) -> Claim {
    Claim { retention: Some(Retention::Pinned), ..Claim::for_session(&key(id)) }
}

fn delta(id: &str) -> Claim {
    Claim { delta: true, ..Claim::for_session(&key(id)) }
}

fn is_short(error: &Error, code: Code) -> bool {
    matches!(error, Error::OutOfRoom { resource, .. } if *resource == code)
}

/// Returns the code by which the client hears of an error.
fn code_of(error: Error) -> Code {
    crate::data_port::refusal(&error.into()).code
}

#[test]
fn a_pinned_session_runs_one_turn_and_counts_its_tokens() {
    let mut rig = Rig::new();
    rig.pin("s");
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(rig.turn(&delta("s")).error(), Error::Busy);
    rig.end(&turn, finished(25, 6));
    let session = rig.table.sessions().get(&key("s")).unwrap();
    assert_eq!(session.resident_tokens(), 30, "the last token's KV isn't computed yet");
    assert_eq!(rig.table.totals(0).pinned_tokens, 32, "a page is held whole");
    assert_eq!(rig.table.totals(0).rows_held, 1);
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_second_turn_may_wait_where_the_settings_allow_it() {
    let mut rig =
        Rig::with(TableSettings { turns_queued_per_session_max: 1, ..settings() }, engine(1));
    rig.pin("s");
    let first = rig.turn(&delta("s")).inside();
    let second = rig.turn(&delta("s")).waits();
    assert_eq!(rig.turn(&delta("s")).error(), Error::Busy, "one may wait, not two");
    rig.end(&first, finished(20, 5));
    let second = rig.answer(second).inside();
    rig.end(&second, finished(40, 5));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().turns_finished(), 2);
}

#[test]
fn a_turn_that_waited_is_not_appended_to_a_history_in_doubt() {
    let mut rig =
        Rig::with(TableSettings { turns_queued_per_session_max: 1, ..settings() }, engine(1));
    rig.pin("s");
    let first = rig.turn(&delta("s")).inside();
    let second = rig.turn(&delta("s")).waits();
    rig.end(&first, Outcome::Lost);
    assert_eq!(code_of(rig.answer(second).error()), Code::HistoryUnknown);
}

#[test]
fn a_close_waits_for_the_turn_and_shuts_the_door_meanwhile() {
    let mut rig = Rig::new();
    let incarnation = rig.pin("s");
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(rig.close("s"), Ok(true), "it waits");
    assert_eq!(rig.close("s"), Err(Error::UnknownSession), "two closes: one is too late");
    assert_eq!(rig.turn(&delta("s")).error(), Error::Closing, "closing beats busy");
    assert_eq!(rig.open("s", None), Err(Error::Closing));
    assert_eq!(rig.closes, [], "the turn still runs");
    rig.end(&turn, finished(10, 1));
    let close = CloseRequest {
        incarnation: incarnation.clone(),
        rid: None,
        is_pinned: true,
        is_repeat: false,
    };
    assert_eq!(rig.closes, [close]);
    assert_eq!(rig.table.totals(0).rows_held, 1, "held until the engine has confirmed");
    rig.engine_closes();
    assert_eq!(rig.table.totals(0), RankTotals::default());
    assert_ne!(rig.pin("s"), incarnation, "a new life has a new id");
}

#[test]
fn a_close_is_repeated_until_it_is_confirmed_and_then_the_engine_is_to_blame() {
    let mut rig = Rig::new();
    let incarnation = rig.pin("s");
    rig.close("s").unwrap();
    let first = rig.closes.pop().unwrap();
    rig.wait(IDLE);
    assert_eq!(rig.closes, [], "an answer is awaited");
    rig.table.handle_close_result(rig.now, &incarnation, CloseResult::NotYet);
    assert_eq!(rig.table.restart_required(rig.now), None, "its answer was only lost");
    rig.table.handle_close_result(rig.now, &incarnation, CloseResult::Kept);
    let due = rig.table.next_deadline().unwrap();
    rig.wait(due - rig.now);
    assert_eq!(rig.closes, [CloseRequest { is_repeat: true, ..first }]);
    assert_eq!(rig.table.totals(0).rows_held, 1);
    let reason = rig.table.restart_required(rig.now).expect("it took longer than it may");
    assert!(reason.contains("half closed"), "{reason}");
    rig.engine_closes();
    assert_eq!(rig.table.restart_required(rig.now), None);
}

#[test]
fn a_final_turn_closes_its_session_on_every_path() {
    let last = Claim { close: true, ..delta("s") };
    for refused in [false, true] {
        let mut rig = Rig::new();
        rig.pin("s");
        let prompt_tokens = if refused { 5000 } else { 8 };
        let need =
            Need { prompt_tokens, answer_tokens: Some(8), is_exact: true, ..Need::default() };
        match rig.turn_that_needs(&last, need) {
            Answer::In(turn) => {
                assert_eq!(rig.turn(&delta("s")).error(), Error::Closing, "the door is shut");
                rig.end(&turn, finished(8, 8));
            }
            other => drop(other.error()),
        }
        assert!(!rig.is_open("s"));
        assert_eq!(rig.closes.len(), 1);
    }
}

#[test]
fn rows_in_reserve_are_never_pinned() {
    let mut rig = Rig::new();
    for id in ["a", "b", "c"] {
        rig.pin(id);
    }
    let refused = rig.open("d", Some(Retention::Pinned)).unwrap_err();
    assert!(is_short(&refused, Code::Rows), "{refused}");
    rig.turn(&Claim::for_session(&key("d"))).inside();
    assert_eq!(rig.close("a"), Ok(false));
    let waiting = rig.turn(&Claim { open: true, ..delta("e") }).waits();
    rig.engine_closes();
    rig.answer(waiting).inside();
}

#[test]
fn each_session_holds_pages_of_its_own() {
    let mut rig = Rig::new();
    for (id, prompt) in [("a", 42), ("b", 49), ("c", 56)] {
        rig.pin_holding(id, prompt);
    }
    assert_eq!(rig.table.totals(0).pinned_tokens, 48 + 64 + 64, "42, 49 and 56 tokens");
}

#[test]
fn growth_is_reserved_before_the_turn_and_given_back_after_it() {
    let mut rig = Rig::new();
    rig.pin("a");
    rig.pin("b");
    let large =
        Need { prompt_tokens: 500, answer_tokens: Some(300), is_exact: true, ..Need::default() };
    let turn = rig.turn_that_needs(&delta("a"), large).inside();
    assert_eq!(turn.turn.growth_tokens_max, Some(800));
    assert_eq!(rig.table.totals(0).pinned_tokens, 800);
    let refused = rig.turn_that_needs(&delta("b"), large).error();
    assert!(is_short(&refused, Code::PinTokens), "{refused}");
    rig.end(&turn, finished(500, 3));
    assert_eq!(rig.table.totals(0).pinned_tokens, 512);
    let small =
        Need { prompt_tokens: 400, answer_tokens: Some(90), is_exact: true, ..Need::default() };
    rig.turn_that_needs(&delta("b"), small).inside();
}

#[test]
fn what_no_budget_holds_is_refused_for_good() {
    let mut rig = Rig::new();
    rig.pin("s");
    let ignores_eos =
        Need { prompt_tokens: 8, answer_tokens: None, is_exact: true, ..Need::default() };
    let refused = rig.turn_that_needs(&delta("s"), ignores_eos).error();
    assert_eq!(
        refused,
        Error::TooLarge { tokens_needed: 1200, tokens_max: 1008 },
        "as far as the context"
    );
    assert_eq!(code_of(refused), Code::TurnTooLarge);
}

#[test]
fn an_aborted_turn_leaves_its_history_to_be_computed_again() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 600);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Aborted);
    assert_eq!(rig.table.totals(0).pinned_tokens, 0, "the KV went to the tree");
    assert_eq!(rig.table.totals(0).rows_held, 0);
    let session = rig.table.sessions().get(&key("s")).unwrap();
    assert_eq!((session.history.tokens, session.turns.finished), (601, 1));
    assert_eq!(session.state(), contract::load::SessionState::Demoted);
    rig.pin_holding("other", 400);
    let refused = rig.turn(&delta("s")).error();
    assert!(is_short(&refused, Code::PinTokens), "its 601 tokens come back with it: {refused}");
    rig.close("other").unwrap();
    let waiting = rig.turn(&delta("s")).waits();
    rig.engine_closes();
    rig.answer(waiting).inside();
}

#[test]
fn a_session_without_kv_takes_no_row_with_its_close() {
    let mut rig = Rig::new();
    rig.pin_holding("aborted", 20);
    let turn = rig.turn(&delta("aborted")).inside();
    rig.end(&turn, Outcome::Aborted);
    for id in ["a", "b", "c"] {
        rig.pin(id);
    }
    assert_eq!(rig.close("aborted"), Ok(false));
    assert_eq!(rig.table.totals(0).rows_held, 3);
    assert_eq!(rig.closes.len(), 1, "its history leaves the engine all the same");
}

#[test]
fn idle_sessions_give_way_the_least_worth_keeping_first() {
    let mut rig = Rig::new();
    rig.pin_holding("old", 300);
    rig.wait(DEMOTE);
    rig.pin_holding("older than nothing", 300);
    rig.wait(DEMOTE);
    let need =
        Need { prompt_tokens: 500, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    rig.pin("new");
    let waiting = rig.turn_that_needs(&delta("new"), need).waits();
    assert_eq!(rig.closes.len(), 1, "one is enough");
    rig.engine_closes();
    rig.answer(waiting).inside();
    assert_eq!(code_of(rig.turn(&delta("old")).error()), Code::SessionReclaimed);
    rig.turn(&delta("older than nothing")).inside();
}

#[test]
fn with_the_shim_a_session_gives_up_its_kv_and_keeps_its_history() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let idle = rig.pin_holding("idle", 600);
    rig.wait(DEMOTE);
    rig.pin("new");
    let need =
        Need { prompt_tokens: 500, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let waiting = rig.turn_that_needs(&delta("new"), need).waits();
    assert_eq!((&rig.demotes, &rig.closes), (&vec![idle.clone()], &vec![]));
    rig.answer_demotion(&idle, true);
    rig.carry_out();
    let turn = rig.answer(waiting).inside();
    rig.end(&turn, finished(500, 1));
    assert_eq!(rig.table.sessions().get(&key("idle")).unwrap().history_tokens(), 601);
    assert!(is_short(&rig.turn(&delta("idle")).error(), Code::PinTokens), "its KV comes back too");
    rig.wait(DEMOTE);
    let waiting = rig.turn(&delta("idle")).waits();
    let newer = rig.demotes.pop().unwrap();
    rig.answer_demotion(&newer, true);
    rig.carry_out();
    rig.answer(waiting).inside();
}

#[test]
fn a_session_in_use_never_gives_way() {
    let mut rig = Rig::new();
    rig.pin("busy");
    let need =
        Need { prompt_tokens: 800, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let busy = rig.turn_that_needs(&delta("busy"), need).inside();
    rig.wait(2 * DEMOTE);
    rig.pin("new");
    let refused = rig.turn_that_needs(&delta("new"), need).error();
    assert!(is_short(&refused, Code::PinTokens), "{refused}");
    rig.end(&busy, finished(800, 1));
    let refused = rig.turn_that_needs(&delta("new"), need).error();
    assert!(is_short(&refused, Code::PinTokens), "it has only just ended: {refused}");
}

#[test]
fn a_large_plain_turn_waits_outside_for_room_that_sessions_hold() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 600);
    rig.plain(400).inside();
    let large = rig.plain(1000).waits();
    rig.close("s").unwrap();
    rig.engine_closes();
    rig.answer(large).inside();
    rig.pin("t");
    let need =
        Need { prompt_tokens: 500, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let refused = rig.turn_that_needs(&delta("t"), need).error();
    assert!(is_short(&refused, Code::PinTokens), "the large turn has the room: {refused}");
}

#[test]
fn the_queue_is_in_order_bounded_and_takes_no_longer_than_it_may() {
    let mut rig = Rig::new();
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let first = rig.plain(1).waits();
    rig.wait(QUEUE / 2);
    let others: Vec<String> = (0..3).map(|_| rig.plain(1).waits()).collect();
    let refused = rig.plain(1).error();
    assert!(is_short(&refused, Code::QueuePlaces), "{refused}");
    assert_eq!(rig.table.totals(0).turns_queued, 4);
    rig.end(&inside[0], Outcome::Finished(None));
    rig.answer(first).inside();
    rig.wait(QUEUE - Duration::from_millis(1));
    assert!(rig.refused.is_empty());
    rig.wait(Duration::from_millis(1));
    assert_eq!(rig.refused.len(), 3);
    assert!(rig.refused.values().all(|error| is_short(error, Code::QueueTime)));
    assert!(others.iter().all(|rid| rig.refused.contains_key(rid)));
    assert_eq!(rig.table.totals(0).turns_queued, 0);
}

#[test]
fn a_turn_that_finds_no_place_hears_how_long_the_turns_before_it_take() {
    let mut rig = Rig::new();
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let mut queued: Vec<String> = (0..4).map(|_| rig.plain(1).waits()).collect();
    let wait = |error: Error| match error {
        Error::OutOfRoom { wait, .. } => wait,
        other => panic!("{other}"),
    };
    assert_eq!(wait(rig.plain(1).error()), None, "no turn has ended yet");
    for turn in &inside[..3] {
        rig.wait(QUEUE / 4);
        rig.end(turn, Outcome::Finished(None));
        rig.answer(queued.remove(0)).inside();
        queued.push(rig.plain(1).waits());
    }
    assert_eq!(wait(rig.plain(1).error()), Some(QUEUE / 4 * 5), "four wait, and the turn itself");
}

#[test]
fn prompts_that_the_engine_has_not_shown_are_counted() {
    let mut rig = Rig::new();
    let before = rig.now;
    rig.wait(Duration::from_millis(1));
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(20).inside()).collect();
    let waiting = rig.plain(40).waits();
    assert_eq!(rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(before)), 160);
    assert_eq!(
        rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(rig.now)),
        40,
        "the engine was looked at since"
    );
    let need = Need { prompt_tokens: 90, is_exact: true, resident_tokens: 64, ..Need::default() };
    rig.ask(None, None, RouteTurns::Nothing, need).waits();
    assert_eq!(
        rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(rig.now)),
        66,
        "what is resident isn't computed"
    );
    rig.end(&inside[0], Outcome::Finished(None));
    rig.answer(waiting).inside();
    assert_eq!(rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(rig.now)), 26);
}

#[test]
fn of_a_session_only_what_is_not_there_has_to_be_computed() {
    let mut rig = Rig::new();
    let before = rig.now;
    rig.pin_holding("s", 200);
    rig.wait(Duration::from_millis(1));
    // The length of the text is a bound in bytes. The history's last token never had KV.
    let need = Need { prompt_tokens: 80, answer_tokens: Some(1), ..Need::default() };
    rig.turn_that_needs(&delta("s"), need).inside();
    assert_eq!(rig.table.unseen_prompt_tokens(0, UnseenBy::Sample(before)), 21);
}

#[test]
fn a_turn_given_up_while_it_waits_leaves_nothing() {
    let mut rig = Rig::new();
    let inside: Vec<Inside> = (0..6).map(|_| rig.plain(1).inside()).collect();
    let waits = rig.turn(&Claim::for_session(&key("s"))).waits();
    rig.table.end_turn(rig.now, &waits, Outcome::Refused);
    inside.iter().for_each(|turn| rig.end(turn, Outcome::Finished(None)));
    assert_eq!(rig.table.totals(0), RankTotals { sessions: 1, ..RankTotals::default() });
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().turns.waiting, 0);
}

#[test]
fn nothing_is_appended_to_a_history_in_doubt() {
    let retracted = Usage { retractions: 1, ..usage(33, 5) };
    let ends = [
        ("nobody saw the end", Outcome::Lost),
        ("the client did not hear it", Outcome::Unheard(Some(usage(33, 5)))),
        ("the history shrank", finished(5, 1)),
        ("something else was appended", finished(50, 1)),
        ("retracted", Outcome::Finished(Some(retracted))),
    ];
    for (why, end) in ends {
        let mut rig = Rig::new();
        let incarnation = rig.pin_holding("s", 24);
        let need =
            Need { prompt_tokens: 8, answer_tokens: Some(8), is_exact: true, ..Need::default() };
        let turn = rig.turn_that_needs(&delta("s"), need).inside();
        rig.end(&turn, end);
        assert_eq!(rig.turn(&delta("s")).error(), Error::HistoryUnknown, "{why}");
        let close = rig.closes.pop().expect("what it held is given back");
        assert_eq!(close.incarnation, incarnation, "{why}");
        let inside = (end == Outcome::Lost).then(|| turn.rid.clone());
        assert_eq!(close.rid, inside, "one that may still run is aborted first: {why}");
        assert_ne!(rig.pin("s"), incarnation, "a new incarnation is the way out: {why}");
    }
}

#[test]
fn the_shim_settles_what_only_the_engine_knows() {
    let seen = |id: &str, history_tokens, in_flight| SessionReport {
        id: id.into(),
        holds_row: true,
        allocated_tokens: history_tokens,
        history_tokens,
        in_flight,
    };
    for (history_tokens, good) in [(25, true), (38, false)] {
        let mut rig = Rig::new();
        rig.shim_up(true);
        let incarnation = rig.pin_holding("s", 24);
        let turn = rig.turn(&delta("s")).inside();
        rig.end(&turn, Outcome::Lost);
        let next = rig.turn(&delta("s")).waits();
        rig.report(&seen(&incarnation, 25, false), true);
        rig.table.handle_shim_report(
            rig.now,
            0,
            ShimReport::Inspection { number: 1_000, report: Some(&seen(&incarnation, 25, false)) },
        );
        rig.carry_out();
        assert!(!rig.admitted.contains_key(&next), "what was true before the doubt proves nothing");
        assert_eq!(rig.inspections, [Some(turn.rid.clone())], "the lost turn is aborted first");
        rig.answer_inspection(&seen(&incarnation, 25, true));
        let late = rig.shim_requests[0].0;
        rig.carry_out();
        assert!(rig.refused.is_empty(), "the lost turn may still commit");
        assert_eq!(rig.inspections.pop(), Some(None), "the shim is asked again");
        rig.table.handle_shim_report(
            rig.now,
            0,
            ShimReport::Inspection { number: late, report: Some(&seen(&incarnation, 25, false)) },
        );
        rig.carry_out();
        assert!(rig.refused.is_empty(), "the first request has had its answer");
        assert!(!rig.admitted.contains_key(&next), "the first request has had its answer");
        rig.answer_inspection(&seen(&incarnation, history_tokens, false));
        rig.carry_out();
        match good {
            true => drop(rig.answer(next).inside()),
            false => assert_eq!(rig.answer(next).error(), Error::HistoryUnknown),
        }
    }
}

#[test]
fn a_doubt_that_nobody_settles_is_a_no() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    rig.pin_holding("s", 24);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Lost);
    let next = rig.turn(&delta("s")).waits();
    rig.wait(Duration::from_secs(5));
    assert_eq!(rig.answer(next).error(), Error::HistoryUnknown);
}

#[test]
fn a_refused_turn_changes_nothing() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 24);
    let turn = rig.turn(&delta("s")).inside();
    rig.end(&turn, Outcome::Refused);
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().resident_tokens(), 24);
    assert_eq!(rig.table.totals(0).pinned_tokens, 32);
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_whole_history_never_reaches_a_pinned_session() {
    let mut rig = Rig::new();
    let need = Need::default();
    let first = rig.turn(&Claim { open: true, ..pinned("s") }).inside();
    rig.end(&first, finished(20, 5));
    assert_eq!(rig.turn(&pinned("s")).error(), Error::PinnedRouteRefused);
    let on_chat = rig.ask(Some(&delta("s")), None, RouteTurns::Nothing, need);
    assert_eq!(on_chat.error(), Error::PinnedRouteRefused, "chat would drop the session silently");
    let on_chat = rig.ask(Some(&pinned("new")), None, RouteTurns::Nothing, need);
    assert_eq!(on_chat.error(), Error::PinnedRouteRefused);
    assert!(!rig.is_open("new"), "a refused turn opens nothing");
}

#[test]
fn a_delta_may_open_its_session() {
    let mut rig = Rig::new();
    let turn = rig.turn(&Claim { open: true, ..delta("s") }).inside();
    assert_eq!(turn.turn.session.unwrap().retention, Retention::Pinned);
    let tagged = Claim { retention: Some(Retention::Tagged), ..delta("t") };
    let refused = rig.turn(&Claim { open: true, ..tagged }).error();
    assert_eq!(refused, Error::DeltaNeedsPinned(Retention::Tagged));
    assert_eq!(code_of(refused), Code::DeltaNeedsPinned);
    let need = Need { prompt_tokens: 5000, answer_tokens: None, is_exact: true, ..Need::default() };
    let refused = rig.turn_that_needs(&Claim { open: true, ..delta("u") }, need).error();
    assert!(matches!(refused, Error::TooLarge { .. }), "{refused}");
    for id in ["t", "u"] {
        assert!(!rig.is_open(id), "a refused turn leaves nothing open");
    }
    assert_eq!(rig.closes.len(), 1, "what was opened for it is closed at the engine too");
}

#[test]
fn a_delta_needs_a_pinned_history() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(&delta("s")).error(), Error::UnknownSession);
    let turn = rig.turn(&Claim::for_session(&key("s"))).inside();
    rig.end(&turn, finished(20, 5));
    assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsPinned(Retention::Tagged));
}

#[test]
fn inferred_sessions_overlap_and_opened_ones_do_not() {
    let mut rig = Rig::new();
    let inferred = Claim::for_session(&key("s"));
    let turns = [(); 2].map(|()| rig.turn(&inferred).inside());
    turns.iter().for_each(|turn| rig.end(turn, finished(20, 5)));
    rig.open("o", None).unwrap();
    let _running = rig.turn(&Claim::for_session(&key("o"))).inside();
    assert_eq!(rig.turn(&Claim::for_session(&key("o"))).error(), Error::Busy);
}

#[test]
fn a_full_table_forgets_the_longest_idle_inferred_session() {
    let mut rig = Rig::with_settings(|settings| settings.shares.sessions_max = 8);
    rig.open("opened", None).unwrap();
    for number in 1..8 {
        rig.wait(Duration::from_millis(1));
        let turn = rig.turn(&Claim::for_session(&key(&number.to_string()))).inside();
        rig.end(&turn, Outcome::Finished(None));
    }
    rig.wait(IDLE / 2);
    rig.turn(&Claim::for_session(&key("new"))).inside();
    assert!(!rig.is_open("1"), "it was idle longest");
    assert!(rig.is_open("opened"), "its client asked for it");
    assert_eq!(rig.closes.len(), 1);
}

#[test]
fn an_explicit_open_takes_an_inferred_session_over() {
    let mut rig = Rig::new();
    let turn = rig.turn(&Claim::for_session(&key("s"))).inside();
    rig.end(&turn, finished(20, 5));
    rig.open_for("s", None, Some(IDLE / 2)).unwrap();
    let _running = rig.turn(&Claim::for_session(&key("s"))).inside();
    assert_eq!(rig.turn(&Claim::for_session(&key("s"))).error(), Error::Busy);
    let other = rig.open("s", Some(Retention::Pinned));
    assert_eq!(other, Err(Error::OpenWithOtherRetention(Retention::Tagged)));
    let mut rig = Rig::new();
    rig.open_for("s", None, Some(IDLE / 2)).unwrap();
    rig.wait(IDLE / 2);
    assert!(!rig.is_open("s"), "its own idle time counts");
}
