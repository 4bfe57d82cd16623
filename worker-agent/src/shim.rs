//! Receives the reports of the shim, Berth's plugin inside the engine, and sends it commands.
//!
//! The shim (`worker-agent/shim`) connects to the agent's unix socket, with one connection per DP
//! rank. Its reports arrive as [`ShimEvent`] in a bounded channel. If the receiver is slow, newer
//! states replace older ones. If the shim loses events, it sends a full table of sessions
//! afterwards. The trimmer ([`trim`]), in the engine's first process, has a socket of its own.

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

use contract::count;
use serde::{Deserialize, Serialize};
use service::{private_folder, tasks::Tasks};
use tokio::sync::mpsc;

use self::{codec::ShimCommand, connections::Connections, outbox::Outbox};

/// A shim's first message.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Hello {
    /// The pid of the engine's scheduler process, in its own pid namespace.
    pub pid: u32,
    /// The same process, as the kernel reports it; `None` if the agent's namespace lacks it.
    #[serde(skip)]
    pub pid_in_agent_namespace: Option<u32>,
    /// 0 without data parallelism.
    #[serde(deserialize_with = "codec::decode_dp_rank")]
    pub dp_rank: u32,
    pub page_size_tokens: u32,
    #[serde(deserialize_with = "count::read")]
    pub pool_tokens: u64,
    /// The rows of the engine's request table. A running turn takes one; so does a session with KV.
    pub rows_total: u32,
    /// Random bytes that identify the engine process, even where a pid is reused.
    #[serde(with = "serde_bytes")]
    pub instance: [u8; 16],
    pub sglang: String,
    pub shim: String,
    /// A shim with a reason sends no reports after this one, and takes no commands. This SGLang may
    /// lack what the reports need, or a hook has failed.
    pub inert_reason: Option<String>,
    /// Why no session of this engine can be demoted.
    pub undemotable_reason: Option<String>,
    /// Why the pool's pages can't be audited.
    pub unauditable_reason: Option<String>,
    /// Why the radix tree can't be published again.
    pub unpublishable_reason: Option<String>,
    /// A GPU's UUID as CUDA formats it (without NVML's `GPU-` prefix), or else torch's device type.
    pub device: String,
    /// KV bytes of a page, from the pool's buffers. `None` if the shim can't tell.
    #[serde(deserialize_with = "count::read_option")]
    pub page_bytes: Option<u64>,
    pub pin_safety: PinSafety,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct PinSafety {
    /// Turns of pinned sessions that reach the engine's storage end the engine. `None` if the shim
    /// keeps them from it, also while it is inert or not connected.
    pub unguarded_reason: Option<String>,
    /// What the engine keeps in a pool beside that of all tokens' KV. Empty if it has no such pool;
    /// `None` if the shim can't tell.
    pub second_pool: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuditReply {
    /// The number given to [`ShimHandle::audit`].
    pub number: u64,
    /// The time on the scheduler's thread, at most an hour.
    #[serde(deserialize_with = "codec::decode_audit_time")]
    pub spent: Duration,
    /// If set, `names` and `report` are empty.
    pub refusal: Option<String>,
    /// Incarnations' ids. The report names a session by its index here; its other numbers are
    /// requests without a session, and sessions that aren't listed.
    #[serde(deserialize_with = "codec::decode_list::<{ codec::AUDIT_NAMES_MAX }, _, _>")]
    pub names: Vec<String>,
    /// `kernels` encodes it.
    #[serde(with = "serde_bytes")]
    pub report: Vec<u8>,
}

/// Figures after the scheduler's last step, from the engine's own counters. The five in tokens
/// after `pool_tokens` add up to the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFacts {
    #[serde(skip)]
    pub dp_rank: u32,
    /// When the agent decoded the figures, usually less than a millisecond after they were taken.
    #[serde(skip, default = "service::clock::now")]
    pub read_at: Instant,
    #[serde(deserialize_with = "count::read")]
    pub pool_tokens: u64,
    #[serde(deserialize_with = "count::read")]
    pub available_tokens: u64,
    /// Tokens in the radix tree that the engine may evict.
    #[serde(deserialize_with = "count::read")]
    pub evictable_tokens: u64,
    /// Tokens in the radix tree that turns or sessions lock.
    #[serde(deserialize_with = "count::read")]
    pub protected_tokens: u64,
    /// Tokens that sessions hold outside the tree, in whole pages; up to 50 ms old during a turn.
    #[serde(deserialize_with = "count::read")]
    pub held_tokens: u64,
    /// Tokens that running requests without a session hold.
    #[serde(deserialize_with = "count::read")]
    pub uncached_tokens: u64,
    pub rows_total: u32,
    pub rows_free: u32,
    pub running: u32,
    pub waiting: u32,
    /// Counted since the shim's start. A full table of sessions follows each loss.
    pub events_lost: u64,
    /// Each recount means that a hook of the shim missed a change.
    pub recounts: u64,
    /// How often the shim has read the engine's state since its start.
    pub samples: u64,
    /// The time of all samples on the scheduler's thread.
    pub samples_ns: u64,
    /// Counted since the engine's start.
    #[serde(deserialize_with = "count::read")]
    pub weight_changes: u64,
    /// True if there is KV from before the last change of weights.
    pub has_old_kv: bool,
    /// `None` if the engine keeps no copies of KV in the host's memory.
    pub host: Option<HostFacts>,
}

