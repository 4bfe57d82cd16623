//! Accepts connections on one unix socket, and sends the agent's commands to the peer of a rank.
//!
//! A peer is a shim or the trimmer. This module knows nothing of the messages.

use std::{path::Path, sync::Arc};

use service::tasks::Tasks;
use tokio::sync::{Semaphore, mpsc, watch};
use tracing::warn;

use super::{
    Error,
    codec::ShimCommand,
    connection::{self, HandlesByRank, PeerInfo, Protocol},
    socket::{self, Socket},
};

/// An engine has one shim per DP rank, and rarely more than eight ranks on a machine.
const CONNECTIONS_MAX: usize = 64;

#[derive(Debug, Clone)]
pub(super) struct Connections(watch::Receiver<HandlesByRank>);

impl Connections {
    pub(super) fn listen<T: Protocol>(
        path: &Path,
        reports: mpsc::Sender<T::Report>,
        tasks: &Tasks,
    ) -> Result<Self, Error> {
        let socket = Socket::bind(path)?;
        let (connections, receiver) = watch::channel(HandlesByRank::new());
        let accept = accept::<T>(socket, Arc::new(connections), reports, tasks.clone());
        tasks.spawn_essential(T::NAME, accept);
        Ok(Self(receiver))
    }

    /// Fails if no peer takes commands, its queue is full, or the session's name is too long.
    pub(super) fn send_command(&self, dp_rank: u32, command: &ShimCommand) -> Result<(), Error> {
        let command = command.encode().ok_or(Error::NameTooLong)?;
        self.command_sender(dp_rank)?.try_send(command).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::QueueFull,
            mpsc::error::TrySendError::Closed(_) => Error::NoShim(dp_rank),
        })
    }

    /// Waits for room in the queue; the caller bounds how many commands wait.
    pub(super) async fn queue_command(
        &self,
        dp_rank: u32,
        command: &ShimCommand,
    ) -> Result<(), Error> {
        let command = command.encode().ok_or(Error::NameTooLong)?;
        let sender = self.command_sender(dp_rank)?;
        sender.send(command).await.map_err(|_| Error::NoShim(dp_rank))
    }

    fn command_sender(&self, dp_rank: u32) -> Result<mpsc::Sender<Vec<u8>>, Error> {
        let connections = self.0.borrow();
        let peer = connections.get(&dp_rank).filter(|peer| peer.info.takes_commands);
        peer.map(|peer| peer.command_sender.clone()).ok_or(Error::NoShim(dp_rank))
    }

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
    connections: Arc<watch::Sender<HandlesByRank>>,
    reports: mpsc::Sender<T::Report>,
    tasks: Tasks,
) {
    let cancellation = tasks.token();
    let free_connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let accepted = tokio::select! {
            biased;
            () = cancellation.cancelled() => return,
            accepted = socket.accept() => accepted,
        };
        let (stream, pid) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "can't accept a shim's connection");
                // Most likely the process has no free file descriptor.
                tokio::time::sleep(socket::ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&free_connections).try_acquire_owned() else {
            warn!("too many shim connections; one was refused");
            continue;
        };
        let (connections, reports, cancellation) =
            (Arc::clone(&connections), reports.clone(), cancellation.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = cancellation.cancelled() => {}
                () = connection::serve::<T>(stream, pid, &connections, &reports) => {}
            }
            drop(permit);
        });
    }
}
