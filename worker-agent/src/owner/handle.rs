//! Defines the handle by which other tasks send requests to the owner task, and its messages.
//!
//! The owner task keeps the agent's sessions and admits turns. A session is a chain of turns (one
//! request and its answer each) that share a growing prefix. [`AgentHandle`] sends the requests of
//! the data port, the control port and the engine monitor, and returns the owner's answers.
//! [`Lease`] represents one turn from its claim to its end. Both only send messages: the session
//! table in the owner task decides.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proto::{
    claim::Claim,
    control::Effect,
    id::SessionKey,
    load::{Description, LoadReport, PageAudit, Retention, Session, Weights},
    turn_rid::TurnRid,
};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::drain::{DrainState, Ending};
use super::engine_control::ControlEnd;
use super::published::{PublishedSession, SessionSnapshot};
use crate::{
    audit::{self, SessionPages},
    engine::{
        EngineInfo, LoadSample, PriorityOrder,
        answer_signs::AnswerSigns,
        control::{ControlOutcome, ControlRequest, WeightsLabel},
    },
    session::{
        self, CloseResult, Need, OpenResult, Outcome, PromptStart, RouteTurns, RunMode, Turn,
    },
};

/// Why the agent refuses a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The session table refuses the request.
    #[error(transparent)]
    Session(#[from] session::Error),
    /// The engine can't take turns now.
    #[error("the engine can't be used: {reason}")]
    EngineDown {
        /// Why.
        reason: String,
        /// Since when.
        since: Instant,
    },
    /// The agent is shutting down.
    #[error("this agent is shutting down; use another worker")]
    Stopping,
    /// The engine's memory can't be released while turns run.
    #[error(
        "turns run in the engine, which would die if its memory were released now; pause it first, \
         or wait until they have ended"
    )]
    EngineBusy,
}

/// A change to one session, sent to all watchers.
#[derive(Debug, Clone)]
pub enum SessionChange {
    /// The session was opened, or something about it changed.
    Upsert(Arc<PublishedSession>),
    /// The session was removed from the table.
    Removed(SessionKey),
}

/// The sessions for a new watcher, and a receiver of their later changes. `changes` contains every
/// change made after `sessions` was read.
#[derive(Debug)]
pub struct SessionWatch {
    /// All sessions.
    pub sessions: SessionSnapshot,
    /// All later changes to sessions.
    pub changes: broadcast::Receiver<SessionChange>,
}

/// A message from the engine monitor, the task that follows the engine's state.
#[derive(Debug)]
pub enum EngineNews {
    /// The engine answers. The description names the engine's process.
    Up(Box<EngineInfo>),
    /// A load sample.
    Sample(LoadSample),
    /// The names of the LoRA adapters that are loaded, in order.
    Adapters(Vec<String>),
    /// Whether the prefill engine's bootstrap server takes connections, or why not.
    Bootstrap(Result<(), String>),
    /// The engine's label of its weights.
    Weights {
        /// The label.
        label: WeightsLabel,
        /// When the engine was asked for it.
        asked_at: Instant,
    },
    /// The engine refused the connection of a turn, so the process that the turn was for has ended.
    RefusesConnections {
        /// The number of that process: [`Lease::engine_process`].
        process: u64,
    },
    /// The engine doesn't answer.
    Down {
        /// The reason, as a text for operators.
        reason: String,
        /// Whether the engine's process has ended. Otherwise it may only answer slowly.
        has_process_ended: bool,
    },
}

