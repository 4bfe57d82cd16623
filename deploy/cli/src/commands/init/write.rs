//! Writes the files of a plan. Files that exist stay as they are, unless the user wants otherwise.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use super::shown;
use crate::{
    error::Error,
    init::{Content, Plan, Wishes},
};

/// A file may have 8 tokens of 1024 characters, and comments.
const TOKEN_BYTES_MAX: u64 = 64 * 1024;
const TOKEN_RANDOM_BYTES: usize = 32;

/// Writes no file if one of them exists and may not be replaced.
pub(super) fn write(plan: &Plan, wishes: &Wishes, may_replace: bool) -> Result<(), Error> {
    let paths = plan.paths(wishes);
    let existing = paths.iter().find(|path| path.symlink_metadata().is_ok());
    if let Some(path) = existing.filter(|_| !may_replace) {
        return Err(Error::FileExists { path: path.display().to_string() });
    }
    for (file, path) in plan.files.iter().zip(paths) {
        write_file(&file.content, &path, wishes.token_file.as_deref())
            .map_err(|error| Error::FileWrite { path: path.display().to_string(), error })?;
    }
    Ok(())
}

fn write_file(content: &Content, path: &Path, token_file: Option<&Path>) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let (mode, bytes) = match content {
        Content::Text(text) => (0o644, text.clone().into_bytes()),
        Content::Script(text) => (0o755, text.clone().into_bytes()),
        // With --force too, agents that run go on knowing their token.
        Content::Token if token_file.is_none() && path.exists() => return Ok(()),
        Content::Token => (0o600, token_file.map_or_else(new_token, read_token)?),
    };
    // A new file with its own mode takes the place of the old one, so that nobody reads half of it
    // and no secret is in a file that others may read.
    let fresh = path.with_extension("new");
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    fs::rename(&fresh, path)
}

fn read_token(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = vec![];
    File::open(path)?.take(TOKEN_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn new_token() -> io::Result<Vec<u8>> {
    let mut random = [0; TOKEN_RANDOM_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{digits}\n").into_bytes())
}

pub(super) fn as_text(plan: &Plan) -> String {
    let files = plan.files.iter();
    files.map(|file| format!("# ---- {}\n{}\n", file.name, shown(&file.content))).collect()
}
