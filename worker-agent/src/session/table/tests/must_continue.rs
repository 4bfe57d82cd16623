//! Deltas and full histories on one session: neither replaces what the other's client relies on.

use super::{
    trim::{auto, full_history, trim_plan, trimming},
    *,
};

/// Returns a rig with a pinned session that a client opened and that has taken a delta. Its history
/// has 32 tokens.
fn appended_to() -> Rig {
    let mut rig = trimming();
    rig.pin_holding("s", 31);
    rig
}

fn must_continue(turn: &Inside) -> bool {
    turn.turn.session.as_ref().unwrap().trim.unwrap().must_continue
}

fn opening() -> Claim {
    Claim { open: true, ..auto("s") }
}

impl Rig {
    /// Lets the shim refuse a turn, and the engine answer it with an error. Returns the turn's
    /// error.
    fn refused_by_shim(&mut self, turn: &Inside, plan: Plan, at: u64, prompt: u64) -> Error {
        let (rid, incarnation) = (turn.rid.clone(), self.incarnation_of(turn));
        let reported = trim_plan(rid, incarnation, plan, [at, 32, 0, prompt]);
        let told = self.table.handle_plan(self.now, &reported);
        assert_eq!(told, Some((TrimOutcome::NotContinued, 0)));
        self.carry_out();
        self.end(turn, Outcome::Refused);
        self.refused_by_shim.remove(&turn.rid).expect("its client is told")
    }

    /// Runs a full history that diverges from the session, in a new incarnation.
    fn reopens(&mut self, claim: &Claim) {
        let turn = full_history(self, claim, 100).inside();
        self.question(&turn, Plan::Diverged, 30);
        self.demoted();
        self.engine_closes();
        assert_eq!(self.runs(&turn, 0, 30), TrimOutcome::Reopened);
    }
}

#[test]
fn a_full_history_that_differs_is_refused_where_deltas_are_taken_and_changes_nothing() {
    for (plan, at) in [(Plan::Diverged, 20), (Plan::Diverged, 32), (Plan::NotTrimmed, 0)] {
        let mut rig = appended_to();
        let before = rig.table.sessions().get(&key("s")).unwrap().clone();
        let other = full_history(&mut rig, &auto("s"), 100).inside();
        assert!(must_continue(&other));
        let error = rig.refused_by_shim(&other, plan, at, 30);
        assert!(matches!(error, Error::NotContinued { .. }), "{error}");
        let after = rig.table.sessions().get(&key("s")).unwrap();
        assert_eq!(after.incarnation, before.incarnation);
        assert_eq!(after.history_tokens(), before.history_tokens());
        assert_eq!((rig.demotes.len(), rig.inspections.len(), rig.closes.len()), (0, 0, 0));
        let next = rig.turn(&delta("s")).inside();
        rig.end(&next, finished(40, 8));
        assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 48, "it goes on");
    }
}

#[test]
fn whatever_the_engine_says_of_a_turn_that_the_shim_refused_its_session_is_as_it_was() {
    let lost = [Outcome::Lost, Outcome::Aborted, Outcome::Partial, Outcome::Unheard(None)];
    for outcome in [Outcome::Refused, Outcome::Finished(None)].into_iter().chain(lost) {
        let mut rig = appended_to();
        let other = full_history(&mut rig, &auto("s"), 100).inside();
        let (rid, incarnation) = (other.rid.clone(), rig.incarnation_of(&other));
        let (plan, committed) = (Plan::Diverged, 32);
        let reported = trim_plan(rid, incarnation, plan, [9, committed, 0, 30]);
        rig.table.handle_plan(rig.now, &reported);
        rig.end(&other, outcome);
        assert_eq!((rig.inspections.len(), rig.closes.len()), (0, 0), "{outcome:?}");
        rig.turn(&delta("s")).inside();
    }
}

#[test]
fn a_full_history_that_continues_a_session_of_deltas_runs_in_it() {
    let mut rig = appended_to();
    let on = full_history(&mut rig, &auto("s"), 100).inside();
    assert_eq!(rig.runs(&on, 32, 40), TrimOutcome::Trimmed);
    let next = rig.turn(&delta("s")).inside();
    rig.end(&next, finished(56, 8));
    let again = full_history(&mut rig, &auto("s"), 200).inside();
    assert!(must_continue(&again), "it has taken deltas still");
    assert!(
        !rig.table.sessions().get(&key("s")).unwrap().sends_full_histories(),
        "it can't go on elsewhere"
    );
}

#[test]
fn a_full_history_that_has_no_room_in_a_session_of_deltas_is_told_so() {
    let mut rig = appended_to();
    let large = full_history(&mut rig, &auto("s"), 1100).inside();
    rig.question(&large, Plan::NotTrimmed, 1050);
    assert_eq!(rig.answers.pop(), Some((7, None, 0)));
    let error = rig.refused_by_shim(&large, Plan::NotTrimmed, 0, 1050);
    assert!(is_short(&error, Code::PinTokens), "{error}");
    let again = full_history(&mut rig, &auto("s"), 1100).error();
    assert!(matches!(again, Error::TooLarge { .. }), "it never fits: {again}");
    rig.turn(&delta("s")).inside();
}

