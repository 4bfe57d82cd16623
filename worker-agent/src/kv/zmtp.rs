//! As much of ZeroMQ's wire protocol (ZMTP 3.0, without security) as it takes to hear a PUB and to
//! ask a ROUTER: one connection, made once. Nothing is queued or made anew behind the caller's
//! back, because a connection that broke is news to him; what a peer announces has a bound.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

/// Time for a connection and its greetings.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Bytes of a message. An engine that evicts a million pages of one token at once says so in nine
/// million.
const MESSAGE_BYTES_MAX: u64 = 64 << 20;
/// Frames of a message; publishers send three, a replay four.
const FRAMES_MAX: usize = 8;
const GREETING_BYTES: usize = 64;
/// One read.
const READ_BYTES: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What kind of socket to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Sub,
    Dealer,
}

/// Why a connection could not be made, or has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The system's word.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// It doesn't greet.
    #[error("no ZeroMQ socket answers within {} s", CONNECT_MAX.as_secs())]
    Timeout,
    /// The peer closed it.
    #[error("the connection was closed")]
    Closed,
    /// Not of this protocol.
    #[error("the peer speaks no ZMTP 3 without security")]
    Greeting,
    /// Not what a peer says after greetings.
    #[error("the peer's frames make no sense")]
    Frame,
    /// Larger than is taken.
    #[error("a message of more than {FRAMES_MAX} frames or {MESSAGE_BYTES_MAX} bytes")]
    Bound,
}

/// One connection, greetings done.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    messages: Messages,
}

impl Connection {
    /// Connects to `host:port`.
    pub(super) async fn open(address: &str, kind: Kind) -> Result<Self, Error> {
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

    /// Wants all messages whose first frame begins so.
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

    /// The next message's frames. Nothing is lost where it is dropped before it is done.
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

fn ready(kind: Kind) -> Vec<u8> {
    let kind: &[u8] = match kind {
        Kind::Sub => b"SUB",
        Kind::Dealer => b"DEALER",
    };
    let length = u32::try_from(kind.len()).expect("they are short").to_be_bytes();
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

/// Messages out of bytes as they come. Pure.
#[derive(Debug, Default)]
struct Messages {
    unread: BytesMut,
    frames: Vec<Bytes>,
}

impl Messages {
    /// The next whole message, if there is one. Commands say nothing that matters here.
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

    /// Of the next frame: its flags, and the lengths of its header and body.
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
