//! Creates the unix socket for the plugin in the engine, and accepts only trusted users on it.
//!
//! The agent listens, and Berth's plugin in the engine (the shim) connects. Only the agent's own
//! user and root may connect, or write to the socket's folder. `connections` creates the socket and
//! accepts connections here. This module reads and writes nothing on them.

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
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket. Dropping it removes its file.
#[derive(Debug)]
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
    /// The agent's own user.
    uid: u32,
}

impl Socket {
    /// Listens at `path`. Replaces the socket file of an agent that no longer runs.
    pub(super) fn bind(path: &Path) -> Result<Self, Error> {
        let to_bind_error = |source| Error::Bind { path: path.display().to_string(), source };
        let uid = fs::metadata("/proc/self").map_err(to_bind_error)?.uid();
        let folder = path.parent().unwrap_or(Path::new("."));
        // A user with write access to the folder could replace this socket with another one.
        if !ensure_private_folder(folder, uid).map_err(to_bind_error)? {
            return Err(Error::UnsafeFolder(folder.display().to_string()));
        }
        if !remove_stale_socket(path).map_err(to_bind_error)? {
            return Err(Error::PathTaken(path.display().to_string()));
        }
        let listener = UnixListener::bind(path).map_err(to_bind_error)?;
        let socket = Self { listener, path: path.to_owned(), uid };
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(to_bind_error)?;
        Ok(socket)
    }

    /// Accepts the next connection of this user or of root. Returns the stream and the peer's pid,
    /// or `None` instead of the pid if the peer's process isn't visible in this pid namespace.
    pub(super) async fn accept(&self) -> io::Result<(UnixStream, Option<u32>)> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let peer = stream.peer_cred()?;
            if peer.uid() == self.uid || peer.uid() == 0 {
                // The kernel reports 0 for a process that isn't visible in this pid namespace.
                let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
                return Ok((stream, pid.filter(|pid| *pid != 0)));
            }
            tracing::warn!(uid = peer.uid(), "refused a connection of another user");
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // This fails if the file is already gone, which does no harm.
        let _ = fs::remove_file(&self.path);
    }
}

/// Creates the folder for this user alone if it is missing. Returns whether only this user and root
/// can write to the folder.
fn ensure_private_folder(folder: &Path, uid: u32) -> io::Result<bool> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let metadata = fs::symlink_metadata(folder)?;
    let is_writable_by_others = metadata.mode() & 0o022 != 0;
    Ok(metadata.is_dir() && [0, uid].contains(&metadata.uid()) && !is_writable_by_others)
}

/// Removes the socket file that a crashed agent has left. Returns whether the path is free now. It
/// isn't if a process listens on the socket, or if the file is not a socket.
fn remove_stale_socket(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => return Ok(false),
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
