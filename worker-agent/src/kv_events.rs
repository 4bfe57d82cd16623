//! Tells routers which parts of prompts the engine's KV cache holds, for their choice of a worker.
//!
//! An engine counts its cache in *pages*, routers count prompts in *blocks* of one page or more. A
//! *watcher* is a router that receives all changes of the resident blocks, which the cache holds. A
//! *snapshot* lists all resident blocks.
//!
//! All of this runs on a thread of its own, so that a large snapshot delays neither requests nor
//! load reports. The agent only listens to the engine, with one exception: after lost events, it
//! asks the shim to publish the engine's radix tree again (`republish.py`).

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

use contract::v1;
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

/// `control_port` enforces this maximum.
pub const WATCHERS_MAX: usize = 16;
/// Each takes eight bytes of memory per block until it is sent.
const SNAPSHOTS_MAX: usize = 2;
/// A message has at most 256 KiB.
const QUEUED_EVENTS_MAX: usize = 2;
const SNAPSHOT_REQUESTS_MAX: usize = WATCHERS_MAX;

struct Shared {
    log: EventLog,
    shim: ShimHandle,
    republish_interval: Duration,
    metrics: Metrics,
    snapshot_permits: Semaphore,
}

#[derive(Debug)]
pub struct KvSetup {
    /// A router tells this process's sequence numbers by it from an earlier process's.
    pub epoch: u64,
    pub shim: ShimHandle,
    /// The shortest time between two requests for one rank's radix tree.
    pub republish_interval: Duration,
    pub metrics: Metrics,
}

pub type KvEventStream = mpsc::Receiver<Result<v1::KvEvent, Status>>;

#[derive(Debug)]
struct NewWatcher {
    sender: mpsc::Sender<Result<v1::KvEvent, Status>>,
    close_order: CancellationToken,
}

#[derive(Debug, Clone)]
pub struct KvHandle {
    new_watchers: mpsc::Sender<NewWatcher>,
    publisher_info: tokio::sync::watch::Sender<Option<PublisherInfo>>,
}

impl KvHandle {
    /// If `info` differs from the present value, the agent connects again to all ranks.
    pub fn set_publishers(&self, info: PublisherInfo) {
        self.publisher_info.send_if_modified(|present_info| {
            let is_new = present_info.as_ref() != Some(&info);
            *present_info = Some(info);
            is_new
        });
    }

    /// The stream ends with an error when the watcher reads too slowly. If the watcher takes
    /// nothing at all, the stream can't end, and `close_order` is cancelled.
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

/// The thread ends when `token` is cancelled.
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
                    // This ends the old ranks' tasks, by dropping their snapshot senders.
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

/// The result is in rank order.
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

fn rank_addresses(info: &PublisherInfo, dp_rank: u32) -> Result<RankAddresses, String> {
    let publishers = info.publishers.as_ref().map_err(Clone::clone)?;
    let addresses = publishers.addresses(dp_rank);
    let (address, replay_address) = addresses
        .ok_or("there is no socket for this rank's KV events: ipc:// serves one rank only")?;
    Ok(RankAddresses { dp_rank, address, replay_address, topic: publishers.topic.clone() })
}
