//! The shim in the engine's first process: it plans marked turns, as `trimmer.py` does.
//!
//! It handles a marked turn before the scheduler gets it. It knows each session's context, sends
//! its plans to the agent on a connection of its own, and asks the agent if another session could
//! help.

use std::{collections::BTreeMap, time::Duration};

use worker_agent::{
    session::{Error, TrimPlan, TrimRequest, TurnSession},
    shim::trim::Plan,
};

use super::{
    engine::TurnId,
    turns::{Ended, Turn},
    weights::SaltNumber,
    world::{Event, World},
};
use engine_sim::{
    request::{Finish, Output, SessionRef},
    tokenizer::BOS,
};

/// How long the shim waits for the agent's answer.
const ANSWER_MAX: Duration = Duration::from_secs(2);

/// The shim's state, which ends with the engine's process.
#[derive(Debug, Default)]
pub(super) struct Trimmer {
    /// The context of each streaming session; None if it is unknown.
    contexts: BTreeMap<String, Option<Vec<u32>>>,
    /// The cache salt of each session that has a history.
    salts: BTreeMap<String, SaltNumber>,
    questions: BTreeMap<u64, Question>,
}

#[derive(Debug)]
struct Question {
    turn: TurnId,
    /// The plan that counts if no answer comes.
    planned: TrimPlan,
    must_continue: bool,
}

/// Where a turn runs, and which of its tokens are sent.
struct RunPlan {
    planned: TrimPlan,
    rest: Vec<u32>,
    /// Whether the shim asks the agent first.
    asks: bool,
    /// Whether the turn runs in the session or not at all.
    must_continue: bool,
}

impl Trimmer {
    /// Adds a newly opened session, without a context. A session that was open already keeps its
    /// context.
    pub(super) fn opened(&mut self, id: &str) {
        self.contexts.entry(id.to_owned()).or_insert_with(|| Some(Vec::new()));
    }

    pub(super) fn closed(&mut self, id: &str) {
        self.contexts.remove(id);
        self.salts.remove(id);
    }

    /// Whether a session's history has KV of another salt.
    pub(super) fn is_other(&self, id: &str, salt: SaltNumber) -> bool {
        self.salts.get(id).is_some_and(|own| *own != salt)
    }

    /// Returns the tag of a turn that doesn't run in its session. The shim takes the tag from a
    /// turn whose session was closed while the shim compared its prompt.
    pub(super) fn tag(&self, session: &TurnSession) -> SessionRef {
        if session.trim.is_some() && !self.contexts.contains_key(&session.incarnation) {
            return SessionRef::None;
        }
        SessionRef::Tagged(session.incarnation.clone())
    }

    /// Marks a session's context as unknown, because a foreign turn ran in it.
    pub(super) fn lose(&mut self, id: &str) {
        self.contexts.insert(id.to_owned(), None);
    }

    fn plan(&self, turn: &Turn, id: &str, trim: TrimRequest) -> RunPlan {
        let TrimRequest { tokens_max, must_continue } = trim;
        let (rid, ids) = (&turn.rid, &turn.ids);
        let is_other = self.is_other(id, turn.kv.salt);
        let context = self.contexts.get(id).and_then(Option::as_ref).filter(|_| !is_other);
        let same = context.map_or(0, |context| {
            context.iter().zip(ids).take_while(|(one, other)| one == other).count()
        });
        let goes = |decision, committed: usize, rest: &[u32], asks| RunPlan {
            planned: TrimPlan {
                rid: rid.to_owned(),
                shared_tokens: same as u64,
                incarnation: id.to_owned(),
                decision,
                committed_tokens: committed as u64,
                appended_tokens: rest.len() as u64,
                prompt_tokens: ids.len() as u64,
            },
            rest: rest.to_vec(),
            asks,
            must_continue,
        };
        let Some(context) = context else {
            return goes(Plan::NotTrimmed, 0, &[], !must_continue);
        };
        match ids.strip_prefix(&context[..]) {
            Some([]) | None => goes(Plan::Diverged, context.len(), &[], !must_continue),
            Some(_) if ids.len() as u64 > tokens_max => {
                goes(Plan::NotTrimmed, context.len(), &[], true)
            }
            Some(rest) => goes(Plan::Trimmed, context.len(), rest, false),
        }
    }

    /// Updates the session's context at the end of a turn.
    pub(super) fn ended(&mut self, id: &str, turn: &Turn, output: &Output, tokens: &[u32]) {
        let sent = &turn.sent;
        if !matches!(output.finish, Some(Finish::Abort { .. })) {
            self.salts.insert(id.to_owned(), turn.kv.salt);
        }
        let Some(context) = self.contexts.get_mut(id) else { return };
        match &output.finish {
            // A retracted turn's tokens may have been committed before the abort.
            Some(Finish::Abort { .. }) if output.retractions > 0 => *context = None,
            Some(Finish::Abort { .. }) => {}
            _ => {
                if let Some(context) = context {
                    // If the session has a history, the engine drops a leading BOS token.
                    let doubled = !context.is_empty() && sent.first() == Some(&BOS);
                    context.extend_from_slice(&sent[usize::from(doubled)..]);
                    context.extend_from_slice(tokens);
                }
            }
        }
    }
}

