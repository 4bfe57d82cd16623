//! Changes of the engine's weights: what is closed, what goes on, and what waits.

use super::{
    trim::{auto, full_history, trimming},
    *,
};

fn reason_of(rig: &mut Rig, id: &str) -> Error {
    rig.turn(&delta(id)).error()
}

impl Rig {
    fn change_weights(&mut self, was_flushed: bool) {
        self.table.handle_kv_change(self.now, KvChange::Weights { is_counted: true, was_flushed });
        self.carry_out();
    }

    fn report_weights(&mut self, changes: u64, has_old_kv: bool) {
        self.report_weights_during(false, changes, has_old_kv);
    }

    /// `is_changing`: a call of the agent's own is under way.
    fn report_weights_during(&mut self, is_changing: bool, changes: u64, has_old_kv: bool) {
        let report = WeightsReport { changes, has_old_kv };
        self.table.handle_kv_change(self.now, KvChange::WeightsCounted { report, is_changing });
        self.carry_out();
    }

    fn settle_weights(&mut self) {
        self.table.handle_kv_change(self.now, KvChange::WeightsSettled);
        self.carry_out();
    }
}

#[test]
fn a_delta_after_a_change_of_the_weights_is_refused_and_says_why() {
    let mut rig = Rig::new();
    let incarnation = rig.pin_holding("s", 31);
    let epoch = rig.table.weights_epoch();
    rig.change_weights(true);
    assert_eq!(rig.table.weights_epoch(), epoch + 1);
    assert_eq!(rig.closes.len(), 1);
    assert_eq!(rig.closes[0].incarnation, incarnation);
    assert_eq!(reason_of(&mut rig, "s"), Error::WeightsChanged);
    rig.engine_closes();
    assert_eq!(rig.table.totals(0).rows_held, 0);
    let again = Claim { open: true, ..pinned("s") };
    let turn = rig.turn(&again).inside();
    assert_eq!(turn.turn.weights_epoch, epoch + 1);
    assert_ne!(turn.incarnation(), incarnation);
}

#[test]
fn a_full_history_continues_after_a_change_in_a_new_incarnation() {
    let mut rig = trimming();
    rig.open("s", Some(Retention::Pinned)).unwrap();
    let first = full_history(&mut rig, &auto("s"), 40).inside();
    let before = first.incarnation().to_owned();
    rig.runs(&first, 0, 40);
    rig.change_weights(true);
    rig.engine_closes();
    let next = full_history(&mut rig, &auto("s"), 60).inside();
    assert_ne!(next.incarnation(), before);
}

#[test]
fn a_turn_that_runs_during_the_change_ends_first_and_then_its_session_closes() {
    let mut rig = Rig::new();
    rig.pin("s");
    let turn = rig.turn(&delta("s")).inside();
    rig.change_weights(false);
    assert!(rig.closes.is_empty(), "its turn runs");
    rig.end(&turn, finished(20, 4));
    assert_eq!(rig.closes.len(), 1);
    assert_eq!(reason_of(&mut rig, "s"), Error::WeightsChanged);
}

#[test]
fn a_session_without_kv_goes_on() {
    let mut rig = Rig::new();
    let incarnation = rig.pin("s");
    rig.change_weights(true);
    let turn = rig.turn(&delta("s")).inside();
    assert_eq!(turn.incarnation(), incarnation);
    rig.end(&turn, finished(20, 4));
    rig.turn(&delta("s")).inside();
}

#[test]
fn nothing_is_pinned_on_a_cache_of_older_weights_before_a_flush() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 31);
    rig.change_weights(false);
    rig.engine_closes();
    assert!(rig.table.queue.histories.check_tree_is_current().is_err());
    assert_eq!(rig.turn(&pinned("new")).error(), Error::CacheOutdated);
    rig.turn(&Claim::for_session(&key("tagged"))).inside();
    let plain = rig.plain(8).inside();
    rig.end(&plain, finished(8, 0));
    rig.table.handle_kv_change(rig.now, KvChange::Flushed);
    rig.carry_out();
    rig.turn(&pinned("new")).inside();
}

