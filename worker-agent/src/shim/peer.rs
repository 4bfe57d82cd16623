//! One connection: reads as long as there is room for what is read, hands over what the receiver
//! takes, and writes commands. What is said on it is its [`Talk`]'s: a rank's shim or the trimmer.

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

/// Commands on their way to one peer: as many sessions as are demoted in one go.
const COMMANDS: usize = 256;
/// A peer says hello as soon as it has connected.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// One read. An update is 200 bytes and some per session.
const READ_BYTES: usize = 64 << 10;

/// What is said on a connection, and what of it the receiver hasn't taken yet. Pure.
pub(super) trait Talk: Sized + Send + 'static {
    /// Of the task that listens.
    const NAME: &'static str;
    /// What the peer says.
    type Message: Send;
    /// What the receiver is told of it.
    type News: Send + 'static;

    /// A frame's message, by its kind.
    fn decode(kind: u8, body: &mut Body<'_>) -> Result<Self::Message, codec::Error>;

    /// Begins with the first message. `None`: it isn't a hello. `pid` is the peer's by the kernel.
    fn begin(first: Self::Message, pid: Option<u32>) -> Option<(Self, Caller, Self::News)>;

    /// Takes a later message in, read at `at`.
    fn take(&mut self, message: Self::Message, at: Instant) -> Result<(), Ended>;

    /// May another message be taken in?
    fn accepts(&self) -> bool;

    /// Has the receiver been told everything?
    fn is_empty(&self) -> bool;

    /// The next piece of news.
    fn pop(&mut self) -> Option<Self::News>;

    /// The last piece of news.
    fn end(&self, reason: String) -> Self::News;
}

/// Who has come.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) dp_rank: u32,
    /// An inert one does nothing that it is told.
    pub(super) works: bool,
    /// Why it can't have the tree published.
    pub(super) unpublishable: Option<String>,
}

/// How a connected peer is reached, how its connection is ended, and how to learn that it has.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) caller: Caller,
    pub(super) commands: mpsc::Sender<Vec<u8>>,
    stays: DropGuard,
    ended: oneshot::Receiver<()>,
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the shim has gone")]
    Gone,
    #[error("another shim of its rank has come")]
    Replaced,
    #[error("its first message isn't a hello, or a later one is")]
    Order,
    #[error("update {found} came where {due} was due")]
    Gap { found: u64, due: u64 },
    #[error("no hello within {} s", HELLO_MAX.as_secs())]
    Silent,
    #[error("nobody wants its news any more")]
    Unwanted,
    #[error(transparent)]
    Codec(#[from] codec::Error),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Serves one connection to its end. It takes the place of another one of its rank in `peers`.
pub(super) async fn serve<T: Talk>(
    stream: UnixStream,
    pid: Option<u32>,
    peers: &watch::Sender<super::peers::ByRank>,
    news: &mpsc::Sender<T::News>,
) {
    let mut connection = Connection::new(stream);
    let first = tokio::time::timeout(HELLO_MAX, connection.first::<T>()).await;
    let begun = first.unwrap_or(Err(Ended::Silent));
    let begun = begun.and_then(|first| T::begin(first, pid).ok_or(Ended::Order));
    let (talk, caller, up) = match begun {
        Ok(begun) => begun,
        Err(error) => return warn!(%error, "a shim was not understood"),
    };

    let dp_rank = caller.dp_rank;
    let (sender, commands) = mpsc::channel(COMMANDS);
    let (ending, ended) = oneshot::channel();
    let replaced = CancellationToken::new();
    let stays = replaced.clone().drop_guard();
    let peer = Peer { caller, commands: sender, stays, ended };
    let mut before = None;
    peers.send_modify(|peers| before = peers.insert(dp_rank, peer));
    if let Some(Peer { stays, ended, .. }) = before {
        // The one before says `Down` before this one `Up`.
        drop(stays);
        let _ = ended.await;
    }
    if news.send(up).await.is_err() {
        drop(commands);
    } else {
        let (error, down) = connection.follow(talk, &replaced, commands, news).await;
        info!(dp_rank, name = T::NAME, %error, "the engine's shim is no longer followed");
        // The receiver may be gone too, and then nobody wants to know.
        let _ = news.send(down).await;
    }
    // The receiver of the own commands is dropped by now; a successor's is alive.
    peers.send_if_modified(|peers| {
        let own = peers.get(&dp_rank).is_some_and(|peer| peer.commands.is_closed());
        own && peers.remove(&dp_rank).is_some()
    });
    // The next one waits for it, if it has come.
    let _ = ending.send(());
}

/// Both halves, what has been read of one and not yet written to the other.
struct Connection {
    reading: Reading,
    writing: OwnedWriteHalf,
    unsent: Vec<u8>,
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        let (half, writing) = stream.into_split();
        Self { reading: Reading { half, frames: Frames::default() }, writing, unsent: vec![] }
    }

    async fn first<T: Talk>(&mut self) -> Result<T::Message, Ended> {
        loop {
            match self.reading.frames.next(T::decode)? {
                Some(message) => return Ok(message),
                None => self.reading.read().await?,
            }
        }
    }

    /// Returns why it ended, and the last news of it.
    async fn follow<T: Talk>(
        mut self,
        mut talk: T,
        replaced: &CancellationToken,
        mut commands: mpsc::Receiver<Vec<u8>>,
        news: &mpsc::Sender<T::News>,
    ) -> (Ended, T::News) {
        let ended = loop {
            if let Err(error) = self.exchange(&mut talk, replaced, &mut commands, news).await {
                break error;
            }
        };
        // What was said before the end is true, and comes before it.
        while let Some(piece) = talk.pop() {
            if news.send(piece).await.is_err() {
                break;
            }
        }
        let down = talk.end(ended.to_string());
        (ended, down)
    }

    /// One step of what can be done now.
    async fn exchange<T: Talk>(
        &mut self,
        talk: &mut T,
        replaced: &CancellationToken,
        commands: &mut mpsc::Receiver<Vec<u8>>,
        news: &mpsc::Sender<T::News>,
    ) -> Result<(), Ended> {
        let Self { reading, writing, unsent } = self;
        while talk.accepts() {
            let Some(message) = reading.frames.next(T::decode)? else { break };
            talk.take(message, tokio::time::Instant::now().into_std())?;
        }
        tokio::select! {
            biased;
            () = replaced.cancelled() => Err(Ended::Replaced),
            permit = news.reserve(), if !talk.is_empty() => match (permit, talk.pop()) {
                (Ok(permit), Some(piece)) => { permit.send(piece); Ok(()) }
                _ => Err(Ended::Unwanted),
            },
            ready = writing.writable(), if !unsent.is_empty() => {
                ready?;
                write(writing, unsent)
            }
            Some(command) = commands.recv(), if unsent.is_empty() => {
                *unsent = command;
                Ok(())
            }
            read = reading.read(), if talk.accepts() => read,
        }
    }
}

struct Reading {
    half: OwnedReadHalf,
    frames: Frames,
}

impl Reading {
    /// Cancelled, it has read nothing or all it says.
    async fn read(&mut self) -> Result<(), Ended> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            self.half.readable().await?;
            match self.half.try_read(&mut buffer) {
                Ok(0) => return Err(Ended::Gone),
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

fn write(writing: &OwnedWriteHalf, unsent: &mut Vec<u8>) -> Result<(), Ended> {
    match writing.try_write(unsent) {
        Ok(written) => unsent.drain(..written).for_each(drop),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
