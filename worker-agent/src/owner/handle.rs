//! Defines the handle by which other tasks send requests to the owner task, and its messages.
//!
//! The handle and the [`TurnLease`] only send messages. The owner task's session table decides.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use contract::{
    control::Effect,
    id::SessionKey,
    load::{Description, LoadReport, PageAudit, Session},
    turn_rid::TurnRid,
};
use service::{random, refusal::Code};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::drain::{DrainState, Ending};
use super::engine_control::{BegunCall, ControlEnd, PublishedWeights};
use super::published::{PublishedSession, SessionSnapshot};
use super::turn_gate::OpenGate;
use crate::{
    audit::{self, SessionPages},
    engine::{
        BodyFacts, EngineInfo, LoadSample,
        answer_signs::AnswerSigns,
        control::{ControlOutcome, ControlRequest, WeightsLabel},
    },
    session::{
        self, ClaimRequest, CloseResult, Need, OpenRequest, OpenResult, Outcome, PlannedTurn,
        PromptStart, RunMode,
    },
};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Session(#[from] session::Error),
    #[error("the engine can't be used: {reason}")]
    EngineDown {
        reason: String,
        /// Since when the engine is down.
        since: Instant,
    },
    #[error("this agent is shutting down; use another worker")]
    Stopping,
    #[error(
        "turns run in the engine, or it loads KV ahead of one, and it would die if its memory were \
         released now; pause it first, or wait until they have ended"
    )]
    EngineBusy,
}

#[derive(Debug, Clone)]
pub enum SessionChange {
    Upsert(Arc<PublishedSession>),
    Removed(SessionKey),
}

/// `changes` contains every change made after `sessions` was read.
#[derive(Debug)]
pub struct SessionWatch {
    pub sessions: SessionSnapshot,
    pub changes: broadcast::Receiver<SessionChange>,
}

#[derive(Debug)]
pub enum EngineNews {
    /// The description names the engine's process.
    Up(Box<EngineInfo>),
    Sample(LoadSample),
    /// Sorted, so that an equal list means no change.
    Adapters(Vec<String>),
    /// Whether the prefill engine's bootstrap server takes connections, or why not.
    Bootstrap(Result<(), String>),
    Weights {
        label: WeightsLabel,
        /// When the engine was asked for the label.
        asked_at: Instant,
    },
    /// The engine refused the connection of a turn, so the turn's process has ended.
    RefusesConnections {
        /// [`TurnLease::engine_process`].
        process: u64,
    },
    Down {
        /// A text for operators.
        reason: String,
        /// If false, the engine may only answer slowly.
        has_process_ended: bool,
    },
}

#[derive(Debug)]
pub(super) enum OwnerMessage {
    Claim {
        request: ClaimRequest,
        reply: oneshot::Sender<Result<TurnLease, Error>>,
    },
    /// For a turn without a session.
    ClaimAndAdmit {
        claim: ClaimRequest,
        request: AdmissionRequest,
        reply: oneshot::Sender<Result<(TurnLease, Admission), Error>>,
    },
    /// Waits until the engine has room.
    Admit {
        rid: String,
        request: AdmissionRequest,
        reply: oneshot::Sender<Result<AdmittedTurn, Error>>,
    },
    /// The client of the turn with this request id is gone.
    Abandon(String),
    /// Opens a session without a turn.
    Open {
        request: OpenRequest,
        reply: oneshot::Sender<Result<OpenedSession, Error>>,
    },
    /// The answer says whether the close waits for a running turn.
    Close {
        key: SessionKey,
        only_if_idle: bool,
        reply: oneshot::Sender<Result<bool, Error>>,
    },
    /// The answer comes when the engine has demoted the session, or can't.
    Demote {
        key: SessionKey,
        reply: oneshot::Sender<Result<(), Error>>,
    },
    /// The answer comes when the engine has begun to load the session's KV, or doesn't.
    Prefetch {
        key: SessionKey,
        reply: oneshot::Sender<Result<u64, Error>>,
    },
    Audit {
        dp_rank: u32,
        reply: oneshot::Sender<Result<RankPageAudit, audit::Error>>,
    },
    WatchSessions(oneshot::Sender<SessionWatch>),
    BeginControl {
        effect: Effect,
        reply: oneshot::Sender<Result<BegunCall, Error>>,
    },
    EndControl(ControlEnd),
    Engine(EngineNews),
    OpenResult {
        incarnation: String,
        result: OpenResult,
    },
    CloseResult {
        incarnation: String,
        result: CloseResult,
    },
    /// The agent stops. Running turns may continue for `grace_period`.
    Drain {
        grace_period: Duration,
        ending: Ending,
        reply: oneshot::Sender<()>,
    },
    /// The operator drains the agent, or ends that; the process stays.
    SetDrained {
        wanted: bool,
        reply: oneshot::Sender<DrainState>,
    },
}

