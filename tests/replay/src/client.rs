//! The HTTP client of a replay: sends turns and session calls through one connection pool.
//!
//! The client does not pace, retry or count. Dropping a call closes its connection, as a client
//! that disconnects does.

use crate::answer::{AnswerFailure, AnswerStep, FinishedAnswer, ReplayAnswer};
use crate::options::{Api, ReplayOptions, seconds};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as ConnectionPool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use service::reload;
use service::tasks::Tasks;
use service::tls::Protocol;
use service::tls::client::{ClientFiles, Connector};
use std::fmt;
use std::time::Duration;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::io::StreamReader;

/// The longest idle time of a pooled connection. Python engines close connections after 5 s of
/// idleness; the client closes them first, so that no turn meets a closing connection.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// The longest time to connect.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// The longest time of a session call. A working server answers at once, and closing sessions must
/// not prolong the end of a replay by much.
const SESSION_CALL_MAX: Duration = Duration::from_secs(15);
/// The longest event: SGLang repeats all output ids in each; 16 MiB are about two million ids.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// The longest answer that isn't streamed: 64 MiB are more text than any context holds.
const BODY_BYTES_MAX: usize = 64 << 20;

/// A client of one server.
#[derive(Debug)]
pub struct Client {
    pool: ConnectionPool<Connector, Full<Bytes>>,
    base: String,
    api: Api,
    stream: bool,
    timeout: Duration,
    authorization: Option<HeaderValue>,
}

/// The session fields of a turn's headers.
#[derive(Debug, Clone, Copy)]
pub struct TurnHeaders<'a> {
    /// The session's id.
    pub id: &'a str,
    /// The id of the parent session.
    pub parent: Option<&'a str>,
    /// Whether this is the session's last turn.
    pub last: bool,
    /// Whether the body carries only tokens that the session doesn't have yet.
    pub delta: bool,
}

/// An answered turn, with times counted from the turn's first attempt.
#[derive(Debug)]
pub struct MeasuredTurn {
    /// The answer.
    pub finished: FinishedAnswer,
    /// How the turn ran in its session, as Berth's answer reports it.
    pub kind: Option<TurnKind>,
    /// The time until the first content.
    pub first_token: Option<Duration>,
    /// The times between contents.
    pub gaps: Vec<Duration>,
    /// The time until the end.
    pub total: Duration,
}

/// How a turn ran in its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TurnKind {
    /// In a session whose KV the engine holds.
    Pinned,
    /// In a new incarnation, which received the full history.
    Reopened,
    /// With KV tagged as the session's.
    Tagged,
    /// Without a session.
    None,
}

impl fmt::Display for TurnKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned",
            Self::Reopened => "reopened",
            Self::Tagged => "tagged",
            Self::None => "none",
        })
    }
}

impl TurnKind {
    fn from_headers(headers: &HeaderMap) -> Option<Self> {
        match headers.get("x-berth-session-turn")?.as_bytes() {
            b"pinned" => Some(Self::Pinned),
            b"reopened" => Some(Self::Reopened),
            b"tagged" => Some(Self::Tagged),
            b"none" => Some(Self::None),
            _ => None,
        }
    }
}

/// Why a call failed. `Display` prints the name under which the failure is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallFailure {
    /// A status other than 2xx.
    Status {
        /// The status.
        status: u16,
        /// The value of `Retry-After`.
        retry_after: Option<String>,
    },
    /// The connection could not be opened.
    Connect,
    /// The connection broke before a status.
    Transport,
    /// The call did not end within its time limit.
    Timeout,
    /// The answer failed.
    Answer(AnswerFailure),
}

impl fmt::Display for CallFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Status { status, .. } => return write!(f, "status_{status}"),
            Self::Connect => "connect",
            Self::Transport => "transport",
            Self::Timeout => "timeout",
            Self::Answer(AnswerFailure::Truncated) => "truncated",
            Self::Answer(AnswerFailure::Aborted) => "aborted",
            Self::Answer(AnswerFailure::ErrorEvent) => "error_event",
            Self::Answer(AnswerFailure::Unreadable) => "unreadable",
        };
        f.write_str(kind)
    }
}

