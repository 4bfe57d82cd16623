//! An engine that answers turns without end: agent and router must not take memory for it.
//!
//! A proxy stands before the engine. It answers `/generate` itself and passes on all else.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use harness::{
    cluster::text_turn,
    fleet::{FleetPlan, Place, Processes, credential},
};
use service::clock::now;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// How long the engine goes on with an answer.
const ANSWER_TIME: Duration = Duration::from_secs(4);
/// The most MiB by which agent and router may grow.
const MIB_MAX: u64 = 70;
/// The most bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// The beginning of an answer, and what follows again and again.
const ANSWERS: [(&str, &str); 3] = [
    (
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
        "data: {\"text\": \"more and more and more and more and more and more and more\"}\n\n",
    ),
    ("", "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
    ("HTTP/1.1 200 OK\r\n", "x-more: and more and more and more and more and more and more\r\n"),
];

/// Answers of each kind for some seconds, and memory beside them.
pub(crate) async fn endless_answers(place: Place) -> anyhow::Result<String> {
    let listener = TcpListener::bind("0.0.0.0:0").await?;
    let engine_port = listener.local_addr()?.port();
    let (answered, sent_bytes) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
    // It ends with this set.
    let mut proxy = JoinSet::new();
    proxy.spawn(serve(listener, Arc::clone(&answered), Arc::clone(&sent_bytes)));
    let plan = FleetPlan { engine_port, ..FleetPlan::default() };
    let fleet = Processes::start(place, &plan).await?;
    let resident =
        || anyhow::Ok([&fleet.agents[0], &fleet.routers[0]].map(|it| it.resident_bytes()));
    let total = || resident()?.into_iter().sum::<anyhow::Result<u64>>();
    let before = total()?;
    let (mut most, key) = (before, credential("mallory"));
    for _ in ANSWERS {
        let (web, url, key) = (fleet.web.clone(), fleet.url(0, "/generate"), key.clone());
        let mut turn = JoinSet::new();
        turn.spawn(async move {
            let mut body = text_turn("more", 1000);
            body["stream"] = true.into();
            let headers = [("authorization", key.as_str()), ("content-type", "application/json")];
            let sent = web.send(http::Method::POST, &url, &headers, body.to_string());
            let Ok(answer) = sent.await else { return };
            let mut answer = answer.into_body();
            while let Some(Ok(frame)) = http_body_util::BodyExt::frame(&mut answer).await {
                drop(frame);
            }
        });
        let began = now();
        while turn.try_join_next().is_none() && began.elapsed() < ANSWER_TIME {
            most = most.max(total()?);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    most = most.max(total()?);
    let (grown, sent) = ((most - before) >> 20, sent_bytes.load(Ordering::Relaxed) >> 20);
    let answered = answered.load(Ordering::Relaxed);
    ensure!(answered >= ANSWERS.len(), "the engine was asked for {answered} answers");
    ensure!(grown < MIB_MAX, "agent and router grew by {grown} MiB of {sent} MiB of answers");
    Ok(format!("{sent} MiB of endless answers, agent and router +{grown} MiB"))
}

async fn serve(listener: TcpListener, answered: Arc<AtomicUsize>, sent_bytes: Arc<AtomicU64>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (answered, sent_bytes) = (Arc::clone(&answered), Arc::clone(&sent_bytes));
        connections.spawn(async move {
            // The agent closes the connection, or the engine does.
            let _ = serve_one(stream, &answered, &sent_bytes).await;
        });
    }
}

/// Answers one request. No connection has a second one.
async fn serve_one(
    mut stream: TcpStream,
    answered: &AtomicUsize,
    sent_bytes: &AtomicU64,
) -> anyhow::Result<()> {
    let mut head = vec![];
    while !head.windows(4).any(|four| four == b"\r\n\r\n") {
        ensure!(head.len() < HEAD_BYTES_MAX, "a long head");
        ensure!(stream.read_buf(&mut head).await? > 0, "no request");
    }
    if !head.starts_with(b"POST /generate ") {
        let mut engine = TcpStream::connect((stream.local_addr()?.ip(), 30000)).await?;
        let line = head.windows(2).position(|two| two == b"\r\n").context("no line")? + 2;
        engine.write_all(&head[..line]).await?;
        engine.write_all(b"connection: close\r\n").await?;
        engine.write_all(&head[line..]).await?;
        copy_bidirectional(&mut stream, &mut engine).await?;
        return Ok(());
    }
    let (begin, rest) = ANSWERS[answered.fetch_add(1, Ordering::Relaxed) % ANSWERS.len()];
    stream.write_all(begin.as_bytes()).await?;
    let (rest, began) = (rest.repeat(1000), now());
    while began.elapsed() < ANSWER_TIME {
        stream.write_all(rest.as_bytes()).await?;
        sent_bytes.fetch_add(rest.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}
