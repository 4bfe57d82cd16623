//! One connection to a shim or to the trimmer.
//!
//! It reads while there is room for more messages, hands them to the receiver, and writes commands.
//! The protocol of the connection is a [`Protocol`].

use std::{
    io,
    time::{Duration, Instant},
};

use tokio::{
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot, watch},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{info, warn};

use super::codec::{self, Body, Frames};

/// The maximum number of queued commands for one peer: as many sessions as are demoted at once.
const COMMANDS: usize = 256;
/// How long a peer may take to send its hello after it connected.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// The size of one read. An update has about 200 bytes, and some more for each session.
const READ_BYTES: usize = 64 << 10;

/// The protocol of a connection, with the buffer of messages that the receiver has not taken yet.
/// Pure.
pub(super) trait Protocol: Sized + Send + 'static {
    /// The name of the listening task.
    const NAME: &'static str;
    /// A message from the peer.
    type Message: Send;
    /// A report to the receiver.
    type Report: Send + 'static;

    /// Decodes a frame's body by its kind.
    fn decode(kind: u8, body: &mut Body<'_>) -> Result<Self::Message, codec::Error>;

    /// Starts a connection with its first message, or returns `None` if that is not a hello. `pid`
    /// is the peer's process as the kernel reports it.
    fn begin(first: Self::Message, pid: Option<u32>) -> Option<(Self, PeerInfo, Self::Report)>;

    /// Takes in a later message that was read at `at`.
    fn receive(&mut self, message: Self::Message, at: Instant) -> Result<(), EndReason>;

    /// Whether there is room for another message.
    fn has_room(&self) -> bool;

    /// Whether the receiver has taken every report.
    fn is_empty(&self) -> bool;

    /// Takes the next report.
    fn next_report(&mut self) -> Option<Self::Report>;

    /// Returns the last report of the connection, with the reason of its end.
    fn end_report(&self, reason: String) -> Self::Report;
}

/// A peer that has said hello.
#[derive(Debug, Clone)]
pub(super) struct PeerInfo {
    pub(super) dp_rank: u32,
    /// Whether the peer takes commands; an inert shim takes none.
    pub(super) works: bool,
    /// Why the peer can't have the radix tree published again.
    pub(super) unpublishable: Option<String>,
}

