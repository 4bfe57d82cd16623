//! Full histories on pinned sessions.

use super::*;

/// Returns a rig whose agent pins sessions on its own and whose shim trims and demotes.
pub(super) fn trimming() -> Rig {
    let mut rig = Rig::with(TableSettings { auto_pin: true, ..settings() }, engine(1));
    rig.shim_up(true);
    rig.table.set_trimming(rig.now, true);
    rig
}

/// Asks to run a turn that holds a full history of `bytes` bytes and wants an answer of 8 tokens.
pub(super) fn full_history(rig: &mut Rig, claim: &Claim, bytes: u64) -> rig::Answer {
    let need = Need { prompt_tokens: bytes, answer_tokens: Some(8), ..Need::default() };
    rig.ask(Some(claim), None, RouteTurns::FullHistories, need)
}

pub(super) fn trim_plan(
    rid: String,
    incarnation: String,
    decision: Plan,
    [shared_tokens, committed_tokens, appended_tokens, prompt_tokens]: [u64; 4],
) -> TrimPlan {
    TrimPlan {
        rid,
        incarnation,
        decision,
        shared_tokens,
        committed_tokens,
        appended_tokens,
        prompt_tokens,
    }
}

/// Returns the claim of a turn whose client leaves the session's retention to the agent.
pub(super) fn auto(id: &str) -> Claim {
    Claim::for_session(&key(id))
}

impl Rig {
    /// Reports the shim's final plan for a turn.
    pub(super) fn plan(
        &mut self,
        turn: &Inside,
        plan: Plan,
        committed: u64,
        sent: u64,
    ) -> (TrimOutcome, u64) {
        let (rid, incarnation) = (turn.rid.clone(), self.incarnation_of(turn));
        let prompt = committed + sent;
        let reported = trim_plan(rid, incarnation, plan, [0, committed, sent, prompt]);
        let told = self.table.handle_plan(self.now, &reported).expect("it is told once");
        self.carry_out();
        // The counted result must match what the client is told.
        let ran = self.run_modes.get(&turn.rid);
        match told.0 {
            TrimOutcome::Trimmed | TrimOutcome::Retokenized => {
                assert_eq!(ran, Some(&RunMode::Pinned))
            }
            TrimOutcome::Reopened => assert_eq!(ran, Some(&RunMode::Reopened)),
            TrimOutcome::Diverged | TrimOutcome::Refused => {
                assert!(matches!(ran, Some(RunMode::Tagged | RunMode::Untagged)), "{ran:?}");
            }
            TrimOutcome::NotContinued | TrimOutcome::Gone => assert_eq!(ran, None),
        }
        told
    }

    /// Asks the shim's question about a turn.
    pub(super) fn question(&mut self, turn: &Inside, plan: Plan, prompt: u64) {
        let (rid, incarnation) = (turn.rid.clone(), turn.incarnation().to_owned());
        let reported = trim_plan(rid, incarnation, plan, [0, 0, 0, prompt]);
        self.table.handle_question(self.now, 7, &reported);
        self.carry_out();
    }

    pub(super) fn incarnation_of(&self, turn: &Inside) -> String {
        let key = &turn.turn.session.as_ref().unwrap().key;
        self.table.sessions().get(key).unwrap().incarnation.clone()
    }

    /// Runs and ends a turn of `prompt` tokens and an answer of 8, of which the session has
    /// `committed`.
    pub(super) fn runs(&mut self, turn: &Inside, committed: u64, prompt: u64) -> TrimOutcome {
        let (outcome, _) = self.plan(turn, Plan::Trimmed, committed, prompt - committed);
        self.end(turn, finished(prompt, 8));
        outcome
    }

    pub(super) fn retention(&self, id: &str) -> Retention {
        self.table.sessions().get(&key(id)).unwrap().retention()
    }

    /// Runs two turns of a session, of which the second pins it. Its history then has 148 tokens.
    pub(super) fn pinned_by_itself(&mut self, id: &str) -> String {
        let first = full_history(self, &auto(id), 400).inside();
        self.end(&first, finished(100, 8));
        let second = full_history(self, &auto(id), 430).inside();
        self.runs(&second, 0, 140);
        second.incarnation().to_owned()
    }

