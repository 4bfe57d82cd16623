//! Lets clients read why a request was refused whose bytes nobody reads.
//!
//! Hyper closes a connection after an answer that didn't wait for the request's body, and doesn't
//! say so in the answer. So [`Watched`] drops a small body that has arrived by then, and after any
//! other the answer says that the connection ends. Nothing is waited for.
//!
//! A request that hyper can't parse has hyper's own answer: a status without a body.
//!
//! Closing a connection that has unread bytes resets it, and the client could lose the answer: many
//! send a whole body before they read. So [`DrainedIo`] ends its own side, and then drops what
//! still comes, up to a limit of time and of bytes. The connection is idle meanwhile, and gives way
//! to others.

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

use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Limited};
use hyper::{Request, Response, body::Incoming, service::Service};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep},
};
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

    /// Has bytes that nobody reads dropped for a short time only, and none after whole requests,
    /// because the connection must end.
    pub(super) fn stop(&self) {
        self.0.is_stopping.store(true, Ordering::Relaxed);
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

pub(super) struct DrainedIo<I> {
    io: I,
    is_client_gone: fn(&I) -> bool,
    requests: Requests,
    is_read_before: bool,
    drain: Option<Drain>,
}

/// How much longer bytes are read that nobody wants.
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

impl<I> DrainedIo<I> {
    pub(super) fn new(io: I, is_client_gone: fn(&I) -> bool, requests: Requests) -> Self {
        Self { io, is_client_gone, requests, is_read_before: false, drain: None }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for DrainedIo<I> {
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
                // Hyper would close the connection without an answer.
                read[0] = 0;
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncRead + AsyncWrite + Unpin> AsyncWrite for DrainedIo<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
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
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = &mut *self;
        if this.drain.is_none() {
            ready!(Pin::new(&mut this.io).poll_shutdown(context))?;
            // After an answer of its own, to what it can't parse, hyper says nothing: so whatever a
            // client still sends is dropped, until it has ended its side.
            let is_stopping = this.requests.0.is_stopping.load(Ordering::Relaxed);
            if is_stopping && !this.requests.is_body_unread() {
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
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::HTTP2_BEGIN;
    use crate::{
        refusal::{Code, Refusal},
        server::{ConnectionSettings, Metrics, PortLimits, port_limits::HEADER_BYTES_MAX, serve},
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
        let metrics = Metrics::default();
        let limits = PortLimits::data(&ConnectionSettings::default(), 1, 1000, &metrics);
        tasks.spawn(serve(listener, app, limits, None, tasks.clone()));
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(request).await.unwrap();
        let mut answers = Vec::new();
        client.read_to_end(&mut answers).await.unwrap();
        String::from_utf8(answers).unwrap()
    }

    #[tokio::test]
    async fn a_request_that_is_not_http_is_answered() {
        for request in [
            "GET / HTTP/1.1\r\nbad header\r\n\r\n",
            "G\u{1}T / HTTP/1.1\r\n\r\n",
            "GET / HTTX\r\n\r\n",
        ] {
            let answer = exchange(request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
        }
    }

    #[tokio::test]
    async fn a_client_that_begins_with_http_2_has_an_answer() {
        let settings = b"\0\0\0\x04\0\0\0\0\0";
        let answer = exchange(&[HTTP2_BEGIN, b"\r\nSM\r\n\r\n", settings].concat()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    }

    #[tokio::test]
    async fn the_client_can_read_that_its_headers_are_too_large() {
        // Much more than the server reads, so that closing at once would reset the connection.
        let header = "x".repeat(20 * HEADER_BYTES_MAX);
        let request = format!("GET / HTTP/1.1\r\nx-long: {header}\r\n\r\n");
        assert!(exchange(request.as_bytes()).await.starts_with("HTTP/1.1 431 "));
        let request = format!("GET /{} HTTP/1.1\r\n\r\n", "p".repeat(70_000));
        assert!(exchange(request.as_bytes()).await.starts_with("HTTP/1.1 431 "));
        let many: String = (0..150).map(|number| format!("x-{number}: 1\r\n")).collect();
        let request = format!("GET / HTTP/1.1\r\n{many}\r\n");
        assert!(exchange(request.as_bytes()).await.starts_with("HTTP/1.1 431 "));
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
    async fn an_unreadable_request_after_another_is_answered() {
        let answers = exchange(b"POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\nxbad\r\n\r\n").await;
        let (first, second) = answers.split_once("\r\n\r\nx").unwrap();
        assert!(first.starts_with("HTTP/1.1 200 "), "{answers}");
        assert!(second.starts_with("HTTP/1.1 400 "), "{answers}");
        // Hyper has the begin of it in memory with the request before.
        let rest = format!("{{\"{}", "x".repeat(700_000));
        let request = format!("POST / HTTP/1.1\r\ncontent-length: 1\r\n\r\nx{rest}");
        let answers = exchange(request.as_bytes()).await;
        assert!(answers.ends_with("\r\n\r\n") && answers.contains(" 400 "), "{answers}");
    }
}
