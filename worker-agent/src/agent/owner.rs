//! The owner task: takes one message after the other, changes the table and the ledger, publishes
//! what changed, and gives what must be done at the engine to tasks of their own.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{
    claim::Claim,
    id::SessionKey,
    load::{Description, LoadReport, Retention, Session},
    process::tasks::Tasks,
};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tracing::{debug, error, info, warn};

use super::{AgentHandle, Change, End, EngineNews, Error, Lease, Message, Setup, Watch};
use crate::{
    engine::Info,
    ledger::Ledger,
    session::{self, Appends, Close, Table, Turn},
};

/// Session changes a watcher may be behind before it must watch again.
const CHANGES_BEHIND_MAX: usize = 8192;
/// Reports are at least this far apart, so that a burst of turns is one report.
const REPORT_GAP: Duration = Duration::from_millis(20);
/// The engine's own limit on idle sessions is so much longer than the agent's, for the case that no
/// agent ever comes back. The engine counts from a turn's start, so a turn has to fit.
const ENGINE_BACKSTOP: Duration = Duration::from_secs(24 * 3600);
/// While a drain's time is up, what runs is aborted this often.
const ABORT_AGAIN: Duration = Duration::from_millis(500);
/// A close that did not get through is tried again after this long.
const CLOSE_RETRY: Duration = Duration::from_millis(500);

/// Everything the task owns.
pub(super) struct Owner {
    setup: Setup,
    tasks: Tasks,
    handle: AgentHandle,
    table: Table,
    ledger: Ledger,
    info: Option<Box<Info>>,
    /// Why the engine can't take turns; none while it can.
    down: Option<String>,
    /// Who waits for an incarnation to open.
    opening: HashMap<String, Vec<Waiter>>,
    /// Turns inside the engine, by rid.
    running: HashMap<String, Option<SessionKey>>,
    ends: mpsc::Sender<End>,
    ended: Option<mpsc::Receiver<End>>,
    changes: broadcast::Sender<Change>,
    report: watch::Sender<Arc<LoadReport>>,
    description: watch::Sender<Option<Arc<Description>>>,
    draining: Option<Drain>,
    dirty: bool,
    reported: Instant,
}

enum Waiter {
    Turn { turn: Turn, reply: oneshot::Sender<Result<Lease, Error>> },
    Open(oneshot::Sender<Result<Session, Error>>),
}

struct Drain {
    /// From then on what runs is aborted, again and again: an abort may come before its turn.
    deadline: Instant,
    done: Option<oneshot::Sender<()>>,
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Owner {
    pub(super) fn new(setup: Setup, tasks: Tasks, handle: AgentHandle) -> Self {
        let prefix = format!("berth-{}-{:x}", setup.agent_id, setup.epoch);
        let engine = session::Engine { ranks: vec![], page_tokens: 1, retentions: vec![] };
        // Before the engine was reached there are no ranks, so nothing can be let in.
        let table = Table::new(prefix, setup.idle_max, engine);
        let (ends, ended) = mpsc::channel(setup.limits.turns_everywhere_max());
        let ledger = Ledger::new(setup.limits);
        let down = Some("the engine was not reached yet".to_owned());
        let report = ledger.report(now(), &table, &[], setup.report_interval, &down, false);
        Self {
            tasks,
            handle,
            table,
            ledger,
            info: None,
            down,
            opening: HashMap::new(),
            running: HashMap::new(),
            ends,
            ended: Some(ended),
            changes: broadcast::Sender::new(CHANGES_BEHIND_MAX),
            report: watch::Sender::new(Arc::new(report)),
            description: watch::Sender::new(None),
            draining: None,
            dirty: true,
            reported: now(),
            setup,
        }
    }

    pub(super) async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        let mut ended = self.ended.take().expect("taken once, here");
        let mut devices = self.setup.devices.clone();
        let token = self.tasks.token();
        loop {
            let wake = self.next_deadline();
            tokio::select! {
                biased;
                // Ends first: a client that has its answer may send the next turn at once.
                Some(end) = ended.recv() => self.end(&end),
                message = messages.recv() => match message {
                    Some(message) => self.handle(message),
                    None => return,
                },
                Ok(()) = devices.changed() => self.dirty = true,
                () = tokio::time::sleep_until(wake.into()) => {}
                () = token.cancelled() => return,
            }
            self.on_time(now());
        }
    }

