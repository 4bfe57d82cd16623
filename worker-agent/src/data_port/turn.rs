//! Takes one turn through the agent, from the client to the engine.
//!
//! The claim ends when the *engine* has ended the turn, even if the client disconnects before,
//! because only then can the session take another turn. This module decides nothing about sessions.
//!
//! A turn has several ids: `turn_id` is the router's, by which people find the turn. `rid` is the
//! agent's, which the session table uses. The engine gets it as `engine_rid`, with a prefix where
//! the route needs one. And `client_rid` is the name by which the client aborts the turn.

use std::{sync::Arc, time::Duration};

use axum::{body::Body, extract::Request, response::Response};
use bytes::Bytes;
use contract::{
    abort::REQUEST_ID,
    claim::Claim,
    envelope::{self, TurnEnvelope},
    id::TurnId,
    load::WEIGHTS,
    route::{GENERATE, Kind, Route},
    turn_rid::RESPONSE_PREFIX,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use service::{
    auth::credential,
    budget::{BodyBudget, HeldBody},
    clock::now,
    descriptors,
    headers::{strip_engine_answer, strip_request},
    http_client,
    places::{INLINE_BYTES_MAX, Places},
    refusal::{Code, Refusal, is_first_try},
    tasks::Tasks,
    traces::{Traces, record::SpanKind, span::Trace},
};
use tokio::sync::Notify;
use tracing::debug;

use super::{
    aborts::{self, AgentTurn, AgentTurns},
    body_parts::BodyParts,
    exchange::Exchange,
    refusals::{connection_refusal, engine_key_refusal, refusal},
    request::{self, BodyContext, ParsedRequest},
    route_features::route_turns,
    router_auth::{Caller, RouterAuth},
    shim_headers::{add_shim_headers, requires_continuation},
    spans,
};
use crate::{
    engine::{self, EngineClient},
    metrics::Metrics,
    owner::{
        Admission, AdmissionRequest, AdmittedTurn, AgentHandle, EngineNews, TurnLease, TurnRun,
    },
    session::{self, ClaimRequest, PlannedTurn, RunMode},
};

/// Tokens reserved for a pinned session's turn beyond the session's history. Without a token limit,
/// as many as the engine allows.
const GROWTH_HEADER: HeaderName = HeaderName::from_static("x-berth-growth-tokens");
/// The value is the name of a `RunMode`.
const RUN_MODE_HEADER: HeaderName = HeaderName::from_static("x-berth-session-turn");

/// What all turns share. Each of them holds it.
#[derive(Debug)]
pub struct TurnContext {
    pub agent: AgentHandle,
    pub router_auth: RouterAuth,
    pub engine: EngineClient,
    /// Limits the bytes of all request bodies in memory together.
    pub body_budget: BodyBudget,
    /// Shares out the processors among the clients with long bodies.
    pub reading: Arc<Places>,
    pub turn_time_max: Duration,
    pub wake_monitor: Arc<Notify>,
    /// Runs the tasks that wait for the turns of clients that have disconnected.
    pub tasks: Tasks,
    pub turns: AgentTurns,
    pub metrics: Metrics,
    pub traces: Traces,
}

impl TurnContext {
    /// If the engine refuses connections, its process has ended. This function then waits until the
    /// owner task's mailbox has the news. Otherwise a turn could reach a restarted engine while the
    /// owner still believes that the old process runs. `process` is the one that the turn was for:
    /// the owner may know its successor by now.
    pub(super) async fn report_engine_failure(&self, process: u64, error: &http_client::Error) {
        if descriptors::is_shortage(error) {
            return;
        }
        if engine::is_connection_refused(error) {
            self.agent.report_engine(EngineNews::RefusesConnections { process }).await;
        }
        self.wake_monitor.notify_one();
    }
}

/// Sends a turn of the agent itself on the path of turns from routers. `caller` is that of the
/// client's request for which it is sent.
pub async fn send_own_turn(
    context: &Arc<TurnContext>,
    caller: Caller,
    envelope: TurnEnvelope,
    trace_headers: &HeaderMap,
    body: String,
) -> Result<Response, Refusal> {
    let mut request = Request::post(GENERATE.path)
        .header(header::CONTENT_TYPE, "application/json")
        .extension(caller)
        .body(Body::from(body))
        .expect("a route's path is legal");
    request.headers_mut().extend(trace_headers.clone());
    serve_traced(context, GENERATE, request, Ok(envelope), "stage").await
}

pub(super) async fn serve_request(
    context: &Arc<TurnContext>,
    route: Route,
    request: Request,
) -> Result<Response, Refusal> {
    if !route.kind.is_turn() {
        let (request_head, body) = request.into_parts();
        let passed = pass_through(context, request_head, body).await;
        return passed.map_err(|refusal| refusal.allow_repeat(true));
    }
    let envelope = TurnEnvelope::read(request.headers());
    serve_traced(context, route, request, envelope, "turn").await
}

async fn serve_traced(
    context: &Arc<TurnContext>,
    route: Route,
    request: Request,
    envelope: Result<TurnEnvelope, envelope::Error>,
    span_name: &'static str,
) -> Result<Response, Refusal> {
    let (mut request_head, body) = request.into_parts();
    let trace =
        spans::begin(&context.traces, &mut request_head.headers, route.path, span_name, &envelope);
    let serving = Box::pin(serve_turn(context, route, request_head, body, envelope, trace.clone()));
    serving.await.inspect_err(|refusal| spans::refuse(&trace, refusal))
}

async fn serve_turn(
    context: &Arc<TurnContext>,
    route: Route,
    request_head: http::request::Parts,
    body: Body,
    envelope: Result<TurnEnvelope, envelope::Error>,
    trace: Trace,
) -> Result<Response, Refusal> {
    check_encoding(&request_head.headers)?;
    let envelope = envelope.map_err(|error| Refusal::new(Code::Claim, error.to_string()))?;
    let TurnEnvelope {
        turn: turn_id,
        principal,
        session: claim,
        rank: requested_rank,
        resident_tokens,
        hints,
        bootstrap,
    } = envelope;
    let is_idempotent = claim.as_ref().is_none_or(Claim::is_idempotent);
    let may_repeat = is_idempotent && is_first_try(&request_head.headers);
    let request = ClaimRequest {
        principal: Arc::clone(&principal),
        claim,
        is_hint: hints.session,
        returns_soon: hints.returns_soon,
        requested_rank,
        route_turns: route_turns(route.kind),
    };
    let facts = context.agent.body_facts().map_err(|error| refusal(&error))?;
    let place = Place::claim_session(context, request).await?;
    let held_body = context.body_budget.read(body).await?;
    // The body is checked before the turn waits for room or takes room from other sessions.
    let body_context = BodyContext {
        kind: route.kind,
        in_session: place.is_in_session(),
        vocabulary_size: facts.vocabulary_size,
        resident_tokens,
        served_model: facts.served_model.clone(),
    };
    let mut parsed = parse_body(context, &principal, body_context, &held_body.bytes).await?;
    parsed.apply_hints(hints, facts.priority_order);
    parsed.apply_bootstrap(bootstrap);
    let prompt_start = std::mem::take(&mut parsed.prompt_start);
    let waits_since = now();
    let request = AdmissionRequest { need: parsed.need, prompt_start, facts };
    let (lease, admission) = place.request_admission(context, request).await?;
    let rid = engine_rid(route.kind, &lease.rid);
    let headers = &request_head.headers;
    let running = aborts::add_turn(&context.turns, turn_id, &principal, &parsed, headers, rid);
    let admission = tokio::select! {
        biased;
        () = running.aborted() => return aborts::answer_unsent(route.kind, &parsed),
        admission = trace.within("queue", admission.wait()) => admission,
    };
    let admitted = admission.map_err(|error| refusal(&error))?;
    context.metrics.record_queue_wait(now().saturating_duration_since(waits_since));
    ReadTurn { route, turn_id, request_head, parsed, held_body, lease, running, trace }
        .run_at_engine(context, admitted)
        .await
        .map_err(|refusal| refusal.allow_repeat(may_repeat))
}

struct ReadTurn {
    route: Route,
    turn_id: Option<TurnId>,
    request_head: http::request::Parts,
    parsed: ParsedRequest,
    held_body: HeldBody,
    lease: TurnLease,
    running: AgentTurn,
    trace: Trace,
}

impl ReadTurn {
    async fn run_at_engine(
        self,
        context: &Arc<TurnContext>,
        admitted: AdmittedTurn,
    ) -> Result<Response, Refusal> {
        let Self { route, turn_id, request_head, parsed, held_body, mut lease, running, trace } =
            self;
        if running.is_aborted() {
            return aborts::answer_unsent(route.kind, &parsed);
        }
        let AdmittedTurn { turn, run_mode: run_mode_receiver } = admitted;
        let engine_body = parsed.engine_body(&held_body.bytes, &turn, &lease.rid);
        debug!(
            rid = lease.rid,
            client_rid = parsed.client_rid,
            turn = turn_id.map(tracing::field::display),
            request_id = request_head.headers.get(&REQUEST_ID).and_then(|id| id.to_str().ok()),
            route = route.path,
            "turn begins"
        );
        let body = Body::new(BodyParts::new(engine_body, Some(held_body)));
        let caller = Caller::read(&request_head);
        let mut outgoing = engine_request(context, request_head, body);
        add_shim_headers(outgoing.headers_mut(), route.kind, &turn, &lease.rid);
        let engine_span = trace.child("engine", SpanKind::Client);
        engine_span.inject(outgoing.headers_mut());
        lease.mark_sent();
        let abort_confirms_end = parsed.has_single_answer && route.kind.rid_key().is_some();
        let engine_turn = (engine_rid(route.kind, &lease.rid), turn.dp_rank);
        let answer = context.engine.send(outgoing);
        let mut exchange = Exchange::new(
            Arc::clone(context),
            engine_turn,
            lease,
            answer,
            abort_confirms_end,
            running,
            trace,
        );
        let answer_head = exchange.wait_for_head().await;
        drop(engine_span);
        let answer_head = answer_head?;
        if let Some(refusal) = engine_key_refusal(answer_head.status, caller) {
            exchange.finish_refused().await;
            return Err(refusal);
        }
        let must_continue = requires_continuation(&turn);
        let run = match exchange
            .wait_for_run_mode(run_mode_receiver, answer_head.status, must_continue)
            .await
        {
            Some(Err(error)) => {
                exchange.finish_refused().await;
                return Err(refusal(&error.into()));
            }
            Some(Ok(run)) => Some(run),
            None => None,
        };
        if runs_in_session(&turn, run) {
            // The turn may have run on older KV.
            if context.agent.weights.borrow().epoch() != turn.weights_epoch {
                return Err(refusal(&session::Error::WeightsChanged.into()));
            }
            exchange.watch_weights(turn.weights_epoch);
        }
        let mut response = client_response(answer_head, exchange);
        add_turn_headers(response.headers_mut(), context, &turn, run);
        Ok(response)
    }
}

fn add_turn_headers(
    headers: &mut HeaderMap,
    context: &TurnContext,
    turn: &PlannedTurn,
    run: Option<TurnRun>,
) {
    if let Some(weights) = context.agent.weights.borrow().header(turn.weights_epoch) {
        headers.insert(WEIGHTS, weights);
    }
    let Some(TurnRun { run_mode, growth_tokens_max }) = run else { return };
    headers.insert(RUN_MODE_HEADER, HeaderValue::from_static(run_mode.as_str()));
    if let Some(growth_tokens) = growth_tokens_max {
        headers.insert(GROWTH_HEADER, growth_tokens.into());
    }
}

/// `run`: how the shim's plan lets the turn run; `None` if it has no plan, or that came too late.
fn runs_in_session(turn: &PlannedTurn, run: Option<TurnRun>) -> bool {
    let is_trimmed = turn.session.as_ref().is_some_and(|session| session.trim.is_some());
    match run {
        Some(TurnRun { run_mode: RunMode::Pinned | RunMode::Reopened, .. }) => true,
        Some(_) => false,
        None => turn.names_pin() || is_trimmed,
    }
}

/// What a turn has while its body is read.
enum Place {
    /// A turn of a session, or one that was to be: so no other turn of the session can start during
    /// a slow upload. Dropping the lease ends the turn and frees the session.
    Claimed { lease: TurnLease, in_session: bool },
    /// A turn without a session takes its place when its body is there.
    Unclaimed(ClaimRequest),
}

impl Place {
    async fn claim_session(context: &TurnContext, request: ClaimRequest) -> Result<Self, Refusal> {
        if request.claim.is_none() {
            return Ok(Self::Unclaimed(request));
        }
        let claim_result = context.agent.claim(request).await;
        let mut lease = claim_result.map_err(|error| refusal(&error))?;
        let session_left_out = lease.session_left_out.take();
        let in_session = session_left_out.is_none();
        if let Some(error) = session_left_out {
            context.metrics.count_session_left_out(refusal(&error.into()).code.as_str());
        }
        Ok(Self::Claimed { lease, in_session })
    }

    fn is_in_session(&self) -> bool {
        matches!(self, Self::Claimed { in_session: true, .. })
    }

    async fn request_admission(
        self,
        context: &TurnContext,
        request: AdmissionRequest,
    ) -> Result<(TurnLease, Admission), Refusal> {
        let requested = match self {
            Self::Claimed { lease, .. } => {
                let admission = lease.request_admission(request).await;
                admission.map(|admission| (lease, admission))
            }
            Self::Unclaimed(claim) => context.agent.claim_and_admit(claim, request).await,
        };
        requested.map_err(|error| refusal(&error))
    }
}

/// A long body is parsed on a blocking thread, in a place of its sender.
async fn parse_body(
    context: &TurnContext,
    principal: &Arc<str>,
    body_context: BodyContext,
    bytes: &Bytes,
) -> Result<ParsedRequest, Refusal> {
    if bytes.len() <= INLINE_BYTES_MAX {
        return request::parse(&body_context, bytes);
    }
    let bytes = bytes.clone();
    let parsing = context.reading.run(principal, move || request::parse(&body_context, &bytes));
    let parsed = tokio::time::timeout(context.turn_time_max, parsing).await;
    parsed.map_err(|_| Refusal::turn_timeout())?
}

/// The agent must find and replace keys in the body.
fn check_encoding(headers: &HeaderMap) -> Result<(), Refusal> {
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => {
            let message = "compressed bodies are not taken; send the body as it is";
            Err(Refusal::new(Code::ContentEncoding, message))
        }
        _ => Ok(()),
    }
}

