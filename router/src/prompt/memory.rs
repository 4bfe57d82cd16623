//! Bounds the memory that tokenizing takes, in total and for each client.

use std::sync::Arc;

use crate::{
    metrics::Metrics,
    shares::{Share, SharedPool, Sharer},
};

/// An upper bound, so that the pool's limit holds for any text. Measured with `tokenizers` 0.23 by
/// the peak resident memory of a process that tokenizes 2 MB: 137 to 180 for one long word, Chinese
/// and code, 239 for prose, 323 for words of one letter. The crate keeps two offsets for each byte,
/// and each word with its own copy and tokens.
#[cfg(feature = "text")]
const TOKENIZE_BYTES_PER_BYTE: u64 = 320;
/// Of a body whose messages are read and rendered: the values as JSON, the values of the template,
/// and the text. An estimate.
const READ_BYTES_PER_BYTE: u64 = 8;

#[derive(Debug, Clone)]
pub(crate) struct TokenizerMemory {
    pool: Arc<SharedPool>,
    sharer: Sharer,
    metrics: Arc<Metrics>,
}

impl TokenizerMemory {
    pub(crate) fn new(pool: &Arc<SharedPool>, sharer: &Sharer, metrics: &Arc<Metrics>) -> Self {
        Self { pool: Arc::clone(pool), sharer: sharer.clone(), metrics: Arc::clone(metrics) }
    }

    #[cfg(feature = "text")]
    pub(super) fn client(&self) -> Arc<str> {
        Arc::clone(&self.sharer.name)
    }

    pub(super) fn take_to_read(&self, body_bytes: usize) -> Option<Share> {
        self.take(READ_BYTES_PER_BYTE * body_bytes as u64)
    }

    #[cfg(feature = "text")]
    pub(super) fn take_to_tokenize(&self, text_bytes: usize) -> Option<Share> {
        self.take(TOKENIZE_BYTES_PER_BYTE * text_bytes as u64)
    }

    /// Counts a prompt for another reason than memory, which `take` counts.
    pub(super) fn count_untokenized(&self, reason: &'static str) {
        self.metrics.count_untokenized_prompt(reason);
    }

    /// `None` if there is none now.
    fn take(&self, bytes: u64) -> Option<Share> {
        let share = self.pool.take(&self.sharer, bytes.max(1), None).ok();
        if share.is_none() {
            self.count_untokenized("memory");
        }
        share
    }
}
