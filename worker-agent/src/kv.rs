//! What the engine's cache holds, by its own events, told to routers as routing blocks.
//!
//! Pure: messages are decoded ([`frame`]), put in order ([`order`]), checked against their tokens
//! ([`verify`]) and followed as pages and blocks ([`pages`]); `rank` joins these. The shell:
//! `source` hears one rank's publisher over `zmtp`, `board` keeps what was told of late, and
//! `watch` tells it to one router. All of it runs on a thread of its own, so that a large snapshot
//! delays neither turns nor load reports.
//!
//! It asks no engine for more than its events, but for the shim: see `republish.py` there.

mod board;
pub mod feed;
pub mod frame;
mod log;
pub mod metrics;
mod msgpack;
pub mod order;
pub mod pages;
mod rank;
mod source;
pub mod verify;
mod watch;
mod zmtp;

use std::{sync::Arc, time::Duration};

use proto::{process::tasks::Tasks, v1};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::{
    board::{Asks, Board},
    feed::Feed,
    metrics::Metrics,
    rank::Rank,
    source::{Follower, Source},
};
use crate::shim::ShimHandle;

/// Routers that watch at once.
const WATCHERS_MAX: usize = 16;
/// Snapshots on their way at once: each takes eight bytes a block until it is sent.
const SNAPSHOTS_MAX: usize = 2;
/// Messages on their way to one watcher, of at most 256 KiB each.
const EVENTS: usize = 2;
/// Watchers that ask a rank at once.
const ASKS: usize = WATCHERS_MAX;
/// Pages that are followed, for each page of the pool: the host's memory holds some more.
const PAGES_PER_POOL_PAGE: usize = 4;

/// What every part has a use for.
struct Shared {
    board: Board,
    shim: ShimHandle,
    republish_interval: Duration,
    metrics: Metrics,
    snapshots: Semaphore,
}

/// What the thread is started with.
#[derive(Debug)]
pub struct Setup {
    /// The agent's life; routers tell its numbers from those of another one by it.
    pub epoch: u64,
    /// Publishes the engine's radix tree again.
    pub shim: ShimHandle,
    /// The shortest time between two requests for the tree of one rank.
    pub republish_interval: Duration,
    /// What the thread counts.
    pub metrics: Metrics,
}

/// Messages for one watcher.
pub type Events = mpsc::Receiver<Result<v1::KvEvent, Status>>;

/// How routers' streams and the engine's follower reach the thread.
#[derive(Debug, Clone)]
pub struct KvHandle {
    watchers: mpsc::Sender<mpsc::Sender<Result<v1::KvEvent, Status>>>,
    feeds: tokio::sync::watch::Sender<Option<Feed>>,
}

impl KvHandle {
    /// Tells where the engine publishes; again when it is another.
    pub fn feed(&self, feed: Feed) {
        self.feeds.send_if_modified(|known| {
            let is_news = known.as_ref() != Some(&feed);
            *known = Some(feed);
            is_news
        });
    }

    /// Everything that is resident, and then what changes, until the watcher is too slow.
    ///
    /// # Errors
    /// When too many watch, or the agent is stopping.
    pub fn watch(&self) -> Result<Events, Status> {
        let (sender, events) = mpsc::channel(EVENTS);
        self.watchers.try_send(sender).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Status::resource_exhausted("too many want to watch at once; try again")
            }
            mpsc::error::TrySendError::Closed(_) => Status::unavailable("the agent is stopping"),
        })?;
        Ok(events)
    }
}

/// Starts the thread. It ends with the tasks.
///
/// # Errors
/// When the thread or its runtime can't be made.
pub fn start(setup: Setup, token: CancellationToken) -> std::io::Result<KvHandle> {
    let Setup { epoch, shim, republish_interval, metrics } = setup;
    let (watchers, requests) = mpsc::channel(WATCHERS_MAX);
    let (feeds, told) = tokio::sync::watch::channel(None);
    let handle = KvHandle { watchers, feeds };
    let snapshots = Semaphore::new(SNAPSHOTS_MAX);
    let shared = Shared { board: Board::new(), shim, republish_interval, metrics, snapshots };
    let shared = Arc::new(shared);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("kv".into()).spawn(move || {
        runtime.block_on(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = serve(epoch, &shared, told, requests) => {}
            }
        });
        // What else runs there goes with the runtime.
    })?;
    Ok(handle)
}

/// Follows the engine's ranks, and starts a task for each watcher.
async fn serve(
    epoch: u64,
    shared: &Arc<Shared>,
    mut feeds: tokio::sync::watch::Receiver<Option<Feed>>,
    mut requests: mpsc::Receiver<mpsc::Sender<Result<v1::KvEvent, Status>>>,
) {
    let tasks = Tasks::default();
    let room = Arc::new(Semaphore::new(WATCHERS_MAX));
    loop {
        tokio::select! {
            biased;
            Ok(()) = feeds.changed() => {
                let feed = feeds.borrow_and_update().clone();
                if let Some(feed) = feed {
                    // The tasks of the ranks before end: nobody can ask them any more.
                    shared.board.replace(follow(&feed, shared, &tasks));
                }
            }
            Some(events) = requests.recv() => {
                let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
                    let _ = events.try_send(Err(Status::resource_exhausted(format!(
                        "{WATCHERS_MAX} routers watch already"
                    ))));
                    continue;
                };
                let shared = Arc::clone(shared);
                tasks.spawn(async move {
                    watch::run(epoch, &shared, events).await;
                    drop(place);
                });
            }
            else => return,
        }
    }
}

/// Starts a task for each rank; returns how to ask them.
fn follow(feed: &Feed, shared: &Arc<Shared>, tasks: &Tasks) -> Vec<Asks> {
    if let Err(why) = &feed.publishers {
        tracing::info!(why, "no KV events: what is resident is not published");
    }
    let ranks = (0..feed.ranks).map(|dp_rank| {
        let (asks, mut snapshots) = mpsc::channel(ASKS);
        let follower = source_of(feed, dp_rank).and_then(|source| {
            let pages_max = feed.pool_pages.saturating_mul(PAGES_PER_POOL_PAGE);
            let rank = Rank::new(feed.page_tokens, pages_max).map_err(|error| error.to_string())?;
            Ok((source, rank))
        });
        let shared = Arc::clone(shared);
        tasks.spawn(async move {
            match follower {
                Ok((source, rank)) => Follower::new(source, rank, shared, snapshots).run().await,
                Err(why) => source::answer_unknown(&why, &shared, &mut snapshots).await,
            }
        });
        asks
    });
    ranks.collect()
}

fn source_of(feed: &Feed, dp_rank: u32) -> Result<Source, String> {
    let publishers = feed.publishers.as_ref().map_err(Clone::clone)?;
    let addresses = publishers.addresses(dp_rank);
    let (address, replay) = addresses.ok_or("there is no port for this rank's KV events")?;
    Ok(Source { dp_rank, address, replay, topic: publishers.topic.clone() })
}
