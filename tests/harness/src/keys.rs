//! A file of API keys for tests.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

/// A key of the file: its name, its secret, and further lines of TOML.
pub type TestKey<'a> = (&'a str, &'a str, &'a str);

/// A key file in a folder of its own, which is removed with the value.
#[derive(Debug)]
pub struct KeyFixture {
    folder: TempDir,
}

impl KeyFixture {
    /// Writes a file with these keys.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub fn new(keys: &[TestKey<'_>]) -> io::Result<Self> {
        let fixture = Self { folder: tempfile::tempdir()? };
        fs::write(fixture.path(), key_text(keys))?;
        Ok(fixture)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("keys.toml")
    }

    /// Returns the folder of the file.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Replaces the file by another one with this text, as a deployment tool does.
    ///
    /// # Errors
    /// Fails if the file can't be replaced.
    pub fn replace(&self, text: &str) -> io::Result<()> {
        let new = self.folder.path().join("new.toml");
        fs::write(&new, text)?;
        fs::rename(new, self.path())
    }
}

/// Returns the text of a key file with these keys.
#[must_use]
pub fn key_text(keys: &[TestKey<'_>]) -> String {
    let entry = |(name, secret, rest): &TestKey<'_>| {
        let digest = Sha256::digest(secret);
        let sha256: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{sha256}\"\n{rest}\n")
    };
    keys.iter().map(entry).collect()
}
