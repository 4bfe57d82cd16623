//! Runs the owner task: the only task that changes sessions, and the one that admits turns.
//!
//! A session is a chain of turns (one request and its answer each) that share a growing prefix. The
//! owner task holds the table of all sessions and the ledger (the account of the KV pool). Other
//! tasks send it messages through [`AgentHandle`], and it handles them one after the other. Two
//! parts of Berth inside the engine send it events: the *shim* reports the state of the pool and of
//! its sessions, and the *trimmer* compares full histories with what their sessions hold.
//!
//! For each message, the task updates [`session::Table`], which decides but does no I/O. Then it
//! carries out the effects that the table asks for, and publishes what changed. The task never
//! waits for the engine: each engine call runs in a separate task, whose result is a message too.
//!
//! Parts: `handle` has the messages, `engine`, `shim` and `trim` talk to the engine and to Berth's
//! parts in it, [`engine_monitor`] polls the engine, `reporter` publishes the state,
//! `audit_requests` runs page audits, `drain` shuts down, `volatile_prefix` warns of costly
//! prompts.

mod audit_requests;
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
    AdmittedTurn, AgentHandle, EngineNews, Error, Lease, RankPageAudit, RunModeResult,
    SessionChange, Watch,
};
use self::{
    drain::Drain,
    handle::{OwnerMessage, TurnEnd},
    reporter::session_view,
};
use crate::{
    audit::{Audits, remote::RemoteAuditor},
    engine::{EngineClient, EngineInfo, stall_detector::StallDetector},
    gpu::Gpus,
    ledger::{AgentHealth, Ledger, Limits},
    metrics::Metrics,
    session::{self, Effect, OpenResult, RouteTurns, Table, TableSettings, Turn, journal::Journal},
    shim::{
        ShimEvent, ShimHandle,
        trim::{self as shim_trim, TrimHandle},
    },
    staged_prefill_queue::StagedPrefillQueues,
};

/// The maximum number of messages that wait in the owner's mailbox. The owner handles each in
/// microseconds. When the mailbox is full, callers wait, which bounds memory.
const MESSAGES_QUEUED_MAX: usize = 1024;
/// The maximum number of session changes that a watcher may lag behind. A slower watcher must
/// subscribe again.
const SESSION_CHANGES_BEHIND_MAX: usize = 8192;
/// The shortest time between two load reports. A burst of turns then produces one report.
const REPORT_INTERVAL_MIN: Duration = Duration::from_millis(20);

/// What the owner task needs to start.
#[derive(Debug)]
pub struct OwnerSetup {
    /// The name of the agent.
    pub agent_id: String,
    /// The epoch of this agent process: the time at which it started. It differs between processes.
    pub epoch: u64,
    /// The port for turns. Routers read it in the description that the owner publishes.
    pub data_port: u16,
    /// The client of the engine.
    pub engine: EngineClient,
    /// The GPUs that the engine runs on.
    pub gpus: Gpus,
    /// The limits on admission.
    pub limits: Limits,
    /// The settings of the session table.
    pub table_settings: TableSettings,
    /// The file that lists the open sessions, so that the next agent process can close them.
    pub journal: Journal,
    /// Sends commands to the shim inside the engine.
    pub shim: ShimHandle,
    /// Answers the questions of the trimmer inside the engine.
    pub trimmer: TrimHandle,
    /// The queues of staged prefill, which computes long prompts ahead of their turns. `None` if
    /// staged prefill is off.
    pub staged_prefill_queues: Option<Arc<StagedPrefillQueues>>,
    /// The agent's metrics.
    pub metrics: Metrics,
    /// The interval between audits of each rank, which check who holds each page of the KV pool.
    /// `None`: audits are made only on demand.
    pub audit_interval: Option<Duration>,
    /// The base path of the tables in which an engine publishes its request rows. With them this
    /// process can make audits. Empty: all audits are made inside the engine.
    pub audit_table: PathBuf,
    /// The engine counts as stuck if turns wait in it and it runs nothing for this long.
    pub stall_max: Duration,
    /// The longest time between two load reports.
    pub report_interval: Duration,
}

