//! Tests of the requests to a shim: many at once, late answers, and full tables in parts.

use super::*;
use crate::session::SHIM_REQUESTS_MAX;

/// The sessions of an engine with many rows.
const SESSIONS: u32 = 2000;

/// Returns a rig with a shim, whose engine has room for many pinned sessions.
fn rig_with_rows() -> Rig {
    let mut wide = engine(1);
    wide.ranks[0] = RankCapacity {
        rows: SESSIONS + 100,
        pin_rows_max: SESSIONS + 50,
        pool_tokens: 1_000_000,
        pin_tokens_max: 900_000,
        ..wide.ranks[0]
    };
    let sessions_max = SESSIONS as usize + 100;
    let shares =
        ShareSettings { sessions_max, principal_sessions_max: sessions_max, ..settings().shares };
    let mut rig = Rig::with(TableSettings { shares, ..settings() }, wide);
    rig.shim_up(true);
    rig
}

impl Rig {
    /// Returns the requests to the shim since the last call.
    fn new_requests(&mut self) -> Vec<(u64, String)> {
        self.carry_out();
        std::mem::take(&mut self.shim_requests)
    }
}

#[test]
fn many_demotions_at_once_wait_in_line_and_none_is_given_up() {
    // Each change is checked in full, which takes a time that grows with the sessions.
    let mut rig = rig_with_rows();
    let count = 600;
    (0..count).for_each(|number| drop(rig.pin_holding(&format!("s{number}"), 9)));
    for number in 0..count {
        rig.table.demote_session(rig.now, &key(&format!("s{number}"))).unwrap();
    }
    let mut with_shim = rig.new_requests();
    assert_eq!(with_shim.len(), SHIM_REQUESTS_MAX, "the shim has a queue of its own");
    // The shim takes its time, but answers: all in all longer than one request may take.
    let mut answered = 0;
    while let Some((number, _)) = with_shim.pop() {
        rig.wait(Duration::from_millis(15));
        rig.table.handle_shim_report(rig.now, 0, ShimReport::Demotion { number, is_demoted: true });
        answered += 1;
        with_shim.splice(..0, rig.new_requests());
        assert!(with_shim.len() <= SHIM_REQUESTS_MAX);
    }
    assert_eq!(answered, count);
    let demoted =
        rig.table.sessions().iter().filter(|(_, session)| session.state == State::Demoted);
    assert_eq!(demoted.count(), count, "none was closed for want of room in a queue");
    assert_eq!(rig.table.totals(0).rows_held, 0);
}

#[test]
fn a_shim_that_answers_nothing_stops_neither_its_line_nor_the_others() {
    let settings = TableSettings { shim_requests_max: 1, ..settings() };
    let mut rig = Rig::with(settings, engine(1));
    rig.shim_up(true);
    let first = rig.pin_holding("first", 9);
    rig.pin_holding("second", 9);
    for id in ["first", "second"] {
        rig.table.demote_session(rig.now, &key(id)).unwrap();
    }
    assert_eq!(rig.new_requests().len(), 1);
    rig.wait(Duration::from_secs(5));
    assert_eq!(rig.table.sessions().demotion_result(&key("first")), Some(Err(Error::Reclaimed)));
    assert_eq!(rig.table.sessions().demotion_result(&key("second")), None, "it was asked only now");
    let [(number, _)] = &rig.new_requests()[..] else { panic!("one more request") };
    assert_ne!(rig.table.sessions().get(&key("first")).unwrap().incarnation, first);
    rig.table.handle_shim_report(
        rig.now,
        0,
        ShimReport::Demotion { number: *number, is_demoted: true },
    );
    assert_eq!(rig.table.sessions().demotion_result(&key("second")), Some(Ok(())));
}

#[test]
fn a_request_of_a_session_that_was_closed_meanwhile_is_not_sent() {
    let settings = TableSettings { shim_requests_max: 1, ..settings() };
    let mut rig = Rig::with(settings, engine(1));
    rig.shim_up(true);
    for id in ["a", "b", "c"] {
        rig.pin_holding(id, 9);
        rig.table.demote_session(rig.now, &key(id)).unwrap();
    }
    let [(first, _)] = rig.new_requests()[..] else { panic!("one request") };
    let last = rig.table.sessions().get(&key("c")).unwrap().incarnation.clone();
    rig.close("b").unwrap();
    rig.table.handle_shim_report(
        rig.now,
        0,
        ShimReport::Demotion { number: first, is_demoted: true },
    );
    let requests = rig.new_requests();
    assert_eq!(requests.iter().map(|(_, id)| id).collect::<Vec<_>>(), [&last]);
}

#[test]
fn a_foreign_session_is_forgotten_only_when_a_whole_table_lacks_it() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let foreign = |id: &str| SessionReport {
        id: id.into(),
        holds_row: true,
        allocated_tokens: 16,
        history_tokens: 17,
        in_flight: false,
    };
    let rows = |rig: &Rig| rig.table.totals(0).foreign_rows;
    let reports = |rig: &mut Rig, ids: &[&str], begins_table, ends_table| {
        let part = TablePart { begins_table, ends_table };
        let reports: Vec<SessionReport> = ids.iter().map(|id| foreign(id)).collect();
        rig.table.handle_shim_report(rig.now, 0, ShimReport::Sessions { part, reports: &reports });
    };
    reports(&mut rig, &["a", "b", "c"], false, false);
    reports(&mut rig, &["a"], true, false);
    assert_eq!(rows(&rig), 3, "more parts follow");
    reports(&mut rig, &["new"], false, false);
    reports(&mut rig, &["c"], false, true);
    assert_eq!(rows(&rig), 3, "b is gone, and what came meanwhile is there");
    reports(&mut rig, &[], true, true);
    assert_eq!(rows(&rig), 0);
}

#[test]
fn a_full_table_that_is_older_than_a_close_does_not_confirm_it() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    rig.pin_holding("s", 24);
    rig.close("s").unwrap();
    assert_eq!(rig.table.totals(0).rows_held, 1);
    // The shim began to read its sessions before the engine had opened this one.
    let part = TablePart { begins_table: true, ends_table: true };
    rig.table.handle_shim_report(rig.now, 0, ShimReport::Sessions { part, reports: &[] });
    assert_eq!(rig.table.totals(0).rows_held, 1, "the engine has not closed it");
    rig.engine_closes();
    assert_eq!(rig.table.totals(0).rows_held, 0);
}
