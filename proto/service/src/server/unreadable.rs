//! Lets clients read why a request was refused whose bytes nobody reads.
//!
//! Hyper closes a connection after an answer that didn't wait for the request's body, and doesn't
//! say so in the answer. So [`Watched`] drops a small body that has arrived by then, and after any
//! other the answer says that the connection ends. Nothing is waited for.
//!
//! Hyper answers a request that it can't parse by itself, with an empty body, and offers no hook.
//! But it does so only while no request is in the service and all answers of the service are
//! flushed: a write at such a moment is hyper's own. [`RefusalIo`] writes a [`Refusal`] with the
//! same status instead.
//!
//! Closing a connection that has unread bytes resets it, and the client could lose the answer: many
//! send a whole body before they read. So `RefusalIo` ends its own side, and then drops what still
//! comes, up to a limit of time and of bytes. The connection is idle meanwhile, and gives way to
//! others.

use std::{
    future::Future,
    io::{IoSlice, Result},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes};
use http::{HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Limited};
use hyper::{Request, Response, body::Incoming, service::Service};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};
use tracing::debug;

use crate::refusal::{Api, Code, Refusal};

/// For bytes that nobody reads after an answer: 5 MB at 1.5 Mbit/s.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(30);
/// What a client sends in one go pauses for less, even if the network loses some of it.
const DRAIN_PAUSE_MAX: Duration = Duration::from_secs(2);
/// The longest time of both once the process stops.
const DRAIN_STOPPING_MAX: Duration = Duration::from_secs(1);
const DRAIN_BYTES_MAX: usize = 64 << 20;

const HTTP2_BEGIN: &[u8] = b"PRI * HTTP/2.0\r\n";

/// Most bytes of a body that are read only to be dropped, while the connection goes on.
const DISCARDED_BYTES_MAX: usize = 64 * 1024;
/// How often the connection is looked at for such a body. What has arrived is there by then.
const DISCARD_LOOKS: usize = 4;

#[derive(Debug, Clone, Default)]
pub(super) struct Requests(Arc<RequestState>);

#[derive(Debug, Default)]
struct RequestState {
    /// Requests whose answers' bodies have not ended.
    open: AtomicUsize,
    /// Whether hyper may still have bytes of an answer. It takes a short body whole, and drops it
    /// before it writes the first byte.
    is_unflushed: AtomicBool,
    /// Of the newest request. `dropped_body` is that body, once the service has dropped it.
    is_body_unread: AtomicBool,
    dropped_body: Mutex<Option<Incoming>>,
    is_look_due: AtomicBool,
    is_stopping: AtomicBool,
}

impl Requests {
    fn begin(&self, body: &Incoming) -> OpenRequest {
        self.0.open.fetch_add(1, Ordering::Relaxed);
        self.0.is_body_unread.store(!body.is_end_stream(), Ordering::Relaxed);
        *self.0.dropped_body.lock() = None;
        self.0.is_unflushed.store(true, Ordering::Relaxed);
        OpenRequest(self.clone())
    }

    pub(super) fn is_any_open(&self) -> bool {
        self.0.open.load(Ordering::Relaxed) > 0
    }

    /// Has the next flush look whether the client has gone. Hyper notices that only while it has
    /// read nothing of a next request.
    pub(super) fn look_for_client(&self) {
        self.0.is_look_due.store(true, Ordering::Relaxed);
    }

    /// Has bytes that nobody reads dropped for a short time only, because the process stops.
    pub(super) fn stop(&self) {
        self.0.is_stopping.store(true, Ordering::Relaxed);
    }

    fn is_unflushed(&self) -> bool {
        self.0.is_unflushed.load(Ordering::Relaxed)
    }

    pub(super) fn is_body_unread(&self) -> bool {
        self.0.is_body_unread.load(Ordering::Relaxed)
    }

