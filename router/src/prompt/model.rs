//! Makes the same tokens from text or messages as the engines that serve a model.
//!
//! A [`Model`] has the model's tokenizer and chat template, from files that `prompt::models` has
//! fetched. It also caches the blocks of the texts that it has tokenized. `prompt` uses it for
//! prompts that aren't token ids yet. It doesn't detokenize, and it runs no model.
//!
//! - `tokens`: the [`Model`]. A router built without the feature `text` has `absent` instead.
//! - `chat`: messages and tools in the form that SGLang passes to templates.
//! - `template`: a chat template, rendered as Hugging Face renders it.
//! - `python`: writes values as Python does.

#[cfg(not(feature = "text"))]
mod absent;
#[cfg(feature = "text")]
mod chat;
#[cfg(feature = "text")]
mod python;
#[cfg(feature = "text")]
mod template;
#[cfg(feature = "text")]
mod tokens;

use std::fmt;

use proto::block::Scheme;

#[cfg(not(feature = "text"))]
pub use self::absent::{AbsentModel as Model, Error};
#[cfg(feature = "text")]
pub use self::tokens::{Error, Model};
use super::{Blocks, PromptForm, memory::TokenizerMemory};

/// A request whose prompt is text or messages, with all that a [`Model`] needs to make its tokens.
pub(super) struct TextPrompt<'a> {
    pub(super) form: PromptForm,
    /// Returns the JSON of the body's member with this key.
    pub(super) member_json: &'a dyn Fn(&str) -> Option<&'a str>,
    /// Everything besides the tokens that the hashes of the prompt's blocks depend on.
    pub(super) scheme: Scheme<'a>,
    /// The engine's context length.
    pub(super) tokens_max: u64,
    /// The current Unix time in seconds. Some templates show the date.
    pub(super) unix_s: u64,
    /// Bounds the memory for tokenizing. `None`: it isn't bounded.
    pub(super) memory: Option<&'a TokenizerMemory>,
}

impl fmt::Debug for TextPrompt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Prompts must not appear in a log.
        f.debug_struct("TextPrompt").field("form", &self.form).finish_non_exhaustive()
    }
}