/// Figures of the host's memory, where the engine copies KV and loads it back from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    #[serde(deserialize_with = "count::read")]
    pub total_tokens: u64,
    #[serde(deserialize_with = "count::read")]
    pub used_tokens: u64,
    /// What eviction on the host can free: an estimate.
    #[serde(deserialize_with = "count::read")]
    pub evictable_tokens: u64,
    /// On their way to the device.
    #[serde(deserialize_with = "count::read")]
    pub loading_tokens: u64,
    /// On their way from the device.
    #[serde(deserialize_with = "count::read")]
    pub writing_tokens: u64,
    /// Of all timed loads since the shim's start.
    #[serde(deserialize_with = "count::read")]
    pub loaded_tokens: u64,
    /// The device's time for them.
    #[serde(deserialize_with = "count::read")]
    pub loads_us: u64,
}

impl RankFacts {
    #[must_use]
    pub fn locked_tokens(&self) -> u64 {
        self.protected_tokens.saturating_add(self.held_tokens)
    }

    #[must_use]
    pub fn used_tokens(&self) -> u64 {
        self.locked_tokens().saturating_add(self.uncached_tokens)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct SessionFacts {
    /// An incarnation's id.
    pub id: String,
    /// If false, `allocated_tokens`, `committed_tokens` and `protected_tokens` are 0.
    pub holds_row: bool,
    /// The engine has accepted a turn of the session and not finished it.
    pub in_flight: bool,
    /// The engine closes the session at the end of its turn.
    pub closing: bool,
    /// Up to 50 ms old while a turn runs, and not rounded to pages.
    pub allocated_tokens: u32,
    /// Tokens whose KV is valid.
    pub committed_tokens: u32,
    /// Valid tokens in the radix tree, locked by the session.
    pub protected_tokens: u32,
    /// The engine puts the history before the next turn's prompt. It ends with the latest turn that
    /// became part of it.
    pub history_tokens: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionChanges {
    pub dp_rank: u32,
    /// A full table voids all earlier facts. A large one continues in the next messages.
    pub begins_table: bool,
    /// A session that was not listed since the table's beginning is gone.
    pub ends_table: bool,
    pub changed: Vec<SessionFacts>,
    pub gone_ids: Vec<String>,
}

/// The reports of one rank keep their order, and an event comes before the table and the facts that
/// it led to. Each connection begins with `Up` and ends with `Down`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShimEvent {
    /// A full table and facts follow, unless the shim is inert.
    Up(Hello),
    Facts(RankFacts),
    /// A full table comes after each `Up`, after [`ShimHandle::sample_now`], and after lost events.
    Sessions(SessionChanges),
    Opened {
        dp_rank: u32,
        id: String,
        /// Whether the request opened the session.
        ok: bool,
    },
    /// The engine has closed a session and freed its KV: on request, at the end of the session's
    /// turn, or because it was idle too long.
    Closed {
        dp_rank: u32,
        /// The session's id.
        id: String,
    },
    /// A turn has become part of its session's history.
    Committed {
        dp_rank: u32,
        id: String,
        rid: String,
        /// This turn included.
        history_tokens: u32,
        /// If true, the turn is back in the queue, and continues from what is committed.
        is_retracted: bool,
    },
    /// The turn is not part of its session's history.
    Aborted {
        dp_rank: u32,
        id: String,
        /// If it was, the session's row is now free and its KV evictable.
        was_running: bool,
    },
    /// The answer to [`ShimHandle::demote`].
    Demoted {
        dp_rank: u32,
        number: u64,
        id: String,
        /// `busy` and `in_flight` are temporary. The shim's `demotion.py` lists all reasons.
        refusal: Option<String>,
    },
    /// The answer to [`ShimHandle::prefetch`].
    Prefetched {
        dp_rank: u32,
        number: u64,
        /// So many begin to be loaded now.
        tokens: u64,
        /// Why none are. The shim's `prefetch.py` lists all reasons.
        refusal: Option<String>,
    },
    /// The answer to [`ShimHandle::inspect`].
    Inspected {
        dp_rank: u32,
        number: u64,
        /// The state after the request had come; `None` if the engine doesn't have the session.
        session: Option<SessionFacts>,
    },
    /// The answer to [`ShimHandle::audit`].
    Audited {
        dp_rank: u32,
        /// The result.
        reply: AuditReply,
    },
    /// Commands that the shim hasn't answered get no answer.
    Down {
        dp_rank: u32,
        /// The text is for an operator.
        reason: String,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no shim of rank {0} is connected; is it on the engine's PYTHONPATH?")]
    NoShim(u32),
    #[error("the engine's tree can't be published again: {0}")]
    Unpublishable(String),
    #[error("the session id is too long for the shim; the session was not opened by Berth")]
    NameTooLong,
    #[error("the shim hasn't taken earlier commands; try again")]
    QueueFull,
    #[error("can't keep the shim's socket in its folder; `shim_socket` names the socket")]
    Folder(#[from] private_folder::Error),
    #[error("{0} is another agent's socket, or not a socket")]
    PathTaken(String),
    #[error("can't listen on {path}")]
    Bind {
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
}

#[derive(Debug, Clone)]
pub struct ShimHandle {
    connections: Connections,
}

impl ShimHandle {
    /// An idle session's KV moves into the radix tree: its row is free, its KV evictable, and its
    /// history stays. [`ShimEvent::Demoted`] with the same number answers, or [`ShimEvent::Down`].
    /// Waits for room in the queue of commands.
    pub async fn demote(&self, dp_rank: u32, number: u64, session: String) -> Result<(), Error> {
        self.connections.queue_command(dp_rank, &ShimCommand::Demote { number, session }).await
    }

    /// The session's KV is loaded from the host to the device, if it has no more than `tokens_max`
    /// tokens there and the engine has nothing else to do with its room.
    /// [`ShimEvent::Prefetched`] with the same number answers, or [`ShimEvent::Down`]. Fails if the
    /// command queue is full.
    pub fn prefetch(
        &self,
        dp_rank: u32,
        number: u64,
        session: String,
        tokens_max: u64,
    ) -> Result<(), Error> {
        let command = ShimCommand::Prefetch { number, session, tokens_max };
        self.connections.send_command(dp_rank, &command)
    }

    /// Asks for the facts as they are once the engine has handled all requests that it got before.
    /// [`ShimEvent::Inspected`] with the same number answers, or [`ShimEvent::Down`]. Waits as
    /// [`Self::demote`] does.
    pub async fn inspect(&self, dp_rank: u32, number: u64, session: String) -> Result<(), Error> {
        self.connections.queue_command(dp_rank, &ShimCommand::Inspect { number, session }).await
    }

    /// Requests the facts and the full table of sessions. Fails if the command queue is full.
    pub fn sample_now(&self, dp_rank: u32) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::SampleNow)
    }

    /// [`ShimEvent::Audited`] with the same number answers, or [`ShimEvent::Down`]. Fails if the
    /// command queue is full.
    pub fn audit(&self, dp_rank: u32, number: u64) -> Result<(), Error> {
        self.connections.send_command(dp_rank, &ShimCommand::Audit { number })
    }

    /// The tree arrives in the engine's KV event stream, after an event that voids all earlier
    /// ones.
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

/// Replaces the socket file of an agent that no longer runs. Only this user and root may connect.
pub fn listen(
    path: &Path,
    reports: mpsc::Sender<ShimEvent>,
    tasks: &Tasks,
) -> Result<ShimHandle, Error> {
    Ok(ShimHandle { connections: Connections::listen::<Outbox>(path, reports, tasks)? })
}

#[cfg(test)]
mod tests;