/// A message to the owner task.
#[derive(Debug)]
pub(super) enum OwnerMessage {
    /// Claims a turn's session. The answer is the turn's lease. `principal` is the client that sent
    /// the turn. `claim` is `None` for a turn
    /// without a session. `requested_dp_rank` is the DP rank that the turn's sender demands, if
    /// any. `route_turns` says which turns of a pinned session the turn's HTTP route supports.
    Claim {
        principal: String,
        claim: Option<(Claim, SessionKey)>,
        /// Whether the client only hinted at the session.
        is_hint: bool,
        requested_dp_rank: Option<u32>,
        route_turns: RouteTurns,
        reply: oneshot::Sender<Result<Lease, Error>>,
    },
    /// Admits a claimed turn as soon as the engine has room for it.
    Admit {
        rid: String,
        need: Need,
        prompt_start: PromptStart,
        reply: oneshot::Sender<Result<AdmittedTurn, Error>>,
    },
    /// The client of the turn with this request id is gone.
    Abandon(String),
    /// The rank's shim must be asked for its session table.
    /// Opens a session without a turn.
    Open {
        key: SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        requested_dp_rank: Option<u32>,
        reply: oneshot::Sender<Result<OpenedSession, Error>>,
    },
    /// Closes a session. The answer says whether the close waits for a running turn. With
    /// `only_if_idle`, a session with a turn is not closed.
    Close { key: SessionKey, only_if_idle: bool, reply: oneshot::Sender<Result<bool, Error>> },
    /// Demotes a pinned session. The answer comes when the engine has done that, or can't.
    Demote { key: SessionKey, reply: oneshot::Sender<Result<(), Error>> },
    /// Audits which session holds each page of the rank's KV pool.
    Audit { dp_rank: u32, reply: oneshot::Sender<Result<RankPageAudit, audit::Error>> },
    /// Subscribes to the sessions. The answer has the current ones.
    WatchSessions(oneshot::Sender<SessionWatch>),
    /// A control call is about to be sent to the engine.
    BeginControl { effect: Effect, reply: oneshot::Sender<Result<(), Error>> },
    /// A control call has ended.
    EndControl(ControlEnd),
    /// A message from the engine monitor.
    Engine(EngineNews),
    /// The engine's answer to a request to open an incarnation (one life of a session in the
    /// engine).
    OpenResult { incarnation: String, result: OpenResult },
    /// The engine's answer to a request to close an incarnation.
    CloseResult { incarnation: String, result: CloseResult },
    /// The result of an audit that was made in this process.
    RemoteAudit { dp_rank: u32, answer: audit::remote::RemoteAnswer },
    /// The agent shuts down. Running turns may continue for `grace_period`.
    Drain { grace_period: Duration, ending: Ending, reply: oneshot::Sender<()> },
    /// The operator drains the agent, or ends that. The answer says what is left.
    SetDrained { wanted: bool, reply: oneshot::Sender<DrainState> },
}

/// A session that a client has opened without a turn.
#[derive(Debug)]
pub struct OpenedSession {
    /// The session.
    pub session: Session,
    /// Whether it was open before.
    pub was_open: bool,
}

/// The result of a requested audit of one rank's pages.
#[derive(Debug)]
pub struct RankPageAudit {
    /// The totals and the findings.
    pub pages: PageAudit,
    /// The sessions that hold pages, largest first. The key is `None` for a session that isn't the
    /// agent's.
    pub sessions: Vec<(Option<SessionKey>, SessionPages)>,
}

/// A turn that may now be sent to the engine.
#[derive(Debug)]
pub struct AdmittedTurn {
    /// The turn's session, rank and limits, which are written into the request to the engine.
    pub turn: Turn,
    /// Receives how the turn runs; `None` for a turn without a session.
    pub run_mode: Option<oneshot::Receiver<RunModeResult>>,
}

/// How an admitted turn runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnRun {
    /// How it runs.
    pub run_mode: RunMode,
    /// KV tokens reserved for it beyond its session's history. `None` if it doesn't run in a pinned
    /// session.
    pub growth_tokens_max: Option<u64>,
}

/// How an admitted turn runs, or why the shim (Berth's part inside the engine) refuses it.
pub type RunModeResult = Result<TurnRun, session::Error>;

/// The end of a turn, as sent to the owner.
#[derive(Debug)]
pub(super) struct TurnEnd {
    pub(super) rid: String,
    pub(super) outcome: Outcome,
}

