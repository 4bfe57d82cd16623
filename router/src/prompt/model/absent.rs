//! Stands in for the model in a router without the feature `text`, which can't tokenize text.

use super::{Ask, Blocks};
use crate::fleet::tokenizer_files::TokenizerFiles;

/// A model; without the feature `text` there can't be one.
#[derive(Debug)]
pub enum Model {}

/// The router was built without the feature `text`.
#[derive(Debug, thiserror::Error)]
#[error("this router was built without the feature \"text\"")]
pub struct Error;

impl Model {
    /// Always fails.
    ///
    /// # Errors
    /// Always.
    pub fn new(_: &TokenizerFiles) -> Result<Self, Error> {
        Err(Error)
    }

    pub(in crate::prompt) fn blocks(&self, ask: &Ask<'_>) -> Option<Blocks> {
        // Uses the fields that are otherwise unused without the feature.
        let _ = (ask.route, (ask.member)(""), ask.scheme, ask.tokens_max, ask.unix_s);
        match *self {}
    }

    pub(in crate::prompt) fn ids(&self, _: &Ask<'_>) -> Option<Vec<u32>> {
        match *self {}
    }
}
