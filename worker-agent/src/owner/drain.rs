//! The owner's drain: lets running turns end, then aborts the rest, and closes every session.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::warn;

use super::Owner;

/// The interval between aborts of the remaining turns after a drain's deadline.
const ABORT_AGAIN: Duration = Duration::from_millis(500);

/// A drain that has begun.
pub(super) struct Drain {
    /// From this time on the running turns are aborted, repeatedly: the engine forgets an abort
    /// that arrives before its turn.
    pub(super) deadline: Instant,
    pub(super) done: Option<oneshot::Sender<()>>,
}

impl Owner {
    /// Completes the drain when nothing is left, and aborts running turns after the deadline.
    pub(super) fn advance_drain(&mut self, now: Instant) {
        let Some(drain) = &mut self.drain else { return };
        let running = self.table.rids_inside().count();
        let gone = self.engine_info.is_none() && running == 0;
        if running + self.table.pending_count() == 0 || gone {
            if let Some(done) = drain.done.take() {
                let _ = done.send(());
            }
            return;
        }
        if now >= drain.deadline {
            drain.deadline = now + ABORT_AGAIN;
            warn!(turns = running, "the drain's time limit has passed; aborting turns");
            let engine = self.setup.engine.clone();
            let rids: Vec<String> = self.table.rids_inside().map(str::to_owned).collect();
            self.tasks.spawn(async move {
                // The engine prefixes the request ids of the Responses API with `resp_`.
                let named = rids.iter().flat_map(|rid| [rid.clone(), format!("resp_{rid}")]);
                for rid in named {
                    if let Err(error) = engine.abort(&rid).await {
                        warn!(rid, %error, "can't abort a turn at the engine");
                    }
                }
            });
        }
    }
}