/// Starts the owner task, and returns its handle.
#[must_use]
pub fn start(
    setup: OwnerSetup,
    shim_events: mpsc::Receiver<ShimEvent>,
    trimmer_events: mpsc::Receiver<shim_trim::TrimmerEvent>,
    tasks: &Tasks,
) -> AgentHandle {
    let (mailbox, messages) = mpsc::channel(MESSAGES_QUEUED_MAX);
    let handle = AgentHandle { mailbox };
    let owner = Owner::new(setup, tasks.clone(), handle.clone());
    tasks.spawn_essential("owner", owner.run(messages, shim_events, trimmer_events));
    handle
}

/// The state of the owner task.
struct Owner {
    setup: OwnerSetup,
    tasks: Tasks,
    /// Sends messages to this task itself: the results of engine calls.
    handle: AgentHandle,
    /// All sessions and turns.
    table: Table,
    ledger: Ledger,
    stall_detector: StallDetector,
    /// The engine's description; `None` if no engine process is known.
    engine_info: Option<Box<EngineInfo>>,
    /// Why the engine can't take turns; `None` while it can.
    down_reason: Option<String>,
    /// Why the engine makes no progress; `None` while it does.
    stuck_reason: Option<String>,
    /// Callers that wait for a turn's admission or for a session's opening, by request id.
    waiters: HashMap<String, Waiter>,
    /// Sends the ends of turns to this task. Each claimed turn reserves a place in the queue.
    turn_end_sender: mpsc::Sender<TurnEnd>,
    /// The receiver of `turn_end_sender`, until [`Owner::run`] takes it.
    turn_end_receiver: Option<mpsc::Receiver<TurnEnd>>,
    /// Sends changed sessions to the watchers.
    session_changes: broadcast::Sender<SessionChange>,
    report_sender: watch::Sender<Arc<LoadReport>>,
    description_sender: watch::Sender<Option<Arc<Description>>>,
    /// The agent's shutdown, once it has begun.
    drain: Option<Drain>,
    /// The ranks with a connected shim, and whether that shim can demote sessions. To demote a
    /// session is to free its KV but keep it open.
    connected_shims: HashMap<u32, bool>,
    /// The SGLang version reported by a connected trimmer that works; `None` without one.
    trimmer_version: Option<String>,
    /// Tasks that pass on a turn's answer and wait to learn how the turn runs (in its session or
    /// outside, for example), by request id.
    run_mode_waiters: HashMap<String, oneshot::Sender<RunModeResult>>,
    /// The page audits of all ranks: when they are due, and their newest results.
    audits: Audits,
    audit_waiters: Vec<audit_requests::AuditWaiter>,
    /// The threads of this process that audit a rank, by DP rank.
    remote_auditors: HashMap<u32, RemoteAuditor>,
    /// The places in prompts for which a warning of a volatile prefix (an early text that differs
    /// from turn to turn) was logged.
    warned_places: HashSet<Option<PromptPlace>>,
    /// Whether something may have changed since the last load report.
    is_report_stale: bool,
    last_report_at: Instant,
}

/// A caller that waits until its turn is admitted or its session is open.
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

impl Owner {
    fn new(setup: OwnerSetup, tasks: Tasks, handle: AgentHandle) -> Self {
        // Until the engine is reached no ranks are known, so no turn can be admitted.
        let engine = session::EngineCapacity {
            ranks: vec![],
            page_tokens: 1,
            context_tokens: 0,
            retentions: vec![],
        };
        let table = Table::new(setup.table_settings.clone(), engine);
        let turns_max = setup.limits.turns_max_over_ranks() + setup.table_settings.turns_queued_max;
        let (turn_end_sender, turn_end_receiver) = mpsc::channel(turns_max);
        let ledger = Ledger::new(setup.limits);
        let down_reason = Some("the engine has not answered yet".to_owned());
        let health =
            AgentHealth { unhealthy_reason: down_reason.clone(), ..AgentHealth::default() };
        let gpus = setup.gpus.snapshot();
        let report = ledger.report(now(), &table, &gpus, setup.report_interval, health);
        Self {
            tasks,
            handle,
            table,
            ledger,
            stall_detector: StallDetector::default(),
            engine_info: None,
            down_reason,
            stuck_reason: None,
            waiters: HashMap::new(),
            turn_end_sender,
            turn_end_receiver: Some(turn_end_receiver),
            session_changes: broadcast::Sender::new(SESSION_CHANGES_BEHIND_MAX),
            report_sender: watch::Sender::new(Arc::new(report)),
            description_sender: watch::Sender::new(None),
            drain: None,
            connected_shims: HashMap::new(),
            trimmer_version: None,
            run_mode_waiters: HashMap::new(),
            audits: Audits::new(setup.audit_interval),
            audit_waiters: vec![],
            remote_auditors: HashMap::new(),
            warned_places: HashSet::new(),
            is_report_stale: true,
            last_report_at: now(),
            setup,
        }
    }

