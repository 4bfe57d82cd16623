//! Makes the owner task's calls to the engine, and handles news about the engine.
//!
//! The calls open and close sessions at the engine, as the session table asks. Each call runs in a
//! separate task, and its result comes back to the owner task as a message. The news comes from
//! `engine_monitor`: the engine is up or down, or a sample of its load. When the engine's process
//! ends, all its sessions are lost. [`EngineClient`] makes the HTTP calls, and the session table
//! decides what follows for each session.

use std::{sync::Arc, time::Duration};

use service::clock::now;
use tracing::{error, info, warn};

use super::{EngineNews, Owner, handle::OwnerMessage};
use crate::{
    engine::{EngineClient, EngineInfo, stall_detector::StallDetector},
    session::{CloseRequest, CloseResult, EngineLoad, OpenResult, journal::Record},
};

/// How much longer the engine's idle limit for sessions is than the agent's. The engine's limit
/// only matters if no agent ever returns. The engine counts idle time from the start of a turn, so
/// the margin is longer than any turn.
const ENGINE_IDLE_MARGIN: Duration = Duration::from_secs(24 * 3600);

impl Owner {
    /// Starts a task that opens an incarnation (one life of a session) at the engine.
    pub(super) fn open_at_engine(&self, incarnation: String, idle_max: Duration) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        self.tasks.spawn(async move {
            let result =
                match engine.open_session(&incarnation, idle_max + ENGINE_IDLE_MARGIN).await {
                    Ok(()) => OpenResult::Opened,
                    Err(error) if error.is_ambiguous() => OpenResult::Unknown(error.to_string()),
                    Err(error) => OpenResult::NotOpened(error.to_string()),
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

    /// Starts a task that closes an incarnation at the engine.
    pub(super) fn close_at_engine(&self, close_request: CloseRequest) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        let all_shims_connected = self
            .engine_info
            .as_ref()
            .is_some_and(|info| self.connected_shims.len() == info.rows.len());
        self.tasks.spawn(async move {
            let result = close_once(&engine, &close_request, all_shims_connected).await;
            let incarnation = close_request.incarnation;
            let _ = mailbox.send(OwnerMessage::CloseResult { incarnation, result }).await;
        });
    }

    pub(super) fn handle_engine_news(&mut self, news: EngineNews) {
        match news {
            EngineNews::Up(info) => self.handle_engine_up(info),
            EngineNews::Sample(sample) => {
                let stuck_reason = self.stall_detector.check_sample(&sample, self.setup.stall_max);
                if let (None, Some(reason)) = (&self.stuck_reason, &stuck_reason) {
                    error!(reason, "engine stuck");
                }
                self.stuck_reason = stuck_reason;
                for rank in &sample.ranks {
                    let load = EngineLoad {
                        waiting_requests: rank.num_waiting_reqs,
                        used_tokens: rank.num_used_tokens,
                    };
                    self.table.handle_load(sample.at, rank.dp_rank, load);
                }
                self.ledger.record_sample(sample);
            }
            EngineNews::Down { reason, has_process_ended } => {
                match &self.down_reason {
                    None => error!(reason, gone = has_process_ended, "engine down"),
                    // The engine is polled twice a second, mostly with the same failure. Only a new
                    // reason is logged.
                    Some(last_reason) if *last_reason != reason => {
                        warn!(reason, "the engine can't be used")
                    }
                    Some(_) => {}
                }
                self.down_reason = Some(reason);
                if has_process_ended {
                    self.handle_engine_gone();
                }
            }
        }
    }

    /// Handles the end of the engine's process, which loses every session's KV and history. Does
    /// nothing if no engine was up.
    fn handle_engine_gone(&mut self) {
        let Some(info) = self.engine_info.take() else { return };
        let sessions = self.table.iter().count();
        warn!(sessions, "the engine's process has ended; its sessions are lost");
        self.table.handle_engine_lost(now(), self.ledger.set_engine(&info));
        self.stall_detector = StallDetector::default();
        self.stuck_reason = None;
    }

    fn handle_engine_up(&mut self, info: Box<EngineInfo>) {
        let last_instance = self.engine_info.as_ref().map(|info| &info.facts.instance);
        if last_instance != Some(&info.facts.instance) {
            // The engine's process is a new one, or the first one.
            self.handle_engine_gone();
            // Gives the table the capacity of the new process.
            self.table.handle_engine_lost(now(), self.ledger.set_engine(&info));
            self.close_leftover_sessions(&info);
            self.register_shims_again();
            info!(version = info.facts.version, ranks = info.rows.len(), "engine up");
            // A watcher that learns of the new ranks must find them in the newest report.
            self.publish_report(now());
            self.description_sender.send_replace(Some(Arc::new(self.describe(&info))));
        }
        self.engine_info = Some(info);
        self.down_reason = None;
    }

    /// Closes the sessions that an earlier agent process left open in this engine process.
    fn close_leftover_sessions(&mut self, info: &EngineInfo) {
        let leftover_sessions = self.setup.journal.incarnations_left_open(&info.facts.instance);
        let record = Record::Engine { instance: info.facts.instance.clone() };
        if let Err(error) = self.setup.journal.write(&record) {
            error!(%error, "the journal can't be written");
        }
        if !leftover_sessions.is_empty() {
            warn!(
                sessions = leftover_sessions.len(),
                "closing the sessions that an earlier agent left open"
            );
        }
        for (incarnation, session) in leftover_sessions {
            self.table.inherit_incarnation(now(), incarnation, session.dp_rank, session.rid);
        }
    }
}

/// Tries once to close a session at the engine. With `all_shims_connected`, a shim reports later
/// that the session's KV is free, so the result isn't checked here.
async fn close_once(
    engine: &EngineClient,
    close_request: &CloseRequest,
    all_shims_connected: bool,
) -> CloseResult {
    let rid = close_request.rid.as_deref();
    let close_result = |is_gone| if is_gone { CloseResult::Confirmed } else { CloseResult::Kept };
    let shim_reports_end = all_shims_connected && !close_request.is_repeat;
    let result = match (close_request.is_pinned, shim_reports_end) {
        // Only a pinned session keeps KV of its own between turns. For any other session, the
        // engine's answer is enough.
        (false, _) => {
            engine.close_session(&close_request.incarnation).await.map(|()| CloseResult::Confirmed)
        }
        // A shim reports later that the session's KV is free.
        (true, true) => engine
            .abort_and_close(&close_request.incarnation, rid)
            .await
            .map(|()| CloseResult::NotYet),
        // No report will come, or none came after an earlier attempt. So the engine is asked
        // whether the session is gone.
        (true, false) => {
            engine.close_and_verify(&close_request.incarnation, rid).await.map(close_result)
        }
    };
    result.unwrap_or_else(|error| {
        let incarnation = &close_request.incarnation;
        warn!(incarnation, %error, "can't close a session at the engine");
        CloseResult::NotYet
    })
}