    /// When something is due without anyone asking.
    fn next_deadline(&self) -> Instant {
        let gap = if self.dirty { REPORT_GAP } else { self.setup.report_interval };
        let drain = self.draining.as_ref().filter(|drain| drain.done.is_some());
        [Some(self.reported + gap), self.table.next_expiry(), drain.map(|drain| drain.deadline)]
            .into_iter()
            .flatten()
            .min()
            .expect("a report is always due some time")
    }

    fn on_time(&mut self, now: Instant) {
        for key in self.table.expire(now) {
            info!(session = %key.digest(), "session expired");
            self.touched(&key);
        }
        for key in self.table.take_displaced() {
            self.touched(&key);
        }
        for close in self.table.take_closes() {
            self.carry_out(close);
        }
        self.drain_step(now);
        let gap = if self.dirty { REPORT_GAP } else { self.setup.report_interval };
        if now >= self.reported + gap {
            self.publish(now);
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Begin { claim, rank, appends, reply } => {
                let claim = claim.as_ref().map(|(claim, key)| (claim, key));
                self.begin(claim, rank, appends, reply);
            }
            Message::Open { key, retention, idle_max, rank, reply } => {
                self.open(&key, retention, idle_max, rank, reply);
            }
            Message::Close { key, reply } => {
                let closed = self.close(&key);
                let _ = reply.send(closed);
            }
            Message::Watch(reply) => {
                let at = now();
                let watch = Watch {
                    sessions: self.table.iter().map(|(key, s)| shown(key, s, at)).collect(),
                    changes: self.changes.subscribe(),
                    report: self.report.subscribe(),
                    description: self.description.subscribe(),
                };
                let _ = reply.send(watch);
            }
            Message::Engine(news) => self.news(news),
            Message::Opened { key, incarnation, result } => {
                self.opened(&key, &incarnation, &result);
            }
            Message::Closed(incarnation) => {
                self.table.closed(&incarnation);
                self.dirty = true;
            }
            Message::Drain { limit, done } => {
                info!(turns = self.running.len(), "draining");
                let drain = Drain { deadline: now() + limit, done: Some(done) };
                self.draining = Some(drain);
                self.table.close_all();
                self.dirty = true;
            }
        }
    }

    fn begin(
        &mut self,
        claim: Option<(&Claim, &SessionKey)>,
        rank: Option<u32>,
        appends: Appends,
        reply: oneshot::Sender<Result<Lease, Error>>,
    ) {
        if let Err(error) = self.usable() {
            let _ = reply.send(Err(error));
            return;
        }
        let turn = match self.table.begin(now(), claim, rank, appends) {
            Ok(turn) => turn,
            Err(error) => {
                let _ = reply.send(Err(error.into()));
                return;
            }
        };
        self.dirty = true;
        if let Some((claim, key)) = claim {
            self.touched(key);
            if claim.close {
                // It takes effect when this turn has ended, and shuts the door for others now.
                let _ = self.table.close(key);
            }
        }
        match turn.session.clone() {
            Some(session) if session.must_open => {
                let waiter = Waiter::Turn { turn, reply };
                self.open_at_engine(&session.key, session.incarnation, waiter);
            }
            _ => self.let_in(turn, reply),
        }
    }

    /// Hands out the lease. A caller that has gone drops it, which ends the turn.
    fn let_in(&mut self, turn: Turn, reply: oneshot::Sender<Result<Lease, Error>>) {
        let rid = rid();
        let end = self.ends.clone().try_reserve_owned();
        let end = end.expect("the queue has room for every turn the table lets in");
        let key = turn.session.as_ref().map(|session| session.key.clone());
        self.running.insert(rid.clone(), key);
        let vocabulary = self.info.as_ref().and_then(|info| info.facts.vocabulary);
        drop(reply.send(Ok(Lease { rid, turn, vocabulary, sent: false, end: Some(end) })));
    }

