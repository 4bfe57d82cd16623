//! The one task that owns the ranks' cores and drives their steps in real time.
//!
//! A step's outputs become visible when the time it takes has passed; what arrives meanwhile
//! waits in the rank's inbox, as the real scheduler reads its socket between two steps. Idle, it
//! sleeps until somebody sends something or the reaper is due.

use super::{
    Config,
    core::{Core, Gauges, PoolFacts},
    request::{Finish, Output, ReqKey, Submit},
};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Duration,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

const MAILBOX_MAX: usize = 1024;
/// Requests alive at once: each holds a place for the news that its client has gone.
const LIVE_MAX: usize = 65_536;
/// A late wake-up is made up for by at most this, so that short steps keep their rate in spite of
/// the timer's granularity.
const CATCH_UP_MAX: Duration = Duration::from_millis(5);
/// The engine's idle report.
const IDLE_REPORT_EVERY: Duration = Duration::from_secs(30);

/// What a request has produced so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    pub(super) tokens: Vec<u32>,
    pub(super) finish: Option<Finish>,
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
    pub(super) retractions: u32,
    pub(super) rank: usize,
    pub(super) first_token: Option<Instant>,
}

/// Sums over the life of the server.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) requests: u64,
    pub(super) aborted: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) generation_tokens: u64,
}

/// One rank as the information routes show it.
#[derive(Clone, Debug)]
pub(super) struct RankReport {
    pub(super) facts: PoolFacts,
    pub(super) gauges: Gauges,
    pub(super) totals: Totals,
}

/// A request on its way to a rank.
#[derive(Debug)]
pub(super) struct NewTurn {
    ticket: u64,
    rank: Option<usize>,
    stream: bool,
    submit: Submit,
    progress: watch::Sender<Progress>,
}

#[derive(Debug)]
enum Command {
    Turn(Box<NewTurn>),
    Open(OpenSession, oneshot::Sender<bool>),
    Close(String),
    Abort { rid: String, all: bool },
    Flush(mpsc::Sender<bool>),
    SlowDown(Duration),
    Facts(usize, oneshot::Sender<PoolFacts>),
    Report(oneshot::Sender<Vec<RankReport>>),
}

#[derive(Clone, Debug)]
pub(super) struct OpenSession {
    pub(super) id: String,
    pub(super) streaming: bool,
    pub(super) timeout: Option<Duration>,
}

#[derive(Debug)]
enum RankCommand {
    Turn(Box<NewTurn>),
    Open(OpenSession, Option<oneshot::Sender<bool>>),
    Close(String),
    Abort { rid: String, all: bool },
    Flush(mpsc::Sender<bool>),
    SlowDown(Duration),
}

/// Speaks to the owner. Calls never answer once the engine has crashed; the caller's connection
/// is dropped instead.
#[derive(Clone, Debug)]
pub(super) struct Handle {
    commands: mpsc::Sender<Command>,
    gone: mpsc::Sender<u64>,
    dp_size: usize,
}

/// A live request, seen from its client. Dropping it is the client going away.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) progress: watch::Receiver<Progress>,
    _guard: GoneGuard,
}

#[derive(Debug)]
struct GoneGuard {
    ticket: u64,
    place: Option<mpsc::OwnedPermit<u64>>,
}

impl Drop for GoneGuard {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            place.send(self.ticket);
        }
    }
}

impl Handle {
    pub(super) async fn turn(
        &self,
        ticket: u64,
        rank: Option<usize>,
        stream: bool,
        submit: Submit,
    ) -> Turn {
        let place = self.gone.clone().reserve_owned().await.ok();
        let (sender, progress) = watch::channel(Progress::default());
        let new = NewTurn { ticket, rank, stream, submit, progress: sender };
        self.send(Command::Turn(Box::new(new))).await;
        Turn { progress, _guard: GoneGuard { ticket, place } }
    }