    async fn run(
        mut self,
        mut messages: mpsc::Receiver<OwnerMessage>,
        mut shim_events: mpsc::Receiver<ShimEvent>,
        mut trimmer_events: mpsc::Receiver<shim_trim::TrimmerEvent>,
    ) {
        let mut turn_ends = self.turn_end_receiver.take().expect("taken once, here");
        let mut gpus = self.setup.gpus.subscribe();
        let token = self.tasks.token();
        loop {
            let deadline = self.next_deadline();
            tokio::select! {
                biased;
                // The trimmer's plan for a turn must be handled before the turn's end, so the
                // trimmer's messages come before all other messages.
                Some(event) = trimmer_events.recv() => self.handle_trimmer_event(event),
                // Ends of turns come before requests. A client may send its next turn as soon as
                // it has its answer, and the session must be free by then.
                Some(end) = turn_ends.recv() => {
                    debug!(rid = end.rid, outcome = ?end.outcome, "turn ended");
                    self.waiters.remove(&end.rid);
                    self.run_mode_waiters.remove(&end.rid);
                    self.table.end_turn(now(), &end.rid, end.outcome);
                    self.is_report_stale = true;
                }
                message = messages.recv() => match message {
                    Some(message) => self.handle_message(message),
                    None => return,
                },
                Some(event) = shim_events.recv() => self.handle_shim_event(event),
                Ok(()) = gpus.changed() => self.is_report_stale = true,
                () = tokio::time::sleep_until(deadline.into()) => {}
                () = token.cancelled() => return,
            }
            self.run_deadlines(now());
        }
    }

    /// Returns the time at which the task must act if no message comes before.
    fn next_deadline(&self) -> Instant {
        let report_interval =
            if self.is_report_stale { REPORT_INTERVAL_MIN } else { self.setup.report_interval };
        let active_drain = self.drain.as_ref().filter(|drain| drain.reply.is_some());
        let deadlines = [self.table.next_deadline(), self.audits.next_due()];
        let deadlines =
            deadlines.into_iter().chain([active_drain.map(|drain| drain.next_abort_at)]).flatten();
        deadlines.fold(self.last_report_at + report_interval, Instant::min)
    }

    fn run_deadlines(&mut self, now: Instant) {
        self.table.run_deadlines(now);
        self.run_audit_deadlines(now);
        self.carry_out_effects();
        self.advance_drain(now);
        let report_interval =
            if self.is_report_stale { REPORT_INTERVAL_MIN } else { self.setup.report_interval };
        if now >= self.last_report_at + report_interval {
            self.publish_report(now);
        }
    }

