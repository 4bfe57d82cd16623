//! The agent's end of the shim connection.
//!
//! The shim (`worker-agent/shim`) is a plugin inside the engine. Over a unix socket it reports what
//! only the engine knows, and takes a few commands.
//!
//! [`listen`] creates the socket. Each DP rank's shim has one connection, and its reports arrive as
//! [`ShimEvent`] in a bounded channel. If the receiver is slow, newer states replace older ones. If
//! events are lost, a full session table follows: see [`ShimEvent::Sessions`]. [`codec`] documents the
//! protocol. [`trim`] handles the trimmer, which runs in the engine's first process and has a
//! socket of its own. This module decides nothing and keeps no sessions.

pub mod codec;
mod connection;
mod connections;
mod outbox;
mod socket;
pub mod trim;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use service::tasks::Tasks;
use tokio::sync::mpsc;

use self::{codec::ShimCommand, connections::Connections, outbox::Outbox};

/// The first message of a shim: its process, the engine's pool, and whether the shim works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The pid of the engine's scheduler process in its own pid namespace.
    pub pid: u32,
    /// The pid of the same process in the agent's namespace, as the kernel reports it. `None` if
    /// the process is not visible there.
    pub seen_pid: Option<u32>,
    /// The data parallel rank; 0 without data parallelism.
    pub dp_rank: u32,
    /// Tokens in a page of the pool.
    pub page_size_tokens: u32,
    /// Tokens in the pool.
    pub total_tokens: u64,
    /// Rows in the engine's request table. A running turn takes one row; so does a session with KV.
    pub rows_total: u32,
    /// A random token of the engine process. It identifies the process even where a pid is reused.
    pub instance: u128,
    /// SGLang's version.
    pub sglang: String,
    /// The shim's version.
    pub shim: String,
    /// Why the shim does nothing: an unknown SGLang version, or a hook that failed. `None` if it
    /// works. An inert shim sends no other news than `Down`.
    pub inert: Option<String>,
    /// Why no session of this engine can be demoted; `None` if sessions can be.
    pub undemotable: Option<String>,
    /// Why the pool's pages can't be audited; `None` if they can.
    pub unauditable: Option<String>,
    /// Why the radix tree can't be published again; `None` if it can.
    pub unpublishable: Option<String>,
    /// The device of the pool: a GPU's UUID as CUDA formats it (without NVML's `GPU-` prefix), or
    /// else torch's device type.
    pub device: String,
    /// Bytes of KV in a page on this rank, computed from the pool's buffers.
    pub page_bytes: Option<u64>,
}

/// The result of auditing one rank's pages, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditReply {
    /// The number that the requester gave.
    pub number: u64,
    /// Time that the audit took on the scheduler's thread.
    pub spent: Duration,
    /// Why no audit was made. `names` and `report` are empty then.
    pub refusal: Option<String>,
    /// The engine's ids of the sessions, indexed by their number in the report.
    pub names: Vec<String>,
    /// The report as `kernels` encodes it.
    pub report: Vec<u8>,
}

/// Pool and queue figures of one rank after its scheduler's last step, from the engine's own
/// counters. `available + evictable + protected + held + uncached == total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankFacts {
    /// The DP rank.
    pub dp_rank: u32,
    /// When the agent read the figures, a fraction of a millisecond after they were taken.
    pub at: Instant,
    /// Tokens in the pool.
    pub total_tokens: u64,
    /// Free tokens.
    pub available_tokens: u64,
    /// Tokens in the radix tree that are evicted when room is needed.
    pub evictable_tokens: u64,
    /// Tokens in the radix tree that turns or sessions lock.
    pub protected_tokens: u64,
    /// Tokens that sessions hold outside the tree, in whole pages. For running turns up to 50 ms
    /// old.
    pub held_tokens: u64,
    /// The remaining tokens: held by running requests without a session.
    pub uncached_tokens: u64,
    /// Rows in the request table.
    pub rows_total: u32,
    /// Free rows.
    pub rows_free: u32,
    /// Requests in the running batch.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Events that the shim has lost since its start. A full table followed each loss.
    pub events_lost: u64,
    /// How often the shim found its sum of held tokens wrong and counted again. It should stay 0.
    pub recounts: u64,
    /// Samples that the shim has taken since its start.
    pub samples: u64,
    /// Total time that the samples took on the scheduler's thread, in nanoseconds.
    pub samples_ns: u64,
}

/// One session's state in the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFacts {
    /// The session's id inside the engine, which is that of an incarnation.
    pub id: String,
    /// Whether the session holds a row, and therefore KV. Otherwise the next three counts are 0.
    pub holds_row: bool,
    /// Whether the engine has accepted a turn of the session and not finished it.
    pub in_flight: bool,
    /// Whether a close waits for the end of a turn.
    pub closing: bool,
    /// Tokens of allocated KV, not rounded to pages. For a running turn up to 50 ms old.
    pub allocated_tokens: u32,
    /// Tokens of valid KV.
    pub committed_tokens: u32,
    /// Tokens of the valid KV that are in the radix tree, locked by the session.
    pub protected_tokens: u32,
    /// Tokens of the transcript after the last committed turn. The next turn's prompt begins with
    /// them.
    pub history_tokens: u32,
}

