//! Reads request bodies within each client's share of memory, and keeps them for a second try.
//!
//! A turn may go to a second worker, so its body is kept until the answer begins; if that isn't
//! streamed, until all of it is there. Once the HTTP client has sent a body, the copy gives way,
//! oldest first, to any body that finds no memory. Its turn is then not retried: the client gets
//! the first worker's refusal.

mod text_meter;

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::Extensions;
use http_body::Body;
use parking_lot::Mutex;
use service::budget::read_limited;

use self::text_meter::TextMeter;
use super::error::{Error, Limit};
use crate::shares::{Refused, Share, SharedPool, Sharer};

/// Bodies take memory in steps of this size, so that the pool is asked rarely.
const STEP_BYTES: u64 = 4 * 1024;
/// Most bytes of text in a body per token of the context. The longest tokens of common vocabularies
/// are runs of 128 spaces; prose and code have 4 bytes per token, and 6 for each byte if a client
/// escapes all of them.
const TEXT_BYTES_PER_TOKEN: usize = 64;
/// A body up to this size is never refused for its text, which leaves room for tools and metadata.
const TEXT_BYTES_MIN: usize = 1 << 20;
/// Histories of agents become 30 times longer at most, and white space a million times.
const DECOMPRESSED_RATIO_MAX: usize = 100;
/// A body may always be decompressed to this size, however short it was.
const DECOMPRESSED_BYTES_MIN: usize = 1 << 20;
/// At this many remembered bodies, those that are gone are first removed.
const SENT_BODIES_MIN: usize = 64;

#[derive(Debug)]
pub(crate) struct Bodies {
    pool: Arc<SharedPool>,
    body_bytes_max: usize,
    sent: Arc<Mutex<SentBodies>>,
}

/// How a compressed body arrives; among the extensions of its request.
#[derive(Debug, Default)]
pub(crate) struct Compression {
    /// Compressed bytes, as the client sends them.
    received_bytes: AtomicUsize,
}

impl Compression {
    /// `None` if the body isn't decompressed.
    pub(crate) fn find(extensions: &Extensions) -> Option<&Self> {
        extensions.get::<Arc<Self>>().map(|compression| &**compression)
    }

    pub(crate) fn count(&self, bytes: usize) {
        self.received_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn bytes_max(&self) -> usize {
        let received_bytes = self.received_bytes.load(Ordering::Relaxed);
        received_bytes.saturating_mul(DECOMPRESSED_RATIO_MAX).max(DECOMPRESSED_BYTES_MIN)
    }
}

/// Oldest first.
#[derive(Debug, Default)]
struct SentBodies {
    queue: VecDeque<Weak<RetryBody>>,
    /// The length of the queue at which bodies that are gone are removed next.
    cleanup_at: usize,
}

#[derive(Debug)]
pub(crate) struct ReceivedBody {
    pub(crate) bytes: Bytes,
    _share: Share,
}

#[derive(Debug)]
pub(crate) struct RetryBody {
    /// `None` after the body has given way.
    bytes: Mutex<Option<Bytes>>,
    sent: Arc<Mutex<SentBodies>>,
}

impl Bodies {
    pub(crate) fn new(pool: Arc<SharedPool>, body_bytes_max: usize) -> Self {
        Self { pool, body_bytes_max, sent: Arc::default() }
    }

