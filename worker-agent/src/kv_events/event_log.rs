//! The recent changes of all ranks, read by all watchers, and the way to request a rank's snapshot.
//!
//! Ranks write to the board and never wait for watchers. A watcher that reads too slowly finds that
//! entries it needs were dropped.

use std::sync::Arc;

use parking_lot::Mutex;
use proto::kv::Change;
use tokio::sync::{mpsc, oneshot, watch};

use super::bounded_log::{BoundedLog, Dropped};

/// The maximum bytes of changes kept for watchers: those of some minutes, or a million blocks.
const LOG_BYTES_MAX: usize = 8 << 20;

/// One entry of the log: something that happened on a rank.
#[derive(Debug)]
pub(super) struct LogEntry {
    pub(super) dp_rank: u32,
    pub(super) content: EntryContent,
}

#[derive(Debug)]
pub(super) enum EntryContent {
    Changes(Vec<Change>),
    /// All earlier changes of the rank are void: request a new snapshot.
    Reset,
}

/// Everything that is resident on a rank, or the reason why it is unknown.
#[derive(Debug)]
pub(super) struct RankSnapshot {
    pub(super) changes: Result<Vec<Change>, String>,
    /// The snapshot contains all entries of this rank with a number lower than this.
    pub(super) next_entry: u64,
}

/// The channel for requesting a rank's snapshot.
pub(super) type SnapshotRequests = mpsc::Sender<oneshot::Sender<RankSnapshot>>;

/// State shared by the ranks and the watchers.
#[derive(Debug)]
pub(super) struct EventLog {
    log: Mutex<BoundedLog<LogEntry>>,
    next: watch::Sender<u64>,
    ranks: watch::Sender<Vec<SnapshotRequests>>,
}

impl EventLog {
    pub(super) fn new() -> Self {
        let log = Mutex::new(BoundedLog::new(LOG_BYTES_MAX));
        Self { log, next: watch::Sender::new(0), ranks: watch::Sender::default() }
    }

    pub(super) fn append(&self, dp_rank: u32, content: EntryContent) {
        let bytes = match &content {
            EntryContent::Changes(changes) => changes.iter().map(Change::wire_bytes).sum(),
            EntryContent::Reset => size_of::<LogEntry>(),
        };
        let next = {
            let mut log = self.log.lock();
            log.push(LogEntry { dp_rank, content }, bytes);
            log.next_number()
        };
        self.next.send_replace(next);
    }

    /// Returns the number that the next entry will have.
    pub(super) fn next_number(&self) -> u64 {
        *self.next.borrow()
    }

    pub(super) fn get(&self, number: u64) -> Result<Option<Arc<LogEntry>>, Dropped> {
        self.log.lock().get(number)
    }

    /// Returns a receiver that wakes at each new entry.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    /// Replaces all ranks. An entry for each old or new rank makes the watchers request its
    /// snapshot.
    pub(super) fn replace_ranks(&self, ranks: Vec<SnapshotRequests>) {
        let count = ranks.len();
        let before = self.ranks.send_replace(ranks).len();
        for dp_rank in (0..).take(count.max(before)) {
            self.append(dp_rank, EntryContent::Reset);
        }
    }

    /// Returns the number of ranks.
    pub(super) fn rank_count(&self) -> usize {
        self.ranks.borrow().len()
    }

    /// Requests the snapshot of a rank. Returns `None` if the rank is replaced meanwhile; an entry
    /// for the rank follows in that case.
    pub(super) async fn request_snapshot(&self, dp_rank: u32) -> Option<RankSnapshot> {
        let requests = self.ranks.borrow().get(dp_rank as usize).cloned();
        let Some(requests) = requests else {
            let why = format!("the engine has no rank {dp_rank} any more");
            return Some(RankSnapshot { changes: Err(why), next_entry: self.next_number() });
        };
        let (reply, answer) = oneshot::channel();
        requests.send(reply).await.ok()?;
        answer.await.ok()
    }
}