/// A change of one rank's session table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sessions {
    /// The DP rank.
    pub dp_rank: u32,
    /// Whether this is the start of a full table: all earlier facts are void. The table may
    /// continue in the next message. A known session that is missing from the table is closed.
    pub full: bool,
    /// Sessions with new facts.
    pub changed: Vec<SessionFacts>,
    /// Ids of sessions that the engine no longer has.
    pub gone: Vec<String>,
}

/// A report from a shim. Within one rank the order is kept, and events come before the tables and
/// facts they led to. `Up` is the first and `Down` the last report of each connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShimEvent {
    /// A shim has connected. A full table and facts follow, unless it is inert.
    Up(Hello),
    /// The newest facts.
    Facts(RankFacts),
    /// Sessions changed. A full table comes after each connect, on request, and after events were
    /// lost. In the last case it replaces the lost events.
    Sessions(Sessions),
    /// The engine has answered a request to open a session.
    Opened {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
        /// Whether the request opened the session.
        ok: bool,
    },
    /// A session is gone from the engine together with its KV: closed at once, at the end of its
    /// turn, or by its timeout.
    Closed {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
    },
    /// A turn has become part of its session's history.
    Committed {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
        /// The request id of the turn.
        rid: String,
        /// Tokens of the transcript, this turn included.
        history_tokens: u32,
        /// Whether the turn was retracted: it is back in the queue and continues from here.
        retracted: bool,
    },
    /// A turn was aborted. It is not part of its session's history.
    Aborted {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
        /// Whether the turn was running. If so, the session's row is free and its KV evictable now.
        released: bool,
    },
    /// The answer to [`ShimHandle::demote`].
    Demoted {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
        /// Why the session was not demoted. `busy` and `in_flight` are temporary; the shim's
        /// `demotion.py` lists all refusals.
        refusal: Option<String>,
    },
    /// The answer to [`ShimHandle::audit`].
    Audited {
        /// The DP rank.
        dp_rank: u32,
        /// The result.
        audited: AuditReply,
    },
    /// The shim has disconnected, was replaced, or broke the protocol. Commands that are still
    /// unanswered get no answer.
    Down {
        /// The DP rank.
        dp_rank: u32,
        /// The reason, for an operator.
        reason: String,
    },
}

/// Why a command can't be sent, or the socket can't be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No working shim of this rank is connected.
    #[error("no shim of rank {0} is connected; is it on the engine's PYTHONPATH?")]
    NoShim(u32),
    /// The engine's radix tree can't be published again.
    #[error("the engine's tree can't be published again: {0}")]
    Unpublishable(String),
    /// The session's id is too long for the protocol, so the session isn't one of Berth's.
    #[error("the session id is too long for the shim; the session was not opened by Berth")]
    Name,
    /// The queue of commands is full.
    #[error("the shim hasn't taken earlier commands; try again")]
    Busy,
    /// Other users may write to the socket's folder.
    #[error("{0} must be a folder that only this user may write to")]
    Folder(String),
    /// Another process listens on the socket, or the file is not a socket.
    #[error("{0} is another agent's socket, or not a socket")]
    Taken(String),
    /// The operating system refused.
    #[error("can't listen on {path}")]
    Bind {
        /// The socket's path.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Handle for sending commands to the shims.
#[derive(Debug, Clone)]
pub struct ShimHandle {
    connections: Connections,
}

impl ShimHandle {
    /// Requests that an idle session's KV is moved into the radix tree. Its row becomes free and
    /// its KV evictable; its transcript stays. The answer is [`ShimEvent::Demoted`] or [`ShimEvent::Down`].
    ///
    /// # Errors
    /// When no working shim of this rank is connected, or its command queue is full.
    pub fn demote(&self, dp_rank: u32, session: &str) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::Demote(session.to_owned()))
    }

    /// Requests the current facts and the full session table.
    ///
    /// # Errors
    /// As for [`Self::demote`].
    pub fn sample_now(&self, dp_rank: u32) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::SampleNow)
    }

    /// Requests an audit of the rank's pages. The answer is [`ShimEvent::Audited`] with the same number,
    /// or [`ShimEvent::Down`].
    ///
    /// # Errors
    /// As for [`Self::demote`].
    pub fn audit(&self, dp_rank: u32, number: u64) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::Audit(number))
    }

    /// Requests that the engine publishes its radix tree again as KV events: an event that voids
    /// everything, then all nodes. They come on the KV event stream, not through the shim.
    ///
    /// # Errors
    /// As for [`Self::demote`], and when the engine's tree can't be published again.
    pub fn republish(&self, dp_rank: u32) -> Result<(), Error> {
        if let Some(reason) = self.connections.peer_info(dp_rank).and_then(|it| it.unpublishable) {
            return Err(Error::Unpublishable(reason));
        }
        self.connections.send_command(dp_rank, &ShimCommand::Republish)
    }

    /// Waits until a shim connects or disconnects. Returns false if the listener has ended.
    pub async fn changed(&mut self) -> bool {
        self.connections.changed().await
    }
}

/// Listens for shims until the tasks are cancelled, then removes the socket's file. A stale socket
/// file is replaced. Only this user and root may connect.
///
/// # Errors
/// See [`Error`].
pub fn listen(
    path: &Path,
    reports: mpsc::Sender<ShimEvent>,
    tasks: &Tasks,
) -> Result<ShimHandle, Error> {
    Ok(ShimHandle { connections: Connections::listen::<Outbox>(path, reports, tasks)? })
}

#[cfg(test)]
mod tests;