    pub(super) fn demoted(&mut self) {
        for incarnation in std::mem::take(&mut self.demotes) {
            self.answer_demotion(&incarnation, true);
        }
        self.carry_out();
    }
}

pub(super) fn tokens_max(turn: &Inside) -> Option<u64> {
    turn.turn.session.as_ref().unwrap().trim.map(|trim| trim.tokens_max)
}

#[test]
fn a_session_that_comes_back_is_pinned_and_computes_only_what_is_new() {
    let mut rig = trimming();
    let first = full_history(&mut rig, &auto("s"), 400).inside();
    assert_eq!(
        (first.turn.run_mode, tokens_max(&first)),
        (Some(RunMode::Tagged), None),
        "who knows"
    );
    rig.end(&first, finished(100, 8));
    let second = full_history(&mut rig, &auto("s"), 430).inside();
    assert_eq!(
        second.turn.session.as_ref().unwrap().retention,
        Retention::Tagged,
        "if not trimmed"
    );
    assert_eq!(tokens_max(&second), Some(150), "what it was, and what 30 bytes more may be");
    rig.runs(&second, 0, 120);
    assert_eq!(rig.run_modes[&second.rid], RunMode::Pinned);
    let third = full_history(&mut rig, &auto("s"), 460).inside();
    let spared = 128;
    assert_eq!(rig.plan(&third, Plan::Trimmed, 128, 20), (TrimOutcome::Trimmed, spared));
    rig.end(&third, finished(148, 8));
    let session = rig.table.sessions().get(&key("s")).unwrap();
    assert_eq!((session.history_tokens(), session.resident_tokens()), (156, 155));
    assert_eq!((session.retention(), session.turns_finished()), (Retention::Pinned, 3));
    assert_eq!(rig.table.totals(0).pinned_tokens, 160, "what was kept for its bound is given back");
}

/// Before the shim's plan, only a bound of the prompt is known.
#[test]
fn a_client_is_told_the_room_of_its_turn_by_the_plan_and_none_for_a_turn_beside_its_session() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let inside = full_history(&mut rig, &auto("s"), 460).inside();
    let beyond = inside.turn.growth_tokens_max.unwrap();
    rig.plan(&inside, Plan::Trimmed, 148, 10);
    let told = rig.growths[&inside.rid].unwrap();
    assert!((10..beyond).contains(&told), "{told} of {beyond}");
    assert_eq!(rig.table.totals(0).pinned_tokens, (148 + told).next_multiple_of(16));
    rig.end(&inside, finished(158, 8));
    let diverged = full_history(&mut rig, &auto("s"), 490).inside();
    assert!(diverged.turn.growth_tokens_max.is_some());
    rig.plan(&diverged, Plan::Diverged, 0, 170);
    assert_eq!(rig.growths[&diverged.rid], None, "nothing is reserved for it");
}

#[test]
fn no_session_is_auto_pinned_that_is_cold_or_lacks_room_or_a_shim() {
    let pinned_after = |change: fn(&mut Rig), bytes: u64| {
        let mut rig = trimming();
        let first = full_history(&mut rig, &auto("s"), 400).inside();
        rig.end(&first, finished(100, 8));
        change(&mut rig);
        let turn = full_history(&mut rig, &auto("s"), bytes).inside();
        tokens_max(&turn).is_some()
    };
    assert!(pinned_after(|_| {}, 430));
    assert!(!pinned_after(|rig| rig.wait(DEMOTE + Duration::from_secs(1)), 430), "it was away");
    assert!(!pinned_after(|rig| rig.table.set_trimming(rig.now, false), 430), "nobody trims");
    assert!(!pinned_after(|_| {}, 3000), "it may need more than the pin budget");
    assert!(!pinned_after(|rig| drop(rig.pin_holding("other", 900)), 430), "others hold it");
    assert!(pinned_after(|rig| drop(rig.pin("a")), 430));
    let rows = |rig: &mut Rig| ["a", "b"].iter().for_each(|id| drop(rig.pin(id)));
    assert!(!pinned_after(rows, 430), "half of the rows are for turns that run");
}

