//! Sends HTTP/1 requests on kept connections, which the requests' own tasks drive.
//!
//! Hyper-util's client has a task for each connection, which must wake the request's task for each
//! part of an answer: a quarter of what a stream costs a proxy. Here a request owns its connection,
//! and polls it itself. Nobody polls an idle connection. So that its peer has closed it shows when
//! it is needed again, and the socket stays until then or until another one becomes idle.

use std::{
    collections::HashMap,
    future::poll_fn,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{
    HeaderValue, Request, Response, Uri,
    header::HOST,
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body::{Body, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::{TrySendError, http1},
    rt::{Read, Write},
};
use parking_lot::Mutex;
use tokio::task::unconstrained;
use tower_service::Service;

use crate::{clock::now, tls::client::BoxError};

/// How often connections that have been idle for too long are closed, while answers end.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(1);
/// How often a connection is looked at whose answer nobody reads to its end. A refusal comes in one
/// part.
const LAST_LOOKS: usize = 2;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("can't connect")]
    Connect(#[source] BoxError),
    #[error("the connection broke")]
    Broken(#[source] hyper::Error),
}

impl Error {
    /// The request was not sent.
    #[must_use]
    pub fn is_connect(&self) -> bool {
        matches!(self, Self::Connect(_))
    }
}

/// Of the connections that a client keeps for later requests.
#[derive(Debug, Clone, Copy)]
pub struct IdleLimits {
    /// Shorter than the time after which the peer closes them.
    pub time_max: Duration,
    pub per_host_max: usize,
}

/// It repeats only what was certainly not sent.
#[derive(Debug)]
pub struct HttpClient<C, B>(Arc<Inner<C, B>>);

#[derive(Debug)]
struct Inner<C, B> {
    connector: C,
    pool: Arc<Pool<B>>,
}

/// Clones share their connections.
impl<C, B> Clone for HttpClient<C, B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The head of an answer to come. Dropping it closes the connection, as does dropping the answer
/// before its end.
pub type Answering<B> =
    Pin<Box<dyn Future<Output = Result<Response<AnswerBody<B>>, Error>> + Send>>;

type Host = (Scheme, Authority);

/// Polled until it ends, it moves bytes between its socket and what its `SendRequest` returned.
type Driver = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

struct Connection<B> {
    sender: http1::SendRequest<B>,
    /// `None` once it has ended.
    driver: Option<Driver>,
    task: Arc<TaskWaker>,
}

impl<B> Connection<B> {
    /// Whether it can take a request. Who takes it drives it again.
    fn is_free(&mut self) -> bool {
        let Some(driver) = &mut self.driver else { return false };
        // Otherwise a task that has done much would seem to have a connection that isn't free.
        let driving = pin!(unconstrained(driver.as_mut()));
        let driven = driving.poll(&mut Context::from_waker(Waker::noop()));
        if driven.is_ready() {
            self.driver = None;
        }
        driven.is_pending() && self.sender.is_ready()
    }
}

fn drive(driver: &mut Option<Driver>, task: &Arc<TaskWaker>, context: &mut Context<'_>) {
    let Some(running) = driver else { return };
    task.set(context.waker());
    let waker = Waker::from(Arc::clone(task));
    if running.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
        // Only its drop tells who waits that nothing more comes.
        *driver = None;
    }
}

/// Wakes the task of the request that uses a connection.
///
/// To take a frame of an answer wakes the driver, which could go on now. But who takes frames polls
/// again anyway, and would be woken in vain for each. So the waker sleeps meanwhile.
#[derive(Debug)]
struct TaskWaker {
    state: AtomicU8,
    task: Mutex<Waker>,
}

const AWAKE: u8 = 0;
const ASLEEP: u8 = 1;
/// It sleeps, and was called.
const MISSED: u8 = 2;

impl TaskWaker {
    fn new() -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(AWAKE), task: Mutex::new(Waker::noop().clone()) })
    }

    fn set(&self, waker: &Waker) {
        self.task.lock().clone_from(waker);
    }

    /// Polls `poll` while this sleeps. If that is pending, a call meanwhile wakes the task.
    fn asleep<T>(&self, poll: impl FnOnce() -> Poll<T>) -> Poll<T> {
        self.state.store(ASLEEP, Ordering::SeqCst);
        let polled = poll();
        let was_called = self.state.swap(AWAKE, Ordering::SeqCst) == MISSED;
        if was_called && polled.is_pending() {
            self.task.lock().wake_by_ref();
        }
        polled
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let missed =
            self.state.compare_exchange(ASLEEP, MISSED, Ordering::SeqCst, Ordering::SeqCst);
        if missed == Err(AWAKE) {
            self.task.lock().wake_by_ref();
        }
    }
}

