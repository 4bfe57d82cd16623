//! One connection: reads as long as there is room for what is read, hands over what the receiver
//! takes, and writes commands.

use std::{io, time::Duration};

use tokio::{
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot, watch},
};
use tracing::{info, warn};

use super::{
    Hello, News, Peers,
    codec::{self, Command, Frames, Message},
    outbox::Outbox,
};

/// Commands on their way to one shim: as many sessions as are demoted in one go.
const COMMANDS: usize = 256;
/// A shim says hello as soon as it has connected.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// One read. An update is 200 bytes and some per session.
const READ_BYTES: usize = 64 << 10;

/// How a connected shim is reached, and how to learn that its connection has ended.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) commands: mpsc::Sender<Command>,
    /// An inert one does nothing that it is told.
    pub(super) works: bool,
    unpublishable: Option<String>,
    ended: oneshot::Receiver<()>,
}

impl Peer {
    /// Why it can't have the tree published.
    pub(super) fn unpublishable(&self) -> Option<String> {
        self.unpublishable.clone()
    }
}

#[derive(Debug, thiserror::Error)]
enum Ended {
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

/// Serves one connection to its end.
pub(super) async fn serve(
    stream: UnixStream,
    pid: Option<u32>,
    peers: &watch::Sender<Peers>,
    news: &mpsc::Sender<News>,
) {
    let (reading, writing) = stream.into_split();
    let mut connection = Connection { reading, frames: Frames::default(), next_seq: 0 };
    let mut hello = match tokio::time::timeout(HELLO_MAX, connection.hello()).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(error)) => return warn!(%error, "a shim was not understood"),
        Err(_) => return warn!(error = %Ended::Silent, "a shim was not understood"),
    };
    hello.seen_pid = pid;
    let dp_rank = hello.dp_rank;
    if let Some(reason) = &hello.inert {
        warn!(dp_rank, reason, "the engine's shim is inert");
    } else {
        info!(dp_rank, sglang = hello.sglang, shim = hello.shim, "the engine's shim is there");
    }

    let (sender, commands) = mpsc::channel(COMMANDS);
    let (ending, ended) = oneshot::channel();
    let mut before = None;
    let (works, unpublishable) = (hello.inert.is_none(), hello.unpublishable.clone());
    let peer = Peer { commands: sender, works, unpublishable, ended };
    peers.send_modify(|peers| before = peers.insert(dp_rank, peer));
    if let Some(Peer { commands, ended, .. }) = before {
        // The one before hears it by its commands' end, and says `Down` before this one `Up`.
        drop(commands);
        let _ = ended.await;
    }
    if news.send(News::Up(hello)).await.is_err() {
        drop(commands);
    } else {
        let error = connection.follow(dp_rank, writing, commands, news).await;
        info!(dp_rank, %error, "the engine's shim is no longer followed");
        // The receiver may be gone too, and then nobody wants to know.
        let _ = news.send(News::Down { dp_rank, reason: error.to_string() }).await;
    }
    // `follow` has dropped the receiver of the own commands; a successor's is alive.
    peers.send_if_modified(|peers| {
        let own = peers.get(&dp_rank).is_some_and(|peer| peer.commands.is_closed());
        own && peers.remove(&dp_rank).is_some()
    });
    // The next one waits for it, if it has come.
    let _ = ending.send(());
}

/// The reading half, and what has been read of it.
struct Connection {
    reading: OwnedReadHalf,
    frames: Frames,
    next_seq: u64,
}

impl Connection {
    async fn hello(&mut self) -> Result<Hello, Ended> {
        loop {
            match self.frames.next()? {
                Some(Message::Hello(hello)) => return Ok(*hello),
                Some(_) => return Err(Ended::Order),
                None => self.read().await?,
            }
        }
    }

    /// Returns why it ended. `commands` end when another connection of the rank replaces this one.
    async fn follow(
        &mut self,
        dp_rank: u32,
        writing: OwnedWriteHalf,
        mut commands: mpsc::Receiver<Command>,
        news: &mpsc::Sender<News>,
    ) -> Ended {
        let mut outbox = Outbox::new(dp_rank);
        let ended = self.exchange(&mut outbox, writing, &mut commands, news).await;
        // What was said before the end is true, and comes before it.
        while let Some(piece) = outbox.pop() {
            if news.send(piece).await.is_err() {
                break;
            }
        }
        ended
    }

    async fn exchange(
        &mut self,
        outbox: &mut Outbox,
        writing: OwnedWriteHalf,
        commands: &mut mpsc::Receiver<Command>,
        news: &mpsc::Sender<News>,
    ) -> Ended {
        let mut unsent = vec![];
        loop {
            if let Err(error) = self.unpack(outbox) {
                return error;
            }
            let done = tokio::select! {
                biased;
                permit = news.reserve(), if !outbox.is_empty() => match (permit, outbox.pop()) {
                    (Ok(permit), Some(piece)) => { permit.send(piece); Ok(()) }
                    _ => Err(Ended::Unwanted),
                },
                ready = writing.writable(), if !unsent.is_empty() => {
                    ready.map_err(Ended::Io).and_then(|()| write(&writing, &mut unsent))
                }
                command = commands.recv(), if unsent.is_empty() => match command {
                    Some(command) => { unsent = command.encode().unwrap_or_default(); Ok(()) }
                    None => Err(Ended::Replaced),
                },
                read = self.read(), if outbox.accepts() => read,
            };
            if let Err(error) = done {
                return error;
            }
        }
    }

    /// Moves whole updates into the outbox, while it takes them.
    fn unpack(&mut self, outbox: &mut Outbox) -> Result<(), Ended> {
        while outbox.accepts() {
            match self.frames.next()? {
                None => return Ok(()),
                Some(Message::Hello(_)) => return Err(Ended::Order),
                Some(Message::Update(update)) if update.seq != self.next_seq => {
                    return Err(Ended::Gap { found: update.seq, due: self.next_seq });
                }
                Some(Message::Update(update)) => {
                    self.next_seq += 1;
                    outbox.push(*update, tokio::time::Instant::now().into_std());
                }
                Some(Message::Audited(audited)) => outbox.push_audited(audited),
            }
        }
        Ok(())
    }

    /// Cancelled, it has read nothing or all it says.
    async fn read(&mut self) -> Result<(), Ended> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            self.reading.readable().await?;
            match self.reading.try_read(&mut buffer) {
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
