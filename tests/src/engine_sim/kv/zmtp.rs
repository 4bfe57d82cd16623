//! The part of ZMTP 3.0 that libzmq's subscribers and dealers need from a publisher.
//!
//! This is the greeting without security, a PUB socket, and a ROUTER socket that answers each
//! request on its own connection. The module handles topics and sequence numbers, never payloads.

use super::publisher::Kept;
use bytes::{Buf as _, Bytes, BytesMut};
use std::io;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::broadcast::{self, error::RecvError},
    task::JoinSet,
};
use tokio_stream::StreamExt as _;
use tokio_util::codec::{Decoder, FramedRead};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Size of the greeting: signature, version, mechanism, role and filler.
const GREETING_BYTES: usize = 64;
/// Bound of an incoming frame. Subscriptions and replay requests have only a few bytes.
const FRAME_BYTES_MAX: u64 = 1 << 16;
const FRAMES_MAX: usize = 16;
const TOPICS_MAX: usize = 16;
/// The sequence number of the message that ends a replay.
const END: [u8; 8] = [0xff; 8];

/// Encodes a message of several frames.
pub(super) fn message(frames: &[&[u8]]) -> Bytes {
    let mut bytes = Vec::new();
    for (place, frame) in frames.iter().enumerate() {
        frame_into(&mut bytes, if place + 1 < frames.len() { MORE } else { 0 }, frame);
    }
    bytes.into()
}

fn frame_into(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => bytes.extend([flags, short]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((body.len() as u64).to_be_bytes());
        }
    }
    bytes.extend_from_slice(body);
}

/// Sends messages to all subscribers that have subscribed to a prefix of `topic`.
pub(super) async fn publish(
    listener: std::net::TcpListener,
    topic: Bytes,
    messages: broadcast::Sender<Bytes>,
) -> io::Result<()> {
    let serve = |peer: Peer| subscriber(peer, topic.clone(), messages.subscribe());
    accept(listener, "PUB", serve).await
}

/// Answers replay requests from the kept batches. Without a listener it never returns.
pub(super) async fn replay(
    listener: Option<std::net::TcpListener>,
    topic: Bytes,
    kept: Kept,
) -> io::Result<()> {
    let Some(listener) = listener else { return std::future::pending().await };
    let serve = |peer: Peer| dealer(peer, topic.clone(), Kept::clone(&kept));
    accept(listener, "ROUTER", serve).await
}

async fn accept<F>(
    listener: std::net::TcpListener,
    kind: &'static str,
    serve: impl Fn(Peer) -> F,
) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let mut greeting = JoinSet::new();
    let mut served = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            // The way a connection ended doesn't matter to the publisher.
            Some(_) = served.join_next(), if !served.is_empty() => {}
            Some(Ok(peer)) = greeting.join_next(), if !greeting.is_empty() => {
                if let Ok(peer) = peer {
                    served.spawn(serve(peer));
                }
            }
            Ok((stream, _)) = listener.accept() => {
                greeting.spawn(greet(stream, kind));
            }
        }
    }
}

/// A connection after its greeting.
struct Peer {
    frames: FramedRead<OwnedReadHalf, Frames>,
    out: OwnedWriteHalf,
}

async fn greet(mut stream: TcpStream, kind: &str) -> io::Result<Peer> {
    stream.set_nodelay(true)?;
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    // The greeting: end of the signature, version 3.0, and the name of the mechanism.
    greeting[9..11].copy_from_slice(&[0x7f, 3]);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting).await?;
    let mut theirs = [0; GREETING_BYTES];
    stream.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 || theirs[12..16] != *b"NULL" {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend([0, 0, 0, u8::try_from(kind.len()).expect("types are short words")]);
    ready.extend_from_slice(kind.as_bytes());
    let mut bytes = Vec::new();
    frame_into(&mut bytes, COMMAND, &ready);
    stream.write_all(&bytes).await?;
    let (reader, out) = stream.into_split();
    let mut peer = Peer { frames: FramedRead::new(reader, Frames), out };
    match peer.next().await? {
        Incoming::Command(body) if body.starts_with(b"\x05READY") => Ok(peer),
        Incoming::Command(_) | Incoming::Message(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A command or a message from a peer.
enum Incoming {
    Command(Bytes),
    Message(Vec<Bytes>),
}

impl Peer {
    /// Reads the next command or message. The future must not be dropped before it completes, or a
    /// message's first frames are lost.
    async fn next(&mut self) -> io::Result<Incoming> {
        let mut frames = Vec::new();
        loop {
            let frame = self.frames.next().await.ok_or(io::ErrorKind::UnexpectedEof)?;
            let (flags, body) = frame?;
            if flags & COMMAND != 0 {
                return Ok(Incoming::Command(body));
            }
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(Incoming::Message(frames));
            }
            if frames.len() == FRAMES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
        }
    }

    /// Answers a heartbeat by echoing the bytes after its time-to-live field. ZMTP 3.0 asks for no
    /// other answer from a publisher.
    async fn obey(&mut self, command: &[u8]) -> io::Result<()> {
        let Some(context) = command.strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..)) else {
            return Ok(());
        };
        let mut bytes = Vec::new();
        frame_into(&mut bytes, COMMAND, &[b"\x04PONG", context].concat());
        self.out.write_all(&bytes).await
    }
}

