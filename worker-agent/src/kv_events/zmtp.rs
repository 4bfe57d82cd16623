//! Speaks ZeroMQ's wire protocol, over which the engine publishes KV events.
//!
//! The part of ZMTP 3.0 without security that the agent and the engine simulator need. A
//! [`Connection`] neither queues messages nor reconnects by itself, because the caller must know
//! when it breaks. Sizes that the peer announces are bounded.

use std::{
    fmt::{self, Debug},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    time::timeout,
};

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// An engine that evicts a million pages of one token at once sends nine million bytes.
const EVENTS_BYTES_MAX: u64 = 64 << 20;
/// Subscriptions and requests have a few dozen bytes.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// A published message has three frames, a replayed one has four.
const FRAMES_MAX: usize = 8;
const GREETING_BYTES: usize = 64;
const READ_BYTES: usize = 64 << 10;

/// A further frame of the same message follows.
const FLAG_MORE: u8 = 1;
/// The length has eight bytes, not one.
const FLAG_LONG: u8 = 2;
/// The frame is a command of the protocol, not a part of a message.
const FLAG_COMMAND: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketType {
    Sub,
    /// Sends requests to a ROUTER socket, and receives the answers.
    Dealer,
    Pub,
    Router,
}

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Sub => b"SUB",
            Self::Dealer => b"DEALER",
            Self::Pub => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn received_bytes_max(self) -> u64 {
        match self {
            Self::Sub | Self::Dealer => EVENTS_BYTES_MAX,
            Self::Pub | Self::Router => REQUEST_BYTES_MAX,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("no ZeroMQ greeting within {} s", CONNECT_MAX.as_secs())]
    Timeout,
    #[error("the connection was closed")]
    Closed,
    #[error("the peer does not speak ZMTP 3 without security")]
    Greeting,
    #[error("the peer sent an invalid frame")]
    Frame,
    #[error("the message has more than {FRAMES_MAX} frames or {0} bytes")]
    Bound(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    Message(Vec<Bytes>),
    /// The name's length, the name, and the data.
    Command(Bytes),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `host:port`.
    Tcp(String),
    /// A name that begins with `@` is in the abstract namespace.
    Ipc(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Ipc(path) => write!(f, "ipc://{path}"),
        }
    }
}

pub trait Transport: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static> Transport for T {}

#[derive(Debug)]
pub struct Connection {
    stream: Box<dyn Transport>,
    assembler: MessageAssembler,
}

impl Connection {
    pub async fn open(endpoint: &Endpoint, kind: SocketType) -> Result<Self, Error> {
        let connect = async {
            match endpoint {
                Endpoint::Tcp(address) => {
                    let stream = TcpStream::connect(address).await?;
                    stream.set_nodelay(true)?;
                    Self::greet(stream, kind).await
                }
                Endpoint::Ipc(path) => {
                    // The system marks the abstract namespace by a zero byte.
                    let path =
                        path.strip_prefix('@').map_or(path.clone(), |name| format!("\0{name}"));
                    Self::greet(UnixStream::connect(path).await?, kind).await
                }
            }
        };
        timeout(CONNECT_MAX, connect).await.map_err(|_| Error::Timeout)?
    }

