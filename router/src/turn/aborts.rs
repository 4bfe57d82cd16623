//! Aborts turns for the clients that sent them.
//!
//! A turn may wait here for staged prefill, or be at any agent, also through another router. So an
//! abort ends the turns that wait here and asks all agents that can be reached. A turn that this
//! router has sent may not have arrived yet, so an agent is told its id too.

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use contract::abort::{AbortRequest, AgentAbortRequest, PATH, TurnPart};
use http::{HeaderValue, Method, Request, header, uri::PathAndQuery};
use http_body_util::Full;
use service::clock::now;
use tracing::warn;

use super::{
    error::NoAnswer,
    shared::Shared,
    upstream::{SendError, UpstreamClient},
};
use crate::fleet::agent::{Agent, Facts};

/// An agent asks its engine for each turn that it aborts, which takes about a millisecond.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// After an error the other agents were asked all the same, and the request may be sent again.
pub(crate) async fn abort(shared: &Shared, request: &AbortRequest) -> Result<(), NoAnswer> {
    // Those that were not sent see for themselves that they are aborted.
    let named = shared.unanswered_turns.abort(request).into_iter();
    let whole = named.filter(|turn| turn.part == TurnPart::Whole);
    let unanswered = whole.map(|turn| turn.facts).collect();
    let request = AgentAbortRequest { request: request.clone(), unanswered };
    let body = serde_json::to_vec(&request).expect("strings serialise");
    let body = Bytes::from(body);
    let view = shared.directory.view();
    let agents = view.agents.iter().filter(|agent| agent.is_up());
    let mut calls: Vec<_> = agents
        .filter_map(|agent| Some((agent, agent.facts.as_ref()?)))
        .map(|(agent, facts)| Box::pin(ask_agent(&shared.upstream, agent, facts, body.clone())))
        .collect();
    let mut result = Ok(());
    poll_fn(|context| {
        calls.retain_mut(|call| match call.as_mut().poll(context) {
            Poll::Pending => true,
            Poll::Ready(answer) => {
                if let Err(error) = answer {
                    result = Err(error);
                }
                false
            }
        });
        if calls.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

async fn ask_agent(
    upstream: &Arc<UpstreamClient>,
    agent: &Agent,
    facts: &Facts,
    body: Bytes,
) -> Result<(), NoAnswer> {
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = facts.data_uri(PathAndQuery::from_static(PATH));
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(header::CONTENT_TYPE, json);
    let answer = upstream.send(agent.key, request, now() + ANSWER_TIME_MAX).await;
    let worker = agent.name().to_owned();
    match answer {
        Ok(answer) if answer.status().is_success() => Ok(()),
        Ok(answer) => {
            warn!(agent = worker, status = answer.status().as_u16(), "can't abort turns");
            Err(NoAnswer::NotAborted { worker })
        }
        Err(SendError::Late | SendError::Silent { .. }) => {
            Err(NoAnswer::Silent { worker, was_sent: false })
        }
        Err(SendError::NoDescriptors(source)) => Err(NoAnswer::NoDescriptors { worker, source }),
        Err(SendError::Http(source)) => Err(NoAnswer::Connect { worker, source }),
    }
}
