//! Walks the table of states and events in the doc of `session::lifecycle`, cell by cell.

use std::collections::HashMap;

use super::*;

/// The states, as the doc names them.
const STATES: [&str; 12] = [
    "planned",
    "opening",
    "open",
    "running",
    "demoting",
    "asked",
    "demoted",
    "suspect",
    "tree",
    "tree running",
    "closing",
    "gone",
];

/// The events, as the doc names them.
const EVENTS: [&str; 19] = [
    "full history",
    "opening turn",
    "delta",
    "finished",
    "aborted",
    "lost",
    "opened",
    "not opened",
    "demoted",
    "not demoted",
    "expected",
    "unexpected",
    "shim silent",
    "shim down",
    "demote",
    "close",
    "idle limit",
    "engine lost",
    "corrupt",
];

/// Returns a rig with a session "s" in this state.
fn rig_in(state: &str) -> Rig {
    let mut rig = Rig::new();
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    match state {
        "planned" => {
            // Nothing is pinned before the sessions of an earlier agent process are closed.
            rig.inherit("berth-a-0-1", None);
            rig.open("s", Some(Retention::Pinned)).unwrap();
        }
        "opening" => {
            rig.opens = Some(vec![]);
            rig.open("s", Some(Retention::Pinned)).unwrap();
        }
        "tree" | "tree running" => rig.open("s", Some(Retention::Tagged)).unwrap(),
        _ => drop(rig.pin_holding("s", 24)),
    }
    match state {
        "running" | "closing" => drop(rig.turn(&delta("s")).inside()),
        "tree running" => drop(rig.turn(&Claim::for_session(&key("s"))).inside()),
        "tree" => {
            let turn = rig.turn(&Claim::for_session(&key("s"))).inside();
            rig.end(&turn, finished(8, 2));
        }
        "demoted" | "suspect" => {
            let turn = rig.turn(&delta("s")).inside();
            let is_lost = state == "suspect";
            rig.end(&turn, if is_lost { Outcome::Lost } else { Outcome::Aborted });
        }
        "demoting" => {
            rig.pin_holding("b", 100);
            rig.pin_holding("c", 100);
            rig.wait(DEMOTE);
            // No row is left, and the KV of "s" is least worth keeping.
            rig.open("d", Some(Retention::Pinned)).unwrap();
        }
        "asked" => drop(rig.table.demote_session(rig.now, &key("s"))),
        "gone" => rig.table.handle_shim_report(
            rig.now,
            0,
            ShimReport::SessionGone { id: &incarnation_of(&rig) },
        ),
        _ => {}
    }
    if state == "closing" {
        rig.close("s").unwrap();
    }
    rig.carry_out();
    rig
}

fn apply(event: &str, rig: &mut Rig) {
    let (now, incarnation) = (rig.now, incarnation_of(rig));
    let full_history = Claim::for_session(&key("s"));
    match event {
        "full history" => run_turn(rig, &full_history),
        "opening turn" => run_turn(rig, &Claim { open: true, ..full_history }),
        "delta" => run_turn(rig, &delta("s")),
        "finished" => end_turn(rig, finished(33, 5)),
        "aborted" => end_turn(rig, Outcome::Aborted),
        "lost" => end_turn(rig, Outcome::Lost),
        "opened" => end_open(rig, &OpenResult::Opened),
        "not opened" => end_open(rig, &OpenResult::NotOpened("no".into())),
        "demoted" => rig.answer_demotion(&incarnation, true),
        "not demoted" => rig.answer_demotion(&incarnation, false),
        "expected" => report(rig, 25),
        "unexpected" => report(rig, 26),
        "shim silent" => rig.table.run_deadlines(now + Duration::from_secs(5)),
        "shim down" => rig.table.handle_shim_report(now, 0, ShimReport::Down),
        "demote" => drop(rig.table.demote_session(now, &key("s"))),
        "close" => drop(rig.table.close_session(now, &key("s"))),
        "idle limit" => rig.table.run_deadlines(now + IDLE),
        "engine lost" => rig.table.handle_engine_lost(now, engine(1)),
        "corrupt" => {
            rig.table.handle_kv_change(now, KvChange::Corrupt { incarnation: &incarnation })
        }
        other => panic!("no such event: {other}"),
    }
}

fn incarnation_of(rig: &Rig) -> String {
    rig.table.sessions().get(&key("s")).unwrap().incarnation.clone()
}

