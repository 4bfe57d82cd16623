//! Runs a turn from its client through the agent into the engine and back, as the data port does.
//!
//! A turn is claimed before its body is read, then admitted, sent, and followed to its end.

use std::time::Duration;

use contract::{claim::Claim, id::SessionKey, load::Retention};
use worker_agent::session::{self, ClaimRequest, Need, Outcome, RouteTurns};

use super::{
    answers::read,
    calls::Task,
    engine::{Command, TurnId},
    weights::TurnKv,
    world::{Event, World},
};
use engine_sim::{
    request::{Finish, Output, Sampling, SessionParams, SessionRef, Submit},
    tokenizer::BOS,
};

/// How often the agent aborts a turn without a client until the turn ends.
const ABORT_AGAIN: Duration = Duration::from_millis(500);
/// The time within which the shim's plan reaches the agent, unless it is lost.
const PLAN_HEARD: Duration = Duration::from_millis(5);
/// How often the engine checks whether the client of an answer without streaming is still
/// connected.
const HANGUP_SEEN: Duration = Duration::from_secs(4);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// On the way to the agent.
    Coming,
    /// Claimed; the body is being read.
    Claimed,
    Queued,
    /// Admitted, but not sent yet.
    Admitted,
    /// Sent to the engine.
    Sent,
    Over,
}

/// How a turn's connection to the engine ended.
#[derive(Debug)]
pub(super) enum Ended {
    Answered {
        output: Output,
        tokens: Vec<u32>,
    },
    Broken,
    Unreachable,
    /// The shim refused the turn: its full history doesn't continue its session.
    Unfit,
}

/// What the client receives at the end of a turn.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    Answer,
    Refused(session::Error),
    /// The engine refused the turn or gave it up.
    Engine(String),
    /// The client's connection to the agent broke.
    Broken,
    Unusable,
}

#[derive(Debug)]
pub(super) struct Turn {
    pub(super) rid: String,
    pub(super) user: usize,
    pub(super) claim: Option<(Claim, SessionKey)>,
    pub(super) ids: Vec<u32>,
    pub(super) max_new: usize,
    pub(super) ignore_eos: bool,
    pub(super) streams: bool,
    pub(super) exact: bool,
    pub(super) rank: Option<u32>,
    /// Whether a second client sent the turn, from a different copy of the conversation.
    pub(super) foreign: bool,
    /// Whether the shim's last plan for the turn never reached the agent.
    pub(super) plan_lost: bool,
    /// Whether the agent has waited for the plan of a turn that the shim refused.
    pub(super) awaited_plan: bool,
    /// The error that the agent gives the client because the shim refused the turn.
    pub(super) unfit: Option<session::Error>,
    pub(super) begun: Duration,
    pub(super) queued: Duration,
    pub(super) stage: Stage,
    /// Whether the client still waits for the answer.
    pub(super) client: bool,
    pub(super) reply: Option<Reply>,
    pub(super) admitted: Option<session::PlannedTurn>,
    /// The context that the client expects the answer to be computed from. Known from the admission
    /// on.
    pub(super) context: Vec<u32>,
    /// Whether the connection to the engine holds.
    pub(super) connected: bool,
    /// Whether the engine's process has received the turn.
    pub(super) arrived: bool,
    /// The session in which the trimmed turn runs; `sent` are the tokens that it sends there.
    pub(super) runs_in: Option<String>,
    pub(super) sent: Vec<u32>,
    /// When the turn entered the scheduler; `inside` says whether it is still there.
    pub(super) entered: Option<Duration>,
    pub(super) inside: bool,
    pub(super) kv: TurnKv,
}

impl Turn {
    pub(super) fn is_over(&self) -> bool {
        self.stage == Stage::Over && !self.client && !self.inside
    }

    pub(super) fn incarnation(&self) -> Option<&str> {
        if let Some(session) = &self.runs_in {
            return Some(session);
        }
        let session = self.admitted.as_ref()?.session.as_ref()?;
        Some(&session.incarnation)
    }

