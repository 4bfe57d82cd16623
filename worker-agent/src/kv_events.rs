//! Tells routers which parts of prompts the engine's KV cache holds, for their choice of a worker.
//!
//! An engine counts its cache in *pages*, and publishes a KV event when it stores or evicts some.
//! Routers count prompts in *blocks* of one page or more. A block is *resident* while the cache
//! holds it. A *watcher* is a router that receives all changes of resident blocks. A *snapshot*
//! lists all resident blocks. A *rank* is a data parallel rank of the engine, each with its own
//! cache.
//!
//! Modules without I/O: [`decode`] decodes the engine's KV event messages, [`sequencer`] puts them
//! in sequence, [`hash_check`] checks page hashes against tokens, [`pages`] maps pages to blocks,
//! and `rank_cache` joins these. Modules with I/O: `subscriber` reads one rank's publisher over
//! `zmtp`, `event_log` keeps the recent changes, and `watch` streams them to one router. All of
//! this runs on a thread of its own, so that a large snapshot delays neither requests nor load
//! reports.
//!
//! `lib.rs` calls [`start`], `owner` sets the engine's publishers through the [`KvHandle`], and
//! `control_port` adds a watcher for each router that asks. The agent only listens to the engine,
//! with one exception. After lost events, it asks the shim (Berth's plugin in the engine) to
//! publish the engine's radix tree again: see `republish.py`.

mod bounded_log;
pub mod decode;
mod event_log;
pub mod hash_check;
pub mod metrics;
mod msgpack;
pub mod pages;
pub mod publisher_info;
mod rank_cache;
pub mod sequencer;
mod subscriber;
mod watch;
pub mod zmtp;

use std::{sync::Arc, time::Duration};

use proto::v1;
use service::tasks::Tasks;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use self::{
    event_log::{EventLog, SnapshotRequests},
    metrics::Metrics,
    publisher_info::{PublisherAddresses, PublisherInfo},
    rank_cache::RankCache,
    subscriber::{RankAddresses, Subscriber},
};
use crate::shim::ShimHandle;

/// The maximum number of routers that watch at once. `control_port` sees to it.
pub const WATCHERS_MAX: usize = 16;
/// The maximum number of snapshots that are made and sent at once. Each takes eight bytes of memory
/// per block until it is sent.
const SNAPSHOTS_MAX: usize = 2;
/// The maximum number of queued messages for one watcher, each of at most 256 KiB.
const QUEUED_EVENTS_MAX: usize = 2;
/// The maximum number of watchers that wait for a snapshot of one rank.
const SNAPSHOT_REQUESTS_MAX: usize = WATCHERS_MAX;

/// State shared by the ranks' tasks and the watchers' tasks.
struct Shared {
    log: EventLog,
    shim: ShimHandle,
    republish_interval: Duration,
    metrics: Metrics,
    /// Bounds the snapshots that are made and sent at once.
    snapshot_permits: Semaphore,
}

/// The arguments of [`start`].
#[derive(Debug)]
pub struct KvSetup {
    /// Identifies this process of the agent. A router uses it to tell this process's sequence
    /// numbers from those of an earlier process.
    pub epoch: u64,
    /// The shim in the engine's process, which publishes the engine's radix tree again on request.
    pub shim: ShimHandle,
    /// The shortest time between two requests for the radix tree of one rank.
    pub republish_interval: Duration,
    /// The agent's metrics.
    pub metrics: Metrics,
}

/// The stream of messages for one watcher.
pub type KvEventStream = mpsc::Receiver<Result<v1::KvEvent, Status>>;

/// A watcher to add.
#[derive(Debug)]
struct NewWatcher {
    /// The sending half of its stream.
    sender: mpsc::Sender<Result<v1::KvEvent, Status>>,
    /// Closes its connection.
    close_order: CancellationToken,
}

/// Handle to the KV thread: adds watchers and sets the engine's publishers.
#[derive(Debug, Clone)]
pub struct KvHandle {
    new_watchers: mpsc::Sender<NewWatcher>,
    publisher_info: tokio::sync::watch::Sender<Option<PublisherInfo>>,
}

impl KvHandle {
    /// Sets where the engine publishes its KV events. If `info` differs from the present value, the
    /// agent connects again to all ranks.
    pub fn set_publishers(&self, info: PublisherInfo) {
        self.publisher_info.send_if_modified(|present_info| {
            let is_new = present_info.as_ref() != Some(&info);
            *present_info = Some(info);
            is_new
        });
    }

