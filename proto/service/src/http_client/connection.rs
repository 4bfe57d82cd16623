//! Moves a request and its answer over a connection, in the task that polls.
//!
//! A connection has no buffer of its own. What is read goes through one of the thread, and small
//! parts are copied out of it. So a stream that waits keeps nothing, and a part that waits for a
//! slow client keeps little more than its own bytes.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::poll_fn,
    io::{self, IoSlice},
    mem,
    pin::{Pin, pin},
    task::{Context, Poll, Waker, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{Method, Request};
use http_body::Body;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::unconstrained,
};
use tokio_util::io::poll_read_buf;

use super::{
    Broken,
    heads::{AnswerHead, read_answer_head, request_head},
};
use crate::tls::client::BoxError;

/// How much is read at once at first. Most parts of streams, and most heads, are smaller.
const READ_BYTES_MIN: usize = 16 * 1024;
/// The most that is read at once, while much arrives. With more, other tasks wait too long.
const READ_BYTES_MAX: usize = 128 * 1024;
/// What is read fills at least so much of the memory that it holds, one part in four, or is copied:
/// it may wait for a slow client.
const HELD_PART_MIN: usize = 4;

/// An agent sends a body in three parts or more: it replaces keys. Each write costs a system call
/// and a packet.
const PARTS_MAX: usize = 15;

thread_local! {
    /// Empty while nothing is read.
    static SPACE: RefCell<BytesMut> = RefCell::default();
}

pub(super) trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<I: AsyncRead + AsyncWrite + Unpin + Send> Io for I {}

pub(super) struct Connection {
    io: Box<dyn Io>,
    /// What was read and not used.
    pub(super) input: Bytes,
    /// How much is read at once: more, the more arrives.
    read_bytes: usize,
}

impl Connection {
    pub(super) fn new(io: impl Io + 'static) -> Self {
        Self { io: Box::new(io), input: Bytes::new(), read_bytes: READ_BYTES_MIN }
    }

    /// Whether its peer has neither closed it nor sent anything.
    pub(super) fn is_free(&mut self) -> bool {
        if !self.input.is_empty() {
            return false;
        }
        // A task that has done much would seem to have a connection that is free.
        let reading = pin!(unconstrained(poll_fn(|context| self.poll_read(context))));
        reading.poll(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    /// Returns the number of bytes. None is the connection's end.
    pub(super) fn poll_read(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let read = SPACE.with_borrow_mut(|space| {
            space.reserve(self.read_bytes);
            let bytes = ready!(poll_read_buf(Pin::new(&mut *self.io), context, space))?;
            if bytes > space.capacity() / HELD_PART_MIN {
                return Poll::Ready(Ok::<_, io::Error>(mem::take(space).freeze()));
            }
            let part = Bytes::copy_from_slice(space);
            space.clear();
            Poll::Ready(Ok(part))
        });
        let part = ready!(read)?;
        Poll::Ready(Ok(self.add(part)))
    }

    fn add(&mut self, part: Bytes) -> usize {
        let bytes = part.len();
        if bytes >= self.read_bytes {
            self.read_bytes = (self.read_bytes * 2).min(READ_BYTES_MAX);
        } else if bytes < self.read_bytes / 2 {
            self.read_bytes = (self.read_bytes / 2).max(READ_BYTES_MIN);
        }
        self.input = match self.input.is_empty() {
            true => part,
            false => [&*self.input, &*part].concat().into(),
        };
        bytes
    }

    /// Sends as much as it can, and waits for the answer's head. An answer may come before all of
    /// the request is sent.
    pub(super) fn poll_answer<B>(
        &mut self,
        request: &mut Outgoing<B>,
        context: &mut Context<'_>,
    ) -> Poll<Result<AnswerHead, Broken>>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let failed = match request.poll_send(&mut self.io, context) {
            // Nothing can answer.
            Poll::Ready(Err(error)) if !request.has_begun => return Poll::Ready(Err(error)),
            // The peer may have answered before it closed the connection, or says why.
            Poll::Ready(Err(error)) => Some(error),
            Poll::Ready(Ok(())) | Poll::Pending => None,
        };
        loop {
            if let Some(head) = read_answer_head(&mut self.input, &request.method)? {
                return Poll::Ready(Ok(head));
            }
            match self.poll_read(context) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(failed.unwrap_or(Broken::Closed))),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(Broken::Io(error))),
                Poll::Pending => {
                    return match failed {
                        // What the peer said last may be on its way: it or the end can be read.
                        None | Some(Broken::Io(_)) => Poll::Pending,
                        Some(error) => Poll::Ready(Err(error)),
                    };
                }
            }
        }
    }

    pub(super) fn poll_rest<B>(
        &mut self,
        request: &mut Outgoing<B>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        request.poll_send(&mut self.io, context)
    }
}

