//! Which blocks of a prompt are resident on which worker.
//!
//! - `kv_index`: one task per agent, which follows the agent's stream of resident blocks and keeps
//!   the [`index`] up to date; `kv_stream` checks the order of the stream's events.
//! - [`learned`]: which prompts each worker was given, for agents that don't report their blocks.
//! - `block_locator`: counts the blocks of a turn's prompt on each worker, from both sources.
//! - `collector`: metrics of the index.

pub(crate) mod block_locator;
pub(crate) mod collector;
pub mod index;
pub(crate) mod kv_index;
pub(crate) mod kv_stream;
pub mod learned;

use self::index::Overlap;

/// A prompt whose tokens are known, and how much of it is resident on each worker.
#[derive(Debug, Clone, Copy)]
pub struct PromptOverlap<'a> {
    /// Number of tokens in the prompt.
    pub tokens: u64,
    /// Number of tokens in a block of `overlap`.
    pub block_tokens: u64,
    /// Number of resident leading blocks by worker.
    pub overlap: &'a Overlap,
}