    /// Reads the rest of a dropped body, as far as it is small and has arrived.
    async fn discard_body(&self) {
        let Some(body) = self.0.dropped_body.lock().take() else { return };
        let body = Limited::new(body, DISCARDED_BYTES_MAX);
        let looks = async {
            for _ in 0..DISCARD_LOOKS {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            read = body.collect() => {
                self.0.is_body_unread.store(read.is_err(), Ordering::Relaxed);
            }
            () = looks => {}
        }
    }

    fn handle_flush(&self) {
        if self.0.open.load(Ordering::Relaxed) == 0 {
            self.0.is_unflushed.store(false, Ordering::Relaxed);
        }
    }
}

struct OpenRequest(Requests);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) struct RequestBody {
    /// `None` once it was read to its end.
    body: Option<Incoming>,
    /// Whether its client sends it without being asked. Reading it would be asking.
    is_sent_unasked: bool,
    requests: Requests,
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        *self.requests.0.dropped_body.lock() = self.body.take().filter(|_| self.is_sent_unasked);
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(&mut *body).poll_frame(context));
        if frame.is_none() || body.is_end_stream() {
            self.body = None;
            self.requests.0.is_body_unread.store(false, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

pub(super) struct Watched<S> {
    service: S,
    requests: Requests,
}

impl<S> Watched<S> {
    pub(super) fn new(service: S, requests: Requests) -> Self {
        Self { service, requests }
    }
}

impl<S, B> Service<Request<Incoming>> for Watched<S>
where
    S: Service<Request<RequestBody>, Response = Response<B>>,
    S::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = Response<WatchedBody<B>>;
    type Error = S::Error;
    type Future =
        Pin<Box<dyn Future<Output = std::result::Result<Self::Response, S::Error>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let open_request = self.requests.begin(request.body());
        let requests = self.requests.clone();
        let is_sent_unasked = !request.headers().contains_key(header::EXPECT);
        let body = |body| RequestBody { body: Some(body), is_sent_unasked, requests };
        let answer = self.service.call(request.map(body));
        Box::pin(async move {
            let mut answer = answer.await?;
            if open_request.0.is_body_unread() {
                open_request.0.discard_body().await;
            }
            if open_request.0.is_body_unread() {
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(header::CONNECTION, close);
            }
            Ok(answer.map(|body| WatchedBody { body, _request: open_request }))
        })
    }
}

/// The body of an answer. Its request is open until the body is dropped.
pub(super) struct WatchedBody<B> {
    body: B,
    _request: OpenRequest,
}

impl<B: Body + Unpin> Body for WatchedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pub(super) struct RefusalIo<I> {
    io: I,
    is_client_gone: fn(&I) -> bool,
    requests: Requests,
    is_read_before: bool,
    is_http2: bool,
    /// The refusal's bytes that are not written yet. `None` if there is no refusal.
    refusal: Option<Bytes>,
    drain: Option<Drain>,
}

/// How much longer the bytes after a refused request are read.
struct Drain {
    /// When the drain ends, however many bytes come.
    end: Instant,
    /// When the drain ends if no more bytes come before.
    deadline: Pin<Box<Sleep>>,
    bytes_left: usize,
    is_stopping: bool,
}

impl Drain {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            end: now + DRAIN_TIME_MAX,
            deadline: Box::pin(tokio::time::sleep_until(now + DRAIN_PAUSE_MAX)),
            bytes_left: DRAIN_BYTES_MAX,
            is_stopping: false,
        }
    }

    fn poll<I: AsyncRead + Unpin>(&mut self, io: &mut I, context: &mut Context<'_>) -> Poll<()> {
        let mut space = [0; 16 * 1024];
        let mut has_read = false;
        loop {
            let mut buffer = ReadBuf::new(&mut space);
            let is_open = match Pin::new(&mut *io).poll_read(context, &mut buffer) {
                Poll::Pending => break,
                Poll::Ready(read) => read.is_ok() && !buffer.filled().is_empty(),
            };
            has_read = true;
            self.bytes_left = self.bytes_left.saturating_sub(buffer.filled().len());
            if !is_open || self.bytes_left == 0 {
                return Poll::Ready(());
            }
        }
        if has_read {
            self.deadline.as_mut().reset(self.end.min(Instant::now() + DRAIN_PAUSE_MAX));
        }
        self.deadline.as_mut().poll(context)
    }

    fn stop(&mut self) {
        if !std::mem::replace(&mut self.is_stopping, true) {
            self.end = self.end.min(Instant::now() + DRAIN_STOPPING_MAX);
            let deadline = self.deadline.deadline().min(self.end);
            self.deadline.as_mut().reset(deadline);
        }
    }
}

impl<I> RefusalIo<I> {
    pub(super) fn new(io: I, is_client_gone: fn(&I) -> bool, requests: Requests) -> Self {
        Self {
            io,
            is_client_gone,
            requests,
            is_read_before: false,
            is_http2: false,
            refusal: None,
            drain: None,
        }
    }

    /// `None` if the bytes are the service's, or have another form than expected.
    fn replace(&mut self, answer: &[u8]) -> Option<()> {
        if self.requests.is_unflushed() {
            return None;
        }
        self.refusal = Some(refusal_for(answer, self.is_http2)?);
        Some(())
    }
}

