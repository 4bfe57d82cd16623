//! The shim in the engine's first process: what it makes of marked turns, before the scheduler gets
//! them, as `trimmer.py` does. It knows each session's context, tells the agent of its plans on a
//! wire of its own, and asks where another session could help.

use std::{collections::BTreeMap, time::Duration};

use worker_agent::session::{Error, Plan, Planned, Trim};

use super::{
    engine::TurnId,
    turns::{Ended, Turn},
    world::{Event, World},
};
use crate::engine_sim::{request::Finish, request::Output, tokenizer::BOS};

/// It doesn't wait longer for the agent.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// It goes with the engine's process.
#[derive(Debug, Default)]
pub(super) struct Trimmer {
    /// What each streaming session has; none where nobody knows.
    contexts: BTreeMap<String, Option<Vec<u32>>>,
    questions: BTreeMap<u64, Question>,
}

#[derive(Debug)]
struct Question {
    turn: TurnId,
    /// The plan, if nobody answers.
    planned: Planned,
    must_continue: bool,
}

/// Where a turn goes, and how much of it.
struct Goes {
    planned: Planned,
    rest: Vec<u32>,
    /// It asks first.
    asks: bool,
    /// It runs in the session, or not at all.
    must_continue: bool,
}

impl Trimmer {
    /// A new life of a session, without a context. One that was open already stays as it is.
    pub(super) fn opened(&mut self, id: &str) {
        self.contexts.entry(id.to_owned()).or_insert_with(|| Some(Vec::new()));
    }

    pub(super) fn closed(&mut self, id: &str) {
        self.contexts.remove(id);
    }

    /// Somebody else has run a turn in it.
    pub(super) fn lose(&mut self, id: &str) {
        self.contexts.insert(id.to_owned(), None);
    }

    fn plan(&self, rid: &str, id: &str, ids: &[u32], trim: Trim) -> Goes {
        let Trim { tokens_max, must_continue } = trim;
        let context = self.contexts.get(id).and_then(Option::as_ref);
        let same = context.map_or(0, |context| {
            context.iter().zip(ids).take_while(|(one, other)| one == other).count()
        });
        let goes = |plan, committed: usize, rest: &[u32], asks| Goes {
            planned: Planned {
                rid: rid.to_owned(),
                at: same as u64,
                incarnation: id.to_owned(),
                plan,
                committed: committed as u64,
                sent: rest.len() as u64,
                prompt: ids.len() as u64,
            },
            rest: rest.to_vec(),
            asks,
            must_continue,
        };
        let Some(context) = context else {
            return goes(Plan::Refused, 0, &[], !must_continue);
        };
        match ids.strip_prefix(&context[..]) {
            Some([]) | None => goes(Plan::Diverged, context.len(), &[], !must_continue),
            Some(_) if ids.len() as u64 > tokens_max => {
                goes(Plan::Refused, context.len(), &[], true)
            }
            Some(rest) => goes(Plan::Trimmed, context.len(), rest, false),
        }
    }

    /// The engine's last word on a turn of this session.
    pub(super) fn ended(&mut self, id: &str, sent: &[u32], output: &Output, tokens: &[u32]) {
        let Some(context) = self.contexts.get_mut(id) else { return };
        match &output.finish {
            // What was taken out of the batch may have been committed before.
            Some(Finish::Abort { .. }) if output.retractions > 0 => *context = None,
            Some(Finish::Abort { .. }) => {}
            _ => {
                if let Some(context) = context {
                    // Where there is history, the engine drops what a tokenizer puts in front.
                    let doubled = !context.is_empty() && sent.first() == Some(&BOS);
                    context.extend_from_slice(&sent[usize::from(doubled)..]);
                    context.extend_from_slice(tokens);
                }
            }
        }
    }
}

