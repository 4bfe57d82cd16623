//! Runs one turn (a request and its answer), from its request head to its answer.
//!
//! A turn is admitted after its body has arrived, because a client that sends only headers must not
//! hold one of the turns in flight. A failed turn goes to another worker only if the first one
//! can't have run it.

pub(crate) mod aborts;
pub(crate) mod access_log;
mod agent_body;
pub(crate) mod body;
mod cache_isolation;
mod close_guard;
pub(crate) mod control;
pub(crate) mod decide;
pub(crate) mod directory;
pub(crate) mod ended;
pub(crate) mod engine_info;
pub(crate) mod error;
mod events;
mod form;
mod hinted;
mod hints;
pub(crate) mod liveness;
pub(crate) mod mending;
pub(crate) mod model_names;
mod pair;
pub(crate) mod placer;
pub mod preamble;
mod priority;
mod prompt_length;
pub(crate) mod proxy;
pub(crate) mod pulses;
mod reading;
mod recorder;
pub(crate) mod renewal;
pub mod request;
pub(crate) mod responses;
pub mod session_names;
pub(crate) mod sessions;
pub(crate) mod shared;
pub(crate) mod spans;
mod staged_prefill;
mod target;
pub(crate) mod upstream;
mod usage;

use std::{sync::Arc, time::Instant};

use axum::response::Response;
use bytes::Bytes;
use contract::{abort::TurnNames, id::SessionKey, route::Kind};
use http::{Extensions, HeaderMap, request::Parts};
use service::{
    clock::now,
    headers::strip_request,
    log::describe_error,
    refusal::{self, AbortedTurn},
    running_turns::RunningTurn,
    server::PeerAddress,
};
use tokio::time::timeout_at;
use tracing::{debug, warn};

use self::{
    agent_body::AgentBody,
    body::{Compression, HeldBody},
    close_guard::CloseGuard,
    error::{Error, Limit, NoAnswer},
    pair::Sent,
    placer::PlacedTurn,
    proxy::{OutboundTurn, TurnCapacity},
    reading::ReadTurn,
    recorder::{Observers, TurnRecorder},
    request::{SessionIntent, Turn},
    shared::{Shared, TurnFlags},
    usage::TurnTokens,
};
use crate::{
    auth::Caller,
    config::auth::CacheIsolation,
    fleet::worker::WorkerRef,
    metrics::TurnOutcome,
    placement::session_status::SessionStatus,
    shares::{Refused, Sharer},
};

/// Sets `flags` as soon as the turn is read.
pub(crate) async fn run(
    shared: Arc<Shared>,
    kind: Kind,
    caller: &Caller,
    mut parts: Parts,
    body: axum::body::Body,
    flags: &TurnFlags,
) -> Result<Response, Error> {
    let (observers, arrived_at) = (Observers::take_from(&mut parts.extensions), now());
    let deadline = arrived_at + shared.turn_max;
    let mut sharer = sharer(caller, &parts.extensions);
    let principal = &*caller.principal;
    if shared.cache_isolation == CacheIsolation::Principal {
        cache_isolation::check_kind(kind)?;
    }
    if kind.is_generation()
        && let Some((key, hint)) =
            request::header_session(&shared.session_headers, &parts.headers, principal)?
    {
        refuse_early(&shared, &key, hint.is_some()).await?;
    }
    let receiving = receive(&shared, kind, &parts, body, &sharer, deadline);
    let held_body = observers.trace.within("receive", receiving).await?;
    let reading = reading::read_turn(&shared, kind, &parts, held_body, &sharer, principal);
    let ReadTurn { mut turn, unfit, held_body, class } =
        timeout_at(deadline.into(), reading).await.map_err(|_| NoAnswer::TimedOut)??;
    sharer.class = class;
    flags.set(turn.wants_stream, is_idempotent(&turn));
    responses::find_previous(&shared, &mut turn, principal).await?;
    let unsent = add_unsent(&shared, &turn, &parts.headers, principal);
    hinted::settle(&shared, caller, &mut turn, unfit).await?;
    let mut capacity = admit(&shared, kind, &turn, &sharer, held_body.bytes.len())?;
    let body = shared.bodies.keep(held_body);
    if let Some(intent) = &turn.session {
        close_lost_session(&shared, intent).await?;
        shared.sessions.close_strays(&intent.key);
    } else {
        // Right after the router's start, wait for the agents' first session tables.
        shared.directory.settled_view().await;
    }
    let turn_id = shared.placer.new_turn_id();
    let deciding = async {
        let bytes = body.bytes().expect("a body that isn't sent doesn't give way");
        prompt_length::check(&shared, &turn, parts.uri.path(), &bytes, &sharer, deadline).await?;
        hinted::place(&shared, &mut turn, turn_id, parts.uri.path(), &bytes, &sharer).await
    };
    let placed = observers.trace.within("decide", deciding).await?;
    if let (Some(tokens), Some(blocks)) = (&mut capacity.tokens, &placed.blocks) {
        tokens.set_prompt_tokens(blocks.prompt_overlap().tokens);
    }
    let path_and_query = parts.uri.path_and_query().cloned();
    strip_request(&mut parts.headers);
    let outbound = OutboundTurn {
        method: parts.method,
        path_and_query: path_and_query.unwrap_or_else(|| http::uri::PathAndQuery::from_static("/")),
        headers: parts.headers,
        body,
        turn_id,
        hints: turn.hints,
        principal: Arc::clone(&caller.principal),
        sharer,
        kind,
        arrived_at,
        deadline,
        observers,
    };
    Box::pin(send(&shared, &turn, &outbound, placed, capacity, &unsent)).await
}

