//! The fifth stage: sends a turn to its worker, and to a second one if the first can't have run it.

mod agent_request;
mod pair;
mod staged_prefill;

use std::sync::Arc;

use bytes::Bytes;
use contract::{abort::TurnNames, route::Kind};
use http::Response;
use service::{
    log::describe_error,
    refusal::{self, AbortedTurn},
};
use tracing::{debug, warn};

pub(super) use self::agent_request::turn_id_header;
use self::pair::Halves;
use super::{
    admit::OutboundTurn,
    agent_body::AgentBody,
    error::{Error, NoAnswer},
    holdings::Holdings,
    place::Placed,
    placer::assignment::Assignment,
    request::Turn,
    shared::Shared,
};
use crate::{fleet::worker::WorkerRef, metrics::TurnOutcome};

#[derive(Debug)]
pub(super) enum Sent {
    Answered(Box<Answered>),
    /// The client aborted the turn before any agent had it.
    AbortedHere(axum::response::Response),
}

/// An agent, or a pair of them, has begun to answer.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) outbound: OutboundTurn,
    pub(super) assignment: Assignment,
    pub(super) holdings: Holdings,
    pub(super) response: Response<AgentBody>,
}

/// What came of one try.
#[derive(Debug)]
struct Try {
    answer: Result<Response<AgentBody>, NoAnswer>,
    /// The worker that made the answer. If the turn failed, the one that failed first.
    worker: WorkerRef,
}

pub(super) async fn run(shared: &Arc<Shared>, placed: Placed) -> Result<Sent, Error> {
    let Placed { mut outbound, unanswered, mut assignment, mut holdings } = placed;
    // From here on the headers may go to agents, which trust them.
    service::headers::strip_request(&mut outbound.arrival.head.headers);
    tokio::select! {
        biased;
        () = unanswered.aborted() => {
            return aborted_answer(outbound.arrival.kind, &outbound.turn).map(Sent::AbortedHere);
        }
        () = staged_prefill::run(shared, &outbound, &mut assignment, &mut holdings) => {}
    }
    let body = outbound.body.bytes_to_send();
    let body = body.expect("a body that isn't sent doesn't give way");
    note_close(&mut assignment, &holdings);
    let Try { mut answer, worker } = dispatch(shared, &outbound, &mut assignment, body).await;
    if let Some(reason) = retry_reason(&answer)
        && !unanswered.is_aborted()
        && let Some(body) =
            move_on(shared, &outbound, &mut assignment, &mut holdings, worker, reason).await
    {
        // Dropping the first answer, if there is one, drops its connection.
        drop(answer);
        note_close(&mut assignment, &holdings);
        answer = dispatch(shared, &outbound, &mut assignment, body).await.answer;
    }
    match answer {
        Ok(response) => {
            holdings.leave_close_to_agent();
            let answered = Answered { outbound, assignment, holdings, response };
            Ok(Sent::Answered(Box::new(answered)))
        }
        Err(error) => {
            holdings.recorder.set_outcome(outcome(&error));
            warn!(
                turn = format!("{:016x}", outbound.turn_id),
                worker = assignment.to.name,
                error = describe_error(&error),
                "turn failed"
            );
            Err(error.into())
        }
    }
}

/// A client may have closed the session since the turn was placed. The agent didn't know of this
/// turn, so it couldn't defer the close to the turn's end. Then this turn closes the session again.
fn note_close(assignment: &mut Assignment, holdings: &Holdings) {
    if let (Some(hold), Some(claim)) = (&holdings.hold, &mut assignment.claim) {
        claim.close |= hold.is_closing();
    }
}

/// Sends the turn to its worker, or both halves to a pair.
async fn dispatch(
    shared: &Shared,
    outbound: &OutboundTurn,
    assignment: &mut Assignment,
    body: Bytes,
) -> Try {
    let worker = assignment.to.worker;
    let Try { answer, worker } = match &mut assignment.prefill {
        None => {
            let answer = agent_request::send(shared, outbound, assignment, body).await;
            Try { answer: answer.map(|response| response.map(AgentBody::plain)), worker }
        }
        Some(half) => {
            let halves = Halves::new(shared, outbound, half, &assignment.to, body.clone());
            halves.send(shared, outbound, assignment, body).await
        }
    };
    let is_broken_off = matches!(answer, Err(NoAnswer::BrokenOff { .. }));
    let has_ended = is_broken_off && shared.directory.has_ended_as_planned(worker).await;
    let answer = match answer {
        Err(NoAnswer::BrokenOff { worker: name, source }) if has_ended => {
            Err(NoAnswer::Ended { worker: name, source })
        }
        answer => answer,
    };
    Try { answer, worker }
}

fn retry_reason(answer: &Result<Response<AgentBody>, NoAnswer>) -> Option<&'static str> {
    match answer {
        Ok(response) if refusal::is_refusal_for_now(response) => Some("refused"),
        Err(error) if error.can_retry() => Some("connect"),
        Ok(_) | Err(_) => None,
    }
}

/// Moves the turn to a second worker, and returns the body to send. `None` if there is no other
/// worker or the turn can't move, or if the body has given way.
async fn move_on(
    shared: &Shared,
    outbound: &OutboundTurn,
    assignment: &mut Assignment,
    holdings: &mut Holdings,
    failed: WorkerRef,
    reason: &'static str,
) -> Option<Bytes> {
    let Some(body) = outbound.body.bytes_to_send() else {
        shared.metrics.bodies_gone.inc();
        return None;
    };
    let (turn, turn_id) = (&outbound.turn, outbound.turn_id);
    let hold = holdings.hold.as_mut();
    let placing = shared.placer.place_again(turn, turn_id, assignment, hold, failed);
    let chosen = outbound.arrival.observers.trace.within("decide", placing).await?;
    *assignment = holdings.move_to(chosen);
    shared.metrics.count_retry(reason);
    let turn = format!("{turn_id:016x}");
    debug!(turn, why = reason, worker = assignment.to.name, "retried");
    Some(body)
}

fn aborted_answer(kind: Kind, turn: &Turn) -> Result<axum::response::Response, Error> {
    let rid = if let TurnNames::Turn(name) = &turn.names { name } else { "" };
    let (wants_stream, is_single) = (turn.wants_stream, !turn.has_several_answers);
    AbortedTurn { kind, rid, wants_stream, is_single }.answer().map_err(Error::Aborted)
}

fn outcome(error: &NoAnswer) -> TurnOutcome {
    match error {
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_is_aborted_here_gets_no_answer_of_a_single_turn() {
        let batch = Turn { has_several_answers: true, ..Turn::default() };
        assert!(aborted_answer(Kind::Generate, &batch).is_err());
        assert!(aborted_answer(Kind::Generate, &Turn::default()).is_ok());
    }
}
