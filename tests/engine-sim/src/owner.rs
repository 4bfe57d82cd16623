//! The one task that owns the ranks' cores and drives their steps in real time.
//!
//! A step's outputs become visible after the step's duration. Commands that arrive during a step
//! wait in the rank's inbox, as the real scheduler reads its socket between two steps. An idle task
//! sleeps until a command arrives or the reaper is due.

use self::rank::{EngineRank, RankCommand};
use super::{
    Config,
    core::{Core, Gauges, PoolFacts},
    kv::publisher,
    request::{Finish, Space, Submit},
};
use std::{collections::BTreeMap, time::Duration};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};
use tokio_util::sync::{CancellationToken, DropGuard};

mod rank;

const MAILBOX_MAX: usize = 1024;
/// The most requests alive at once; each reserves a slot in the channel that reports a gone client.
const LIVE_MAX: usize = 65_536;

/// The output and figures of a request so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    pub(super) tokens: Vec<u32>,
    pub(super) finish: Option<Finish>,
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
    pub(super) host_tokens: usize,
    pub(super) retractions: u32,
    pub(super) rank: usize,
    pub(super) first_token: Option<Instant>,
}

/// Sums since the start of the server.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) requests: u64,
    pub(super) aborted: u64,
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) generation_tokens: u64,
}

/// One rank's figures for the information routes.
#[derive(Clone, Debug)]
pub(super) struct RankReport {
    pub(super) facts: PoolFacts,
    pub(super) gauges: Gauges,
    pub(super) totals: Totals,
    /// When the scheduler made the report, by the wall clock.
    pub(super) made_at: f64,
}

/// Why the schedulers do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standstill {
    /// They hang, and take no commands.
    Hung,
    /// They are paused, as `/pause_generation` asks. They obey commands, and run nothing.
    Paused,
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
    Demote(usize, String, oneshot::Sender<bool>),
    Prefetch(usize, (String, usize), oneshot::Sender<Result<usize, &'static str>>),
    Abort { rid: String, all: bool },
    Flush(mpsc::Sender<bool>),
    SlowDown(Duration),
    Stand(Option<Standstill>),
    Facts(usize, oneshot::Sender<PoolFacts>),
    Cached(usize, oneshot::Sender<Vec<(Space, Vec<u32>)>>),
    Report(oneshot::Sender<Vec<RankReport>>),
}

#[derive(Clone, Debug)]
pub(super) struct OpenSession {
    pub(super) id: String,
    pub(super) streaming: bool,
    pub(super) timeout: Option<Duration>,
}

/// A handle to the owner task. After a crash its calls never return; the caller's connection is
/// dropped instead.
#[derive(Clone, Debug)]
pub(super) struct EngineHandle {
    commands: mpsc::Sender<Command>,
    gone: mpsc::Sender<u64>,
    dp_size: usize,
}

/// A live request, as its client sees it. Dropping the value reports that the client has gone.
#[derive(Debug)]
pub(super) struct EngineTurn {
    pub(super) progress: watch::Receiver<Progress>,
    _guard: TurnGuard,
}

/// What reports that a request's client has gone.
#[derive(Debug)]
#[expect(dead_code, reason = "only dropped")]
enum TurnGuard {
    Rank(GoneGuard),
    HandOff(DropGuard),
}

impl EngineTurn {
    /// Returns a request that is handed over to another engine, or by one. `gone` ends when the
    /// value is dropped.
    pub(super) fn handed_over(
        progress: watch::Receiver<Progress>,
        gone: CancellationToken,
    ) -> EngineTurn {
        EngineTurn { progress, _guard: TurnGuard::HandOff(gone.drop_guard()) }
    }
}

