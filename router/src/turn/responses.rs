//! Finds the worker that keeps a stored response of the Responses API, by the response's id.
//!
//! An engine with `--enable-response-store` keeps a response in its own memory. The agent has given
//! the response an id that names the agent and the client that made it (see
//! [`contract::turn_rid`]). So a router needs no state to find it, and treats the response of
//! another client as unknown.

use std::sync::Arc;

use axum::response::Response;
use contract::{body::Object, route::Kind, turn_rid::TurnRid};
use http::{HeaderMap, Method, Request, uri::PathAndQuery};
use http_body_util::Full;
use service::{
    auth::credential,
    clock::now,
    headers::{strip_answer, strip_request},
};

use super::{
    error::{Error, NoAnswer},
    placer::assignment::is_on_this_host,
    request::Turn,
    shared::Shared,
    upstream::SendError,
};
use crate::{
    fleet::{agent::Agent, snapshot::Snapshot, worker::AgentKey},
    placement::NoWorker,
    sessions::check,
};

/// In characters.
const ID_SHOWN_MAX: usize = 100;

pub(crate) fn find_agent(view: &Snapshot, id: &str, principal: &str) -> Result<AgentKey, Error> {
    let rid = TurnRid::parse_response(id).filter(|rid| rid.is_owned_by(principal));
    let is_named = |rid: &TurnRid<'_>, agent: &Agent| {
        let facts = agent.facts.as_ref();
        facts.is_some_and(|facts| rid.names_agent(&facts.description.agent_id))
    };
    let mut agents = view.known_agents();
    let agent = rid.and_then(|rid| agents.find(|(_, agent)| is_named(&rid, agent)));
    let agent = agent.map(|(key, _)| key);
    agent.ok_or_else(|| Error::UnknownResponse { id: id.chars().take(ID_SHOWN_MAX).collect() })
}

pub(super) fn previous_response(kind: Kind, body: &Object<'_>) -> Option<String> {
    let id = body.get("previous_response_id").filter(|_| kind == Kind::Responses)?;
    // The engine refuses a value that is no string.
    serde_json::from_str(id.get()).ok()
}

/// A turn goes to the agent of the response that it continues: only its engine knows the
/// conversation.
pub(super) async fn find_previous(
    shared: &Shared,
    turn: &mut Turn,
    principal: &str,
) -> Result<(), Error> {
    let Some(id) = &turn.previous_response else { return Ok(()) };
    let view = shared.directory.settled_view().await;
    turn.response_agent = Some(find_agent(&view, id, principal)?);
    Ok(())
}

pub(crate) async fn ask_engine(
    shared: &Arc<Shared>,
    principal: &str,
    id: &str,
    method: Method,
    path: PathAndQuery,
    mut headers: HeaderMap,
) -> Result<Response, Error> {
    let view = shared.directory.settled_view().await;
    let agent = find_agent(&view, id, principal)?;
    let known = view.agent_with(agent);
    let facts = known.facts.as_ref().filter(|_| known.is_up());
    let facts = facts.ok_or(check::Error::NoWorker(NoWorker::Unusable))?;
    strip_request(&mut headers);
    if !is_on_this_host(&facts.data_authority) {
        credential::remove(&mut headers);
    }
    let mut request = Request::new(Full::default());
    *request.method_mut() = method;
    *request.uri_mut() = facts.data_uri(path);
    *request.headers_mut() = headers;
    let worker = known.name().to_owned();
    let answer = shared.upstream.send(agent, request, now() + shared.turn_max).await;
    let answer = answer.map_err(|error| match error {
        SendError::Late => NoAnswer::TimedOut,
        SendError::Silent { was_sent } => NoAnswer::Silent { worker, was_sent },
        SendError::NoDescriptors(source) => NoAnswer::NoDescriptors { worker, source },
        SendError::Http(source) => NoAnswer::Connect { worker, source },
    })?;
    let (mut parts, body) = answer.into_parts();
    strip_answer(&mut parts.headers);
    parts.version = http::Version::HTTP_11;
    parts.extensions.clear();
    Ok(Response::from_parts(parts, axum::body::Body::new(body)))
}