    fn end(&mut self, end: &End) {
        self.running.remove(&end.rid);
        debug!(rid = end.rid, outcome = ?end.outcome, "turn ended");
        self.table.end(now(), &end.turn, end.outcome);
        if let Some(session) = &end.turn.session {
            self.touched(&session.key);
        }
        self.dirty = true;
    }

    fn open(
        &mut self,
        key: &SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        rank: Option<u32>,
        reply: oneshot::Sender<Result<Session, Error>>,
    ) {
        let opened = match self.usable() {
            Ok(()) => self.table.open(now(), key, retention, idle_max, rank).map_err(Error::from),
            Err(error) => Err(error),
        };
        match opened {
            Err(error) => drop(reply.send(Err(error))),
            Ok(None) => {
                let session = self.table.get(key).expect("it was just opened");
                let _ = reply.send(Ok(shown(key, session, now())));
                self.touched(key);
            }
            Ok(Some(incarnation)) => {
                self.open_at_engine(key, incarnation, Waiter::Open(reply));
                self.touched(key);
            }
        }
        self.dirty = true;
    }

    /// Asks the engine once per incarnation; later waiters join the first.
    fn open_at_engine(&mut self, key: &SessionKey, incarnation: String, waiter: Waiter) {
        let waiters = self.opening.entry(incarnation.clone()).or_default();
        waiters.push(waiter);
        if waiters.len() > 1 {
            return;
        }
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        let key = key.clone();
        let idle_max = self.table.get(&key).map_or(Duration::ZERO, session::Session::idle_max);
        self.tasks.spawn(async move {
            let opened = engine.open_session(&incarnation, idle_max + ENGINE_BACKSTOP).await;
            let result = opened.map_err(|error| error.to_string());
            let _ = mailbox.send(Message::Opened { key, incarnation, result }).await;
        });
    }

    fn opened(&mut self, key: &SessionKey, incarnation: &str, result: &Result<(), String>) {
        let waiters = self.opening.remove(incarnation).unwrap_or_default();
        self.table.opened(key, incarnation, result.is_ok());
        for waiter in waiters {
            match (waiter, result) {
                (Waiter::Turn { turn, reply }, Ok(())) => self.let_in(turn, reply),
                (Waiter::Turn { reply, .. }, Err(reason)) => {
                    let _ = reply.send(Err(Error::OpenFailed(reason.clone())));
                }
                (Waiter::Open(reply), Ok(())) => {
                    let session = self.table.get(key).map(|session| shown(key, session, now()));
                    let _ = reply.send(session.ok_or(session::Error::Unknown.into()));
                }
                (Waiter::Open(reply), Err(reason)) => {
                    let _ = reply.send(Err(Error::OpenFailed(reason.clone())));
                }
            }
        }
        self.touched(key);
        self.dirty = true;
    }

    fn close(&mut self, key: &SessionKey) -> Result<bool, Error> {
        let deferred = self.table.close(key)?;
        self.touched(key);
        self.dirty = true;
        Ok(deferred)
    }

