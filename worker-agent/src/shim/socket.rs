//! Creates the socket's file and its folder, and checks who connects.

use std::{
    fs::{self, DirBuilder, Permissions},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::net::{UnixListener, UnixStream};

use super::Error;

/// The pause after a failed accept.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// A listening socket. Its file is removed when it is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
    uid: u32,
}

impl Socket {
    pub(super) fn bind(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Bind { path: path.display().to_string(), source };
        let uid = fs::metadata("/proc/self").map_err(failed)?.uid();
        let folder = path.parent().unwrap_or(Path::new("."));
        // A user with write access to the folder could replace this socket with another one.
        if !own_folder(folder, uid).map_err(failed)? {
            return Err(Error::Folder(folder.display().to_string()));
        }
        if !remove_stale(path).map_err(failed)? {
            return Err(Error::Taken(path.display().to_string()));
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let socket = Self { listener, path: path.to_owned(), uid };
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(socket)
    }

    /// Accepts the next connection of this user or of root. Also returns the peer's pid if the
    /// kernel knows it in this namespace.
    pub(super) async fn accept(&self) -> io::Result<(UnixStream, Option<u32>)> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let peer = stream.peer_cred()?;
            if peer.uid() == self.uid || peer.uid() == 0 {
                // The kernel reports 0 for a process in a pid namespace that is not visible here.
                let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
                return Ok((stream, pid.filter(|pid| *pid != 0)));
            }
            tracing::warn!(uid = peer.uid(), "refused a connection of another user");
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // The file may already be gone.
        let _ = fs::remove_file(&self.path);
    }
}

/// Creates the folder for this user alone if it is missing. Returns whether nobody but this user
/// and root can write to it.
fn own_folder(folder: &Path, uid: u32) -> io::Result<bool> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let found = fs::symlink_metadata(folder)?;
    Ok(found.is_dir() && [0, uid].contains(&found.uid()) && found.mode() & 0o022 == 0)
}

/// Removes the socket file of a crashed agent. Returns false if a process listens on it, or if the
/// file is not a socket.
fn remove_stale(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => return Ok(false),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Ok(false),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map(|()| true)
        }
        Err(error) => Err(error),
    }
}