    /// `compression` is there if the body is decompressed on its way. A prompt longer than
    /// `context_tokens`, the longest context of any worker, is refused as soon as so much has
    /// arrived.
    pub(crate) async fn read<B>(
        &self,
        body: B,
        sharer: &Sharer,
        compression: Option<&Compression>,
        context_tokens: impl Fn() -> Option<u64>,
    ) -> Result<ReceivedBody, Error>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: std::fmt::Display,
    {
        let refuse = |refused| Error::Limit { limit: Limit::BodyBytes, refused };
        let mut share = self.pool.empty_share(sharer);
        self.grow(&mut share, STEP_BYTES).map_err(refuse)?;
        let mut text = TextMeter::default();
        let bytes = read_limited(body, self.body_bytes_max, |kept, received_bytes| {
            if kept.len() > TEXT_BYTES_MIN
                && let Some(context_tokens) = context_tokens()
            {
                text.read(kept);
                let text_bytes_max = text_bytes_max(context_tokens);
                if text.text_bytes() > text_bytes_max {
                    return Err(Error::BodyOverContext { context_tokens, text_bytes_max });
                }
            }
            if compression.is_some_and(|compression| received_bytes > compression.bytes_max()) {
                return Err(Error::BodyRatio { ratio_max: DECOMPRESSED_RATIO_MAX });
            }
            // What a decompressor remembers is no longer than what it has made.
            let bodies = if compression.is_some() { 2 } else { 1 };
            let missing_bytes = (bodies * received_bytes as u64).saturating_sub(share.units());
            if missing_bytes > 0 {
                let step = missing_bytes.next_multiple_of(STEP_BYTES);
                self.grow(&mut share, step).map_err(refuse)?;
            }
            Ok(())
        })
        .await?;
        share.shrink((bytes.len() as u64).next_multiple_of(STEP_BYTES).max(STEP_BYTES));
        Ok(ReceivedBody { bytes, _share: share })
    }

    pub(crate) fn keep(&self, held_body: ReceivedBody) -> Arc<RetryBody> {
        struct Owner(ReceivedBody);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                &self.0.bytes
            }
        }
        // The last drop of these bytes returns the body's share.
        let bytes = Bytes::from_owner(Owner(held_body));
        Arc::new(RetryBody { bytes: Mutex::new(Some(bytes)), sent: Arc::clone(&self.sent) })
    }

    /// If there is no memory, sent bodies give way.
    fn grow(&self, share: &mut Share, bytes: u64) -> Result<(), Refused> {
        loop {
            let Err(refused) = share.grow(bytes) else { return Ok(()) };
            let Some(oldest) = self.sent.lock().pop() else { return Err(refused) };
            // The memory returns here, while no lock is held.
            let bytes = oldest.bytes.lock().take();
            drop(bytes);
        }
    }
}

impl SentBodies {
    fn push(&mut self, body: Weak<RetryBody>) {
        if self.queue.len() >= self.cleanup_at.max(SENT_BODIES_MIN) {
            self.queue.retain(|body| body.strong_count() > 0);
            self.cleanup_at = 2 * self.queue.len();
        }
        self.queue.push_back(body);
    }

    fn pop(&mut self) -> Option<Arc<RetryBody>> {
        while let Some(body) = self.queue.pop_front() {
            if let Some(body) = body.upgrade() {
                return Some(body);
            }
        }
        None
    }
}

impl ReceivedBody {
    /// The result may be longer than the bytes by a few bytes only.
    pub(crate) fn change(&mut self, change: impl FnOnce(Bytes) -> Bytes) {
        self.bytes = change(std::mem::take(&mut self.bytes));
    }

    #[cfg(test)]
    fn held_bytes(&self) -> u64 {
        self._share.units()
    }
}

impl RetryBody {
    pub(crate) fn bytes(&self) -> Option<Bytes> {
        self.bytes.lock().clone()
    }

    /// The bytes count as sent when the HTTP client drops them. Then this body may give way.
    pub(crate) fn bytes_to_send(self: &Arc<Self>) -> Option<Bytes> {
        struct Sending {
            bytes: Bytes,
            body: Weak<RetryBody>,
            sent: Arc<Mutex<SentBodies>>,
        }
        impl AsRef<[u8]> for Sending {
            fn as_ref(&self) -> &[u8] {
                &self.bytes
            }
        }
        impl Drop for Sending {
            fn drop(&mut self) {
                self.sent.lock().push(Weak::clone(&self.body));
            }
        }
        let (body, sent) = (Arc::downgrade(self), Arc::clone(&self.sent));
        Some(Bytes::from_owner(Sending { bytes: self.bytes()?, body, sent }))
    }
}