    pub(super) fn is_pinned(&self) -> bool {
        let session = self.admitted.as_ref().and_then(|turn| turn.session.as_ref());
        let named = session.is_some_and(|session| session.retention == Retention::Pinned);
        named || self.runs_in.is_some()
    }

    fn is_marked(&self) -> bool {
        let session = self.admitted.as_ref().and_then(|turn| turn.session.as_ref());
        session.is_some_and(|session| session.trim.is_some())
    }

    pub(super) fn delta(&self) -> bool {
        self.claim.as_ref().is_some_and(|(claim, _)| claim.delta)
    }
}

impl World {
    pub(super) fn turn(&mut self, turn: TurnId) -> &mut Turn {
        self.turns.get_mut(&turn).expect("turns are kept")
    }

    pub(super) fn turn_arrives(&mut self, id: TurnId) {
        let turn = self.turn(id);
        if !turn.client {
            turn.stage = Stage::Over;
            return;
        }
        let (claim, rid, rank) = (turn.claim.clone(), turn.rid.clone(), turn.rank);
        let Some(agent) = &self.agent else {
            // Nothing accepts the connection, so the client knows that the turn did not run.
            self.turn(id).stage = Stage::Over;
            return self.reply(id, Reply::Unusable);
        };
        if agent.down || agent.draining {
            self.turn(id).stage = Stage::Over;
            return self.reply(id, Reply::Unusable);
        }
        let request = ClaimRequest {
            principal: self.users[self.turns[&id].user].principal().into(),
            claim: claim.as_ref().map(|(claim, _)| claim.clone()),
            is_hint: false,
            returns_soon: false,
            requested_rank: rank,
            route_turns: RouteTurns::DeltasAndHistories,
        };
        self.turn(id).stage = Stage::Claimed;
        let claimed = self.call_table(|table, now| table.claim(now, &rid, &request));
        let says = claim.as_ref().map(|(claim, _)| {
            let flag = |on, text| if on { text } else { "" };
            let delta = flag(claim.delta, " delta");
            format!(
                "{}{delta}{}{}",
                claim.key.id(),
                flag(claim.open, " open"),
                flag(claim.close, " close")
            )
        });
        self.note(|| format!("claim {rid} {says:?}: {claimed:?}"));
        match claimed {
            Some(Ok(())) if self.agent.is_some() => {
                let upload = self.between(0, 30);
                self.schedule(upload, Event::BodyRead(id));
            }
            Some(Err(error)) => {
                self.turn(id).stage = Stage::Over;
                self.reply(id, Reply::Refused(error));
            }
            Some(Ok(())) | None => {}
        }
    }

    pub(super) fn body_read(&mut self, id: TurnId) {
        let turn = self.turn(id);
        if turn.stage != Stage::Claimed {
            return;
        }
        let prompt_tokens = turn.ids.len() as u64;
        let need = Need {
            // A text has at most one token more than it has bytes.
            prompt_tokens: if turn.exact { prompt_tokens } else { prompt_tokens * 2 + 1 },
            answer_tokens: Some(turn.max_new as u64),
            is_exact: turn.exact,
            kv: turn.kv.identity(),
            ..Need::default()
        };
        let rid = turn.rid.clone();
        if self.agent.as_ref().is_some_and(|agent| agent.hands_over_by.is_some()) {
            self.turn(id).stage = Stage::Over;
            self.call_table(|table, now| table.end_turn(now, &rid, Outcome::Refused));
            return self.reply(id, Reply::Unusable);
        }
        self.turn(id).stage = Stage::Queued;
        self.turn(id).queued = self.now;
        if let Some(agent) = &mut self.agent {
            agent.waiters.insert(rid.clone());
        }
        self.note(|| format!("admit {rid} {need:?}"));
        self.call_table(|table, now| table.enqueue(now, &rid, need));
    }

