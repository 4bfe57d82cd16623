//! The agent's end of the shim: a unix socket on which the plugin inside the engine
//! (`worker-agent/shim`) tells what only the engine knows, and takes a few commands.
//!
//! [`listen`] makes the socket; what the shims say arrives as [`News`] in a bounded channel, one
//! connection per DP rank. A receiver that is slow gets newer states in place of older ones, and no
//! event is lost without a full table after it: see [`News::Sessions`]. The protocol's table is in
//! [`codec`]. What the trimmer in the engine's first process says, on a socket of its own, is in
//! [`trim`]. This module decides nothing and keeps no session.

pub mod codec;
mod outbox;
mod peer;
mod peers;
mod socket;
pub mod trim;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use proto::process::tasks::Tasks;
use tokio::sync::mpsc;

use self::{codec::Command, outbox::Outbox, peers::Peers};

/// What a shim says first: who it is, and whether it works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The engine's scheduler process, as it knows itself: by its number in its own pid namespace.
    pub pid: u32,
    /// The same in the agent's, by the kernel's word. None: it isn't seen from there.
    pub seen_pid: Option<u32>,
    /// Rank of data parallelism, 0 without.
    pub dp_rank: u32,
    /// Tokens of a page of the pool.
    pub page_size_tokens: u32,
    /// The pool.
    pub total_tokens: u64,
    /// Rows of the request table: what running turns and sessions with KV take one of each.
    pub rows_total: u32,
    /// Random token of the engine process: another one is another engine, whatever its pid.
    pub instance: u128,
    /// SGLang's version.
    pub sglang: String,
    /// The shim's version.
    pub shim: String,
    /// Why it reads nothing, where it doesn't: a version it doesn't know, or a hook that failed. No
    /// other news but `Down` follows.
    pub inert: Option<String>,
    /// Why no session of this engine can be demoted, where they can't.
    pub undemotable: Option<String>,
    /// Why the pool's pages can't be audited, where they can't.
    pub unauditable: Option<String>,
    /// Why the radix tree can't be published again, where it can't.
    pub unpublishable: Option<String>,
    /// Where the pool lies: a GPU's UUID as CUDA has it (without NVML's `GPU-`), else torch's name
    /// of the device.
    pub device: String,
    /// Bytes of a page's KV on this rank, by its buffers.
    pub page_bytes: Option<u64>,
}

/// An audit of one rank's pages, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audited {
    /// The asker's number.
    pub number: u64,
    /// What it took of the scheduler's thread.
    pub spent: Duration,
    /// Why it was not made. There are no names and no report then.
    pub refusal: Option<String>,
    /// The engine-side ids of sessions, by their number in the report.
    pub names: Vec<String>,
    /// As `kernels` encodes it.
    pub report: Vec<u8>,
}

/// One rank's pool and queues, as its scheduler had them after its last step. Source: the engine's
/// own counters. `available + evictable + protected + held + uncached == total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankFacts {
    /// Which rank.
    pub dp_rank: u32,
    /// When the agent read it, a fraction of a millisecond after it was true.
    pub at: Instant,
    /// Tokens of the pool.
    pub total_tokens: u64,
    /// Free.
    pub available_tokens: u64,
    /// In the radix tree, and given up when room is needed.
    pub evictable_tokens: u64,
    /// In the radix tree, locked by turns or sessions.
    pub protected_tokens: u64,
    /// Held by sessions outside the tree, in whole pages. Of running turns up to 50 ms old.
    pub held_tokens: u64,
    /// The rest: what running requests without a session hold.
    pub uncached_tokens: u64,
    /// Rows of the request table.
    pub rows_total: u32,
    /// Free ones.
    pub rows_free: u32,
    /// Requests in the running batch.
    pub running: u32,
    /// Requests in the queue.
    pub waiting: u32,
    /// Events that this shim could not hand over since its start. A full table followed each loss.
    pub events_lost: u64,
    /// Times that the shim found its own sum wrong and counted anew. It should stay 0.
    pub recounts: u64,
    /// Samples that the shim has taken since its start.
    pub samples: u64,
    /// Time they took the scheduler, all together.
    pub samples_ns: u64,
}

/// One session, as the engine has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFacts {
    /// The id inside the engine, that of an incarnation.
    pub id: String,
    /// Whether it holds a row, and so KV. The three token counts are 0 without.
    pub holds_row: bool,
    /// Whether the engine counts a turn of it as accepted and unfinished.
    pub in_flight: bool,
    /// Whether a close waits for its turn's end.
    pub closing: bool,
    /// KV allocated, not rounded to pages. Of a running turn up to 50 ms old.
    pub allocated_tokens: u32,
    /// KV that is valid.
    pub committed_tokens: u32,
    /// The part of it that lies in the radix tree, under the session's lock.
    pub protected_tokens: u32,
    /// Transcript after the last committed turn: what the next turn's prompt begins with.
    pub history_tokens: u32,
}

/// A change of one rank's table of sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sessions {
    /// Which rank.
    pub dp_rank: u32,
    /// Whether `changed` begins the whole table: forget all that was known before. It may go on in
    /// the next piece. A session that is known and not in it is closed.
    pub full: bool,
    /// New facts.
    pub changed: Vec<SessionFacts>,
    /// Sessions that the engine no longer has.
    pub gone: Vec<String>,
}

