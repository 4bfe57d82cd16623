//! Tests of demotions that a session's owner or an operator asks for.

use super::*;

/// Returns a rig whose shim demotes, with a pinned session "s" that holds 600 tokens.
fn rig_with_session() -> (Rig, String) {
    let mut rig = Rig::new();
    rig.shim_up(true);
    let incarnation = rig.pin_holding("s", 600);
    (rig, incarnation)
}

impl Rig {
    /// Demotes the session "s". Returns whether it was demoted before.
    fn demote(&mut self) -> Result<bool, Error> {
        let demoted = self.table.demote_session(self.now, &key("s"));
        self.carry_out();
        demoted
    }
}

#[test]
fn a_session_gives_its_kv_up_when_it_is_told_to_and_goes_on() {
    let (mut rig, incarnation) = rig_with_session();
    assert_eq!(rig.demote(), Ok(false), "it was idle for no time at all");
    assert_eq!(rig.demotes, [incarnation.as_str()]);
    assert_eq!(rig.table.sessions().demotion_result(&key("s")), None);
    assert_eq!(rig.demote(), Ok(false), "the second call waits for the same answer");
    assert_eq!(rig.demotes.len(), 1);
    rig.answer_demotion(&incarnation, true);
    let counted = Effect::SessionEvent(key("s"), SessionEvent::Demoted);
    assert!(rig.table.take_effects().contains(&counted));
    assert_eq!(rig.table.sessions().demotion_result(&key("s")), Some(Ok(())));
    let totals = rig.table.totals(0);
    assert_eq!((totals.rows_held, totals.pinned_tokens), (0, 0));
    assert_eq!(rig.demote(), Ok(true), "it is demoted already");
    assert_eq!(rig.demotes.len(), 1);
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(turn.incarnation(), incarnation, "the same history");
    assert_eq!(rig.table.totals(0).pinned_tokens, 624, "room for all of the history again");
}

#[test]
fn a_turn_that_comes_meanwhile_waits_and_then_goes_on() {
    for is_demoted in [true, false] {
        let (mut rig, incarnation) = rig_with_session();
        rig.demote().unwrap();
        let waiting = rig.turn(&delta("s")).waits();
        rig.answer_demotion(&incarnation, is_demoted);
        rig.carry_out();
        let turn = rig.answer(waiting).inside();
        assert_eq!(turn.incarnation(), incarnation);
        rig.end(&turn, finished(609, 8));
        assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 617);
    }
}

#[test]
fn a_session_that_can_not_be_demoted_stays_as_it_is_and_the_error_says_why() {
    let (mut rig, _) = rig_with_session();
    let unknown = rig.table.demote_session(rig.now, &key("unknown"));
    assert_eq!(unknown, Err(Error::UnknownSession));
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(rig.demote(), Err(Error::NotAtRest), "its turn runs on this KV");
    rig.close("s").unwrap();
    assert_eq!(rig.demote(), Err(Error::Closing));
    rig.end(&turn, finished(609, 8));

    rig.open("s", Some(Retention::Tagged)).unwrap();
    assert_eq!(rig.demote(), Err(Error::NotPinned(Retention::Tagged)));
    rig.close("s").unwrap();
    let incarnation = rig.pin_holding("s", 20);
    rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation: &incarnation });
    assert_eq!(rig.demote(), Err(Error::KvCorrupt));
    rig.close("s").unwrap();

    rig.pin_holding("s", 20);
    for can_demote in [false, true] {
        if can_demote {
            rig.table.handle_shim_report(rig.now, 0, ShimReport::Down);
        } else {
            rig.shim_up(false);
        }
        assert_eq!(rig.demote(), Err(Error::DemotionUnavailable));
    }
    assert!(rig.demotes.is_empty());
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_session_that_the_shim_refuses_to_demote_stays_open() {
    let (mut rig, incarnation) = rig_with_session();
    rig.demote().unwrap();
    rig.answer_demotion(&incarnation, false);
    rig.carry_out();
    assert_eq!(rig.table.sessions().demotion_result(&key("s")), Some(Err(Error::DemotionRefused)));
    assert_eq!(rig.table.totals(0).pinned_tokens, 608);
    assert_eq!(rig.closes, []);
    rig.wait(IDLE);
    assert!(!rig.is_open("s"), "its idle limit holds again");

    let (mut rig, _) = rig_with_session();
    rig.demote().unwrap();
    rig.wait(Duration::from_secs(5));
    let result = rig.table.sessions().demotion_result(&key("s"));
    assert_eq!(result, Some(Err(Error::Reclaimed)), "nobody knows what the silent shim did");
    assert_eq!(rig.closes.len(), 1);
    rig.close("s").unwrap();
    assert_eq!(rig.table.sessions().demotion_result(&key("s")), Some(Err(Error::UnknownSession)));
}

#[test]
fn a_session_whose_room_others_need_is_closed_although_it_should_only_be_demoted() {
    let (mut rig, incarnation) = rig_with_session();
    rig.wait(DEMOTE);
    rig.demote().unwrap();
    rig.pin("new");
    let need =
        Need { prompt_tokens: 500, answer_tokens: Some(1), is_exact: true, ..Need::default() };
    let waiting = rig.turn_that_needs(&delta("new"), need).waits();
    assert_eq!(rig.demotes.len(), 1, "this demotion will free enough");
    rig.answer_demotion(&incarnation, false);
    rig.carry_out();
    assert_eq!(rig.demotes.len(), 2, "now for the room");
    rig.answer_demotion(&incarnation, false);
    rig.carry_out();
    assert_eq!(rig.closes.len(), 1);
    rig.engine_closes();
    rig.answer(waiting).inside();
    assert_eq!(rig.turn(&delta("s")).error(), Error::Reclaimed);
}