impl<I: AsyncWrite + Unpin> RefusalIo<I> {
    fn poll_write_refusal(&mut self, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Some(refusal) = &mut self.refusal else { return Poll::Ready(Ok(())) };
        while refusal.has_remaining() {
            let written = ready!(Pin::new(&mut self.io).poll_write(context, refusal))?;
            if written == 0 {
                return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into()));
            }
            refusal.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

fn refusal_for(answer: &[u8], is_http2: bool) -> Option<Bytes> {
    let status = answer.strip_prefix(b"HTTP/1.")?.get(2..5)?;
    let (code, message) = match status {
        _ if is_http2 => (
            Code::InvalidRequest,
            "this port speaks HTTP/1.1, and the client began with HTTP/2; have it send \
             HTTP/1.1",
        ),
        b"400" => (
            Code::InvalidRequest,
            "the request's line or one of its headers is not valid HTTP/1; send it as RFC 9112 \
             says",
        ),
        // 414 is for a path that is too long, which is a part of the request's line.
        b"414" | b"431" => (
            Code::HeaderTooLarge,
            "the request's line and headers are over 32 KiB or over 100 headers; send fewer or \
             shorter ones",
        ),
        _ => return None,
    };
    debug!(code = code.as_str(), "an unreadable request was refused");
    let body = Api::OpenAi.body(&Refusal::new(code, message), "");
    let head = format!(
        "HTTP/1.1 {}\r\ncontent-type: application/json\r\n{}: {code}\r\ncontent-length: {}\r\n\
         connection: close\r\n\r\n",
        code.status(),
        proto::claim::REFUSAL,
        body.len(),
    );
    Some([head.as_bytes(), &body].concat().into())
}

impl<I: AsyncRead + Unpin> AsyncRead for RefusalIo<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(context, buffer))?;
        if !self.is_read_before {
            self.is_read_before = true;
            let read = &mut buffer.filled_mut()[before..];
            if read.starts_with(HTTP2_BEGIN) {
                self.is_http2 = true;
                // Hyper would close the connection without an answer.
                read[0] = 0;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> AsyncWrite for RefusalIo<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let this = &mut *self;
        if this.replace(bytes).is_some() {
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut this.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let this = &mut *self;
        if let Some(first) = slices.iter().find(|slice| !slice.is_empty())
            && this.replace(first).is_some()
        {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        Pin::new(&mut this.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let is_look_due = &self.requests.0.is_look_due;
        if is_look_due.load(Ordering::Relaxed) {
            is_look_due.store(false, Ordering::Relaxed);
            if (self.is_client_gone)(&self.io) {
                return Poll::Ready(Err(std::io::ErrorKind::ConnectionAborted.into()));
            }
        }
        ready!(self.poll_write_refusal(context))?;
        ready!(Pin::new(&mut self.io).poll_flush(context))?;
        self.requests.handle_flush();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        ready!(this.poll_write_refusal(context))?;
        if this.drain.is_none() {
            ready!(Pin::new(&mut this.io).poll_shutdown(context))?;
            if this.refusal.is_none() && !this.requests.is_body_unread() {
                return Poll::Ready(Ok(()));
            }
        }
        let drain = this.drain.get_or_insert_with(Drain::new);
        if this.requests.0.is_stopping.load(Ordering::Relaxed) {
            drain.stop();
        }
        drain.poll(&mut this.io, context).map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use axum::{
        Router,
        body::to_bytes,
        routing::{get, post},
    };
    use http::StatusCode;
    use prometheus_client::registry::Registry;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::HTTP2_BEGIN;
    use crate::{
        refusal::{Code, Refusal},
        server::{ConnectionSettings, HEADER_BYTES_MAX, Metrics, PortLimits, serve},
        tasks::Tasks,
    };

    /// Sends `request` to a server that echoes bodies. Returns all that the server sends.
    async fn exchange(request: &[u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let tasks = Tasks::default();
        let echo = post(|body: axum::body::Body| async move {
            let bytes = to_bytes(body, 1 << 20).await.map_err(|_| StatusCode::BAD_REQUEST)?;
            Ok::<_, StatusCode>(bytes)
        });
        let refused = get(|| async { Refusal::new(Code::Claim, "send turns to a router") });
        let app = Router::new().route("/", echo).route("/refused", refused);
        let metrics = Metrics::new(&mut Registry::default());
        let limits = PortLimits::data(&ConnectionSettings::default(), 1, 1000, &metrics);
        tasks.spawn(serve(listener, app, limits, None, tasks.clone()));
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(request).await.unwrap();
        let mut answers = Vec::new();
        client.read_to_end(&mut answers).await.unwrap();
        String::from_utf8(answers).unwrap()
    }

    fn assert_refused(answer: &str, status: &str, code: &str) {
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(head.contains(&format!("x-berth-refusal: {code}\r\n")), "{answer}");
        assert!(head.contains("content-type: application/json"), "{answer}");
        assert!(head.contains(&format!("content-length: {}", body.len())), "{answer}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], code);
        assert!(body["error"]["message"].as_str().unwrap().contains("send"), "{body}");
    }

    #[tokio::test]
    async fn a_request_that_is_not_http_is_refused_in_berths_form() {
        for request in [
            "GET / HTTP/1.1\r\nbad header\r\n\r\n",
            "G\u{1}T / HTTP/1.1\r\n\r\n",
            "GET / HTTX\r\n\r\n",
        ] {
            assert_refused(&exchange(request.as_bytes()).await, "400", "invalid_request");
        }
    }

    #[tokio::test]
    async fn a_client_that_begins_with_http_2_is_told_what_the_port_speaks() {
        let settings = b"\0\0\0\x04\0\0\0\0\0";
        let answer = exchange(&[HTTP2_BEGIN, b"\r\nSM\r\n\r\n", settings].concat()).await;
        assert_refused(&answer, "400", "invalid_request");
        assert!(answer.contains("HTTP/2"), "{answer}");
    }

    #[tokio::test]
    async fn an_answer_of_the_service_is_not_taken_for_one_of_hyper() {
        // The service answers 400, with a body that hyper takes whole before it writes.
        let answer = exchange(b"GET /refused HTTP/1.1\r\nconnection: close\r\n\r\n").await;
        assert_refused(&answer, "400", "claim");
    }

    #[tokio::test]
    async fn headers_that_are_too_large_are_refused_and_the_client_can_read_why() {
        // Much more than the server reads, so that closing at once would reset the connection.
        let header = "x".repeat(20 * HEADER_BYTES_MAX);
        let request = format!("GET / HTTP/1.1\r\nx-long: {header}\r\n\r\n");
        assert_refused(&exchange(request.as_bytes()).await, "431", "header_too_large");
        let request = format!("GET /{} HTTP/1.1\r\n\r\n", "p".repeat(70_000));
        assert_refused(&exchange(request.as_bytes()).await, "431", "header_too_large");
        let many: String = (0..150).map(|number| format!("x-{number}: 1\r\n")).collect();
        let request = format!("GET / HTTP/1.1\r\n{many}\r\n");
        assert_refused(&exchange(request.as_bytes()).await, "431", "header_too_large");
    }

    #[tokio::test]
    async fn an_answer_that_does_not_wait_for_the_body_says_that_the_connection_ends() {
        for rest in ["", &"x".repeat(700_000)] {
            let request = format!("POST /refused HTTP/1.1\r\ncontent-length: 900000\r\n\r\n{rest}");
            let answer = exchange(request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
            assert!(answer.contains("connection: close\r\n"), "{answer}");
        }
        let asks = "POST /refused HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n";
        let answer = exchange(asks.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 405 "), "the body isn't asked for: {answer}");
        let unread = "POST /refused HTTP/1.1\r\ncontent-length: 2\r\n\r\nxx";
        let whole = "GET /refused HTTP/1.1\r\nconnection: close\r\n\r\n";
        let answers = exchange(format!("{unread}{whole}").as_bytes()).await;
        assert_eq!(answers.matches("HTTP/1.1 ").count(), 2, "a small body is dropped: {answers}");
        let whole = "POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\nxGET /refused HTTP/1.1\r\nconnection: \
                     close\r\n\r\n";
        let answers = exchange(whole.as_bytes()).await;
        assert_eq!(answers.matches("HTTP/1.1 ").count(), 2, "{answers}");
        assert_eq!(answers.matches("connection: close").count(), 1, "{answers}");
    }

    #[tokio::test]
    async fn an_answer_before_an_unreadable_request_stays_whole() {
        // The answer's body is what hyper itself would write, which must not be taken for it.
        let body = "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
        let length = body.len();
        let request =
            format!("POST / HTTP/1.1\r\ncontent-length: {length}\r\n\r\n{body}bad\r\n\r\n");
        let answers = exchange(request.as_bytes()).await;
        let (first, second) = answers.split_once(body).unwrap();
        assert!(first.starts_with("HTTP/1.1 200 "), "{answers}");
        assert_refused(second, "400", "invalid_request");
    }
}
