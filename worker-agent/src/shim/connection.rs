//! Serves one connection of a peer in the engine: a shim, or the trimmer.
//!
//! The peer's first message is its hello. While the buffer of reports is full, the task reads
//! nothing.

use std::{collections::HashMap, io, time::Duration};

use serde::de::DeserializeOwned;
use tokio::{
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot, watch},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{info, warn};

use super::codec::{self, Frames};

/// Requests about sessions, and answers to the trimmer, wait for room beyond this.
const COMMANDS_MAX: usize = 256;
const HELLO_WAIT_MAX: Duration = Duration::from_secs(5);
/// A shim's update has about 200 bytes, and more for each session.
const READ_BYTES_MAX: usize = 64 << 10;

/// One kind of peer, and the state of a connection with it. Buffers the reports until the receiver
/// takes them. Pure.
pub(super) trait Protocol: Sized + Send + 'static {
    /// Names the listening task in logs.
    const NAME: &'static str;
    type Message: DeserializeOwned + Send;
    type Report: Send + 'static;

    /// `None` if the message isn't a hello. `pid` is the peer's process as the kernel reports it.
    fn begin(hello: Self::Message, pid: Option<u32>) -> Option<(Self, PeerInfo, Self::Report)>;

    fn receive(&mut self, message: Self::Message) -> Result<(), EndReason>;

    fn has_room(&self) -> bool;

    fn has_no_report(&self) -> bool;

    fn next_report(&mut self) -> Option<Self::Report>;

    fn end_report(&self, reason: String) -> Self::Report;
}

#[derive(Debug, Clone)]
pub(super) struct PeerInfo {
    pub(super) dp_rank: u32,
    /// False after an internal error, or if the peer doesn't support its engine.
    pub(super) takes_commands: bool,
    /// `None` also for a trimmer, which never gets the command.
    pub(super) unpublishable_reason: Option<String>,
}

#[derive(Debug)]
pub(super) struct ConnectionHandle {
    pub(super) info: PeerInfo,
    pub(super) command_sender: mpsc::Sender<Vec<u8>>,
    end_on_drop: DropGuard,
    /// Resolves when the connection has ended and its last report was sent.
    end_receiver: oneshot::Receiver<()>,
}

/// Only peers that have sent their hello are here.
pub(super) type HandlesByRank = HashMap<u32, ConnectionHandle>;