/// A turn's claim on its session, and on room in the engine.
///
/// The lease claims the session before the turn's body is read, and the room when the turn is
/// admitted. Both claims end exactly once: in [`Lease::finish`], or when the lease is dropped.
#[derive(Debug)]
pub struct Lease {
    /// The turn's request id inside the engine.
    pub rid: String,
    /// Why the turn was claimed without the session at which its client hinted. `None` if it has
    /// claimed its session, or has none.
    pub session_left_out: Option<session::Error>,
    /// In which order the engine takes requests by their priority, if it does.
    pub priority_order: Option<PriorityOrder>,
    /// The size of the model's vocabulary, if known.
    pub vocabulary_size: Option<u32>,
    /// The name of the engine's model, if known.
    pub served_model: Option<Arc<str>>,
    /// The number of the engine process that the turn is for: how many were known before it.
    pub engine_process: u64,
    pub(super) agent: AgentHandle,
    /// Whether the turn was sent to the engine.
    pub(super) is_sent: bool,
    /// A reserved place in the owner's queue for the turn's end, so that ending the turn never
    /// waits. `None` once the turn has ended.
    pub(super) turn_end_permit: Option<mpsc::OwnedPermit<TurnEnd>>,
}

impl Lease {
    /// Waits until the engine has room for the turn, and returns how to send the turn. For a
    /// session's first turn, this also waits until the session is open at the engine.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn wait_for_admission(
        &self,
        need: Need,
        prompt_start: PromptStart,
    ) -> Result<AdmittedTurn, Error> {
        let rid = self.rid.clone();
        self.agent.request(|reply| OwnerMessage::Admit { rid, need, prompt_start, reply }).await?
    }

    /// Reports that the turn's client is gone. The caller aborts the turn and waits for its end.
    pub async fn report_abandoned(&self) {
        // Sending fails only if the owner task has ended. Then the agent is stopping, and nobody
        // needs this message.
        let _ = self.agent.mailbox.send(OwnerMessage::Abandon(self.rid.clone())).await;
    }

    /// Marks the turn as sent to the engine. Dropping the lease then reports [`Outcome::Lost`],
    /// because the engine may have run the turn.
    pub fn mark_sent(&mut self) {
        self.is_sent = true;
    }

    /// Ends the turn with this outcome, and frees its session for the next turn.
    pub fn finish(mut self, outcome: Outcome) {
        self.end_turn_with(outcome);
    }

    fn end_turn_with(&mut self, outcome: Outcome) {
        if let Some(turn_end_permit) = self.turn_end_permit.take() {
            let rid = std::mem::take(&mut self.rid);
            turn_end_permit.send(TurnEnd { rid, outcome });
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end_turn_with(if self.is_sent { Outcome::Lost } else { Outcome::Refused });
    }
}

/// The handle by which all other tasks send requests to the owner task, and read what it publishes.
#[derive(Debug, Clone)]
pub struct AgentHandle {
    pub(super) mailbox: mpsc::Sender<OwnerMessage>,
    /// Sends the ends of turns to the owner task. Each claimed turn reserves a place in the queue.
    pub(super) turn_ends: mpsc::Sender<TurnEnd>,
    /// The newest load report.
    pub report: watch::Receiver<Arc<LoadReport>>,
    /// The newest description; `None` until the agent has reached the engine.
    pub description: watch::Receiver<Option<Arc<Description>>>,
    /// The engine's weights.
    pub weights: watch::Receiver<Weights>,
    /// Where turns note the signs of life in their answers.
    pub answer_signs: AnswerSigns,
}

