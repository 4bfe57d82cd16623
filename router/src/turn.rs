//! Runs one turn, from its request head to its answer.
//!
//! The steps, in order: admit, claim, read the body, cut out a volatile preamble, decide on a
//! worker, compute a long prompt in stages, and send. A turn is sent a second time after a failure
//! only if that is safe.
//!
//! - [`request`]: what the request says about its session; [`preamble`]: what is cut out of its
//!   body.
//! - `decide`: combines status, placement, binding and lease.
//! - `staged_prefill`: has a long prompt computed before the turn.
//! - `proxy`: sends the turn and carries its answer.
//! - `sessions`: opens, closes and lists sessions.
//! - `shared`: the state that all requests share. `error`: why a turn is refused.

mod decide;
pub(crate) mod error;
pub mod preamble;
pub(crate) mod proxy;
pub mod request;
pub(crate) mod sessions;
pub(crate) mod shared;
mod staged_prefill;

use std::sync::Arc;

use axum::response::Response;
use http::{Method, request::Parts};
use hyper::body::Incoming;
use proto::{body::Object, id::SessionKey, route::Kind};
use service::{budget::HeldBody, clock::now, headers::strip_request};
use tokio::sync::OwnedSemaphorePermit;
use tracing::{debug, info, warn};

use self::{
    decide::PlacedTurn,
    error::{Error, NoAnswer},
    proxy::{OutboundTurn, StreamCount},
    request::{SessionIntent, Turn},
    shared::Shared,
};
use crate::{
    config::Preamble,
    fleet::{connect, worker::WorkerRef},
    metrics::Outcome,
    placement::session_status::SessionStatus,
};

/// Runs one turn and returns its answer.
pub(crate) async fn run(
    shared: Arc<Shared>,
    kind: Kind,
    mut parts: Parts,
    body: axum::body::Body,
) -> Result<Response, Error> {
    let arrived = now();
    let deadline = arrived + shared.config.turn_max();
    let permit =
        Arc::clone(&shared.turn_permits).try_acquire_owned().map_err(|_| Error::TurnsFull)?;
    let principal = request::principal(&parts.headers);
    if kind.is_generation()
        && let Some(key) = request::header_session(&parts.headers, &principal)?
    {
        refuse_early(&shared, &key).await?;
    }
    let mut held = match tokio::time::timeout_at(deadline.into(), shared.budget.read(body)).await {
        Ok(body) => body?,
        Err(_) => return Err(Error::BodyLate),
    };
    shared.metrics.request_bytes.inc_by(held.bytes.len() as u64);
    let turn = read(&shared, kind, &parts, &mut held, &principal)?;
    let body = proxy::held_bytes(held);
    if let Some(intent) = &turn.session {
        close_lost_session(&shared, intent).await?;
    } else {
        shared.settled_view().await;
    }
    let turn_id = shared.turn_id();
    let placed = shared.decide(&turn, turn_id, parts.uri.path(), &body).await?;
    let path = parts.uri.path_and_query().cloned();
    strip_request(&mut parts.headers);
    let outbound = OutboundTurn {
        method: parts.method,
        path: path.unwrap_or_else(|| http::uri::PathAndQuery::from_static("/")),
        headers: parts.headers,
        body,
        turn_id,
        counts_first_byte: kind.is_generation(),
        arrived,
        deadline,
    };
    Box::pin(send(&shared, &turn, &outbound, placed, permit)).await
}

/// Reads a turn, and removes a volatile preamble from its body. Every later step uses the body
/// without the preamble, also when the turn is sent a second time.
fn read(
    shared: &Shared,
    kind: Kind,
    parts: &Parts,
    held: &mut HeldBody,
    principal: &str,
) -> Result<Turn, Error> {
    if parts.method == Method::GET {
        return Ok(Turn::default());
    }
    let object = Object::parse(&held.bytes).map_err(request::Error::from)?;
    let headers = &parts.headers;
    let turn = match find_preamble(shared, kind, parts.uri.path(), &object) {
        None => request::read_object(headers, &object, principal),
        Some(range) => {
            held.bytes = range.apply(std::mem::take(&mut held.bytes));
            request::read(headers, &held.bytes, principal)
        }
    };
    let turn = turn?;
    if kind.is_generation() {
        return Ok(turn);
    }
    // Any worker can answer this request, and it leaves no KV behind.
    Ok(Turn { model: turn.model, ..Turn::default() })
}

/// Returns the preamble to cut out of a turn's body, and counts it.
fn find_preamble(
    shared: &Shared,
    kind: Kind,
    path: &str,
    body: &Object<'_>,
) -> Option<preamble::PreambleRange> {
    if !kind.is_generation() || shared.config.preamble == Preamble::Keep {
        return None;
    }
    let range = preamble::find(path, body)?;
    if shared.metrics.preamble_removed(range.client) == 0 {
        let client = range.client;
        info!(client, "removed a volatile preamble; set preamble = \"keep\" to leave it in");
    }
    Some(range)
}

