//! Calls the HTTP API of the engine (SGLang) for the agent.
//!
//! [`EngineClient`] sends turns (requests with their answers) and aborts them, opens and closes
//! sessions (series of turns whose KV the engine keeps), and reads the engine's description and
//! load. The engine knows a session by the id of its *incarnation*: one life of the session inside
//! the engine. `data_port` sends turns, the tasks of `owner` make all other calls. They decide what
//! is sent and when; the client keeps no list of sessions and retries nothing. The child
//! `control_call` sends the calls of operators and trainers.

mod control_call;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{
        Client, ResponseFuture,
        connect::{HttpConnector, HttpInfo},
    },
    rt::{TokioExecutor, TokioTimer},
};
use serde::Deserialize;
use serde_json::Value;
use service::descriptors;

pub use self::control_call::ControlCall;
use super::{
    LoadSample, RankSample,
    info::{EngineInfo, parse_info, read_role},
    missing::missing_flags,
    model_files,
};
use crate::kv_events::{
    pages::TierPages,
    publisher_info::{PublisherAddresses, PublisherInfo, host_tokens},
};

/// The maximum bytes of the answer to a control call. The largest answer, of `/server_info`, has
/// about 40 KiB.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// The agent closes connections that were idle for this time, before the engine's HTTP server
/// closes them after 5 s. If the agent sent a turn over a connection while the server closes the
/// connection, the agent could not know whether the engine runs the turn.
const POOL_IDLE_MAX: Duration = Duration::from_secs(4);

/// The engine's idle timeout of a session that the agent opens only to check that the id is free.
/// If the agent dies before it closes this session, the timeout removes the session.
const PROBE_IDLE_MAX: Duration = Duration::from_secs(60);

/// Why a call to the engine failed. The text goes to clients too, so it has no address.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine accepted no connection, so it did not get the call.
    #[error("the engine accepts no connections")]
    Connect(#[source] hyper_util::client::legacy::Error),
    /// An established connection broke before the answer was complete.
    #[error("the engine closed the connection before its answer was complete")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer came in time.
    #[error("the engine did not answer {0} within {1:?}")]
    Timeout(&'static str, Duration),
    /// The answer has an unexpected status.
    #[error("the engine answered {path} with {status}: {body}{}", status_advice(*.status))]
    Status {
        /// The route that was called.
        path: &'static str,
        /// The status of the answer.
        status: StatusCode,
        /// The start of the body.
        body: String,
    },
    /// The answer can't be parsed.
    #[error("the engine's answer to {path} is invalid: {detail}")]
    Answer {
        /// The route that was called.
        path: &'static str,
        /// What is wrong with the answer.
        detail: String,
    },
}

impl Error {
    /// Whether an established connection broke.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        matches!(self, Self::Broken(..))
    }

    /// Whether the engine may have carried out the call although no valid answer came.
    #[must_use]
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::Connect(..) => false,
            Self::Status { status, .. } => !status.is_client_error(),
            Self::Broken(..) | Self::Timeout(..) | Self::Answer { .. } => true,
        }
    }

    /// Whether this agent had no file descriptor or port for a connection. Then the call says
    /// nothing about the engine.
    #[must_use]
    pub fn is_own_shortage(&self) -> bool {
        matches!(self, Self::Connect(error) if descriptors::is_shortage(error))
    }

    /// Whether the engine's process is gone: see [`is_connection_refused`].
    #[must_use]
    pub fn is_process_gone(&self) -> bool {
        matches!(self, Self::Connect(error) if is_connection_refused(error))
    }
}

/// Converts an error of the HTTP client: the connection could not be made, or it broke.
fn connection_error(error: hyper_util::client::legacy::Error) -> Error {
    if error.is_connect() { Error::Connect(error) } else { Error::Broken(error.into()) }
}

