//! Receives the reports of the shim, Berth's plugin inside the engine, and sends it commands.
//!
//! The shim (`worker-agent/shim`) connects to the agent's unix socket. It reports what only the
//! engine knows: the state of the KV pool, and of each session. A *session* is a series of turns
//! that share a growing prefix, whose KV the engine keeps from turn to turn. A *turn* is one
//! request with its answer.
//!
//! [`listen`] creates the socket. The shim of each DP rank has one connection, and its reports
//! arrive as [`ShimEvent`] in a bounded channel. If the receiver is slow, newer states replace
//! older ones. If the shim loses events, it sends a full table of sessions afterwards.
//!
//! `socket` creates a socket, `connections` accepts peers on it, `connection` serves one peer, and
//! `outbox` buffers a shim's reports. [`codec`] documents the protocol. [`trim`] handles the
//! trimmer, a part of the shim that shortens prompts. The trimmer runs in the engine's first
//! process, and has a socket of its own.
//!
//! This module keeps no sessions. The task in `owner` receives the reports and decides what they
//! mean.

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

use proto::count;
use serde::Deserialize;
use service::{private_folder, tasks::Tasks};
use tokio::sync::mpsc;

use self::{codec::ShimCommand, connections::Connections, outbox::Outbox};

/// The first message of a shim: its process, the engine's pool, and whether the shim works.
/// Its many fields: one for each field of the message.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Hello {
    /// The pid of the engine's scheduler process, in that process's own pid namespace.
    pub pid: u32,
    /// The pid of the same process in the agent's pid namespace, as the kernel reports it. `None`
    /// if the process isn't visible in that namespace.
    #[serde(skip)]
    pub pid_in_agent_namespace: Option<u32>,
    /// The data parallel rank; 0 without data parallelism.
    #[serde(deserialize_with = "codec::decode_dp_rank")]
    pub dp_rank: u32,
    /// Tokens in a page of the pool.
    pub page_size_tokens: u32,
    /// Tokens in the pool.
    #[serde(deserialize_with = "count::read")]
    pub pool_tokens: u64,
    /// Rows in the engine's request table. A running turn takes one row; so does a session with KV.
    pub rows_total: u32,
    /// Random bytes that identify the engine process, even where a pid is reused.
    #[serde(with = "serde_bytes")]
    pub instance: [u8; 16],
    /// SGLang's version.
    pub sglang: String,
    /// The shim's version.
    pub shim: String,
    /// Why the shim does nothing, for example because this SGLang lacks what its reports need, or
    /// because one of its hooks failed. `None` if the shim works. A shim with a reason sends no
    /// reports after this one, and takes no commands.
    pub inert_reason: Option<String>,
    /// Why no session of this engine can be demoted (see [`ShimHandle::demote`]); `None` if
    /// sessions can be.
    pub undemotable_reason: Option<String>,
    /// Why the pool's pages can't be audited (see [`ShimHandle::audit`]); `None` if they can be.
    pub unauditable_reason: Option<String>,
    /// Why the radix tree can't be published again (see [`ShimHandle::republish`]); `None` if it
    /// can be.
    pub unpublishable_reason: Option<String>,
    /// The device of the pool: a GPU's UUID as CUDA formats it (without NVML's `GPU-` prefix), or
    /// else torch's device type.
    pub device: String,
    /// Bytes of KV in a page on this rank, computed from the pool's buffers. `None` if the shim
    /// can't tell.
    #[serde(deserialize_with = "count::read_option")]
    pub page_bytes: Option<u64>,
    /// Whether sessions of this engine can be pinned safely.
    pub pin_safety: PinSafety,
}

/// What the shim knows of the safety of pinned sessions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct PinSafety {
    /// Why turns of pinned sessions may reach the engine's storage, which ends the engine. `None`
    /// if the shim keeps them from it, also while it is inert or not connected.
    pub unguarded_reason: Option<String>,
    /// What the engine keeps in a pool beside that of the KV of all tokens; empty if it has no such
    /// pool. `None` if the shim can't tell.
    pub second_pool: Option<String>,
}

/// The result of auditing one rank's pages, or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuditReply {
    /// The number of the request, as given to [`ShimHandle::audit`].
    pub number: u64,
    /// Time that the audit took on the scheduler's thread, at most an hour.
    #[serde(deserialize_with = "codec::decode_audit_time")]
    pub spent: Duration,
    /// Why no audit was made; `None` if one was. With a reason, `names` and `report` are empty.
    pub refusal: Option<String>,
    /// The engine's ids of the sessions. The report names a session by its index in this list.
    /// Numbers without a name are requests without a session, and sessions that aren't listed.
    #[serde(deserialize_with = "codec::decode_list::<{ codec::AUDIT_NAMES_MAX }, _, _>")]
    pub names: Vec<String>,
    /// The report as `kernels` encodes it.
    #[serde(with = "serde_bytes")]
    pub report: Vec<u8>,
}