/// The connections that no request uses.
struct Pool<B> {
    limits: IdleLimits,
    idle: Mutex<Idle<B>>,
}

struct Idle<B> {
    /// With the time since when each is idle, the newest last. No host has none.
    by_host: HashMap<Host, Vec<(Connection<B>, Instant)>>,
    next_cleanup: Instant,
}

impl<B> std::fmt::Debug for Pool<B> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Pool").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl<B> Pool<B> {
    fn new(limits: IdleLimits) -> Self {
        let idle = Idle { by_host: HashMap::new(), next_cleanup: now() + CLEANUP_INTERVAL };
        Self { limits, idle: Mutex::new(idle) }
    }

    fn take(&self, host: &Host) -> Option<Connection<B>> {
        loop {
            let (mut connection, since) = self.pop(host)?;
            let is_fresh = || now() < since + self.limits.time_max;
            // The clock last, too: a peer may close the connection while this looks at it.
            if is_fresh() && connection.is_free() && is_fresh() {
                return Some(connection);
            }
        }
    }

    fn pop(&self, host: &Host) -> Option<(Connection<B>, Instant)> {
        let mut idle = self.idle.lock();
        let connections = idle.by_host.get_mut(host)?;
        let newest = connections.pop();
        if connections.is_empty() {
            idle.by_host.remove(host);
        }
        newest
    }

    /// Closes a connection that can't be used again, or is one too many.
    fn put(&self, host: Host, mut connection: Connection<B>) {
        if self.limits.per_host_max == 0 || !connection.is_free() {
            return;
        }
        let now = now();
        let mut idle = self.idle.lock();
        let expired = if now >= idle.next_cleanup {
            idle.next_cleanup = now + CLEANUP_INTERVAL;
            idle.remove_expired(now, self.limits.time_max)
        } else {
            vec![]
        };
        let connections = idle.by_host.entry(host).or_default();
        if connections.len() < self.limits.per_host_max {
            connections.push((connection, now));
        }
        // Connections close without the lock.
        drop(idle);
        drop(expired);
    }
}

impl<B> Idle<B> {
    fn remove_expired(&mut self, now: Instant, time_max: Duration) -> Vec<Connection<B>> {
        let mut expired = vec![];
        self.by_host.retain(|_, connections| {
            let fresh_from = connections.partition_point(|(_, since)| *since + time_max <= now);
            expired.extend(connections.drain(..fresh_from).map(|(connection, _)| connection));
            !connections.is_empty()
        });
        expired
    }
}

impl<C, B> HttpClient<C, B>
where
    C: Service<Uri, Future: Send> + Clone + Send + Sync + 'static,
    C::Response: Read + Write + Unpin + Send + 'static,
    C::Error: Into<BoxError>,
    B: Body<Data: Send, Error: Into<BoxError>> + Unpin + Send + 'static,
{
    #[must_use]
    pub fn new(connector: C, limits: IdleLimits) -> Self {
        Self(Arc::new(Inner { connector, pool: Arc::new(Pool::new(limits)) }))
    }

    /// The request's URI names the host.
    pub fn request(&self, request: Request<B>) -> Answering<B> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { inner.request(request).await })
    }
}

