//! The task that owns the sessions and the ledger, and the handle through which everyone else asks.
//! It decides, with the pure [`session::Table`]; what must be done at the engine it gives to tasks
//! of their own, whose answers come back as messages. It never waits for the engine itself.

mod owner;

use std::{path::PathBuf, sync::Arc, time::Duration};

use proto::{
    claim::Claim,
    id::SessionKey,
    load::{Description, LoadReport, PageAudit, Retention, Session},
    process::tasks::Tasks,
};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use self::owner::Owner;
use crate::{
    audit::{self, SessionPages},
    engine::{Engine, Info, Sample},
    gpu::Gpus,
    journal::Journal,
    lane::Lanes,
    ledger::Limits,
    metrics::Metrics,
    session::{self, Appends, Closed, Need, Opened, Outcome, PromptStart, Ran, Rules, Turn},
    shim::{
        News, ShimHandle,
        trim::{self, TrimHandle},
    },
};

/// Requests to the owner that wait their turn. It answers in microseconds; a full mailbox makes
/// callers wait, which bounds memory.
const MAILBOX: usize = 1024;
/// Why the agent said no.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The session table's reason.
    #[error(transparent)]
    Session(#[from] session::Error),
    /// The engine can't take turns now.
    #[error("the engine can't be used: {0}")]
    EngineDown(String),
    /// The agent is shutting down.
    #[error("this agent is shutting down; use another worker")]
    Stopping,
}

/// A change to one session, as watchers hear it.
#[derive(Debug, Clone)]
pub enum Change {
    /// Opened, or anything about it differs.
    Upsert(Box<Session>),
    /// Forgotten.
    Removed(SessionKey),
}

/// What a new watcher starts from, and how it hears the rest. The table is that of the moment from
/// which on `changes` has every change.
#[derive(Debug)]
pub struct Watch {
    /// Every session.
    pub sessions: Vec<Session>,
    /// What happens from now on.
    pub changes: broadcast::Receiver<Change>,
    /// The newest report.
    pub report: watch::Receiver<Arc<LoadReport>>,
    /// The newest description; none until the engine was reached.
    pub description: watch::Receiver<Option<Arc<Description>>>,
}

/// What the engine's follower tells.
#[derive(Debug)]
pub enum EngineNews {
    /// The engine answers, as this instance.
    Up(Box<Info>),
    /// A load sample.
    Sample(Sample),
    /// It doesn't answer.
    Down {
        /// Why, for an operator.
        reason: String,
        /// Its process is gone, not just slow.
        gone: bool,
    },
}

#[derive(Debug)]
enum Message {
    Claim {
        claim: Option<(Claim, SessionKey)>,
        rank: Option<u32>,
        appends: Appends,
        reply: oneshot::Sender<Result<Lease, Error>>,
    },
    Admit {
        rid: String,
        need: Need,
        start: PromptStart,
        reply: oneshot::Sender<Result<Admitted, Error>>,
    },
    Abandoned(String),
    Look {
        dp_rank: u32,
    },
    Open {
        key: SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        rank: Option<u32>,
        reply: oneshot::Sender<Result<Session, Error>>,
    },
    Close {
        key: SessionKey,
        reply: oneshot::Sender<Result<bool, Error>>,
    },
    Audit {
        dp_rank: u32,
        reply: oneshot::Sender<Result<RankPages, audit::Error>>,
    },
    Watch(oneshot::Sender<Watch>),
    Engine(EngineNews),
    Opened {
        incarnation: String,
        opened: Opened,
    },
    Closed {
        incarnation: String,
        closed: Closed,
    },
    RemoteAudit {
        dp_rank: u32,
        answer: audit::remote::Answer,
    },
    Drain {
        limit: Duration,
        done: oneshot::Sender<()>,
    },
}

/// An audit of one rank's pages, as asked for.
#[derive(Debug)]
pub struct RankPages {
    /// The totals, and what is wrong.
    pub pages: PageAudit,
    /// Who holds pages, the largest first; with the session's key where it is the agent's.
    pub sessions: Vec<(Option<SessionKey>, SessionPages)>,
}

/// A turn that may go to the engine.
#[derive(Debug)]
pub struct Admitted {
    /// What it needs on its way.
    pub turn: Turn,
    /// How it runs, told before its answer begins; none without a session.
    pub ran: Option<oneshot::Receiver<Told>>,
}

/// What is told of a turn that was let in: how it runs, or why the engine's shim refuses it.
pub type Told = Result<Ran, session::Error>;

/// The end of a turn, on its way to the owner.
#[derive(Debug)]
struct End {
    rid: String,
    outcome: Outcome,
}

/// A turn's claim: on its session before its body is read, and on room in the engine once it is
/// admitted. It is ended exactly once: by [`Lease::finish`], or by being dropped.
#[derive(Debug)]
pub struct Lease {
    /// The engine's name for the turn.
    pub rid: String,
    /// The model's vocabulary, if known.
    pub vocabulary: Option<u32>,
    agent: AgentHandle,
    sent: bool,
    /// Room for the end in the owner's queue, taken when the turn began: ending never waits.
    end: Option<mpsc::OwnedPermit<End>>,
}