#[derive(Debug)]
pub struct OpenedSession {
    pub session: Session,
    pub was_open: bool,
}

#[derive(Debug)]
pub struct RankPageAudit {
    pub pages: PageAudit,
    /// Most pages first. The key is `None` for a session that isn't the agent's.
    pub sessions: Vec<(Option<SessionKey>, SessionPages)>,
}

/// What a turn's body says.
#[derive(Debug)]
pub struct AdmissionRequest {
    pub need: Need,
    pub prompt_start: PromptStart,
    /// Those by which the body was read.
    pub facts: Arc<BodyFacts>,
}

/// The answer to an [`AdmissionRequest`].
#[derive(Debug)]
pub struct Admission(pub(super) oneshot::Receiver<Result<AdmittedTurn, Error>>);

impl Admission {
    /// A session's first turn also waits until the session is open at the engine.
    pub async fn wait(self) -> Result<AdmittedTurn, Error> {
        self.0.await.map_err(|_| Error::Stopping)?
    }
}

#[derive(Debug)]
pub struct AdmittedTurn {
    pub turn: PlannedTurn,
    /// `None` for a turn without a session.
    pub run_mode: Option<oneshot::Receiver<RunModeResult>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TurnRun {
    pub run_mode: RunMode,
    /// KV tokens reserved beyond the session's history. `None`: the turn runs in no pinned session.
    pub growth_tokens_max: Option<u64>,
}

/// The error is why the shim refuses the turn.
pub type RunModeResult = Result<TurnRun, session::Error>;

#[derive(Debug)]
pub(super) struct TurnEnd {
    pub(super) rid: String,
    pub(super) outcome: Outcome,
}

/// Holds the turn's session, if any, from before its body is read, and room from admission on. Both
/// end exactly once: in [`TurnLease::finish`], or by drop.
#[derive(Debug)]
pub struct TurnLease {
    pub rid: String,
    /// Why the turn goes without the session at which its client hinted. `None`: it has that
    /// session, or named none.
    pub session_left_out: Option<session::Error>,
    /// The number of the engine process that the turn is for; the first that was known is 1.
    pub engine_process: u64,
    pub(super) mailbox: mpsc::Sender<OwnerMessage>,
    pub(super) is_sent: bool,
    /// A place in the owner's queue, so that ending the turn never waits. `None` once it has ended.
    pub(super) turn_end_permit: Option<mpsc::OwnedPermit<TurnEnd>>,
}

impl TurnLease {
    pub async fn request_admission(&self, request: AdmissionRequest) -> Result<Admission, Error> {
        let (reply, admission) = oneshot::channel();
        let message = OwnerMessage::Admit { rid: self.rid.clone(), request, reply };
        self.mailbox.send(message).await.map_err(|_| Error::Stopping)?;
        Ok(Admission(admission))
    }

    /// The caller aborts the turn and waits for its end.
    pub async fn report_abandoned(&self) {
        // Fails only if the owner task has ended. Then nobody needs this message.
        let _ = self.mailbox.send(OwnerMessage::Abandon(self.rid.clone())).await;
    }

    /// Dropping the lease then reports [`Outcome::Lost`], because the engine may have run the turn.
    pub fn mark_sent(&mut self) {
        self.is_sent = true;
    }

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

impl Drop for TurnLease {
    fn drop(&mut self) {
        self.end_turn_with(if self.is_sent { Outcome::Lost } else { Outcome::Refused });
    }
}

#[derive(Debug, Clone)]
pub struct AgentHandle {
    pub(super) mailbox: mpsc::Sender<OwnerMessage>,
    /// Each claimed turn reserves a place in the queue.
    pub(super) turn_ends: mpsc::Sender<TurnEnd>,
    pub(super) turn_gate: watch::Receiver<OpenGate>,
    pub report: watch::Receiver<Arc<LoadReport>>,
    /// `None` until the agent has reached the engine.
    pub description: watch::Receiver<Option<Arc<Description>>>,
    pub weights: watch::Receiver<PublishedWeights>,
    /// Where turns note the signs of life in their answers.
    pub answer_signs: AnswerSigns,
}

impl AgentHandle {
    /// Refuses a turn before its body is read, if nothing of that body could change the answer.
    pub fn body_facts(&self) -> Result<Arc<BodyFacts>, Error> {
        let facts = self.turn_gate.borrow().clone()?;
        if self.turn_ends.capacity() == 0 { Err(too_many_turns()) } else { Ok(facts) }
    }