/// Refuses a turn that can't run now, before its body is read: its session closes, or is busy with
/// another turn. Doesn't change the state of the running turn. The agent's own check still decides.
async fn refuse_early(shared: &Shared, key: &SessionKey) -> Result<(), Error> {
    let view = shared.settled_view().await;
    match shared.session_status(key, &view) {
        SessionStatus::Closing => Err(Error::TurnWhileClosing),
        busy if decide::is_busy(&busy, &view) => Err(Error::SessionBusy),
        _ => Ok(()),
    }
}

/// Closes the remains of a lost session when the client opens the session again with its full
/// history. The client then gets a new session.
async fn close_lost_session(shared: &Arc<Shared>, intent: &SessionIntent) -> Result<(), Error> {
    let SessionStatus::Lost { worker, .. } =
        shared.session_status_after_reconnect(&intent.key).await
    else {
        return Ok(());
    };
    if intent.open && !intent.delta { shared.close_lost(&intent.key, worker).await } else { Ok(()) }
}

async fn send(
    shared: &Arc<Shared>,
    turn: &Turn,
    outbound: &OutboundTurn,
    mut placed: PlacedTurn,
    permit: OwnedSemaphorePermit,
) -> Result<Response, Error> {
    let mut pending = Pending::new(shared, turn, placed.worker);
    staged_prefill::run(shared, turn, outbound, &mut placed).await;
    let first = outbound.send(shared, &placed).await;
    let why = match &first {
        Ok(response) if proxy::is_refused_for_now(response) => Some("refused"),
        Err(error) if error.can_retry() => Some("connect"),
        Ok(_) | Err(_) => None,
    };
    let second = why.and_then(|why| {
        let second = shared.decide_again(turn, outbound.turn_id, &mut placed)?;
        shared.metrics.retried(why);
        debug!(turn = format!("{:016x}", outbound.turn_id), why, worker = second.name, "retried");
        Some(second)
    });
    let (placed, answered) = match second {
        Some(second) => {
            pending.move_to(second.worker);
            // Dropping the first answer, if there is one, drops its connection.
            drop(first);
            let answered = outbound.send(shared, &second).await;
            (second, answered)
        }
        None => (placed, first),
    };
    finish(shared, outbound, placed, permit, pending, answered)
}

fn finish(
    shared: &Arc<Shared>,
    outbound: &OutboundTurn,
    placed: PlacedTurn,
    permit: OwnedSemaphorePermit,
    mut pending: Pending,
    answered: Result<http::Response<Incoming>, NoAnswer>,
) -> Result<Response, Error> {
    match answered {
        Ok(response) => {
            let running = pending.record_answer();
            Ok(proxy::answer(shared, outbound, placed, running, permit, response))
        }
        Err(error) => {
            pending.outcome = Some(match error {
                NoAnswer::TimedOut => Outcome::TimedOut,
                NoAnswer::Connect { .. } | NoAnswer::BrokenOff { .. } => Outcome::WorkerFailed,
            });
            warn!(
                turn = format!("{:016x}", outbound.turn_id),
                worker = placed.name,
                error = connect::describe_error(&error),
                "turn failed"
            );
            Err(error.into())
        }
    }
}

/// A turn that was sent and isn't answered yet.
///
/// If it is dropped in this state, it counts as abandoned by its client. If it was also the
/// session's last turn, the router closes the session, because perhaps no agent received the
/// request to close it. After an agent has answered, the agent closes the session itself. A turn
/// that the router itself refuses was never accepted and closes nothing.
struct Pending {
    shared: Arc<Shared>,
    close: Option<(SessionKey, WorkerRef)>,
    outcome: Option<Outcome>,
    running: Option<StreamCount>,
}

impl Pending {
    fn new(shared: &Arc<Shared>, turn: &Turn, worker: WorkerRef) -> Self {
        let intent = turn.session.as_ref().filter(|intent| intent.close && !intent.placement_only);
        Self {
            shared: Arc::clone(shared),
            close: intent.map(|intent| (intent.key.clone(), worker)),
            outcome: Some(Outcome::ClientGone),
            running: Some(StreamCount::new(shared)),
        }
    }

    fn move_to(&mut self, worker: WorkerRef) {
        if let Some((_, at)) = &mut self.close {
            *at = worker;
        }
    }

    fn record_answer(&mut self) -> StreamCount {
        self.close = None;
        self.outcome = None;
        self.running.take().expect("a turn is answered once")
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(outcome) = self.outcome {
            self.shared.metrics.ended(outcome);
        }
        if let Some((key, worker)) = self.close.take() {
            self.shared.close_detached(key, worker);
        }
    }
}
