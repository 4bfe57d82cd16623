//! Streams residency to one watcher: a snapshot of each rank, then all changes.
//!
//! The messages have a bounded size. A watcher's task holds nothing but the snapshot that it is
//! sending.

use std::{collections::HashMap, time::Duration};

use proto::{
    kv::{Change, RankChange},
    v1,
};
use tokio::{sync::mpsc, time::timeout};
use tonic::Status;

use super::{
    Shared,
    event_log::{EntryContent, LogEntry, RankSnapshot},
};

/// The maximum bytes of a message, envelope included.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
const CHANGES_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 1024;
/// How long a watcher may take no message before it is disconnected; others wait for their
/// snapshots.
const STALL_MAX: Duration = Duration::from_secs(20);

/// The stream is over: the watcher has gone, or was disconnected with a reason.
struct StreamEnded;

/// The sending half of one stream.
struct EventSender {
    sender: mpsc::Sender<Result<v1::KvEvent, Status>>,
    epoch: u64,
    sequence: u64,
}

/// Serves one watcher until it goes or is too slow.
pub(super) async fn serve_watcher(
    epoch: u64,
    shared: &Shared,
    sender: mpsc::Sender<Result<v1::KvEvent, Status>>,
) {
    let mut events = EventSender { sender, epoch, sequence: 0 };
    shared.metrics.add_watchers(1);
    // If the watcher is still there, it already has the reason.
    let Err(StreamEnded) = stream_changes(shared, &mut events).await;
    shared.metrics.add_watchers(-1);
}

async fn stream_changes(
    shared: &Shared,
    events: &mut EventSender,
) -> Result<std::convert::Infallible, StreamEnded> {
    let mut next = shared.log.next_number();
    let mut newest = shared.log.subscribe();
    // By rank: the entries before this number are contained in the snapshot already sent.
    let mut known = HashMap::new();
    for dp_rank in (0..).take(shared.log.rank_count()) {
        send_snapshot(shared, events, dp_rank, &mut known).await?;
    }
    loop {
        let Ok(entry) = shared.log.get(next) else {
            return Err(events
                .end_with("the watcher is too many changes behind; watch again")
                .await);
        };
        let Some(entry) = entry else {
            tokio::select! {
                biased;
                () = events.sender.closed() => return Err(StreamEnded),
                changed = newest.changed() => changed.map_err(|_| StreamEnded)?,
            }
            continue;
        };
        let LogEntry { dp_rank, content } = &*entry;
        if known.get(dp_rank).is_none_or(|from| *from <= next) {
            match content {
                EntryContent::Reset => send_snapshot(shared, events, *dp_rank, &mut known).await?,
                EntryContent::Changes(changes) => {
                    events.send_all(*dp_rank, changes.iter().cloned()).await?;
                }
            }
        }
        next += 1;
    }
}

/// Sends a snapshot of one rank.
async fn send_snapshot(
    shared: &Shared,
    events: &mut EventSender,
    dp_rank: u32,
    known: &mut HashMap<u32, u64>,
) -> Result<(), StreamEnded> {
    let _place = tokio::select! {
        biased;
        () = events.sender.closed() => return Err(StreamEnded),
        place = shared.snapshots.acquire() => place.map_err(|_| StreamEnded)?,
    };
    let Some(RankSnapshot { changes, next_entry }) = shared.log.request_snapshot(dp_rank).await
    else {
        return Ok(());
    };
    known.insert(dp_rank, next_entry);
    let changes = changes.unwrap_or_else(|why| vec![Change::Unknown { why }]);
    events.send_all(dp_rank, changes.into_iter()).await
}

impl EventSender {
    /// Sends changes, in as many messages as they need.
    async fn send_all(
        &mut self,
        dp_rank: u32,
        changes: impl Iterator<Item = Change>,
    ) -> Result<(), StreamEnded> {
        let (mut message, mut bytes) = (vec![], 0);
        for part in changes.flat_map(split_change) {
            let size = part.wire_bytes();
            if bytes + size > CHANGES_BYTES_MAX {
                self.send(std::mem::take(&mut message)).await?;
                bytes = 0;
            }
            bytes += size;
            message.push(v1::KvChange::from(RankChange { dp_rank, change: part }));
        }
        if message.is_empty() { Ok(()) } else { self.send(message).await }
    }

    async fn send(&mut self, changes: Vec<v1::KvChange>) -> Result<(), StreamEnded> {
        let event = v1::KvEvent { epoch: self.epoch, sequence: self.sequence, changes };
        self.sequence += 1;
        match timeout(STALL_MAX, self.sender.send(Ok(event))).await {
            Ok(sent) => sent.map_err(|_| StreamEnded),
            Err(_) => {
                Err(self.end_with("the watcher took no message for too long; watch again").await)
            }
        }
    }

    /// Ends the stream with `why` as its last message. A watcher that takes no message at all is
    /// dropped without it.
    async fn end_with(&self, why: &'static str) -> StreamEnded {
        let status = Status::resource_exhausted(why);
        let _ = timeout(STALL_MAX, self.sender.send(Err(status))).await;
        StreamEnded
    }
}

/// Splits a change into parts that each fit into a message.
fn split_change(change: Change) -> Vec<Change> {
    const BLOCKS: usize = CHANGES_BYTES_MAX / size_of::<u64>() - 16;
    match change {
        Change::Stored { tier, parent, blocks } if blocks.len() > BLOCKS => {
            let mut parent = parent;
            let parts = blocks.chunks(BLOCKS).map(|part| {
                let before = std::mem::replace(&mut parent, part.last().copied());
                Change::Stored { tier, parent: before, blocks: part.to_vec() }
            });
            parts.collect()
        }
        Change::Removed { tier, blocks } if blocks.len() > BLOCKS => {
            let parts = blocks.chunks(BLOCKS);
            parts.map(|part| Change::Removed { tier, blocks: part.to_vec() }).collect()
        }
        change => vec![change],
    }
}