/// Pool and queue figures of one rank after its scheduler's last step, from the engine's own
/// counters. The five figures in tokens after `pool_tokens` add up to the pool.
/// Its many fields: one for each field of the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct RankFacts {
    /// The DP rank.
    #[serde(skip)]
    pub dp_rank: u32,
    /// When the agent decoded the figures, usually less than a millisecond after the shim took
    /// them.
    #[serde(skip, default = "service::clock::now")]
    pub read_at: Instant,
    /// Tokens in the pool.
    #[serde(deserialize_with = "count::read")]
    pub pool_tokens: u64,
    /// Free tokens.
    #[serde(deserialize_with = "count::read")]
    pub available_tokens: u64,
    /// Tokens in the radix tree that the engine may evict when it needs room.
    #[serde(deserialize_with = "count::read")]
    pub evictable_tokens: u64,
    /// Tokens in the radix tree that turns or sessions lock.
    #[serde(deserialize_with = "count::read")]
    pub protected_tokens: u64,
    /// Tokens that sessions hold outside the tree, in whole pages. The part of sessions with a
    /// running turn is up to 50 ms old.
    #[serde(deserialize_with = "count::read")]
    pub held_tokens: u64,
    /// The remaining tokens, which running requests without a session hold.
    #[serde(deserialize_with = "count::read")]
    pub uncached_tokens: u64,
    /// Rows in the request table.
    pub rows_total: u32,
    /// Free rows.
    pub rows_free: u32,
    /// Requests in the running batch.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Events that the shim has lost since its start. A full table of sessions follows each loss.
    pub events_lost: u64,
    /// How often the shim found a wrong sum of held tokens and counted again. Every recount means
    /// that a hook of the shim missed a change.
    pub recounts: u64,
    /// How often the shim has read the engine's state since its start.
    pub samples: u64,
    /// The time that all these samples took on the scheduler's thread, in nanoseconds.
    pub samples_ns: u64,
    /// How often the engine's weights have changed since its start.
    #[serde(deserialize_with = "count::read")]
    pub weight_changes: u64,
    /// Whether the engine has KV that it computed before the last change.
    pub has_old_kv: bool,
}

impl RankFacts {
    /// Returns the tokens that turns or sessions lock in the radix tree, or that sessions hold
    /// outside it.
    #[must_use]
    pub fn locked_tokens(&self) -> u64 {
        self.protected_tokens.saturating_add(self.held_tokens)
    }

    /// Returns the tokens that the engine can't evict.
    #[must_use]
    pub fn used_tokens(&self) -> u64 {
        self.locked_tokens().saturating_add(self.uncached_tokens)
    }
}

/// One session's state in the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct SessionFacts {
    /// The session's id in the engine. It is the id of an incarnation, which is one life of a Berth
    /// session in the engine.
    pub id: String,
    /// Whether the session holds a row, and therefore KV. If not, `allocated_tokens`,
    /// `committed_tokens` and `protected_tokens` are 0.
    pub holds_row: bool,
    /// Whether the engine has accepted a turn of the session and not finished it.
    pub in_flight: bool,
    /// Whether the engine will close the session at the end of its turn.
    pub closing: bool,
    /// Tokens of allocated KV, not rounded to pages. Up to 50 ms old while a turn runs.
    pub allocated_tokens: u32,
    /// Tokens of the session whose KV is valid.
    pub committed_tokens: u32,
    /// Tokens of the valid KV that are in the radix tree, locked by the session.
    pub protected_tokens: u32,
    /// Tokens of the session's history, which the engine puts before the next turn's prompt. They
    /// end with the latest turn that became part of the history.
    pub history_tokens: u32,
}

/// Changes of one rank's session table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionChanges {
    /// The DP rank.
    pub dp_rank: u32,
    /// Whether these changes begin a full table, which voids all earlier facts. A large table
    /// continues in the next messages.
    pub begins_table: bool,
    /// Whether a full table ends with these changes. The engine doesn't have a session that was not
    /// listed since the table's beginning.
    pub ends_table: bool,
    /// Sessions with new facts.
    pub changed: Vec<SessionFacts>,
    /// Ids of sessions that the engine no longer has.
    pub gone_ids: Vec<String>,
}

