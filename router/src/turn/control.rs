//! Sends a control call of an admin to several agents at once.
//!
//! The caller names agents, or workers of theirs, in the header `x-berth-workers` or the query
//! parameter `workers`, separated by commas; without a name a call goes to all. With `per_worker=1`
//! the body is an object with a body for each name, and the call goes to the agents named there.
//! All other parameters go to the engines. `http` has checked that the caller is an admin.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use bytes::Bytes;
use contract::control::ADMIN;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use http_body_util::{BodyExt as _, Full, Limited};
use serde_json::value::RawValue;
use service::clock::now;
use tokio::{sync::Semaphore, task::JoinSet};

use super::{
    shared::Shared,
    upstream::{SendError, UpstreamClient},
};
use crate::fleet::{agent::Facts, snapshot::Snapshot, worker::AgentKey};

const WORKERS: HeaderName = HeaderName::from_static("x-berth-workers");
/// The most agents called at the same time: an answer may have megabytes.
const CALLS_MAX: usize = 64;
/// An engine's answer has kilobytes.
const ANSWER_BYTES_MAX: usize = 4 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("no agent is known yet; try again")]
    NoAgent,
    #[error("there is no worker {name:?}; there are: {known}")]
    UnknownWorker {
        name: String,
        /// The names of all agents.
        known: String,
    },
    #[error("with per_worker=1 the body must be an object of one body for each worker: {0}")]
    Bodies(#[source] serde_json::Error),
}

#[derive(Debug)]
pub(crate) struct ControlRequest {
    pub(crate) method: Method,
    pub(crate) uri: Uri,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentAnswer {
    pub(crate) status: http::StatusCode,
    pub(crate) content_type: Option<HeaderValue>,
    pub(crate) body: Bytes,
}

/// Why an agent gave no answer. The messages are for the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    #[error("it did not answer within turn_ms_max; look at its weights in GET /v1/workers")]
    Late,
    #[error("its agent can't be reached: {0}")]
    Unreachable(String),
}

/// By the agent's name.
pub(crate) type Answers = BTreeMap<String, Result<AgentAnswer, CallError>>;

struct AgentCall {
    agent: AgentKey,
    name: String,
    body: Bytes,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct ControlQuery {
    workers: Option<String>,
    has_body_per_worker: bool,
    /// What goes to the engines.
    rest: String,
}

impl ControlQuery {
    fn read(query: &str) -> Self {
        let mut read = Self::default();
        let mut rest = vec![];
        for part in query.split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=').unwrap_or((part, "")) {
                // A comma may come escaped.
                ("workers", names) => {
                    read.workers = Some(names.replace("%2C", ",").replace("%2F", "/"));
                }
                ("per_worker", value) => read.has_body_per_worker = value == "1",
                _ => rest.push(part),
            }
        }
        read.rest = rest.join("&");
        read
    }
}

pub(crate) async fn run(shared: &Shared, request: ControlRequest) -> Result<Answers, Error> {
    let view = shared.directory.settled_view().await;
    let query = ControlQuery::read(request.uri.query().unwrap_or_default());
    let calls = choose_calls(&view, &request, &query)?;
    let path = request.uri.path();
    let target =
        if query.rest.is_empty() { path.to_owned() } else { format!("{path}?{}", query.rest) };
    let (deadline, places) = (now() + shared.turn_max, Arc::new(Semaphore::new(CALLS_MAX)));
    let mut running = JoinSet::new();
    for AgentCall { agent, name, body } in calls {
        let Some(facts) = view.agent_with(agent).facts.clone() else {
            let reason = "it was never heard".to_owned();
            running.spawn(async move { (name, Err(CallError::Unreachable(reason))) });
            continue;
        };
        let message = agent_request(&request, &facts, &target, body);
        let (upstream, places) = (Arc::clone(&shared.upstream), Arc::clone(&places));
        running.spawn(async move {
            let _place = places.acquire_owned().await;
            (name, call(&upstream, agent, message, deadline).await)
        });
    }
    Ok(running.join_all().await.into_iter().collect())
}

fn choose_calls(
    view: &Snapshot,
    request: &ControlRequest,
    query: &ControlQuery,
) -> Result<Vec<AgentCall>, Error> {
    let header = request.headers.get(WORKERS).and_then(|value| value.to_str().ok());
    let named = header.or(query.workers.as_deref());
    let mut bodies: BTreeMap<AgentKey, Bytes> = BTreeMap::new();
    if query.has_body_per_worker {
        let given: BTreeMap<String, Box<RawValue>> =
            serde_json::from_slice(&request.body).map_err(Error::Bodies)?;
        for (name, body) in given {
            let body = Bytes::copy_from_slice(body.get().as_bytes());
            bodies.insert(find_agent(view, &name)?, body);
        }
    } else if let Some(names) = named {
        for name in names.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            bodies.insert(find_agent(view, name)?, request.body.clone());
        }
    } else {
        bodies.extend(view.known_agents().map(|(agent, _)| (agent, request.body.clone())));
    }
    if bodies.is_empty() {
        return Err(Error::NoAgent);
    }
    let call = |(agent, body): (AgentKey, Bytes)| {
        let name = view.agent_with(agent).name().to_owned();
        AgentCall { agent, name, body }
    };
    Ok(bodies.into_iter().map(call).collect())
}

