//! The path of a turn through the agent.
//!
//! The agent claims the session, reads the body, inserts Berth's keys, sends the turn to the engine
//! and passes the answer through. It holds the session until the *engine* has ended the turn,
//! whatever the client does.
//!
//! The answer's bytes are never changed. If the client disconnects, a task aborts the turn at the
//! engine and waits for the engine to end it.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::Request, response::Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use http_body::{Frame, SizeHint};
use proto::{
    claim::{self, Claim},
    route::{GENERATE, Kind, ROUTES, Route},
};
use service::{
    budget::BodyBudget,
    headers::{remove_hop_by_hop, strip_request},
    refusal::Refusal,
    tasks::Tasks,
};
use tokio::sync::Notify;
use tracing::debug;

use super::{
    exchange::Exchange,
    refusals::{refusal, timeout_refusal, unreachable_refusal},
    request::{self, ParsedRequest},
    routes::{actual_run_mode, pinned_input},
};
use crate::{
    engine::{self, Engine},
    metrics::Metrics,
    owner::{AdmittedTurn, AgentHandle, EngineNews},
    session::{Need, Turn},
};

/// Response header of a pinned turn: the tokens of KV reserved for the turn beyond the session's
/// history. For a turn without a token limit this is as much as the engine allows.
const GROWTH_HEADER: HeaderName = HeaderName::from_static("x-berth-growth-tokens");
/// Response header of a session's turn: how the turn ran, as [`RunMode`](crate::session::RunMode)
/// names it.
const RUN_MODE_HEADER: HeaderName = HeaderName::from_static("x-berth-session-turn");
/// Request header to the engine for a turn with a full history. The value is the maximum number of
/// prompt tokens with which the shim may trim the turn, the session's id in the engine, and the
/// turn's id.
const TRIM_HEADER: HeaderName = HeaderName::from_static("x-override-berth-trim");
/// Request header to the engine, sent with [`TRIM_HEADER`]: the turn must continue its session's
/// history, or is refused. A shim that doesn't know the header runs such a turn outside the
/// session; the agent then aborts the turn.
const MUST_CONTINUE_HEADER: HeaderName = HeaderName::from_static("x-override-berth-must-continue");

/// Shared state of all turns.
#[derive(Debug, Clone)]
pub struct TurnContext {
    /// Admits turns.
    pub agent: AgentHandle,
    /// The engine that turns are sent to.
    pub engine: Engine,
    /// The limit on request bodies in memory.
    pub body_budget: BodyBudget,
    /// The time limit of a turn, after which it is aborted.
    pub turn_max: Duration,
    /// Wakes the task that follows the engine's state.
    pub wake_monitor: Arc<Notify>,
    /// Runs the turns of clients that have disconnected.
    pub tasks: Tasks,
    /// The agent's metrics.
    pub metrics: Metrics,
}

impl TurnContext {
    /// Reports that a turn could not be sent to the engine. If the engine refuses connections, this
    /// waits until the owner has the news, so that no turn reaches a restarted engine before the
    /// owner knows that the old process is gone.
    pub(super) async fn engine_failed(&self, error: &hyper_util::client::legacy::Error) {
        if engine::is_connection_refused(error) {
            let reason = "the engine accepts no connections".to_owned();
            self.agent.report_engine(EngineNews::Down { reason, gone: true }).await;
        }
        self.wake_monitor.notify_one();
    }
}

/// Sends a turn of the agent itself, without a session. It takes the same path as turns from
/// routers.
///
/// # Errors
/// Why the turn was refused, or could not be sent.
pub async fn send_own_turn(
    context: &TurnContext,
    dp_rank: u32,
    resident_tokens: u64,
    body: String,
) -> Result<Response, Refusal> {
    let request = Request::post(GENERATE.path)
        .header(header::CONTENT_TYPE, "application/json")
        .header(claim::RANK, dp_rank)
        .header(claim::RESIDENT, resident_tokens)
        .body(Body::from(body))
        .expect("a route's path and a number are legal");
    serve_request(context, GENERATE, request).await
}

