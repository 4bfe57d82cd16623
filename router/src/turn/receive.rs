//! The first stage: receives the body of a turn's request.

use std::sync::Arc;

use axum::body::Body;
use contract::id::SessionKey;
use tokio::time::timeout_at;

use super::{
    arrival::Arrival,
    body::{Compression, ReceivedBody},
    cache_isolation,
    error::Error,
    request,
    shared::Shared,
};
use crate::{
    config::auth::CacheIsolation,
    sessions::{
        check::{self, refuses_as_busy},
        status::SessionStatus,
    },
};

#[derive(Debug)]
pub(super) struct Received {
    pub(super) arrival: Arrival,
    pub(super) body: ReceivedBody,
}

/// Refuses what the head shows to be refused later, which saves reading a body in vain.
pub(super) async fn run(
    shared: &Arc<Shared>,
    arrival: Arrival,
    body: Body,
) -> Result<Received, Error> {
    let (kind, headers) = (arrival.kind, &arrival.head.headers);
    if shared.cache_isolation == CacheIsolation::Principal {
        cache_isolation::check_kind(kind)?;
    }
    if kind.is_generation()
        && let Some((key, hint)) =
            request::header_session(&shared.session_headers, headers, &arrival.caller.principal)?
    {
        refuse_early(shared, &key, hint.is_some()).await?;
    }
    let receiving = receive(shared, &arrival, body);
    let body = arrival.observers.trace.within("receive", receiving).await?;
    Ok(Received { arrival, body })
}

/// Refuses a turn if its session is closing or busy with another turn.
///
/// Decides nothing for the session: the agent does, later. A turn that only hints at a closing
/// session runs without it.
async fn refuse_early(shared: &Shared, key: &SessionKey, is_hint: bool) -> Result<(), Error> {
    let view = shared.directory.settled_view().await;
    match shared.directory.status(key, &view) {
        SessionStatus::Closing if !is_hint => Err(check::Error::Closing.into()),
        status if refuses_as_busy(&status, &view) => Err(check::Error::SessionBusy.into()),
        _ => Ok(()),
    }
}

async fn receive(shared: &Shared, arrival: &Arrival, body: Body) -> Result<ReceivedBody, Error> {
    let has_json_body = arrival.kind.has_json_body();
    let context_tokens = || longest_context_tokens(shared).filter(|_| has_json_body);
    let compression = Compression::find(&arrival.head.extensions);
    let reading = shared.bodies.read(body, &arrival.sharer, compression, context_tokens);
    let read = timeout_at(arrival.deadline.into(), reading).await;
    let body = read.map_err(|_| Error::BodyLate)??;
    shared.metrics.request_bytes.inc_by(body.bytes.len() as u64);
    Ok(body)
}

/// `None` if no worker is known, or if one cuts longer prompts.
fn longest_context_tokens(shared: &Shared) -> Option<u64> {
    let view = shared.directory.view();
    if view.workers().any(|(.., facts)| facts.description.engine.shortens_prompts) {
        return None;
    }
    view.workers().map(|(.., facts)| facts.description.engine.context_tokens.into()).max()
}
