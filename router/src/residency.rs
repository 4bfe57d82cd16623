//! Knows which blocks of a prompt have resident KV on which worker, so that turns go to their KV.
//!
//! A block is a routing block, a hashed part of a prompt (see [`blocks::block`]). Nothing here
//! stores KV or asks an engine.

pub(crate) mod block_locator;
pub(crate) mod collector;
pub(crate) mod kv_index;
pub(crate) mod kv_stream;
pub mod learned;

use blocks::index::Overlap;

#[derive(Debug, Clone, Copy)]
pub struct PromptOverlap<'a> {
    /// An estimate if the router couldn't tokenize the prompt.
    pub tokens: u64,
    pub block_tokens: u64,
    /// Leading blocks of the prompt that are resident, by worker.
    pub overlap: &'a Overlap,
}