    pub(super) fn admitted(&mut self, rid: &str, admitted: session::PlannedTurn) {
        self.note(|| format!("{rid} admitted: {admitted:?}"));
        if !self.waited(rid) {
            return;
        }
        let found = self.turns.iter().find(|(_, turn)| turn.rid == rid).map(|(id, _)| *id);
        let Some(id) = found else { return self.user_opened(rid) };
        let turn = &self.turns[&id];
        let pinned = admitted.session.as_ref().map(|s| s.retention) == Some(Retention::Pinned);
        let mut context = Vec::new();
        if pinned && turn.delta() {
            context.clone_from(&self.users[turn.user].session);
        }
        // If the session has a history, the engine drops a leading BOS token.
        let doubled = !context.is_empty() && turn.ids.first() == Some(&BOS);
        context.extend_from_slice(&turn.ids[usize::from(doubled)..]);
        let turn = self.turn(id);
        turn.context = context;
        turn.stage = Stage::Admitted;
        turn.admitted = Some(admitted);
        let pause = self.between(0, 2);
        self.schedule(pause, Event::TurnSent(id));
    }

    pub(super) fn turn_sent(&mut self, id: TurnId) {
        let turn = self.turn(id);
        if turn.stage != Stage::Admitted {
            return;
        }
        turn.stage = Stage::Sent;
        turn.connected = true;
        let breaks = self.plan.faults.connection_breaks;
        let latency = self.latency();
        if self.odds(breaks / 3) {
            // The engine closed the idle connection at that moment, so the turn never arrives.
            self.turn(id).connected = false;
            return self.schedule(latency, Event::TurnEnds(id, Box::new(Ended::Broken)));
        }
        self.schedule(latency, Event::TurnReachesEngine(id));
        if self.odds(breaks) {
            let after = latency + self.between(5, 1_500);
            self.schedule(after, Event::ConnectionBreaks(id));
        }
    }

    pub(super) fn turn_reaches_engine(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        if !turn.connected {
            return;
        }
        if self.engine.is_none() {
            return self.turn_ends_soon(id, Ended::Unreachable);
        }
        let session = turn.admitted.as_ref().and_then(|turn| turn.session.clone());
        let marked = session.and_then(|session| Some((session.incarnation, session.trim?)));
        let turn = self.turn(id);
        turn.arrived = true;
        turn.sent.clone_from(&turn.ids);
        match marked {
            Some((incarnation, trim)) => self.plan_turn(id, &incarnation, trim),
            None => self.submit(id),
        }
    }

    /// Gives the turn, or the part that the shim left of it, to the scheduler.
    pub(super) fn submit(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        let admitted = turn.admitted.as_ref().expect("only admitted turns are sent");
        let inside = |id: &String| {
            SessionRef::Controller(SessionParams { id: id.clone(), ..SessionParams::default() })
        };
        let session = match (&turn.runs_in, &admitted.session) {
            (Some(incarnation), _) => inside(incarnation),
            (None, None) => SessionRef::None,
            (None, Some(session)) => match session.retention {
                Retention::Pinned => inside(&session.incarnation),
                Retention::Tagged => self.trimmer.tag(session),
                Retention::None => SessionRef::None,
            },
        };
        let sampling = Sampling {
            max_new_tokens: Some(turn.max_new),
            ignore_eos: turn.ignore_eos,
            ..Sampling::default()
        };
        let (rid, input_ids) = (turn.rid.clone(), turn.sent.clone());
        let submit = Submit { rid, input_ids, sampling, session, ..Submit::default() };
        let rank = admitted.dp_rank as usize;
        self.push(rank, Command::Turn { turn: id, submit: Box::new(submit) });
    }