#[test]
fn a_turn_beside_another_runs_on_the_tree_and_is_not_history() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let inside = full_history(&mut rig, &auto("s"), 460).inside();
    rig.plan(&inside, Plan::Trimmed, 148, 10);
    let beside = full_history(&mut rig, &auto("s"), 470).waits();
    rig.wait(Duration::from_millis(15));
    let beside = rig.answer(beside).inside();
    assert_eq!((beside.turn.run_mode, tokens_max(&beside)), (Some(RunMode::Tagged), None));
    rig.end(&beside, finished(170, 8));
    rig.end(&inside, finished(158, 8));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 166);
}

#[test]
fn a_diverged_history_gets_a_new_incarnation_once_the_old_kv_is_in_the_tree() {
    let mut rig = trimming();
    let old = rig.pinned_by_itself("s");
    rig.closes.clear();
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.question(&turn, Plan::Diverged, 150);
    assert_eq!((&rig.demotes, rig.answers.len()), (&vec![old.clone()], 0), "the tree first");
    rig.demoted();
    let fresh = rig.incarnation_of(&turn);
    assert_ne!(fresh, old);
    assert_eq!(rig.answers, [(7, Some(fresh), 190)], "with the bound that it was marked with");
    assert!(rig.closes.iter().any(|close| close.incarnation == old), "{:?}", rig.closes);
    assert_eq!(rig.runs(&turn, 0, 150), TrimOutcome::Reopened, "trimmed, says the shim");
    rig.engine_closes();
    let next = full_history(&mut rig, &auto("s"), 480).inside();
    assert_eq!(rig.runs(&next, 158, 170), TrimOutcome::Trimmed);
    assert_eq!(rig.table.totals(0).rows_held, 1, "the old one holds nothing");
}

#[test]
fn a_plan_for_an_unknown_turn_or_a_repeated_plan_changes_nothing() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    let (rid, incarnation) = (turn.rid.clone(), rig.incarnation_of(&turn));
    let (committed, sent, prompt) = (148, 12, 160);
    let told = trim_plan(rid, incarnation, Plan::Trimmed, [148, committed, sent, prompt]);
    let other = TrimPlan { incarnation: "another's".to_owned(), ..told.clone() };
    let left = TrimPlan { rid: "who left".to_owned(), ..told.clone() };
    let gone = Some((TrimOutcome::Gone, 0));
    assert_eq!([&other, &left].map(|one| rig.table.handle_plan(rig.now, one)), [gone, gone]);
    assert_eq!(rig.table.handle_plan(rig.now, &told), Some((TrimOutcome::Trimmed, 148)));
    let against = TrimPlan { decision: Plan::Diverged, ..told.clone() };
    assert_eq!([&told, &against].map(|one| rig.table.handle_plan(rig.now, one)), [None, None]);
    rig.carry_out();
    assert_eq!(rig.run_modes[&turn.rid], RunMode::Pinned);
    rig.end(&turn, finished(160, 8));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 168);
}

#[test]
fn a_turn_that_goes_on_outside_its_session_leaves_deltas_nothing_to_continue() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(rig.plan(&turn, Plan::Trimmed, 148, 12), (TrimOutcome::Trimmed, 148));
    // The engine has called a tool of its own, and asks its model again.
    let again = trim_plan(turn.rid.clone(), incarnation.clone(), Plan::NotTrimmed, [0, 0, 0, 190]);
    assert_eq!(rig.table.handle_plan(rig.now, &again), None);
    rig.end(&turn, finished(160, 8));
    assert_eq!(rig.inspections.len(), 1, "only the engine knows the history");
    seen(&mut rig, &incarnation, 168);
    let session = rig.table.sessions().get(&key("s")).unwrap();
    assert_eq!((session.history_tokens(), session.client.may_be_ahead), (168, true));
    let next = full_history(&mut rig, &auto("s"), 700).inside();
    rig.plan(&next, Plan::Trimmed, 168, 60);
    rig.end(&next, finished(228, 8));
    let session = rig.table.sessions().get(&key("s")).unwrap();
    assert_eq!((session.history_tokens(), session.client.may_be_ahead), (236, false));
}

