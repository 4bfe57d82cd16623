//! The way of a turn (a request and its answer) through the router, stage by stage.
//!
//! A stage takes the value of the stage before and returns its own, or refuses the turn. Its value
//! owns what the turn holds by then. So a refusal, and a client that leaves, give all of it back.

use std::sync::Arc;

use axum::{body::Body, response::Response};

use super::{admit, answer, arrival::Arrival, error::Error, place, read, receive, send};
use crate::turn::shared::Shared;

pub(crate) async fn run(
    shared: &Arc<Shared>,
    arrival: Arrival,
    body: Body,
) -> Result<Response, Error> {
    // First, because a client that sends only headers must not hold one of the turns in flight.
    let received = receive::run(shared, arrival, body).await?;
    // Before the turn counts, because how much it counts and for whom is in its body.
    let read = read::run(shared, received).await?;
    // Before what costs much for each turn: tokenizing the prompt and comparing workers.
    let admitted = admit::run(shared, read).await?;
    // Before the turn is sent, all routers must know the worker of its session.
    let placed = place::run(shared, admitted).await?;
    // A second worker is tried only if the first one can't have run the turn.
    let sent = send::run(shared, placed).await?;
    // Last, because what the turn holds goes with its answer's body, until that ends.
    Ok(answer::build(shared, sent))
}
