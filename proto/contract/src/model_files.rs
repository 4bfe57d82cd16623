//! Names, size limits and the hash of a model's tokenizer and chat template files.
//!
//! Routers fetch these files from agents, so that they can make the same tokens as the engine.

use sha2::{Digest as _, Sha256};

use crate::load::ModelFiles;

/// Of all files together. Agents don't send more. The JSON of a tokenizer with 250,000 tokens has
/// 35 MiB.
pub const BYTES_MAX: u64 = 64 << 20;
/// Of file data in one message.
pub const PART_BYTES_MAX: usize = 256 << 10;

/// The chat template that the engine uses, under this name wherever the model stores it. Absent if
/// the engine makes prompts from messages without a template.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The format is of Hugging Face's `tokenizers`.
pub const TOKENIZER: &str = "tokenizer.json";
/// Says which tokens are special, and their roles.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// One hash over names, sizes and contents. The caller adds the files in the order of their names.
#[derive(Debug, Clone, Default)]
pub struct FilesHasher {
    hash: Sha256,
    total_bytes: u64,
}

impl FilesHasher {
    /// The file before it must be complete.
    pub fn begin_file(&mut self, name: &str, bytes: u64) {
        self.hash.update(name.as_bytes());
        self.hash.update(bytes.to_le_bytes());
        self.total_bytes += bytes;
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
    }

    #[must_use]
    pub fn finish(self) -> ModelFiles {
        ModelFiles { hash: self.hash.finalize().into(), bytes: self.total_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashed(files: &[(&str, &str)]) -> ModelFiles {
        let mut hasher = FilesHasher::default();
        for (name, text) in files {
            hasher.begin_file(name, text.len() as u64);
            hasher.update(text.as_bytes());
        }
        hasher.finish()
    }

    #[test]
    fn other_contents_names_or_bounds_have_another_hash() {
        let files = hashed(&[("a", "xy"), ("b", "z")]);
        assert_eq!((files, files.bytes), (hashed(&[("a", "xy"), ("b", "z")]), 3));
        for other in [&[("a", "x"), ("b", "yz")][..], &[("a", "xyz")], &[("a", "xy"), ("c", "z")]] {
            assert_ne!(files.hash, hashed(other).hash, "{other:?}");
        }
    }
}
