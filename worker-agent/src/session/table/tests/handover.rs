//! Tests of hand-overs from one agent process to the next.

use super::*;
use crate::session::{Legacy, handover::HandedSession, journal::OpenIncarnation};

/// Returns what the old table hands over, as the next process reads it from the file.
fn handed(rig: &Rig) -> Vec<HandedSession> {
    let line = |session| serde_json::to_string(session).unwrap();
    let lines: Vec<String> = rig.table.hand_over(rig.now).iter().map(line).collect();
    lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns what the journal says of the old table's sessions.
fn left_open(rig: &Rig) -> std::collections::BTreeMap<String, OpenIncarnation> {
    let mut open = std::collections::BTreeMap::new();
    for record in &rig.journal {
        match record {
            Record::Opening { incarnation, dp_rank } => {
                let left = OpenIncarnation { dp_rank: *dp_rank, rid: None };
                drop(open.insert(incarnation.clone(), left));
            }
            Record::Closed { incarnation } => drop(open.remove(incarnation)),
            Record::Engine { .. } | Record::Turn { .. } | Record::Tag { .. } => {}
        }
    }
    open
}

/// Returns the tags that the old table's journal lists.
fn tags_left_open(rig: &Rig) -> std::collections::BTreeSet<String> {
    let mut tags = std::collections::BTreeSet::new();
    for record in &rig.journal {
        match record {
            Record::Tag { incarnation } => {
                tags.insert(incarnation.clone());
            }
            Record::Closed { incarnation } => {
                tags.remove(incarnation);
            }
            Record::Engine { .. } | Record::Turn { .. } | Record::Opening { .. } => {}
        }
    }
    tags
}

/// Returns the next process's rig, beside the same engine unless `is_same_engine` is false.
pub(super) fn successor(old: &Rig, engine: EngineCapacity, is_same_engine: bool) -> Rig {
    let settings = TableSettings { incarnation_prefix: "berth-a-2".into(), ..settings() };
    let mut rig = Rig::with(settings, engine);
    rig.now = old.now;
    let legacy = Legacy {
        open_incarnations: if is_same_engine { left_open(old) } else { Default::default() },
        tags: if is_same_engine { tags_left_open(old) } else { Default::default() },
        sessions: handed(old),
        age: Duration::ZERO,
        is_same_engine,
    };
    rig.table.take_over(rig.now, legacy);
    rig.carry_out();
    rig
}

/// Lets a shim connect and report every session that `old` holds, as the engine has it.
fn shim_reports(rig: &mut Rig, old: &Rig) {
    rig.shim_up(true);
    rig.carry_out();
    for (_, session) in old.table.sessions().iter() {
        let report = SessionReport {
            id: session.incarnation.clone(),
            holds_row: session.state.row().is_some_and(|row| row.resident_tokens > 0),
            allocated_tokens: session.resident_tokens(),
            history_tokens: session.history_tokens(),
            in_flight: false,
        };
        rig.answer_inspection(&report);
    }
    rig.carry_out();
}

#[test]
fn the_parent_stays_known_through_turns_that_name_none_and_to_the_next_process() {
    let mut old = Rig::new();
    let parent = Some(key("parent").digest());
    let first = Claim { parent, ..Claim::for_session(&key("s")) };
    for claim in [first, Claim::for_session(&key("s"))] {
        let turn = old.turn(&claim).inside();
        old.end(&turn, finished(9, 1));
        assert_eq!(old.table.sessions().get(&key("s")).unwrap().parent(), parent);
    }
    let rig = successor(&old, engine(1), true);
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().parent(), parent);
}

#[test]
fn a_confirmed_session_goes_on_and_a_turn_waits_for_that() {
    let mut old = Rig::new();
    let incarnation = old.pin_holding("s", 24);
    let mut rig = successor(&old, engine(1), true);
    assert_eq!(rig.table.totals(0).rows_held, 1, "its row is counted at once");
    let rid = rig.turn(&delta("s")).waits();
    shim_reports(&mut rig, &old);
    let turn = rig.answer(rid).inside();
    assert_eq!(turn.incarnation(), incarnation);
    assert!(rig.closes.is_empty());
    rig.end(&turn, finished(33, 1));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().turns_finished(), 2);
}