/// A worker's name stands for its agent.
fn find_agent(view: &Snapshot, name: &str) -> Result<AgentKey, Error> {
    let agents = || view.known_agents().map(|(agent, known)| (agent, known.name()));
    let is_rank = |rank: &str| rank.bytes().all(|byte| byte.is_ascii_digit());
    let of_worker = name.rsplit_once('/').filter(|(_, rank)| is_rank(rank));
    let find = |name: &str| agents().find(|(_, known)| *known == name).map(|(agent, _)| agent);
    let found = find(name).or_else(|| find(of_worker?.0));
    found.ok_or_else(|| Error::UnknownWorker {
        name: name.to_owned(),
        known: agents().map(|(_, name)| name).collect::<Vec<_>>().join(", "),
    })
}

fn agent_request(
    request: &ControlRequest,
    facts: &Facts,
    target: &str,
    body: Bytes,
) -> Request<Full<Bytes>> {
    let target = target.parse().expect("path and query were parsed before");
    let mut message = Request::new(Full::new(body));
    *message.method_mut() = request.method.clone();
    *message.uri_mut() = facts.data_uri(target);
    let headers = message.headers_mut();
    if let Some(content_type) = request.headers.get(header::CONTENT_TYPE) {
        headers.insert(header::CONTENT_TYPE, content_type.clone());
    }
    headers.insert(ADMIN, HeaderValue::from_static("1"));
    message
}

async fn call(
    upstream: &UpstreamClient,
    agent: AgentKey,
    message: Request<Full<Bytes>>,
    deadline: Instant,
) -> Result<AgentAnswer, CallError> {
    let (head, body) = match upstream.send(agent, message, deadline).await {
        Ok(response) => response.into_parts(),
        Err(SendError::Late) => return Err(CallError::Late),
        Err(SendError::Silent { .. }) => {
            return Err(CallError::Unreachable("it has stopped answering".to_owned()));
        }
        Err(SendError::NoDescriptors(error) | SendError::Http(error)) => {
            return Err(CallError::Unreachable(error.to_string()));
        }
    };
    let reading = Limited::new(body, ANSWER_BYTES_MAX).collect();
    match tokio::time::timeout_at(deadline.into(), reading).await {
        Ok(Ok(body)) => Ok(AgentAnswer {
            status: head.status,
            content_type: head.headers.get(header::CONTENT_TYPE).cloned(),
            body: body.to_bytes(),
        }),
        Ok(Err(error)) => Err(CallError::Unreachable(error.to_string())),
        Err(_) => Err(CallError::Late),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::testing::{fleet, start};

    fn request(uri: &'static str, workers: Option<&'static str>, body: &str) -> ControlRequest {
        let names = workers.map(|names| (WORKERS, HeaderValue::from_static(names)));
        ControlRequest {
            method: Method::POST,
            uri: Uri::from_static(uri),
            headers: names.into_iter().collect(),
            body: Bytes::copy_from_slice(body.as_bytes()),
        }
    }

    /// Returns each called agent with its body.
    fn calls(request: &ControlRequest) -> Result<Vec<(usize, String)>, Error> {
        let view = fleet(&[(0, 0), (0, 0), (0, 0)], start()).snapshot();
        let query = ControlQuery::read(request.uri.query().unwrap_or_default());
        let calls = choose_calls(&view, request, &query)?;
        let text = |body: &Bytes| String::from_utf8(body.to_vec()).unwrap();
        Ok(calls.iter().map(|call| (call.agent.slot(), text(&call.body))).collect())
    }

    #[test]
    fn a_call_goes_to_all_or_to_those_named_once_each() {
        let all = calls(&request("/flush_cache", None, "{}")).unwrap();
        assert_eq!(all.iter().map(|call| call.0).collect::<Vec<_>>(), [0, 1, 2]);
        let some = calls(&request("/flush_cache", Some("a2, a0/0,a2/0"), "{}")).unwrap();
        assert_eq!(some, [(0, "{}".to_owned()), (2, "{}".to_owned())]);
        let by_query = calls(&request("/flush_cache?workers=a1%2Ca2", None, "")).unwrap();
        assert_eq!(by_query.len(), 2);
        let unknown = calls(&request("/flush_cache?workers=b", None, "")).unwrap_err();
        assert!(unknown.to_string().contains("a0, a1, a2"), "{unknown}");
    }

    #[test]
    fn a_body_for_each_worker_reaches_that_worker_byte_for_byte() {
        let body = r#"{"a1": {"rank_offset":  8}, "a0": {"rank_offset":1}}"#;
        let each = calls(&request("/init_weights_update_group?per_worker=1", None, body)).unwrap();
        let expected = [(0, r#"{"rank_offset":1}"#), (1, r#"{"rank_offset":  8}"#)];
        assert_eq!(each, expected.map(|(agent, body)| (agent, body.to_owned())));
        let wrong = calls(&request("/flush_cache?per_worker=1", None, "[1]")).unwrap_err();
        assert!(matches!(wrong, Error::Bodies(_)), "{wrong}");
    }

    #[test]
    fn the_engines_get_their_own_parameters_only() {
        let read = ControlQuery::read("workers=a&timeout=3&per_worker=1&x");
        assert_eq!(read.rest, "timeout=3&x");
        assert!(read.has_body_per_worker);
    }
}