fn run_turn(rig: &mut Rig, claim: &Claim) {
    let request = claims(claim, RouteTurns::DeltasAndHistories);
    if rig.table.claim(rig.now, "new", &request).is_ok() {
        let need = Need { prompt_tokens: 8, answer_tokens: Some(8), ..Need::default() };
        rig.table.enqueue(rig.now, "new", need);
    } else {
        let error = Error::UnknownSession;
        rig.table.effects.push(Effect::Refused { rid: "new".into(), error });
    }
}

fn end_turn(rig: &mut Rig, outcome: Outcome) {
    let rid = rig.table.queue().rids_inside().next().map(str::to_owned);
    rig.table.end_turn(rig.now, &rid.unwrap_or_default(), outcome);
}

/// Ends the open of the session. Only an opening session has one.
fn end_open(rig: &mut Rig, result: &OpenResult) {
    if let Some(incarnation) = rig.opens.as_mut().and_then(Vec::pop) {
        rig.table.handle_open_result(rig.now, &incarnation, result);
    }
}

fn report(rig: &mut Rig, history_tokens: u64) {
    let report = SessionReport {
        id: incarnation_of(rig),
        holds_row: true,
        allocated_tokens: history_tokens,
        history_tokens,
        in_flight: false,
    };
    rig.answer_inspection(&report);
}

fn state_of(rig: &Rig) -> &'static str {
    let Some(session) = rig.table.sessions().get(&key("s")) else { return "removed" };
    match session.state {
        State::Planned => "planned",
        State::Opening(_) => "opening",
        State::Open(_) if session.turns_running() > 0 => "running",
        State::Open(_) => "open",
        State::Demoting { is_asked: false, .. } => "demoting",
        State::Demoting { is_asked: true, .. } => "asked",
        State::Demoted => "demoted",
        State::Suspect { .. } => "suspect",
        State::InTree(_) if session.turns_running() > 0 => "tree running",
        State::InTree(_) => "tree",
        State::Closing(_) => "closing",
        State::Gone { .. } => "gone",
    }
}

/// Returns what the table asked of the engine and the shim for the session, and told its clients.
fn effects_of(rig: &mut Rig, incarnations: &[String]) -> Vec<&'static str> {
    let is_mine = |incarnation: &String| incarnations.contains(incarnation);
    let effects = rig.table.take_effects();
    let named = effects.iter().filter_map(|effect| match effect {
        Effect::Admitted { .. } => Some("admit"),
        Effect::Refused { .. } => Some("refuse"),
        Effect::Open { incarnation, .. } if is_mine(incarnation) => Some("open"),
        Effect::Close(close) if is_mine(&close.incarnation) => Some("close"),
        Effect::Demote { incarnation, .. } if is_mine(incarnation) => Some("demote"),
        Effect::Inspect { .. } => Some("ask"),
        _ => None,
    });
    named.collect()
}

/// Returns the cell of the doc's table for each state and event.
fn documented_cells() -> HashMap<(String, String), String> {
    let doc = include_str!("../../lifecycle.rs");
    let rows = doc.lines().filter_map(|line| line.strip_prefix("//! |"));
    let mut events = vec![];
    let mut cells = HashMap::new();
    for row in rows.filter(|row| !row.starts_with("--")) {
        let row: Vec<&str> = row.trim_end_matches('|').split('|').map(str::trim).collect();
        if row[0] == "state" {
            events = row;
        } else {
            for (event, cell) in events.iter().zip(&row).skip(1) {
                cells.insert((row[0].to_owned(), (*event).to_owned()), (*cell).to_owned());
            }
        }
    }
    cells
}

#[test]
fn each_event_leads_each_state_where_the_doc_says() {
    let mut documented = documented_cells();
    let mut wrong = vec![];
    for state in STATES {
        for event in EVENTS {
            let mut rig = rig_in(state);
            assert_eq!(state_of(&rig), state, "the rig is in another state");
            let before = incarnation_of(&rig);
            apply(event, &mut rig);
            let after =
                rig.table.sessions().get(&key("s")).map(|session| session.incarnation.clone());
            let incarnations: Vec<String> = after.into_iter().chain([before]).collect();
            let mut parts = vec![];
            if state_of(&rig) != state {
                parts.push(state_of(&rig));
            }
            parts.extend(effects_of(&mut rig, &incarnations));
            let found = parts.join(", ");
            let cell = documented.remove(&(state.to_owned(), event.to_owned()));
            if cell.unwrap_or_default() != found {
                wrong.push(format!("{state} | {event} | {found}"));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert!(documented.is_empty(), "the doc names other states or events: {documented:?}");
}
