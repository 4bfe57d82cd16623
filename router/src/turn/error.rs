//! Lists the reasons for which the router refuses a turn.
//!
//! A turn is one request and its answer. The other modules of `turn` return these errors, or errors
//! of their own that become these. `http::errors` maps each of them to an HTTP status and a code.

use std::time::Duration;

use service::refusal::Refusal;

use super::{decide, request, sessions};
use crate::shares::Refused;

/// Why a turn is refused. Each message is for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The client gets no more of what the router's clients share.
    #[error("{}", limit_message(*.limit, *.refused))]
    Limit {
        /// What the client gets no more of.
        limit: Limit,
        /// Which limit is reached.
        refused: Refused,
    },
    /// The turn has more sequences than its client may have in flight.
    #[error(
        "this turn has {sequences} sequences (prompts times answers), and this client may have \
         {sequences_max} in flight by turns_in_flight_max; send batches of at most so many"
    )]
    BatchOverShare {
        /// The turn's sequences.
        sequences: u32,
        /// The most that one client may have.
        sequences_max: u32,
    },
    /// The client's key has used up its requests per minute.
    #[error("this key has used its requests_per_minute; wait as long as Retry-After says")]
    RequestRate(Duration),
    /// The client's key has used up its tokens per minute.
    #[error("this key has used its tokens_per_minute; wait as long as Retry-After says")]
    TokenRate(Duration),
    /// The text in the body fits into no worker's context.
    #[error(
        "{} The body has more than {text_bytes_max} bytes of text.", over_context(*.context_tokens)
    )]
    BodyOverContext {
        /// The longest context, in tokens.
        context_tokens: u64,
        /// The most bytes of text that fit.
        text_bytes_max: usize,
    },
    /// The body grows too much as it is decompressed.
    #[error(
        "the body becomes more than {ratio_max} times longer when it is decompressed; send it as \
         it is"
    )]
    BodyRatio {
        /// How many times longer a body may become.
        ratio_max: usize,
    },
    /// The prompt has more tokens than any worker's context.
    #[error("{}", over_context((*.context_tokens).into()))]
    PromptOverContext {
        /// The longest context, in tokens.
        context_tokens: u32,
    },
    /// The body is too large, incomplete or too slow, or the memory for bodies is used up.
    #[error(transparent)]
    Body(#[from] Refusal),
    /// The body did not arrive within the turn's time limit.
    #[error("the request body did not arrive within turn_ms_max; send it faster")]
    BodyLate,
    /// The request's headers or body are invalid.
    #[error(transparent)]
    Request(#[from] request::Error),
    /// The turn gets no worker.
    #[error(transparent)]
    Decision(#[from] decide::Error),
    /// The turn's session was lost and can't be closed, so the turn can't open it again.
    #[error(transparent)]
    Session(#[from] sessions::Error),
    /// The agent gave no answer to the turn.
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    /// The stored response that the request names isn't the client's.
    #[error(
        "no worker has a response of yours with the id {id:?}: an engine keeps responses only with \
         --enable-response-store; send the whole conversation instead, or an id that was answered \
         to your own key"
    )]
    UnknownResponse {
        /// The beginning of the id.
        id: String,
    },
    /// The client aborted the turn while it waited here.
    #[error(transparent)]
    Aborted(Refusal),
}

/// Returns what a client reads whose prompt fits into no context. The first sentence is the
/// engine's, by which clients know to compact their history. It has the number of tokens of the
/// prompt; the router counts until there are too many.
fn over_context(context_tokens: u64) -> String {
    format!(
        "The input ({} tokens) is longer than the model's context length ({context_tokens} \
         tokens). The router counted no further; send a shorter prompt.",
        context_tokens.saturating_add(1)
    )
}

/// What the router's clients share, each within its own limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Requests that are served.
    Requests,
    /// Turns in flight.
    Turns,
    /// The memory for request bodies.
    BodyBytes,
    /// Open sessions.
    Sessions,
}

/// Returns the message of [`Error::Limit`].
fn limit_message(limit: Limit, refused: Refused) -> String {
    let (name, units) = match limit {
        Limit::Requests => ("the number of connections", "requests being served"),
        Limit::Turns => ("turns_in_flight_max", "turns in flight"),
        Limit::Sessions => ("sessions_max", "open sessions"),
        Limit::BodyBytes => ("body_bytes_in_flight_max", "bytes of request bodies"),
    };
    match refused {
        Refused::Full => format!("the router has {name} {units}; try again"),
        Refused::Share => {
            format!("this client has its share of the {units} that {name} allows; try again")
        }
        Refused::Class => format!(
            "the router has so many {units} that it refuses this priority class; try again, or \
             ask for a key of a higher class"
        ),
        Refused::Key => format!(
            "this key has its {name} {units}; wait for one to end, or ask for a higher limit"
        ),
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
    /// The agent doesn't recognize this router, so it has run nothing.
    #[error("worker {worker} doesn't accept this router's token; see agents.token_file")]
    NotARouter { worker: String },
    /// The request may have reached the worker, but no answer came.
    #[error("worker {worker} broke off before its answer began")]
    BrokenOff {
        worker: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// The agent has ended as planned, and closed the connection. It answers each turn that it
    /// takes, so it has not taken this one.
    #[error("worker {worker} ended before it took the turn")]
    Ended {
        worker: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// The worker broke off its answer before its first bytes.
    #[error("worker {worker} broke off before its answer began")]
    AnswerBrokenOff {
        worker: String,
        #[source]
        source: hyper::Error,
    },
    /// The prefill worker's answer has more bytes than any has.
    #[error("prefill worker {worker} sent more bytes than any prompt's answer has")]
    AnswerTooLong { worker: String },
    /// The two engines of a pair did not hand over the prompt's KV in time.
    #[error(
        "{prefill} and {decode} did not hand over the prompt's KV within \
         timeouts.bootstrap_ms_max; can {decode} connect to the bootstrap server of {prefill}?"
    )]
    HandOffLate {
        /// Name of the prefill worker.
        prefill: String,
        /// Name of the decode worker.
        decode: String,
    },
    /// This router has no file descriptor or port for a connection, so nothing was sent. The worker
    /// is not at fault.
    #[error("this router can't open a connection to worker {worker}")]
    NoDescriptors {
        worker: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    /// The worker's agent has stopped answering.
    #[error("worker {worker} has stopped answering")]
    Silent {
        worker: String,
        /// Whether the request may have reached the agent.
        was_sent: bool,
    },
    /// The agent could not abort turns at its engine.
    #[error("worker {worker} could not abort the turns; send the request again")]
    NotAborted { worker: String },
    /// The turn's time limit was reached.
    #[error("the turn took longer than turn_ms_max before its answer began")]
    TimedOut,
}

impl NoAnswer {
    /// Whether the turn can safely be sent again: only if the agent can't have run it.
    pub(crate) fn can_retry(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::Ended { .. }
                | Self::NotARouter { .. }
                | Self::Silent { was_sent: false, .. }
        )
    }
}