    /// Notes that the scheduler has accepted a turn.
    pub(super) fn entered(&mut self, rank: usize, id: TurnId) {
        let now = self.now;
        let turn = self.turn(id);
        (turn.entered, turn.inside) = (Some(now), true);
        let rid = turn.rid.clone();
        self.note(|| format!("engine rank {rank} takes {rid} in"));
        self.record_kv_age(id);
        self.check_entered(rank, id);
    }

    /// Handles the engine's end of a turn.
    pub(super) fn engine_ended(&mut self, id: TurnId, output: Output, tokens: Vec<u32>) {
        let turn = self.turn(id);
        turn.inside = false;
        let (rid, retracted) = (turn.rid.clone(), output.retractions);
        self.counts.retracted += u64::from(retracted);
        let turn = &self.turns[&id];
        let pinned = turn.is_pinned();
        if let Some(incarnation) = turn.incarnation().filter(|_| pinned) {
            self.trimmer.ended(incarnation, turn, &output, &tokens);
            if turn.delta() && !matches!(output.finish, Some(Finish::Abort { .. })) {
                self.appended_to.insert(incarnation.to_owned());
            }
        }
        self.counts.retracted_pinned += u64::from(pinned && retracted > 0);
        self.note(|| format!("engine ends {rid}: {:?}, {retracted} retractions", output.finish));
        if self.turn(id).connected {
            let leaves = self.plan.faults.client_leaves;
            if self.odds(leaves / 4) {
                // The client leaves just before the answer arrives.
                self.schedule(Duration::ZERO, Event::ClientLeaves(id));
            }
            self.turn_ends_soon(id, Ended::Answered { output, tokens });
        }
    }

    pub(super) fn turn_ends_soon(&mut self, id: TurnId, ended: Ended) {
        let latency = self.latency();
        self.schedule(latency, Event::TurnEnds(id, Box::new(ended)));
    }

    /// Breaks the connection between agent and engine. The engine notices late, if at all.
    pub(super) fn connection_breaks(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        let Some(entered) = turn.entered.filter(|_| turn.connected && turn.inside) else { return };
        let (rid, streams, pinned) = (turn.rid.clone(), turn.streams, turn.is_pinned());
        self.note(|| format!("connection of {rid} breaks"));
        self.turn(id).connected = false;
        self.turn_ends_soon(id, Ended::Broken);
        let unnoticed = self.plan.faults.break_unnoticed;
        // The agent itself aborts a lost turn only if its session is pinned. For other lost turns
        // the engine has to notice the broken connection.
        if !pinned || !self.odds(unnoticed) {
            self.engine_notices(rid, streams, entered);
        }
    }

    fn engine_notices(&mut self, rid: String, streams: bool, entered: Duration) {
        let Some(engine) = &self.engine else { return };
        let instance = engine.instance;
        let after = if streams {
            Duration::from_millis(2)
        } else {
            let waited = (self.now - entered).as_nanos();
            let polls = waited.div_ceil(HANGUP_SEEN.as_nanos()).max(1);
            entered + HANGUP_SEEN * u32::try_from(polls).unwrap_or(1) - self.now
        };
        self.schedule(after, Event::EngineNotices { instance, rid });
    }

    /// Ends a turn's connection because the engine's process has ended.
    pub(super) fn turn_cut_off(&mut self, id: TurnId) {
        let turn = self.turn(id);
        turn.inside = false;
        if turn.stage == Stage::Sent && turn.connected && turn.arrived {
            turn.connected = false;
            self.turn_ends_soon(id, Ended::Broken);
        }
    }

    /// Ends a turn's connections to its client and to the engine because the agent's process has
    /// ended.
    pub(super) fn turn_orphaned(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        if matches!(turn.stage, Stage::Coming | Stage::Over) {
            return;
        }
        let (rid, streams, client) = (turn.rid.clone(), turn.streams, turn.client);
        let entered = turn.entered.filter(|_| turn.connected && turn.inside);
        let turn = self.turn(id);
        turn.stage = Stage::Over;
        turn.connected = false;
        if let Some(entered) = entered {
            self.engine_notices(rid, streams, entered);
        }
        if client {
            self.reply(id, Reply::Broken);
        }
    }