impl Lease {
    /// Waits until the engine has room for the turn; answers with what the turn needs on its way.
    /// For a session's first turn this includes opening it at the engine.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn admitted(&self, need: Need, start: PromptStart) -> Result<Admitted, Error> {
        let rid = self.rid.clone();
        self.agent.ask(|reply| Message::Admit { rid, need, start, reply }).await?
    }

    /// The turn's client has gone: it is being aborted, and its end awaited.
    pub async fn abandoned(&self) {
        // An owner that is gone has ended the process's work already.
        let _ = self.agent.mailbox.send(Message::Abandoned(self.rid.clone())).await;
    }

    /// From now on the engine may have seen the turn: an end nobody saw is a lost one.
    pub fn sent(&mut self) {
        self.sent = true;
    }

    /// Ends the turn.
    pub fn finish(mut self, outcome: Outcome) {
        self.end_with(outcome);
    }

    fn end_with(&mut self, outcome: Outcome) {
        if let Some(end) = self.end.take() {
            let rid = std::mem::take(&mut self.rid);
            end.send(End { rid, outcome });
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end_with(if self.sent { Outcome::Lost } else { Outcome::Refused });
    }
}

/// How everyone but the owner task reaches the sessions.
#[derive(Debug, Clone)]
pub struct AgentHandle {
    mailbox: mpsc::Sender<Message>,
}

impl AgentHandle {
    /// Claims a turn's session, before the turn's body is read.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn claim(
        &self,
        claim: Option<(Claim, SessionKey)>,
        rank: Option<u32>,
        appends: Appends,
    ) -> Result<Lease, Error> {
        self.ask(|reply| Message::Claim { claim, rank, appends, reply }).await?
    }

    /// Opens a session, or answers with the one that is open.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn open(
        &self,
        key: SessionKey,
        retention: Option<Retention>,
        idle_max: Option<Duration>,
        rank: Option<u32>,
    ) -> Result<Session, Error> {
        self.ask(|reply| Message::Open { key, retention, idle_max, rank, reply }).await?
    }

    /// Closes a session; answers whether that waits for a running turn.
    ///
    /// # Errors
    /// When there is none.
    pub async fn close(&self, key: SessionKey) -> Result<bool, Error> {
        self.ask(|reply| Message::Close { key, reply }).await?
    }

    /// Looks at the pages of a rank now.
    ///
    /// # Errors
    /// When the agent is stopping; then why there is no audit.
    pub async fn audit(&self, dp_rank: u32) -> Result<Result<RankPages, audit::Error>, Error> {
        self.ask(|reply| Message::Audit { dp_rank, reply }).await
    }

    /// Starts to watch.
    ///
    /// # Errors
    /// When the agent is stopping.
    pub async fn watch(&self) -> Result<Watch, Error> {
        self.ask(Message::Watch).await
    }

    /// Tells what the engine said.
    pub async fn engine(&self, news: EngineNews) {
        // An owner that is gone has ended the process's work already.
        let _ = self.mailbox.send(Message::Engine(news)).await;
    }

    /// Takes nothing new, lets turns run up to `limit`, then aborts them, and closes every session.
    pub async fn drain(&self, limit: Duration) {
        let _ = self.ask(|done| Message::Drain { limit, done }).await;
    }

    async fn ask<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(message(reply)).await.map_err(|_| Error::Stopping)?;
        answer.await.map_err(|_| Error::Stopping)
    }
}

/// What the owner starts from.
#[derive(Debug)]
pub struct Setup {
    /// Name of the agent.
    pub agent_id: String,
    /// Number of this process.
    pub epoch: u64,
    /// Port for turns, for the description.
    pub data_port: u16,
    /// The engine to call.
    pub engine: Engine,
    /// The GPUs beside the engine.
    pub gpus: Gpus,
    /// What to let in.
    pub limits: Limits,
    /// How sessions and turns are kept.
    pub rules: Rules,
    /// What outlives the process.
    pub journal: Journal,
    /// Commands for the shim inside the engine.
    pub shim: ShimHandle,
    /// Answers for the trimmer inside it.
    pub trim: TrimHandle,
    /// Where long prompts wait; none where they aren't computed in pieces.
    pub lanes: Option<Arc<Lanes>>,
    /// Counts.
    pub metrics: Metrics,
    /// The pages of every rank are audited this often; none: only on demand.
    pub audit_interval: Option<Duration>,
    /// Where engines publish their row tables, the rank to follow; empty: nowhere.
    pub audit_table: PathBuf,
    /// An engine that runs nothing for so long while turns wait is stuck.
    pub stall_max: Duration,
    /// Longest time between reports.
    pub report_interval: Duration,
}

/// Starts the owner task.
#[must_use]
pub fn start(
    setup: Setup,
    shim_news: mpsc::Receiver<News>,
    trim_news: mpsc::Receiver<trim::News>,
    tasks: &Tasks,
) -> AgentHandle {
    let (mailbox, messages) = mpsc::channel(MAILBOX);
    let handle = AgentHandle { mailbox };
    let owner = Owner::new(setup, tasks.clone(), handle.clone());
    tasks.essential("agent", owner.run(messages, shim_news, trim_news));
    handle
}
