//! Makes the request by which an agent gets a turn, and sends it.

use std::{sync::Arc, time::Instant};

use bytes::Bytes;
use contract::{bootstrap::Bootstrap, claim::Claim, envelope::TurnEnvelope, id::TurnId};
use http::{HeaderMap, HeaderValue, Request, Response, uri::PathAndQuery};
use http_body_util::Full;
use service::{
    auth::credential, proof::connection::is_busy, tls::client::is_certificate_refused,
    traces::record::SpanKind,
};

use crate::turn::{
    admit::OutboundTurn,
    agent_body::Incoming,
    error::NoAnswer,
    placer::assignment::{Assignment, Destination},
    shared::Shared,
    spans,
    upstream::{SendError, UpstreamClient, is_refused_as_stranger},
};

/// What the agent of one worker is told besides the client's request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told<'a> {
    pub(super) to: &'a Destination,
    pub(super) resident_tokens: Option<u64>,
    /// How the engine finds the other one of its pair. `None` for a whole turn.
    pub(super) bootstrap: Option<&'a Bootstrap>,
}

impl<'a> Told<'a> {
    /// Of a pair, what the agent of the decode half is told.
    pub(super) fn new(assignment: &'a Assignment) -> Self {
        Self {
            to: &assignment.to,
            resident_tokens: assignment.resident_tokens,
            bootstrap: assignment.prefill.as_ref().map(|prefill| &prefill.bootstrap),
        }
    }
}

/// Says of the turn what every request for its sake needs.
pub(super) fn envelope_of_any(outbound: &OutboundTurn, told: Told<'_>) -> TurnEnvelope {
    TurnEnvelope {
        turn: Some(TurnId(outbound.turn_id)),
        principal: Arc::clone(&outbound.arrival.caller.principal),
        rank: Some(told.to.worker.dp_rank),
        resident_tokens: told.resident_tokens.unwrap_or(0),
        ..TurnEnvelope::default()
    }
}

/// Any request to an agent for the sake of a turn.
pub(super) fn request_for_turn(
    outbound: &OutboundTurn,
    to: &Destination,
    path_and_query: PathAndQuery,
    headers: HeaderMap,
    envelope: &TurnEnvelope,
    body: Bytes,
) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = outbound.arrival.head.method.clone();
    *request.uri_mut() = to.uri(path_and_query);
    *request.headers_mut() = headers;
    let headers = request.headers_mut();
    if !to.is_on_this_host() {
        credential::remove(headers);
    }
    envelope.write(headers);
    request
}

/// The request runs the whole turn, or a half of it. `session` is `None` for a turn without a
/// session, and for a prefill half.
pub(super) fn turn_request(
    outbound: &OutboundTurn,
    told: Told<'_>,
    session: Option<&Claim>,
    body: Bytes,
) -> Request<Full<Bytes>> {
    let head = &outbound.arrival.head;
    let path_and_query = head.uri.path_and_query().cloned();
    let path_and_query = path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    let envelope = TurnEnvelope {
        session: session.cloned(),
        hints: outbound.turn.hints,
        bootstrap: told.bootstrap.cloned(),
        ..envelope_of_any(outbound, told)
    };
    request_for_turn(outbound, told.to, path_and_query, head.headers.clone(), &envelope, body)
}

/// Sends the whole turn, or the decode half.
pub(super) async fn send(
    shared: &Shared,
    outbound: &OutboundTurn,
    assignment: &Assignment,
    body: Bytes,
) -> Result<Response<Incoming>, NoAnswer> {
    let mut span = outbound.arrival.observers.trace.child("send", SpanKind::Client);
    span.set(spans::WORKER, &*assignment.to.name);
    let session = assignment.claim.as_ref();
    let mut request = turn_request(outbound, Told::new(assignment), session, body);
    span.inject(request.headers_mut());
    let deadline = outbound.arrival.deadline;
    let answer = send_request(&shared.upstream, &assignment.to, request, deadline).await;
    spans::record_head(&mut span, &answer);
    answer
}

pub(super) async fn send_request(
    upstream: &UpstreamClient,
    to: &Destination,
    request: Request<Full<Bytes>>,
    deadline: Instant,
) -> Result<Response<Incoming>, NoAnswer> {
    let worker_name = || to.name.clone();
    let answer = upstream.send(to.worker.agent, request, deadline).await;
    if answer.as_ref().is_ok_and(is_refused_as_stranger) {
        let reason =
            "the agent takes this router for a stranger: it has another token, or is called \
                      by a name that it doesn't know (its advertise.host)"
                .to_owned();
        upstream.report_unreachable(to.worker, reason);
        return Err(NoAnswer::NotARouter { worker: worker_name() });
    }
    answer.map_err(|error| match error {
        SendError::Http(source) if source.is_connect() || is_certificate_refused(&source) => {
            if !is_busy(&source) {
                upstream.report_unreachable(to.worker, service::log::describe_error(&source));
            }
            NoAnswer::Connect { worker: worker_name(), source }
        }
        SendError::Http(source) => NoAnswer::BrokenOff { worker: worker_name(), source },
        SendError::NoDescriptors(source) => {
            NoAnswer::NoDescriptors { worker: worker_name(), source }
        }
        SendError::Silent { was_sent } => NoAnswer::Silent { worker: worker_name(), was_sent },
        SendError::Late => NoAnswer::TimedOut,
    })
}

pub(in crate::turn) fn turn_id_header(turn_id: u64) -> HeaderValue {
    HeaderValue::try_from(TurnId(turn_id).to_string()).expect("hex digits are legal")
}
