//! Speaks ZeroMQ's wire protocol, over which the engine publishes KV events.
//!
//! This is the part of ZMTP 3.0 without security that both ends need. The agent subscribes to a PUB
//! socket, on which the engine publishes its events. On a ROUTER socket, the agent asks the engine
//! to send events again. The engine simulator of `tests` is the other end. A [`Connection`] neither
//! queues messages nor reconnects by itself, because the caller must know when the connection
//! breaks. Sizes that the peer announces are bounded.

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

/// The time limit for connecting and exchanging greetings.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The maximum bytes of a published message. An engine that evicts a million pages of one token at
/// once sends nine million bytes.
const EVENTS_BYTES_MAX: u64 = 64 << 20;
/// The maximum bytes of a subscription or a request, which have a few dozen bytes.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// The maximum frames of a message. A published message has three frames, and a message that the
/// engine sends again on request has four.
const FRAMES_MAX: usize = 8;
const GREETING_BYTES: usize = 64;
/// The buffer space reserved for each read.
const READ_BYTES: usize = 64 << 10;

/// Flag of a frame's header: a further frame of the same message follows.
const FLAG_MORE: u8 = 1;
/// Flag of a frame's header: the length has eight bytes, not one.
const FLAG_LONG: u8 = 2;
/// Flag of a frame's header: the frame is a command of the protocol, not a part of a message.
const FLAG_COMMAND: u8 = 4;

/// The socket type that this end announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketType {
    /// Subscribes to a PUB socket.
    Sub,
    /// Sends requests to a ROUTER socket, and receives the answers.
    Dealer,
    /// Sends messages to its subscribers.
    Pub,
    /// Answers requests.
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

    /// Returns the maximum bytes of a message that this type of socket receives.
    fn received_bytes_max(self) -> u64 {
        match self {
            Self::Sub | Self::Dealer => EVENTS_BYTES_MAX,
            Self::Pub | Self::Router => REQUEST_BYTES_MAX,
        }
    }
}

/// Why a connection could not be made, or why it ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The connection or the exchange of greetings took too long.
    #[error("no ZeroMQ greeting within {} s", CONNECT_MAX.as_secs())]
    Timeout,
    /// The peer closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// The peer's greeting is not that of a ZMTP 3 socket without security.
    #[error("the peer does not speak ZMTP 3 without security")]
    Greeting,
    /// The peer sent a frame that is not allowed here.
    #[error("the peer sent an invalid frame")]
    Frame,
    /// The message exceeds a bound.
    #[error("the message has more than {FRAMES_MAX} frames or {0} bytes")]
    Bound(u64),
}

/// What a peer sends after the greetings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    /// The frames of a message.
    Message(Vec<Bytes>),
    /// A command of the protocol: its name's length, its name, and its data.
    Command(Bytes),
}

/// Where a socket listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `host:port`.
    Tcp(String),
    /// The path of a unix socket. In ZeroMQ's notation, a name that begins with `@` is in the
    /// abstract namespace.
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

/// A stream of bytes in both directions.
pub trait Transport: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin + 'static> Transport for T {}

/// One connection after its greetings.
#[derive(Debug)]
pub struct Connection {
    stream: Box<dyn Transport>,
    assembler: MessageAssembler,
}

impl Connection {
    /// Connects to `endpoint`, and exchanges greetings.
    ///
    /// # Errors
    /// When the peer can't be reached, is too slow, or does not speak ZMTP 3.
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

    /// Exchanges greetings over a connection that either end has opened.
    ///
    /// # Errors
    /// When the connection breaks, or the peer does not speak ZMTP 3.
    pub async fn greet(stream: impl Transport, kind: SocketType) -> Result<Self, Error> {
        let mut stream: Box<dyn Transport> = Box::new(stream);
        stream.write_all(&greeting()).await?;
        stream.write_all(&ready_command(kind)).await?;
        let mut peer_greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut peer_greeting).await?;
        is_valid_greeting(&peer_greeting).then_some(()).ok_or(Error::Greeting)?;
        Ok(Self { stream, assembler: MessageAssembler::new(kind.received_bytes_max()) })
    }

    /// Subscribes to all messages with a first frame that begins with `topic`.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn subscribe(&mut self, topic: &[u8]) -> Result<(), Error> {
        self.send(&[&[&[1], topic].concat()]).await
    }

    /// Sends one message.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Error> {
        let mut bytes = vec![];
        for (index, frame) in frames.iter().enumerate() {
            let is_last = index + 1 == frames.len();
            append_frame(if is_last { 0 } else { FLAG_MORE }, frame, &mut bytes);
        }
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Sends a command of the protocol: its name's length, its name, and its data.
    ///
    /// # Errors
    /// When the connection breaks.
    pub async fn send_command(&mut self, command: &[u8]) -> Result<(), Error> {
        let mut bytes = vec![];
        append_frame(FLAG_COMMAND, command, &mut bytes);
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Returns the frames of the next message. Skips commands, because none of them matters to a
    /// subscriber or a requester. Cancel-safe: dropping the future loses no bytes.
    ///
    /// # Errors
    /// When the connection breaks, or the peer sends what the protocol or a bound forbids.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, Error> {
        loop {
            if let Incoming::Message(frames) = self.receive_any().await? {
                return Ok(frames);
            }
        }
    }

    /// Returns the next message or command. Cancel-safe: dropping the future loses no bytes.
    ///
    /// # Errors
    /// When the connection breaks, or the peer sends what the protocol or a bound forbids.
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

/// Returns the greeting of this end: the signature, version 3.0 and the security mechanism `NULL`.
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

/// Returns the command that ends the handshake and announces the socket type.
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

/// The header of a frame: its flags, its own length, and that of the body after it.
struct Header {
    flags: u8,
    header_bytes: usize,
    body_bytes: usize,
}

/// Assembles messages from bytes as they arrive. Pure.
#[derive(Debug)]
struct MessageAssembler {
    /// The maximum bytes of a message.
    bytes_max: u64,
    /// Bytes that were received and not yet parsed.
    unread: BytesMut,
    /// The frames that have arrived of a message that is not complete.
    frames: Vec<Bytes>,
}

impl MessageAssembler {
    fn new(bytes_max: u64) -> Self {
        Self { bytes_max, unread: BytesMut::new(), frames: vec![] }
    }

    /// Returns the next complete message or command, if there is one.
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

    /// Parses the next frame's header, if all of it has arrived.
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