/// Media in the body don't count.
fn text_bytes_max(context_tokens: u64) -> usize {
    let tokens = usize::try_from(context_tokens).unwrap_or(usize::MAX);
    tokens.saturating_mul(TEXT_BYTES_PER_TOKEN).max(TEXT_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        auth::Caller,
        shares::{PoolSizes, Shares},
    };

    const MIB: usize = 1 << 20;

    fn sharer(name: &str) -> Sharer {
        let caller = Caller {
            principal: name.into(),
            is_admin: false,
            limits: Arc::default(),
            announce: Arc::default(),
        };
        Sharer::new(&caller, None)
    }

    fn bodies(pool_bytes: usize) -> Bodies {
        let sizes = PoolSizes { requests: 1, turns: 1, body_bytes: pool_bytes, tokenizer_bytes: 1 };
        Bodies::new(Arc::clone(&Shares::new(sizes).body_bytes), 64 * MIB)
    }

    /// A body in chunks of 64 KiB, as it comes from a connection.
    async fn read(bodies: &Bodies, name: &str, bytes: &Bytes) -> Result<ReceivedBody, Error> {
        let chunks: Vec<_> = bytes
            .chunks(65_536)
            .map(|chunk| {
                Ok::<_, std::convert::Infallible>(http_body::Frame::data(bytes.slice_ref(chunk)))
            })
            .collect();
        let body = http_body_util::StreamBody::new(tokio_stream::iter(chunks));
        bodies.read(body, &sharer(name), None, || Some(10_000)).await
    }

    #[tokio::test]
    async fn a_client_with_many_large_bodies_leaves_memory_to_others() {
        let (bodies, large) = (bodies(64 * MIB), Bytes::from(vec![b' '; 900_000]));
        let mut kept = vec![];
        let refused = loop {
            match read(&bodies, "hog", &large).await {
                Ok(body) => kept.push(body),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(refused, Error::Limit { refused: Refused::Share, .. }),
            "{refused}, {} bodies",
            kept.len()
        );
        assert!(kept.iter().map(ReceivedBody::held_bytes).sum::<u64>() > 50 * MIB as u64);
        assert!(read(&bodies, "other", &large).await.is_ok());
    }

    #[tokio::test]
    async fn a_sent_body_gives_way_and_an_unsent_one_does_not() {
        let (bodies, large) = (bodies(2 * MIB), Bytes::from(vec![b' '; 900_000]));
        let kept = bodies.keep(read(&bodies, "hog", &large).await.unwrap());
        let other = bodies.keep(read(&bodies, "hog", &large).await.unwrap());
        assert!(read(&bodies, "hog", &large).await.is_err());
        assert!(kept.bytes().is_some() && other.bytes().is_some());
        drop(other.bytes_to_send());
        let third = read(&bodies, "hog", &large).await;
        assert!(third.is_ok(), "{third:?}");
        assert!(kept.bytes().is_some() && other.bytes().is_none());
        assert!(other.bytes_to_send().is_none());
    }

    #[tokio::test]
    async fn a_body_that_is_decompressed_takes_twice_its_memory_and_grows_within_bounds() {
        let bodies = bodies(64 * MIB);
        let compression = Compression::default();
        compression.count(20_000);
        let read = async |bytes: usize| {
            let body = http_body_util::Full::new(Bytes::from(vec![b' '; bytes]));
            bodies.read(body, &sharer("a"), Some(&compression), || None).await
        };
        let body = read(1_999_000).await.unwrap();
        assert!(body.held_bytes() < 2_100_000, "the decompressor is gone: {}", body.held_bytes());
        let refused = read(2_001_000).await.unwrap_err();
        assert!(matches!(refused, Error::BodyRatio { .. }), "{refused}");
        compression.count(10 * MIB);
        let refused = read(32 * MIB).await.unwrap_err();
        assert!(matches!(refused, Error::Limit { .. }), "{refused}");
    }

    #[tokio::test]
    async fn text_that_fits_no_context_is_refused_before_it_has_arrived() {
        let bodies = bodies(512 * MIB);
        let padding = Bytes::from(vec![b' '; 8 * MIB]);
        let refused = read(&bodies, "a", &padding).await.unwrap_err();
        assert!(matches!(refused, Error::BodyOverContext { .. }), "{refused}");
        let image = [b"{\"image_data\":\"".as_slice(), &padding].concat();
        assert!(read(&bodies, "a", &image.into()).await.is_ok());
        let text = [b"{\"x\":\"data:\",\"text\":\"".as_slice(), &padding].concat();
        let refused = read(&bodies, "a", &text.into()).await.unwrap_err();
        assert!(matches!(refused, Error::BodyOverContext { .. }), "{refused}");
        assert!(read(&bodies, "a", &padding.slice(..MIB)).await.is_ok());
    }
}
