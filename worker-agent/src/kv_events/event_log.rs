//! Keeps the recent changes of resident blocks for all watchers, and passes on snapshot requests.
//!
//! A *watcher* is a router that receives all changes of the blocks that the engine's cache holds. A
//! *rank* is a data parallel rank of the engine, each with its own cache. The ranks' tasks
//! (`subscriber`) write to the log and never wait for watchers. The watchers' tasks (`watch`) read
//! it. If a watcher reads too slowly, the log has already dropped entries that the watcher needs,
//! and the watcher's stream ends.
//!
//! A *snapshot* is the list of all blocks that are resident on a rank. A watcher's task requests a
//! snapshot from the rank's task at the start, and after each [`EntryContent::Reset`].

use std::sync::Arc;

use parking_lot::Mutex;
use proto::kv::Change;
use tokio::sync::{mpsc, oneshot, watch};

use super::bounded_log::{BoundedLog, Dropped};

/// The maximum bytes of changes kept for watchers. This is enough for a million blocks, or for the
/// changes of some minutes.
const LOG_BYTES_MAX: usize = 8 << 20;

/// One entry of the log: something that happened on a rank.
#[derive(Debug)]
pub(super) struct LogEntry {
    pub(super) dp_rank: u32,
    pub(super) content: EntryContent,
}

/// What happened on a rank.
#[derive(Debug)]
pub(super) enum EntryContent {
    /// Blocks became resident, or are no longer resident.
    Changes(Vec<Change>),
    /// All earlier changes of the rank are void. A watcher must request a new snapshot.
    Reset,
}

/// All resident blocks of a rank, at a position in the log.
#[derive(Debug)]
pub(super) struct RankSnapshot {
    /// The changes that tell a watcher all resident blocks, or the reason why they are unknown.
    pub(super) changes: Result<Vec<Change>, String>,
    /// The number of the first log entry that the snapshot doesn't contain.
    pub(super) next_entry: u64,
}

/// The channel over which watchers request a rank's snapshot. The rank's task answers each request.
pub(super) type SnapshotRequests = mpsc::Sender<oneshot::Sender<RankSnapshot>>;

/// The log and the ranks' request channels, shared by the tasks of the ranks and of the watchers.
#[derive(Debug)]
pub(super) struct EventLog {
    log: Mutex<BoundedLog<LogEntry>>,
    /// The number that the next entry will have.
    next_number: watch::Sender<u64>,
    /// The request channel of each rank of the present engine, in rank order.
    rank_requests: watch::Sender<Vec<SnapshotRequests>>,
}

impl EventLog {
    pub(super) fn new() -> Self {
        let log = Mutex::new(BoundedLog::new(LOG_BYTES_MAX));
        Self { log, next_number: watch::Sender::new(0), rank_requests: watch::Sender::default() }
    }

    /// Appends an entry, and wakes the watchers that wait for one.
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

    /// Returns the number that the next entry will have.
    pub(super) fn next_number(&self) -> u64 {
        *self.next_number.borrow()
    }

    /// Returns the entry with a number, or `None` if it doesn't exist yet.
    pub(super) fn get(&self, number: u64) -> Result<Option<Arc<LogEntry>>, Dropped> {
        self.log.lock().get(number)
    }

    /// Returns a receiver that wakes at each new entry.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.next_number.subscribe()
    }

    /// Replaces all ranks. Appends a reset for each old or new rank, so that the watchers request
    /// its snapshot.
    pub(super) fn replace_ranks(&self, ranks: Vec<SnapshotRequests>) {
        let new_count = ranks.len();
        let old_count = self.rank_requests.send_replace(ranks).len();
        for dp_rank in (0..).take(new_count.max(old_count)) {
            self.append(dp_rank, EntryContent::Reset);
        }
    }

    /// Returns the number of ranks.
    pub(super) fn rank_count(&self) -> usize {
        self.rank_requests.borrow().len()
    }

    /// Requests the snapshot of a rank. Returns `None` if the rank is replaced meanwhile. In that
    /// case, a reset of the rank follows in the log.
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