impl<C, B> Inner<C, B>
where
    C: Service<Uri> + Clone,
    C::Response: Read + Write + Unpin + Send + 'static,
    C::Error: Into<BoxError>,
    B: Body<Data: Send, Error: Into<BoxError>> + Unpin + Send + 'static,
{
    async fn request(&self, mut request: Request<B>) -> Result<Response<AnswerBody<B>>, Error> {
        let uri = request.uri().clone();
        let host = prepare(&mut request)?;
        loop {
            let kept = self.pool.take(&host);
            let is_kept = kept.is_some();
            let mut connection = match kept {
                Some(connection) => connection,
                None => self.connect(uri.clone()).await?,
            };
            match exchange_heads(&mut connection, request).await {
                Ok(response) => {
                    let pool = Arc::clone(&self.pool);
                    let new_body = |body| AnswerBody::new(body, (host, connection), pool);
                    return Ok(response.map(new_body));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_kept => request = unsent,
                    _ => return Err(Error::Broken(error.into_error())),
                },
            }
        }
    }

    async fn connect(&self, uri: Uri) -> Result<Connection<B>, Error> {
        let mut connector = self.connector.clone();
        let ready = poll_fn(|context| connector.poll_ready(context)).await;
        ready.map_err(|error| Error::Connect(error.into()))?;
        let stream = connector.call(uri).await.map_err(|error| Error::Connect(error.into()))?;
        let (sender, driver) = http1::handshake(stream).await.map_err(Error::Broken)?;
        Ok(Connection { sender, driver: Some(Box::pin(driver)), task: TaskWaker::new() })
    }
}

/// Leaves in the URI what a server gets of it, and adds the host's name.
fn prepare<B>(request: &mut Request<B>) -> Result<Host, Error> {
    let mut parts = std::mem::take(request.uri_mut()).into_parts();
    let host = parts.scheme.take().zip(parts.authority.take());
    let host = host.ok_or_else(|| Error::Connect("the URI names no host".into()))?;
    let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    *request.uri_mut() = Uri::from(path);
    if !request.headers().contains_key(HOST) {
        let name = host.1.as_str();
        let name = name.rsplit_once('@').map_or(name, |(_user, name)| name);
        let value = HeaderValue::from_str(name).expect("an authority is legal in a header");
        request.headers_mut().insert(HOST, value);
    }
    Ok(host)
}

async fn exchange_heads<B>(
    connection: &mut Connection<B>,
    request: Request<B>,
) -> Result<Response<Incoming>, TrySendError<Request<B>>>
where
    B: Body + 'static,
{
    // Without a budget: nothing would wake the task if the answer seemed to wait for one.
    let mut answer = pin!(unconstrained(connection.sender.try_send_request(request)));
    poll_fn(|context| {
        // Only the driver makes it ready, and at the latest by its end.
        let mut no_waker = Context::from_waker(Waker::noop());
        if let Poll::Ready(answered) = answer.as_mut().poll(&mut no_waker) {
            return Poll::Ready(answered);
        }
        drive(&mut connection.driver, &connection.task, context);
        answer.as_mut().poll(&mut no_waker)
    })
    .await
}

/// The rest of an answer. At its end, its connection is free for other requests.
pub struct AnswerBody<B> {
    body: Incoming,
    /// `None` once the body has ended.
    connection: Option<(Host, Connection<B>)>,
    pool: Arc<Pool<B>>,
}

impl<B> std::fmt::Debug for AnswerBody<B> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AnswerBody").field("body", &self.body).finish_non_exhaustive()
    }
}

impl<B> AnswerBody<B> {
    fn new(body: Incoming, connection: (Host, Connection<B>), pool: Arc<Pool<B>>) -> Self {
        let mut answer = Self { body, connection: Some(connection), pool };
        if answer.body.is_end_stream() {
            answer.free_connection();
        }
        answer
    }

    fn free_connection(&mut self) {
        if let Some((host, connection)) = self.connection.take() {
            self.pool.put(host, connection);
        }
    }

    /// Only the driver makes the body ready, and at the latest by its end.
    fn poll_body(&mut self) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let body = Pin::new(&mut self.body);
        let poll = || body.poll_frame(&mut Context::from_waker(Waker::noop()));
        let polled = match &self.connection {
            Some((_, connection)) => connection.task.asleep(poll),
            None => poll(),
        };
        if let Poll::Ready(frame) = &polled {
            // Trailers come last, too.
            let is_data = matches!(frame, Some(Ok(frame)) if frame.is_data());
            if !is_data || self.body.is_end_stream() {
                self.free_connection();
            }
        }
        polled
    }
}