    /// Handles a turn's end as the agent does, and replies to the client.
    pub(super) fn turn_ends(&mut self, id: TurnId, ended: Ended) {
        let turn = &self.turns[&id];
        if turn.stage != Stage::Sent {
            return;
        }
        let (rid, client) = (turn.rid.clone(), turn.client);
        if matches!(ended, Ended::Unfit) && !turn.awaited_plan {
            // The shim has sent its plan before; the agent waits for it.
            self.turn(id).awaited_plan = true;
            return self.schedule(PLAN_HEARD, Event::TurnEnds(id, Box::new(ended)));
        }
        let outcome = match &ended {
            Ended::Answered { output, tokens } => {
                // A full history in text may come by any route, so also by a chat route.
                let chat = turn.is_marked() && !turn.exact;
                read(chat, turn.streams, output, tokens.len())
            }
            Ended::Broken => Outcome::Lost,
            Ended::Unreachable | Ended::Unfit => Outcome::Refused,
        };
        let refusal = self.weights_refusal(id);
        let outcome = match outcome {
            Outcome::Finished(usage) if !client || refusal.is_some() => Outcome::Unheard(usage),
            outcome => outcome,
        };
        self.turn(id).stage = Stage::Over;
        self.note(|| format!("{rid} ends: {outcome:?}"));
        self.counts.lost += u64::from(outcome == Outcome::Lost);
        if let (Outcome::Finished(usage), Ended::Answered { tokens, .. }) = (&outcome, &ended) {
            self.check_answer(id, tokens, *usage);
            self.users[self.turns[&id].user].answered(&self.turns[&id], tokens);
        }
        self.call_table(|table, now| table.end_turn(now, &rid, outcome));
        if !client {
            return;
        }
        let reply = match ended {
            Ended::Answered { output, .. } => self.reply_to(id, output.finish, refusal),
            Ended::Broken => Reply::Engine("the engine broke the answer off".to_owned()),
            Ended::Unreachable => Reply::Unusable,
            Ended::Unfit => Reply::Refused(self.shim_refusal(id)),
        };
        if matches!(reply, Reply::Unusable) {
            self.engine_down();
        }
        self.reply(id, reply);
    }

    pub(super) fn client_leaves(&mut self, id: TurnId) {
        let turn = self.turn(id);
        if !turn.client {
            return;
        }
        turn.client = false;
        let (rid, stage) = (turn.rid.clone(), turn.stage);
        self.counts.left += 1;
        self.note(|| format!("client of {rid} leaves, {stage:?}"));
        self.user_left(id);
        match stage {
            Stage::Coming | Stage::Over => {}
            Stage::Claimed | Stage::Queued | Stage::Admitted => {
                // The turn's lease is dropped before anything is sent.
                self.turn(id).stage = Stage::Over;
                self.call_table(|table, now| table.end_turn(now, &rid, Outcome::Refused));
            }
            Stage::Sent => {
                self.call_table(|table, now| table.abandon_turn(now, &rid));
                self.schedule(Duration::ZERO, Event::AbortAgain(id));
            }
        }
    }

    pub(super) fn abort_again(&mut self, id: TurnId) {
        let turn = &self.turns[&id];
        if turn.stage == Stage::Sent && turn.connected && self.agent.is_some() {
            let rid = turn.rid.clone();
            self.call(Task::Abort { rid });
            self.schedule(ABORT_AGAIN, Event::AbortAgain(id));
        }
    }

    /// Sends the reply to the turn's client.
    pub(super) fn reply(&mut self, id: TurnId, reply: Reply) {
        self.turn(id).reply = Some(reply);
        let latency = self.latency();
        self.schedule(latency, Event::ReplyArrives(id));
    }
}