    /// Tells the engine to close, until it has heard it.
    fn carry_out(&mut self, close: Close) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        let token = self.tasks.token();
        self.tasks.spawn(async move {
            while let Err(error) = engine.close_session(&close.incarnation).await {
                warn!(incarnation = close.incarnation, %error, "close did not get through");
                tokio::select! {
                    () = token.cancelled() => return,
                    () = tokio::time::sleep(CLOSE_RETRY) => {}
                }
            }
            let _ = mailbox.send(Message::Closed(close.incarnation)).await;
        });
    }

    fn news(&mut self, news: EngineNews) {
        match news {
            EngineNews::Up(info) => self.engine_up(info),
            EngineNews::Sample(sample) => self.ledger.sampled(sample),
            EngineNews::Down { reason, gone } => {
                if self.down.is_none() {
                    error!(reason, gone, "engine down");
                }
                self.down = Some(reason);
                if gone {
                    self.engine_gone();
                }
            }
        }
        self.dirty = true;
    }

    /// The engine's process has ended, and every session's KV and history with it.
    fn engine_gone(&mut self) {
        let Some(info) = self.info.take() else { return };
        let sessions = self.table.iter().count();
        warn!(sessions, "the engine's process is gone, its sessions are lost");
        let keys: Vec<SessionKey> = self.table.iter().map(|(key, _)| key.clone()).collect();
        self.table.engine_lost(self.ledger.engine(&info));
        keys.iter().for_each(|key| self.touched(key));
    }

    fn engine_up(&mut self, info: Box<Info>) {
        let known = self.info.as_ref().map(|info| &info.facts.instance);
        if known != Some(&info.facts.instance) {
            self.engine_gone();
            self.table.engine_lost(self.ledger.engine(&info));
            info!(version = info.facts.version, ranks = info.rows.len(), "engine up");
            // Who hears of the new ranks must find them in the newest report.
            self.publish(now());
            self.description.send_replace(Some(Arc::new(self.describe(&info))));
        }
        self.info = Some(info);
        self.down = None;
    }

    fn describe(&self, info: &Info) -> Description {
        Description {
            agent_id: self.setup.agent_id.clone(),
            epoch: self.setup.epoch,
            data_port: self.setup.data_port,
            engine: info.facts.clone(),
            ranks: self.ledger.ranks(&self.setup.devices.borrow()),
            retentions: info.retentions(),
        }
    }

    fn usable(&self) -> Result<(), Error> {
        if self.draining.is_some() {
            return Err(Error::Stopping);
        }
        self.down.clone().map_or(Ok(()), |reason| Err(Error::EngineDown(reason)))
    }

    /// Tells watchers about one session.
    fn touched(&self, key: &SessionKey) {
        if self.changes.receiver_count() == 0 {
            return;
        }
        let change = match self.table.get(key) {
            Some(session) => Change::Upsert(Box::new(shown(key, session, now()))),
            None => Change::Removed(key.clone()),
        };
        let _ = self.changes.send(change);
    }

    fn publish(&mut self, now: Instant) {
        let devices = self.setup.devices.borrow().clone();
        let interval = self.setup.report_interval;
        let draining = self.draining.is_some();
        let report = self.ledger.report(now, &self.table, &devices, interval, &self.down, draining);
        self.report.send_replace(Arc::new(report));
        self.reported = now;
        self.dirty = false;
    }

    /// Ends the drain when nothing is left, aborts what runs when its time is up.
    fn drain_step(&mut self, now: Instant) {
        let Some(drain) = &mut self.draining else { return };
        let left = self.running.len() + self.table.closes_pending() + self.opening.len();
        let gone = self.info.is_none() && self.running.is_empty();
        if left == 0 || gone {
            if let Some(done) = drain.done.take() {
                let _ = done.send(());
            }
            return;
        }
        if now >= drain.deadline {
            drain.deadline = now + ABORT_AGAIN;
            warn!(turns = self.running.len(), "drain time is up, aborting turns");
            let engine = self.setup.engine.clone();
            let rids: Vec<String> = self.running.keys().cloned().collect();
            self.tasks.spawn(async move {
                // The Responses API's turns have their own prefix there.
                let named = rids.iter().flat_map(|rid| [rid.clone(), format!("resp_{rid}")]);
                for rid in named {
                    if let Err(error) = engine.abort(&rid).await {
                        warn!(rid, %error, "abort did not get through");
                    }
                }
            });
        }
    }
}

/// A session as shown outside.
fn shown(key: &SessionKey, session: &session::Session, now: Instant) -> Session {
    Session {
        key: key.clone(),
        retention: session.retention,
        state: session.state(),
        dp_rank: session.dp_rank,
        turns: session.turns,
        turns_running: session.running,
        exclusive: session.exclusive,
        resident_tokens: crate::ledger::resident(session),
        idle: session.idle(now),
    }
}

/// A turn's id: random, so that it never is the beginning of another one.
fn rid() -> String {
    let rid = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
    debug_assert_eq!(rid.len(), crate::request::RID_BYTES);
    rid
}