/// A report from a shim. The reports of one rank keep their order, and an event comes before the
/// table and the facts that it led to. Each connection begins with `Up` and ends with `Down`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShimEvent {
    /// A shim has connected. A full table of sessions and facts follow, unless the shim is inert.
    Up(Hello),
    /// New figures of the rank.
    Facts(RankFacts),
    /// Sessions changed. A full table comes after each `Up`, after [`ShimHandle::sample_now`], and
    /// after the shim has lost events. The table then has what the lost events would have told.
    Sessions(SessionChanges),
    /// The engine has answered a request to open a session.
    Opened {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
        /// Whether the request opened the session.
        ok: bool,
    },
    /// The engine has closed a session and freed its KV: on request, at the end of the session's
    /// turn, or because the session was idle too long.
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
        /// Tokens of the session's history, this turn included.
        history_tokens: u32,
        /// Whether the engine retracted the turn. Then the turn is back in the queue, and continues
        /// from what is committed.
        is_retracted: bool,
    },
    /// A turn was aborted. It is not part of its session's history.
    Aborted {
        /// The DP rank.
        dp_rank: u32,
        /// The session's id.
        id: String,
        /// Whether the turn was running. If so, the session's row is now free and its KV evictable.
        was_running: bool,
    },
    /// The answer to [`ShimHandle::demote`].
    Demoted {
        /// The DP rank.
        dp_rank: u32,
        /// The number of the request.
        number: u64,
        /// The session's id.
        id: String,
        /// Why the session was not demoted; `None` if it was. The reasons `busy` and `in_flight`
        /// are temporary. The shim's `demotion.py` lists all reasons.
        refusal: Option<String>,
    },
    /// The answer to [`ShimHandle::inspect`].
    Inspected {
        /// The DP rank.
        dp_rank: u32,
        /// The number of the request.
        number: u64,
        /// The session as it was after the request had come; `None` if the engine doesn't have it.
        session: Option<SessionFacts>,
    },
    /// The answer to [`ShimHandle::audit`].
    Audited {
        /// The DP rank.
        dp_rank: u32,
        /// The result.
        reply: AuditReply,
    },
    /// The shim has disconnected, was replaced, or violated the protocol. Commands that it hasn't
    /// answered get no answer.
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
    NameTooLong,
    /// The queue of commands is full.
    #[error("the shim hasn't taken earlier commands; try again")]
    QueueFull,
    /// The socket's folder can't be used, or other users could change it.
    #[error("can't keep the shim's socket in its folder; `shim_socket` names the socket")]
    Folder(#[from] private_folder::Error),
    /// Another process listens on the socket, or the file is not a socket.
    #[error("{0} is another agent's socket, or not a socket")]
    PathTaken(String),
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
    /// Requests that the engine demotes an idle session: it moves the session's KV into the radix
    /// tree. Then the session's row is free and its KV evictable. The session keeps its history.
    /// The answer is [`ShimEvent::Demoted`] with the same number, or [`ShimEvent::Down`]. Waits for
    /// room in the queue of commands.
    ///
    /// # Errors
    /// When no working shim of this rank is connected.
    pub async fn demote(&self, dp_rank: u32, number: u64, session: String) -> Result<(), Error> {
        self.connections.queue_command(dp_rank, &ShimCommand::Demote { number, session }).await
    }

    /// Requests the facts of one session, as they are once the engine has handled all requests that
    /// it got before this one. The answer is [`ShimEvent::Inspected`] with the same number, or
    /// [`ShimEvent::Down`]. Waits for room in the queue of commands.
    ///
    /// # Errors
    /// As for [`Self::demote`].
    pub async fn inspect(&self, dp_rank: u32, number: u64, session: String) -> Result<(), Error> {
        self.connections.queue_command(dp_rank, &ShimCommand::Inspect { number, session }).await
    }

    /// Requests the current facts and the full session table.
    ///
    /// # Errors
    /// When no working shim of this rank is connected, or its command queue is full.
    pub fn sample_now(&self, dp_rank: u32) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::SampleNow)
    }

    /// Requests an audit, which checks who holds each page of the rank's pool. The answer is
    /// [`ShimEvent::Audited`] with the same number, or [`ShimEvent::Down`].
    ///
    /// # Errors
    /// As for [`Self::sample_now`].
    pub fn audit(&self, dp_rank: u32, number: u64) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::Audit { number })
    }

    /// Requests that the engine publishes its radix tree again as KV events. The first event voids
    /// all earlier ones, and then an event for each node follows. These events arrive in the
    /// engine's KV event stream, not as reports of the shim.
    ///
    /// # Errors
    /// As for [`Self::sample_now`], and when the engine's tree can't be published again.
    pub fn republish(&self, dp_rank: u32) -> Result<(), Error> {
        if let Some(reason) =
            self.connections.peer_info(dp_rank).and_then(|peer| peer.unpublishable_reason)
        {
            return Err(Error::Unpublishable(reason));
        }
        self.connections.send_command(dp_rank, &ShimCommand::Republish)
    }

    /// Waits until a shim connects or disconnects. Returns `false` if the listener has ended.
    pub async fn changed(&mut self) -> bool {
        self.connections.changed().await
    }
}

/// Listens for shims until the tasks are cancelled, then removes the socket's file. Replaces the
/// socket file of an agent that no longer runs. Only this user and root may connect.
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