#[test]
fn what_is_not_confirmed_is_closed_and_its_client_told() {
    for case in ["no shim", "other history", "not there", "not in the journal", "other engine"] {
        let mut old = Rig::new();
        let incarnation = old.pin_holding("s", 24);
        if case == "not in the journal" {
            old.journal.clear();
        }
        let mut rig = successor(&old, engine(1), case != "other engine");
        match case {
            "no shim" => rig.wait(Duration::from_secs(10)),
            "not there" => {
                rig.shim_up(true);
                rig.carry_out();
                let (number, _) = rig.shim_requests[0];
                rig.table.handle_shim_report(
                    rig.now,
                    0,
                    ShimReport::Inspection { number, report: None },
                );
                rig.carry_out();
            }
            "other history" => {
                rig.shim_up(true);
                rig.carry_out();
                let report = SessionReport {
                    id: incarnation.clone(),
                    holds_row: true,
                    allocated_tokens: 26,
                    history_tokens: 26,
                    in_flight: false,
                };
                rig.answer_inspection(&report);
                rig.carry_out();
            }
            _ => {}
        }
        let error = rig.turn(&delta("s")).error();
        assert_eq!(code_of(error), Code::SessionLost, "{case}");
        let closed: Vec<&str> = rig.closes.iter().map(|close| &*close.incarnation).collect();
        let is_closed = !["other engine", "not in the journal"].contains(&case);
        assert_eq!(closed, if is_closed { vec![&*incarnation] } else { vec![] }, "{case}");
    }
}

#[test]
fn a_process_with_less_room_keeps_what_fits_and_closes_the_rest() {
    let mut old = Rig::new();
    for id in ["old", "new"] {
        old.pin_holding(id, 24);
        old.wait(Duration::from_millis(10));
    }
    let mut small = engine(1);
    small.ranks[0].rows_reserve = small.ranks[0].rows - 1;
    let mut rig = successor(&old, small, true);
    shim_reports(&mut rig, &old);
    assert_eq!(rig.closes.len(), 1);
    assert!(rig.table.sessions().get(&key("new")).unwrap().state.is_open(), "the one used last");
    assert_eq!(rig.turn(&delta("old")).error(), Error::Reclaimed);
}

#[test]
fn a_tree_of_older_weights_takes_no_pin_after_a_hand_over_either() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 31);
    let turn = rig.plain(8).inside();
    rig.end(&turn, Outcome::Finished(None));
    let change = KvChange::Weights { is_counted: true, was_flushed: false };
    rig.table.handle_kv_change(rig.now, change);
    let sessions = rig.table.hand_over(rig.now);
    assert!(!sessions.is_empty());
    let mut next = Rig::new();
    let legacy = Legacy { sessions, is_same_engine: true, ..Legacy::default() };
    next.table.take_over(next.now, legacy);
    next.carry_out();
    assert_eq!(next.open("other", Some(Retention::Pinned)).unwrap_err(), Error::CacheOutdated);
}

