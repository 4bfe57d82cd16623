//! The HTTP client of a replay: sends turns and session calls through one connection pool.
//!
//! The client does not pace, retry or count. Dropping a call closes its connection, as a client
//! that disconnects does.

use crate::replay::answer::{self, Answer, Finished, Step};
use crate::replay::options::{Api, Options};
use crate::replay::sse::Reader;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use std::fmt;
use std::time::Duration;
use tokio::time::Instant;

/// The longest idle time of a pooled connection. Python engines close connections after 5 s of
/// idleness; the client closes them first, so that no turn meets a closing connection.
const IDLE_MAX: Duration = Duration::from_secs(4);
/// The longest time to connect.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// The longest time of a session call. A working server answers at once, and closing sessions must
/// not prolong the end of a replay by much.
const SESSION_CALL_MAX: Duration = Duration::from_secs(15);
/// The longest answer that isn't streamed: 64 MiB are more text than any context holds.
const BODY_BYTES_MAX: usize = 64 << 20;

/// A client of one server.
#[derive(Debug)]
pub struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
    base: String,
    api: Api,
    stream: bool,
    timeout: Duration,
    authorization: Option<HeaderValue>,
}

/// The session fields of a turn's headers.
#[derive(Debug, Clone, Copy)]
pub struct Mark<'a> {
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
pub struct Measured {
    /// The answer.
    pub finished: Finished,
    /// How the turn ran in its session, as Berth's answer reports it.
    pub kind: Option<Kind>,
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
pub enum Kind {
    /// In a session whose KV the engine holds.
    Pinned,
    /// In a new incarnation, which received the full history.
    Reopened,
    /// With KV tagged as the session's.
    Tagged,
    /// Without a session.
    None,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned",
            Self::Reopened => "reopened",
            Self::Tagged => "tagged",
            Self::None => "none",
        })
    }
}

impl Kind {
    fn of(headers: &HeaderMap) -> Option<Self> {
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
pub enum Failure {
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
    Answer(answer::Failure),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Status { status, .. } => return write!(f, "status_{status}"),
            Self::Connect => "connect",
            Self::Transport => "transport",
            Self::Timeout => "timeout",
            Self::Answer(answer::Failure::Truncated) => "truncated",
            Self::Answer(answer::Failure::Aborted) => "aborted",
            Self::Answer(answer::Failure::ErrorEvent) => "error_event",
            Self::Answer(answer::Failure::Unreadable) => "unreadable",
        };
        f.write_str(kind)
    }
}

impl Client {
    /// Creates a client of the server in `options`, which must be free of problems.
    pub fn new(options: &Options) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_MAX));
        let pool = Pool::builder(TokioExecutor::new())
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
            timeout: options.timeout,
            authorization,
        }
    }

    /// Sends a turn and reads its answer to the end; `since` is the time of the turn's first
    /// attempt.
    pub async fn turn(
        &self,
        body: Bytes,
        mark: Option<Mark<'_>>,
        since: Instant,
    ) -> Result<Measured, Failure> {
        let path = match self.api {
            Api::Generate => "/generate",
            Api::Chat => "/v1/chat/completions",
        };
        let mut request = self.request(Method::POST, path, body);
        if let Some(mark) = mark {
            add_mark(request.headers_mut(), mark);
        }
        let answered = async {
            let response = self.send(request).await?;
            let kind = Kind::of(response.headers());
            let read = if self.stream {
                self.read_stream(response.into_body(), since).await
            } else {
                self.read_whole(response.into_body(), since).await
            };
            let measured = read.map_err(Failure::Answer)?;
            Ok(Measured { kind, ..measured })
        };
        tokio::time::timeout(self.timeout, answered).await.unwrap_or(Err(Failure::Timeout))
    }

    /// Opens a session.
    pub async fn open(&self, id: &str, retention: &str) -> Result<(), Failure> {
        let body = serde_json::json!({ "session_id": id, "retention": retention }).to_string();
        self.call(self.request(Method::POST, "/v1/sessions", body.into())).await
    }

    /// Closes a session.
    pub async fn close(&self, id: &str) -> Result<(), Failure> {
        let path = format!("/v1/sessions/{}", escaped(id));
        self.call(self.request(Method::DELETE, &path, Bytes::new())).await
    }

    async fn call(&self, request: Request<Full<Bytes>>) -> Result<(), Failure> {
        let answered = async {
            let body = self.send(request).await?.into_body();
            // Reads the body to its end, so that the connection can be reused.
            let read = Limited::new(body, BODY_BYTES_MAX).collect().await;
            read.map(|_| ()).map_err(|_| Failure::Answer(answer::Failure::Truncated))
        };
        let limit = self.timeout.min(SESSION_CALL_MAX);
        tokio::time::timeout(limit, answered).await.unwrap_or(Err(Failure::Timeout))
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
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Failure> {
        let response = self.pool.request(request).await.map_err(|error| {
            if error.is_connect() { Failure::Connect } else { Failure::Transport }
        })?;
        if response.status().is_success() {
            return Ok(response);
        }
        let retry_after = response.headers().get(header::RETRY_AFTER);
        let retry_after = retry_after.and_then(|value| value.to_str().ok()).map(str::to_owned);
        Err(Failure::Status { status: response.status().as_u16(), retry_after })
    }

    async fn read_stream(
        &self,
        mut body: Incoming,
        since: Instant,
    ) -> Result<Measured, answer::Failure> {
        let mut reader = Reader::default();
        let mut answer = Answer::new(self.api);
        let mut first_token = None;
        let mut gaps = Vec::new();
        let mut last = since;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| answer::Failure::Truncated)?;
            let Some(chunk) = frame.data_ref() else { continue };
            let now = Instant::now();
            reader.push(chunk).map_err(|_| answer::Failure::Unreadable)?;
            while let Some(data) = reader.next_event() {
                if answer.event(&data)? != Step::Content {
                    continue;
                }
                if first_token.is_none() {
                    first_token = Some(now - since);
                } else {
                    gaps.push(now - last);
                }
                last = now;
            }
        }
        let finished = answer.finish()?;
        Ok(Measured { finished, kind: None, first_token, gaps, total: since.elapsed() })
    }

    async fn read_whole(
        &self,
        body: Incoming,
        since: Instant,
    ) -> Result<Measured, answer::Failure> {
        let read = Limited::new(body, BODY_BYTES_MAX).collect().await;
        let whole = read.map_err(|_| answer::Failure::Truncated)?.to_bytes();
        let mut answer = Answer::new(self.api);
        answer.body(&whole)?;
        let finished = answer.finish()?;
        let total = since.elapsed();
        Ok(Measured { finished, kind: None, first_token: None, gaps: Vec::new(), total })
    }
}

fn add_mark(headers: &mut HeaderMap, mark: Mark<'_>) {
    let value = |text: &str| HeaderValue::from_str(text).expect("ids are visible ASCII");
    headers.insert("x-berth-session-id", value(mark.id));
    if let Some(parent) = mark.parent {
        headers.insert("x-parent-session-id", value(parent));
    }
    let yes = HeaderValue::from_static("true");
    if mark.last {
        headers.insert("x-berth-session-final", yes);
    }
    if mark.delta {
        headers.insert("x-berth-delta", HeaderValue::from_static("1"));
    }
}

/// Percent-encodes a path segment, except its unreserved bytes.
fn escaped(id: &str) -> String {
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