/// Serves one request: runs a turn, or passes on a request that is not a turn.
pub(super) async fn serve_request(
    context: &TurnContext,
    route: Route,
    request: Request,
) -> Result<Response, Refusal> {
    let (parts, body) = request.into_parts();
    if !route.kind.is_turn() {
        return pass_through(context, &parts, body).await;
    }
    check_encoding(&parts.headers)?;
    let bad = |error: claim::Error| Refusal::bad_request("claim", error.to_string());
    let claim = Claim::from_headers(&parts.headers).map_err(bad)?;
    let rank = claim::rank(&parts.headers).map_err(bad)?;
    let resident_tokens = claim::resident_tokens(&parts.headers).map_err(bad)?;
    // The session is claimed before the body is read. So a second turn is refused at once, and no
    // other turn can start during a slow upload.
    let in_session = claim.is_some();
    let claimed = context.agent.claim(claim, rank, pinned_input(route.kind)).await;
    let mut lease = claimed.map_err(|error| refusal(&error))?;
    let held = context.body_budget.read(body).await?;
    // The body is checked before the turn waits for room or takes room from other sessions.
    let mut parsed = parse_body(route.kind, &held.bytes, in_session, lease.vocabulary).await?;
    let need = Need { resident_tokens, ..parsed.need };
    let prompt_start = std::mem::take(&mut parsed.prompt_start);
    let admitted =
        lease.wait_for_admission(need, prompt_start).await.map_err(|error| refusal(&error))?;
    let AdmittedTurn { turn, run_mode } = admitted;
    let body = parsed.body(&held.bytes, &turn, &lease.rid);
    debug!(
        rid = lease.rid,
        client_rid = parsed.client_rid,
        turn = parts.headers.get(claim::TURN).and_then(|turn| turn.to_str().ok()),
        route = route.path,
        "turn begins"
    );
    let mut outgoing = engine_request(&parts, Body::new(BodyParts::new(body, Some(held))));
    add_shim_headers(outgoing.headers_mut(), &turn, &lease.rid);
    lease.mark_sent();
    let abort_confirms_end = parsed.is_single && route.kind.rid_key().is_some();
    let rid = engine_rid(route.kind, &lease.rid);
    let answer = context.engine.send(outgoing);
    let mut exchange = Exchange::new(context.clone(), rid, lease, answer, abort_confirms_end);
    let head = exchange.wait_for_head().await?;
    let must_continue = requires_continuation(&turn);
    let run_mode = match exchange.wait_for_run_mode(run_mode, head.status, must_continue).await {
        Some(Err(error)) => {
            exchange.finish_refused().await;
            return Err(refusal(&error.into()));
        }
        Some(Ok(run_mode)) => Some(run_mode),
        None => None,
    };
    let mut response = client_response(head, exchange);
    if let Some(run_mode) = run_mode.map(|mode| actual_run_mode(route.kind, mode)) {
        response.headers_mut().insert(RUN_MODE_HEADER, HeaderValue::from_static(run_mode.as_str()));
    }
    if let Some(growth) = turn.growth_tokens {
        response.headers_mut().insert(GROWTH_HEADER, growth.into());
    }
    Ok(response)
}

/// Adds the headers that tell the shim how to handle a full history. The shim reads them after the
/// engine's tokenizer has run.
fn add_shim_headers(headers: &mut HeaderMap, turn: &Turn, rid: &str) {
    let Some(session) = &turn.session else { return };
    let Some(trim) = session.trim else { return };
    let mark = format!("{} {} {rid}", trim.tokens_max, session.incarnation);
    // This can't fail: agent ids are plain ASCII.
    let Ok(mark) = HeaderValue::from_str(&mark) else { return };
    headers.insert(TRIM_HEADER, mark);
    if trim.must_continue {
        headers.insert(MUST_CONTINUE_HEADER, HeaderValue::from_static("1"));
    }
}