/// What is told. The news of one rank come in order, events before the tables and facts they lead
/// to; `Up` is the first and `Down` the last of each connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// A shim has connected. A full table and facts follow, unless it is inert.
    Up(Hello),
    /// The newest facts.
    Facts(RankFacts),
    /// Sessions changed. A full table comes after each connect, on request, and after events were
    /// lost; it tells then what they would have told.
    Sessions(Sessions),
    /// An open was answered.
    Opened {
        /// Which rank.
        dp_rank: u32,
        /// Which session.
        id: String,
        /// Whether it is open now because of it.
        ok: bool,
    },
    /// The session is really gone, with its KV: closed at once, after its turn's end, or by its
    /// timeout.
    Closed {
        /// Which rank.
        dp_rank: u32,
        /// Which session.
        id: String,
    },
    /// A turn has become history.
    Committed {
        /// Which rank.
        dp_rank: u32,
        /// Which session.
        id: String,
        /// The turn's request.
        rid: String,
        /// Transcript with it.
        history_tokens: u32,
        /// Whether the turn was only put back into the queue, to go on from there.
        retracted: bool,
    },
    /// A turn was aborted, and isn't history.
    Aborted {
        /// Which rank.
        dp_rank: u32,
        /// Which session.
        id: String,
        /// Whether it ran, so that the session's row is free and its KV evictable now.
        released: bool,
    },
    /// The answer to [`ShimHandle::demote`].
    Demoted {
        /// Which rank.
        dp_rank: u32,
        /// Which session.
        id: String,
        /// Why not. `busy` and `in_flight` pass; the rest are in the shim's `demotion.py`.
        refusal: Option<String>,
    },
    /// The answer to [`ShimHandle::audit`].
    Audited {
        /// Which rank.
        dp_rank: u32,
        /// What was found.
        audited: Audited,
    },
    /// The shim has gone, or was replaced, or said nonsense. Commands without an answer get none.
    Down {
        /// Which rank.
        dp_rank: u32,
        /// For people.
        reason: String,
    },
}

/// Why a command can't be given, or the socket not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No working shim of this rank.
    #[error("no shim of rank {0} is connected; is it on the engine's PYTHONPATH?")]
    NoShim(u32),
    /// The shim can't have the tree published.
    #[error("the engine's tree can't be published again: {0}")]
    Unpublishable(String),
    /// A session that isn't Berth's own.
    #[error("a session's name is too long for the shim; it is no incarnation of Berth's")]
    Name,
    /// Earlier commands are still on their way.
    #[error("the shim hasn't taken earlier commands; try again")]
    Busy,
    /// The folder isn't this user's own.
    #[error("{0} must be a folder that only this user may write to")]
    Folder(String),
    /// Somebody listens there.
    #[error("{0} is another agent's socket")]
    Taken(String),
    /// What the system says.
    #[error("can't listen on {path}")]
    Bind {
        /// Where.
        path: String,
        /// Its reason.
        source: std::io::Error,
    },
}

/// Gives commands to the shims.
#[derive(Debug, Clone)]
pub struct ShimHandle {
    peers: Peers,
}

impl ShimHandle {
    /// Asks for an idle session's KV to be moved into the radix tree: its row becomes free, its KV
    /// evictable, its transcript stays. The answer is [`News::Demoted`], or [`News::Down`].
    ///
    /// # Errors
    /// When there is no shim to ask, or it doesn't listen.
    pub fn demote(&self, dp_rank: u32, session: &str) -> Result<(), Error> {
        self.peers.command(dp_rank, &Command::Demote(session.to_owned()))
    }

    /// Asks for facts and the full table.
    ///
    /// # Errors
    /// As above.
    pub fn sample_now(&self, dp_rank: u32) -> Result<(), Error> {
        self.peers.command(dp_rank, &Command::SampleNow)
    }

    /// Asks for an audit of the rank's pages. The answer is [`News::Audited`] with this number, or
    /// [`News::Down`].
    ///
    /// # Errors
    /// As above.
    pub fn audit(&self, dp_rank: u32, number: u64) -> Result<(), Error> {
        self.peers.command(dp_rank, &Command::Audit(number))
    }

    /// Asks for the radix tree to be published again as KV events, after one that says that all is
    /// void. What it holds comes as they do.
    ///
    /// # Errors
    /// As above, and when the engine's tree can't be walked.
    pub fn republish(&self, dp_rank: u32) -> Result<(), Error> {
        if let Some(reason) = self.peers.caller(dp_rank).and_then(|it| it.unpublishable) {
            return Err(Error::Unpublishable(reason));
        }
        self.peers.command(dp_rank, &Command::Republish)
    }

    /// Waits until a shim has come or gone; false when none will any more.
    pub async fn changed(&mut self) -> bool {
        self.peers.changed().await
    }
}

/// Listens for shims until the tasks are cancelled; the socket's file goes with it. A file that
/// nobody listens on is replaced. Only this user and root may connect.
///
/// # Errors
/// See [`Error`].
pub fn listen(path: &Path, news: mpsc::Sender<News>, tasks: &Tasks) -> Result<ShimHandle, Error> {
    Ok(ShimHandle { peers: Peers::listen::<Outbox>(path, news, tasks)? })
}

#[cfg(test)]
mod tests;