/// Ids of the Responses API have a prefix.
fn engine_rid(kind: Kind, rid: &str) -> String {
    if kind == Kind::Responses { format!("{RESPONSE_PREFIX}{rid}") } else { rid.to_owned() }
}

/// A request that is not a turn needs no claim and isn't counted.
pub(super) async fn pass_through(
    context: &TurnContext,
    request_head: http::request::Parts,
    body: Body,
) -> Result<Response, Refusal> {
    let caller = Caller::read(&request_head);
    let held_body = context.body_budget.read(body).await?;
    let bytes = held_body.bytes.clone();
    let body = Body::new(BodyParts::new(vec![bytes], Some(held_body)));
    let outgoing = engine_request(context, request_head, body);
    let send_result =
        tokio::time::timeout(context.turn_time_max, context.engine.send(outgoing)).await;
    let response = send_result
        .map_err(|_| Refusal::turn_timeout())?
        .map_err(|error| connection_refusal(&error))?;
    let (head, body) = response.into_parts();
    match engine_key_refusal(head.status, caller) {
        Some(refusal) => Err(refusal),
        None => Ok(Response::from_parts(response_head(head), Body::new(body))),
    }
}

fn engine_request(
    context: &TurnContext,
    mut request_head: http::request::Parts,
    body: Body,
) -> Request {
    let caller = Caller::read(&request_head);
    // What follows from the client's connection isn't for the engine.
    request_head.version = http::Version::HTTP_11;
    request_head.extensions = http::Extensions::new();
    let headers = &mut request_head.headers;
    strip_request(headers);
    // The agent must see in the answer how the turn ended, so the answer must not be compressed.
    headers.remove(header::ACCEPT_ENCODING);
    set_credential(context, caller, headers);
    Request::from_parts(request_head, body)
}