/// Reports, when dropped, that a request's client has gone.
#[derive(Debug)]
pub(super) struct GoneGuard {
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

impl EngineHandle {
    pub(super) async fn turn(
        &self,
        ticket: u64,
        rank: Option<usize>,
        stream: bool,
        submit: Submit,
    ) -> EngineTurn {
        let (sender, progress) = watch::channel(Progress::default());
        let guard = self.turn_into(ticket, rank, stream, submit, sender).await;
        EngineTurn { progress, _guard: TurnGuard::Rank(guard) }
    }

    /// Submits a request whose progress goes into `progress`.
    pub(super) async fn turn_into(
        &self,
        ticket: u64,
        rank: Option<usize>,
        stream: bool,
        submit: Submit,
        progress: watch::Sender<Progress>,
    ) -> GoneGuard {
        let place = self.gone.clone().reserve_owned().await.ok();
        let new = NewTurn { ticket, rank, stream, submit, progress };
        self.send(Command::Turn(Box::new(new))).await;
        GoneGuard { ticket, place }
    }

    pub(super) async fn open(&self, open: OpenSession) -> bool {
        or_never(self.ask(|reply| Command::Open(open, reply)).await).await
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

    /// Stops the schedulers, or lets them go on. Reports then are the last ones before.
    pub(super) async fn stand(&self, standstill: Option<Standstill>) {
        self.send(Command::Stand(standstill)).await;
    }

    pub(super) async fn report(&self) -> Vec<RankReport> {
        or_never(self.ask(Command::Report).await).await
    }

    /// Demotes a session on one rank; `None` if the engine has ended.
    pub(super) async fn demote(&self, rank: usize, id: String) -> Option<bool> {
        self.ask(|reply| Command::Demote(rank, id, reply)).await
    }

    /// Loads a session's KV on one rank; `None` if the engine has ended.
    pub(super) async fn prefetch(
        &self,
        rank: usize,
        id: String,
        tokens_max: usize,
    ) -> Option<Result<usize, &'static str>> {
        self.ask(|reply| Command::Prefetch(rank, (id, tokens_max), reply)).await
    }

    pub(super) async fn facts(&self, rank: usize) -> Option<PoolFacts> {
        self.ask(|reply| Command::Facts(rank, reply)).await
    }

    pub(super) async fn cached(&self, rank: usize) -> Option<Vec<(Space, Vec<u32>)>> {
        self.ask(|reply| Command::Cached(rank, reply)).await
    }

    /// Sends a command with a reply; returns `None` if the engine has ended.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }

    async fn send(&self, command: Command) {
        if self.commands.send(command).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn or_never<T>(answer: Option<T>) -> T {
    match answer {
        Some(answer) => answer,
        None => std::future::pending().await,
    }
}

/// The state of the owner task.
#[derive(Debug)]
pub(super) struct Owner {
    ranks: Vec<EngineRank>,
    commands: mpsc::Receiver<Command>,
    gone: mpsc::Receiver<u64>,
    killed: CancellationToken,
    /// Why the schedulers do nothing; `None` if they work.
    standstill: Option<Standstill>,
    /// While the schedulers do nothing: their last reports.
    last_reports: Option<Vec<RankReport>>,
    start: Instant,
    next_rank: usize,
    disconnect_poll: Duration,
    crash_linger: Duration,
    /// The non-streaming requests whose client has gone, keyed by when the engine notices.
    leaving: BTreeMap<(Instant, u64), ()>,
}

impl Owner {
    pub(super) fn new(
        config: &Config,
        publishers: &[publisher::PublisherHandle],
        killed: CancellationToken,
    ) -> (Owner, EngineHandle) {
        let (sender, commands) = mpsc::channel(MAILBOX_MAX);
        let (gone_sender, gone) = mpsc::channel(LIVE_MAX);
        let start = Instant::now();
        let rank = |index| {
            let core = Core::new(config.core.clone());
            EngineRank::new(index, core, publishers.get(index).cloned(), start)
        };
        let owner = Owner {
            ranks: (0..config.dp_size).map(rank).collect(),
            commands,
            gone,
            killed,
            standstill: None,
            last_reports: None,
            start,
            next_rank: 0,
            disconnect_poll: config.disconnect_poll,
            crash_linger: config.crash_linger,
            leaving: BTreeMap::new(),
        };
        (owner, EngineHandle { commands: sender, gone: gone_sender, dp_size: config.dp_size })
    }

    pub(super) async fn run(mut self) {
        // A broken invariant panics in this task; the guard then ends the whole server.
        let _ends_all = self.killed.clone().drop_guard();
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
                let next = match self.standstill {
                    None => rank.advance(self.start, now),
                    Some(Standstill::Paused) => rank.stand(self.start, now),
                    Some(Standstill::Hung) => None,
                };
                wake = [wake, next].into_iter().flatten().min();
            }
            if let Some(reason) = self.ranks.iter().find_map(EngineRank::crashed) {
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

    /// Answers nothing while the process dies, then ends the server.
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
                self.ranks[rank].push(RankCommand::Turn(turn));
            }
            Command::Open(open, reply) => {
                let mut reply = Some(reply);
                self.each_rank(|| RankCommand::Open(open.clone(), reply.take()));
            }
            Command::Close(id) => self.each_rank(|| RankCommand::Close(id.clone())),
            Command::Demote(rank, id, reply) => {
                if let Some(rank) = self.ranks.get_mut(rank) {
                    rank.push(RankCommand::Demote(id, reply));
                }
            }
            Command::Prefetch(rank, session, reply) => {
                if let Some(rank) = self.ranks.get_mut(rank) {
                    rank.push(RankCommand::Prefetch(session, reply));
                }
            }
            Command::Abort { rid, all } => {
                // The engine's front process knows the live ids and ignores an abort of an unknown
                // id.
                let known = self.ranks.iter().any(|rank| rank.knows(&rid));
                if all || known {
                    self.each_rank(|| RankCommand::Abort { rid: rid.clone(), all });
                }
            }
            Command::Flush(reply) => self.each_rank(|| RankCommand::Flush(reply.clone())),
            Command::SlowDown(sleep) => self.each_rank(|| RankCommand::SlowDown(sleep)),
            Command::Stand(standstill) => {
                let reports = self.reports();
                self.last_reports = standstill.map(|_| reports);
                self.standstill = standstill;
            }
            Command::Facts(rank, reply) => {
                let now = Instant::now();
                if let Some(rank) = self.ranks.get_mut(rank) {
                    rank.settle(rank_time(self.start, now), now);
                    let _ = reply.send(rank.checked_facts());
                }
            }
            Command::Cached(rank, reply) => {
                let now = Instant::now();
                if let Some(rank) = self.ranks.get_mut(rank) {
                    rank.settle(rank_time(self.start, now), now);
                    let _ = reply.send(rank.cached());
                }
            }
            Command::Report(reply) => {
                let _ = reply.send(self.reports());
            }
        }
    }

    fn reports(&mut self) -> Vec<RankReport> {
        if let Some(reports) = &self.last_reports {
            return reports.clone();
        }
        let now = Instant::now();
        let time = rank_time(self.start, now);
        let report = |rank: &mut EngineRank| {
            rank.settle(time, now);
            rank.report(now)
        };
        self.ranks.iter_mut().map(report).collect()
    }

    fn each_rank(&mut self, mut command: impl FnMut() -> RankCommand) {
        for rank in &mut self.ranks {
            rank.push(command());
        }
    }

    fn client_gone(&mut self, ticket: u64) {
        let Some((stream, started)) = self.ranks.iter().find_map(|rank| rank.client(ticket)) else {
            return;
        };
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
                    rank.push(RankCommand::Abort { rid, all: false });
                }
            }
        }
    }
}

/// Returns a core's time: the time since the server's start.
fn rank_time(start: Instant, now: Instant) -> Duration {
    now.duration_since(start)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        // Tokio's timer rounds up to a millisecond, also for a pass that took no time.
        Some(at) if at <= Instant::now() => {}
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
