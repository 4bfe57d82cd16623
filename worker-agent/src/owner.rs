//! The owner task: owns the sessions and the ledger, and handles messages one after the other.
//!
//! It decides with the pure [`session::Table`]. For each message it updates the table, carries out
//! the resulting effects, and publishes what changed. It never waits for the engine: each engine
//! call runs in a separate task, whose result comes back as a message.

mod audit_desk;
mod drain;
mod engine;
pub mod engine_monitor;
mod handle;
mod reporter;
mod shim;
mod trim;
mod volatile_prefix;

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{
    claim::Claim,
    id::SessionKey,
    load::{Description, LoadReport, PromptPlace, Retention, Session},
};
use service::{clock::now, tasks::Tasks};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tracing::{debug, error, info};

pub use self::handle::{
    AdmittedTurn, AgentHandle, Change, EngineNews, Error, Lease, RankPages, RunModeResult, Watch,
};
use self::{
    drain::Drain,
    handle::{OwnerMessage, TurnEnd},
    reporter::session_view,
};
use crate::{
    audit::{Audits, remote::Remote},
    engine::{Engine, Info, stall_detector::StallDetector},
    gpu::Gpus,
    ledger::{AgentHealth, Ledger, Limits},
    metrics::Metrics,
    session::{self, Effect, OpenResult, PinnedInput, Rules, Table, Turn, journal::Journal},
    shim::{
        ShimEvent, ShimHandle,
        trim::{self as shim_trim, TrimHandle},
    },
    staged_prefill_queue::Queues,
};

/// The maximum number of requests that wait in the owner's mailbox. The owner handles each in
/// microseconds. When the mailbox is full, callers wait, which bounds memory.
const MAILBOX: usize = 1024;
/// The maximum number of session changes that a watcher may lag behind; beyond it the watcher must
/// subscribe again.
const CHANGES_BEHIND_MAX: usize = 8192;
/// The shortest time between two reports, so that a burst of turns produces one report.
const REPORT_GAP: Duration = Duration::from_millis(20);

/// What the owner task needs to start.
#[derive(Debug)]
pub struct OwnerSetup {
    /// The name of the agent.
    pub agent_id: String,
    /// The epoch of this agent process.
    pub epoch: u64,
    /// The port for turns, published in the description.
    pub data_port: u16,
    /// The client of the engine.
    pub engine: Engine,
    /// The GPUs that the engine runs on.
    pub gpus: Gpus,
    /// The limits on admission.
    pub limits: Limits,
    /// The rules of the session table.
    pub rules: Rules,
    /// The journal of open sessions, which outlives the process.
    pub journal: Journal,
    /// Sends commands to the shim inside the engine.
    pub shim: ShimHandle,
    /// Answers questions of the trimmer inside the engine.
    pub trim: TrimHandle,
    /// The queues of staged prefill; `None` if it is off.
    pub queues: Option<Arc<Queues>>,
    /// The agent's metrics.
    pub metrics: Metrics,
    /// The interval between page audits of each rank; `None`: only on demand.
    pub audit_interval: Option<Duration>,
    /// The base path of the row tables that engines publish for audits from this process; empty:
    /// none.
    pub audit_table: PathBuf,
    /// An engine is stuck if turns wait and nothing runs for this long.
    pub stall_max: Duration,
    /// The longest time between two load reports.
    pub report_interval: Duration,
}

/// Starts the owner task, and returns its handle.
#[must_use]
pub fn start(
    setup: OwnerSetup,
    shim_news: mpsc::Receiver<ShimEvent>,
    trim_news: mpsc::Receiver<shim_trim::TrimmerEvent>,
    tasks: &Tasks,
) -> AgentHandle {
    let (mailbox, messages) = mpsc::channel(MAILBOX);
    let handle = AgentHandle { mailbox };
    let owner = Owner::new(setup, tasks.clone(), handle.clone());
    tasks.essential("owner", owner.run(messages, shim_news, trim_news));
    handle
}

