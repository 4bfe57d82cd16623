//! The files by which an engine makes tokens, as agent and router name and check them. No I/O.

use sha2::{Digest as _, Sha256};

use crate::load::ModelFiles;

/// Together, bytes: a tokenizer of 250,000 tokens has 35 MiB as JSON. More is not handed out.
pub const BYTES_MAX: u64 = 64 << 20;
/// Of one message, bytes.
pub const PART_BYTES_MAX: usize = 256 << 10;

/// The chat template that is in force, whatever file it is from; absent where the engine makes
/// prompts of messages in another way. First by name.
pub const TEMPLATE: &str = "chat_template.jinja";
/// Vocabulary and rules, in the form of Hugging Face's `tokenizers`.
pub const TOKENIZER: &str = "tokenizer.json";
/// Special tokens by their roles.
pub const CONFIG: &str = "tokenizer_config.json";

/// Names files by their contents, in the order of their names.
#[derive(Debug, Clone, Default)]
pub struct Naming {
    hash: Sha256,
    bytes: u64,
}

impl Naming {
    /// A file begins.
    pub fn file(&mut self, name: &str, bytes: u64) {
        self.hash.update(name.as_bytes());
        self.hash.update(bytes.to_le_bytes());
        self.bytes += bytes;
    }

    /// The next bytes of the file that began last.
    pub fn data(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
    }

    /// The name of all of them.
    #[must_use]
    pub fn finish(self) -> ModelFiles {
        ModelFiles { hash: self.hash.finalize().into(), bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(files: &[(&str, &str)]) -> ModelFiles {
        let mut naming = Naming::default();
        for (name, text) in files {
            naming.file(name, text.len() as u64);
            naming.data(text.as_bytes());
        }
        naming.finish()
    }

    #[test]
    fn other_contents_names_or_bounds_have_another_name() {
        let files = named(&[("a", "xy"), ("b", "z")]);
        assert_eq!((files, files.bytes), (named(&[("a", "xy"), ("b", "z")]), 3));
        for other in [&[("a", "x"), ("b", "yz")][..], &[("a", "xyz")], &[("a", "xy"), ("c", "z")]] {
            assert_ne!(files.hash, named(other).hash, "{other:?}");
        }
    }
}
