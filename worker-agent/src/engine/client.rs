//! The client of the engine's HTTP API.
//!
//! It reads the engine's description and load, opens and closes sessions, aborts turns, and sends
//! turns. It knows SGLang's HTTP API and nothing of the sessions' states.

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

use super::model_files;
use crate::kv_events::publisher_info::{PublisherAddresses, PublisherInfo};

/// The maximum bytes of a control route's answer. `/server_info` has about 560 keys, 40 KiB.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// The engine's HTTP server closes connections that were idle for 5 s. A turn sent into a
/// connection that is being closed would have an unknown fate, so the agent closes its idle
/// connections before that.
const POOL_IDLE_MAX: Duration = Duration::from_secs(4);

/// The engine's timeout of a session opened only to check that its id is free. It removes the
/// session if the agent dies before closing it.
const PROBE_BACKSTOP: Duration = Duration::from_secs(60);

/// Why a call to the engine failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The engine accepted no connection.
    #[error("the engine at {0} accepts no connections")]
    Connect(Uri, #[source] hyper_util::client::legacy::Error),
    /// An established connection broke.
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

    /// Whether the engine's process is gone: see [`is_connection_refused`].
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Connect(_, error) if is_connection_refused(error))
    }
}

/// Whether the engine's port refused the connection. Then the engine's process is gone, and with it
/// all its KV.
#[must_use]
pub fn is_connection_refused(error: &hyper_util::client::legacy::Error) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        let io = error.downcast_ref::<std::io::Error>();
        if io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        source = error.source();
    }
    false
}

/// A client of one engine. Clones share its connections.
#[derive(Debug, Clone)]
pub struct Engine {
    base: Uri,
    api_key: Option<HeaderValue>,
    /// For turns: streaming bodies, no time limit.
    turns: Client<HttpConnector, Body>,
    /// For control calls, on connections of their own so that they never wait behind turns.
    control: Client<HttpConnector, Full<Bytes>>,
    /// For load samples alone: a new connection here means that the engine may be another process.
    samples: Client<HttpConnector, Full<Bytes>>,
    call_time_max: Duration,
}

/// The part of `/server_info` that the agent needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// The facts for the agent's description.
    pub facts: EngineFacts,
    /// The rows of each DP rank.
    pub rows: Vec<u32>,
    /// The tokens of each rank's pool.
    pub pool_tokens: u64,
    /// The engine's device type, for example `cuda` or `cpu`.
    pub device: String,
    /// The bytes of each rank's pool on one of its devices, rounded to MiB; `None` if the engine
    /// doesn't report it.
    pub pool_bytes: Vec<Option<u64>>,
    /// The tokenizer files on this host. The engine monitor sets this.
    pub model_files: Option<ModelFiles>,
}

impl Info {
    /// Returns the retention modes that the engine's flags allow, best first.
    #[must_use]
    pub fn retentions(&self) -> Vec<Retention> {
        let facts = &self.facts;
        // Streaming sessions don't work with prefill/decode disaggregation: the prefill engine's
        // copy of the history lacks the answers.
        let pinned = facts.streaming_sessions && facts.disaggregation == "null";
        let mut modes = vec![];
        if pinned {
            modes.push(Retention::Pinned);
        }
        if facts.radix_sessions {
            modes.push(Retention::Tagged);
        }
        modes.push(Retention::None);
        modes
    }
}

/// One rank's entry in `/v1/loads`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct RankSample {
    /// The data parallel rank.
    pub dp_rank: u32,
    /// Requests in the running batch.
    pub num_running_reqs: u64,
    /// Requests in the queue.
    pub num_waiting_reqs: u64,
    /// Tokens in use that can't be evicted.
    pub num_used_tokens: u64,
    /// Tokens in the pool.
    pub max_total_num_tokens: u64,
    /// Tokens prefilled since the engine started. Decreases only when the engine restarts.
    #[serde(default)]
    pub total_prefill_uncached_tokens: u64,
    /// Time spent on these tokens, in microseconds.
    #[serde(default)]
    pub total_prefill_busy_us: Option<u64>,
    /// Prompt tokens that wait to be computed, as the engine estimates them.
    #[serde(default)]
    pub num_waiting_uncached_tokens: Option<u64>,
}

/// The load of all ranks at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// When the answer arrived.
    pub at: Instant,
    /// One entry per rank, in rank order.
    pub ranks: Vec<RankSample>,
    /// The local address of the connection that brought the answer.
    pub connection: Option<SocketAddr>,
}

