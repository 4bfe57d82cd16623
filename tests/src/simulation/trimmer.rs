//! The shim in the engine's first process: what it makes of marked turns, before the scheduler gets
//! them, as `trimmer.py` does. It knows each session's context, tells the agent of its plans on a
//! wire of its own, and asks where another session could help.

use std::{collections::BTreeMap, time::Duration};

use worker_agent::session::{Plan, Planned};

use super::{
    engine::TurnId,
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
}

/// Where a turn goes, and how much of it.
struct Goes {
    planned: Planned,
    rest: Vec<u32>,
    /// It asks first.
    asks: bool,
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

    fn plan(&self, rid: &str, id: &str, ids: &[u32], tokens_max: u64) -> Goes {
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
        };
        let Some(context) = context else {
            return goes(Plan::Refused, 0, &[], true);
        };
        if ids.len() as u64 > tokens_max {
            return goes(Plan::Refused, context.len(), &[], true);
        }
        match ids.strip_prefix(&context[..]) {
            Some(rest) if !rest.is_empty() => goes(Plan::Trimmed, context.len(), rest, false),
            _ => goes(Plan::Diverged, context.len(), &[], true),
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
    pub(super) fn plan_turn(&mut self, id: TurnId, incarnation: &str, tokens_max: u64) {
        let turn = &self.turns[&id];
        let goes = self.trimmer.plan(&turn.rid, incarnation, &turn.ids, tokens_max);
        if !goes.asks || self.agent.is_none() {
            return self.planned(id, goes);
        }
        let question = self.number();
        let planned = goes.planned.clone();
        self.note(|| format!("question {question}: {planned:?}"));
        self.trimmer.questions.insert(question, Question { turn: id, planned: goes.planned });
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
        let plan = |(id, max): (String, u64)| self.trimmer.plan(&turn.rid, &id, &turn.ids, max);
        let again = run.map(plan);
        let as_it_came = Goes { planned: asked.planned, rest: Vec::new(), asks: false };
        self.planned(asked.turn, again.unwrap_or(as_it_came));
    }

    /// The plan is told, and the scheduler gets the turn.
    fn planned(&mut self, id: TurnId, goes: Goes) {
        let Goes { planned, rest, .. } = goes;
        let inside = matches!(planned.plan, Plan::Trimmed | Plan::Healed);
        self.note(|| format!("turn {id}: {planned:?}"));
        if inside {
            self.tally.trimmed += 1;
            let turn = self.turn(id);
            turn.runs_in = Some(planned.incarnation.clone());
            turn.sent = rest;
        }
        let lost = self.plan.faults.plan_lost;
        if !self.odds(lost) {
            // Told before the engine gets it; the agent may hear of it later all the same.
            let latency = self.between(0, 2);
            let instance = self.instances;
            self.at(latency, Event::Planned { instance, planned });
        }
        self.submit(id);
    }

    pub(super) fn plan_heard(&mut self, instance: u64, planned: &Planned) {
        if self.is_instance(instance) {
            self.tell(|table, now| table.planned(now, planned));
        }
    }
}