/// Whether running the turn twice changes no more than running it once. A delta would be appended
/// twice, and what opens or closes a session has changed it.
fn is_idempotent(turn: &Turn) -> bool {
    let changes = |it: &SessionIntent| it.is_delta || it.opens_session || it.closes_session;
    !turn.session.as_ref().is_some_and(changes)
}

async fn receive(
    shared: &Shared,
    kind: Kind,
    parts: &Parts,
    body: axum::body::Body,
    sharer: &Sharer,
    deadline: Instant,
) -> Result<HeldBody, Error> {
    let context_tokens =
        || prompt_length::longest_context_tokens(shared).filter(|_| kind.has_json_body());
    let compression = Compression::find(&parts.extensions);
    let reading = shared.bodies.read(body, sharer, compression, context_tokens);
    let read = timeout_at(deadline.into(), reading).await;
    let held_body = read.map_err(|_| Error::BodyLate)??;
    shared.metrics.request_bytes.inc_by(held_body.bytes.len() as u64);
    Ok(held_body)
}

pub(crate) fn sharer(caller: &Caller, extensions: &Extensions) -> Sharer {
    Sharer::new(caller, extensions.get::<PeerAddress>().map(|peer| peer.0))
}

/// Refuses to begin a session if the caller's key has a limit of open sessions, and the agents
/// report that many. Sessions that begin at the same moment may pass together.
pub(crate) async fn check_key_sessions(
    shared: &Shared,
    caller: &Caller,
    key: &SessionKey,
) -> Result<(), Error> {
    let Some(sessions_max) = caller.limits.sessions_max else { return Ok(()) };
    let view = shared.directory.settled_view().await;
    if !matches!(shared.directory.status(key, &view), SessionStatus::Unknown) {
        return Ok(());
    }
    // With 100,000 sessions this takes about a millisecond, only for new sessions of such keys.
    let open =
        view.sessions.iter().filter(|entry| entry.session.key.principal() == key.principal());
    if open.count() < sessions_max.get() as usize {
        return Ok(());
    }
    Err(Error::Limit { limit: Limit::Sessions, refused: Refused::Key })
}

/// Adds a turn to those that their clients can abort here.
fn add_unsent(
    shared: &Shared,
    turn: &Turn,
    headers: &HeaderMap,
    principal: &str,
) -> RunningTurn<()> {
    let names = turn.names.clone().or_header(headers);
    shared.unsent_turns.add(principal, names, "", ())
}

/// Takes as many of the turns in flight as the turn has sequences, and its prompt's tokens.
fn admit(
    shared: &Shared,
    kind: Kind,
    turn: &Turn,
    sharer: &Sharer,
    body_bytes: usize,
) -> Result<TurnCapacity, Error> {
    let (pool, key_max) = (&shared.shares.turns, sharer.limits.turns_in_flight_max);
    // What generates nothing ends soon, and the agent bounds it.
    let sequences = if kind.is_generation() { turn.sequences.max(1) } else { 1 };
    let sequences_max = if sequences > 1 { pool.most_of_one(sharer, key_max) } else { 1 };
    if sequences > sequences_max {
        return Err(Error::BatchOverShare { sequences, sequences_max });
    }
    let turn = pool
        .take(sharer, sequences.into(), key_max)
        .map_err(|refused| Error::Limit { limit: Limit::Turns, refused })?;
    let tokens = shared
        .shares
        .take_tokens(sharer, usage::estimate_tokens(body_bytes))
        .map_err(Error::TokenRate)?;
    Ok(TurnCapacity { _turn: turn, tokens: tokens.map(TurnTokens::new) })
}

/// Refuses a turn before its body is read, if its session is closing or busy with another turn.
///
/// Saves reading a body in vain, and changes no state: the agent decides later. A turn that only
/// hints at a closing session runs without it.
async fn refuse_early(shared: &Shared, key: &SessionKey, is_hint: bool) -> Result<(), Error> {
    let view = shared.directory.settled_view().await;
    match shared.directory.status(key, &view) {
        SessionStatus::Closing if !is_hint => Err(decide::Error::Closing.into()),
        status if decide::is_busy(&status, &view) => Err(decide::Error::SessionBusy.into()),
        _ => Ok(()),
    }
}

/// Closes a session whose KV is lost, if this turn opens it again with its full history. The turn
/// then begins a new session under the same id.
async fn close_lost_session(shared: &Shared, intent: &SessionIntent) -> Result<(), Error> {
    let SessionStatus::Lost { worker, .. } =
        shared.directory.status_after_reconnect(&intent.key).await
    else {
        return Ok(());
    };
    let may_return = shared.directory.view().agent(worker).may_hand_over(service::clock::now());
    if intent.opens_session && !intent.is_delta && !may_return {
        shared.sessions.close_lost(&intent.key, worker).await?;
    }
    Ok(())
}