impl World {
    /// Plans a marked turn that has reached the engine's first process.
    pub(super) fn plan_turn(&mut self, id: TurnId, incarnation: &str, trim: TrimRequest) {
        let turn = &self.turns[&id];
        let goes = self.trimmer.plan(turn, incarnation, trim);
        if !goes.asks || self.agent.is_none() {
            return self.deliver_plan(id, goes);
        }
        let question = self.number();
        let planned = goes.planned.clone();
        self.note(|| format!("question {question}: {planned:?}"));
        let must_continue = trim.must_continue;
        let asked = Question { turn: id, planned: goes.planned, must_continue };
        self.trimmer.questions.insert(question, asked);
        self.schedule(ANSWER_MAX, Event::Answered { question, run: None });
        let lost = self.plan.faults.plan_lost;
        if !self.odds(lost) {
            let latency = self.between(0, 4);
            let instance = self.instances;
            self.schedule(latency, Event::Asks { instance, question, planned });
        }
    }

    pub(super) fn deliver_question(&mut self, instance: u64, question: u64, planned: &TrimPlan) {
        if self.is_instance(instance) {
            self.call_table(|table, now| table.handle_question(now, question, planned));
        }
    }

    /// Sends the agent's answer to a question of the shim.
    pub(super) fn answer_question(
        &mut self,
        question: u64,
        incarnation: Option<String>,
        tokens_max: u64,
    ) {
        self.note(|| format!("question {question}: run in {incarnation:?}, {tokens_max} tokens"));
        let latency = self.between(0, 4);
        let run = incarnation.map(|incarnation| (incarnation, tokens_max));
        self.schedule(latency, Event::Answered { question, run });
    }

    pub(super) fn deliver_answer(&mut self, question: u64, run: Option<(String, u64)>) {
        let Some(asked) = self.trimmer.questions.remove(&question) else { return };
        let turn = &self.turns[&asked.turn];
        let must_continue = asked.must_continue;
        let plan = |(id, tokens_max): (String, u64)| {
            self.check_reopened(turn, &asked.planned.incarnation, &id);
            let trim = TrimRequest { tokens_max, must_continue };
            self.trimmer.plan(turn, &id, trim)
        };
        let again = run.map(plan);
        let planned = asked.planned;
        let as_it_came = RunPlan { planned, rest: Vec::new(), asks: false, must_continue };
        self.deliver_plan(asked.turn, again.unwrap_or(as_it_came));
    }

    /// Tells the agent the plan, and gives the turn to the scheduler.
    fn deliver_plan(&mut self, id: TurnId, goes: RunPlan) {
        let RunPlan { planned, rest, must_continue, .. } = goes;
        let inside = matches!(planned.decision, Plan::Trimmed | Plan::Retokenized);
        self.note(|| format!("turn {id}: {planned:?}"));
        if inside {
            self.counts.trimmed += 1;
            let turn = self.turn(id);
            turn.runs_in = Some(planned.incarnation.clone());
            turn.sent = rest;
        }
        let lost = self.plan.faults.plan_lost;
        let lost = self.odds(lost);
        self.turn(id).plan_lost |= lost;
        if !lost {
            // The plan is sent before the engine gets the turn, but the agent may receive it later.
            let latency = self.between(0, 2);
            let instance = self.instances;
            self.schedule(latency, Event::Planned { instance, planned });
        }
        if must_continue && !inside {
            return self.turn_ends_soon(id, Ended::Unfit);
        }
        self.submit(id);
    }

    /// Handles the agent's message to a client that the shim has refused its turn. No part of the
    /// turn may run.
    pub(super) fn check_unfit(&mut self, rid: &str, error: &Error) {
        self.note(|| format!("{rid} is unfit: {error}"));
        let turn = self.turns.values_mut().find(|turn| turn.rid == rid).expect("turns are kept");
        let runs = turn.inside || turn.runs_in.is_some();
        assert!(!runs, "{rid} runs although its client was told that it is refused");
        turn.unfit = Some(error.clone());
    }

    /// Checks that a session with deltas is replaced only with its client's consent. A client that
    /// appends relies on what the session holds, so a different history may replace it only if the
    /// turn opens the session.
    fn check_reopened(&self, turn: &Turn, old: &str, new: &str) {
        let opens = turn.claim.as_ref().is_some_and(|(claim, _)| claim.open);
        let relied_on = old != new && self.appended_to.contains(old);
        assert!(
            opens || !relied_on,
            "{} replaces a history to which deltas were appended",
            turn.rid
        );
    }

    pub(super) fn plan_heard(&mut self, instance: u64, planned: &TrimPlan) {
        if self.is_instance(instance) {
            self.call_table(|table, now| table.handle_plan(now, planned));
        }
    }
}