fn requires_continuation(turn: &Turn) -> bool {
    let trim = turn.session.as_ref().and_then(|session| session.trim);
    trim.is_some_and(|trim| trim.must_continue)
}

/// The largest body that is parsed on the current thread. Prompts of coding agents of this size are
/// parsed in under half a millisecond; larger ones would delay all other turns on the thread.
const READ_HERE_BYTES_MAX: usize = 128 * 1024;

async fn parse_body(
    kind: Kind,
    bytes: &Bytes,
    in_session: bool,
    vocabulary: Option<u32>,
) -> Result<ParsedRequest, Refusal> {
    if bytes.len() <= READ_HERE_BYTES_MAX {
        return request::parse(kind, bytes, in_session, vocabulary);
    }
    let bytes = bytes.clone();
    let parse = move || request::parse(kind, &bytes, in_session, vocabulary);
    let parsed = tokio::task::spawn_blocking(parse).await;
    parsed.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// Refuses a compressed body: its keys can't be replaced by byte range.
fn check_encoding(headers: &HeaderMap) -> Result<(), Refusal> {
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => Err(Refusal::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "content_encoding",
            "compressed bodies are not taken; send the body as it is",
        )),
        _ => Ok(()),
    }
}

/// Returns the turn's id as the engine knows it. Ids of the Responses API have a prefix.
fn engine_rid(kind: Kind, rid: &str) -> String {
    if kind == Kind::Responses { format!("resp_{rid}") } else { rid.to_owned() }
}

/// Passes on a request that is not a turn. It needs no claim and isn't counted.
async fn pass_through(
    context: &TurnContext,
    parts: &http::request::Parts,
    body: Body,
) -> Result<Response, Refusal> {
    let held = context.body_budget.read(body).await?;
    let bytes = held.bytes.clone();
    let outgoing = engine_request(parts, Body::new(BodyParts::new(vec![bytes], Some(held))));
    let sent = tokio::time::timeout(context.turn_max, context.engine.send(outgoing)).await;
    let response =
        sent.map_err(|_| timeout_refusal())?.map_err(|error| unreachable_refusal(&error))?;
    let (head, body) = response.into_parts();
    Ok(Response::from_parts(response_head(head), Body::new(body)))
}

fn engine_request(parts: &http::request::Parts, body: Body) -> Request {
    let mut outgoing = Request::new(body);
    *outgoing.method_mut() = parts.method.clone();
    *outgoing.uri_mut() = parts.uri.clone();
    let headers = outgoing.headers_mut();
    headers.clone_from(&parts.headers);
    strip_request(headers);
    // The agent must read the answer to see its end, which a compressed answer hides.
    headers.remove(header::ACCEPT_ENCODING);
    outgoing
}

/// Returns the engine's status and headers, without the headers of its connection.
fn response_head(mut head: http::response::Parts) -> http::response::Parts {
    remove_hop_by_hop(&mut head.headers);
    head.version = http::Version::HTTP_11;
    head.extensions = http::Extensions::new();
    head
}

fn client_response(head: http::response::Parts, exchange: Exchange) -> Response {
    let mut head = response_head(head);
    if let Ok(rid) = HeaderValue::from_str(exchange.rid()) {
        head.headers.insert("x-berth-rid", rid);
    }
    Response::from_parts(head, Body::new(exchange))
}

/// A body made of parts whose total length is known. It also owns a value that must live until the
/// body is sent.
struct BodyParts<H> {
    parts: std::collections::VecDeque<Bytes>,
    left: u64,
    _held: Option<H>,
}

impl<H> BodyParts<H> {
    fn new(parts: Vec<Bytes>, held: Option<H>) -> Self {
        let left = parts.iter().map(|part| part.len() as u64).sum();
        Self { parts: parts.into(), left, _held: held }
    }
}

impl<H: Unpin> http_body::Body for BodyParts<H> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let part = self.parts.pop_front();
        self.left -= part.as_ref().map_or(0, |part| part.len() as u64);
        Poll::Ready(part.map(|part| Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
