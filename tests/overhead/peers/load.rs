//! The clients: each has a connection, and sends its next request when it has the last answer.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use hdrhistogram::Histogram;
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use service::{clock::now, tasks::Tasks};
use tokio::{net::TcpStream, task::JoinSet};

use super::mock;

/// What all requests of a load have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) prompt_bytes: usize,
    /// The chunks of a streamed answer; none for an answer in one piece.
    pub(crate) chunks: u32,
    /// Whether a chunk takes its time.
    pub(crate) is_paced: bool,
    /// Whether each client is a session, by the headers that the contenders know for it.
    pub(crate) has_session: bool,
}

/// What the clients saw. Times are in microseconds.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) whole: Histogram<u64>,
    pub(crate) first: Histogram<u64>,
    pub(crate) took: Duration,
}

/// A client's connection.
struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    host: String,
    /// What drives the connection ends with it.
    tasks: Tasks,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

impl Connection {
    async fn open(addr: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(addr).await.with_context(|| format!("{addr}"))?;
        stream.set_nodelay(true)?;
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
        let tasks = Tasks::default();
        let token = tasks.token();
        tasks.spawn(async move {
            tokio::select! {
                _ = driver => {}
                () = token.cancelled() => {}
            }
        });
        Ok(Self { sender, host: addr.to_string(), tasks })
    }

    async fn send(
        &mut self,
        body: &Bytes,
        session: Option<&str>,
    ) -> anyhow::Result<http::Response<Incoming>> {
        let mut request = http::Request::post("/generate")
            .header("host", &self.host)
            .header("content-type", "application/json");
        if let Some(session) = session {
            request = request
                .header("x-berth-session-id", session)
                .header("x-berth-retention", "tagged")
                .header("x-smg-routing-key", session)
                .header("x-session-id", session);
        }
        self.sender.ready().await?;
        let answer = self.sender.send_request(request.body(Full::new(body.clone()))?).await?;
        Ok(answer)
    }
}

/// Sends requests for so long.
pub(crate) async fn run(
    addr: SocketAddr,
    request: Request,
    connections: usize,
    time: Duration,
) -> anyhow::Result<Seen> {
    let body = Bytes::from(mock::request_body(request));
    let began = now();
    let mut clients = JoinSet::new();
    for number in 0..connections {
        clients.spawn(client(addr, body.clone(), request, number, began + time));
    }
    let (mut whole, mut first) = (Histogram::new(3)?, Histogram::new(3)?);
    while let Some(client) = clients.join_next().await {
        let (its_whole, its_first) = client??;
        whole.add(its_whole)?;
        first.add(its_first)?;
    }
    Ok(Seen { whole, first, took: began.elapsed() })
}

async fn client(
    addr: SocketAddr,
    body: Bytes,
    request: Request,
    number: usize,
    until: std::time::Instant,
) -> anyhow::Result<(Histogram<u64>, Histogram<u64>)> {
    let (mut whole, mut first) = (Histogram::new(3)?, Histogram::new(3)?);
    let session = request.has_session.then(|| format!("client-{number}"));
    let mut connection = Connection::open(addr).await?;
    loop {
        let began = now();
        if began >= until {
            return Ok((whole, first));
        }
        let since_began = || u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let answer = connection.send(&body, session.as_deref()).await?;
        let (head, mut answer) = answer.into_parts();
        let begin = answer.frame().await.context("an answer without a body")??;
        first.record(since_began())?;
        let mut bytes = begin.data_ref().map_or(0, Bytes::len);
        while let Some(frame) = answer.frame().await {
            bytes += frame?.data_ref().map_or(0, Bytes::len);
        }
        ensure!(head.status == 200, "{addr}: {}: {begin:?}", head.status);
        ensure!(bytes >= mock::answer_bytes_min(request), "{addr}: an answer of {bytes} bytes");
        whole.record(since_began())?;
    }
}

/// Streams that are open until this is dropped.
#[derive(Default)]
pub(crate) struct Held {
    streams: Vec<(Connection, Incoming)>,
}

/// Opens streams whose answers go on for ever, and waits for the first bytes of each.
pub(crate) async fn hold(addr: SocketAddr, streams: usize) -> anyhow::Result<Held> {
    let body = Bytes::from(mock::endless_request_body());
    let mut held = Held::default();
    for _ in 0..streams {
        let mut connection = Connection::open(addr).await?;
        let answer = connection.send(&body, None).await?;
        let (head, mut answer) = answer.into_parts();
        let begin = answer.frame().await.context("a stream without a body")??;
        ensure!(head.status == 200, "{addr}: {}: {begin:?}", head.status);
        held.streams.push((connection, answer));
    }
    Ok(held)
}