    pub(super) async fn open(&self, open: OpenSession) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Open(open, reply)).await;
        or_never(answer).await
    }

    pub(super) async fn close(&self, id: String) {
        self.send(Command::Close(id)).await;
    }

    pub(super) async fn abort(&self, rid: String, all: bool) {
        self.send(Command::Abort { rid, all }).await;
    }

    pub(super) async fn flush(&self) -> bool {
        let (reply, mut answers) = mpsc::channel(self.dp_size);
        self.send(Command::Flush(reply)).await;
        let mut all = true;
        for _ in 0..self.dp_size {
            match answers.recv().await {
                Some(done) => all &= done,
                None => std::future::pending().await,
            }
        }
        all
    }

    pub(super) async fn slow_down(&self, forward_sleep: Duration) {
        self.send(Command::SlowDown(forward_sleep)).await;
    }

    pub(super) async fn report(&self) -> Vec<RankReport> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Report(reply)).await;
        or_never(answer).await
    }

    pub(super) async fn facts(&self, rank: usize) -> Option<PoolFacts> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Facts(rank, reply)).await.ok()?;
        answer.await.ok()
    }

    async fn send(&self, command: Command) {
        if self.commands.send(command).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn or_never<T>(answer: oneshot::Receiver<T>) -> T {
    match answer.await {
        Ok(answer) => answer,
        Err(_) => std::future::pending().await,
    }
}

/// A request that a rank has accepted and not finished.
#[derive(Debug)]
struct Live {
    ticket: u64,
    rid: String,
    stream: bool,
    started: Instant,
    progress: watch::Sender<Progress>,
}

#[derive(Debug)]
struct Rank {
    index: usize,
    core: Core,
    inbox: VecDeque<RankCommand>,
    /// Outputs of the step that is running, and when it ends.
    pending: Option<(Instant, Vec<Output>)>,
    live: HashMap<ReqKey, Live>,
    totals: Totals,
    last_report: Instant,
}

/// The task's state.
#[derive(Debug)]
pub(super) struct Owner {
    ranks: Vec<Rank>,
    commands: mpsc::Receiver<Command>,
    gone: mpsc::Receiver<u64>,
    killed: CancellationToken,
    start: Instant,
    next_rank: usize,
    disconnect_poll: Duration,
    crash_linger: Duration,
    /// Vanished clients that did not stream, by when the engine notices.
    leaving: BTreeMap<(Instant, u64), ()>,
}

impl Owner {
    pub(super) fn new(config: &Config, killed: CancellationToken) -> (Owner, Handle) {
        let (sender, commands) = mpsc::channel(MAILBOX_MAX);
        let (gone_sender, gone) = mpsc::channel(LIVE_MAX);
        let start = Instant::now();
        let rank = |index| Rank {
            index,
            core: Core::new(config.core.clone()),
            inbox: VecDeque::new(),
            pending: None,
            live: HashMap::new(),
            totals: Totals::default(),
            last_report: start,
        };
        let owner = Owner {
            ranks: (0..config.dp_size).map(rank).collect(),
            commands,
            gone,
            killed,
            start,
            next_rank: 0,
            disconnect_poll: config.disconnect_poll,
            crash_linger: config.crash_linger,
            leaving: BTreeMap::new(),
        };
        (owner, Handle { commands: sender, gone: gone_sender, dp_size: config.dp_size })
    }

    pub(super) async fn run(mut self) {
        while !self.killed.is_cancelled() {
            while let Ok(command) = self.commands.try_recv() {
                self.dispatch(command);
            }
            while let Ok(ticket) = self.gone.try_recv() {
                self.client_gone(ticket);
            }
            let now = Instant::now();
            self.notice_leaving(now);
            let mut wake = self.leaving.first_key_value().map(|((at, _), ())| *at);
            for rank in &mut self.ranks {
                let next = rank.advance(self.start, now);
                wake = [wake, next].into_iter().flatten().min();
            }
            if let Some(reason) = self.ranks.iter().find_map(|rank| rank.core.crashed()) {
                tracing::warn!(reason, "engine crashed");
                return self.linger().await;
            }
            let killed = self.killed.clone();
            tokio::select! {
                biased;
                () = killed.cancelled() => {}
                Some(command) = self.commands.recv() => self.dispatch(command),
                Some(ticket) = self.gone.recv() => self.client_gone(ticket),
                () = sleep_until(wake) => tokio::task::yield_now().await,
            }
        }
    }

    /// The process is dying: nothing is answered any more, and then it is gone.
    async fn linger(self) {
        tokio::select! {
            () = self.killed.cancelled() => {}
            () = tokio::time::sleep(self.crash_linger) => self.killed.cancel(),
        }
    }

    fn dispatch(&mut self, command: Command) {
        match command {
            Command::Turn(turn) => {
                let rank = turn.rank.unwrap_or_else(|| {
                    self.next_rank = (self.next_rank + 1) % self.ranks.len();
                    self.next_rank
                });
                self.ranks[rank].inbox.push_back(RankCommand::Turn(turn));
            }
            Command::Open(open, reply) => {
                let mut reply = Some(reply);
                self.to_all(|| RankCommand::Open(open.clone(), reply.take()));
            }
            Command::Close(id) => self.to_all(|| RankCommand::Close(id.clone())),
            Command::Abort { rid, all } => {
                // The front process knows the live ids and drops what it doesn't know.
                let known = self.ranks.iter().any(|rank| rank.knows(&rid));
                if all || known {
                    self.to_all(|| RankCommand::Abort { rid: rid.clone(), all });
                }
            }
            Command::Flush(reply) => self.to_all(|| RankCommand::Flush(reply.clone())),
            Command::SlowDown(sleep) => self.to_all(|| RankCommand::SlowDown(sleep)),
            Command::Facts(rank, reply) => {
                let now = Instant::now();
                if let Some(rank) = self.ranks.get_mut(rank) {
                    rank.settle(rank_time(self.start, now), now);
                    rank.core.check_invariants();
                    let _ = reply.send(rank.core.facts());
                }
            }
            Command::Report(reply) => {
                let now = Instant::now();
                let time = rank_time(self.start, now);
                let report = |rank: &mut Rank| {
                    rank.settle(time, now);
                    rank.report(now)
                };
                let _ = reply.send(self.ranks.iter_mut().map(report).collect());
            }
        }
    }

    fn to_all(&mut self, mut command: impl FnMut() -> RankCommand) {
        for rank in &mut self.ranks {
            rank.inbox.push_back(command());
        }
    }

    fn client_gone(&mut self, ticket: u64) {
        let live = self.ranks.iter().flat_map(|rank| rank.live.values());
        let queued = self.ranks.iter().flat_map(|rank| rank.queued_turn(ticket));
        let Some(when) = live
            .filter(|live| live.ticket == ticket)
            .map(|live| (live.stream, live.started))
            .chain(queued.map(|turn| (turn.stream, Instant::now())))
            .next()
        else {
            return;
        };
        let (stream, started) = when;
        let now = Instant::now();
        let polls = if stream || self.disconnect_poll.is_zero() {
            0
        } else {
            let waited = now.duration_since(started).as_nanos();
            u32::try_from(waited.div_ceil(self.disconnect_poll.as_nanos()).max(1)).unwrap_or(1)
        };
        self.leaving.insert((started + self.disconnect_poll * polls, ticket), ());
    }

    fn notice_leaving(&mut self, now: Instant) {
        while let Some((&(at, ticket), ())) = self.leaving.first_key_value()
            && at <= now
        {
            self.leaving.pop_first();
            for rank in &mut self.ranks {
                let rid = rank.rid_of(ticket);
                if let Some(rid) = rid {
                    rank.inbox.push_back(RankCommand::Abort { rid, all: false });
                }
            }
        }
    }
}

/// A core's time: what has passed since the server's start.
fn rank_time(start: Instant, now: Instant) -> Duration {
    now.duration_since(start)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Rank {
    fn queued_turn(&self, ticket: u64) -> Option<&NewTurn> {
        self.inbox.iter().find_map(|command| match command {
            RankCommand::Turn(turn) if turn.ticket == ticket => Some(turn.as_ref()),
            _ => None,
        })
    }

    fn rid_of(&self, ticket: u64) -> Option<String> {
        let live = self.live.values().find(|live| live.ticket == ticket);
        let queued = || self.queued_turn(ticket).map(|turn| turn.submit.rid.clone());
        live.map(|live| live.rid.clone()).or_else(queued)
    }

    fn knows(&self, rid: &str) -> bool {
        let queued = |command: &RankCommand| match command {
            RankCommand::Turn(turn) => turn.submit.rid == rid,
            _ => false,
        };
        self.live.values().any(|live| live.rid == rid) || self.inbox.iter().any(queued)
    }

    fn report(&mut self, now: Instant) -> RankReport {
        let idle = self.live.is_empty() && self.pending.is_none();
        if idle && now.duration_since(self.last_report) >= IDLE_REPORT_EVERY {
            self.core.report_idle();
            self.last_report = now;
        }
        let gauges = self.core.gauges().clone();
        RankReport { facts: self.core.facts(), gauges, totals: self.totals }
    }

    /// Does what is due; returns when there is more to do.
    fn advance(&mut self, start: Instant, now: Instant) -> Option<Instant> {
        let mut at = now;
        if let Some((due, outputs)) = self.pending.take() {
            if due > now {
                self.pending = Some((due, outputs));
                return Some(due);
            }
            at = due.max(now.checked_sub(CATCH_UP_MAX).unwrap_or(now));
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
            None => self.core.next_deadline().map(|deadline| start + deadline),
        }
    }

    /// Applies what has arrived, unless a step runs: then it waits for the step's end.
    fn settle(&mut self, now: Duration, at: Instant) {
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
                self.live.insert(key, Live { ticket, rid, stream, started: at, progress });
            }
            RankCommand::Open(open, reply) => {
                let done = self.core.open(now, &open.id, open.streaming, open.timeout);
                if let Some(reply) = reply {
                    let _ = reply.send(done);
                }
            }
            RankCommand::Close(id) => self.core.close(&id),
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

    fn deliver(&mut self, outputs: Vec<Output>, now: Instant) {
        for output in outputs {
            let Some(live) = self.live.get(&output.key) else { continue };
            let finished = output.finish.is_some();
            live.progress.send_modify(|progress| {
                progress.tokens.extend(output.token);
                progress.prompt_tokens = output.prompt_tokens;
                progress.cached_tokens = output.cached_tokens;
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
