//! Creates the unix socket for the plugin in the engine, and accepts only trusted users on it.
//!
//! Only the agent's own user and root may connect, or write to the socket's folder.

use std::{
    fs::{self, Permissions},
    io::{self, ErrorKind},
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use service::private_folder::{PrivateFolder, own_uid};
use tokio::net::{UnixListener, UnixStream};

use super::Error;

pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
    uid: u32,
}

impl Socket {
    /// Replaces the socket file of an agent that no longer runs.
    pub(super) fn bind(path: &Path) -> Result<Self, Error> {
        let to_bind_error = |source| Error::Bind { path: path.display().to_string(), source };
        // Who can write to the folder could replace this socket with another one.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        PrivateFolder::open(folder.unwrap_or(Path::new(".")))?;
        if !remove_stale_socket(path).map_err(to_bind_error)? {
            return Err(Error::PathTaken(path.display().to_string()));
        }
        let listener = UnixListener::bind(path).map_err(to_bind_error)?;
        let socket = Self { listener, path: path.to_owned(), uid: own_uid() };
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(to_bind_error)?;
        Ok(socket)
    }

    /// The pid is `None` if the process isn't visible in this pid namespace.
    pub(super) async fn accept(&self) -> io::Result<(UnixStream, Option<u32>)> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            let peer = stream.peer_cred()?;
            if peer.uid() == self.uid || peer.uid() == 0 {
                // The kernel reports 0 for a process that isn't visible here.
                let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok());
                return Ok((stream, pid.filter(|pid| *pid != 0)));
            }
            tracing::warn!(uid = peer.uid(), "refused a connection of another user");
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Fails if the file is already gone.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns false if a process listens on the socket, or if the file is not a socket.
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