#[test]
fn buckets_of_an_update_after_a_flush_leave_nothing_outdated() {
    let mut rig = Rig::new();
    rig.pin_holding("s", 31);
    rig.table.set_hold(rig.now, Some("it is paused".to_owned()));
    rig.table.handle_kv_change(rig.now, KvChange::Flushed);
    rig.change_weights(false);
    rig.change_weights(false);
    rig.table.set_hold(rig.now, None);
    rig.carry_out();
    assert_eq!(reason_of(&mut rig, "s"), Error::Reclaimed, "the flush came first");
    assert!(rig.table.queue.histories.check_tree_is_current().is_ok());
    rig.turn(&pinned("new")).inside();
}

#[test]
fn turns_wait_while_they_are_held_back_and_are_told_why_if_that_takes_too_long() {
    let mut rig = Rig::new();
    rig.pin("s");
    rig.table.set_hold(rig.now, Some("it is paused".to_owned()));
    let short = rig.turn(&delta("s")).waits();
    rig.table.set_hold(rig.now, None);
    rig.carry_out();
    let turn = rig.answer(short).inside();
    rig.end(&turn, finished(9, 3));
    rig.table.set_hold(rig.now, Some("it is paused".to_owned()));
    let long = rig.turn(&delta("s")).waits();
    rig.wait(QUEUE);
    assert_eq!(rig.answer(long).error(), Error::EngineHeld("it is paused".to_owned()));
}

#[test]
fn a_change_is_counted_once_whoever_tells_it_first_and_others_changes_are_seen() {
    let mut rig = Rig::new();
    rig.report_weights(0, false);
    let epoch = rig.table.weights_epoch();
    rig.change_weights(true);
    rig.report_weights(1, false);
    assert_eq!(rig.table.weights_epoch(), epoch + 1, "the agent's own");
    rig.pin_holding("s", 31);
    rig.report_weights(3, true);
    assert_eq!(rig.table.weights_epoch(), epoch + 3, "two of others");
    assert_eq!(reason_of(&mut rig, "s"), Error::WeightsChanged);
    assert!(rig.table.queue.histories.check_tree_is_current().is_err());
}

#[test]
fn a_shim_that_tells_of_the_agent_s_own_change_before_its_call_has_ended_hides_no_later_one() {
    let mut rig = Rig::new();
    rig.report_weights(0, false);
    let epoch = rig.table.weights_epoch();
    rig.report_weights_during(true, 1, false);
    rig.change_weights(true);
    rig.settle_weights();
    assert_eq!(rig.table.weights_epoch(), epoch + 1, "the agent's own, once");
    rig.pin_holding("s", 31);
    rig.report_weights(2, false);
    assert_eq!(rig.table.weights_epoch(), epoch + 2, "one of others");
    assert_eq!(reason_of(&mut rig, "s"), Error::WeightsChanged);
}

#[test]
fn what_others_change_during_a_call_that_is_refused_counts_at_its_end() {
    let mut rig = Rig::new();
    rig.report_weights(0, false);
    let epoch = rig.table.weights_epoch();
    rig.report_weights_during(true, 1, true);
    assert_eq!(rig.table.weights_epoch(), epoch, "perhaps the agent's own");
    rig.settle_weights();
    assert_eq!(rig.table.weights_epoch(), epoch + 1);
    assert_eq!(rig.turn(&pinned("s")).error(), Error::CacheOutdated);
    rig.settle_weights();
    assert_eq!(rig.table.weights_epoch(), epoch + 1, "once");
}

#[test]
fn an_agent_that_finds_an_engine_with_changed_weights_counts_them() {
    let mut rig = Rig::new();
    let epoch = rig.table.weights_epoch();
    rig.report_weights(5, true);
    assert_eq!(rig.table.weights_epoch(), epoch + 5);
    assert_eq!(rig.turn(&pinned("s")).error(), Error::CacheOutdated);
}
