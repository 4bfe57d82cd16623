//! Tags: in the journal before their first turn, and closed until the engine has answered.

use super::{
    handover::successor,
    trim::{auto, full_history, trimming},
    *,
};
use crate::session::{Legacy, journal::OpenIncarnation};

fn tagged(id: &str) -> Claim {
    Claim { retention: Some(Retention::Tagged), ..Claim::for_session(&key(id)) }
}

impl Rig {
    /// Runs a turn of a tagged session. Returns the tag.
    fn tag(&mut self, id: &str) -> String {
        let turn = self.turn(&tagged(id)).inside();
        self.end(&turn, finished(25, 6));
        turn.turn.tag().expect("it was sent with one").to_owned()
    }

    /// Returns the tags that the journal lists.
    fn tags_in_journal(&self) -> Vec<&str> {
        let is_closed =
            |tag: &String| self.journal.contains(&Record::Closed { incarnation: tag.clone() });
        let tags = self.journal.iter().filter_map(|record| match record {
            Record::Tag { incarnation } if !is_closed(incarnation) => Some(incarnation.as_str()),
            _ => None,
        });
        tags.collect()
    }
}

/// Returns the table of a process that found `tags` in the journal of one that was killed.
fn after_a_kill(tags: impl IntoIterator<Item = String>) -> Rig {
    let mut rig = Rig::new();
    let legacy = Legacy { tags: tags.into_iter().collect(), ..Legacy::default() };
    rig.table.take_over(rig.now, legacy);
    rig.carry_out();
    rig
}

#[test]
fn a_tag_is_in_the_journal_before_its_first_turn_and_only_once() {
    let mut rig = Rig::new();
    let request = claims(&tagged("s"), RouteTurns::DeltasAndHistories);
    rig.table.claim(rig.now, "r", &request).unwrap();
    rig.table.enqueue(rig.now, "r", Need { prompt_tokens: 8, ..Need::default() });
    let effects = rig.table.take_effects();
    let tag = rig.table.sessions().get(&key("s")).unwrap().incarnation.clone();
    let record = Effect::Journal(Record::Tag { incarnation: tag.clone() });
    let recorded = effects.iter().position(|effect| *effect == record).expect("a record");
    let admitted = effects.iter().position(|effect| matches!(effect, Effect::Admitted { .. }));
    assert!(Some(recorded) < admitted, "{effects:?}");
    rig.table.end_turn(rig.now, "r", finished(8, 2));
    rig.carry_out();
    assert_eq!(rig.tag("s"), tag);
    assert_eq!(rig.journal, [], "the second turn needs no record");
}

#[test]
fn a_tag_s_close_is_repeated_until_the_engine_has_answered_it() {
    let mut rig = Rig::new();
    let tag = rig.tag("s");
    rig.close("s").unwrap();
    for is_repeat in [false, true, true] {
        let close = rig.closes.pop().expect("a close");
        let want =
            CloseRequest { incarnation: tag.clone(), rid: None, is_pinned: false, is_repeat };
        assert_eq!(close, want);
        assert_eq!((rig.table.unfinished().closes, rig.tags_in_journal()), (1, vec![&*tag]));
        rig.table.handle_close_result(rig.now, &tag, CloseResult::NotYet);
        rig.wait(Duration::from_secs(20));
    }
    rig.engine_closes();
    assert_eq!((rig.table.unfinished().closes, rig.tags_in_journal()), (0, vec![]));
    assert_eq!(rig.table.next_deadline(), None, "nothing is left to do");
}

#[test]
fn a_session_that_no_turn_was_tagged_with_needs_no_close() {
    let mut rig = Rig::new();
    let claim = tagged("s");
    let need = Need { prompt_tokens: 8, ..Need::default() };
    let route_turns = RouteTurns::HistoriesTaggedByShim;
    let turn = rig.ask(Some(&claim), None, route_turns, need).inside();
    assert_eq!((turn.turn.run_mode, turn.turn.tag()), (Some(RunMode::Untagged), None));
    rig.end(&turn, finished(8, 2));
    rig.close("s").unwrap();
    assert_eq!((rig.closes.len(), rig.journal.len(), rig.table.unfinished().closes), (0, 0, 0));
}

#[test]
fn the_tags_of_a_killed_process_are_closed_a_few_at_a_time() {
    let mut rig = after_a_kill((0..500).map(|number| format!("berth-a-0-{number}")));
    assert_eq!(rig.table.unfinished().closes, 500);
    let mut closed = std::collections::BTreeSet::new();
    while let Some(close) = rig.closes.pop() {
        assert!(!close.is_pinned && rig.closes.len() < 4, "{} at once", rig.closes.len() + 1);
        if closed.len() == 250 {
            // Tags hold no row and no KV.
            assert_eq!(rig.table.totals(0), RankTotals::default());
            rig.pin("s");
        }
        rig.table.handle_close_result(rig.now, &close.incarnation, CloseResult::Confirmed);
        rig.carry_out();
        assert!(closed.insert(close.incarnation), "one is closed twice");
    }
    assert_eq!((closed.len(), rig.table.unfinished().closes), (500, 0));
}