    pub async fn claim(&self, request: ClaimRequest) -> Result<TurnLease, Error> {
        self.request(|reply| OwnerMessage::Claim { request, reply }).await?
    }

    /// For a turn without a session, whose body was read.
    pub async fn claim_and_admit(
        &self,
        claim: ClaimRequest,
        request: AdmissionRequest,
    ) -> Result<(TurnLease, Admission), Error> {
        self.request(|reply| OwnerMessage::ClaimAndAdmit { claim, request, reply }).await?
    }

    /// Returns the existing session if it is already open.
    pub async fn open_session(&self, request: OpenRequest) -> Result<OpenedSession, Error> {
        self.request(|reply| OwnerMessage::Open { request, reply }).await?
    }

    /// Returns whether the close waits for a running turn. With `only_if_idle`, a turn is an error.
    pub async fn close_session(&self, key: SessionKey, only_if_idle: bool) -> Result<bool, Error> {
        self.request(|reply| OwnerMessage::Close { key, only_if_idle, reply }).await?
    }

    /// Only for a pinned session between two turns. Returns when the radix tree has its KV, after
    /// seconds at most. The history stays.
    pub async fn demote_session(&self, key: SessionKey) -> Result<(), Error> {
        self.request(|reply| OwnerMessage::Demote { key, reply }).await?
    }

    /// Returns how many tokens of the session's KV begin to be loaded from the host.
    pub async fn prefetch_session(&self, key: SessionKey) -> Result<u64, Error> {
        self.request(|reply| OwnerMessage::Prefetch { key, reply }).await?
    }

    /// Asks before a control call to the engine. If this succeeds, the caller must report the
    /// call's end by [`Self::end_control`].
    pub async fn begin_control(&self, effect: Effect) -> Result<BegunCall, Error> {
        self.request(|reply| OwnerMessage::BeginControl { effect, reply }).await?
    }

    /// `label` is that of the weights after the call, if it was read.
    pub async fn end_control(
        &self,
        call: BegunCall,
        request: ControlRequest,
        outcome: ControlOutcome,
        label: Option<WeightsLabel>,
    ) {
        let end = ControlEnd { call, request, outcome, label };
        // Fails only if the owner task has ended. Then the agent is stopping.
        let _ = self.mailbox.send(OwnerMessage::EndControl(end)).await;
    }

    /// The outer error says that the agent is stopping, the inner one why there is no audit.
    pub async fn audit(&self, dp_rank: u32) -> Result<Result<RankPageAudit, audit::Error>, Error> {
        self.request(|reply| OwnerMessage::Audit { dp_rank, reply }).await
    }

    pub async fn watch_sessions(&self) -> Result<SessionWatch, Error> {
        self.request(OwnerMessage::WatchSessions).await
    }

    pub async fn report_engine(&self, news: EngineNews) {
        // Fails only if the owner task has ended. Then nobody needs this message.
        let _ = self.mailbox.send(OwnerMessage::Engine(news)).await;
    }

    /// Routers place no new sessions on a drained agent, and a load report says so before this
    /// returns. The answer says what is left.
    pub async fn set_drained(&self, wanted: bool) -> Result<DrainState, Error> {
        self.request(|reply| OwnerMessage::SetDrained { wanted, reply }).await
    }

    /// Refuses new requests. Running turns may go on for `grace_period`, then they are aborted.
    /// Returns when no turn runs, and no close is pending or everything is handed over.
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

pub(super) fn too_many_turns() -> Error {
    let detail = "too many wait or run already".to_owned();
    session::Error::OutOfRoom { resource: Code::Turns, detail, wait: None }.into()
}

/// Nobody can guess it.
pub(super) fn new_turn_rid(agent_id: &str, principal: &str) -> String {
    TurnRid::compose(random::number(), agent_id, principal)
}

/// The engine never sees this id.
pub(super) fn new_rid() -> String {
    format!("{:032x}", random::number())
}
