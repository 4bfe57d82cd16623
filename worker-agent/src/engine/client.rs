//! Calls the HTTP API of the engine (SGLang) for the agent.
//!
//! The client keeps no list of sessions, and repeats only what was certainly not sent.

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
        Client,
        connect::{HttpConnector, HttpInfo},
    },
    rt::{TokioExecutor, TokioTimer},
};
use serde::Deserialize;
use serde_json::Value;
use service::{
    descriptors,
    http_client::{AnswerBody, Answering, HttpClient, IdleLimits},
};

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

/// The largest answer, of `/server_info`, has about 40 KiB.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// The engine's HTTP server closes idle connections after 5 s. A turn that was sent over a closing
/// connection may or may not run.
const POOL_IDLE_MAX: Duration = Duration::from_secs(4);

/// A session that the agent opens only to check that the id is free is removed by this timeout if
/// the agent dies before it closes it.
const PROBE_IDLE_MAX: Duration = Duration::from_secs(60);

/// The text goes to clients too, so it has no address.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the engine accepts no connections")]
    Connect(#[source] hyper_util::client::legacy::Error),
    #[error("the engine closed the connection before its answer was complete")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the engine did not answer {0} within {1:?}")]
    Timeout(&'static str, Duration),
    #[error("the engine answered {path} with {status}: {body}{}", status_advice(*.status))]
    Status {
        path: &'static str,
        status: StatusCode,
        /// The start of the body.
        body: String,
    },
    #[error("the engine's answer to {path} is invalid: {detail}")]
    Answer {
        /// The route that was called.
        path: &'static str,
        detail: String,
    },
}

impl Error {
    #[must_use]
    pub fn is_broken(&self) -> bool {
        matches!(self, Self::Broken(..))
    }

    /// The engine may have carried out the call although no valid answer came.
    #[must_use]
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::Connect(..) => false,
            Self::Status { status, .. } => !status.is_client_error(),
            Self::Broken(..) | Self::Timeout(..) | Self::Answer { .. } => true,
        }
    }

    /// A shortage of the agent's own says nothing about the engine.
    #[must_use]
    pub fn is_own_shortage(&self) -> bool {
        matches!(self, Self::Connect(error) if descriptors::is_shortage(error))
    }

    #[must_use]
    pub fn is_process_gone(&self) -> bool {
        matches!(self, Self::Connect(error) if is_connection_refused(error))
    }
}

fn connection_error(error: hyper_util::client::legacy::Error) -> Error {
    if error.is_connect() { Error::Connect(error) } else { Error::Broken(error.into()) }
}

fn status_advice(status: StatusCode) -> &'static str {
    if status == StatusCode::UNAUTHORIZED {
        "; set BERTH_ENGINE_API_KEY to the engine's --api-key"
    } else {
        ""
    }
}

/// A refused connection means that the engine's process is gone, and with it all its KV.
#[must_use]
pub fn is_connection_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let kind = descriptors::system_error(error).map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::ConnectionRefused)
}

/// The rest of the engine's answer to a turn.
pub type TurnAnswerBody = AnswerBody<Body>;

pub type TurnAnswer = Answering<Body>;

/// Clones share its connections.
#[derive(Debug, Clone)]
pub struct EngineClient {
    base_uri: Uri,
    api_key: Option<HeaderValue>,
    admin_key: Option<HeaderValue>,
    /// Streams bodies, without a time limit.
    turn_client: HttpClient<HttpConnector>,
    /// Control calls have connections of their own, so that they never wait behind turns.
    control_client: Client<HttpConnector, Full<Bytes>>,
    /// This client keeps one connection open, so a sample that comes over a new connection may come
    /// from a new engine process.
    sample_client: Client<HttpConnector, Full<Bytes>>,
    call_time_max: Duration,
}

impl EngineClient {
    /// `base_uri` is `http://host:port`. `call_time_max` is for calls other than turns.
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
        // As many connections as turns have run at once: the agent bounds that.
        let idle_limits = IdleLimits { time_max: POOL_IDLE_MAX, per_host_max: usize::MAX };
        let turn_client = HttpClient::new(connector.clone(), idle_limits);
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

    /// Without an admin key, the admin routes get the API key. An engine that has an admin key
    /// doesn't take the API key there.
    #[must_use]
    pub fn with_admin_key(mut self, admin_key: Option<HeaderValue>) -> Self {
        self.admin_key = admin_key.or(self.admin_key);
        self
    }

    #[must_use]
    pub fn host(&self) -> &str {
        self.base_uri.host().unwrap_or("127.0.0.1")
    }

    #[must_use]
    pub fn admin_key(&self) -> Option<&HeaderValue> {
        self.admin_key.as_ref()
    }

    /// The value of `Authorization`.
    #[must_use]
    pub fn api_key(&self) -> Option<&HeaderValue> {
        self.api_key.as_ref()
    }

    /// The caller has set the credential.
    pub fn send(&self, mut request: Request<Body>) -> TurnAnswer {
        *request.uri_mut() = self.uri(request.uri().path_and_query());
        self.turn_client.request(request)
    }

    /// Also returns the tokenizer's source if the engine states one, and where it publishes KV
    /// events.
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

    /// The role is `null`, `prefill` or `decode`.
    pub async fn read_role(&self) -> Result<String, Error> {
        let path = "/server_info";
        let body = self.call(Method::GET, path, None).await?;
        let value: Value = serde_json::from_slice(&body)
            .map_err(|error| Error::Answer { path, detail: error.to_string() })?;
        Ok(read_role(&value).to_owned())
    }

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

    /// `now` is called when the answer has arrived.
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

    /// SGLang calls this a streaming session. Usually the agent closes its sessions before
    /// `idle_max`, so that limit matters only if no agent is left.
    pub async fn open_session(&self, incarnation: &str, idle_max: Duration) -> Result<(), Error> {
        let body = serde_json::json!({
            "capacity_of_str_len": 1,
            "session_id": incarnation,
            "streaming": true,
            "timeout": idle_max.as_secs(),
        });
        self.call(Method::POST, "/open_session", Some(&body)).await.map(drop)
    }

    /// Returns whether the session is gone. The engine defers a close while a turn runs, so `rid`
    /// is aborted first. It answers 200 to every close, even a deferred one. So this method then
    /// opens a session with the same id, which the engine refuses while the old session exists.
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

    pub async fn abort_and_close(&self, incarnation: &str, rid: Option<&str>) -> Result<(), Error> {
        if let Some(rid) = rid {
            self.abort_turn(rid).await?;
        }
        self.close_session(incarnation).await
    }

    /// The engine answers 200 even if it has no such session.
    pub async fn close_session(&self, incarnation: &str) -> Result<(), Error> {
        let body = serde_json::json!({ "session_id": incarnation });
        self.call(Method::POST, "/close_session", Some(&body)).await.map(drop)
    }

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

    /// `path` is for error messages. Also returns the connection's local address.
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
