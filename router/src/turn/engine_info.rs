//! Asks agents what their engines say of themselves, for the routes that show it.
//!
//! This module doesn't decide who may see which of an answer's fields.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, StatusCode, uri::PathAndQuery};
use http_body_util::{BodyExt as _, Full, Limited};
use serde_json::Value;
use service::clock::now;
use tokio::task::JoinSet;

use super::{shared::Shared, upstream::UpstreamClient};
use crate::fleet::{agent::Facts, worker::AgentKey};

/// The engine answers from memory, but its HTTP server may be busy with a long prompt.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);
/// An engine's settings are about 20 KiB, and each rank repeats them.
const ANSWER_BYTES_MAX: usize = 4 << 20;

pub(crate) struct EngineInfoAnswer {
    pub(crate) agent: String,
    pub(crate) answer: Result<Value, String>,
}

/// `None` if no agent is usable.
pub(crate) async fn ask_one(shared: &Shared, path: PathAndQuery) -> Option<EngineInfoAnswer> {
    let view = shared.directory.settled_view().await;
    let at = now();
    let (worker, agent, facts) =
        view.workers().find(|(worker, ..)| view.state(*worker, at).is_usable())?;
    let answer = ask(&shared.upstream, worker.agent, facts, path).await;
    Some(EngineInfoAnswer { agent: agent.name().to_owned(), answer })
}

/// Returns the answers in the order of the agents.
pub(crate) async fn ask_all(shared: &Shared, path: PathAndQuery) -> Vec<EngineInfoAnswer> {
    let view = shared.directory.settled_view().await;
    let mut asked = JoinSet::new();
    for (key, agent) in view.known_agents() {
        let Some(facts) = agent.facts.clone() else { continue };
        let (name, path) = (agent.name().to_owned(), path.clone());
        let upstream = Arc::clone(&shared.upstream);
        asked.spawn(async move {
            let answer = ask(&upstream, key, &facts, path).await;
            (key, EngineInfoAnswer { agent: name, answer })
        });
    }
    let mut answers = asked.join_all().await;
    answers.sort_by_key(|(key, _)| *key);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

async fn ask(
    upstream: &UpstreamClient,
    agent: AgentKey,
    facts: &Facts,
    path: PathAndQuery,
) -> Result<Value, String> {
    let mut request = Request::new(Full::<Bytes>::default());
    *request.uri_mut() = facts.data_uri(path);
    let deadline = now() + ANSWER_TIME_MAX;
    let response = upstream.send(agent, request, deadline).await;
    let response = response.map_err(|error| format!("no answer: {error:?}"))?;
    let status = response.status();
    let reading = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect();
    let body = match tokio::time::timeout_at(deadline.into(), reading).await {
        Ok(body) => body.map_err(|error| format!("the answer broke off: {error}"))?.to_bytes(),
        Err(_) => return Err(format!("the answer took longer than {ANSWER_TIME_MAX:?}")),
    };
    if status != StatusCode::OK {
        return Err(format!("the engine answered {status}"));
    }
    serde_json::from_slice(&body).map_err(|error| format!("the answer isn't JSON: {error}"))
}
