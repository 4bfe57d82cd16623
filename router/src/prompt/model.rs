//! Makes the same tokens from text or messages as the engines that serve a model.

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

use blocks::block::Scheme;

#[cfg(not(feature = "text"))]
pub use self::absent::{AbsentModel as Model, Error};
#[cfg(feature = "text")]
pub use self::tokens::{Error, Model};
use super::{Blocks, PromptForm, memory::TokenizerMemory};

pub(super) struct TextPrompt<'a> {
    pub(super) form: PromptForm,
    pub(super) member_json: &'a dyn Fn(&str) -> Option<&'a str>,
    pub(super) scheme: Scheme<'a>,
    /// The engine's context.
    pub(super) tokens_max: u64,
    /// Some templates show the date.
    pub(super) unix_s: u64,
    /// `None`: it isn't bounded.
    pub(super) memory: Option<&'a TokenizerMemory>,
}

impl fmt::Debug for TextPrompt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Prompts must not appear in a log.
        f.debug_struct("TextPrompt").field("form", &self.form).finish_non_exhaustive()
    }
}
