//! Tests which turns continue a session's KV, by adapter, cache salt and extra key.

use super::{
    trim::{auto, full_history, trimming},
    *,
};

fn salted(salt: &str) -> KvIdentity {
    KvIdentity::new(None, Some(salt), None)
}

fn adapted(adapter: &str) -> KvIdentity {
    KvIdentity::new(Some(adapter), None, None)
}

impl Rig {
    /// Sends a delta of 8 tokens with this identity.
    pub(super) fn delta_with(&mut self, id: &str, kv: KvIdentity) -> Answer {
        let need = Need { prompt_tokens: 8, answer_tokens: Some(8), kv, ..Need::default() };
        self.turn_that_needs(&delta(id), need)
    }

    /// Opens a pinned session and runs one turn in it, after which its history has 32 tokens.
    /// Returns the incarnation.
    pub(super) fn pin_with(&mut self, id: &str, kv: KvIdentity) -> String {
        let incarnation = self.pin(id);
        let turn = self.delta_with(id, kv).inside();
        self.end(&turn, finished(31, 1));
        incarnation
    }

    /// Sends a full history of `bytes` bytes with this identity.
    fn history_with(&mut self, claim: &Claim, bytes: u64, kv: KvIdentity) -> Answer {
        let need = Need { prompt_tokens: bytes, answer_tokens: Some(8), kv, ..Need::default() };
        self.ask(Some(claim), None, RouteTurns::FullHistories, need)
    }

    fn load_adapter(&mut self, name: Option<&str>) {
        self.table.handle_kv_change(self.now, KvChange::Adapter(name));
        self.carry_out();
    }
}

#[test]
fn a_delta_of_another_adapter_or_salt_is_refused_and_the_session_goes_on() {
    let extra_key = KvIdentity::new(None, Some("a"), Some("tenant"));
    let others = [KvIdentity::NONE, salted("b"), adapted("a"), extra_key, KvIdentity::UNKNOWN];
    for other in others {
        let mut rig = Rig::new();
        let incarnation = rig.pin_with("s", salted("a"));
        assert_eq!(rig.delta_with("s", other).error(), Error::OtherKv, "{other:?}");
        let session = rig.table.sessions().get(&key("s")).unwrap();
        assert_eq!((session.history_tokens(), session.turns_finished()), (32, 1));
        let turn = rig.delta_with("s", salted("a")).inside();
        assert_eq!(turn.incarnation(), incarnation);
        rig.end(&turn, finished(40, 8));
        assert!(rig.closes.is_empty());
    }
}

#[test]
fn a_turn_that_became_no_history_does_not_decide_which_kv_the_session_has() {
    let mut rig = Rig::new();
    rig.pin("s");
    let turn = rig.delta_with("s", salted("a")).inside();
    rig.end(&turn, Outcome::Aborted);
    let turn = rig.delta_with("s", salted("b")).inside();
    rig.end(&turn, finished(8, 8));
    assert_eq!(rig.delta_with("s", salted("a")).error(), Error::OtherKv);
    rig.delta_with("s", salted("b")).inside();
}

#[test]
fn a_session_begun_by_a_turn_that_does_not_say_its_salt_takes_no_delta() {
    let mut rig = Rig::new();
    rig.pin_with("s", KvIdentity::UNKNOWN);
    assert_eq!(rig.delta_with("s", KvIdentity::UNKNOWN).error(), Error::OtherKv);
    assert_eq!(rig.delta_with("s", KvIdentity::NONE).error(), Error::OtherKv);
}

#[test]
fn deltas_behind_one_that_is_refused_are_told_that_it_was() {
    let mut rig = Rig::with_settings(|settings| settings.turns_queued_per_session_max = 2);
    rig.pin_with("s", salted("a"));
    let running = rig.delta_with("s", salted("a")).inside();
    let other = rig.delta_with("s", salted("b")).waits();
    let behind = rig.delta_with("s", salted("a")).waits();
    rig.end(&running, finished(40, 8));
    assert_eq!(rig.answer(other).error(), Error::OtherKv);
    assert_eq!(rig.answer(behind).error(), Error::PredecessorFailed);
}

#[test]
fn a_demoted_session_keeps_its_salt() {
    let mut rig = trimming();
    rig.pin_with("s", salted("a"));
    rig.table.demote_session(rig.now, &key("s")).unwrap();
    rig.carry_out();
    rig.demoted();
    assert_eq!(rig.delta_with("s", salted("b")).error(), Error::OtherKv);
    rig.delta_with("s", salted("a")).inside();
}

#[test]
fn a_full_history_of_another_salt_gets_a_new_incarnation_which_then_has_its_kv() {
    let mut rig = trimming();
    let opening = Claim { open: true, ..pinned("s") };
    let first = rig.history_with(&opening, 40, salted("a")).inside();
    rig.runs(&first, 0, 31);
    let other = rig.history_with(&opening, 60, salted("b")).inside();
    // The prompt has more tokens than were reserved too, but more room alone doesn't help it.
    rig.question(&other, Plan::NotTrimmed, 80);
    rig.demoted();
    rig.engine_closes();
    assert_eq!(rig.runs(&other, 0, 80), TrimOutcome::Reopened);
    assert_ne!(rig.incarnation_of(&other), first.incarnation());
    assert_eq!(rig.delta_with("s", salted("a")).error(), Error::OtherKv);
    rig.delta_with("s", salted("b")).inside();
}

