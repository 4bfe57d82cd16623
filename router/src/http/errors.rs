//! Maps the router's errors to refusals: HTTP status, code, message and retry delay.
//!
//! Each message is short and says what to do next; details go to the log, which `http` writes.

use axum::extract::rejection::{PathRejection, QueryRejection};
use contract::{body, claim};
use service::{
    auth::unauthorized_refusal,
    refusal::{Code, Refusal},
};
use tonic::Status;

use crate::{
    auth,
    placement::NoWorker,
    sessions::{bindings::TableFull, check, lifecycle},
    shares::Refused,
    turn::{
        self,
        error::{Limit, NoAnswer},
        request,
    },
};

impl From<auth::Error> for Refusal {
    fn from(error: auth::Error) -> Self {
        match error {
            auth::Error::ScrapeKey => Self::new(Code::ScrapeKey, error.to_string()),
            auth::Error::TokenKeysAbsent => Self::new(Code::AuthUnavailable, error.to_string()),
            _ => unauthorized_refusal(&error.to_string()),
        }
    }
}

impl From<turn::error::Error> for Refusal {
    fn from(error: turn::error::Error) -> Self {
        use turn::error::Error;

        let message = error.to_string();
        let code = match error {
            Error::Body(refusal) => return refusal,
            Error::Request(error) => return error.into(),
            Error::Decision(error) => return error.into(),
            Error::Session(error) => return error.into(),
            Error::NoAnswer(error) => return error.into(),
            Error::Aborted(refusal) => return refusal,
            Error::UnknownResponse { .. } => Code::ResponseUnknown,
            Error::Limit { limit, refused } => limit_code(limit, refused),
            Error::RequestRate(wait) => {
                return Self::new(Code::RequestsPerMinute, message).retry_after(wait);
            }
            Error::TokenRate(wait) => {
                return Self::new(Code::TokensPerMinute, message).retry_after(wait);
            }
            Error::BatchOverShare { .. } => Code::BatchOverShare,
            Error::BodyRatio { .. } => Code::BodyTooLarge,
            Error::BodyOverContext { .. } | Error::PromptOverContext { .. } => {
                Code::ContextLengthExceeded
            }
            Error::BodyLate => Code::BodyLate,
        };
        Self::new(code, message)
    }
}

fn limit_code(limit: Limit, refused: Refused) -> Code {
    match (limit, refused) {
        // No key has a limit of requests at once.
        (Limit::Requests, Refused::Full | Refused::Share | Refused::Key) => Code::RequestsShare,
        (Limit::Turns, Refused::Full) => Code::TurnsInFlight,
        (Limit::Turns, Refused::Share) => Code::TurnsInFlightShare,
        (Limit::Turns, Refused::Key) => Code::KeyTurnsInFlight,
        (Limit::Sessions, _) => Code::KeySessions,
        (Limit::BodyBytes, Refused::Full) => Code::BodyBytesInFlight,
        // No key has a limit of bytes.
        (Limit::BodyBytes, Refused::Share | Refused::Key) => Code::BodyBytesShare,
        (_, Refused::Class) => Code::PriorityShed,
    }
}

impl From<request::Error> for Refusal {
    fn from(error: request::Error) -> Self {
        let code = match error {
            request::Error::Body(_) => Code::InvalidJson,
            request::Error::SessionId(_) => Code::InvalidSessionId,
            request::Error::Field { .. } => Code::InvalidField,
            request::Error::NotIsolated => Code::NotIsolated,
            request::Error::DeltaWithoutSession => Code::DeltaWithoutSession,
        };
        Self::new(code, error.to_string())
    }
}

impl From<check::Error> for Refusal {
    fn from(error: check::Error) -> Self {
        use check::Error;

        let message = error.to_string();
        let code = match error {
            Error::NoWorker(error) => return error.into(),
            Error::SessionsFull(TableFull::All) => Code::SessionsFull,
            Error::SessionsFull(TableFull::Share) => Code::SessionsShare,
            Error::DeltaWithoutHistory => Code::SessionUnknown,
            Error::SessionBusy | Error::Crowded => Code::SessionBusy,
            Error::Closing => Code::SessionClosing,
            Error::SessionLost { .. } => Code::SessionLost,
            Error::AgentRestarts { .. } => Code::WorkerUnreachable,
            Error::ResponseElsewhere { .. } => Code::ResponseElsewhere,
        };
        Self::new(code, message)
    }
}

impl From<lifecycle::Error> for Refusal {
    fn from(error: lifecycle::Error) -> Self {
        use lifecycle::Error;

        let message = error.to_string();
        match error {
            Error::Decision(error) => error.into(),
            Error::Unknown => Self::new(Code::SessionUnknown, message),
            Error::NoDemotion(_) => Self::new(Code::DemotionUnavailable, message),
            Error::NoPrefetch(_) => Self::new(Code::PrefetchUnavailable, message),
            Error::Agent(status) => agent_refusal(&status),
            Error::Internal => Self::new(Code::Internal, message),
        }
    }
}