/// Sends a turn to its worker. If that refuses it or can't be reached, sends it to a second one, if
/// there is one. `unsent`: whether the client aborts the turn while no agent has it.
async fn send(
    shared: &Shared,
    turn: &Turn,
    outbound: &OutboundTurn,
    mut placed: PlacedTurn,
    mut capacity: TurnCapacity,
    unsent: &RunningTurn<()>,
) -> Result<Response, Error> {
    let facts = (outbound.turn_id, outbound.kind, outbound.arrived_at);
    let mut recorder = TurnRecorder::new(shared, turn, facts, &placed, capacity.tokens.take());
    recorder.set_observers(outbound.observers.clone());
    let mut close_guard = CloseGuard::new(shared, turn, placed.worker);
    tokio::select! {
        biased;
        () = unsent.aborted() => return answer_aborted(outbound.kind, turn),
        () = staged_prefill::run(shared, turn, outbound, &mut placed) => {}
    }
    let first_body = outbound.body.bytes_to_send();
    let first_body = first_body.expect("a body that isn't sent doesn't give way");
    let Sent { answer: first_answer, worker: first_worker } =
        pair::send(shared, turn, outbound, &mut placed, first_body).await;
    let retry_reason = match &first_answer {
        Ok(response) if refusal::is_refusal_for_now(response) => Some("refused"),
        Err(error) if error.can_retry() => Some("connect"),
        Ok(_) | Err(_) => None,
    };
    let retry_reason = retry_reason.filter(|_| !unsent.is_aborted());
    let second_placed = match retry_reason {
        Some(reason) => {
            place_again(shared, turn, outbound, &mut placed, first_worker, reason).await
        }
        None => None,
    };
    let (placed, worker_answer) = match second_placed {
        Some((mut second, body)) => {
            close_guard.move_to(second.worker);
            recorder.move_to(&second);
            // Dropping the first answer, if there is one, drops its connection.
            drop(first_answer);
            let sent = pair::send(shared, turn, outbound, &mut second, body).await;
            (second, sent.answer)
        }
        None => (placed, first_answer),
    };
    finish(shared, outbound, placed, recorder, capacity, close_guard, worker_answer)
}

/// `None` if there is no other worker or the turn can't move, or if the body has given way.
async fn place_again(
    shared: &Shared,
    turn: &Turn,
    outbound: &OutboundTurn,
    placed: &mut PlacedTurn,
    failed_worker: WorkerRef,
    reason: &'static str,
) -> Option<(PlacedTurn, Bytes)> {
    let Some(body) = outbound.body.bytes_to_send() else {
        shared.metrics.bodies_gone.inc();
        return None;
    };
    let deciding = shared.placer.decide_again(turn, outbound.turn_id, placed, failed_worker);
    let second = outbound.observers.trace.within("decide", deciding).await?;
    shared.metrics.count_retry(reason);
    let turn_id = format!("{:016x}", outbound.turn_id);
    debug!(turn = turn_id, why = reason, worker = second.worker_name, "retried");
    Some((second, body))
}

/// Only turns with one prompt reach staged prefill, so the answer is a single one.
fn answer_aborted(kind: Kind, turn: &Turn) -> Result<Response, Error> {
    let rid = if let TurnNames::Turn(name) = &turn.names { name } else { "" };
    let wants_stream = turn.wants_stream;
    AbortedTurn { kind, rid, wants_stream, is_single: true }.answer().map_err(Error::Aborted)
}

fn finish(
    shared: &Shared,
    outbound: &OutboundTurn,
    placed: PlacedTurn,
    mut recorder: TurnRecorder,
    capacity: TurnCapacity,
    close_guard: CloseGuard,
    worker_answer: Result<http::Response<AgentBody>, NoAnswer>,
) -> Result<Response, Error> {
    match worker_answer {
        Ok(response) => {
            close_guard.disarm();
            Ok(proxy::build_answer(shared, outbound, placed, recorder, capacity, response))
        }
        Err(error) => {
            recorder.set_outcome(match error {
                NoAnswer::TimedOut => TurnOutcome::TimedOut,
                NoAnswer::NoDescriptors { .. } => TurnOutcome::NotSent,
                NoAnswer::Connect { .. }
                | NoAnswer::Ended { .. }
                | NoAnswer::NotAborted { .. }
                | NoAnswer::NotARouter { .. }
                | NoAnswer::BrokenOff { .. }
                | NoAnswer::AnswerBrokenOff { .. }
                | NoAnswer::AnswerTooLong { .. }
                | NoAnswer::HandOffLate { .. }
                | NoAnswer::Silent { .. } => TurnOutcome::WorkerFailed,
            });
            warn!(
                turn = format!("{:016x}", outbound.turn_id),
                worker = placed.worker_name,
                error = describe_error(&error),
                "turn failed"
            );
            Err(error.into())
        }
    }
}