#[test]
fn a_session_that_diverges_every_turn_is_left_to_the_tree() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let mut history = 0;
    for turn in 0.. {
        assert!(turn < 9, "it is tried for ever");
        let asks = full_history(&mut rig, &auto("s"), 460 + turn).inside();
        if tokens_max(&asks).is_none() {
            assert_eq!(turn, 3, "three in a row");
            break;
        }
        rig.question(&asks, Plan::Diverged, 150);
        rig.demoted();
        let answer = rig.answers.pop().expect("an answer").1;
        rig.engine_closes();
        if answer.is_some() {
            rig.runs(&asks, 0, 150);
        } else {
            assert_eq!(rig.plan(&asks, Plan::Diverged, 0, 0), (TrimOutcome::Diverged, 0));
            assert_eq!(rig.run_modes[&asks.rid], RunMode::Tagged);
            rig.end(&asks, finished(151, 8));
            history = 159;
        }
    }
    assert_eq!(rig.retention("s"), Retention::Tagged);
    let totals = rig.table.totals(0);
    assert_eq!((totals.rows_held, totals.pinned_tokens), (0, 0));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), history);
}

/// Lets the shim answer the request to inspect a session.
pub(super) fn seen(rig: &mut Rig, id: &str, history_tokens: u64) {
    let allocated_tokens = history_tokens - 1;
    let (id, holds_row, in_flight) = (id.to_owned(), true, false);
    let seen = SessionReport { id, holds_row, allocated_tokens, history_tokens, in_flight };
    rig.answer_inspection(&seen);
    rig.carry_out();
}

#[test]
fn a_turn_without_a_reported_plan_makes_its_session_suspect_until_the_shim_reports() {
    for history_tokens in [148, 168] {
        let mut rig = trimming();
        let incarnation = rig.pinned_by_itself("s");
        let turn = full_history(&mut rig, &auto("s"), 460).inside();
        rig.end(&turn, finished(160, 8));
        assert_eq!(rig.inspections.len(), 1, "was it trimmed or not");
        seen(&mut rig, &incarnation, history_tokens);
        assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), history_tokens);
        let next = full_history(&mut rig, &auto("s"), 480).inside();
        assert_eq!(next.incarnation(), incarnation);
        assert!(tokens_max(&next).is_some());
    }
}

#[test]
fn an_answer_without_usage_is_measured_by_the_shim() {
    let mut rig = trimming();
    let incarnation = rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(rig.plan(&turn, Plan::Retokenized, 148, 12), (TrimOutcome::Retokenized, 148));
    rig.table.handle_commit("another turn", &incarnation, 999, false);
    rig.table.handle_commit(&turn.rid, &incarnation, 165, false);
    rig.end(&turn, Outcome::Finished(None));
    assert_eq!(rig.table.sessions().get(&key("s")).unwrap().history_tokens(), 165);
    assert!(rig.inspections.is_empty());
    let untold = full_history(&mut rig, &auto("s"), 480).inside();
    rig.plan(&untold, Plan::Trimmed, 165, 12);
    rig.end(&untold, Outcome::Finished(None));
    assert_eq!(rig.inspections.len(), 1, "nobody told how long the answer was");
}

#[test]
fn a_prompt_beyond_its_reservation_runs_only_if_there_is_room() {
    for (prompt, fits) in [(300, true), (1050, false)] {
        let mut rig = trimming();
        rig.table.open_session(rig.now, "o", &opens(key("s"), Retention::Pinned)).unwrap();
        rig.carry_out();
        let turn = full_history(&mut rig, &auto("s"), 300).inside();
        assert_eq!(tokens_max(&turn), Some(100), "a first history is estimated");
        let incarnation = turn.incarnation().to_owned();
        rig.question(&turn, Plan::NotTrimmed, prompt);
        let same = fits.then_some((7, Some(incarnation), prompt));
        assert_eq!(rig.answers, [same.unwrap_or((7, None, 0))]);
        let held = rig.table.totals(0).pinned_tokens;
        assert_eq!(held >= prompt, fits, "room is kept for what answers: {held}");
    }
}

