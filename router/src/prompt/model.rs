//! One model's tokenizer and chat template, which make the tokens that its engine makes from text.
//!
//! It also remembers what it has tokenized of growing conversations.
//!
//! - `tokens`: the model itself; without the feature `text`, `absent` takes its place.
//! - `chat`: messages and tools in the form that templates see.
//! - `template`: a chat template, rendered as Hugging Face renders it.
//! - `python`: values in the form that Python writes.

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
use super::{Blocks, PromptForm};

/// A request whose prompt is text or messages, for which a model makes tokens.
pub(super) struct TextPrompt<'a> {
    pub(super) form: PromptForm,
    /// Returns a member of the body as JSON.
    pub(super) member: &'a dyn Fn(&str) -> Option<&'a str>,
    pub(super) scheme: Scheme<'a>,
    pub(super) tokens_max: u64,
    /// The current Unix time in seconds, as some templates show the date.
    pub(super) unix_s: u64,
}

impl fmt::Debug for TextPrompt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Prompts must not appear in a log.
        f.debug_struct("TextPrompt").field("form", &self.form).finish_non_exhaustive()
    }
}