#[test]
fn the_last_turn_of_a_session_of_deltas_gets_room_too() {
    let mut rig = appended_to();
    let last = full_history(&mut rig, &Claim { close: true, ..auto("s") }, 100).inside();
    rig.question(&last, Plan::NotTrimmed, 60);
    let (_, incarnation, tokens_max) = rig.answers.pop().unwrap();
    assert_eq!((incarnation.as_deref(), tokens_max), (Some(last.incarnation()), 60));
    assert_eq!(rig.runs(&last, 32, 60), TrimOutcome::Trimmed);
    rig.engine_closes();
    assert!(!rig.is_open("s"));
}

#[test]
fn a_client_that_reopens_a_session_with_a_full_history_may_append_to_it() {
    let mut rig = trimming();
    let first = full_history(&mut rig, &pinned("s"), 90).inside();
    rig.runs(&first, 0, 30);
    rig.reopens(&opening());
    let next = rig.turn(&delta("s")).inside();
    rig.end(&next, finished(46, 8));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 54);
    let again = rig.turn(&Claim { open: true, ..delta("s") }).error();
    assert_eq!(code_of(again), Code::SessionOpen);
}

#[test]
fn a_delta_client_is_told_when_another_client_reopened_the_session() {
    let mut rig = appended_to();
    rig.reopens(&opening());
    assert_eq!(code_of(rig.turn(&delta("s")).error()), Code::DeltaNeedsOpen);
}

#[test]
fn who_only_opened_a_session_hears_of_it_when_another_clients_history_began_it() {
    for trims in [true, false] {
        let mut rig = trimming();
        rig.table.set_trimming(rig.now, trims);
        rig.pin("s");
        let other = whole_by_generate(&mut rig, &auto("s"), 30).inside();
        if trims {
            rig.plan(&other, Plan::Trimmed, 0, 30);
        }
        rig.end(&other, finished(30, 8));
        assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsOpen, "trims: {trims}");
    }
}

#[test]
fn a_client_whose_first_delta_failed_hears_of_it_when_another_clients_history_began_the_session() {
    for trims in [true, false] {
        let mut rig = trimming();
        rig.table.set_trimming(rig.now, trims);
        rig.pin("s");
        let failed = rig.turn(&delta("s")).inside();
        rig.end(&failed, Outcome::Refused);
        let other = whole_by_generate(&mut rig, &auto("s"), 30).inside();
        if trims {
            rig.plan(&other, Plan::Trimmed, 0, 30);
        }
        rig.end(&other, finished(30, 8));
        assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsOpen, "trims: {trims}");
    }
}

/// Asks to run a full history of `tokens` tokens on `/generate`, which takes it without a shim too.
fn whole_by_generate(rig: &mut Rig, claim: &Claim, tokens: u64) -> rig::Answer {
    let need =
        Need { prompt_tokens: tokens, answer_tokens: Some(8), is_exact: true, ..Need::default() };
    rig.turn_that_needs(claim, need)
}

#[test]
fn nothing_is_appended_to_a_history_that_replaced_another_until_it_is_closed_and_opened() {
    let mut rig = trimming();
    rig.pin("s");
    let first = full_history(&mut rig, &auto("s"), 90).inside();
    rig.runs(&first, 0, 30);
    rig.reopens(&auto("s"));
    assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsOpen);
    rig.open("s", Some(Retention::Pinned)).unwrap();
    assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsOpen, "it is the same one still");
    rig.close("s").unwrap();
    rig.engine_closes();
    rig.pin("s");
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_session_that_a_full_history_began_takes_no_delta() {
    // Another client may have used the same key before, in a session that expired or on a lost
    // agent.
    let mut rig = trimming();
    let began = full_history(&mut rig, &pinned("s"), 90).inside();
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().turns_finished(), 0);
    rig.runs(&began, 0, 30);
    assert_eq!(rig.turn(&delta("s")).error(), Error::DeltaNeedsOpen);
    let on = full_history(&mut rig, &opening(), 120).inside();
    rig.runs(&on, 38, 48);
    rig.turn(&delta("s")).inside();
}

#[test]
fn a_session_of_deltas_that_is_gone_is_not_begun_anew_by_a_full_history() {
    for why in [Error::Lost, Error::KvCorrupt] {
        let mut rig = appended_to();
        if why == Error::Lost {
            rig.engine_restarts(engine(1));
        } else {
            let incarnation = rig.table.sessions().get(&key("s")).unwrap().incarnation.clone();
            rig.table.handle_kv_change(rig.now, KvChange::Corrupt { incarnation: &incarnation });
            rig.carry_out();
        }
        assert_eq!(full_history(&mut rig, &auto("s"), 100).error(), why);
        assert_eq!(rig.turn(&delta("s")).error(), why);
        rig.engine_closes();
        rig.shim_up(true);
        let anew =
            full_history(&mut rig, &Claim { retention: Some(Retention::Pinned), ..opening() }, 100);
        let anew = anew.inside();
        rig.runs(&anew, 0, 30);
        rig.turn(&delta("s")).inside();
    }
}
