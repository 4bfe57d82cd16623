//! Bounds the memory that tokenizing takes, in total and for each client.
//!
//! The figures are upper bounds, so that the pool's limit holds for any text.

use std::sync::Arc;

use crate::{
    metrics::Metrics,
    shares::{Share, SharedPool, Sharer},
};

/// Bytes of memory per byte of text while it is tokenized. Measured with `tokenizers` 0.23 by the
/// peak resident memory of a process that tokenizes 2 MB: 137 to 180 for one long word, Chinese and
/// code, 239 for prose, 323 for words of one letter. The crate keeps two offsets for each byte, and
/// each word with its own copy and tokens.
const TOKENIZE_BYTES_PER_BYTE: u64 = 320;
/// Bytes of memory per byte of a body while its messages are read and rendered: the values as JSON,
/// the values of the template, and the text. An estimate.
const READ_BYTES_PER_BYTE: u64 = 8;

/// The memory in which one client's prompt is tokenized.
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

    /// Returns the name of the client.
    pub(super) fn client(&self) -> Arc<str> {
        Arc::clone(&self.sharer.name)
    }

    /// Takes the memory in which a body's messages are read. `None` if there is none now, which is
    /// counted.
    pub(super) fn take_to_read(&self, body_bytes: usize) -> Option<Share> {
        self.take(READ_BYTES_PER_BYTE * body_bytes as u64)
    }

    /// Takes the memory in which a text is tokenized. `None` if there is none now, which is
    /// counted.
    pub(super) fn take_to_tokenize(&self, text_bytes: usize) -> Option<Share> {
        self.take(TOKENIZE_BYTES_PER_BYTE * text_bytes as u64)
    }

    /// Counts a prompt that isn't tokenized for another reason.
    pub(super) fn count_untokenized(&self, reason: &'static str) {
        self.metrics.count_untokenized_prompt(reason);
    }

    fn take(&self, bytes: u64) -> Option<Share> {
        let share = self.pool.take(&self.sharer, bytes.max(1), None).ok();
        if share.is_none() {
            self.count_untokenized("memory");
        }
        share
    }
}