impl Client {
    /// Creates a client of the server in `options`, which must be free of problems.
    ///
    /// # Panics
    /// Panics if the CA's file can't be used.
    pub fn new(options: &ReplayOptions) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_MAX));
        let tls = options.ca.clone().map(|ca| {
            let files = ClientFiles { ca, identity: None, server_name: None };
            files.start(&reload::Metrics::default(), &Tasks::default()).expect("a usable --ca")
        });
        let connector = Connector::new(connector, tls, Protocol::Http1, CONNECT_MAX);
        let pool = ConnectionPool::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_MAX)
            .pool_timer(TokioTimer::new())
            .build(connector);
        let authorization = options.bearer.as_ref().map(|token| {
            let value = HeaderValue::from_str(&format!("Bearer {token}"));
            let mut value = value.expect("checked with the options");
            value.set_sensitive(true);
            value
        });
        Self {
            pool,
            base: options.url.trim_end_matches('/').to_owned(),
            api: options.api,
            stream: options.stream,
            timeout: seconds(options.timeout_s),
            authorization,
        }
    }

    /// Sends a turn and reads its answer to the end; `since` is the time of the turn's first
    /// attempt.
    pub async fn send_turn(
        &self,
        body: Bytes,
        session: Option<TurnHeaders<'_>>,
        since: Instant,
    ) -> Result<MeasuredTurn, CallFailure> {
        let path = match self.api {
            Api::Generate => "/generate",
            Api::Chat => "/v1/chat/completions",
        };
        let mut request = self.request(Method::POST, path, body);
        if let Some(session) = session {
            add_headers(request.headers_mut(), session);
        }
        let answered = async {
            let response = self.send(request).await?;
            let kind = TurnKind::from_headers(response.headers());
            let read = if self.stream {
                self.read_stream(response.into_body(), since).await
            } else {
                self.read_whole(response.into_body(), since).await
            };
            let measured = read.map_err(CallFailure::Answer)?;
            Ok(MeasuredTurn { kind, ..measured })
        };
        tokio::time::timeout(self.timeout, answered).await.unwrap_or(Err(CallFailure::Timeout))
    }

    /// Opens a session.
    pub async fn open_session(&self, id: &str, retention: &str) -> Result<(), CallFailure> {
        let body = serde_json::json!({ "session_id": id, "retention": retention }).to_string();
        self.call(self.request(Method::POST, "/v1/sessions", body.into())).await
    }

    /// Closes a session.
    pub async fn close_session(&self, id: &str) -> Result<(), CallFailure> {
        let path = format!("/v1/sessions/{}", percent_encode(id));
        self.call(self.request(Method::DELETE, &path, Bytes::new())).await
    }

    async fn call(&self, request: Request<Full<Bytes>>) -> Result<(), CallFailure> {
        let answered = async {
            let body = self.send(request).await?.into_body();
            // Reads the body to its end, so that the connection can be reused.
            let read = Limited::new(body, BODY_BYTES_MAX).collect().await;
            read.map(|_| ()).map_err(|_| CallFailure::Answer(AnswerFailure::Truncated))
        };
        let limit = self.timeout.min(SESSION_CALL_MAX);
        tokio::time::timeout(limit, answered).await.unwrap_or(Err(CallFailure::Timeout))
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        let uri = format!("{}{path}", self.base).parse();
        *request.uri_mut() = uri.expect("the base is checked and the path is escaped");
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(header::CONTENT_TYPE, json);
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
        }
        request
    }

    /// Sends a request; any status but 2xx is a failure.
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, CallFailure> {
        let response = self.pool.request(request).await.map_err(|error| {
            if error.is_connect() { CallFailure::Connect } else { CallFailure::Transport }
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let retry_after = response.headers().get(header::RETRY_AFTER);
        let retry_after = retry_after.and_then(|value| value.to_str().ok()).map(str::to_owned);
        Err(CallFailure::Status { status: response.status().as_u16(), retry_after })
    }

    /// Reads server-sent events, each with its data on one line, as engines send them.
    async fn read_stream(
        &self,
        body: Incoming,
        since: Instant,
    ) -> Result<MeasuredTurn, AnswerFailure> {
        let chunks = body.into_data_stream().map(|chunk| chunk.map_err(std::io::Error::other));
        let codec = LinesCodec::new_with_max_length(EVENT_BYTES_MAX);
        let mut lines = FramedRead::new(StreamReader::new(chunks), codec);
        let mut answer = ReplayAnswer::new(self.api);
        let mut first_token = None;
        let mut gaps = Vec::new();
        let mut last = since;
        while let Some(line) = lines.next().await {
            let line = line.map_err(|error| match error {
                LinesCodecError::MaxLineLengthExceeded => AnswerFailure::Unreadable,
                LinesCodecError::Io(_) => AnswerFailure::Truncated,
            })?;
            let Some(data) = line.strip_prefix("data:") else { continue };
            if answer.read_event(data.trim_start().as_bytes())? != AnswerStep::Content {
                continue;
            }
            let now = Instant::now();
            if first_token.is_none() {
                first_token = Some(now - since);
            } else {
                gaps.push(now - last);
            }
            last = now;
        }
        let finished = answer.finish()?;
        Ok(MeasuredTurn { finished, kind: None, first_token, gaps, total: since.elapsed() })
    }

    async fn read_whole(
        &self,
        body: Incoming,
        since: Instant,
    ) -> Result<MeasuredTurn, AnswerFailure> {
        let read = Limited::new(body, BODY_BYTES_MAX).collect().await;
        let whole = read.map_err(|_| AnswerFailure::Truncated)?.to_bytes();
        let mut answer = ReplayAnswer::new(self.api);
        answer.read_body(&whole)?;
        let finished = answer.finish()?;
        let total = since.elapsed();
        Ok(MeasuredTurn { finished, kind: None, first_token: None, gaps: Vec::new(), total })
    }
}

fn add_headers(headers: &mut HeaderMap, session: TurnHeaders<'_>) {
    let value = |text: &str| HeaderValue::from_str(text).expect("ids are visible ASCII");
    headers.insert("x-berth-session-id", value(session.id));
    if let Some(parent) = session.parent {
        headers.insert("x-parent-session-id", value(parent));
    }
    let yes = HeaderValue::from_static("true");
    if session.last {
        headers.insert("x-berth-session-final", yes);
    }
    if session.delta {
        headers.insert("x-berth-delta", HeaderValue::from_static("1"));
    }
}

/// Percent-encodes a path segment, except its unreserved bytes.
fn percent_encode(id: &str) -> String {
    let mut path = String::with_capacity(id.len());
    for byte in id.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            path.push(char::from(byte));
        } else {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    path
}