#[test]
fn a_second_hand_over_says_what_the_first_one_said() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut old = Rig::new();
        old.shim_up(true);
        for _ in 0..random.usize(1..40) {
            act(&mut old, &mut random);
        }
        old.table.begin_handover(old.now);
        old.carry_out();
        let inside: Vec<String> = old.table.queue().rids_inside().map(str::to_owned).collect();
        for rid in inside {
            old.table.end_turn(old.now, &rid, Outcome::Aborted);
        }
        old.carry_out();
        let mut rig = successor(&old, engine(1), true);
        shim_reports(&mut rig, &old);
        rig.table.check_invariants();
        let told = |rig: &Rig| {
            let mut sessions = rig.table.hand_over(rig.now);
            // A session that is gone has a new id, and one without KV of its own is demoted.
            for session in &mut sessions {
                if !session.is_open() {
                    session.incarnation.clear();
                }
            }
            let text = serde_json::to_string(&sessions).unwrap();
            text.replace(r#"{"open":{"resident_tokens":0}}"#, r#"{"demoted":{}}"#)
        };
        assert_eq!(told(&rig), told(&old), "seed {seed}");
        let open =
            |rig: &Rig| rig.table.sessions().iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
        assert_eq!(open(&rig), open(&old), "seed {seed}");
        for (_, session) in rig.table.sessions().iter() {
            let is_closing = rig.closes.iter().any(|c| c.incarnation == session.incarnation);
            assert!(!is_closing, "seed {seed}: an open session is being closed");
        }
    }
}

/// Does something at random, as clients and the engine do.
fn act(rig: &mut Rig, random: &mut fastrand::Rng) {
    let id = ["a", "b", "c", "d"][random.usize(..4)];
    match random.u32(..8) {
        0 => drop(rig.open(id, Some(Retention::Pinned))),
        1 => drop(rig.open(id, Some(Retention::Tagged))),
        2 => drop(rig.close(id)),
        3 => rig.wait(Duration::from_millis(random.u64(..2_000))),
        4 => rig.engine_closes(),
        _ => {
            let history =
                rig.table.sessions().get(&key(id)).map_or(0, |session| session.history_tokens());
            let claim = if random.bool() { delta(id) } else { Claim::for_session(&key(id)) };
            let Answer::In(turn) = rig.turn(&claim) else { return };
            let runs_pinned =
                rig.table.sessions().get(&key(id)).is_some_and(|session| session.is_pinned());
            let before = if runs_pinned { history } else { 0 };
            let outcome = match random.u32(..4) {
                0 => Outcome::Aborted,
                1 => Outcome::Refused,
                _ => finished(before + 8, 3),
            };
            rig.end(&turn, outcome);
        }
    }
}

#[test]
fn a_taken_over_session_continues_only_its_own_kv_and_none_that_is_not_known() {
    let sql = KvIdentity::new(Some("sql"), Some("salt"), None);
    let mut old = Rig::new();
    for (id, kv) in [("s", sql), ("t", sql), ("plain", KvIdentity::NONE)] {
        old.pin_with(id, kv);
    }
    let mut rig = successor(&old, engine(1), true);
    shim_reports(&mut rig, &old);
    rig.delta_with("s", sql).inside();
    assert_eq!(rig.delta_with("t", KvIdentity::NONE).error(), Error::OtherKv);
    rig.delta_with("plain", KvIdentity::NONE).inside();
    // The last process did not know the identity.
    let mut sessions = handed(&old);
    for session in &mut sessions {
        session.kv = None;
    }
    let settings = TableSettings { incarnation_prefix: "berth-a-3".into(), ..settings() };
    let mut rig = Rig::with(settings, engine(1));
    let open_incarnations = left_open(&old);
    let age = Duration::ZERO;
    let is_same_engine = true;
    let legacy = Legacy { open_incarnations, sessions, age, is_same_engine, ..Legacy::default() };
    rig.table.take_over(rig.now, legacy);
    shim_reports(&mut rig, &old);
    assert_eq!(rig.delta_with("plain", KvIdentity::NONE).error(), Error::OtherKv);
}

#[test]
fn a_taken_over_session_of_an_adapter_that_is_gone_is_closed_and_its_client_told() {
    let mut old = Rig::new();
    let incarnation = old.pin_with("s", KvIdentity::new(Some("sql"), None, None));
    let mut rig = successor(&old, engine(1), true);
    rig.table.handle_kv_change(rig.now, KvChange::Adapters(&["code".to_owned()]));
    rig.carry_out();
    assert_eq!(rig.closes[0].incarnation, incarnation);
    assert_eq!(rig.delta_with("s", KvIdentity::NONE).error(), Error::AdapterChanged);
}
