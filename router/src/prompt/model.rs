//! What makes tokens of text as one model's engine does: its tokenizer and chat template, and what
//! was tokenised of growing conversations.
//!
//! - `tokens`: the model itself; `absent` in its place without the feature `text`.
//! - `chat`: messages and tools as templates see them.
//! - `template`: a chat template, rendered as Hugging Face renders it.
//! - `python`: values as Python writes them.

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
pub use self::absent::{Error, Model};
#[cfg(feature = "text")]
pub use self::tokens::{Error, Model};
use super::{Blocks, Route};

/// The files of one model, as an agent hands them out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// `tokenizer.json`
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`, empty where there is none.
    pub config: Vec<u8>,
    /// `chat_template.jinja`, where messages become a prompt by it.
    pub template: Option<String>,
}

/// What a model is asked: the blocks of a request whose prompt is text or messages.
pub(super) struct Ask<'a> {
    pub(super) route: Route,
    /// A member of the body, as JSON.
    pub(super) member: &'a dyn Fn(&str) -> Option<&'a str>,
    pub(super) scheme: Scheme<'a>,
    pub(super) tokens_max: u64,
    /// Some templates show the date.
    pub(super) unix_s: u64,
}

impl fmt::Debug for Ask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Prompts are in no log.
        f.debug_struct("Ask").field("route", &self.route).finish_non_exhaustive()
    }
}
