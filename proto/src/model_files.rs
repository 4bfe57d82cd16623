//! Names, size limits and hash of the files with which an engine makes tokens. No I/O.

use sha2::{Digest as _, Sha256};

use crate::load::ModelFiles;

/// Bytes of all files together, at most. A tokenizer of 250,000 tokens has 35 MiB as JSON. Agents
/// don't hand out larger models.
pub const BYTES_MAX: u64 = 64 << 20;
/// Bytes of file data in one message, at most.
pub const PART_BYTES_MAX: usize = 256 << 10;

/// The chat template in force, whichever file of the model it comes from. Absent if the engine
/// turns messages into prompts in another way. First in the order of names.
pub const TEMPLATE: &str = "chat_template.jinja";
/// Vocabulary and rules, in the format of Hugging Face's `tokenizers`.
pub const TOKENIZER: &str = "tokenizer.json";
/// Special tokens, by role.
pub const CONFIG: &str = "tokenizer_config.json";

/// Computes the identity of a set of files from their contents; files come in the order of their
/// names.
#[derive(Debug, Clone, Default)]
pub struct FilesHasher {
    hash: Sha256,
    bytes: u64,
}

impl FilesHasher {
    /// Begins the next file, whose size is `bytes`.
    pub fn begin_file(&mut self, name: &str, bytes: u64) {
        self.hash.update(name.as_bytes());
        self.hash.update(bytes.to_le_bytes());
        self.bytes += bytes;
    }

    /// Adds the next bytes of the current file.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
    }

    /// Returns the hash and total size of all files.
    #[must_use]
    pub fn finish(self) -> ModelFiles {
        ModelFiles { hash: self.hash.finalize().into(), bytes: self.bytes }
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
