//! Sends HTTP/1 requests on kept connections, which the requests' own tasks drive.
//!
//! Hyper's connections hold 25 KiB each for as long as an answer goes on, and wake their requests'
//! tasks through channels. Here a request owns its connection and polls it itself. Nobody polls an
//! idle connection. So that its peer has closed it shows when it is needed again, and the socket
//! stays until then or until another one becomes idle.

mod answer_reader;
mod connection;
mod heads;

use std::{
    collections::HashMap,
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{
    HeaderValue, Request, Response, Uri,
    header::HOST,
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body::{Body, Frame, SizeHint};
use hyper::rt::{Read, Write};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::task::unconstrained;
use tower_service::Service;

use self::{
    answer_reader::AnswerReader,
    connection::{Connection, Outgoing},
    heads::AnswerHead,
};
use crate::{clock::now, tls::client::BoxError};

/// How often connections that have been idle for too long are closed, while answers end.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(1);
/// How many parts are looked for of an answer that nobody reads to its end. A refusal comes in one
/// or two.
const LAST_LOOKS: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("can't connect")]
    Connect(#[source] BoxError),
    #[error("the connection broke")]
    Broken(#[source] Broken),
}

/// Why a connection broke.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("the peer closed it before the answer's end")]
    Closed,
    #[error("it failed")]
    Io(#[source] std::io::Error),
    #[error("the answer's head is not HTTP/1")]
    Head(#[source] httparse::Error),
    #[error("the answer is not HTTP/1: {0}")]
    NotHttp(&'static str),
    #[error("the request's body failed")]
    Body(#[source] BoxError),
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
pub struct HttpClient<C>(Arc<Inner<C>>);

#[derive(Debug)]
struct Inner<C> {
    connector: C,
    pool: Arc<Pool>,
}

/// Clones share their connections.
impl<C> Clone for HttpClient<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// The head of an answer to come. Dropping it closes the connection, as does dropping the answer
/// before its end.
pub type Answering<B> =
    Pin<Box<dyn Future<Output = Result<Response<AnswerBody<B>>, Error>> + Send>>;

type Host = (Scheme, Authority);

/// The connections that no request uses.
struct Pool {
    limits: IdleLimits,
    idle: Mutex<Idle>,
}

struct Idle {
    /// With the time since when each is idle, the newest last. No host has none.
    by_host: HashMap<Host, Vec<(Connection, Instant)>>,
    next_cleanup: Instant,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Pool").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Pool {
    fn new(limits: IdleLimits) -> Self {
        let idle = Idle { by_host: HashMap::new(), next_cleanup: now() + CLEANUP_INTERVAL };
        Self { limits, idle: Mutex::new(idle) }
    }

    fn take(&self, host: &Host) -> Option<Connection> {
        loop {
            let (mut connection, since) = self.pop(host)?;
            let is_fresh = || now() < since + self.limits.time_max;
            // The clock last, too: a peer may close the connection while this looks at it.
            if is_fresh() && connection.is_free() && is_fresh() {
                return Some(connection);
            }
        }
    }

    fn pop(&self, host: &Host) -> Option<(Connection, Instant)> {
        let mut idle = self.idle.lock();
        let connections = idle.by_host.get_mut(host)?;
        let newest = connections.pop();
        if connections.is_empty() {
            idle.by_host.remove(host);
        }
        newest
    }

    /// Closes a connection that can't be used again, or is one too many.
    fn put(&self, host: Host, connection: Connection) {
        // Whether its peer closes it shows when it is taken.
        if self.limits.per_host_max == 0 || !connection.input.is_empty() {
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

impl Idle {
    fn remove_expired(&mut self, now: Instant, time_max: Duration) -> Vec<Connection> {
        let mut expired = vec![];
        self.by_host.retain(|_, connections| {
            let fresh_from = connections.partition_point(|(_, since)| *since + time_max <= now);
            expired.extend(connections.drain(..fresh_from).map(|(connection, _)| connection));
            !connections.is_empty()
        });
        expired
    }
}

impl<C> HttpClient<C>
where
    C: Service<Uri, Future: Send> + Clone + Send + Sync + 'static,
    C::Response: Read + Write + Unpin + Send + 'static,
    C::Error: Into<BoxError>,
{
    #[must_use]
    pub fn new(connector: C, limits: IdleLimits) -> Self {
        Self(Arc::new(Inner { connector, pool: Arc::new(Pool::new(limits)) }))
    }

    /// The request's URI names the host, and its body knows its length.
    pub fn request<B>(&self, request: Request<B>) -> Answering<B>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin + Send + 'static,
    {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { inner.request(request).await })
    }
}

impl<C> Inner<C>
where
    C: Service<Uri> + Clone,
    C::Response: Read + Write + Unpin + Send + 'static,
    C::Error: Into<BoxError>,
{
    async fn request<B>(&self, mut request: Request<B>) -> Result<Response<AnswerBody<B>>, Error>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let uri = request.uri().clone();
        let host = prepare(&mut request)?;
        let mut outgoing = Outgoing::new(request).map_err(Error::Broken)?;
        loop {
            let kept = self.pool.take(&host);
            let is_kept = kept.is_some();
            let mut connection = match kept {
                Some(connection) => connection,
                None => self.connect(uri.clone()).await?,
            };
            match poll_fn(|context| connection.poll_answer(&mut outgoing, context)).await {
                Ok(answer) => {
                    let outgoing = Some(outgoing).filter(|outgoing| !outgoing.is_sent());
                    let pool = Arc::clone(&self.pool);
                    return Ok(AnswerBody::answer(answer, (host, connection), outgoing, pool));
                }
                Err(Broken::Io(_)) if is_kept && !outgoing.has_begun => {}
                Err(broken) => return Err(Error::Broken(broken)),
            }
        }
    }

    async fn connect(&self, uri: Uri) -> Result<Connection, Error> {
        let mut connector = self.connector.clone();
        let ready = poll_fn(|context| connector.poll_ready(context)).await;
        ready.map_err(|error| Error::Connect(error.into()))?;
        let stream = connector.call(uri).await.map_err(|error| Error::Connect(error.into()))?;
        Ok(Connection::new(TokioIo::new(stream)))
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

/// The rest of an answer. At its end, its connection is free for other requests.
pub struct AnswerBody<B> {
    reader: AnswerReader,
    /// `None` once the body has ended.
    connection: Option<(Host, Connection)>,
    stays_open: bool,
    /// What is left to send, while the answer comes already.
    outgoing: Option<Box<Outgoing<B>>>,
    pool: Arc<Pool>,
}

impl<B> std::fmt::Debug for AnswerBody<B> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("AnswerBody").field("reader", &self.reader).finish_non_exhaustive()
    }
}

impl<B> AnswerBody<B> {
    fn answer(
        answer: AnswerHead,
        connection: (Host, Connection),
        outgoing: Option<Outgoing<B>>,
        pool: Arc<Pool>,
    ) -> Response<Self> {
        let AnswerHead { head, reader, stays_open } = answer;
        let outgoing = outgoing.map(Box::new);
        let connection = Some(connection);
        let mut body = Self { reader, connection, stays_open, outgoing, pool };
        body.end_if_read();
        head.map(|()| body)
    }

    /// A connection that has more to send can't be used again.
    fn end_if_read(&mut self) {
        if self.reader.has_ended()
            && let Some((host, connection)) = self.connection.take()
            && self.stays_open
            && self.outgoing.is_none()
        {
            self.pool.put(host, connection);
        }
    }
}

impl<B> AnswerBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    fn poll_part(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Broken>> {
        let Some((_, connection)) = &mut self.connection else { return Poll::Ready(Ok(None)) };
        if let Some(outgoing) = &mut self.outgoing {
            match connection.poll_rest(outgoing, context) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => self.outgoing = None,
                // The peer wants no more of the request. Its answer may be whole.
                Poll::Ready(Err(_)) => (self.outgoing, self.stays_open) = (None, false),
            }
        }
        loop {
            let part = self.reader.take(&mut connection.input)?;
            if part.is_some() || self.reader.has_ended() {
                return Poll::Ready(Ok(part));
            }
            if ready!(connection.poll_read(context)).map_err(Broken::Io)? == 0 {
                self.reader.close()?;
                return Poll::Ready(Ok(None));
            }
        }
    }
}

impl<B> Drop for AnswerBody<B> {
    /// What is left may have arrived. Then the connection can be used again.
    fn drop(&mut self) {
        let Some((_, connection)) = &mut self.connection else { return };
        for _ in 0..LAST_LOOKS {
            match self.reader.take(&mut connection.input) {
                Err(_) => return,
                Ok(_) if self.reader.has_ended() => break,
                Ok(Some(_)) => {}
                Ok(None) => {
                    let reading = poll_fn(|context| connection.poll_read(context));
                    let read =
                        pin!(unconstrained(reading)).poll(&mut Context::from_waker(Waker::noop()));
                    if !matches!(read, Poll::Ready(Ok(1..))) {
                        return;
                    }
                }
            }
        }
        self.end_if_read();
    }
}

impl<B> Body for AnswerBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let part = ready!(self.poll_part(context));
        if part.is_err() {
            self.connection = None;
        } else {
            self.end_if_read();
        }
        Poll::Ready(part.transpose().map(|part| part.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.reader.has_ended()
    }

    fn size_hint(&self) -> SizeHint {
        self.reader.bytes_left().map_or_else(SizeHint::default, SizeHint::with_exact)
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

    type Client = HttpClient<HttpConnector>;

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
