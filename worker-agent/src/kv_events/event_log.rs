//! The recent changes of all ranks, read by all watchers, and the way to request a rank's snapshot.
//!
//! Ranks write to the board and never wait for watchers. A watcher that reads too slowly finds that
//! entries it needs were dropped.

use std::sync::Arc;

use parking_lot::Mutex;
use proto::kv::Change;
use tokio::sync::{mpsc, oneshot, watch};

use super::bounded_log::{Behind, Log};

/// The maximum bytes of changes kept for watchers: those of some minutes, or a million blocks.
const LOG_BYTES_MAX: usize = 8 << 20;

/// One entry of the log: something that happened on a rank.
#[derive(Debug)]
pub(super) struct News {
    pub(super) dp_rank: u32,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Changes(Vec<Change>),
    /// All earlier changes of the rank are void: request a new snapshot.
    Anew,
}

/// Everything that is resident on a rank, or the reason why it is unknown.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) changes: Result<Vec<Change>, String>,
    /// The snapshot contains all entries of this rank with a number lower than this.
    pub(super) at: u64,
}

/// The channel for requesting a rank's snapshot.
pub(super) type Asks = mpsc::Sender<oneshot::Sender<Snapshot>>;

/// State shared by the ranks and the watchers.
#[derive(Debug)]
pub(super) struct Board {
    log: Mutex<Log<News>>,
    next: watch::Sender<u64>,
    ranks: watch::Sender<Vec<Asks>>,
}

impl Board {
    pub(super) fn new() -> Self {
        let log = Mutex::new(Log::new(LOG_BYTES_MAX));
        Self { log, next: watch::Sender::new(0), ranks: watch::Sender::default() }
    }

    pub(super) fn tell(&self, dp_rank: u32, what: What) {
        let bytes = match &what {
            What::Changes(changes) => changes.iter().map(Change::wire_bytes).sum(),
            What::Anew => size_of::<News>(),
        };
        let next = {
            let mut log = self.log.lock();
            log.push(News { dp_rank, what }, bytes);
            log.next()
        };
        self.next.send_replace(next);
    }

    /// Returns the number that the next entry will have.
    pub(super) fn next(&self) -> u64 {
        *self.next.borrow()
    }

    pub(super) fn get(&self, number: u64) -> Result<Option<Arc<News>>, Behind> {
        self.log.lock().get(number)
    }

    /// Returns a receiver that wakes at each new entry.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    /// Replaces all ranks. An entry for each old or new rank makes the watchers request its
    /// snapshot.
    pub(super) fn replace(&self, ranks: Vec<Asks>) {
        let count = ranks.len();
        let before = self.ranks.send_replace(ranks).len();
        for dp_rank in (0..).take(count.max(before)) {
            self.tell(dp_rank, What::Anew);
        }
    }

    /// Returns the number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.ranks.borrow().len()
    }

    /// Requests the snapshot of a rank. Returns `None` if the rank is replaced meanwhile; an entry
    /// for the rank follows in that case.
    pub(super) async fn ask(&self, dp_rank: u32) -> Option<Snapshot> {
        let asks = self.ranks.borrow().get(dp_rank as usize).cloned();
        let Some(asks) = asks else {
            let why = format!("the engine has no rank {dp_rank} any more");
            return Some(Snapshot { changes: Err(why), at: self.next() });
        };
        let (reply, answer) = oneshot::channel();
        asks.send(reply).await.ok()?;
        answer.await.ok()
    }
}
