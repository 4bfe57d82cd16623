//! The engine's process in virtual time.
//!
//! It has a core of the engine simulator for each DP rank, and the commands that wait for the end
//! of the rank's step.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use engine_sim::{
    core::{Core, CoreConfig},
    request::{Output, ReqKey, Submit},
};

/// The number of a turn in this run.
pub(super) type TurnId = u64;
/// The number of a call to the engine that isn't a turn.
pub(super) type CallId = u64;

#[derive(Debug)]
pub(super) enum Command {
    Turn { turn: TurnId, submit: Box<Submit> },
    Open { id: String, backstop: Duration, reply: Option<CallId> },
    Close(String),
    Abort(String),
}

/// What a rank reports after a step.
#[derive(Debug)]
pub(super) enum RankEvent {
    Ended {
        turn: TurnId,
        output: Box<Output>,
        tokens: Vec<u32>,
    },
    Opened {
        id: String,
        call: CallId,
        done: bool,
    },
    /// A turn has entered the scheduler.
    Entered(TurnId),
}

#[derive(Debug)]
struct Live {
    turn: TurnId,
    rid: String,
    tokens: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) core: Core,
    /// The outputs of the step that runs now, and when it ends.
    pending: Option<(Duration, Vec<Output>)>,
    inbox: VecDeque<Command>,
    live: BTreeMap<ReqKey, Live>,
    /// When the rank last made progress.
    pub(super) moved: Duration,
    /// When the rank is due next.
    pub(super) wake: Option<Duration>,
}

impl Rank {
    pub(super) fn new(config: &CoreConfig, now: Duration) -> Rank {
        Rank {
            core: Core::new(config.clone()),
            pending: None,
            inbox: VecDeque::new(),
            live: BTreeMap::new(),
            moved: now,
            wake: None,
        }
    }

    pub(super) fn push(&mut self, command: Command) {
        self.inbox.push_back(command);
    }

    /// Whether nothing runs, waits or arrives at the rank.
    pub(super) fn is_quiet(&self) -> bool {
        let facts = self.core.facts();
        self.pending.is_none() && self.inbox.is_empty() && facts.running + facts.waiting == 0
    }

    /// Whether the rank got something that it has not handled.
    pub(super) fn has_inbox(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// Returns the turns in the rank by the simulation's own count.
    pub(super) fn inside(&self) -> impl Iterator<Item = TurnId> {
        self.live.values().map(|live| live.turn)
    }

    pub(super) fn knows(&self, rid: &str) -> bool {
        let queued = |command: &Command| match command {
            Command::Turn { submit, .. } => submit.rid == rid,
            Command::Open { .. } | Command::Close(_) | Command::Abort(_) => false,
        };
        self.live.values().any(|live| live.rid == rid) || self.inbox.iter().any(queued)
    }

    /// Returns the calls that get no answer if the process dies.
    pub(super) fn unanswered(&self) -> Vec<CallId> {
        let reply = |command: &Command| match command {
            Command::Open { reply, .. } => *reply,
            Command::Turn { .. } | Command::Close(_) | Command::Abort(_) => None,
        };
        self.inbox.iter().filter_map(reply).collect()
    }

    /// Does everything that is due, and sets `wake` to when the rank is due next.
    pub(super) fn advance(&mut self, now: Duration) -> Vec<RankEvent> {
        let mut said = Vec::new();
        if let Some((due, outputs)) = self.pending.take() {
            if due > now {
                self.pending = Some((due, outputs));
                return said;
            }
            self.deliver(outputs, &mut said);
        }
        while let Some(command) = self.inbox.pop_front() {
            self.apply(now, command, &mut said);
        }
        self.wake = match self.core.step(now) {
            Some(step) => {
                self.moved = now;
                let due = now + step.busy.max(Duration::from_micros(100));
                self.pending = Some((due, step.outputs));
                Some(due)
            }
            None => self.core.next_deadline().map(|due| due.max(now + Duration::from_millis(1))),
        };
        said
    }

    fn apply(&mut self, now: Duration, command: Command, said: &mut Vec<RankEvent>) {
        match command {
            Command::Turn { turn, submit } => {
                if self.live.is_empty() {
                    self.moved = now;
                }
                let rid = submit.rid.clone();
                let key = self.core.submit(now, *submit);
                self.live.insert(key, Live { turn, rid, tokens: Vec::new() });
                said.push(RankEvent::Entered(turn));
            }
            Command::Open { id, backstop, reply } => {
                let done = self.core.open(now, &id, true, Some(backstop));
                said.extend(reply.map(|call| RankEvent::Opened { id, call, done }));
            }
            Command::Close(id) => self.core.close(&id),
            Command::Abort(rid) => {
                let outputs = self.core.abort(&rid, false);
                self.deliver(outputs, said);
            }
        }
    }

    fn deliver(&mut self, outputs: Vec<Output>, said: &mut Vec<RankEvent>) {
        for output in outputs {
            let Some(live) = self.live.get_mut(&output.key) else { continue };
            live.tokens.extend(output.token);
            if output.finish.is_some()
                && let Some(live) = self.live.remove(&output.key)
            {
                let Live { turn, tokens, .. } = live;
                said.push(RankEvent::Ended { turn, output: Box::new(output), tokens });
            }
        }
    }
}
