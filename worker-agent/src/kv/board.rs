//! What all watchers hear, and how they ask for all that is resident. Ranks write to it; nobody
//! waits for anybody: a watcher that reads too slowly finds that it has missed some.

use std::sync::Arc;

use parking_lot::Mutex;
use proto::kv::Change;
use tokio::sync::{mpsc, oneshot, watch};

use super::log::{Behind, Log};

/// Bytes of changes kept for watchers: those of minutes, and a million blocks.
const LOG_BYTES_MAX: usize = 8 << 20;

/// Something that happened on a rank.
#[derive(Debug)]
pub(super) struct News {
    pub(super) dp_rank: u32,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Changes(Vec<Change>),
    /// What was said of the rank is void: ask it for all.
    Anew,
}

/// Everything that is resident on a rank, or why nobody knows.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) changes: Result<Vec<Change>, String>,
    /// News of the rank before this number are in it.
    pub(super) at: u64,
}

/// How to ask a rank.
pub(super) type Asks = mpsc::Sender<oneshot::Sender<Snapshot>>;

/// Shared by ranks and watchers.
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

    /// Number of the next news.
    pub(super) fn next(&self) -> u64 {
        *self.next.borrow()
    }

    pub(super) fn get(&self, number: u64) -> Result<Option<Arc<News>>, Behind> {
        self.log.lock().get(number)
    }

    /// Wakes at news.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }

    /// Other ranks take the place of all before; whoever watches asks them.
    pub(super) fn replace(&self, ranks: Vec<Asks>) {
        let count = ranks.len();
        let before = self.ranks.send_replace(ranks).len();
        for dp_rank in (0..).take(count.max(before)) {
            self.tell(dp_rank, What::Anew);
        }
    }

    /// Ranks there are.
    pub(super) fn ranks(&self) -> usize {
        self.ranks.borrow().len()
    }

    /// All that is resident on a rank. None where another takes its place: news of it follow.
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
