//! A router without the feature `text` makes no tokens of text: there is no model.

use super::{Ask, Blocks, Files};

/// There is none.
#[derive(Debug)]
pub enum Model {}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
#[error("this router was built without the feature text")]
pub struct Error;

impl Model {
    /// Never.
    ///
    /// # Errors
    /// Always.
    pub fn new(_: &Files) -> Result<Self, Error> {
        Err(Error)
    }

    pub(in crate::prompt) fn blocks(&self, ask: &Ask<'_>) -> Option<Blocks> {
        // What it would have to look at.
        let _ = (ask.route, (ask.member)(""), ask.scheme, ask.tokens_max, ask.unix_s);
        match *self {}
    }

    pub(in crate::prompt) fn ids(&self, _: &Ask<'_>) -> Option<Vec<u32>> {
        match *self {}
    }
}