/// The state of the owner task.
struct Owner {
    setup: OwnerSetup,
    tasks: Tasks,
    handle: AgentHandle,
    table: Table,
    ledger: Ledger,
    stall_detector: StallDetector,
    engine_info: Option<Box<Info>>,
    /// Why the engine can't take turns; `None` while it can.
    down_reason: Option<String>,
    /// Why the engine makes no progress; `None` while it does.
    stuck_reason: Option<String>,
    /// Callers that wait for a turn's admission or for a session's opening, by request id.
    waiters: HashMap<String, Waiter>,
    end_sender: mpsc::Sender<TurnEnd>,
    end_receiver: Option<mpsc::Receiver<TurnEnd>>,
    changes: broadcast::Sender<Change>,
    report: watch::Sender<Arc<LoadReport>>,
    description: watch::Sender<Option<Arc<Description>>>,
    drain: Option<Drain>,
    /// The ranks with a connected shim, and whether that shim can demote sessions.
    connected_shims: HashMap<u32, bool>,
    /// The SGLang version reported by a connected trimmer that works; `None` without one.
    trimmer_version: Option<String>,
    /// Exchanges that wait to learn how their turn runs, by request id.
    run_mode_waiters: HashMap<String, oneshot::Sender<RunModeResult>>,
    audits: Audits,
    audit_waiters: Vec<audit_desk::Waiter>,
    /// The threads that audit ranks from this process, by DP rank.
    remote_audits: HashMap<u32, Remote>,
    /// The places of volatile prefixes for which a warning was logged.
    warned_places: HashSet<Option<PromptPlace>>,
    dirty: bool,
    last_report: Instant,
}

enum Waiter {
    Turn(oneshot::Sender<Result<AdmittedTurn, Error>>),
    Open(SessionKey, oneshot::Sender<Result<Session, Error>>),
}