/// Returns what an operator should do about a status, as the end of a message.
fn status_advice(status: StatusCode) -> &'static str {
    if status == StatusCode::UNAUTHORIZED {
        "; set BERTH_ENGINE_API_KEY to the engine's --api-key"
    } else {
        ""
    }
}

/// Whether the engine's port refused the connection. Then the engine's process is gone, and with it
/// all its KV.
#[must_use]
pub fn is_connection_refused(error: &hyper_util::client::legacy::Error) -> bool {
    let kind = descriptors::system_error(error).map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::ConnectionRefused)
}

/// A client of one engine. Clones share its connections.
#[derive(Debug, Clone)]
pub struct EngineClient {
    base_uri: Uri,
    api_key: Option<HeaderValue>,
    /// The credential for the engine's admin routes.
    admin_key: Option<HeaderValue>,
    /// Sends turns. Their bodies are streamed, without a time limit.
    turn_client: Client<HttpConnector, Body>,
    /// Sends control calls, on connections of their own, so that they never wait behind turns.
    control_client: Client<HttpConnector, Full<Bytes>>,
    /// Reads load samples, and nothing else. This client keeps one connection open, so a sample
    /// that comes over a new connection may come from a new engine process.
    sample_client: Client<HttpConnector, Full<Bytes>>,
    /// The time limit of a call other than a turn.
    call_time_max: Duration,
}

