//! Serves the ZeroMQ sockets of the simulator's publisher.
//!
//! A PUB socket sends the batches, and a ROUTER socket answers each replay request on its own
//! connection. The wire protocol is that of [`worker_agent::kv_events::zmtp`]. This module handles
//! topics and sequence numbers, never payloads.

use super::publisher::{Batch, Kept, Listener};
use bytes::Bytes;
use std::io;
use tokio::{
    net::{TcpStream, UnixStream},
    sync::broadcast::{self, error::RecvError},
    task::JoinSet,
};
use worker_agent::kv_events::zmtp::{Connection, Error, Incoming, SocketType};

const TOPICS_MAX: usize = 16;
/// The sequence number of the message that ends a replay.
const END: [u8; 8] = [0xff; 8];

/// Sends batches to all subscribers that have subscribed to a prefix of `topic`.
pub(super) async fn publish(
    listener: Listener,
    topic: Bytes,
    batches: broadcast::Sender<Batch>,
) -> io::Result<()> {
    let serve = move |peer| subscriber(peer, topic.clone(), batches.subscribe());
    accept(listener, SocketType::Pub, serve).await
}

/// Answers replay requests from the kept batches. Without a listener it never returns.
pub(super) async fn replay(listener: Option<Listener>, topic: Bytes, kept: Kept) -> io::Result<()> {
    let Some(listener) = listener else { return std::future::pending().await };
    let serve = move |peer| dealer(peer, topic.clone(), Kept::clone(&kept));
    accept(listener, SocketType::Router, serve).await
}

/// Accepts connections, and serves each in a task of its own after the greetings.
async fn accept<F>(
    listener: Listener,
    kind: SocketType,
    serve: impl FnOnce(Connection) -> F + Clone + Send + 'static,
) -> io::Result<()>
where
    F: Future<Output = Result<(), Error>> + Send,
{
    let listener = BoundSocket::new(listener)?;
    let mut peers = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // The way a connection ended doesn't matter to the publisher.
            Some(_) = peers.join_next() => {}
            Ok(stream) = listener.accept() => {
                let serve = serve.clone();
                peers.spawn(async move { serve(stream.greet(kind).await?).await });
            }
        }
    }
}

/// A socket that this runtime serves.
enum BoundSocket {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener),
}

/// An accepted connection before its greetings.
enum Accepted {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl BoundSocket {
    fn new(listener: Listener) -> io::Result<BoundSocket> {
        match listener {
            Listener::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Ok(BoundSocket::Tcp(tokio::net::TcpListener::from_std(listener)?))
            }
            Listener::Unix(listener) => {
                listener.set_nonblocking(true)?;
                Ok(BoundSocket::Unix(tokio::net::UnixListener::from_std(listener)?))
            }
        }
    }

    async fn accept(&self) -> io::Result<Accepted> {
        match self {
            BoundSocket::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Accepted::Tcp(stream))
            }
            BoundSocket::Unix(listener) => Ok(Accepted::Unix(listener.accept().await?.0)),
        }
    }
}

impl Accepted {
    async fn greet(self, kind: SocketType) -> Result<Connection, Error> {
        match self {
            Accepted::Tcp(stream) => Connection::greet(stream, kind).await,
            Accepted::Unix(stream) => Connection::greet(stream, kind).await,
        }
    }
}

async fn subscriber(
    mut peer: Connection,
    topic: Bytes,
    mut batches: broadcast::Receiver<Batch>,
) -> Result<(), Error> {
    let mut topics: Vec<Bytes> = Vec::new();
    loop {
        tokio::select! {
            biased;
            incoming = peer.receive_any() => match incoming? {
                Incoming::Message(frames) => subscribe(&mut topics, &frames[0]),
                Incoming::Command(command) => answer_heartbeat(&mut peer, &command).await?,
            },
            batch = batches.recv() => match batch {
                Ok((number, payload)) if topics.iter().any(|prefix| topic.starts_with(prefix)) => {
                    peer.send(&[&topic, &number.to_be_bytes(), &payload]).await?;
                }
                // A slow subscriber has lost batches.
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            }
        }
    }
}

/// Answers a heartbeat by echoing the bytes after its time-to-live field. Ignores other commands.
async fn answer_heartbeat(peer: &mut Connection, command: &[u8]) -> Result<(), Error> {
    match command.strip_prefix(b"\x04PING").and_then(|ping| ping.get(2..)) {
        Some(context) => peer.send_command(&[b"\x04PONG", context].concat()).await,
        None => Ok(()),
    }
}

/// Applies a subscription frame: the first byte subscribes (1) or unsubscribes (0), and the other
/// bytes are the topic prefix.
fn subscribe(topics: &mut Vec<Bytes>, frame: &Bytes) {
    match frame.first() {
        Some(1) if topics.len() < TOPICS_MAX => topics.push(frame.slice(1..)),
        Some(0) => {
            let known = topics.iter().position(|known| known[..] == frame[1..]);
            known.map(|at| topics.swap_remove(at));
        }
        _ => {}
    }
}

async fn dealer(mut peer: Connection, topic: Bytes, kept: Kept) -> Result<(), Error> {
    loop {
        let frames = peer.receive().await?;
        // Like the engine, answers only requests that consist of an empty frame and a number.
        let [_, from] = frames.as_slice() else { continue };
        let Ok(from) = <[u8; 8]>::try_from(from.as_ref()) else { continue };
        let from = u64::from_be_bytes(from);
        let wanted: Vec<Batch> =
            kept.lock().iter().filter(|(number, _)| *number >= from).cloned().collect();
        for (number, payload) in wanted {
            peer.send(&[b"", &topic, &number.to_be_bytes(), &payload]).await?;
        }
        peer.send(&[b"", b"", &END, b""]).await?;
    }
}
