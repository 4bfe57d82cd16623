//! Reads a key file. `reload` reads it again when it changes, and `keys` has the keys themselves.

use std::path::Path;

use super::keys::{self, KeySet};
use crate::reload::Source;

#[must_use]
pub fn source(path: &Path) -> Source<KeySet> {
    let shown = path.display().to_string();
    Source::new("keys", vec![path.to_owned()], move |contents| {
        parse(&contents[0]).map_err(|error| format!("{shown}: {error}"))
    })
}

fn parse(content: &[u8]) -> Result<KeySet, keys::Error> {
    let text = std::str::from_utf8(content).map_err(|error| {
        let before = content.get(..error.valid_up_to()).unwrap_or_default();
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        keys::Error::Form { line, message: "the text is not UTF-8".to_owned() }
    })?;
    KeySet::parse(text)
}