#[test]
fn closes_that_fail_make_place_for_others_and_come_again() {
    let mut rig = after_a_kill((0..20).map(|number| format!("berth-a-0-{number}")));
    let mut asked = 0;
    while let Some(close) = rig.closes.pop() {
        asked += 1;
        rig.table.handle_close_result(rig.now, &close.incarnation, CloseResult::NotYet);
        rig.carry_out();
    }
    assert_eq!((asked, rig.table.unfinished().closes), (20, 20), "each is tried");
    rig.wait(Duration::from_secs(1));
    while !rig.closes.is_empty() {
        rig.engine_closes();
    }
    assert_eq!(rig.table.unfinished().closes, 0);
}

#[test]
fn many_pinned_closes_are_sent_in_turn_and_stay_counted() {
    let mut rig = Rig::new();
    let mut engine = engine(1);
    engine.ranks[0].rows = 100;
    rig.engine_restarts(engine);
    let open = (0..90)
        .map(|number| (format!("berth-a-0-{number}"), OpenIncarnation { dp_rank: 0, rid: None }));
    let legacy = Legacy { open_incarnations: open.collect(), ..Legacy::default() };
    rig.table.take_over(rig.now, legacy);
    rig.carry_out();
    assert_eq!((rig.closes.len(), rig.table.totals(0).rows_held), (32, 90));
    for left in [58, 26, 0] {
        rig.engine_closes();
        assert_eq!(rig.table.totals(0).rows_held, left);
    }
}

#[test]
fn the_shim_s_table_confirms_no_tag_because_it_lists_none() {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let tag = rig.tag("s");
    rig.close("s").unwrap();
    let part = TablePart { begins_table: true, ends_table: true };
    rig.table.handle_shim_report(rig.now, 0, ShimReport::Sessions { part, reports: &[] });
    rig.table.handle_shim_report(rig.now, 0, ShimReport::SessionGone { id: &tag });
    rig.carry_out();
    assert_eq!(rig.tags_in_journal(), [&*tag]);
}

#[test]
fn a_planned_restart_keeps_the_tags_of_its_sessions_and_closes_the_others() {
    let mut old = Rig::new();
    let kept = old.tag("kept");
    let closing = old.tag("closing");
    old.close("closing").unwrap();
    let mut rig = successor(&old, engine(1), true);
    assert_eq!(rig.closes.pop().unwrap().incarnation, closing);
    rig.close("kept").unwrap();
    assert_eq!(rig.closes[0].incarnation, kept);

    // The journal of the last process lacks the tag: the session's turns ran without it.
    old.journal.clear();
    let mut rig = successor(&old, engine(1), true);
    assert_eq!(rig.tags_in_journal(), [&*kept]);
    rig.close("kept").unwrap();
    assert_eq!(rig.closes[0].incarnation, kept);

    let mut rig = successor(&old, engine(1), false);
    rig.close("kept").unwrap();
    assert_eq!(rig.closes, [], "another engine process has no tags");
}

#[test]
fn a_tag_that_a_running_turn_may_bring_back_is_closed_again() {
    let mut rig = trimming();
    let old = rig.pinned_by_itself("s");
    rig.closes.clear();
    let inside = full_history(&mut rig, &auto("s"), 460).inside();
    let beside = full_history(&mut rig, &auto("s"), 470).waits();
    rig.wait(Duration::from_millis(2_500));
    let beside = rig.answer(beside).inside();
    assert_eq!(beside.turn.tag(), Some(&*old));
    rig.end(&inside, Outcome::Lost);
    rig.wait(Duration::from_secs(6));
    assert_eq!(rig.closes.len(), 1, "the shim did not confirm the history");
    rig.engine_closes();
    assert_eq!(rig.table.totals(0).rows_held, 0, "what it held is free");
    let closed = Record::Closed { incarnation: old.clone() };
    assert!(!rig.journal.contains(&closed), "the turn may still reach the engine");
    rig.end(&beside, finished(170, 8));
    rig.wait(Duration::from_secs(60));
    let close = rig.closes.iter().find(|close| close.incarnation == old).expect("once more");
    assert!(!close.is_pinned, "only a tag is left");
    rig.engine_closes();
    assert!(rig.journal.contains(&closed));
}

#[test]
fn while_too_many_tags_are_not_closed_new_sessions_run_without_one() {
    let mut rig = after_a_kill((0..16_384).map(|number| format!("berth-a-0-{number}")));
    let turn = rig.turn(&tagged("s")).inside();
    assert_eq!((turn.turn.run_mode, turn.turn.tag()), (Some(RunMode::Untagged), None));
    assert_eq!(rig.journal, []);
    let close = rig.closes.pop().unwrap();
    rig.table.handle_close_result(rig.now, &close.incarnation, CloseResult::Confirmed);
    rig.carry_out();
    let turn = rig.turn(&tagged("t")).inside();
    assert_eq!(turn.turn.run_mode, Some(RunMode::Tagged));
}
