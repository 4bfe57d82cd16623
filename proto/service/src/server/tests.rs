//! Tests of the server with connections over loopback.

use axum::{Router, body::Body, routing::get};
use bytes::Bytes;
use http_body::Frame;
use http_body_util::StreamBody;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::metrics::Registrar;

/// A server on a free port, whose limits a test has changed.
struct Server {
    addr: SocketAddr,
    registry: Registry,
    _tasks: Tasks,
}

impl Server {
    async fn start(app: Router, change: impl FnOnce(&mut PortLimits)) -> Self {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut Registrar::new(&mut registry));
        let mut limits = PortLimits::data(&ConnectionSettings::default(), 1, 1000, &metrics);
        change(&mut limits);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, tasks) = (listener.local_addr().unwrap(), Tasks::default());
        let app = app.route("/health", get(|| async { "ok" }));
        tasks.spawn(serve(listener, app, limits, None, tasks.clone()));
        Self { addr, registry, _tasks: tasks }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.addr).await.unwrap()
    }

    /// Sends a request on a new connection.
    async fn send(&self, path: &str) -> TcpStream {
        let mut client = self.connect().await;
        client
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes())
            .await
            .unwrap();
        client
    }

    /// Returns the answer to a request on a new connection, which the server closes.
    async fn last_answer(&self, path: &str) -> String {
        let mut answer = String::new();
        self.send(path).await.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Returns the status of a request on a new connection.
    async fn status(&self, path: &str) -> u16 {
        status(&mut self.send(path).await).await
    }

    fn metric(&self, line: &str) -> i64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry).unwrap();
        let found = text.lines().find_map(|found| found.strip_prefix(line));
        found.map_or(0, |value| value.trim().parse().unwrap())
    }
}

/// Returns the status of the answer on a connection.
async fn status(client: &mut TcpStream) -> u16 {
    let mut head = [0; 12];
    client.read_exact(&mut head).await.unwrap();
    std::str::from_utf8(&head[9..]).unwrap().parse().unwrap()
}

/// Returns routes with one answer, `/answer`, whose frames the test sends. The token is cancelled
/// when the answer's body is dropped.
fn answer_from(frames: mpsc::Receiver<Bytes>) -> (Router, CancellationToken) {
    let dropped = CancellationToken::new();
    let guard = dropped.clone().drop_guard();
    let answer = Arc::new(Mutex::new(Some((frames, guard))));
    let handler = move || {
        let (frames, guard) = answer.lock().take().expect("one request");
        let frames = tokio_stream::StreamExt::map(ReceiverStream::new(frames), move |bytes| {
            let _held = &guard;
            Ok::<_, Infallible>(Frame::data(bytes))
        });
        std::future::ready(Body::new(StreamBody::new(frames)))
    };
    (Router::new().route("/answer", get(handler)), dropped)
}

/// A frame that is larger than what the system buffers for a client that reads nothing.
fn large_frame() -> Bytes {
    Bytes::from(vec![b'x'; 16 << 20])
}

// Tokio's paused clock jumps to the next timer when no task can run.
#[tokio::test(start_paused = true)]
async fn a_client_that_stops_reading_loses_its_answer() {
    let (frames, receiver) = mpsc::channel(1);
    let (app, dropped) = answer_from(receiver);
    let server = Server::start(app, |_| {}).await;
    let client = server.send("/answer").await;
    let asked = tokio::time::Instant::now();
    frames.send(large_frame()).await.unwrap();
    dropped.cancelled().await;
    assert!(asked.elapsed() >= WRITE_STALL_TIME_MAX);
    drop(client);
}

#[tokio::test]
async fn an_answer_ends_with_its_source_although_its_client_reads_nothing() {
    let (frames, receiver) = mpsc::channel(1);
    let (app, dropped) = answer_from(receiver);
    let server = Server::start(app, |_| {}).await;
    let mut client = server.send("/answer").await;
    frames.send(large_frame()).await.unwrap();
    for _ in 0..100 {
        let sent = frames.send(Bytes::from_static(b"event"));
        let sent = tokio::time::timeout(Duration::from_secs(60), sent).await;
        sent.expect("the body is read on").unwrap();
    }
    drop(frames);
    let ended = tokio::time::timeout(Duration::from_secs(60), dropped.cancelled());
    assert!(ended.await.is_ok(), "the body waits for its client");
    assert!(server.metric("answer_buffer_bytes ") > 100 * 5);
    // The client gets every byte all the same, and the memory is free again.
    let (mut answer, mut end) = (vec![0; large_frame().len()], vec![]);
    client.read_exact(&mut answer).await.unwrap();
    while !end.ends_with(b"\r\n0\r\n\r\n") {
        assert!(client.read_buf(&mut end).await.unwrap() > 0);
    }
    assert!(end.len() > 100 * 5);
    assert_eq!(server.metric("answer_buffer_bytes "), 0);
}

