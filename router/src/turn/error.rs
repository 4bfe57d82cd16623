//! Lists the reasons for which the router refuses a turn.

use std::time::Duration;

use service::{http_client, refusal::Refusal};

use super::{agent_body::BodyError, request};
use crate::{
    sessions::{check, lifecycle},
    shares::Refused,
};

/// The messages are for the client.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{}", limit_message(*.limit, *.refused))]
    Limit {
        limit: Limit,
        /// Which limit is reached.
        refused: Refused,
    },
    #[error(
        "this turn has {sequences} sequences (prompts times answers), and this client may have \
         {sequences_max} in flight by turns_in_flight_max; send batches of at most so many"
    )]
    BatchOverShare {
        sequences: u32,
        /// The most that one client may have in flight.
        sequences_max: u32,
    },
    #[error("this key has used its requests_per_minute; wait as long as Retry-After says")]
    RequestRate(Duration),
    #[error("this key has used its tokens_per_minute; wait as long as Retry-After says")]
    TokenRate(Duration),
    #[error(
        "{} The body has more than {text_bytes_max} bytes of text.", over_context(*.context_tokens)
    )]
    BodyOverContext {
        /// The longest context of any worker.
        context_tokens: u64,
        text_bytes_max: usize,
    },
    #[error(
        "the body becomes more than {ratio_max} times longer when it is decompressed; send it as \
         it is"
    )]
    BodyRatio {
        /// How many times longer a body may become.
        ratio_max: usize,
    },
    #[error("{}", over_context((*.context_tokens).into()))]
    PromptOverContext {
        /// The longest context of any worker.
        context_tokens: u32,
    },
    /// The body is too large, incomplete or too slow.
    #[error(transparent)]
    Body(#[from] Refusal),
    #[error("the request body did not arrive within turn_ms_max; send it faster")]
    BodyLate,
    #[error(transparent)]
    Request(#[from] request::Error),
    #[error(transparent)]
    Decision(#[from] check::Error),
    /// The lost session can't be closed, so the turn can't open it again.
    #[error(transparent)]
    Session(#[from] lifecycle::Error),
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
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

/// The first sentence is the engine's, by which clients know to compact their history. Its count is
/// the limit plus one: the router counts no further.
fn over_context(context_tokens: u64) -> String {
    format!(
        "The input ({} tokens) is longer than the model's context length ({context_tokens} \
         tokens). The router counted no further; send a shorter prompt.",
        context_tokens.saturating_add(1)
    )
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    Requests,
    Turns,
    BodyBytes,
    Sessions,
}

fn limit_message(limit: Limit, refused: Refused) -> String {
    let (name, units) = match limit {
        Limit::Requests => ("the number of connections", "requests being served"),
        Limit::Turns => ("turns_in_flight_max", "turns in flight"),
        Limit::Sessions => ("sessions_max", "open sessions"),
        Limit::BodyBytes => ("body_bytes_in_flight_max", "bytes of request bodies"),
    };
    match refused {
        Refused::Full if limit == Limit::Requests => {
            "the router serves as many requests as its connections allow; try again".to_owned()
        }
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

#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    /// Nothing was sent.
    #[error("worker {worker} can't be reached")]
    Connect {
        worker: String,
        #[source]
        source: http_client::Error,
    },
    /// The agent has run nothing.
    #[error("worker {worker} doesn't accept this router's token; see agents.token_file")]
    NotARouter { worker: String },
    /// Before the head of an answer. The request may have reached the worker.
    #[error("worker {worker} broke off before its answer began")]
    BrokenOff {
        worker: String,
        #[source]
        source: http_client::Error,
    },
    /// The agent answers each turn that it takes, so it has not taken this one.
    #[error("worker {worker} ended before it took the turn")]
    Ended {
        worker: String,
        #[source]
        source: http_client::Error,
    },
    /// After the head, before any body; from a prefill worker, also later.
    #[error("worker {worker} broke off before its answer began")]
    AnswerBrokenOff {
        worker: String,
        #[source]
        source: BodyError,
    },
    #[error("prefill worker {worker} sent more bytes than any prompt's answer has")]
    AnswerTooLong { worker: String },
    #[error(
        "{prefill} and {decode} did not hand over the prompt's KV within \
         timeouts.bootstrap_ms_max; can {decode} connect to the bootstrap server of {prefill}?"
    )]
    HandOffLate {
        /// Name of the prefill worker.
        prefill: String,
        decode: String,
    },
    /// No file descriptor or port is left here. Nothing was sent; the worker is not at fault.
    #[error("this router can't open a connection to worker {worker}")]
    NoDescriptors {
        worker: String,
        #[source]
        source: http_client::Error,
    },
    #[error("worker {worker} has stopped answering")]
    Silent {
        worker: String,
        /// Whether the request may have reached the agent.
        was_sent: bool,
    },
    #[error("worker {worker} could not abort the turns; send the request again")]
    NotAborted { worker: String },
    #[error("the turn took longer than turn_ms_max before its answer began")]
    TimedOut,
}

impl NoAnswer {
    /// Only if the agent can't have run the turn.
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