impl From<NoWorker> for Refusal {
    fn from(error: NoWorker) -> Self {
        let code = match error {
            NoWorker::Unusable => Code::NoWorker,
            NoWorker::Disaggregated => Code::EnginesDisaggregated,
            NoWorker::NoPair => Code::NoPair,
            NoWorker::Unpaired(_) => Code::PairUnsupported,
            NoWorker::Model { .. } => Code::ModelNotFound,
            NoWorker::Retention { .. } => Code::RetentionUnavailable,
            NoWorker::Weights { .. } => Code::WeightsUnavailable,
        };
        Self::new(code, error.to_string())
    }
}

impl From<NoAnswer> for Refusal {
    fn from(error: NoAnswer) -> Self {
        match error {
            NoAnswer::Connect { .. }
            | NoAnswer::Ended { .. }
            | NoAnswer::NotARouter { .. }
            | NoAnswer::Silent { was_sent: false, .. } => unreachable_refusal(),
            NoAnswer::BrokenOff { .. }
            | NoAnswer::AnswerBrokenOff { .. }
            | NoAnswer::AnswerTooLong { .. } => Self::new(
                Code::WorkerBrokeOff,
                "the worker closed the connection before its answer began; the turn may have run, \
                 so check before you send it again",
            ),
            NoAnswer::NoDescriptors { .. } => Self::new(
                Code::RouterDescriptors,
                "this router has no file descriptor left for a connection to the worker; try again",
            ),
            NoAnswer::Silent { was_sent: true, .. } => Self::new(
                Code::WorkerSilent,
                "the worker has stopped answering, and the turn is given up; it may have run, so \
                 check before you send it again",
            ),
            NoAnswer::HandOffLate { .. } => Self::new(
                Code::HandOffLate,
                "the engines of this turn did not hand over its KV within \
                 timeouts.bootstrap_ms_max, and the turn is given up; try again",
            ),
            NoAnswer::NotAborted { .. } => Self::new(Code::WorkerUnreachable, error.to_string()),
            NoAnswer::TimedOut => Self::turn_timeout(),
        }
    }
}

fn unreachable_refusal() -> Refusal {
    Refusal::new(Code::WorkerUnreachable, "the worker can't be reached; try again")
}

/// Keeps the agent's own code. If the agent sent none, or one of a later version, the gRPC status
/// gives a general code.
fn agent_refusal(status: &Status) -> Refusal {
    if status.code() == tonic::Code::Unauthenticated {
        // The agent doesn't recognize this router, which its operator has to mend.
        return unreachable_refusal();
    }
    let message = status.message().to_owned();
    let agent_code = status.metadata().as_ref().get(claim::REFUSAL);
    if let Some(code) = agent_code.and_then(|code| Code::of_agent(code.as_bytes())) {
        return Refusal::new(code, message);
    }
    match status.code() {
        tonic::Code::ResourceExhausted => Refusal::new(Code::WorkerFull, message),
        tonic::Code::FailedPrecondition => Refusal::new(Code::RetentionUnavailable, message),
        tonic::Code::NotFound => lifecycle::Error::Unknown.into(),
        tonic::Code::InvalidArgument => Refusal::new(Code::InvalidField, message),
        tonic::Code::DeadlineExceeded => Refusal::new(Code::WorkerTimeout, message),
        tonic::Code::Unavailable => unreachable_refusal(),
        _ => Refusal::new(Code::WorkerFailed, "the worker failed; see the router's log"),
    }
}

pub(super) fn route_unknown_refusal() -> Refusal {
    Refusal::new(Code::RouteUnknown, "no such route; see the API reference")
}

pub(super) fn method_refusal() -> Refusal {
    let message = "this route doesn't support this method; use one that `Allow` lists";
    Refusal::new(Code::MethodNotAllowed, message)
}

pub(super) fn path_refusal(rejection: &PathRejection) -> Refusal {
    let message = format!("{}; escape the UTF-8 bytes of the id", rejection.body_text());
    Refusal::new(Code::InvalidPath, message)
}

pub(super) fn placement_unknown_refusal() -> Refusal {
    Refusal::new(
        Code::PlacementUnknown,
        "this router keeps no placement of this turn; ask soon after the turn, with the id of its \
         answer's x-berth-turn header",
    )
}

pub(super) fn body_refusal(error: &serde_json::Error, bytes: &[u8]) -> Refusal {
    let fault = body::Fault::new(error, bytes);
    Refusal::new(Code::InvalidJson, format!("the body is wrong: {fault}"))
}