#[derive(Debug, thiserror::Error)]
pub(super) enum EndReason {
    #[error("the shim has disconnected")]
    Disconnected,
    #[error("another shim of the same rank has connected")]
    Replaced,
    #[error("the first message is no hello, or a later message is one")]
    MisplacedHello,
    #[error("update {received_seq} came instead of update {due_seq}; some are missing")]
    UpdatesMissing { received_seq: u64, due_seq: u64 },
    #[error("the shim sent no hello within {} s", HELLO_WAIT_MAX.as_secs())]
    NoHello,
    #[error("the agent no longer takes its reports")]
    ReportsUnwanted,
    #[error(transparent)]
    Codec(#[from] codec::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Ends an earlier connection of the same rank first.
pub(super) async fn serve<T: Protocol>(
    stream: UnixStream,
    pid: Option<u32>,
    connections: &watch::Sender<HandlesByRank>,
    reports: &mpsc::Sender<T::Report>,
) {
    let mut connection = Connection::new(stream);
    let hello = tokio::time::timeout(HELLO_WAIT_MAX, connection.read_hello::<T>()).await;
    let hello = hello.unwrap_or(Err(EndReason::NoHello));
    let begin_result =
        hello.and_then(|hello| T::begin(hello, pid).ok_or(EndReason::MisplacedHello));
    let (protocol, info, up_report) = match begin_result {
        Ok(begun) => begun,
        Err(error) => return warn!(%error, "a shim's connection was closed: invalid first message"),
    };

    let dp_rank = info.dp_rank;
    let (command_sender, commands) = mpsc::channel(COMMANDS_MAX);
    let (end_sender, end_receiver) = oneshot::channel();
    let replaced = CancellationToken::new();
    let end_on_drop = replaced.clone().drop_guard();
    let handle = ConnectionHandle { info, command_sender, end_on_drop, end_receiver };
    let mut earlier_handle = None;
    connections.send_modify(|handles| earlier_handle = handles.insert(dp_rank, handle));
    if let Some(ConnectionHandle { end_on_drop, end_receiver, .. }) = earlier_handle {
        // The earlier connection must send its `Down` before this connection sends its `Up`.
        drop(end_on_drop);
        let _ = end_receiver.await;
    }
    if reports.send(up_report).await.is_err() {
        drop(commands);
    } else {
        let (error, down_report) =
            connection.serve_after_hello(protocol, &replaced, commands, reports).await;
        info!(dp_rank, name = T::NAME, %error, "the connection to the engine's shim has ended");
        // Fails only if the agent no longer takes reports.
        let _ = reports.send(down_report).await;
    }
    // Not if a newer connection has replaced this one. This one's command receiver is dropped, so
    // its sender is closed; that of a newer connection is open.
    connections.send_if_modified(|handles| {
        let is_this = handles.get(&dp_rank).is_some_and(|handle| handle.command_sender.is_closed());
        is_this && handles.remove(&dp_rank).is_some()
    });
    // A newer connection of this rank may be waiting for the end of this one.
    let _ = end_sender.send(());
}

struct Connection {
    reader: Reader,
    write_half: OwnedWriteHalf,
    unsent: Vec<u8>,
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        let (read_half, write_half) = stream.into_split();
        let reader = Reader { read_half, frames: Frames::default() };
        Self { reader, write_half, unsent: vec![] }
    }

    async fn read_hello<T: Protocol>(&mut self) -> Result<T::Message, EndReason> {
        loop {
            match self.reader.frames.take_message()? {
                Some(message) => return Ok(message),
                None => self.reader.read().await?,
            }
        }
    }

    async fn serve_after_hello<T: Protocol>(
        mut self,
        mut protocol: T,
        replaced: &CancellationToken,
        mut commands: mpsc::Receiver<Vec<u8>>,
        reports: &mpsc::Sender<T::Report>,
    ) -> (EndReason, T::Report) {
        let end_reason = loop {
            if let Err(error) = self.step(&mut protocol, replaced, &mut commands, reports).await {
                break error;
            }
        };
        // Reports of messages that came before the end are still valid.
        while let Some(report) = protocol.next_report() {
            if reports.send(report).await.is_err() {
                break;
            }
        }
        let down_report = protocol.end_report(end_reason.to_string());
        (end_reason, down_report)
    }

    /// Decodes what was read, as far as the buffer has room, then does one thing that is ready.
    async fn step<T: Protocol>(
        &mut self,
        protocol: &mut T,
        replaced: &CancellationToken,
        commands: &mut mpsc::Receiver<Vec<u8>>,
        reports: &mpsc::Sender<T::Report>,
    ) -> Result<(), EndReason> {
        let Self { reader, write_half, unsent } = self;
        while protocol.has_room() {
            let Some(message) = reader.frames.take_message()? else { break };
            protocol.receive(message)?;
        }
        tokio::select! {
            biased;
            () = replaced.cancelled() => Err(EndReason::Replaced),
            permit = reports.reserve(), if !protocol.has_no_report() => {
                match (permit, protocol.next_report()) {
                    (Ok(permit), Some(report)) => { permit.send(report); Ok(()) }
                    _ => Err(EndReason::ReportsUnwanted),
                }
            },
            ready = write_half.writable(), if !unsent.is_empty() => {
                ready?;
                write_some(write_half, unsent)
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
    read_half: OwnedReadHalf,
    frames: Frames,
}

impl Reader {
    /// Reads at most [`READ_BYTES_MAX`]. Cancel-safe: no bytes are lost.
    async fn read(&mut self) -> Result<(), EndReason> {
        let mut buffer = vec![0; READ_BYTES_MAX];
        loop {
            self.read_half.readable().await?;
            match self.read_half.try_read(&mut buffer) {
                Ok(0) => return Err(EndReason::Disconnected),
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

fn write_some(write_half: &OwnedWriteHalf, unsent: &mut Vec<u8>) -> Result<(), EndReason> {
    match write_half.try_write(unsent) {
        Ok(written) => unsent.drain(..written).for_each(drop),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
