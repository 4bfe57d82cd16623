//! Accepts the connections of one socket, and finds the connection of each rank.

use std::{collections::HashMap, path::Path, sync::Arc};

use service::tasks::Tasks;
use tokio::sync::{Semaphore, mpsc, watch};
use tracing::warn;

use super::{
    Error,
    codec::ShimCommand,
    connection::{self, ConnectionHandle, PeerInfo, Protocol},
    socket::{self, Socket},
};

/// The maximum number of connections at once, including those before their hello. An engine has one
/// connection per DP rank; eight ranks on one machine are many.
const CONNECTIONS_MAX: usize = 64;

pub(super) type ByRank = HashMap<u32, ConnectionHandle>;

/// The connections that have said hello, by DP rank.
#[derive(Debug, Clone)]
pub(super) struct Connections(watch::Receiver<ByRank>);

impl Connections {
    /// Listens until the tasks are cancelled, and serves each connection in a task of its own.
    pub(super) fn listen<T: Protocol>(
        path: &Path,
        reports: mpsc::Sender<T::Report>,
        tasks: &Tasks,
    ) -> Result<Self, Error> {
        let socket = Socket::bind(path)?;
        let (connections, handle) = watch::channel(ByRank::new());
        tasks
            .essential(T::NAME, accept::<T>(socket, Arc::new(connections), reports, tasks.clone()));
        Ok(Self(handle))
    }

    pub(super) fn send_command(&self, dp_rank: u32, command: &ShimCommand) -> Result<(), Error> {
        let command = command.encode().ok_or(Error::Name)?;
        let connections = self.0.borrow();
        let peer = connections.get(&dp_rank).filter(|peer| peer.info.works);
        let peer = peer.ok_or(Error::NoShim(dp_rank))?;
        peer.commands.try_send(command).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Busy,
            mpsc::error::TrySendError::Closed(_) => Error::NoShim(dp_rank),
        })
    }

    /// Returns the peer of a rank.
    pub(super) fn peer_info(&self, dp_rank: u32) -> Option<PeerInfo> {
        self.0.borrow().get(&dp_rank).map(|peer| peer.info.clone())
    }

    /// Waits until a peer connects or disconnects. Returns false if the listener has ended.
    pub(super) async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }
}

async fn accept<T: Protocol>(
    socket: Socket,
    connections: Arc<watch::Sender<ByRank>>,
    reports: mpsc::Sender<T::Report>,
    tasks: Tasks,
) {
    let (token, room) = (tasks.token(), Arc::new(Semaphore::new(CONNECTIONS_MAX)));
    loop {
        let accepted = tokio::select! {
            biased;
            () = token.cancelled() => return,
            accepted = socket.accept() => accepted,
        };
        let (stream, pid) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "can't accept a shim's connection");
                // Most likely the process is out of file descriptors, which takes a while to pass.
                tokio::time::sleep(socket::PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            warn!("too many shim connections; one was refused");
            continue;
        };
        let (connections, reports, token) =
            (Arc::clone(&connections), reports.clone(), token.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = connection::serve::<T>(stream, pid, &connections, &reports) => {}
            }
            drop(permit);
        });
    }
}
