//! Drains the agent at shutdown: lets running turns end, aborts late ones, closes all sessions.
//!
//! A turn is one request and its answer. The owner task begins a drain when the agent stops, and
//! calls this module after each message. The session table refuses new turns, and closes each
//! session when its last turn has ended. This module aborts the turns that still run after the
//! grace period, and tells the caller when no turn and no close is left.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::warn;

use super::Owner;

/// The interval between aborts of the remaining turns after a drain's grace period. Aborts are
/// repeated because the engine forgets an abort that arrives before its turn.
const ABORT_INTERVAL: Duration = Duration::from_millis(500);

/// A drain that has begun.
pub(super) struct Drain {
    /// When the running turns are aborted next. The first time is the end of the grace period.
    pub(super) next_abort_at: Instant,
    /// Tells the caller that the drain is complete. `None` once the caller was told.
    pub(super) reply: Option<oneshot::Sender<()>>,
}

impl Owner {
    /// Completes the drain when nothing is left, and aborts running turns after the grace period.
    pub(super) fn advance_drain(&mut self, now: Instant) {
        let Some(drain) = &mut self.drain else { return };
        let running_turns = self.table.rids_inside().count();
        // Without an engine, no close can be confirmed, so the drain doesn't wait for closes.
        let is_engine_gone = self.engine_info.is_none() && running_turns == 0;
        if running_turns + self.table.pending_count() == 0 || is_engine_gone {
            if let Some(reply) = drain.reply.take() {
                let _ = reply.send(());
            }
            return;
        }
        if now >= drain.next_abort_at {
            drain.next_abort_at = now + ABORT_INTERVAL;
            warn!(turns = running_turns, "the drain's time limit has passed; aborting turns");
            let engine = self.setup.engine.clone();
            let rids: Vec<String> = self.table.rids_inside().map(str::to_owned).collect();
            self.tasks.spawn(async move {
                // In the engine, turns of the Responses API have ids with the prefix `resp_`. Which
                // turns these are isn't known here, so both ids are aborted.
                let engine_rids = rids.iter().flat_map(|rid| [rid.clone(), format!("resp_{rid}")]);
                for rid in engine_rids {
                    if let Err(error) = engine.abort(&rid).await {
                        warn!(rid, %error, "can't abort a turn at the engine");
                    }
                }
            });
        }
    }
}