pub(super) fn query_refusal(error: &QueryRejection) -> Refusal {
    Refusal::new(Code::InvalidField, format!("the query is wrong: {error}"))
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use bytes::Bytes;
    use http::{HeaderValue, Request};
    use http_body_util::Full;
    use hyper_util::client::legacy::connect::HttpConnector;
    use service::http_client::{self, HttpClient, IdleLimits};

    use super::*;
    use crate::placement::Unpaired;
    #[test]
    fn a_client_hears_the_agents_own_code_or_what_its_grpc_status_says() {
        use tonic::Code as G;

        let cases = [
            (G::ResourceExhausted, Some("rows"), Code::Rows),
            (G::FailedPrecondition, Some("session_closing"), Code::SessionClosing),
            (G::InvalidArgument, Some("no_rank"), Code::NoRank),
            (G::Unavailable, Some("open_failed"), Code::OpenFailed),
            // Only a router makes this code, so an agent that sends it is not believed.
            (G::Unavailable, Some("internal"), Code::WorkerUnreachable),
            // What the agent refuses is the router, so its client can do nothing.
            (G::Unauthenticated, Some("not_a_router"), Code::WorkerUnreachable),
            (G::ResourceExhausted, Some("of_a_later_version"), Code::WorkerFull),
            (G::FailedPrecondition, None, Code::RetentionUnavailable),
            (G::NotFound, None, Code::SessionUnknown),
            (G::InvalidArgument, None, Code::InvalidField),
            (G::DeadlineExceeded, None, Code::WorkerTimeout),
            (G::Unavailable, None, Code::WorkerUnreachable),
            (G::Unknown, None, Code::WorkerFailed),
        ];
        for (grpc_code, sent, code) in cases {
            let mut status = Status::new(grpc_code, "why");
            if let Some(sent) = sent {
                let sent = HeaderValue::from_static(sent);
                status.metadata_mut().as_mut().insert(claim::REFUSAL, sent);
            }
            assert_eq!(agent_refusal(&status).code, code, "{grpc_code:?} {sent:?}");
        }
    }

    #[test]
    fn errors_without_an_agent_have_codes_of_the_router() {
        let model = NoWorker::Model { model: "m".into(), offered: "n".into() };
        let weights = NoWorker::Weights { wanted: "3".into(), offered: "2".into() };
        let silent = |was_sent| NoAnswer::Silent { worker: "w".into(), was_sent }.into();
        let limit = |limit, refused| Refusal::from(turn::error::Error::Limit { limit, refused });
        let late = NoAnswer::HandOffLate { prefill: "p".into(), decode: "d".into() };
        let cases = [
            (Refusal::from(NoWorker::Unusable), Code::NoWorker),
            (NoWorker::Disaggregated.into(), Code::EnginesDisaggregated),
            (NoWorker::NoPair.into(), Code::NoPair),
            (late.into(), Code::HandOffLate),
            (NoWorker::Unpaired(Unpaired::Echo).into(), Code::PairUnsupported),
            (weights.into(), Code::WeightsUnavailable),
            (model.into(), Code::ModelNotFound),
            (check::Error::SessionsFull(TableFull::All).into(), Code::SessionsFull),
            (check::Error::SessionsFull(TableFull::Share).into(), Code::SessionsShare),
            (limit(Limit::Sessions, Refused::Key), Code::KeySessions),
            (limit(Limit::Requests, Refused::Share), Code::RequestsShare),
            (limit(Limit::BodyBytes, Refused::Full), Code::BodyBytesInFlight),
            (limit(Limit::BodyBytes, Refused::Share), Code::BodyBytesShare),
            (check::Error::Closing.into(), Code::SessionClosing),
            (lifecycle::Error::Internal.into(), Code::Internal),
            (silent(false), Code::WorkerUnreachable),
            (silent(true), Code::WorkerSilent),
        ];
        for (refusal, code) in cases {
            assert_eq!(refusal.code, code);
        }
    }

    /// Returns the error of a connection for which this host has no port. An address that the host
    /// doesn't have stands for the shortage.
    async fn shortage() -> http_client::Error {
        let mut connector = HttpConnector::new();
        connector.set_local_address(Some(Ipv4Addr::new(203, 0, 113, 1).into()));
        let limits = IdleLimits { time_max: Duration::ZERO, per_host_max: 0 };
        let client = HttpClient::new(connector, limits);
        let request = Request::get("http://127.0.0.1:9/").body(Full::<Bytes>::default()).unwrap();
        client.request(request).await.unwrap_err()
    }

    #[tokio::test]
    async fn a_router_without_descriptors_does_not_blame_the_worker() {
        let source = shortage().await;
        assert!(service::descriptors::is_shortage(&source), "{source:?}");
        let refusal = Refusal::from(NoAnswer::NoDescriptors { worker: "w".into(), source });
        assert_eq!(refusal.code, Code::RouterDescriptors);
    }
}
