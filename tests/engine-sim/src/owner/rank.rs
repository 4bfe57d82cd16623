//! One rank in real time: its core, its waiting commands, and the clients of its requests.

use super::{
    super::{
        core::{Core, PoolFacts},
        http::wall_seconds,
        kv::publisher,
        request::{Finish, Output, ReqKey, Space},
    },
    NewTurn, OpenSession, Progress, RankReport, Totals, rank_time,
};
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

/// The most by which the next step is moved up after a late wake-up, so that short steps keep their
/// rate in spite of the timer's granularity.
const CATCH_UP_MAX: Duration = Duration::from_millis(5);
/// The interval of the engine's idle report.
const IDLE_REPORT_EVERY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) enum RankCommand {
    Turn(Box<NewTurn>),
    Open(OpenSession, Option<oneshot::Sender<bool>>),
    Close(String),
    Demote(String, oneshot::Sender<bool>),
    Prefetch((String, usize), oneshot::Sender<Result<usize, &'static str>>),
    Abort { rid: String, all: bool },
    Flush(mpsc::Sender<bool>),
    SlowDown(Duration),
}

/// A request that the rank has accepted and not finished.
#[derive(Debug)]
pub(super) struct LiveRequest {
    ticket: u64,
    rid: String,
    stream: bool,
    started: Instant,
    progress: watch::Sender<Progress>,
}

#[derive(Debug)]
pub(super) struct EngineRank {
    index: usize,
    core: Core,
    inbox: VecDeque<RankCommand>,
    /// The running step's end and its outputs.
    pending: Option<(Instant, Vec<Output>)>,
    publisher: Option<publisher::PublisherHandle>,
    live: HashMap<ReqKey, LiveRequest>,
    totals: Totals,
    last_report: Instant,
}

impl EngineRank {
    pub(super) fn new(
        index: usize,
        core: Core,
        publisher: Option<publisher::PublisherHandle>,
        start: Instant,
    ) -> EngineRank {
        EngineRank {
            index,
            core,
            inbox: VecDeque::new(),
            pending: None,
            publisher,
            live: HashMap::new(),
            totals: Totals::default(),
            last_report: start,
        }
    }

    pub(super) fn crashed(&self) -> Option<&'static str> {
        self.core.crashed()
    }

    /// Queues a command. If a step runs, the command takes effect at the step's end.
    pub(super) fn push(&mut self, command: RankCommand) {
        self.inbox.push_back(command);
    }

    pub(super) fn checked_facts(&self) -> PoolFacts {
        self.core.check_invariants();
        self.core.facts()
    }

    pub(super) fn cached(&self) -> Vec<(Space, Vec<u32>)> {
        self.core.cached()
    }

    /// Returns whether a live request streams, and when it started.
    pub(super) fn client(&self, ticket: u64) -> Option<(bool, Instant)> {
        let live = self.live.values().find(|live| live.ticket == ticket);
        let queued = || self.queued_turn(ticket).map(|turn| (turn.stream, Instant::now()));
        live.map(|live| (live.stream, live.started)).or_else(queued)
    }

    fn queued_turn(&self, ticket: u64) -> Option<&NewTurn> {
        self.inbox.iter().find_map(|command| match command {
            RankCommand::Turn(turn) if turn.ticket == ticket => Some(turn.as_ref()),
            _ => None,
        })
    }

    pub(super) fn rid_of(&self, ticket: u64) -> Option<String> {
        let live = self.live.values().find(|live| live.ticket == ticket);
        let queued = || self.queued_turn(ticket).map(|turn| turn.submit.rid.clone());
        live.map(|live| live.rid.clone()).or_else(queued)
    }

    pub(super) fn knows(&self, rid: &str) -> bool {
        let queued = |command: &RankCommand| match command {
            RankCommand::Turn(turn) => turn.submit.rid == rid,
            _ => false,
        };
        self.live.values().any(|live| live.rid == rid) || self.inbox.iter().any(queued)
    }

    pub(super) fn report(&mut self, now: Instant) -> RankReport {
        let idle = self.live.is_empty() && self.pending.is_none();
        if idle && now.duration_since(self.last_report) >= IDLE_REPORT_EVERY {
            self.core.report_idle();
            self.last_report = now;
        }
        let gauges = self.core.gauges().clone();
        let made_at = wall_seconds();
        RankReport { facts: self.core.facts(), gauges, totals: self.totals, made_at }
    }

    /// Does the work that is due. Returns the time of the next work, if there is any.
    pub(super) fn advance(&mut self, start: Instant, now: Instant) -> Option<Instant> {
        let mut at = now;
        if let Some((due, outputs)) = self.pending.take() {
            if due > now {
                self.pending = Some((due, outputs));
                return Some(due);
            }
            at = due.max(now.checked_sub(CATCH_UP_MAX).unwrap_or(now));
            // Publishes before the answers, so a client with an answer knows that its events are on
            // their way.
            self.publish();
            self.deliver(outputs, now);
        }
        self.settle(rank_time(start, now), now);
        let since_start = at.duration_since(start);
        match self.core.step(since_start) {
            Some(step) => {
                let due = at + step.busy;
                self.pending = Some((due, step.outputs));
                self.last_report = now;
                Some(due)
            }
            None => {
                self.publish();
                self.core.next_deadline().map(|deadline| start + deadline)
            }
        }
    }

    /// Ends a running step and applies commands, but begins no step: the rank is paused. Returns
    /// the time of the next work, if there is any.
    pub(super) fn stand(&mut self, start: Instant, now: Instant) -> Option<Instant> {
        if let Some((due, outputs)) = self.pending.take() {
            if due > now {
                self.pending = Some((due, outputs));
                return Some(due);
            }
            self.deliver(outputs, now);
        }
        self.settle(rank_time(start, now), now);
        self.publish();
        None
    }

    /// Applies the waiting commands, unless a step is running.
    pub(super) fn settle(&mut self, now: Duration, at: Instant) {
        if self.pending.is_some() || self.core.crashed().is_some() {
            return;
        }
        while let Some(command) = self.inbox.pop_front() {
            self.apply(command, now, at);
        }
    }

    fn apply(&mut self, command: RankCommand, now: Duration, at: Instant) {
        match command {
            RankCommand::Turn(turn) => {
                let NewTurn { ticket, stream, submit, progress, .. } = *turn;
                let rid = submit.rid.clone();
                progress.send_modify(|p| p.rank = self.index);
                let key = self.core.submit(now, submit);
                self.totals.requests += 1;
                self.live.insert(key, LiveRequest { ticket, rid, stream, started: at, progress });
            }
            RankCommand::Open(open, reply) => {
                let done = self.core.open(now, &open.id, open.streaming, open.timeout);
                if let Some(reply) = reply {
                    let _ = reply.send(done);
                }
            }
            RankCommand::Close(id) => self.core.close(&id),
            RankCommand::Demote(id, reply) => drop(reply.send(self.core.demote(&id))),
            RankCommand::Prefetch((id, tokens_max), reply) => {
                let _ = reply.send(self.core.prefetch(&id, tokens_max));
            }
            RankCommand::Abort { rid, all } => {
                let outputs = self.core.abort(&rid, all);
                self.deliver(outputs, at);
            }
            RankCommand::Flush(reply) => {
                let _ = reply.try_send(self.core.flush());
            }
            RankCommand::SlowDown(sleep) => self.core.slow_down(sleep),
        }
    }

    fn publish(&mut self) {
        let batches = self.core.take_batches();
        if let Some(publisher) = &self.publisher {
            batches.into_iter().for_each(|batch| publisher.publish(batch));
        }
    }

    fn deliver(&mut self, outputs: Vec<Output>, now: Instant) {
        for output in outputs {
            let Some(live) = self.live.get(&output.key) else { continue };
            let finished = output.finish.is_some();
            live.progress.send_modify(|progress| {
                progress.tokens.extend(output.token);
                progress.prompt_tokens = output.prompt_tokens;
                progress.cached_tokens = output.cached_tokens;
                progress.host_tokens = output.host_tokens;
                progress.retractions = output.retractions;
                progress.first_token = progress.first_token.or(output.token.map(|_| now));
                progress.finish = output.finish;
            });
            if finished && let Some(live) = self.live.remove(&output.key) {
                self.count(&live.progress.borrow());
            }
        }
    }

    fn count(&mut self, progress: &Progress) {
        let aborted = matches!(progress.finish, Some(Finish::Abort { .. }));
        self.totals.aborted += u64::from(aborted);
        self.totals.prompt_tokens += progress.prompt_tokens as u64;
        self.totals.cached_tokens += progress.cached_tokens as u64;
        self.totals.generation_tokens += progress.tokens.len() as u64;
    }
}
