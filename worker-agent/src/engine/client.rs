//! Calls the HTTP API of the engine (SGLang) for the agent.
//!
//! [`EngineClient`] sends turns (requests with their answers) and aborts them, opens and closes
//! sessions (series of turns whose KV the engine keeps), and reads the engine's description and
//! load. The engine knows a session by the id of its *incarnation*: one life of the session inside
//! the engine. `data_port` sends turns, the tasks of `owner` make all other calls. They decide what
//! is sent and when; the client keeps no list of sessions and retries nothing.

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
use proto::load::{EngineFacts, ModelFiles, Retention};
use serde::Deserialize;
use serde_json::Value;
use service::descriptors;

use super::{LoadSample, RankSample, model_files};
use crate::kv_events::publisher_info::{PublisherAddresses, PublisherInfo};

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

/// Why a call to the engine failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine accepted no connection, so it did not get the call.
    #[error("the engine at {0} accepts no connections")]
    Connect(Uri, #[source] hyper_util::client::legacy::Error),
    /// An established connection broke before the answer was complete.
    #[error("the engine at {0} closed the connection before its answer was complete")]
    Broken(Uri, #[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer came in time.
    #[error("the engine did not answer {0} within {1:?}")]
    Timeout(&'static str, Duration),
    /// The answer has an unexpected status.
    #[error("the engine answered {path} with {status}: {body}")]
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
        matches!(self, Self::Connect(_, error) if descriptors::is_shortage(error))
    }

    /// Whether the engine's process is gone: see [`is_connection_refused`].
    #[must_use]
    pub fn is_process_gone(&self) -> bool {
        matches!(self, Self::Connect(_, error) if is_connection_refused(error))
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

/// The part of `/server_info` that the agent needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInfo {
    /// The facts that the agent tells routers.
    pub facts: EngineFacts,
    /// For each data parallel (DP) rank: the number of rows of its request table. A request that
    /// runs holds a row.
    pub rows: Vec<u32>,
    /// The size of each rank's KV pool, in tokens.
    pub pool_tokens: u64,
    /// The engine's device type, for example `cuda` or `cpu`.
    pub device: String,
    /// For each rank: the bytes of its pool on one of its devices, precise to about 1 MiB. `None`
    /// if the engine doesn't report them.
    pub pool_bytes: Vec<Option<u64>>,
    /// The most prompt tokens that the engine computes in one step. `None`: whole prompts.
    pub step_tokens_max: Option<u64>,
    /// The tokenizer files on this host. `None` until the engine monitor has found them.
    pub model_files: Option<ModelFiles>,
}

impl EngineInfo {
    /// Returns how the engine can keep the KV of sessions between turns, the best way first. The
    /// engine's flags decide this.
    #[must_use]
    pub fn retentions(&self) -> Vec<Retention> {
        let facts = &self.facts;
        // Streaming sessions don't work with prefill/decode disaggregation: the prefill engine's
        // copy of the history lacks the answers.
        let can_pin = facts.streaming_sessions && facts.disaggregation == "null";
        let mut retentions = vec![];
        if can_pin {
            retentions.push(Retention::Pinned);
        }
        if facts.radix_sessions {
            retentions.push(Retention::Tagged);
        }
        retentions.push(Retention::None);
        retentions
    }
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
        Self { base_uri, api_key, turn_client, control_client, sample_client, call_time_max }
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
        let info = parse_info(&value).map_err(|detail| Error::Answer { path, detail })?;
        let host = self.base_uri.host().unwrap_or("127.0.0.1");
        let publishers = PublisherAddresses::from_server_info(&value, host);
        let event_page_tokens =
            publishers.as_ref().ok().and_then(|publishers| publishers.page_tokens);
        let page_tokens = event_page_tokens.unwrap_or(info.facts.page_tokens);
        let publisher_info = PublisherInfo {
            instance: info.facts.instance.clone(),
            ranks: u32::try_from(info.rows.len()).unwrap_or(u32::MAX),
            page_tokens,
            pool_pages: usize::try_from(info.pool_tokens).unwrap_or(usize::MAX)
                / page_tokens as usize,
            publishers,
        };
        Ok((info, model_files::TokenizerSource::from_info(&value), publisher_info))
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

    /// Reads `/ready`. Returns whether the engine runs requests: it is healthy and not paused.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn is_ready(&self) -> Result<bool, Error> {
        match self.call(Method::GET, "/ready", None).await {
            Ok(_) => Ok(true),
            Err(Error::Status { status: StatusCode::SERVICE_UNAVAILABLE, .. }) => Ok(false),
            Err(error) => Err(error),
        }
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

    /// Requests that a turn is aborted. The turn's own answer shows when it has ended.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn abort(&self, rid: &str) -> Result<(), Error> {
        let body = serde_json::json!({ "rid": rid, "abort_all": false });
        self.call(Method::POST, "/abort_request", Some(&body)).await.map(drop)
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
            let response =
                client.request(request).await.map_err(|error| self.connection_error(error))?;
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
        let body = body.map_err(|error| Error::Broken(self.base_uri.clone(), error))?.to_bytes();
        if !status.is_success() {
            let body = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
            return Err(Error::Status { path, status, body });
        }
        Ok(body)
    }

    /// Converts an error of the HTTP client: the connection could not be made, or it broke.
    fn connection_error(&self, error: hyper_util::client::legacy::Error) -> Error {
        if error.is_connect() {
            Error::Connect(self.base_uri.clone(), error)
        } else {
            Error::Broken(self.base_uri.clone(), error.into())
        }
    }

    fn uri(&self, path: Option<&PathAndQuery>) -> Uri {
        let mut parts = self.base_uri.clone().into_parts();
        parts.path_and_query = Some(path.cloned().unwrap_or(PathAndQuery::from_static("/")));
        Uri::from_parts(parts).expect("the base has scheme and authority, checked by the settings")
    }
}

/// Reads the values that the agent needs from the answer of `/server_info`.
fn parse_info(value: &Value) -> Result<EngineInfo, String> {
    let number = |key: &str| value.get(key).and_then(Value::as_u64);
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    let required_number = |key: &str| number(key).ok_or(format!("{key} is missing"));
    let to_u32 = |key: &str, number: u64| {
        u32::try_from(number).map_err(|_| format!("{key} is out of range: {number}"))
    };
    let rank_states = value.get("internal_states").and_then(Value::as_array);
    let rows = rank_states
        .and_then(|states| states.first())
        .and_then(|state| state.get("effective_max_running_requests_per_dp"))
        .and_then(Value::as_u64)
        .or_else(|| number("max_running_requests"))
        .ok_or("effective_max_running_requests_per_dp is missing")?;
    let ranks = number("dp_size").unwrap_or(1).max(1);
    let page_tokens = to_u32("page_size", number("page_size").unwrap_or(1).max(1))?;
    let context_tokens = number("context_length")
        .or_else(|| rank_states?.first()?.get("context_length")?.as_u64())
        .or_else(|| number("max_req_input_len"))
        .ok_or("context_length is missing")?;
    let model = text("served_model_name").or_else(|| text("model_path"));
    let seed = number("random_seed").unwrap_or(0);
    let startup_times = value.get("startup_time").map(Value::to_string).unwrap_or_default();
    Ok(EngineInfo {
        facts: EngineFacts {
            version: text("version").unwrap_or("unknown").to_owned(),
            models: vec![model.ok_or("served_model_name is missing")?.to_owned()],
            page_tokens,
            context_tokens: to_u32("context_length", context_tokens)?,
            vocabulary: None,
            streaming_sessions: flag("enable_streaming_session"),
            radix_sessions: flag("enable_session_radix_cache"),
            // The engine reports no process id. The agent derives an id from two values that
            // differ between processes: the seed, random at each launch unless the operator sets
            // it, and the startup times, which are measured at each launch.
            instance: proto::id::short_sha256(format!("{seed} {startup_times}").as_bytes()),
            disaggregation: text("disaggregation_mode").unwrap_or("null").to_owned(),
            shortens_prompts: flag("allow_auto_truncate"),
        },
        rows: vec![to_u32("rows", rows)?; usize::try_from(ranks).map_err(|e| e.to_string())?],
        pool_tokens: required_number("max_total_num_tokens")?,
        device: text("device").unwrap_or("unknown").to_owned(),
        pool_bytes: rank_states.into_iter().flatten().map(pool_bytes).collect(),
        // The engine computes whole prompts if the number is -1.
        step_tokens_max: number("chunked_prefill_size").filter(|tokens| *tokens > 0),
        model_files: None,
    })
}

/// Returns the bytes of a rank's KV pool, which the engine reports in GiB with three decimals.
fn pool_bytes(rank_state: &Value) -> Option<u64> {
    let gib = rank_state.get("memory_usage")?.get("kvcache")?.as_f64()?;
    let milli_gib = (gib * 1000.0).round();
    // A value of 0.000 GiB, or of a million GiB and more, can't be a pool's size.
    let milli_gib = (1.0..1e9).contains(&milli_gib).then_some(milli_gib)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number between the bounds above"
    )]
    let milli_gib = milli_gib as u64;
    Some((milli_gib << 30) / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_info() -> Value {
        serde_json::json!({
            "version": "0.5.23", "page_size": 16, "max_total_num_tokens": 2048,
            "context_length": 1024, "dp_size": 2, "served_model_name": "tiny",
            "enable_streaming_session": true, "enable_session_radix_cache": true,
            "random_seed": 42, "startup_time": {"total": 12.5}, "disaggregation_mode": "null",
            "internal_states": [{"effective_max_running_requests_per_dp": 8}],
        })
    }

    #[test]
    fn flags_decide_which_retentions_are_offered() {
        let table = [
            (true, true, "null", vec![Retention::Pinned, Retention::Tagged, Retention::None]),
            (true, false, "null", vec![Retention::Pinned, Retention::None]),
            (false, true, "null", vec![Retention::Tagged, Retention::None]),
            (false, false, "null", vec![Retention::None]),
            (true, true, "decode", vec![Retention::Tagged, Retention::None]),
        ];
        for (streaming, radix, mode, want) in table {
            let mut value = server_info();
            value["enable_streaming_session"] = streaming.into();
            value["enable_session_radix_cache"] = radix.into();
            value["disaggregation_mode"] = mode.into();
            assert_eq!(parse_info(&value).unwrap().retentions(), want);
        }
    }

    #[test]
    fn a_restarted_engine_is_another_instance() {
        let first = parse_info(&server_info()).unwrap();
        assert_eq!(first, parse_info(&server_info()).unwrap());
        let mut value = server_info();
        value["startup_time"]["total"] = 12.6.into();
        assert_ne!(first.facts.instance, parse_info(&value).unwrap().facts.instance);
    }

    #[test]
    fn a_pool_s_bytes_are_the_engine_s_word_and_absent_without_one() {
        let state = |gib: f64| {
            serde_json::json!({"effective_max_running_requests_per_dp": 8,
                "memory_usage": {"kvcache": gib}})
        };
        let mut value = server_info();
        value["internal_states"] = serde_json::json!([state(81.25), state(0.0), {}]);
        assert_eq!(parse_info(&value).unwrap().pool_bytes, [Some(325 << 28), None, None]);
    }

    #[test]
    fn each_rank_has_its_rows_and_what_is_missing_is_named() {
        assert_eq!(parse_info(&server_info()).unwrap().rows, [8, 8]);
        let mut value = server_info();
        value.as_object_mut().unwrap().remove("max_total_num_tokens");
        assert!(parse_info(&value).unwrap_err().contains("max_total_num_tokens"));
    }
}
