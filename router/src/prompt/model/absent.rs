//! Stands in for the model in a router that is built without the feature `text`.

use super::{Blocks, TextPrompt};
use crate::fleet::tokenizer_files::TokenizerFiles;

/// No value of this type exists.
#[derive(Debug)]
pub enum AbsentModel {}

#[derive(Debug, thiserror::Error)]
#[error("this router was built without the feature \"text\"")]
pub struct Error;

impl AbsentModel {
    pub fn new(_: &TokenizerFiles) -> Result<Self, Error> {
        Err(Error)
    }

    pub(in crate::prompt) fn blocks(&self, text_prompt: &TextPrompt<'_>) -> Option<Blocks> {
        // These fields are otherwise unused without the feature.
        let _ = (
            text_prompt.form,
            (text_prompt.member_json)(""),
            text_prompt.scheme,
            text_prompt.tokens_max,
            text_prompt.unix_s,
            text_prompt.memory,
        );
        match *self {}
    }

    pub(in crate::prompt) fn has_more_tokens(&self, _: &TextPrompt<'_>, _: u64) -> bool {
        match *self {}
    }

    pub(in crate::prompt) fn token_ids(&self, _: &TextPrompt<'_>) -> Option<Vec<u32>> {
        match *self {}
    }
}