/// A router has checked its client. Anyone else is for the engine itself to check.
fn set_credential(context: &TurnContext, caller: Caller, headers: &mut HeaderMap) {
    if caller == Caller::Router {
        credential::remove(headers);
        if let Some(key) = context.engine.api_key() {
            headers.insert(header::AUTHORIZATION, key.clone());
        }
    }
}

fn response_head(mut head: http::response::Parts) -> http::response::Parts {
    strip_engine_answer(&mut head.headers);
    if head.status.is_informational() {
        // Another protocol would begin here, past all that is counted and checked.
        head.status = StatusCode::BAD_GATEWAY;
    }
    head.version = http::Version::HTTP_11;
    head.extensions = http::Extensions::new();
    head
}

fn client_response(head: http::response::Parts, exchange: Exchange) -> Response {
    let mut head = response_head(head);
    if let Ok(rid) = HeaderValue::from_str(exchange.engine_rid()) {
        head.headers.insert("x-berth-rid", rid);
    }
    Response::from_parts(head, Body::new(exchange))
}

#[cfg(test)]
mod tests {
    use contract::{id::SessionKey, load::Retention};

    use super::*;
    use crate::session::{TrimRequest, TurnSession};

    #[test]
    fn a_turn_counts_as_in_its_session_wherever_it_may_continue_the_session_s_kv() {
        let turn = |retention, trim| PlannedTurn {
            session: Some(TurnSession {
                key: SessionKey::new("p".to_owned(), "s".to_owned()).unwrap(),
                incarnation: "i".to_owned(),
                retention,
                trim,
            }),
            dp_rank: 0,
            growth_tokens_max: None,
            weights_epoch: 0,
            run_mode: None,
        };
        let run = |run_mode| Some(TurnRun { run_mode, growth_tokens_max: None });
        let trim = Some(TrimRequest { tokens_max: 1, must_continue: false });
        let trimmed = turn(Retention::Tagged, trim);
        assert!(runs_in_session(&trimmed, run(RunMode::Pinned)));
        assert!(runs_in_session(&trimmed, run(RunMode::Reopened)));
        assert!(runs_in_session(&trimmed, None), "nobody knows");
        assert!(!runs_in_session(&trimmed, run(RunMode::Tagged)), "it ran beside the session");
        assert!(runs_in_session(&turn(Retention::Pinned, None), None));
        assert!(!runs_in_session(&turn(Retention::Tagged, None), None));
    }

    #[test]
    fn an_engine_opens_no_other_protocol_and_speaks_neither_to_browsers_nor_as_an_agent() {
        let engine = Response::builder()
            .status(StatusCode::SWITCHING_PROTOCOLS)
            .header("upgrade", "websocket")
            .header("set-cookie", "a=b")
            .header("access-control-allow-origin", "*")
            .header("x-berth-refusal", "not_a_router")
            .header("retry-after", "3")
            .body(())
            .unwrap();
        let head = response_head(engine.into_parts().0);
        assert_eq!(head.status, StatusCode::BAD_GATEWAY);
        let names = Vec::from_iter(head.headers.keys().map(http::HeaderName::as_str));
        assert_eq!(names, ["retry-after"]);
    }
}