impl Waiter {
    fn refuse(self, error: Error) {
        match self {
            Self::Turn(reply) => drop(reply.send(Err(error))),
            Self::Open(_, reply) => drop(reply.send(Err(error))),
        }
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl Owner {
    fn new(setup: OwnerSetup, tasks: Tasks, handle: AgentHandle) -> Self {
        // Until the engine is reached no ranks are known, so no turn can be admitted.
        let engine = session::EngineCapacity {
            ranks: vec![],
            page_tokens: 1,
            context_tokens: 0,
            retentions: vec![],
        };
        let table = Table::new(setup.rules.clone(), engine);
        let turns_max = setup.limits.turns_everywhere_max() + setup.rules.turns_queued_max;
        let (ends, ended) = mpsc::channel(turns_max);
        let ledger = Ledger::new(setup.limits);
        let down = Some("the engine has not answered yet".to_owned());
        let health = AgentHealth { unhealthy: down.clone(), ..AgentHealth::default() };
        let gpus = setup.gpus.snapshot();
        let report = ledger.report(now(), &table, &gpus, setup.report_interval, health);
        Self {
            tasks,
            handle,
            table,
            ledger,
            stall_detector: StallDetector::default(),
            engine_info: None,
            down_reason: down,
            stuck_reason: None,
            waiters: HashMap::new(),
            end_sender: ends,
            end_receiver: Some(ended),
            changes: broadcast::Sender::new(CHANGES_BEHIND_MAX),
            report: watch::Sender::new(Arc::new(report)),
            description: watch::Sender::new(None),
            drain: None,
            connected_shims: HashMap::new(),
            trimmer_version: None,
            run_mode_waiters: HashMap::new(),
            audits: Audits::new(setup.audit_interval),
            audit_waiters: vec![],
            remote_audits: HashMap::new(),
            warned_places: HashSet::new(),
            dirty: true,
            last_report: now(),
            setup,
        }
    }

    async fn run(
        mut self,
        mut messages: mpsc::Receiver<OwnerMessage>,
        mut shim_news: mpsc::Receiver<ShimEvent>,
        mut trim_news: mpsc::Receiver<shim_trim::TrimmerEvent>,
    ) {
        let mut ended = self.end_receiver.take().expect("taken once, here");
        let mut gpus = self.setup.gpus.watch();
        let token = self.tasks.token();
        loop {
            let wake = self.next_deadline();
            tokio::select! {
                biased;
                // A turn's plan must be handled before its end.
                Some(news) = trim_news.recv() => self.handle_trim_news(news),
                // Ends come before requests: a client that has its answer may send the next turn at
                // once.
                Some(end) = ended.recv() => {
                    debug!(rid = end.rid, outcome = ?end.outcome, "turn ended");
                    self.waiters.remove(&end.rid);
                    self.run_mode_waiters.remove(&end.rid);
                    self.table.end_turn(now(), &end.rid, end.outcome);
                    self.dirty = true;
                }
                message = messages.recv() => match message {
                    Some(message) => self.handle_message(message),
                    None => return,
                },
                Some(news) = shim_news.recv() => self.handle_shim_news(news),
                Ok(()) = gpus.changed() => self.dirty = true,
                () = tokio::time::sleep_until(wake.into()) => {}
                () = token.cancelled() => return,
            }
            self.run_deadlines(now());
        }
    }

    /// Returns the time at which something is due without a message.
    fn next_deadline(&self) -> Instant {
        let gap = if self.dirty { REPORT_GAP } else { self.setup.report_interval };
        let drain = self.drain.as_ref().filter(|drain| drain.done.is_some());
        let others = [self.table.next_deadline(), self.audits.next_due()];
        let others = others.into_iter().chain([drain.map(|drain| drain.deadline)]).flatten();
        others.fold(self.last_report + gap, Instant::min)
    }

    fn run_deadlines(&mut self, now: Instant) {
        self.table.run_deadlines(now);
        self.run_audit_deadlines(now);
        self.carry_out_effects();
        self.advance_drain(now);
        let gap = if self.dirty { REPORT_GAP } else { self.setup.report_interval };
        if now >= self.last_report + gap {
            self.publish_report(now);
        }
    }

    fn handle_message(&mut self, message: OwnerMessage) {
        self.dirty = true;
        match message {
            OwnerMessage::Claim { claim, rank, pinned_input, reply } => {
                let claim = claim.as_ref().map(|(claim, key)| (claim, key));
                drop(reply.send(self.claim(claim, rank, pinned_input)));
            }
            OwnerMessage::Admit { rid, need, prompt_start, reply } => {
                self.table.set_prompt_start(&rid, prompt_start);
                if self.table.admit(now(), &rid, need) {
                    self.waiters.insert(rid, Waiter::Turn(reply));
                }
            }
            OwnerMessage::RequestShimTable { dp_rank } => {
                self.table.mark_table_requested(dp_rank);
                // If the shim can't be asked, the suspect sessions are resolved by their deadline.
                let _ = self.setup.shim.sample_now(dp_rank);
            }
            OwnerMessage::Abandon(rid) => self.table.abandon_turn(now(), &rid),
            OwnerMessage::Open { key, retention, idle_max, rank, reply } => {
                self.open(key, retention, idle_max, rank, reply);
            }
            OwnerMessage::Close { key, reply } => {
                let closed = self.table.close_session(now(), &key).map_err(Error::from);
                let _ = reply.send(closed);
            }
            OwnerMessage::Audit { dp_rank, reply } => self.request_audit(dp_rank, reply),
            OwnerMessage::Watch(reply) => {
                let at = now();
                let watch = Watch {
                    sessions: self.table.iter().map(|(key, s)| session_view(key, s, at)).collect(),
                    changes: self.changes.subscribe(),
                    report: self.report.subscribe(),
                    description: self.description.subscribe(),
                };
                let _ = reply.send(watch);
            }
            OwnerMessage::Engine(news) => self.handle_engine_news(news),
            OwnerMessage::OpenResult { incarnation, result } => {
                self.table.handle_open_result(now(), &incarnation, &result);
            }
            OwnerMessage::CloseResult { incarnation, result } => {
                self.table.handle_close_result(now(), &incarnation, result);
            }
            OwnerMessage::RemoteAudit { dp_rank, answer } => {
                self.handle_remote_audit(dp_rank, answer)
            }
            OwnerMessage::Drain { limit, done } => {
                info!(turns = self.table.rids_inside().count(), "draining");
                let drain = Drain { deadline: now() + limit, done: Some(done) };
                self.drain = Some(drain);
                self.table.drain(now());
            }
        }
    }

    /// Claims a turn's session, and returns the turn's lease.
    fn claim(
        &mut self,
        claim: Option<(&Claim, &SessionKey)>,
        rank: Option<u32>,
        pinned_input: PinnedInput,
    ) -> Result<Lease, Error> {
        self.check_usable()?;
        // Reserves the place for the turn's end now, so that ending the turn never waits.
        let Ok(end) = self.end_sender.clone().try_reserve_owned() else {
            let detail = "too many wait or run already".to_owned();
            return Err(session::Error::OutOfRoom { resource: "turns", detail }.into());
        };
        let rid = new_rid();
        self.table.claim(now(), &rid, claim, rank, pinned_input)?;
        let vocabulary = self.engine_info.as_ref().and_then(|info| info.facts.vocabulary);
        Ok(Lease { rid, vocabulary, agent: self.handle.clone(), is_sent: false, end: Some(end) })
    }

    /// Opens a session; `reply` gets it once it is open.
    fn open(
        &mut self,
        key: SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        rank: Option<u32>,
        reply: oneshot::Sender<Result<Session, Error>>,
    ) {
        let rid = new_rid();
        let opened = self.check_usable().and_then(|()| {
            let opened = self.table.open_session(now(), &rid, &key, retention, idle_max, rank);
            opened.map_err(Error::from)
        });
        match opened {
            Ok(()) => drop(self.waiters.insert(rid, Waiter::Open(key, reply))),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Carries out the table's effects in order.
    fn carry_out_effects(&mut self) {
        let effects = self.table.take_effects();
        self.dirty |= !effects.is_empty();
        let mut journal_error = None;
        for effect in effects {
            match effect {
                Effect::Admitted { rid, turn } => self.tell_admitted(&rid, turn),
                Effect::Refused { rid, error } => {
                    if let Some(waiter) = self.waiters.remove(&rid) {
                        waiter.refuse(error.into());
                    }
                }
                Effect::Journal(record) => {
                    if let Err(error) = self.setup.journal.write(&record) {
                        error!(%error, "the journal can't be written");
                        journal_error = Some(error.to_string());
                    }
                }
                Effect::Open { incarnation, idle_max } => match &journal_error {
                    // A session that isn't in the journal must not be opened: the next agent could
                    // not find it to close it.
                    Some(reason) => {
                        self.report_open_result(incarnation, OpenResult::No(reason.clone()));
                    }
                    None => self.open_at_engine(incarnation, idle_max),
                },
                Effect::Close(close) => self.close_at_engine(close),
                Effect::RequestShimTable { dp_rank, rid } => self.request_shim_table(dp_rank, rid),
                Effect::Demote { dp_rank, incarnation } => self.demote(dp_rank, &incarnation),
                Effect::AnswerQuestion { question, incarnation, tokens_max } => {
                    self.answer_question(question, incarnation.as_deref(), tokens_max);
                }
                Effect::RunModeKnown { rid, run_mode } => self.tell_run_mode(&rid, run_mode),
                Effect::RefusedByShim { rid, error } => self.tell_refused_by_shim(&rid, error),
                Effect::SessionChanged(key) => self.publish_session(&key),
                Effect::Freed(after) => self.setup.metrics.record_close(after),
                Effect::VolatilePrefix(key, found) => self.report_volatile_prefix(&key, found),
                Effect::SessionEvent(key, event) => {
                    info!(session = %key.digest(), event = event.as_str(), "session event");
                    self.setup.metrics.count_session_event(event.as_str());
                }
            }
        }
    }

    /// Tells the waiting caller that its turn is admitted or its session open. A caller that is
    /// gone has dropped its lease, which ends the turn.
    fn tell_admitted(&mut self, rid: &str, turn: Turn) {
        match self.waiters.remove(rid) {
            Some(Waiter::Turn(reply)) => {
                let run_mode =
                    turn.session.is_some().then(|| self.run_mode_receiver(rid, turn.run_mode));
                drop(reply.send(Ok(AdmittedTurn { turn, run_mode })));
            }
            Some(Waiter::Open(key, reply)) => {
                let session =
                    self.table.get(&key).map(|session| session_view(&key, session, now()));
                let _ = reply.send(session.ok_or(session::Error::Unknown.into()));
            }
            None => {}
        }
    }

    /// Refuses a request while the agent drains or the engine is down.
    fn check_usable(&self) -> Result<(), Error> {
        if self.drain.is_some() {
            return Err(Error::Stopping);
        }
        self.down_reason.clone().map_or(Ok(()), |reason| Err(Error::EngineDown(reason)))
    }
}

/// The length of a turn's id in bytes. It is fixed because the engine aborts by prefix.
const RID_BYTES: usize = 32;

/// Returns a new request id. Ids are random, so that none is a prefix of another: the engine aborts
/// by prefix.
fn new_rid() -> String {
    let rid = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
    debug_assert_eq!(rid.len(), RID_BYTES);
    rid
}
