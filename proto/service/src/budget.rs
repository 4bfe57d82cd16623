//! Limits the bytes of request bodies in memory, per body and in total.
//!
//! A body's share of the budget returns when the body is dropped. Answers are streamed, and take no
//! budget.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::refusal::{Code, Refusal};

/// The budget counts in units of 1 KiB, because a semaphore is only guaranteed to count to 2^29.
const UNIT_BYTES: usize = 1024;

/// Enough for 64 MiB at 9 Mbit/s. Limited because a body holds budget while it arrives; in an
/// agent, its turn also keeps the session reserved, so that the session's other turns wait.
pub const BODY_TIME_MAX: Duration = Duration::from_secs(60);
const YIELD_BYTES: usize = 128 * 1024;
/// Initial capacity of a body's buffer, in bytes. It is enough for most turns of coding agents.
const BUFFER_BYTES_INITIAL: usize = 64 * 1024;

#[derive(Debug, Clone)]
pub struct BodyBudget {
    units: Arc<Semaphore>,
    body_bytes_max: usize,
}

#[derive(Debug)]
pub struct HeldBody {
    pub bytes: Bytes,
    /// Returns to the budget on drop.
    _share: OwnedSemaphorePermit,
}

impl BodyBudget {
    #[must_use]
    pub fn new(body_bytes_max: usize, in_flight_bytes_max: usize) -> Self {
        let units = (in_flight_bytes_max / UNIT_BYTES).clamp(1, Semaphore::MAX_PERMITS);
        Self { units: Arc::new(Semaphore::new(units)), body_bytes_max }
    }

    /// # Errors
    /// Status 413 over the limit per body, 503 over the total limit, 400 if the client aborts, 408
    /// after [`BODY_TIME_MAX`].
    pub async fn read<B>(&self, body: B) -> Result<HeldBody, Refusal>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        // Only bytes that have arrived take budget. Otherwise a few clients that announce large
        // bodies and send nothing would take all of it.
        let mut share = self.reserve(1)?;
        let bytes = read_limited(body, self.body_bytes_max, |_, received_bytes| {
            let share_bytes = share.num_permits() * UNIT_BYTES;
            if received_bytes > share_bytes {
                share.merge(self.reserve(received_bytes - share_bytes)?);
            }
            Ok(())
        })
        .await?;
        Ok(HeldBody { bytes, _share: share })
    }

    fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES))
            .map_err(|_| too_large(self.body_bytes_max))?;
        Arc::clone(&self.units).try_acquire_many_owned(units).map_err(|_| {
            let message = "too many request bytes are in flight; try again";
            Refusal::new(Code::BodyBytesInFlight, message)
        })
    }
}

/// Before more bytes are kept, calls `grow` with the bytes kept so far and their number with the
/// new ones. If that fails, nothing more is read.
pub async fn read_limited<B, E>(
    body: B,
    body_bytes_max: usize,
    grow: impl FnMut(&[u8], usize) -> Result<(), E>,
) -> Result<Bytes, E>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    E: From<Refusal>,
{
    let result = tokio::time::timeout(BODY_TIME_MAX, read_all(body, body_bytes_max, grow)).await;
    result.unwrap_or_else(|_| {
        let message = format!("the body did not arrive within {BODY_TIME_MAX:?}");
        Err(Refusal::new(Code::BodyLate, message).into())
    })
}

async fn read_all<B, E>(
    mut body: B,
    body_bytes_max: usize,
    mut grow: impl FnMut(&[u8], usize) -> Result<(), E>,
) -> Result<Bytes, E>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
    E: From<Refusal>,
{
    let announced_bytes = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced_bytes > body_bytes_max {
        return Err(too_large(body_bytes_max).into());
    }
    let mut bytes = BytesMut::with_capacity(announced_bytes.min(BUFFER_BYTES_INITIAL));
    let mut yield_at = YIELD_BYTES;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            Refusal::new(Code::BodyIncomplete, format!("the body did not arrive: {error}"))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        let received_bytes = bytes.len() + data.len();
        if received_bytes > body_bytes_max {
            return Err(too_large(body_bytes_max).into());
        }
        grow(&bytes, received_bytes)?;
        bytes.extend_from_slice(&data);
        if bytes.len() >= yield_at {
            // The next frames may all be there: a body that is decompressed on its way, say.
            yield_at = bytes.len() + YIELD_BYTES;
            tokio::task::yield_now().await;
        }
    }
    Ok(bytes.freeze())
}

fn too_large(body_bytes_max: usize) -> Refusal {
    let message = format!("the body is over body_bytes_max = {body_bytes_max} bytes");
    Refusal::new(Code::BodyTooLarge, message)
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;

    use super::*;

    #[tokio::test]
    async fn a_dropped_body_gives_its_share_back() {
        let budget = BodyBudget::new(3 * UNIT_BYTES, 4 * UNIT_BYTES);
        let body = || Full::new(Bytes::from(vec![7; 3 * UNIT_BYTES]));
        let held = budget.read(body()).await.unwrap();
        assert_eq!(held.bytes.len(), 3 * UNIT_BYTES);
        let refused = budget.read(body()).await.unwrap_err();
        assert_eq!(refused.code, Code::BodyBytesInFlight);
        drop(held);
        assert!(budget.read(body()).await.is_ok());
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_refused() {
        let frames = [Ok(http_body::Frame::data(Bytes::from_static(b"{"))), Err("gone")];
        let body = http_body_util::StreamBody::new(tokio_stream::iter(frames));
        let refused = BodyBudget::new(1000, 1 << 20).read(body).await.unwrap_err();
        assert_eq!(refused.code, Code::BodyIncomplete);
    }

    /// A body that announces 4,000 bytes and never sends any.
    struct Silent;

    impl Body for Silent {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
            std::task::Poll::Pending
        }

        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(4000)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_takes_no_budget_and_is_refused() {
        let budget = BodyBudget::new(4 * UNIT_BYTES, 6 * UNIT_BYTES);
        let silent = budget.read(Silent);
        let busy = async {
            let held = budget.read(Full::new(Bytes::from(vec![7; 4 * UNIT_BYTES]))).await;
            assert!(held.is_ok(), "{held:?}");
        };
        let (refused, ()) = tokio::join!(silent, busy);
        assert_eq!(refused.unwrap_err().code, Code::BodyLate);
    }

    #[tokio::test]
    async fn one_byte_over_the_limit_is_413_announced_or_not() {
        let budget = BodyBudget::new(1000, 1 << 20);
        let bytes = Bytes::from(vec![0; 1001]);
        let announced = budget.read(Full::new(bytes.clone())).await.unwrap_err();
        assert_eq!(announced.code, Code::BodyTooLarge);
        let halves = [bytes.slice(..500), bytes.slice(500..)]
            .map(|half| Ok::<_, std::convert::Infallible>(http_body::Frame::data(half)));
        let stream = http_body_util::StreamBody::new(tokio_stream::iter(halves));
        let streamed = budget.read(stream).await.unwrap_err();
        assert_eq!(streamed.code, Code::BodyTooLarge);
        assert!(budget.read(Full::new(bytes.slice(..1000))).await.is_ok());
    }
}