    fn handle_message(&mut self, message: OwnerMessage) {
        self.is_report_stale = true;
        match message {
            OwnerMessage::Claim { claim, requested_dp_rank, route_turns, reply } => {
                let claim = claim.as_ref().map(|(claim, key)| (claim, key));
                drop(reply.send(self.claim(claim, requested_dp_rank, route_turns)));
            }
            OwnerMessage::Admit { rid, need, prompt_start, reply } => {
                self.table.set_prompt_start(&rid, prompt_start);
                if self.table.admit(now(), &rid, need) {
                    self.waiters.insert(rid, Waiter::Turn(reply));
                }
            }
            OwnerMessage::RequestShimTable { dp_rank } => {
                self.table.mark_table_requested(dp_rank);
                // The request may fail because the shim has disconnected. The sessions whose state
                // is in doubt are then resolved when their deadline passes.
                let _ = self.setup.shim.sample_now(dp_rank);
            }
            OwnerMessage::Abandon(rid) => self.table.abandon_turn(now(), &rid),
            OwnerMessage::Open { key, retention, idle_max, requested_dp_rank, reply } => {
                self.open(key, retention, idle_max, requested_dp_rank, reply);
            }
            OwnerMessage::Close { key, reply } => {
                let closed = self.table.close_session(now(), &key).map_err(Error::from);
                let _ = reply.send(closed);
            }
            OwnerMessage::Audit { dp_rank, reply } => self.request_audit(dp_rank, reply),
            OwnerMessage::Watch(reply) => {
                let read_at = now();
                let sessions =
                    self.table.iter().map(|(key, session)| session_view(key, session, read_at));
                let watch = Watch {
                    sessions: sessions.collect(),
                    changes: self.session_changes.subscribe(),
                    report: self.report_sender.subscribe(),
                    description: self.description_sender.subscribe(),
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
            OwnerMessage::Drain { grace_period, reply } => {
                info!(turns = self.table.rids_inside().count(), "draining");
                let drain = Drain { next_abort_at: now() + grace_period, reply: Some(reply) };
                self.drain = Some(drain);
                self.table.drain(now());
            }
        }
    }

    /// Claims a turn's session, and returns the turn's lease: the proof of the claim, which ends
    /// with the turn. `claim` is `None` for a turn without a session.
    fn claim(
        &mut self,
        claim: Option<(&Claim, &SessionKey)>,
        requested_dp_rank: Option<u32>,
        route_turns: RouteTurns,
    ) -> Result<Lease, Error> {
        self.check_usable()?;
        // Reserve the place for the turn's end now, so that ending the turn never waits.
        let Ok(turn_end_permit) = self.turn_end_sender.clone().try_reserve_owned() else {
            let detail = "too many wait or run already".to_owned();
            return Err(session::Error::OutOfRoom { resource: "turns", detail }.into());
        };
        let rid = new_rid();
        self.table.claim(now(), &rid, claim, requested_dp_rank, route_turns)?;
        let vocabulary_size = self.engine_info.as_ref().and_then(|info| info.facts.vocabulary);
        Ok(Lease {
            rid,
            vocabulary_size,
            agent: self.handle.clone(),
            is_sent: false,
            turn_end_permit: Some(turn_end_permit),
        })
    }

    /// Opens a session. `reply` gets the session once it is open, or the reason why it isn't.
    fn open(
        &mut self,
        key: SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        requested_dp_rank: Option<u32>,
        reply: oneshot::Sender<Result<Session, Error>>,
    ) {
        let rid = new_rid();
        let opened = self.check_usable().and_then(|()| {
            let opened =
                self.table.open_session(now(), &rid, &key, retention, idle_max, requested_dp_rank);
            opened.map_err(Error::from)
        });
        match opened {
            Ok(()) => drop(self.waiters.insert(rid, Waiter::Open(key, reply))),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Carries out the effects that the session table asks for, in their order.
    fn carry_out_effects(&mut self) {
        let effects = self.table.take_effects();
        self.is_report_stale |= !effects.is_empty();
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
                    // A session must not be opened if it isn't in the journal. After a crash, the
                    // next agent process reads there which sessions it must close.
                    Some(reason) => {
                        self.report_open_result(incarnation, OpenResult::NotOpened(reason.clone()));
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
                Effect::Freed(time_to_free) => self.setup.metrics.record_close(time_to_free),
                Effect::VolatilePrefix(key, prefix) => self.report_volatile_prefix(&key, prefix),
                Effect::SessionEvent(key, event) => {
                    info!(session = %key.digest(), event = event.as_str(), "session event");
                    self.setup.metrics.count_session_event(event.as_str());
                }
            }
        }
    }

    /// Tells the waiting caller that its turn is admitted or its session open. If the caller is
    /// gone, it has dropped its lease, and that ends the turn.
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
                let _ = reply.send(session.ok_or(session::Error::UnknownSession.into()));
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

/// The length of a request id in bytes.
const RID_BYTES: usize = 32;

/// Returns a new random request id.
///
/// The engine aborts all requests whose id begins with the given text. All ids have the same
/// length, so no id is the beginning of another.
fn new_rid() -> String {
    let rid = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
    debug_assert_eq!(rid.len(), RID_BYTES);
    rid
}