impl EngineClient {
    /// Creates a client of the engine at `base_uri` (`http://host:port`). `connect_max` is the time
    /// limit for connecting, and `call_time_max` that for a call other than a turn.
    #[must_use]
    pub fn new(
        base_uri: Uri,
        api_key: Option<HeaderValue>,
        connect_max: Duration,
        call_time_max: Duration,
    ) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect_max));
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(POOL_IDLE_MAX);
        let turn_client = builder.build(connector.clone());
        let control_client = builder.build(connector.clone());
        let sample_client = builder.build(connector);
        let admin_key = api_key.clone();
        Self {
            base_uri,
            api_key,
            admin_key,
            turn_client,
            control_client,
            sample_client,
            call_time_max,
        }
    }

    /// Sets the credential for the engine's admin routes. Without one, they get the API key. An
    /// engine that has an admin key doesn't take the API key there.
    #[must_use]
    pub fn with_admin_key(mut self, admin_key: Option<HeaderValue>) -> Self {
        self.admin_key = admin_key.or(self.admin_key);
        self
    }

    /// Returns the engine's host.
    #[must_use]
    pub fn host(&self) -> &str {
        self.base_uri.host().unwrap_or("127.0.0.1")
    }

    /// Returns the credential for the engine's admin routes; `None` if there is none.
    #[must_use]
    pub fn admin_key(&self) -> Option<&HeaderValue> {
        self.admin_key.as_ref()
    }

    /// Returns the engine's API key as the value of `Authorization`; `None` if there is none.
    #[must_use]
    pub fn api_key(&self) -> Option<&HeaderValue> {
        self.api_key.as_ref()
    }

    /// Sends a turn when the returned future is polled. Dropping the future closes the connection.
    /// The caller has set the credential.
    pub fn send(&self, mut request: Request<Body>) -> ResponseFuture {
        *request.uri_mut() = self.uri(request.uri().path_and_query());
        self.turn_client.request(request)
    }

    /// Reads `/server_info`. Returns the facts, the tokenizer's source if the engine states one,
    /// and where it publishes KV events.
    ///
    /// # Errors
    /// When the engine can't be reached or its answer is invalid.
    pub async fn read_info(
        &self,
    ) -> Result<(EngineInfo, Option<model_files::TokenizerSource>, PublisherInfo), Error> {
        let path = "/server_info";
        let body = self.call(Method::GET, path, None).await?;
        let value: Value = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        let mut info = parse_info(&value).map_err(|detail| Error::Answer { path, detail })?;
        let publishers = PublisherAddresses::from_server_info(&value, self.host());
        if info.has_lora {
            info.facts.adapters = Some(self.read_adapters().await?);
        }
        info.missing_flags = missing_flags(&value, publishers.is_ok());
        let event_page_tokens =
            publishers.as_ref().ok().and_then(|publishers| publishers.page_tokens);
        let page_tokens = event_page_tokens.unwrap_or(info.facts.page_tokens);
        let publisher_info = PublisherInfo {
            instance: info.facts.instance.clone(),
            ranks: u32::try_from(info.rows.len()).unwrap_or(u32::MAX),
            page_tokens,
            pool_pages: pool_pages(&value, &info, page_tokens),
            publishers,
        };
        Ok((info, model_files::TokenizerSource::from_info(&value), publisher_info))
    }

    /// Reads the engine's present role in a pair: `null`, `prefill` or `decode`.
    ///
    /// # Errors
    /// When the engine can't be reached or its answer is invalid.
    pub async fn read_role(&self) -> Result<String, Error> {
        let path = "/server_info";
        let body = self.call(Method::GET, path, None).await?;
        let value: Value = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        Ok(read_role(&value).to_owned())
    }

    /// Reads the names of the loaded LoRA adapters from `/v1/models`, in order.
    ///
    /// # Errors
    /// When the engine can't be reached or its answer is invalid.
    pub async fn read_adapters(&self) -> Result<Vec<String>, Error> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
            /// The model to which an adapter belongs.
            parent: Option<String>,
        }
        let path = "/v1/models";
        let body = self.call(Method::GET, path, None).await?;
        let models: Models = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        let adapters = models.data.into_iter().filter(|model| model.parent.is_some());
        let mut names: Vec<String> = adapters.map(|model| model.id).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Reads `/v1/loads`. Calls `now` when the answer has arrived.
    ///
    /// # Errors
    /// When the engine can't be reached or its answer is invalid.
    pub async fn read_load(&self, now: impl Fn() -> Instant) -> Result<LoadSample, Error> {
        let path = "/v1/loads";
        let request = self.build_request(Method::GET, "/v1/loads?include=core", None);
        let (body, connection) = self.send_with_limit(&self.sample_client, path, request).await?;
        #[derive(Deserialize)]
        struct LoadsAnswer {
            loads: Vec<RankSample>,
        }
        let mut answer: LoadsAnswer = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        answer.loads.sort_by_key(|rank| rank.dp_rank);
        Ok(LoadSample { at: now(), ranks: answer.loads, connection, is_paused: false })
    }

    /// Opens a session whose KV the engine keeps (a "streaming session" of SGLang) under the id
    /// `incarnation`. The engine closes the session if it is idle for `idle_max`. Usually the agent
    /// closes its sessions earlier, so this limit matters only if no agent is left.
    ///
    /// # Errors
    /// When the engine refuses or can't be reached.
    pub async fn open_session(&self, incarnation: &str, idle_max: Duration) -> Result<(), Error> {
        let body = serde_json::json!({
            "capacity_of_str_len": 1,
            "session_id": incarnation,
            "streaming": true,
            "timeout": idle_max.as_secs(),
        });
        self.call(Method::POST, "/open_session", Some(&body)).await.map(drop)
    }

    /// Closes a session, and returns whether the session is gone. `rid` is the id of a turn that
    /// may still run. The method aborts that turn first, because the engine defers a close while a
    /// turn runs.
    ///
    /// The engine answers every close with 200, even a deferred one. So this method then opens a
    /// session with the same id, which the engine refuses while the old session exists.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn close_and_verify(
        &self,
        incarnation: &str,
        rid: Option<&str>,
    ) -> Result<bool, Error> {
        self.abort_and_close(incarnation, rid).await?;
        match self.open_session(incarnation, PROBE_IDLE_MAX).await {
            Ok(()) => self.close_session(incarnation).await.map(|()| true),
            Err(Error::Status { status, .. }) if status.is_client_error() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Aborts the turn `rid` if there is one, and requests that its session is closed. Doesn't
    /// check whether the session is gone.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn abort_and_close(&self, incarnation: &str, rid: Option<&str>) -> Result<(), Error> {
        if let Some(rid) = rid {
            self.abort(rid).await?;
        }
        self.close_session(incarnation).await
    }

    /// Requests that a session is closed, and aborts no turn. The engine answers 200 even if it
    /// has no such session.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn close_session(&self, incarnation: &str) -> Result<(), Error> {
        let body = serde_json::json!({ "session_id": incarnation });
        self.call(Method::POST, "/close_session", Some(&body)).await.map(drop)
    }

    /// Makes a control call, and returns the body of the answer.
    async fn call(
        &self,
        method: Method,
        path: &'static str,
        body: Option<&Value>,
    ) -> Result<Bytes, Error> {
        let request = self.build_request(method, path, body);
        self.send_with_limit(&self.control_client, path, request).await.map(|(bytes, _)| bytes)
    }

    fn build_request(
        &self,
        method: Method,
        path: &'static str,
        body: Option<&Value>,
    ) -> Request<Full<Bytes>> {
        let mut request = Request::builder()
            .method(method)
            .uri(self.uri(Some(&PathAndQuery::from_static(path))))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.api_key {
            request = request.header(header::AUTHORIZATION, key);
        }
        let bytes = body.map(Value::to_string).unwrap_or_default();
        request.body(Full::from(bytes)).expect("all parts are valid")
    }

    /// Sends a request within the time limit. Returns the body of the answer, and the local address
    /// of the connection. `path` is the route for error messages.
    async fn send_with_limit(
        &self,
        client: &Client<HttpConnector, Full<Bytes>>,
        path: &'static str,
        request: Request<Full<Bytes>>,
    ) -> Result<(Bytes, Option<SocketAddr>), Error> {
        let answer = async {
            let response = client.request(request).await.map_err(connection_error)?;
            let http_info = response.extensions().get::<HttpInfo>();
            let connection = http_info.map(HttpInfo::local_addr);
            Ok((self.read_body(path, response).await?, connection))
        };
        let limit = self.call_time_max;
        tokio::time::timeout(limit, answer).await.map_err(|_| Error::Timeout(path, limit))?
    }

    /// Reads the body of an answer. Any status other than success is an error.
    async fn read_body(
        &self,
        path: &'static str,
        response: Response<Incoming>,
    ) -> Result<Bytes, Error> {
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(Error::Broken)?.to_bytes();
        if !status.is_success() {
            let body = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
            return Err(Error::Status { path, status, body });
        }
        Ok(body)
    }

    fn uri(&self, path: Option<&PathAndQuery>) -> Uri {
        let mut parts = self.base_uri.clone().into_parts();
        parts.path_and_query = Some(path.cloned().unwrap_or(PathAndQuery::from_static("/")));
        Uri::from_parts(parts).expect("the base has scheme and authority, checked by the settings")
    }
}

/// Returns the pages in the pools of one rank, for pages of `page_tokens` tokens.
fn pool_pages(value: &Value, info: &EngineInfo, page_tokens: u32) -> TierPages {
    let device_bytes = info.pool_bytes.first().copied().flatten();
    let token_bytes = device_bytes.and_then(|bytes| bytes.checked_div(info.pool_tokens));
    let pages =
        |tokens: u64| usize::try_from(tokens / u64::from(page_tokens)).unwrap_or(usize::MAX);
    let device = pages(info.pool_tokens);
    TierPages { device, host: pages(host_tokens(value, info.pool_tokens, token_bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_refuses_the_key_says_what_to_set() {
        let message =
            |status| Error::Status { path: "/v1/loads", status, body: "{}".to_owned() }.to_string();
        assert!(message(StatusCode::UNAUTHORIZED).contains("BERTH_ENGINE_API_KEY"));
        assert!(!message(StatusCode::BAD_REQUEST).contains("BERTH_ENGINE_API_KEY"));
    }
}
