//! Opens files in a folder that belongs to this process's user alone.
//!
//! Other users must neither read nor replace them. The folder is checked before anything in it is
//! opened, and files are opened relative to the checked folder: one that is renamed meanwhile
//! changes nothing. No link is followed. New folders have mode 0700, files 0600.

use std::{
    fs::{DirBuilder, File},
    io::{self, Write as _},
    os::{fd::OwnedFd, unix::fs::DirBuilderExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::{FileType, Mode, OFlags};

const WRITABLE_BY_OTHERS: u32 = 0o022;
const USABLE_BY_OTHERS: u32 = 0o077;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{folder} belongs to user {owner}, and this process runs as user {uid}: name a folder of \
         your own, or start this process as user {owner}"
    )]
    OfAnotherUser { folder: PathBuf, owner: u32, uid: u32 },
    #[error("other users may write to {0}: remove their right with `chmod go-w {0}`")]
    WritableByOthers(PathBuf),
    #[error("{0} is a link or a file: name the folder itself")]
    NotAFolder(PathBuf),
    #[error("{0} is not a plain file of this user: look at it, and remove it if it isn't yours")]
    UnsafeFile(PathBuf),
    #[error("can't use {0}")]
    Io(PathBuf, #[source] io::Error),
}

#[derive(Debug)]
pub struct PrivateFolder {
    path: PathBuf,
    folder: OwnedFd,
}

#[must_use]
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

impl PrivateFolder {
    /// Creates the folder if it is missing.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let io_error = |error| Error::Io(path.to_owned(), error);
        let is_missing = std::fs::symlink_metadata(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if is_missing {
            DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io_error)?;
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
            rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP => {
                Error::NotAFolder(path.to_owned())
            }
            error => io_error(error.into()),
        })?;
        let stat = rustix::fs::fstat(&folder).map_err(|error| io_error(error.into()))?;
        check_folder(path, stat.st_uid, stat.st_mode, own_uid())?;
        Ok(Self { path: path.to_owned(), folder })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens for reading and appending. Creates a missing file; takes the rights of other users
    /// from an existing one.
    pub fn open_file(&self, name: &str) -> Result<File, Error> {
        self.open_with(name, OFlags::RDWR | OFlags::APPEND | OFlags::CREATE)
    }

    /// A reader finds the old file or the new one; after an error, the old one. Returns the new
    /// file, open for appending.
    pub fn replace_file(&self, name: &str, content: &[u8]) -> Result<File, Error> {
        let new_name = format!("{name}.new");
        let io_error = |error: rustix::io::Errno| Error::Io(self.path.join(name), error.into());
        // What an earlier process left half written is removed, whatever it is: a link itself goes,
        // not the file that it leads to.
        match rustix::fs::unlinkat(&self.folder, &new_name, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(io_error(error)),
        }
        let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL;
        let mut file = self.open_with(&new_name, flags)?;
        file.write_all(content).map_err(|error| Error::Io(self.path.join(&new_name), error))?;
        rustix::fs::renameat(&self.folder, &new_name, &self.folder, name).map_err(io_error)?;
        Ok(file)
    }

    fn open_with(&self, name: &str, flags: OFlags) -> Result<File, Error> {
        let path = self.path.join(name);
        // Without NONBLOCK, opening a pipe would wait for its other end.
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR).map_err(
            |error| match error {
                rustix::io::Errno::LOOP => Error::UnsafeFile(path.clone()),
                error => Error::Io(path.clone(), error.into()),
            },
        )?;
        let io_error = |error: rustix::io::Errno| Error::Io(path.clone(), error.into());
        let stat = rustix::fs::fstat(&file).map_err(io_error)?;
        let is_plain = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        // A second name of the file would be one in another folder.
        if !is_plain || stat.st_uid != own_uid() || stat.st_nlink > 1 {
            return Err(Error::UnsafeFile(path));
        }
        if stat.st_mode & USABLE_BY_OTHERS != 0 {
            rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(io_error)?;
        }
        Ok(file.into())
    }
}

fn check_folder(path: &Path, owner: u32, mode: u32, uid: u32) -> Result<(), Error> {
    if ![0, uid].contains(&owner) {
        return Err(Error::OfAnotherUser { folder: path.to_owned(), owner, uid });
    }
    if mode & WRITABLE_BY_OTHERS != 0 {
        return Err(Error::WritableByOthers(path.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    };

    use super::*;

    /// A path in the folder for temporary files that no other test uses; removed when dropped.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("berth-private-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&path);
            fs::create_dir(&path).expect("a folder for temporary files");
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("it exists").mode() & 0o777
    }

    #[test]
    fn folders_and_files_are_for_their_user_alone() {
        let scratch = Scratch::new("modes");
        let folder = scratch.0.join("a/b");
        let private = PrivateFolder::open(&folder).expect("a new folder");
        private.open_file("lock").expect("a new file");
        private.replace_file("journal", b"text").expect("a new file");
        assert_eq!(mode(&folder), 0o700);
        assert_eq!((mode(&folder.join("lock")), mode(&folder.join("journal"))), (0o600, 0o600));
        fs::set_permissions(folder.join("lock"), fs::Permissions::from_mode(0o644)).expect("mine");
        private.open_file("lock").expect("it is still mine");
        assert_eq!(mode(&folder.join("lock")), 0o600, "a lock that others can't hold");
    }

    #[test]
    fn no_link_is_followed() {
        let scratch = Scratch::new("links");
        let victim = scratch.0.join("victim");
        fs::write(&victim, "precious").expect("mine");
        let folder = scratch.0.join("state");
        let private = PrivateFolder::open(&folder).expect("a new folder");
        symlink(&victim, folder.join("lock")).expect("a link");
        symlink(&victim, folder.join("journal.new")).expect("a link");
        assert!(matches!(private.open_file("lock"), Err(Error::UnsafeFile(_))));
        private.replace_file("journal", b"text").expect("the link itself is replaced");
        assert_eq!(fs::read_to_string(&victim).expect("mine"), "precious");
        fs::hard_link(&victim, folder.join("second")).expect("a second name");
        assert!(matches!(private.open_file("second"), Err(Error::UnsafeFile(_))));
        symlink(&folder, scratch.0.join("link")).expect("a link");
        let linked = PrivateFolder::open(&scratch.0.join("link"));
        assert!(matches!(linked, Err(Error::NotAFolder(_))), "{linked:?}");
    }

    #[test]
    fn a_folder_that_others_can_change_is_refused_with_what_to_do() {
        let scratch = Scratch::new("foreign");
        fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o777)).expect("mine");
        let shared = PrivateFolder::open(&scratch.0).expect_err("others may write");
        assert!(shared.to_string().contains("chmod go-w"), "{shared}");
        fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o700)).expect("mine");
        let foreign = check_folder(&scratch.0, 12, 0o700, 34).expect_err("another user's");
        let text = foreign.to_string();
        assert!(text.contains("user 12") && text.contains("user 34"), "{text}");
    }
}
