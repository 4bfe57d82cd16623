//! Makes the owner task's calls to the engine, which open and close sessions and abort turns.
//!
//! Each call runs in a separate task, and its result comes back to the owner task as a message.
//! Every incarnation (one life of a session in the engine) is in the journal before it is opened.
//! After a crash, the next agent process reads there which sessions it must close.
//! [`EngineClient`] makes the HTTP calls, and the session table decides what follows for each
//! session.

use std::time::Duration;

use service::{clock::now, tasks::Tasks};
use tokio::sync::mpsc;
use tracing::{error, warn};

use super::handle::OwnerMessage;
use crate::{
    engine::EngineClient,
    session::{
        CloseRequest, CloseResult, OpenResult, Table,
        journal::{Journal, Record},
    },
};

/// How much longer the engine's idle limit for sessions is than the agent's. The engine's limit
/// only matters if no agent ever returns. The engine counts idle time from the start of a turn, so
/// the margin is longer than any turn.
const ENGINE_IDLE_MARGIN: Duration = Duration::from_secs(24 * 3600);

/// The pause before the shim is asked for its session table. After one or two steps of the engine,
/// the table shows the effects of what has just happened.
const TABLE_REQUEST_PAUSE: Duration = Duration::from_millis(20);

/// The owner task's access to the engine.
pub(super) struct EngineCalls {
    pub(super) engine: EngineClient,
    /// The file that lists the open sessions.
    pub(super) journal: Journal,
    /// The owner task's mailbox, which gets the results.
    pub(super) mailbox: mpsc::Sender<OwnerMessage>,
    pub(super) tasks: Tasks,
}

impl EngineCalls {
    /// Writes a record to the journal. Returns the reason if that failed, which is logged.
    pub(super) fn write_journal(&mut self, record: &Record) -> Result<(), String> {
        self.journal.write(record).map_err(|error| {
            error!(%error, "the journal can't be written");
            error.to_string()
        })
    }

    /// Starts a task that opens an incarnation at the engine.
    pub(super) fn open(&self, incarnation: String, idle_max: Duration) {
        let engine = self.engine.clone();
        self.send_result(async move {
            let result =
                match engine.open_session(&incarnation, idle_max + ENGINE_IDLE_MARGIN).await {
                    Ok(()) => OpenResult::Opened,
                    Err(error) if error.is_ambiguous() => OpenResult::Unknown(error.to_string()),
                    Err(error) => OpenResult::NotOpened(error.to_string()),
                };
            OwnerMessage::OpenResult { incarnation, result }
        });
    }

    /// Reports that an incarnation was not opened, without calling the engine.
    pub(super) fn refuse_open(&self, incarnation: String, reason: String) {
        let result = OpenResult::NotOpened(reason);
        self.send_result(async { OwnerMessage::OpenResult { incarnation, result } });
    }

    /// Starts a task that closes an incarnation at the engine. With `all_shims_connected`, a shim
    /// reports later that the session's KV is free, so the task doesn't check that.
    pub(super) fn close(&self, close_request: CloseRequest, all_shims_connected: bool) {
        let engine = self.engine.clone();
        self.send_result(async move {
            let result = close_once(&engine, &close_request, all_shims_connected).await;
            OwnerMessage::CloseResult { incarnation: close_request.incarnation, result }
        });
    }

    /// Starts a task that aborts turns at the engine.
    pub(super) fn abort_turns(&self, rids: Vec<String>) {
        let engine = self.engine.clone();
        self.tasks.spawn(async move {
            // In the engine, turns of the Responses API have ids with the prefix `resp_`. Which
            // turns these are isn't known here, so both ids are aborted.
            let engine_rids = rids.iter().flat_map(|rid| [rid.clone(), format!("resp_{rid}")]);
            for rid in engine_rids {
                abort(&engine, &rid).await;
            }
        });
    }

    /// Starts a task that makes the owner task request the session table of a rank's shim. `rid` is
    /// a turn that may still be inside the engine: the task aborts that turn first. Without `rid`,
    /// the task makes a short pause first.
    pub(super) fn request_shim_table(&self, dp_rank: u32, rid: Option<String>) {
        let (engine, mailbox) = (self.engine.clone(), self.mailbox.clone());
        self.tasks.spawn(async move {
            match rid {
                None => tokio::time::sleep(TABLE_REQUEST_PAUSE).await,
                Some(rid) if abort(&engine, &rid).await => {}
                Some(_) => return,
            }
            let _ = mailbox.send(OwnerMessage::RequestShimTable { dp_rank }).await;
        });
    }

    /// Closes the sessions that an earlier agent process left open in the engine process
    /// `instance`, and begins the journal of this agent process.
    pub(super) fn close_leftover_sessions(&mut self, table: &mut Table, instance: &str) {
        let leftover_sessions = self.journal.incarnations_left_open(instance);
        // A failure was logged. It is no reason to close nothing.
        let _ = self.write_journal(&Record::Engine { instance: instance.to_owned() });
        if !leftover_sessions.is_empty() {
            warn!(
                sessions = leftover_sessions.len(),
                "closing the sessions that an earlier agent left open"
            );
        }
        for (incarnation, session) in leftover_sessions {
            table.inherit_incarnation(now(), incarnation, session.dp_rank, session.rid);
        }
    }

    /// Starts a task that sends the result of a call to the owner task.
    fn send_result(&self, call: impl Future<Output = OwnerMessage> + Send + 'static) {
        let mailbox = self.mailbox.clone();
        self.tasks.spawn(async move {
            // Sending fails only if the owner task has ended. Then nobody needs the result.
            let _ = mailbox.send(call.await).await;
        });
    }
}

/// Aborts a turn at the engine. Returns whether the engine answered; a failure is logged.
async fn abort(engine: &EngineClient, rid: &str) -> bool {
    let result = engine.abort(rid).await;
    if let Err(error) = &result {
        warn!(rid, %error, "can't abort a turn at the engine");
    }
    result.is_ok()
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
