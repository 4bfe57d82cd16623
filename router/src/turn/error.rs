//! Lists the reasons for which the router refuses a turn, or the open or close of a session.
//!
//! A session is a sequence of turns that share a growing prefix. A turn is one request and its
//! answer. The other modules of `turn` return these errors. `http::errors` maps each of them to an
//! HTTP status and a code.

use service::refusal::Refusal;
use tonic::{Code, Status};

use super::request;
use crate::placement::{NoWorker, affinity::TableFull};

/// Why a turn, or an open or close of a session, is refused. Each message is for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The router has the maximum number of turns in flight.
    #[error("the router has turns_in_flight_max turns in flight; try again")]
    TurnsFull,
    /// The body is too large, incomplete or too slow, or the memory for bodies is used up.
    #[error(transparent)]
    Body(#[from] Refusal),
    /// The body did not arrive within the turn's time limit.
    #[error("the request body did not arrive within turn_ms_max; send it faster")]
    BodyLate,
    /// The request's headers or body are invalid.
    #[error(transparent)]
    Request(#[from] request::Error),
    /// No worker can take the turn or the session.
    #[error(transparent)]
    NoWorker(#[from] NoWorker),
    /// The affinity table has no room for the session.
    #[error(transparent)]
    SessionsFull(#[from] TableFull),
    /// A close names a session that is not open.
    #[error("no session is open under this id; open it with POST /v1/sessions")]
    SessionUnknown,
    /// A delta turn (its body has only the new tokens) names a session that is not open.
    #[error(
        "this turn is a delta, but no session is open under its id; open the session first with \
         POST /v1/sessions, or send the full history, not marked as a delta"
    )]
    DeltaWithoutHistory,
    /// The session takes one turn at a time, and a turn is running.
    #[error(
        "this session takes one turn at a time and a turn is running; send this turn when that one \
         has ended"
    )]
    SessionBusy,
    /// The turn's session is closing.
    #[error("this session is closing; wait until its last turn has ended, then open it again")]
    TurnWhileClosing,
    /// The session to open is still closing.
    #[error("this session is closing; wait until its last turn has ended, then open it again")]
    OpenWhileClosing,
    /// The session's KV and history were on a worker that has lost them or can't be reached.
    #[error(
        "the session's KV and history were on worker {worker}, {}; open the session again and send \
         the full history",
        if *.agent_up { "whose engine restarted" } else { "which can't be reached" }
    )]
    SessionLost {
        /// Name of the worker that had the session.
        worker: String,
        /// Whether the agent is connected.
        agent_up: bool,
    },
    /// The agent refused or failed a call on its control port.
    #[error("{}", .0.message())]
    Agent(Status),
    /// The agent gave no answer to the turn.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// A task of the router panicked.
    #[error("the router failed; see its log")]
    Internal,
}

impl Error {
    /// Converts an agent's gRPC error. Logs the error if no client can act on it.
    pub(super) fn from_agent(status: Status) -> Self {
        let is_for_client = matches!(
            status.code(),
            Code::ResourceExhausted
                | Code::FailedPrecondition
                | Code::NotFound
                | Code::InvalidArgument
                | Code::DeadlineExceeded
                | Code::Unavailable
        );
        if !is_for_client {
            tracing::warn!(code = ?status.code(), message = status.message(), "agent failed");
        }
        Self::Agent(status)
    }
}

/// Why a worker gave no answer to a turn.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    /// The connection could not be made, so nothing was sent.
    #[error("worker {worker} can't be reached")]
    Connect {
        worker: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// The request may have reached the worker, but no answer came.
    #[error("worker {worker} broke off before its answer began")]
    BrokenOff {
        worker: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// The turn's time limit was reached.
    #[error("the turn took longer than turn_ms_max before its answer began")]
    TimedOut,
}

impl NoAnswer {
    /// Whether the turn can safely be sent again: only if no part of it was sent.
    pub(crate) fn can_retry(&self) -> bool {
        matches!(self, Self::Connect { .. })
    }
}