impl Engine {
    /// Creates a client of the engine at `base` (`http://host:port`).
    #[must_use]
    pub fn new(
        base: Uri,
        api_key: Option<HeaderValue>,
        connect: Duration,
        call_time_max: Duration,
    ) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect));
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(POOL_IDLE_MAX);
        let turns = builder.build(connector.clone());
        let control = builder.build(connector.clone());
        let samples = builder.build(connector);
        Self { base, api_key, turns, control, samples, call_time_max }
    }

    /// Sends a turn. The future does nothing until polled; dropping it closes the connection.
    pub fn send(&self, mut request: Request<Body>) -> ResponseFuture {
        *request.uri_mut() = self.uri(request.uri().path_and_query());
        if let Some(key) = &self.api_key {
            request.headers_mut().insert(header::AUTHORIZATION, key.clone());
        }
        self.turns.request(request)
    }

    /// Reads `/server_info`. Returns the facts, the tokenizer's source if the engine states one,
    /// and where it publishes KV events.
    ///
    /// # Errors
    /// When the engine can't be reached or its answer is invalid.
    pub async fn read_info(
        &self,
    ) -> Result<(Info, Option<model_files::TokenizerSource>, PublisherInfo), Error> {
        let path = "/server_info";
        let body = self.call(Method::GET, path, None).await?;
        let value: Value = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        let info = info_from(&value).map_err(|detail| Error::Answer { path, detail })?;
        let publishers =
            PublisherAddresses::from_server_info(&value, self.base.host().unwrap_or("127.0.0.1"));
        let told = publishers.as_ref().ok().and_then(|publishers| publishers.page_tokens);
        let page_tokens = told.unwrap_or(info.facts.page_tokens);
        let feed = PublisherInfo {
            instance: info.facts.instance.clone(),
            ranks: u32::try_from(info.rows.len()).unwrap_or(u32::MAX),
            page_tokens,
            pool_pages: usize::try_from(info.pool_tokens).unwrap_or(usize::MAX)
                / page_tokens as usize,
            publishers,
        };
        Ok((info, model_files::TokenizerSource::from_info(&value), feed))
    }

    /// Reads `/v1/loads`.
    ///
    /// # Errors
    /// When the engine can't be reached or its answer is invalid.
    pub async fn read_load(&self, now: impl Fn() -> Instant) -> Result<Sample, Error> {
        let path = "/v1/loads";
        let request = self.request(Method::GET, "/v1/loads?include=core", None);
        let (body, connection) = self.exchange(&self.samples, path, request).await?;
        #[derive(Deserialize)]
        struct Loads {
            loads: Vec<RankSample>,
        }
        let mut loads: Loads = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        loads.loads.sort_by_key(|rank| rank.dp_rank);
        Ok(Sample { at: now(), ranks: loads.loads, connection })
    }

    /// Opens a streaming session. `backstop` is the engine's own idle timeout, far longer than the
    /// agent's. It applies only if no agent ever comes back.
    ///
    /// # Errors
    /// When the engine refuses or can't be reached.
    pub async fn open_session(&self, incarnation: &str, backstop: Duration) -> Result<(), Error> {
        let body = serde_json::json!({
            "capacity_of_str_len": 1,
            "session_id": incarnation,
            "streaming": true,
            "timeout": backstop.as_secs(),
        });
        self.call(Method::POST, "/open_session", Some(&body)).await.map(drop)
    }

    /// Closes a session and verifies that it is gone, which it returns. The engine answers every
    /// close with 200, even when it defers the close. So the agent then opens the same id again,
    /// which the engine refuses while the session exists. A turn that may still run is aborted
    /// first, because the close would wait for it.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn close_and_verify(
        &self,
        incarnation: &str,
        rid: Option<&str>,
    ) -> Result<bool, Error> {
        self.close(incarnation, rid).await?;
        match self.open_session(incarnation, PROBE_BACKSTOP).await {
            Ok(()) => self.close_session(incarnation).await.map(|()| true),
            Err(Error::Status { status, .. }) if status.is_client_error() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Requests that a session is closed, after aborting its turn `rid` if one may still run.
    ///
    /// # Errors
    /// When the engine can't be reached.
    pub async fn close(&self, incarnation: &str, rid: Option<&str>) -> Result<(), Error> {
        if let Some(rid) = rid {
            self.abort(rid).await?;
        }
        self.close_session(incarnation).await
    }

    /// Requests that a session is closed. The engine answers 200 whether or not it did anything.
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

    async fn call(
        &self,
        method: Method,
        path: &'static str,
        body: Option<&Value>,
    ) -> Result<Bytes, Error> {
        let request = self.request(method, path, body);
        self.exchange(&self.control, path, request).await.map(|(bytes, _)| bytes)
    }

    fn request(
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

    async fn exchange(
        &self,
        client: &Client<HttpConnector, Full<Bytes>>,
        path: &'static str,
        request: Request<Full<Bytes>>,
    ) -> Result<(Bytes, Option<SocketAddr>), Error> {
        let exchange = async {
            let response = client.request(request).await.map_err(|error| self.classify(error))?;
            let info = response.extensions().get::<HttpInfo>();
            let connection = info.map(HttpInfo::local_addr);
            Ok((self.read(path, response).await?, connection))
        };
        let limit = self.call_time_max;
        tokio::time::timeout(limit, exchange).await.map_err(|_| Error::Timeout(path, limit))?
    }

    async fn read(&self, path: &'static str, response: Response<Incoming>) -> Result<Bytes, Error> {
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| Error::Broken(self.base.clone(), error))?.to_bytes();
        if !status.is_success() {
            let body = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
            return Err(Error::Status { path, status, body });
        }
        Ok(body)
    }

    fn classify(&self, error: hyper_util::client::legacy::Error) -> Error {
        if error.is_connect() {
            Error::Connect(self.base.clone(), error)
        } else {
            Error::Broken(self.base.clone(), error.into())
        }
    }

    fn uri(&self, path: Option<&PathAndQuery>) -> Uri {
        let mut parts = self.base.clone().into_parts();
        parts.path_and_query = Some(path.cloned().unwrap_or(PathAndQuery::from_static("/")));
        Uri::from_parts(parts).expect("the base has scheme and authority, checked by the settings")
    }
}

/// Reads the needed values out of the hundreds of keys of `/server_info`.
fn info_from(value: &Value) -> Result<Info, String> {
    let number = |key: &str| value.get(key).and_then(Value::as_u64);
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    let need = |key: &str| number(key).ok_or(format!("{key} is missing"));
    let small = |key: &str, number: u64| {
        u32::try_from(number).map_err(|_| format!("{key} is out of range: {number}"))
    };
    let states = value.get("internal_states").and_then(Value::as_array);
    let rows = states
        .and_then(|states| states.first())
        .and_then(|state| state.get("effective_max_running_requests_per_dp"))
        .and_then(Value::as_u64)
        .or_else(|| number("max_running_requests"))
        .ok_or("effective_max_running_requests_per_dp is missing")?;
    let ranks = number("dp_size").unwrap_or(1).max(1);
    let page_tokens = small("page_size", number("page_size").unwrap_or(1).max(1))?;
    let context = number("context_length")
        .or_else(|| states?.first()?.get("context_length")?.as_u64())
        .or_else(|| number("max_req_input_len"))
        .ok_or("context_length is missing")?;
    let model = text("served_model_name").or_else(|| text("model_path"));
    let seed = number("random_seed").unwrap_or(0);
    let startup = value.get("startup_time").map(Value::to_string).unwrap_or_default();
    Ok(Info {
        facts: EngineFacts {
            version: text("version").unwrap_or("unknown").to_owned(),
            models: vec![model.ok_or("served_model_name is missing")?.to_owned()],
            page_tokens,
            context_tokens: small("context_length", context)?,
            vocabulary: None,
            streaming_sessions: flag("enable_streaming_session"),
            radix_sessions: flag("enable_session_radix_cache"),
            // The engine has no instance id. Its seed is random at each launch unless it is set,
            // and its startup times are measured at each launch.
            instance: proto::id::principal_of(Some(format!("{seed} {startup}").as_bytes())),
            disaggregation: text("disaggregation_mode").unwrap_or("null").to_owned(),
        },
        rows: vec![small("rows", rows)?; usize::try_from(ranks).map_err(|e| e.to_string())?],
        pool_tokens: need("max_total_num_tokens")?,
        device: text("device").unwrap_or("unknown").to_owned(),
        pool_bytes: states.into_iter().flatten().map(pool_bytes).collect(),
        model_files: None,
    })
}

/// Reads the bytes of a pool. The engine reports them in GiB with three decimals.
fn pool_bytes(state: &Value) -> Option<u64> {
    let gib = state.get("memory_usage")?.get("kvcache")?.as_f64()?;
    let thousandths = (gib * 1000.0).round();
    // A value below the resolution or above any device's memory is not a valid figure.
    let thousandths = (1.0..1e9).contains(&thousandths).then_some(thousandths)?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number between the bounds above"
    )]
    let thousandths = thousandths as u64;
    Some((thousandths << 30) / 1000)
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
            assert_eq!(info_from(&value).unwrap().retentions(), want);
        }
    }

    #[test]
    fn a_restarted_engine_is_another_instance() {
        let first = info_from(&server_info()).unwrap();
        assert_eq!(first, info_from(&server_info()).unwrap());
        let mut value = server_info();
        value["startup_time"]["total"] = 12.6.into();
        assert_ne!(first.facts.instance, info_from(&value).unwrap().facts.instance);
    }

    #[test]
    fn a_pool_s_bytes_are_the_engine_s_word_and_absent_without_one() {
        let state = |gib: f64| {
            serde_json::json!({"effective_max_running_requests_per_dp": 8,
                "memory_usage": {"kvcache": gib}})
        };
        let mut value = server_info();
        value["internal_states"] = serde_json::json!([state(81.25), state(0.0), {}]);
        assert_eq!(info_from(&value).unwrap().pool_bytes, [Some(325 << 28), None, None]);
    }

    #[test]
    fn each_rank_has_its_rows_and_what_is_missing_is_named() {
        assert_eq!(info_from(&server_info()).unwrap().rows, [8, 8]);
        let mut value = server_info();
        value.as_object_mut().unwrap().remove("max_total_num_tokens");
        assert!(info_from(&value).unwrap_err().contains("max_total_num_tokens"));
    }
}
