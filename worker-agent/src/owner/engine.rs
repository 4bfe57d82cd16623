//! The owner's engine calls, and its handling of news about the engine.
//!
//! Each call runs in a separate task, whose result comes back as a message.

use std::{sync::Arc, time::Duration};

use tracing::{error, info, warn};

use super::{EngineNews, Owner, handle::OwnerMessage};
use crate::{
    engine::{Engine, Info, stall_detector::StallDetector},
    session::{CloseRequest, CloseResult, Load, OpenResult, journal::Record},
};

/// How much longer the engine's idle limit for sessions is than the agent's. The engine's limit is
/// a fallback, for the case that no agent ever returns. The engine counts from the start of a turn,
/// so the longest turn must fit in.
const ENGINE_BACKSTOP: Duration = Duration::from_secs(24 * 3600);

impl Owner {
    pub(super) fn open_at_engine(&self, incarnation: String, idle_max: Duration) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        self.tasks.spawn(async move {
            let result = match engine.open_session(&incarnation, idle_max + ENGINE_BACKSTOP).await {
                Ok(()) => OpenResult::Yes,
                Err(error) if error.is_ambiguous() => OpenResult::Unknown(error.to_string()),
                Err(error) => OpenResult::No(error.to_string()),
            };
            let _ = mailbox.send(OwnerMessage::OpenResult { incarnation, result }).await;
        });
    }

    /// Reports the result of an open as a message, without calling the engine.
    pub(super) fn report_open_result(&self, incarnation: String, result: OpenResult) {
        let mailbox = self.handle.mailbox.clone();
        self.tasks.spawn(async move {
            let _ = mailbox.send(OwnerMessage::OpenResult { incarnation, result }).await;
        });
    }

    pub(super) fn close_at_engine(&self, close: CloseRequest) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        let shims_report = self
            .engine_info
            .as_ref()
            .is_some_and(|info| self.connected_shims.len() == info.rows.len());
        self.tasks.spawn(async move {
            let result = close_once(&engine, &close, shims_report).await;
            let incarnation = close.incarnation;
            let _ = mailbox.send(OwnerMessage::CloseResult { incarnation, result }).await;
        });
    }

    pub(super) fn handle_engine_news(&mut self, news: EngineNews) {
        match news {
            EngineNews::Up(info) => self.handle_engine_up(info),
            EngineNews::Sample(sample) => {
                let stuck = self.stall_detector.check_sample(&sample, self.setup.stall_max);
                if let (None, Some(reason)) = (&self.stuck_reason, &stuck) {
                    error!(reason, "engine stuck");
                }
                self.stuck_reason = stuck;
                for rank in &sample.ranks {
                    let load =
                        Load { waiting: rank.num_waiting_reqs, used_tokens: rank.num_used_tokens };
                    self.table.handle_load(sample.at, rank.dp_rank, load);
                }
                self.ledger.record_sample(sample);
            }
            EngineNews::Down { reason, gone } => {
                match &self.down_reason {
                    None => error!(reason, gone, "engine down"),
                    // The engine is polled twice a second and mostly fails for the same reason; log
                    // only changes.
                    Some(before) if *before != reason => warn!(reason, "the engine can't be used"),
                    Some(_) => {}
                }
                self.down_reason = Some(reason);
                if gone {
                    self.handle_engine_gone();
                }
            }
        }
    }

    /// Handles the end of the engine's process, which loses every session's KV and history.
    fn handle_engine_gone(&mut self) {
        let Some(info) = self.engine_info.take() else { return };
        let sessions = self.table.iter().count();
        warn!(sessions, "the engine's process has ended; its sessions are lost");
        self.table.handle_engine_lost(now(), self.ledger.set_engine(&info));
        self.stall_detector = StallDetector::default();
        self.stuck_reason = None;
    }

    fn handle_engine_up(&mut self, info: Box<Info>) {
        let known = self.engine_info.as_ref().map(|info| &info.facts.instance);
        if known != Some(&info.facts.instance) {
            self.handle_engine_gone();
            self.table.handle_engine_lost(now(), self.ledger.set_engine(&info));
            self.close_left_sessions(&info);
            self.register_shims_again();
            info!(version = info.facts.version, ranks = info.rows.len(), "engine up");
            // A watcher that learns of the new ranks must find them in the newest report.
            self.publish_report(now());
            self.description.send_replace(Some(Arc::new(self.describe(&info))));
        }
        self.engine_info = Some(info);
        self.down_reason = None;
    }

    /// Closes the sessions that an earlier agent process left open in this engine process.
    fn close_left_sessions(&mut self, info: &Info) {
        let left = self.setup.journal.left_open(&info.facts.instance);
        let record = Record::Engine { instance: info.facts.instance.clone() };
        if let Err(error) = self.setup.journal.write(&record) {
            error!(%error, "the journal can't be written");
        }
        if !left.is_empty() {
            warn!(sessions = left.len(), "closing the sessions that an earlier agent left open");
        }
        for (incarnation, left) in left {
            self.table.inherit_incarnation(now(), incarnation, left.dp_rank, left.rid);
        }
    }
}

/// Tries once to close a session at the engine. A tagged session holds nothing, so its close is
/// complete once the engine has acknowledged it. If shims report when a session's KV is freed, the
/// first attempt relies on that report. Later attempts, and those without a shim, ask the engine.
async fn close_once(engine: &Engine, close: &CloseRequest, shims_report: bool) -> CloseResult {
    let rid = close.rid.as_deref();
    let confirmed = |gone| if gone { CloseResult::Confirmed } else { CloseResult::Kept };
    let closed = match (close.pinned, shims_report && !close.is_repeat) {
        (false, _) => {
            engine.close_session(&close.incarnation).await.map(|()| CloseResult::Confirmed)
        }
        (true, true) => engine.close(&close.incarnation, rid).await.map(|()| CloseResult::NotYet),
        (true, false) => engine.close_and_verify(&close.incarnation, rid).await.map(confirmed),
    };
    closed.unwrap_or_else(|error| {
        warn!(incarnation = close.incarnation, %error, "can't close a session at the engine");
        CloseResult::NotYet
    })
}