#[test]
fn a_long_history_gets_more_room_unless_its_kv_is_known_to_be_another() {
    let mut rig = trimming();
    let opening = Claim { open: true, ..pinned("s") };
    let first = rig.history_with(&opening, 40, KvIdentity::UNKNOWN).inside();
    rig.runs(&first, 0, 31);
    assert_eq!(rig.delta_with("s", salted("a")).error(), Error::OtherKv);
    let next = rig.history_with(&auto("s"), 60, salted("a")).inside();
    rig.question(&next, Plan::NotTrimmed, 80);
    assert_eq!(rig.answers.pop(), Some((7, Some(first.incarnation().to_owned()), 80)));
    assert_eq!(rig.runs(&next, 39, 80), TrimOutcome::Trimmed);
    // The shim has compared them, so it is known now.
    rig.delta_with("s", salted("a")).inside();
}

#[test]
fn a_full_history_of_another_salt_does_not_replace_what_deltas_rely_on() {
    let mut rig = trimming();
    rig.pin_with("s", salted("a"));
    let turn = rig.history_with(&auto("s"), 100, salted("b")).inside();
    let reported = trim::trim_plan(
        turn.rid.clone(),
        turn.incarnation().to_owned(),
        Plan::NotTrimmed,
        [0, 0, 0, 900],
    );
    rig.table.handle_plan(rig.now, &reported);
    rig.carry_out();
    rig.end(&turn, Outcome::Refused);
    let error = rig.refused_by_shim.remove(&turn.rid).unwrap();
    assert!(matches!(&error, Error::NotContinued { detail } if detail.contains("cache_salt")));
    rig.delta_with("s", salted("a")).inside();
}

#[test]
fn a_session_that_the_agent_pins_anew_has_the_kv_of_its_newest_life() {
    let mut rig = trimming();
    let first = rig.history_with(&auto("s"), 400, salted("a")).inside();
    rig.end(&first, finished(100, 8));
    let second = rig.history_with(&auto("s"), 430, salted("b")).inside();
    rig.runs(&second, 0, 140);
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history.kv, Some(salted("b")));
}

#[test]
fn a_session_of_an_adapter_that_is_loaded_anew_is_closed_and_the_next_delta_says_why() {
    let mut rig = Rig::new();
    let incarnation = rig.pin_with("s", adapted("sql"));
    rig.pin_with("other", adapted("code"));
    rig.load_adapter(Some("sql"));
    let closed: Vec<&str> = rig.closes.iter().map(|close| &*close.incarnation).collect();
    assert_eq!(closed, [&*incarnation], "the other adapter's session goes on");
    assert_eq!(rig.delta_with("s", adapted("sql")).error(), Error::AdapterChanged);
    rig.delta_with("other", adapted("code")).inside();
    rig.engine_closes();
    let again = Claim { open: true, ..pinned("s") };
    let need =
        Need { prompt_tokens: 8, answer_tokens: Some(8), kv: adapted("sql"), ..Need::default() };
    let turn = rig.turn_that_needs(&again, need).inside();
    assert_ne!(turn.incarnation(), incarnation);
}

#[test]
fn a_full_history_continues_after_an_adapter_was_loaded_in_a_new_incarnation() {
    let mut rig = trimming();
    rig.open("s", Some(Retention::Pinned)).unwrap();
    let first = rig.history_with(&auto("s"), 40, adapted("sql")).inside();
    let before = first.incarnation().to_owned();
    rig.runs(&first, 0, 40);
    rig.load_adapter(Some("sql"));
    rig.engine_closes();
    let next = rig.history_with(&auto("s"), 60, adapted("sql")).inside();
    assert_ne!(next.incarnation(), before);
    rig.runs(&next, 0, 60);
    assert!(rig.closes.is_empty(), "the KV is of the new adapter");
}

#[test]
fn a_turn_that_runs_while_its_adapter_is_unloaded_ends_first_and_then_its_session_closes() {
    let mut rig = Rig::new();
    rig.pin("s");
    let turn = rig.delta_with("s", adapted("sql")).inside();
    rig.load_adapter(Some("sql"));
    assert!(rig.closes.is_empty(), "its turn runs");
    rig.end(&turn, finished(20, 4));
    assert_eq!(rig.closes.len(), 1);
    assert_eq!(rig.delta_with("s", adapted("sql")).error(), Error::AdapterChanged);
}

#[test]
fn a_call_that_may_mean_any_adapter_closes_the_sessions_of_each_and_no_others() {
    let mut rig = Rig::new();
    rig.pin_with("s", adapted("sql"));
    rig.pin_with("plain", KvIdentity::NONE);
    rig.load_adapter(None);
    assert_eq!(rig.closes.len(), 1);
    assert_eq!(rig.delta_with("s", adapted("sql")).error(), Error::AdapterChanged);
    rig.delta_with("plain", KvIdentity::NONE).inside();
}

#[test]
fn an_adapter_that_is_no_longer_listed_closes_its_sessions() {
    let mut rig = Rig::new();
    rig.pin_with("s", adapted("sql"));
    rig.table.handle_kv_change(rig.now, KvChange::Adapters(&["code".to_owned(), "sql".to_owned()]));
    rig.carry_out();
    assert!(rig.closes.is_empty());
    rig.table.handle_kv_change(rig.now, KvChange::Adapters(&["code".to_owned()]));
    rig.carry_out();
    assert_eq!(rig.delta_with("s", adapted("sql")).error(), Error::AdapterChanged);
}

#[test]
fn tagged_sessions_take_turns_of_any_salt() {
    let mut rig = Rig::new();
    for kv in [salted("a"), salted("b"), KvIdentity::UNKNOWN] {
        let need = Need { prompt_tokens: 8, kv, ..Need::default() };
        let turn = rig.turn_that_needs(&Claim::for_session(&key("s")), need).inside();
        rig.end(&turn, finished(8, 1));
    }
    let _ = full_history(&mut rig, &auto("s"), 40).inside();
}
