//! Volatile prefixes: texts early in a session's prompts that differ from turn to turn.

use contract::load::{PromptPlace, PromptRole, VolatilePrefix};

use super::{
    trim::{auto, full_history, trim_plan, trimming},
    *,
};

/// Returns the start of a chat whose system message differs with `nonce`.
fn chat(nonce: usize) -> PromptStart {
    let mut start = PromptStart::default();
    start.push(PromptRole::System, 0, 0, &[format!("nonce {nonce}").as_bytes()]);
    start.push(PromptRole::User, 1, 0, &[b"hello"]);
    start
}

impl Rig {
    fn found(&self, id: &str) -> Option<VolatilePrefix> {
        self.table.sessions().get(&key(id)).unwrap().volatile_prefix()
    }

    /// Lets the shim report that a running turn diverges from its session at token `at`, and ends
    /// the turn.
    fn diverges(&mut self, turn: &Inside, at: u64) {
        let (rid, incarnation) = (turn.rid.clone(), self.incarnation_of(turn));
        let (plan, committed, sent, prompt) = (Plan::Diverged, 148, 0, 160);
        let reported = trim_plan(rid, incarnation, plan, [at, committed, sent, prompt]);
        self.table.handle_question(self.now, 7, &reported);
        self.carry_out();
        self.demoted();
        let answer = self.answers.pop().expect("an answer").1;
        self.engine_closes();
        if answer.is_some() {
            self.runs(turn, 0, 160);
        } else {
            self.plan(turn, Plan::Diverged, 0, 0);
            self.end(turn, finished(160, 8));
        }
    }
}

#[test]
fn a_chat_that_loses_its_pin_tells_which_text_and_which_token_cost_it() {
    let mut rig = trimming();
    rig.start = chat(0);
    rig.pinned_by_itself("s");
    for nonce in 1..4 {
        rig.start = chat(nonce);
        let turn = full_history(&mut rig, &auto("s"), 460).inside();
        rig.diverges(&turn, 34);
    }
    let place = Some(PromptPlace { role: PromptRole::System, message: 0, block: 0 });
    let found = VolatilePrefix { token_index: Some(34), place, turns: 3 };
    assert_eq!((rig.found("s"), &rig.volatile), (Some(found), &vec![found]));
    rig.start = chat(9);
    let turn = full_history(&mut rig, &auto("s"), 460).inside();
    assert_eq!(rig.retention("s"), Retention::Tagged, "it can't be pinned like that");
    rig.end(&turn, finished(160, 8));
    assert_eq!(rig.found("s"), Some(VolatilePrefix { turns: 4, ..found }));
    assert_eq!(rig.volatile.len(), 1, "it is told once");
}

#[test]
fn a_prompt_of_one_text_tells_the_token_alone() {
    let mut rig = trimming();
    rig.pinned_by_itself("s");
    for _ in 0..3 {
        let turn = full_history(&mut rig, &auto("s"), 460).inside();
        rig.diverges(&turn, 34);
    }
    let found = VolatilePrefix { token_index: Some(34), place: None, turns: 3 };
    assert_eq!((rig.found("s"), &rig.volatile), (Some(found), &vec![found]));
}

#[test]
fn without_a_shim_the_place_is_told_and_refused_turns_do_not_count() {
    let mut rig = Rig::new();
    for nonce in 0..3 {
        rig.start = chat(nonce);
        let turn = rig.turn(&auto("s")).inside();
        rig.start = chat(100 + nonce);
        let request = claims(&auto("s"), RouteTurns::FullHistories);
        rig.table.claim(rig.now, "gone", &request).unwrap();
        rig.table.set_prompt_start("gone", rig.start.clone());
        rig.table.end_turn(rig.now, "gone", Outcome::Refused);
        rig.end(&turn, finished(100, 8));
    }
    assert_eq!(rig.found("s"), None, "two differences");
    rig.start = chat(9);
    rig.turn(&auto("s")).inside();
    let found = rig.found("s").unwrap();
    assert_eq!((found.token_index, found.turns), (None, 3));
}
