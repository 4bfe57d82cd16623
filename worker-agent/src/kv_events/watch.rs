//! Streams the engine's resident blocks to one watcher: a snapshot, then all changes.
//!
//! A watcher's task holds no data of its own except the snapshot that it is sending.

use std::{collections::HashMap, time::Duration};

use blocks::kv::{Change, RankChange};
use contract::v1;
use tokio::{sync::mpsc, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tracing::warn;

use super::{
    NewWatcher, Shared,
    event_log::{EntryContent, LogEntry, RankSnapshot},
};

/// Includes the envelope.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// Leaves 1 KiB for the envelope.
const CHANGES_BYTES_MAX: usize = MESSAGE_BYTES_MAX - 1024;
/// While its snapshot is sent, a watcher has one of the few permits, for which others wait.
const SEND_TIME_MAX: Duration = Duration::from_secs(20);

struct StreamEnded;

struct EventSender {
    sender: mpsc::Sender<Result<v1::KvEvent, Status>>,
    close_order: CancellationToken,
    epoch: u64,
    sequence: u64,
}

pub(super) async fn serve_watcher(epoch: u64, shared: &Shared, watcher: NewWatcher) {
    let NewWatcher { sender, close_order } = watcher;
    let mut events = EventSender { sender, close_order, epoch, sequence: 0 };
    shared.metrics.add_watchers(1);
    // The last message has told the watcher the reason, unless it has gone.
    let Err(StreamEnded) = stream_changes(shared, &mut events).await;
    shared.metrics.add_watchers(-1);
}

async fn stream_changes(
    shared: &Shared,
    events: &mut EventSender,
) -> Result<std::convert::Infallible, StreamEnded> {
    let mut entry_number = shared.log.next_number();
    let mut new_entries = shared.log.subscribe();
    // By rank: the first log entry that is newer than the latest snapshot sent.
    let mut first_newer_entries = HashMap::new();
    for dp_rank in (0..).take(shared.log.rank_count()) {
        send_snapshot(shared, events, dp_rank, &mut first_newer_entries).await?;
    }
    loop {
        let Ok(entry) = shared.log.get(entry_number) else {
            return Err(events
                .end_with("the watcher is too many changes behind; watch again")
                .await);
        };
        let Some(entry) = entry else {
            tokio::select! {
                biased;
                () = events.sender.closed() => return Err(StreamEnded),
                changed = new_entries.changed() => changed.map_err(|_| StreamEnded)?,
            }
            continue;
        };
        let LogEntry { dp_rank, content } = &*entry;
        // The snapshot already contains the earlier entries.
        if first_newer_entries.get(dp_rank).is_none_or(|first| *first <= entry_number) {
            match content {
                EntryContent::Reset => {
                    send_snapshot(shared, events, *dp_rank, &mut first_newer_entries).await?;
                }
                EntryContent::Changes(changes) => {
                    events.send_all(*dp_rank, changes.iter().cloned()).await?;
                }
            }
        }
        entry_number += 1;
    }
}

/// Sends nothing if the rank is being replaced: a reset of the rank then follows in the log.
async fn send_snapshot(
    shared: &Shared,
    events: &mut EventSender,
    dp_rank: u32,
    first_newer_entries: &mut HashMap<u32, u64>,
) -> Result<(), StreamEnded> {
    let _permit = tokio::select! {
        biased;
        () = events.sender.closed() => return Err(StreamEnded),
        permit = shared.snapshot_permits.acquire() => permit.map_err(|_| StreamEnded)?,
    };
    let Some(RankSnapshot { changes, next_entry }) = shared.log.request_snapshot(dp_rank).await
    else {
        return Ok(());
    };
    first_newer_entries.insert(dp_rank, next_entry);
    let changes = changes.unwrap_or_else(|why| vec![Change::Unknown { why }]);
    events.send_all(dp_rank, changes.into_iter()).await
}

impl EventSender {
    async fn send_all(
        &mut self,
        dp_rank: u32,
        changes: impl Iterator<Item = Change>,
    ) -> Result<(), StreamEnded> {
        let (mut message_changes, mut message_bytes) = (vec![], 0);
        for part in changes.flat_map(split_change) {
            let part_bytes = part.wire_bytes();
            if message_bytes + part_bytes > CHANGES_BYTES_MAX {
                self.send(std::mem::take(&mut message_changes)).await?;
                message_bytes = 0;
            }
            message_bytes += part_bytes;
            message_changes.push(v1::KvChange::from(RankChange { dp_rank, change: part }));
        }
        if message_changes.is_empty() { Ok(()) } else { self.send(message_changes).await }
    }

    async fn send(&mut self, changes: Vec<v1::KvChange>) -> Result<(), StreamEnded> {
        let event = v1::KvEvent { epoch: self.epoch, sequence: self.sequence, changes };
        self.sequence += 1;
        self.send_item(Ok(event)).await
    }

    async fn end_with(&self, why: &'static str) -> StreamEnded {
        let _ = self.send_item(Err(Status::resource_exhausted(why))).await;
        StreamEnded
    }

    /// Closes the watcher's connection if the watcher takes nothing.
    async fn send_item(&self, item: Result<v1::KvEvent, Status>) -> Result<(), StreamEnded> {
        match timeout(SEND_TIME_MAX, self.sender.send(item)).await {
            Ok(sent) => sent.map_err(|_| StreamEnded),
            Err(_) => {
                warn!("a watcher took no KV message for too long, its connection is closed");
                // The stream can't end by itself: what is queued waits for the watcher.
                self.close_order.cancel();
                Err(StreamEnded)
            }
        }
    }
}

fn split_change(change: Change) -> Vec<Change> {
    // Each hash has eight bytes. The space of 16 is left for the change's other fields.
    const PART_BLOCKS_MAX: usize = CHANGES_BYTES_MAX / size_of::<u64>() - 16;
    match change {
        Change::Stored { tier, parent, blocks } if blocks.len() > PART_BLOCKS_MAX => {
            let mut next_parent = parent;
            let parts = blocks.chunks(PART_BLOCKS_MAX).map(|part| {
                let parent = std::mem::replace(&mut next_parent, part.last().copied());
                Change::Stored { tier, parent, blocks: part.to_vec() }
            });
            parts.collect()
        }
        Change::Removed { tier, blocks } if blocks.len() > PART_BLOCKS_MAX => {
            let parts = blocks.chunks(PART_BLOCKS_MAX);
            parts.map(|part| Change::Removed { tier, blocks: part.to_vec() }).collect()
        }
        change => vec![change],
    }
}