    /// Starts a stream for a watcher: all resident blocks, then all changes. The stream ends with
    /// an error when the watcher reads too slowly. If the watcher takes nothing at all, the stream
    /// can't end, and `close_order` is cancelled.
    ///
    /// # Errors
    /// When too many watchers wait to be added, or when the agent is stopping.
    pub fn watch(&self, close_order: CancellationToken) -> Result<KvEventStream, Status> {
        let (sender, stream) = mpsc::channel(QUEUED_EVENTS_MAX);
        let watcher = NewWatcher { sender, close_order };
        self.new_watchers.try_send(watcher).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => {
                Status::resource_exhausted("too many watch requests at once; try again")
            }
            mpsc::error::TrySendError::Closed(_) => Status::unavailable("the agent is stopping"),
        })?;
        Ok(stream)
    }
}

/// Starts the KV thread. The thread ends when `token` is cancelled.
///
/// # Errors
/// When the thread or its runtime can't be created.
pub fn start(setup: KvSetup, token: CancellationToken) -> std::io::Result<KvHandle> {
    let KvSetup { epoch, shim, republish_interval, metrics } = setup;
    let (new_watchers, watchers_to_add) = mpsc::channel(WATCHERS_MAX);
    let (publisher_info, info_changes) = tokio::sync::watch::channel(None);
    let handle = KvHandle { new_watchers, publisher_info };
    let snapshot_permits = Semaphore::new(SNAPSHOTS_MAX);
    let log = EventLog::new();
    let shared = Shared { log, shim, republish_interval, metrics, snapshot_permits };
    let shared = Arc::new(shared);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("kv".into()).spawn(move || {
        runtime.block_on(async move {
            tokio::select! {
                biased;
                () = token.cancelled() => {}
                () = serve(epoch, &shared, info_changes, watchers_to_add) => {}
            }
        });
        // The runtime drops all other tasks of this thread.
    })?;
    Ok(handle)
}

/// Follows the engine's ranks, and starts a task for each watcher.
async fn serve(
    epoch: u64,
    shared: &Arc<Shared>,
    mut info_changes: tokio::sync::watch::Receiver<Option<PublisherInfo>>,
    mut watchers_to_add: mpsc::Receiver<NewWatcher>,
) {
    let tasks = Tasks::default();
    loop {
        tokio::select! {
            biased;
            Ok(()) = info_changes.changed() => {
                let info = info_changes.borrow_and_update().clone();
                if let Some(info) = info {
                    // This drops the old ranks' snapshot senders, which ends the old ranks' tasks.
                    shared.log.replace_ranks(start_ranks(&info, shared, &tasks));
                }
            }
            Some(watcher) = watchers_to_add.recv() => {
                let shared = Arc::clone(shared);
                tasks.spawn(async move { watch::serve_watcher(epoch, &shared, watcher).await });
            }
            else => return,
        }
    }
}

/// Starts a task for each rank. Returns the channels over which watchers request snapshots, in rank
/// order.
fn start_ranks(info: &PublisherInfo, shared: &Arc<Shared>, tasks: &Tasks) -> Vec<SnapshotRequests> {
    if let Err(why) = &info.publishers {
        tracing::info!(why, "no KV events; resident blocks are not published");
    }
    if info.publishers.as_ref().is_ok_and(PublisherAddresses::are_exposed) {
        tracing::warn!(
            "other hosts can read the engine's KV events, which have the token ids of prompts: \
             publish them on 127.0.0.1 or ipc://"
        );
    }
    let request_channels = (0..info.ranks).map(|dp_rank| {
        let (requests_sender, mut requests) = mpsc::channel(SNAPSHOT_REQUESTS_MAX);
        let subscriber_parts = rank_addresses(info, dp_rank).and_then(|addresses| {
            let rank = RankCache::new(info.page_tokens, info.pool_pages);
            let rank = rank.map_err(|error| error.to_string())?;
            Ok((addresses, rank))
        });
        let shared = Arc::clone(shared);
        tasks.spawn(async move {
            match subscriber_parts {
                Ok((addresses, rank)) => {
                    Subscriber::new(addresses, rank, shared, requests).run().await
                }
                Err(why) => subscriber::answer_unknown(&why, &shared, &mut requests).await,
            }
        });
        requests_sender
    });
    request_channels.collect()
}

/// Returns the addresses of one rank's publisher, or the reason why there are none.
fn rank_addresses(info: &PublisherInfo, dp_rank: u32) -> Result<RankAddresses, String> {
    let publishers = info.publishers.as_ref().map_err(Clone::clone)?;
    let addresses = publishers.addresses(dp_rank);
    let (address, replay_address) = addresses
        .ok_or("there is no socket for this rank's KV events: ipc:// serves one rank only")?;
    Ok(RankAddresses { dp_rank, address, replay_address, topic: publishers.topic.clone() })
}