#[tokio::test]
async fn a_full_buffer_stops_the_source() {
    let (frames, receiver) = mpsc::channel(1);
    let (app, _dropped) = answer_from(receiver);
    let small = |limits: &mut PortLimits| {
        limits.buffers =
            AnswerBuffers::new(1000, 10_000, limits.metrics.answer_buffer_bytes.clone());
    };
    let server = Server::start(app, small).await;
    let _client = server.send("/answer").await;
    frames.send(large_frame()).await.unwrap();
    let mut sent = 0;
    // The first ones arrive, however late the server is.
    let wait = |sent| Duration::from_millis(if sent < 4 { 60_000 } else { 300 });
    while let Ok(result) =
        tokio::time::timeout(wait(sent), frames.send(vec![b'x'; 100].into())).await
    {
        result.unwrap();
        sent += 1;
    }
    assert!((4..20).contains(&sent), "{sent} frames of 100 bytes in a buffer of 1,000");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_too_slowly_is_cut_off() {
    let (frames, receiver) = mpsc::channel(1);
    let (app, dropped) = answer_from(receiver);
    let tight = |limits: &mut PortLimits| {
        limits.buffers = AnswerBuffers::new(1, 1, limits.metrics.answer_buffer_bytes.clone());
        limits.drain_rate = DrainRate { bytes_per_s_min: 1, grace: Duration::from_secs(5) };
    };
    let server = Server::start(app, tight).await;
    let _client = server.send("/answer").await;
    let asked = tokio::time::Instant::now();
    frames.send(large_frame()).await.unwrap();
    while frames.send(Bytes::from_static(b"event")).await.is_ok() {}
    dropped.cancelled().await;
    assert!(asked.elapsed() < WRITE_STALL_TIME_MAX);
    let line = "connections_closed_total{port=\"data\",reason=\"slow_reader\"} ";
    assert_eq!(server.metric(line), 1);
}

/// With bytes of a next request in its buffer, hyper waits for the answer before it reads on.
#[tokio::test]
async fn a_request_ends_with_its_client_although_that_had_begun_another_one() {
    let (frames, receiver) = mpsc::channel(1);
    let (app, dropped) = answer_from(receiver);
    let server = Server::start(app, |_| {}).await;
    let mut client = server.connect().await;
    client.write_all(b"GET /answer HTTP/1.1\r\nhost: x\r\n\r\nG").await.unwrap();
    // The request runs when its first frame has been taken.
    frames.send(Bytes::from_static(b"event")).await.unwrap();
    assert_eq!(status(&mut client).await, 200);
    let still_there = tokio::time::timeout(3 * CLIENT_LOOK_INTERVAL, dropped.cancelled());
    assert!(still_there.await.is_err(), "it ended although its client is there");
    let mut rest = [0; 1024];
    while !matches!(client.try_read(&mut rest), Err(_) | Ok(0)) {}
    drop(client);
    let ended = tokio::time::timeout(Duration::from_secs(60), dropped.cancelled());
    assert!(ended.await.is_ok(), "it runs on without its client");
}

#[tokio::test(start_paused = true)]
async fn a_silent_client_is_closed_after_the_header_time_and_an_idle_one_after_keep_alive() {
    let server = Server::start(Router::new(), |_| {}).await;
    let begin = tokio::time::Instant::now();
    let mut silent = server.connect().await;
    assert_eq!(silent.read(&mut [0; 1]).await.unwrap_or(0), 0);
    let silent_for = begin.elapsed();
    assert!((10..20).contains(&silent_for.as_secs()), "{silent_for:?}");
    let mut idle = server.send("/health").await;
    let mut answer = vec![];
    idle.read_to_end(&mut answer).await.unwrap();
    let idle_for = begin.elapsed() - silent_for;
    assert!((70..90).contains(&idle_for.as_secs()), "{idle_for:?}");
}

#[tokio::test]
async fn health_is_answered_while_every_place_is_taken_by_silent_clients() {
    let server = Server::start(Router::new(), |limits| limits.connections_max = 20).await;
    let mut silent = vec![];
    for _ in 0..200 {
        silent.push(server.connect().await);
    }
    assert_eq!(server.status("/health").await, 200);
}

/// Connects and sends a request, without its body and without letting the server run, which has the thread of the test.
fn send_blocking(server: &Server, line: &str) -> TcpStream {
    use std::io::Write as _;
    let mut client = std::net::TcpStream::connect(server.addr).unwrap();
    let length = if line.starts_with("POST") { 1_000 } else { 0 };
    write!(client, "{line} HTTP/1.1\r\ncontent-length: {length}\r\n\r\n").unwrap();
    client.set_nonblocking(true).unwrap();
    TcpStream::from_std(client).unwrap()
}

const EVICTED: &str = "connections_closed_total{port=\"data\",reason=\"evicted\"} ";

#[tokio::test(start_paused = true)]
async fn requests_of_a_burst_are_answered_although_it_has_more_connections_than_places() {
    let app = Router::new().route("/turn", get(|| async { "answer" }));
    let server = Server::start(app, |limits| limits.connections_max = 20).await;
    let mut clients = Vec::from_iter((0..100).map(|_| send_blocking(&server, "GET /turn")));
    for client in &mut clients {
        assert_eq!(status(client).await, 200);
    }
    assert!(server.metric(EVICTED) > 0, "there were places for all");
}

#[tokio::test(start_paused = true)]
async fn answers_that_wait_for_no_body_take_no_place() {
    let server = Server::start(Router::new(), |limits| limits.connections_max = 1).await;
    let line = "POST /nothing";
    // One connection, and the reserve.
    let mut clients = Vec::from_iter((0..10).map(|_| send_blocking(&server, line)));
    for client in &mut clients {
        assert_eq!(status(client).await, 404);
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_has_time_for_a_request_before_another_one_closes_it() {
    let metrics = Metrics::default();
    let settings = ConnectionSettings::default();
    let port = Arc::new(Port::new(
        PortLimits::data(&settings, 0, 1, &metrics),
        Tasks::default().leave_token(),
    ));
    let addr: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let begin = tokio::time::Instant::now();
    let mut open = vec![];
    for _ in 0..1 + connections::RESERVE_PLACES {
        port.let_idle_connections_ask(addr).await;
        open.extend(port.open(addr));
    }
    assert!(begin.elapsed().is_zero(), "there were places");
    port.let_idle_connections_ask(addr).await;
    assert!(begin.elapsed() >= Duration::from_millis(5), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn health_is_answered_and_turns_are_refused_while_every_place_works() {
    let (enter, mut entered) = mpsc::channel(3);
    let held = get(move || async move {
        enter.send(()).await.unwrap();
        std::future::pending::<&'static str>().await
    });
    let few = |limits: &mut PortLimits| (limits.connections_max, limits.per_peer_max) = (3, 3);
    let server = Server::start(Router::new().route("/held", held), few).await;
    let mut working = vec![];
    for _ in 0..3 {
        working.push(server.send("/held").await);
        entered.recv().await.unwrap();
    }
    assert_eq!(server.status("/health").await, 200);
    let refused = server.last_answer("/held").await;
    assert!(refused.starts_with("HTTP/1.1 503 "), "{refused}");
    let code = format!("x-berth-refusal: {}\r\n", Code::ConnectionsFull);
    assert!(refused.contains(&code), "{refused}");
    let mut reserve = vec![];
    for _ in 0..100 {
        reserve.push(server.connect().await);
    }
    assert_eq!(server.status("/health").await, 200);
}

/// Sends the head of a refused request whose body has `pieces` of 100 kB.
async fn begin_refused(server: &Server, path: &str, pieces: usize) -> TcpStream {
    let mut client = server.connect().await;
    let length = pieces * 100_000;
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    client
}

/// Reads the answer to its end, which is the end of the connection.
async fn assert_refused(mut client: TcpStream, status: &str) {
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    assert!(answer.contains("connection: close\r\n"), "{answer}");
}

#[tokio::test]
async fn a_client_that_sends_its_whole_body_before_it_reads_learns_why_it_was_refused() {
    let app = Router::new().route("/get", get(|| async { "answer" }));
    let server = Server::start(app, |_| {}).await;
    for (path, status) in [("/nothing", "404"), ("/get", "405")] {
        let mut client = begin_refused(&server, path, 50).await;
        // The server has answered, and ended its side.
        client.readable().await.unwrap();
        client.write_all(&vec![b'x'; 50 * 100_000]).await.unwrap();
        assert_refused(client, status).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_client_that_sends_its_whole_body_before_it_reads_learns_why_it_was_refused() {
    let server = Server::start(Router::new(), |_| {}).await;
    let mut client = begin_refused(&server, "/nothing", 20).await;
    for _ in 0..20 {
        client.write_all(&[b'x'; 100_000]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_refused(client, "404").await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_client_that_keeps_its_connection_loses_it() {
    let server = Server::start(Router::new(), |_| {}).await;
    for interval in [Duration::from_secs(1), Duration::from_secs(60)] {
        let begin = tokio::time::Instant::now();
        let mut client = begin_refused(&server, "/nothing", 1_000).await;
        // The system's own wait would be of real time.
        client.set_nodelay(true).unwrap();
        while client.write_all(b"x").await.is_ok() {
            tokio::time::sleep(interval).await;
        }
        assert!(begin.elapsed() < Duration::from_secs(200), "{:?}", begin.elapsed());
    }
}