impl AgentHandle {
    /// Claims a turn's session for a client, before the turn's body is read. If the client only
    /// hinted at the session (`is_hint`), and the session can't take the turn, claims the turn
    /// without the session, unless a client has opened the session.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn claim(
        &self,
        principal: String,
        claim: Option<(Claim, SessionKey)>,
        is_hint: bool,
        requested_dp_rank: Option<u32>,
        route_turns: RouteTurns,
    ) -> Result<Lease, Error> {
        self.request(|reply| OwnerMessage::Claim {
            principal,
            claim,
            is_hint,
            requested_dp_rank,
            route_turns,
            reply,
        })
        .await?
    }

    /// Opens a session, and returns it. Returns the existing session if it is already open.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn open_session(
        &self,
        key: SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        requested_dp_rank: Option<u32>,
    ) -> Result<OpenedSession, Error> {
        self.request(|reply| OwnerMessage::Open {
            key,
            retention,
            idle_max,
            requested_dp_rank,
            reply,
        })
        .await?
    }

    /// Closes a session. Returns whether the close waits for a running turn.
    ///
    /// # Errors
    /// If no session has this key, or if it has a turn and is to be closed only without one.
    pub async fn close_session(&self, key: SessionKey, only_if_idle: bool) -> Result<bool, Error> {
        self.request(|reply| OwnerMessage::Close { key, only_if_idle, reply }).await?
    }

    /// Demotes a pinned session between two turns: gives its KV to the engine's radix tree, and
    /// keeps its history. Returns when that is done, after seconds at most.
    ///
    /// # Errors
    /// If there is no such session, if it is not pinned or not at rest, or if the engine can't do
    /// it.
    pub async fn demote_session(&self, key: SessionKey) -> Result<(), Error> {
        self.request(|reply| OwnerMessage::Demote { key, reply }).await?
    }

    /// Prepares for a control call that the caller is about to send to the engine. The caller must
    /// call [`Self::end_control`] afterwards.
    ///
    /// # Errors
    /// When the call must not be sent now.
    pub async fn begin_control(&self, effect: Effect) -> Result<(), Error> {
        self.request(|reply| OwnerMessage::BeginControl { effect, reply }).await?
    }

    /// Reports the end of a control call. `label` is the engine's label of its weights after the
    /// call, if it was read.
    pub async fn end_control(
        &self,
        effect: Effect,
        request: ControlRequest,
        outcome: ControlOutcome,
        label: Option<WeightsLabel>,
    ) {
        let end = ControlEnd { effect, request, outcome, label };
        // Sending fails only if the owner task has ended. Then the agent is stopping.
        let _ = self.mailbox.send(OwnerMessage::EndControl(end)).await;
    }

    /// Requests a page audit of a rank now.
    ///
    /// # Errors
    /// The outer error says that the agent is stopping. The inner error says why there is no audit.
    pub async fn audit(&self, dp_rank: u32) -> Result<Result<RankPageAudit, audit::Error>, Error> {
        self.request(|reply| OwnerMessage::Audit { dp_rank, reply }).await
    }

    /// Returns all sessions and subscribes to their changes.
    ///
    /// # Errors
    /// If the agent is stopping.
    pub async fn watch_sessions(&self) -> Result<SessionWatch, Error> {
        self.request(OwnerMessage::WatchSessions).await
    }

    /// Sends the owner news of the engine.
    pub async fn report_engine(&self, news: EngineNews) {
        // Sending fails only if the owner task has ended. Then the agent is stopping, and nobody
        // needs this message.
        let _ = self.mailbox.send(OwnerMessage::Engine(news)).await;
    }

    /// Drains the agent for its operator, or ends that: routers place no new sessions here while
    /// the agent drains. Returns what is left. A load report says it before this returns.
    ///
    /// # Errors
    /// If the agent is stopping.
    pub async fn set_drained(&self, wanted: bool) -> Result<DrainState, Error> {
        self.request(|reply| OwnerMessage::SetDrained { wanted, reply }).await
    }

    /// Drains the agent: refuses new requests, lets running turns continue for up to
    /// `grace_period`, then aborts them, and closes all sessions or hands them over. Returns when
    /// no turn runs, and no close is pending or everything is handed over.
    pub async fn drain(&self, grace_period: Duration, ending: Ending) {
        let _ = self.request(|reply| OwnerMessage::Drain { grace_period, ending, reply }).await;
    }

    async fn request<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> OwnerMessage,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(message(reply)).await.map_err(|_| Error::Stopping)?;
        answer.await.map_err(|_| Error::Stopping)
    }
}

/// Returns a new request id that nobody can guess, for a turn of `principal` at this agent.
pub(super) fn new_turn_rid(agent_id: &str, principal: &str) -> String {
    TurnRid::compose(random_number(), agent_id, principal)
}

/// Returns a new id for a request that the engine never sees.
pub(super) fn new_rid() -> String {
    format!("{:032x}", random_number())
}

fn random_number() -> u128 {
    let mut bytes = [0; size_of::<u128>()];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    u128::from_be_bytes(bytes)
}