impl World {
    /// A marked turn has come to the engine's first process.
    pub(super) fn plan_turn(&mut self, id: TurnId, incarnation: &str, trim: Trim) {
        let turn = &self.turns[&id];
        let goes = self.trimmer.plan(&turn.rid, incarnation, &turn.ids, trim);
        if !goes.asks || self.agent.is_none() {
            return self.planned(id, goes);
        }
        let question = self.number();
        let planned = goes.planned.clone();
        self.note(|| format!("question {question}: {planned:?}"));
        let must_continue = trim.must_continue;
        let asked = Question { turn: id, planned: goes.planned, must_continue };
        self.trimmer.questions.insert(question, asked);
        self.at(ANSWER_MAX, Event::Answered { question, run: None });
        let lost = self.plan.faults.plan_lost;
        if !self.odds(lost) {
            let latency = self.between(0, 4);
            let instance = self.instances;
            self.at(latency, Event::Asks { instance, question, planned });
        }
    }

    pub(super) fn asks(&mut self, instance: u64, question: u64, planned: &Planned) {
        if self.is_instance(instance) {
            self.tell(|table, now| table.asked(now, question, planned));
        }
    }

    /// The agent answers a question.
    pub(super) fn run_in(&mut self, question: u64, incarnation: Option<String>, tokens_max: u64) {
        self.note(|| format!("question {question}: run in {incarnation:?}, {tokens_max} tokens"));
        let latency = self.between(0, 4);
        let run = incarnation.map(|incarnation| (incarnation, tokens_max));
        self.at(latency, Event::Answered { question, run });
    }

    pub(super) fn answered(&mut self, question: u64, run: Option<(String, u64)>) {
        let Some(asked) = self.trimmer.questions.remove(&question) else { return };
        let turn = &self.turns[&asked.turn];
        let must_continue = asked.must_continue;
        let plan = |(id, tokens_max): (String, u64)| {
            self.check_reopened(turn, &asked.planned.incarnation, &id);
            let trim = Trim { tokens_max, must_continue };
            self.trimmer.plan(&turn.rid, &id, &turn.ids, trim)
        };
        let again = run.map(plan);
        let planned = asked.planned;
        let as_it_came = Goes { planned, rest: Vec::new(), asks: false, must_continue };
        self.planned(asked.turn, again.unwrap_or(as_it_came));
    }

    /// The plan is told, and the scheduler gets the turn.
    fn planned(&mut self, id: TurnId, goes: Goes) {
        let Goes { planned, rest, must_continue, .. } = goes;
        let inside = matches!(planned.plan, Plan::Trimmed | Plan::Healed);
        self.note(|| format!("turn {id}: {planned:?}"));
        if inside {
            self.tally.trimmed += 1;
            let turn = self.turn(id);
            turn.runs_in = Some(planned.incarnation.clone());
            turn.sent = rest;
        }
        let lost = self.plan.faults.plan_lost;
        let lost = self.odds(lost);
        self.turn(id).plan_lost |= lost;
        if !lost {
            // Told before the engine gets it; the agent may hear of it later all the same.
            let latency = self.between(0, 2);
            let instance = self.instances;
            self.at(latency, Event::Planned { instance, planned });
        }
        if must_continue && !inside {
            return self.turn_ends_soon(id, Ended::Unfit);
        }
        self.submit(id);
    }

    /// The agent tells a turn's client that the shim has refused the turn: nothing of it may run.
    pub(super) fn check_unfit(&mut self, rid: &str, error: &Error) {
        self.note(|| format!("{rid} is unfit: {error}"));
        let turn = self.turns.values_mut().find(|turn| turn.rid == rid).expect("turns are kept");
        let runs = turn.inside || turn.runs_in.is_some();
        assert!(!runs, "{rid} runs, and its client hears that it doesn't");
        turn.unfit = Some(error.clone());
    }

    /// Whoever appends to a session relies on what it has: a history that differs takes another
    /// session's place only where its client says that it may.
    fn check_reopened(&self, turn: &Turn, old: &str, new: &str) {
        let opens = turn.claim.as_ref().is_some_and(|(claim, _)| claim.open);
        let relied_on = old != new && self.appended_to.contains(old);
        assert!(opens || !relied_on, "{} replaces what deltas were appended to", turn.rid);
    }

    pub(super) fn plan_heard(&mut self, instance: u64, planned: &Planned) {
        if self.is_instance(instance) {
            self.tell(|table, now| table.planned(now, planned));
        }
    }
}