#[test]
fn an_explicitly_pinned_session_takes_full_histories_and_starts_over_when_its_own_is_gone() {
    let mut rig = trimming();
    rig.pin("s");
    let first = full_history(&mut rig, &Claim { open: true, ..auto("s") }, 300).inside();
    rig.runs(&first, 0, 90);
    assert_eq!(rig.retention("s"), Retention::Pinned);
    assert_eq!(
        full_history(&mut rig, &delta("s"), 300).error(),
        Error::PinnedRouteRefused,
        "not by this route"
    );
    rig.table.handle_engine_lost(rig.now, engine(1));
    rig.carry_out();
    let again = full_history(&mut rig, &auto("s"), 330).inside();
    assert_eq!(rig.runs(&again, 0, 100), TrimOutcome::Reopened);
    rig.table.set_trimming(rig.now, false);
    assert_eq!(
        full_history(&mut rig, &auto("s"), 340).error(),
        Error::PinnedRouteRefused,
        "nobody trims"
    );
}

#[test]
fn a_pinned_session_starts_over_without_its_pin_where_the_restarted_engine_offers_none() {
    let mut rig = trimming();
    rig.pin("s");
    let first = full_history(&mut rig, &Claim { open: true, ..auto("s") }, 300).inside();
    rig.runs(&first, 0, 90);
    let retentions = vec![Retention::Tagged, Retention::None];
    rig.engine_restarts(EngineCapacity { retentions, ..engine(1) });
    let again = full_history(&mut rig, &auto("s"), 330).inside();
    assert_eq!(
        (again.turn.run_mode, rig.retention("s")),
        (Some(RunMode::Tagged), Retention::Tagged)
    );
}

#[test]
fn a_question_is_answered_however_the_session_ends_meanwhile() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    rig.question(&turn, Plan::Diverged, 150);
    rig.close("s").unwrap();
    assert_eq!(rig.answers, [(7, None, 0)]);
    rig.demoted();
    rig.plan(&turn, Plan::Diverged, 0, 0);
    rig.end(&turn, finished(150, 8));
    rig.engine_closes();
    assert!(!rig.is_open("s"));
    assert_eq!(rig.table.totals(0), RankTotals::default());
}

#[test]
fn an_auto_pinned_session_loses_its_pin_when_it_outgrows_the_room() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    rig.pin_holding("other", 744);
    let turn = full_history(&mut rig, &auto("s"), 640).waits();
    rig.demoted();
    let turn = rig.answer(turn).inside();
    assert_eq!(
        (turn.turn.run_mode, rig.retention("s")),
        (Some(RunMode::Tagged), Retention::Tagged)
    );
}

#[test]
fn an_answer_whose_end_was_ignored_costs_its_session_no_pin() {
    // The client's text lacks end tokens that the answer holds, so the prompt diverges inside the
    // answer. If the client also edits its history, the prompt diverges before the answer.
    for (at, keeps) in [(145, true), (139, false)] {
        let mut rig = trimming();
        rig.pinned_by_itself("s");
        let claim = auto("s");
        for turn in 0..6 {
            let need = Need { prompt_tokens: 460 + turn, ignores_eos: true, ..Need::default() };
            let need = Need { answer_tokens: Some(8), ..need };
            let asks = rig.ask(Some(&claim), None, RouteTurns::FullHistories, need).inside();
            if tokens_max(&asks).is_none() {
                break;
            }
            let (rid, incarnation) = (asks.rid.clone(), rig.incarnation_of(&asks));
            let (plan, committed) = (Plan::Diverged, 148);
            if turn > 0 {
                let reported = trim_plan(rid, incarnation, plan, [at, committed, 0, 150]);
                rig.table.handle_question(rig.now, 7, &reported);
                rig.carry_out();
                rig.demoted();
                rig.engine_closes();
            }
            if tokens_max(&asks).is_some() && (turn == 0 || rig.answers.pop().unwrap().1.is_some())
            {
                rig.runs(&asks, 0, 140);
            } else {
                rig.plan(&asks, Plan::Diverged, 0, 0);
                rig.end(&asks, finished(140, 8));
            }
        }
        let pinned = rig.retention("s") == Retention::Pinned;
        assert_eq!(pinned, keeps, "differs at {at}, the last answer begins at 140");
    }
}
