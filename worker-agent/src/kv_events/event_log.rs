//! Keeps the recent changes of resident blocks for all watchers, and passes on snapshot requests.
//!
//! The ranks' tasks never wait for watchers. If a watcher reads too slowly, the log has dropped
//! entries that it needs, and its stream ends.

use std::sync::Arc;

use blocks::kv::Change;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use super::bounded_log::{BoundedLog, Dropped};

/// Enough for a million blocks, or for the changes of some minutes.
const LOG_BYTES_MAX: usize = 8 << 20;

#[derive(Debug)]
pub(super) struct LogEntry {
    pub(super) dp_rank: u32,
    pub(super) content: EntryContent,
}

#[derive(Debug)]
pub(super) enum EntryContent {
    Changes(Vec<Change>),
    /// All earlier changes of the rank are void: a watcher must request a new snapshot.
    Reset,
}

#[derive(Debug)]
pub(super) struct RankSnapshot {
    /// The error is why the resident blocks are unknown.
    pub(super) changes: Result<Vec<Change>, String>,
    /// The first log entry that the snapshot doesn't contain.
    pub(super) next_entry: u64,
}

pub(super) type SnapshotRequests = mpsc::Sender<oneshot::Sender<RankSnapshot>>;

#[derive(Debug)]
pub(super) struct EventLog {
    log: Mutex<BoundedLog<LogEntry>>,
    next_number: watch::Sender<u64>,
    /// The ranks of the present engine, in order.
    rank_requests: watch::Sender<Vec<SnapshotRequests>>,
}

impl EventLog {
    pub(super) fn new() -> Self {
        let log = Mutex::new(BoundedLog::new(LOG_BYTES_MAX));
        Self { log, next_number: watch::Sender::new(0), rank_requests: watch::Sender::default() }
    }

    pub(super) fn append(&self, dp_rank: u32, content: EntryContent) {
        let bytes = match &content {
            EntryContent::Changes(changes) => changes.iter().map(Change::wire_bytes).sum(),
            EntryContent::Reset => size_of::<LogEntry>(),
        };
        let next_number = {
            let mut log = self.log.lock();
            log.push(LogEntry { dp_rank, content }, bytes);
            log.next_number()
        };
        self.next_number.send_replace(next_number);
    }

    pub(super) fn next_number(&self) -> u64 {
        *self.next_number.borrow()
    }

    /// `None` if the entry doesn't exist yet.
    pub(super) fn get(&self, number: u64) -> Result<Option<Arc<LogEntry>>, Dropped> {
        self.log.lock().get(number)
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.next_number.subscribe()
    }

    /// The reset of each old and new rank makes the watchers request its snapshot.
    pub(super) fn replace_ranks(&self, ranks: Vec<SnapshotRequests>) {
        let new_count = ranks.len();
        let old_count = self.rank_requests.send_replace(ranks).len();
        for dp_rank in (0..).take(new_count.max(old_count)) {
            self.append(dp_rank, EntryContent::Reset);
        }
    }

    pub(super) fn rank_count(&self) -> usize {
        self.rank_requests.borrow().len()
    }

    /// `None` if the rank is replaced meanwhile. Then a reset of the rank follows in the log.
    pub(super) async fn request_snapshot(&self, dp_rank: u32) -> Option<RankSnapshot> {
        let requests = self.rank_requests.borrow().get(dp_rank as usize).cloned();
        let Some(requests) = requests else {
            let why = format!("the engine has no rank {dp_rank} any more");
            return Some(RankSnapshot { changes: Err(why), next_entry: self.next_number() });
        };
        let (reply, answer) = oneshot::channel();
        requests.send(reply).await.ok()?;
        answer.await.ok()
    }
}
