//! Knows which blocks of a prompt have resident KV on which worker, so that turns go to their KV.
//!
//! A block is a routing block, a hashed part of a prompt (see [`proto::block`]). A worker is one
//! rank of an engine.
//!
//! The tasks of turns call `block_locator`, and pass its counts to `placement`, which chooses the
//! worker. Nothing here stores KV or asks an engine.
//!
//! - [`index`]: finds a prompt's leading blocks on each worker.
//! - `kv_index`: follows each agent's stream of resident blocks and keeps the [`index`] up to date.
//! - `kv_stream`: checks the order of that stream's messages.
//! - [`learned`]: the prompts that each worker was given, for agents that don't report blocks.
//! - `block_locator`: counts the blocks of a turn's prompt on each worker, from both sources.
//! - `collector`: metrics of the index.

pub(crate) mod block_locator;
pub(crate) mod collector;
pub mod index;
pub(crate) mod kv_index;
pub(crate) mod kv_stream;
pub mod learned;

use self::index::Overlap;

/// The length of a prompt, and how much of it is resident on each worker.
#[derive(Debug, Clone, Copy)]
pub struct PromptOverlap<'a> {
    /// Number of tokens in the prompt; an estimate if the router couldn't tokenize the prompt.
    pub tokens: u64,
    /// Number of tokens in a block of `overlap`.
    pub block_tokens: u64,
    /// Number of the prompt's leading blocks that are resident, by worker.
    pub overlap: &'a Overlap,
}