/// What of a request is not sent.
#[derive(Debug)]
pub(super) struct Outgoing<B> {
    method: Method,
    head: Bytes,
    /// Those of the body that are sent now. None is empty.
    parts: VecDeque<Bytes>,
    /// What the body has yet to give.
    body_bytes: u64,
    body: Option<B>,
    pub(super) has_begun: bool,
    /// TLS may hold back what was written.
    is_flushed: bool,
}

impl<B> Outgoing<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
{
    /// The body must know its length. The URI has only the path and the query.
    pub(super) fn new(request: Request<B>) -> Result<Self, Broken> {
        let body_bytes = request.body().size_hint().exact();
        let body_bytes = body_bytes.ok_or(Broken::Body("its length is unknown".into()))?;
        let head = request_head(&request, body_bytes).into();
        let (method, parts) = (request.method().clone(), VecDeque::new());
        let body = Some(request.into_body());
        Ok(Self { method, head, parts, body_bytes, body, has_begun: false, is_flushed: false })
    }

    pub(super) fn is_sent(&self) -> bool {
        self.is_flushed && self.head.is_empty() && self.parts.is_empty() && self.body.is_none()
    }

    fn poll_send(
        &mut self,
        io: &mut Box<dyn Io>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        loop {
            // Before the head is sent, which then goes with the first parts of the body.
            ready!(self.poll_parts(context))?;
            if self.head.is_empty() && self.parts.is_empty() {
                ready!(Pin::new(io).poll_flush(context)).map_err(Broken::Io)?;
                self.is_flushed = true;
                return Poll::Ready(Ok(()));
            }
            let mut slices = [IoSlice::new(&[]); 1 + PARTS_MAX];
            slices[0] = IoSlice::new(&self.head);
            for (slice, part) in slices[1..].iter_mut().zip(&self.parts) {
                *slice = IoSlice::new(part);
            }
            let slices = &slices[..=self.parts.len()];
            let written = Pin::new(&mut *io).poll_write_vectored(context, slices);
            let bytes = ready!(written).map_err(Broken::Io)?;
            if bytes == 0 {
                return Poll::Ready(Err(Broken::Io(io::ErrorKind::WriteZero.into())));
            }
            self.has_begun = true;
            self.remove(bytes);
        }
    }

    fn remove(&mut self, mut bytes: usize) {
        let of_head = bytes.min(self.head.len());
        self.head.advance(of_head);
        bytes -= of_head;
        while let Some(part) = self.parts.front_mut() {
            let of_part = bytes.min(part.len());
            part.advance(of_part);
            bytes -= of_part;
            if !part.is_empty() {
                return;
            }
            self.parts.pop_front();
        }
    }

    /// Takes what the body has, so that it is written at once. Drops the body at its end: nothing
    /// of it is held while the answer is awaited.
    fn poll_parts(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        while self.parts.len() < PARTS_MAX
            && let Some(body) = &mut self.body
        {
            let part = match Pin::new(body).poll_frame(context) {
                Poll::Pending if self.parts.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
                Poll::Ready(Some(Err(error))) => {
                    return Poll::Ready(Err(Broken::Body(error.into())));
                }
                Poll::Ready(None) => {
                    self.body = None;
                    Bytes::new()
                }
            };
            let left = self.body_bytes.checked_sub(part.len() as u64);
            let left = left.filter(|left| *left == 0 || self.body.is_some());
            let Some(left) = left else {
                return Poll::Ready(Err(Broken::Body("its length was another".into())));
            };
            self.body_bytes = left;
            if !part.is_empty() {
                self.parts.push_back(part);
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use http_body::{Frame, SizeHint};
    use tokio::io::AsyncReadExt as _;

    use super::*;

    struct Parts(VecDeque<Bytes>);

    impl Body for Parts {
        type Data = Bytes;
        type Error = io::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
            Poll::Ready(self.0.pop_front().map(|part| Ok(Frame::data(part))))
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(self.0.iter().map(|part| part.len() as u64).sum())
        }
    }

    #[tokio::test]
    async fn a_body_of_many_parts_arrives_whole_however_little_is_written_at_once() {
        let texts: Vec<String> = (0..40).map(|number| "x".repeat(number % 3) + "y").collect();
        for room in [1, 7, 4096] {
            let parts = texts.iter().map(|text| Bytes::from(text.clone())).collect();
            let request = Request::post("/a").body(Parts(parts)).unwrap();
            let mut outgoing = Outgoing::new(request).unwrap();
            let (client, mut server) = tokio::io::duplex(room);
            let mut io: Box<dyn Io> = Box::new(client);
            let sending = async {
                poll_fn(|context| outgoing.poll_send(&mut io, context)).await.unwrap();
                assert!(outgoing.is_sent());
                drop(io);
            };
            let mut sent = String::new();
            let (_, read) = tokio::join!(sending, server.read_to_string(&mut sent));
            read.unwrap();
            assert!(sent.ends_with(&format!("\r\n\r\n{}", texts.concat())), "{sent}");
        }
    }
}