/// Handle to a connected peer: sends commands, ends the connection, and waits for its end.
#[derive(Debug)]
pub(super) struct ConnectionHandle {
    pub(super) info: PeerInfo,
    pub(super) commands: mpsc::Sender<Vec<u8>>,
    stays: DropGuard,
    ended: oneshot::Receiver<()>,
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum EndReason {
    #[error("the shim has disconnected")]
    Gone,
    #[error("another shim of the same rank has connected")]
    Replaced,
    #[error("the first message is no hello, or a later message is one")]
    Order,
    #[error("update {found} came instead of update {due}; some are missing")]
    Gap { found: u64, due: u64 },
    #[error("the shim sent no hello within {} s", HELLO_MAX.as_secs())]
    Silent,
    #[error("the agent no longer takes its reports")]
    Unwanted,
    #[error(transparent)]
    Codec(#[from] codec::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves one connection to its end. It replaces an existing connection of the same rank.
pub(super) async fn serve<T: Protocol>(
    stream: UnixStream,
    pid: Option<u32>,
    connections: &watch::Sender<super::connections::ByRank>,
    reports: &mpsc::Sender<T::Report>,
) {
    let mut connection = Connection::new(stream);
    let first = tokio::time::timeout(HELLO_MAX, connection.first::<T>()).await;
    let begun = first.unwrap_or(Err(EndReason::Silent));
    let begun = begun.and_then(|first| T::begin(first, pid).ok_or(EndReason::Order));
    let (protocol, info, up) = match begun {
        Ok(begun) => begun,
        Err(error) => return warn!(%error, "a shim's connection was closed: invalid first message"),
    };

    let dp_rank = info.dp_rank;
    let (sender, commands) = mpsc::channel(COMMANDS);
    let (ending, ended) = oneshot::channel();
    let replaced = CancellationToken::new();
    let stays = replaced.clone().drop_guard();
    let peer = ConnectionHandle { info, commands: sender, stays, ended };
    let mut before = None;
    connections.send_modify(|connections| before = connections.insert(dp_rank, peer));
    if let Some(ConnectionHandle { stays, ended, .. }) = before {
        // The old connection must send `Down` before the new one sends `Up`.
        drop(stays);
        let _ = ended.await;
    }
    if reports.send(up).await.is_err() {
        drop(commands);
    } else {
        let (error, down) = connection.follow(protocol, &replaced, commands, reports).await;
        info!(dp_rank, name = T::NAME, %error, "the connection to the engine's shim has ended");
        // If the receiver is gone too, nothing is left to report.
        let _ = reports.send(down).await;
    }
    // This connection's command receiver is dropped by now; a successor's still exists.
    connections.send_if_modified(|connections| {
        let own = connections.get(&dp_rank).is_some_and(|peer| peer.commands.is_closed());
        own && connections.remove(&dp_rank).is_some()
    });
    // A successor waits for this.
    let _ = ending.send(());
}

/// The two halves of a socket, with the bytes read but not decoded, and those not yet written.
struct Connection {
    reader: Reader,
    writing: OwnedWriteHalf,
    unsent: Vec<u8>,
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        let (half, writing) = stream.into_split();
        Self { reader: Reader { half, frames: Frames::default() }, writing, unsent: vec![] }
    }

    async fn first<T: Protocol>(&mut self) -> Result<T::Message, EndReason> {
        loop {
            match self.reader.frames.next(T::decode)? {
                Some(message) => return Ok(message),
                None => self.reader.read().await?,
            }
        }
    }

    /// Returns why the connection ended, and the last report.
    async fn follow<T: Protocol>(
        mut self,
        mut protocol: T,
        replaced: &CancellationToken,
        mut commands: mpsc::Receiver<Vec<u8>>,
        reports: &mpsc::Sender<T::Report>,
    ) -> (EndReason, T::Report) {
        let ended = loop {
            if let Err(error) = self.exchange(&mut protocol, replaced, &mut commands, reports).await
            {
                break error;
            }
        };
        // Messages that came before the end are valid: report them first.
        while let Some(part) = protocol.next_report() {
            if reports.send(part).await.is_err() {
                break;
            }
        }
        let down = protocol.end_report(ended.to_string());
        (ended, down)
    }

    /// Does one step: whatever can be done first.
    async fn exchange<T: Protocol>(
        &mut self,
        protocol: &mut T,
        replaced: &CancellationToken,
        commands: &mut mpsc::Receiver<Vec<u8>>,
        reports: &mpsc::Sender<T::Report>,
    ) -> Result<(), EndReason> {
        let Self { reader, writing, unsent } = self;
        while protocol.has_room() {
            let Some(message) = reader.frames.next(T::decode)? else { break };
            protocol.receive(message, service::clock::now())?;
        }
        tokio::select! {
            biased;
            () = replaced.cancelled() => Err(EndReason::Replaced),
            permit = reports.reserve(), if !protocol.is_empty() => match (permit, protocol.next_report()) {
                (Ok(permit), Some(part)) => { permit.send(part); Ok(()) }
                _ => Err(EndReason::Unwanted),
            },
            ready = writing.writable(), if !unsent.is_empty() => {
                ready?;
                write(writing, unsent)
            }
            Some(command) = commands.recv(), if unsent.is_empty() => {
                *unsent = command;
                Ok(())
            }
            read = reader.read(), if protocol.has_room() => read,
        }
    }
}

struct Reader {
    half: OwnedReadHalf,
    frames: Frames,
}

impl Reader {
    /// Reads some bytes. Cancel-safe: no bytes are lost.
    async fn read(&mut self) -> Result<(), EndReason> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            self.half.readable().await?;
            match self.half.try_read(&mut buffer) {
                Ok(0) => return Err(EndReason::Gone),
                Ok(read) => {
                    self.frames.push(&buffer[..read]);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn write(writing: &OwnedWriteHalf, unsent: &mut Vec<u8>) -> Result<(), EndReason> {
    match writing.try_write(unsent) {
        Ok(written) => unsent.drain(..written).for_each(drop),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