async fn subscriber(
    mut peer: Peer,
    topic: Bytes,
    mut messages: broadcast::Receiver<Bytes>,
) -> io::Result<()> {
    let mut topics: Vec<Bytes> = Vec::new();
    loop {
        tokio::select! {
            biased;
            // A subscription has one frame, so an interrupted `next` loses no frame here.
            said = peer.next() => match said? {
                Incoming::Message(frames) => {
                    if let Some(frame) = frames.first() {
                        subscribe(&mut topics, frame);
                    }
                }
                Incoming::Command(body) => peer.obey(&body).await?,
            },
            message = messages.recv() => match message {
                Ok(message) if topics.iter().any(|prefix| topic.starts_with(prefix)) => {
                    peer.out.write_all(&message).await?;
                }
                // A slow subscriber has lost messages.
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return Ok(()),
            }
        }
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

async fn dealer(mut peer: Peer, topic: Bytes, kept: Kept) -> io::Result<()> {
    loop {
        let frames = match peer.next().await? {
            Incoming::Message(frames) => frames,
            Incoming::Command(body) => {
                peer.obey(&body).await?;
                continue;
            }
        };
        // Like the engine, answers only requests that consist of an empty frame and a number.
        let [_, from] = frames.as_slice() else { continue };
        let Ok(from) = <[u8; 8]>::try_from(from.as_ref()) else { continue };
        let from = u64::from_be_bytes(from);
        let wanted: Vec<(u64, Bytes)> =
            kept.lock().iter().filter(|(number, _)| *number >= from).cloned().collect();
        for (number, payload) in wanted {
            let batch = message(&[b"", &topic, &number.to_be_bytes(), &payload]);
            peer.out.write_all(&batch).await?;
        }
        peer.out.write_all(&message(&[b"", b"", &END, b""])).await?;
    }
}

/// Decodes a byte stream into frames of flags and body.
struct Frames;

impl Decoder for Frames {
    type Item = (u8, Bytes);
    type Error = io::Error;

    fn decode(&mut self, bytes: &mut BytesMut) -> io::Result<Option<(u8, Bytes)>> {
        let Some(&flags) = bytes.first() else { return Ok(None) };
        let (head, length) = if flags & LONG == 0 {
            (2, bytes.get(1).map(|&short| u64::from(short)))
        } else {
            let long = bytes.get(1..9).and_then(|bytes| bytes.try_into().ok());
            (9, long.map(u64::from_be_bytes))
        };
        let Some(length) = length else { return Ok(None) };
        if length > FRAME_BYTES_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let length = usize::try_from(length).expect("bounded above");
        if bytes.len() < head + length {
            return Ok(None);
        }
        bytes.advance(head);
        Ok(Some((flags, bytes.split_to(length).freeze())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_any_cut() {
        let long = vec![7; 300];
        let bytes = message(&[b"topic", b"", &long]);
        for cut in 0..bytes.len() {
            let mut stream = BytesMut::from(&bytes[..cut]);
            let mut frames = Vec::new();
            while let Some(frame) = Frames.decode(&mut stream).unwrap() {
                frames.push(frame);
            }
            stream.extend_from_slice(&bytes[cut..]);
            while let Some(frame) = Frames.decode(&mut stream).unwrap() {
                frames.push(frame);
            }
            let bodies: Vec<&[u8]> = frames.iter().map(|(_, body)| body.as_ref()).collect();
            assert_eq!(bodies, [&b"topic"[..], b"", &long], "cut at {cut}");
            let flags: Vec<u8> = frames.iter().map(|(flags, _)| *flags).collect();
            assert_eq!(flags, [MORE, MORE, LONG]);
        }
    }

    #[test]
    fn a_frame_that_nobody_sends_is_refused() {
        let mut stream = BytesMut::from(&[LONG, 0, 0, 0, 1, 0, 0, 0, 0][..]);
        assert!(Frames.decode(&mut stream).is_err());
    }
}