    /// Either end may have opened the connection.
    pub async fn greet(stream: impl Transport, kind: SocketType) -> Result<Self, Error> {
        let mut stream: Box<dyn Transport> = Box::new(stream);
        stream.write_all(&greeting()).await?;
        stream.write_all(&ready_command(kind)).await?;
        let mut peer_greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut peer_greeting).await?;
        is_valid_greeting(&peer_greeting).then_some(()).ok_or(Error::Greeting)?;
        Ok(Self { stream, assembler: MessageAssembler::new(kind.received_bytes_max()) })
    }

    /// `topic` is the beginning of the first frames.
    pub async fn subscribe(&mut self, topic: &[u8]) -> Result<(), Error> {
        self.send(&[&[&[1], topic].concat()]).await
    }

    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Error> {
        let mut bytes = vec![];
        for (index, frame) in frames.iter().enumerate() {
            let is_last = index + 1 == frames.len();
            append_frame(if is_last { 0 } else { FLAG_MORE }, frame, &mut bytes);
        }
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// `command` is its name's length, its name, and its data.
    pub async fn send_command(&mut self, command: &[u8]) -> Result<(), Error> {
        let mut bytes = vec![];
        append_frame(FLAG_COMMAND, command, &mut bytes);
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Skips commands, which don't matter to a subscriber or a requester. Cancel-safe.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, Error> {
        loop {
            if let Incoming::Message(frames) = self.receive_any().await? {
                return Ok(frames);
            }
        }
    }

    /// Cancel-safe.
    pub async fn receive_any(&mut self) -> Result<Incoming, Error> {
        loop {
            if let Some(incoming) = self.assembler.next()? {
                return Ok(incoming);
            }
            self.assembler.unread.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.assembler.unread).await? == 0 {
                return Err(Error::Closed);
            }
        }
    }
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn is_valid_greeting(bytes: &[u8; GREETING_BYTES]) -> bool {
    let mechanism = &bytes[12..32];
    (bytes[0], bytes[9] & 1) == (0xff, 1) && bytes[10] >= 3 && mechanism == &greeting()[12..32]
}

fn ready_command(kind: SocketType) -> Vec<u8> {
    let name = kind.name();
    let length = u32::try_from(name.len()).expect("socket type names are short").to_be_bytes();
    let command = [b"\x05READY\x0bSocket-Type", &length[..], name].concat();
    let mut bytes = vec![];
    append_frame(FLAG_COMMAND, &command, &mut bytes);
    bytes
}

fn append_frame(flags: u8, frame: &[u8], bytes: &mut Vec<u8>) {
    match u8::try_from(frame.len()) {
        Ok(length) => bytes.extend([flags, length]),
        Err(_) => {
            bytes.push(flags | FLAG_LONG);
            bytes.extend((frame.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(frame);
}

struct Header {
    flags: u8,
    header_bytes: usize,
    body_bytes: usize,
}

#[derive(Debug)]
struct MessageAssembler {
    bytes_max: u64,
    unread: BytesMut,
    /// Frames of a message that is not complete.
    frames: Vec<Bytes>,
}

impl MessageAssembler {
    fn new(bytes_max: u64) -> Self {
        Self { bytes_max, unread: BytesMut::new(), frames: vec![] }
    }

    fn next(&mut self) -> Result<Option<Incoming>, Error> {
        while let Some(Header { flags, header_bytes, body_bytes }) = self.read_header()? {
            let frame_bytes = header_bytes.checked_add(body_bytes);
            let Some(frame_bytes) = frame_bytes.filter(|bytes| *bytes <= self.unread.len()) else {
                break;
            };
            let mut frame = self.unread.split_to(frame_bytes).freeze();
            frame.advance(header_bytes);
            if flags & FLAG_COMMAND != 0 {
                return Ok(Some(Incoming::Command(frame)));
            }
            self.frames.push(frame);
            if flags & FLAG_MORE == 0 {
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    fn read_header(&self) -> Result<Option<Header>, Error> {
        let Some((&flags, rest)) = self.unread.split_first() else { return Ok(None) };
        if flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) != 0
            || flags & (FLAG_MORE | FLAG_COMMAND) == FLAG_MORE | FLAG_COMMAND
        {
            return Err(Error::Frame);
        }
        let (header_bytes, body_bytes) = if flags & FLAG_LONG == 0 {
            let Some(&length) = rest.first() else { return Ok(None) };
            (2, u64::from(length))
        } else {
            let Some(length) = rest.first_chunk() else { return Ok(None) };
            (9, u64::from_be_bytes(*length))
        };
        let bytes_before: usize = self.frames.iter().map(Bytes::len).sum();
        let bytes_left = self.bytes_max - bytes_before as u64;
        if self.frames.len() >= FRAMES_MAX || body_bytes > bytes_left {
            return Err(Error::Bound(self.bytes_max));
        }
        let body_bytes = usize::try_from(body_bytes).map_err(|_| Error::Bound(self.bytes_max))?;
        Ok(Some(Header { flags, header_bytes, body_bytes }))
    }
}

#[cfg(test)]
mod tests;
