//! A client for ZeroMQ's wire protocol, ZMTP 3.0 without security.
//!
//! It has the part needed to subscribe to a PUB socket and to ask a ROUTER socket. A [`Connection`]
//! is made once. It neither queues messages nor reconnects by itself, because the caller must know
//! when a connection breaks. Sizes announced by the peer are bounded.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// The time limit for connecting and exchanging greetings.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The maximum bytes of a message. An engine that evicts a million pages of one token at once sends
/// nine million bytes.
const MESSAGE_BYTES_MAX: u64 = 64 << 20;
/// The maximum frames of a message. Publishers send three, a replay four.
const FRAMES_MAX: usize = 8;
const GREETING_BYTES: usize = 64;
/// The buffer space reserved for each read.
const READ_BYTES: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The socket type that this end announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SocketType {
    Sub,
    Dealer,
}

/// Why a connection could not be made, or why it ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The peer sent no greeting in time.
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
    #[error("the message has more than {FRAMES_MAX} frames or {MESSAGE_BYTES_MAX} bytes")]
    Bound,
}

/// One connection after its greetings.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    messages: Messages,
}

impl Connection {
    /// Connects to `address`, which is `host:port`, and exchanges greetings.
    pub(super) async fn open(address: &str, kind: SocketType) -> Result<Self, Error> {
        let greeted = async {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            stream.write_all(&greeting()).await?;
            stream.write_all(&ready(kind)).await?;
            let mut theirs = [0; GREETING_BYTES];
            stream.read_exact(&mut theirs).await?;
            is_greeting(&theirs).then_some(()).ok_or(Error::Greeting)?;
            Ok(Self { stream, messages: Messages::default() })
        };
        timeout(CONNECT_MAX, greeted).await.map_err(|_| Error::Timeout)?
    }

    /// Subscribes to all messages with a first frame that begins with `topic`.
    pub(super) async fn subscribe(&mut self, topic: &[u8]) -> Result<(), Error> {
        self.send(&[&[&[1], topic].concat()]).await
    }

    pub(super) async fn send(&mut self, frames: &[&[u8]]) -> Result<(), Error> {
        let mut bytes = vec![];
        for (at, frame) in frames.iter().enumerate() {
            put(if at + 1 < frames.len() { MORE } else { 0 }, frame, &mut bytes);
        }
        Ok(self.stream.write_all(&bytes).await?)
    }

    /// Returns the frames of the next message. Cancel-safe: dropping the future loses no bytes.
    pub(super) async fn receive(&mut self) -> Result<Vec<Bytes>, Error> {
        loop {
            if let Some(message) = self.messages.next()? {
                return Ok(message);
            }
            self.messages.unread.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.messages.unread).await? == 0 {
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

fn is_greeting(bytes: &[u8; GREETING_BYTES]) -> bool {
    let mechanism = &bytes[12..32];
    (bytes[0], bytes[9] & 1) == (0xff, 1) && bytes[10] >= 3 && mechanism == &greeting()[12..32]
}

fn ready(kind: SocketType) -> Vec<u8> {
    let kind: &[u8] = match kind {
        SocketType::Sub => b"SUB",
        SocketType::Dealer => b"DEALER",
    };
    let length = u32::try_from(kind.len()).expect("socket type names are short").to_be_bytes();
    let mut bytes = vec![];
    put(COMMAND, &[b"\x05READY\x0bSocket-Type", &length[..], kind].concat(), &mut bytes);
    bytes
}

fn put(flags: u8, frame: &[u8], bytes: &mut Vec<u8>) {
    match u8::try_from(frame.len()) {
        Ok(length) => bytes.extend([flags, length]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((frame.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(frame);
}

/// Assembles messages from bytes as they arrive. Pure.
#[derive(Debug, Default)]
struct Messages {
    unread: BytesMut,
    frames: Vec<Bytes>,
}

impl Messages {
    /// Returns the next complete message, if there is one. Commands are skipped: none of them
    /// matters here.
    fn next(&mut self) -> Result<Option<Vec<Bytes>>, Error> {
        while let Some((flags, header, length)) = self.header()? {
            let Some(end) = header.checked_add(length).filter(|end| *end <= self.unread.len())
            else {
                break;
            };
            let mut frame = self.unread.split_to(end).freeze();
            frame.advance(header);
            if flags & COMMAND != 0 {
                continue;
            }
            self.frames.push(frame);
            if flags & MORE == 0 {
                return Ok(Some(std::mem::take(&mut self.frames)));
            }
        }
        Ok(None)
    }

    /// Parses the next frame's header. Returns its flags, and the lengths of its header and its
    /// body.
    fn header(&self) -> Result<Option<(u8, usize, usize)>, Error> {
        let Some((&flags, rest)) = self.unread.split_first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return Err(Error::Frame);
        }
        let (header, length) = if flags & LONG == 0 {
            let Some(&length) = rest.first() else { return Ok(None) };
            (2, u64::from(length))
        } else {
            let Some(length) = rest.first_chunk() else { return Ok(None) };
            (9, u64::from_be_bytes(*length))
        };
        let before: usize = self.frames.iter().map(Bytes::len).sum();
        if self.frames.len() >= FRAMES_MAX || length > MESSAGE_BYTES_MAX - before as u64 {
            return Err(Error::Bound);
        }
        Ok(Some((flags, header, usize::try_from(length).map_err(|_| Error::Bound)?)))
    }
}

#[cfg(test)]
mod tests;