impl<B> Drop for AnswerBody<B> {
    /// What is left may have arrived. Then the connection can be used again.
    fn drop(&mut self) {
        for _ in 0..LAST_LOOKS {
            while let Poll::Ready(Some(Ok(_))) = self.poll_body() {}
            let Some((_, connection)) = &mut self.connection else { return };
            connection.is_free();
        }
    }
}

impl<B: Unpin> Body for AnswerBody<B> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Poll::Ready(frame) = self.poll_body() {
            return Poll::Ready(frame);
        }
        let Some((_, connection)) = &mut self.connection else { return Poll::Ready(None) };
        drive(&mut connection.driver, &connection.task, context);
        self.poll_body()
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, Full};
    use hyper_util::client::legacy::connect::HttpConnector;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpStream},
    };

    use super::*;

    const SHORT: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    const CHUNKS: &[u8] =
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n2\r\nok\r\n0\r\n\r\n";

    type Client = HttpClient<HttpConnector, Full<Bytes>>;

    fn client(per_host_max: usize) -> Client {
        let limits = IdleLimits { time_max: Duration::from_secs(60), per_host_max };
        HttpClient::new(HttpConnector::new(), limits)
    }

    /// A server whose connections the test plays.
    async fn server() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/path?query", listener.local_addr().unwrap());
        (listener, url)
    }

    fn post(url: &str) -> Request<Full<Bytes>> {
        Request::post(url).body(Full::from("body")).unwrap()
    }

    /// Reads a request up to its body, and answers it.
    async fn answer(stream: &mut TcpStream, answer: &[u8]) -> String {
        let (mut text, mut bytes) = (String::new(), [0; 1024]);
        while !text.ends_with("body") {
            let read = stream.read(&mut bytes).await.unwrap();
            assert!(read > 0, "the connection ended after {text:?}");
            text += str::from_utf8(&bytes[..read]).unwrap();
        }
        stream.write_all(answer).await.unwrap();
        text
    }

    async fn accept_and_answer(listener: &TcpListener, text: &[u8]) -> TcpStream {
        let (mut stream, _) = listener.accept().await.unwrap();
        answer(&mut stream, text).await;
        stream
    }

    async fn read(client: &Client, url: &str) -> Result<Bytes, Error> {
        let body = client.request(post(url)).await?.into_body();
        Ok(body.collect().await.map_err(Error::Broken)?.to_bytes())
    }

    async fn is_closed(stream: &mut TcpStream) -> bool {
        !matches!(stream.read(&mut [0; 16]).await, Ok(read) if read > 0)
    }

    #[tokio::test]
    async fn requests_one_after_another_use_one_connection() {
        let ((listener, url), client) = (server().await, client(8));
        let requests = async {
            for expected in ["ok", "okok", "ok"] {
                assert_eq!(read(&client, &url).await.unwrap(), expected);
            }
        };
        let serving = async {
            let (mut stream, addr) = (listener.accept().await.unwrap().0, listener.local_addr());
            for text in [SHORT, CHUNKS, SHORT] {
                let request = answer(&mut stream, text).await;
                assert!(request.starts_with("POST /path?query HTTP/1.1\r\n"), "{request}");
                assert!(request.contains(&format!("host: {}\r\n", addr.as_ref().unwrap())));
            }
        };
        tokio::join!(requests, serving);
    }

    #[tokio::test]
    async fn a_kept_connection_that_its_peer_has_closed_is_not_used() {
        let ((listener, url), client) = (server().await, client(8));
        for _ in 0..3 {
            let (body, stream) = tokio::join!(
                async { read(&client, &url).await.unwrap() },
                accept_and_answer(&listener, SHORT)
            );
            assert_eq!(body, "ok");
            drop(stream);
            // The runtime hears of the close.
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_that_may_have_been_read_is_not_sent_again() {
        let ((listener, url), client) = (server().await, client(8));
        let (body, mut stream) = tokio::join!(
            async { read(&client, &url).await.unwrap() },
            accept_and_answer(&listener, SHORT)
        );
        assert_eq!(body, "ok");
        let breaks = async {
            answer(&mut stream, b"").await;
            drop(stream);
        };
        let (broken, ()) = tokio::join!(read(&client, &url), breaks);
        assert!(matches!(broken, Err(Error::Broken(_))), "{broken:?}");
        let accepted = tokio::time::timeout(Duration::ZERO, listener.accept()).await;
        assert!(accepted.is_err(), "it was sent again");
    }

    #[tokio::test]
    async fn an_answer_that_is_dropped_before_its_end_closes_its_connection() {
        let ((listener, url), client) = (server().await, client(8));
        let begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n";
        let (mut response, mut stream) = tokio::join!(
            async { client.request(post(&url)).await.unwrap() },
            accept_and_answer(&listener, begun)
        );
        let frame = response.body_mut().frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "ok");
        drop(response);
        assert!(is_closed(&mut stream).await);
        let waiting = client.request(post(&url));
        let begins = async { answer(&mut listener.accept().await.unwrap().0, b"").await };
        tokio::select! {
            answered = waiting => panic!("{answered:?}"),
            _ = begins => {}
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_dropped_after_it_arrived_leaves_its_connection() {
        let ((listener, url), client) = (server().await, client(8));
        let requests = async {
            for _ in 0..3 {
                drop(client.request(post(&url)).await.unwrap());
            }
        };
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            for _ in 0..3 {
                answer(&mut stream, SHORT).await;
            }
        };
        tokio::join!(requests, serving);
    }

    #[test]
    fn a_waker_that_sleeps_forgets_a_call_only_if_something_was_ready() {
        struct Task(AtomicU8);
        impl Wake for Task {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let (task, waker) = (Arc::new(Task(AtomicU8::new(0))), TaskWaker::new());
        waker.set(&Waker::from(Arc::clone(&task)));
        let calls = || task.0.load(Ordering::SeqCst);
        let call = || Waker::from(Arc::clone(&waker)).wake();
        call();
        assert_eq!(calls(), 1);
        let poll = |poll: Poll<()>| {
            let calling = || {
                call();
                poll
            };
            assert_eq!(waker.asleep(calling), poll);
        };
        poll(Poll::Ready(()));
        assert_eq!(calls(), 1);
        poll(Poll::Pending);
        assert_eq!(calls(), 2);
        call();
        assert_eq!(calls(), 3);
    }

    #[tokio::test]
    async fn an_answer_that_breaks_off_is_an_error() {
        let ((listener, url), client) = (server().await, client(8));
        for cut in [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok".as_slice(), &CHUNKS[..60]] {
            let breaks = async { drop(accept_and_answer(&listener, cut).await) };
            let (broken, ()) = tokio::join!(read(&client, &url), breaks);
            assert!(matches!(broken, Err(Error::Broken(_))), "{broken:?}");
        }
    }

    #[tokio::test]
    async fn no_more_connections_are_kept_than_may_be_and_none_for_too_long() {
        let ((listener, url), client) = (server().await, client(1));
        let (one, other, mut streams) = tokio::join!(
            async { client.request(post(&url)).await.unwrap() },
            async { client.request(post(&url)).await.unwrap() },
            async {
                let first = accept_and_answer(&listener, SHORT).await;
                [first, accept_and_answer(&listener, SHORT).await]
            }
        );
        let (_, _) = tokio::join!(one.into_body().collect(), other.into_body().collect());
        let [first, second] = &mut streams;
        tokio::select! {
            _ = is_closed(first) => {}
            _ = is_closed(second) => {}
        }
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(61)).await;
        let (body, stream) = tokio::join!(
            async { read(&client, &url).await.unwrap() },
            accept_and_answer(&listener, SHORT)
        );
        assert_eq!(body, "ok");
        assert!(is_closed(first).await && is_closed(second).await);
        drop(stream);
    }

    #[tokio::test]
    async fn nothing_is_sent_where_nobody_listens() {
        let (listener, url) = server().await;
        drop(listener);
        let refused = client(8).request(post(&url)).await.unwrap_err();
        assert!(refused.is_connect(), "{refused:?}");
        let kind = crate::descriptors::system_error(&refused).map(std::io::Error::kind);
        assert_eq!(kind, Some(std::io::ErrorKind::ConnectionRefused));
    }
}
