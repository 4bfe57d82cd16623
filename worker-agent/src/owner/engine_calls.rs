//! Makes the owner task's calls to the engine, which open and close sessions and abort turns.
//!
//! Each call runs in a separate task, and its result is a message to the owner task. Every
//! incarnation is in the journal before it is opened: after a crash, the next agent process reads
//! there which sessions it must close.

use std::time::{Duration, Instant};

use service::{
    clock::{BootTime, now, unix_ns},
    private_folder,
    tasks::Tasks,
};
use tokio::sync::mpsc;
use tracing::{debug, error, info, warn};

use super::handle::OwnerMessage;
use crate::{
    engine::EngineClient,
    metrics::Metrics,
    session::{
        CloseRequest, CloseResult, Legacy, OpenResult, Table,
        handover::{HandedSession, Handover, Moment},
        journal::{Journal, Record},
    },
    shim::ShimHandle,
};

/// The engine's idle limit is so much longer than the agent's, and only matters if no agent ever
/// returns. The engine counts from the start of a turn, so the margin is longer than any turn.
const ENGINE_IDLE_MARGIN: Duration = Duration::from_secs(24 * 3600);

/// Before the shim is asked again about a session whose turn had not ended. After one or two steps
/// of the engine, the abort of that turn has had its effect.
const INSPECTION_PAUSE: Duration = Duration::from_millis(20);

/// The disk may have been full. A write takes less than a millisecond.
const JOURNAL_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// See [`Effect::Inspect`](crate::session::Effect::Inspect).
pub(super) struct Inspection {
    pub(super) dp_rank: u32,
    pub(super) number: u64,
    pub(super) incarnation: String,
    pub(super) rid: Option<String>,
    pub(super) is_repeat: bool,
}

pub(super) struct EngineCalls {
    pub(super) engine: EngineClient,
    journal: Journal,
    /// When to write again, and why that failed before; `None` if the journal is complete.
    journal_retry: Option<(Instant, String)>,
    metrics: Metrics,
    mailbox: mpsc::Sender<OwnerMessage>,
    tasks: Tasks,
}

impl EngineCalls {
    pub(super) fn new(
        engine: EngineClient,
        journal: Journal,
        metrics: Metrics,
        mailbox: mpsc::Sender<OwnerMessage>,
        tasks: Tasks,
    ) -> Self {
        Self { engine, journal, journal_retry: None, metrics, mailbox, tasks }
    }

    /// What can't be written is written again later.
    pub(super) fn write_journal(&mut self, record: &Record) {
        let result = self.journal.write(record);
        self.note_journal(result);
    }

    pub(super) fn journal_problem(&self) -> Option<&str> {
        self.journal_retry.as_ref().map(|(_, reason)| reason.as_str())
    }

    pub(super) fn next_journal_retry(&self) -> Option<Instant> {
        self.journal_retry.as_ref().map(|(at, _)| *at)
    }

    pub(super) fn retry_journal(&mut self, now: Instant) {
        if self.next_journal_retry().is_some_and(|at| at <= now) {
            let result = self.journal.retry();
            self.note_journal(result);
        }
    }

    fn note_journal(&mut self, result: Result<(), private_folder::Error>) {
        match result {
            Ok(()) if self.journal_retry.take().is_some() => {
                info!("the journal is complete again");
                self.metrics.set_journal_behind(false);
            }
            Ok(()) => {}
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                let reason = [Some(error.to_string()), cause].into_iter().flatten();
                let reason = reason.collect::<Vec<_>>().join(": ");
                if self.journal_retry.is_none() {
                    error!(
                        reason,
                        "the journal can't be written; no session is pinned or tagged until it can"
                    );
                }
                self.journal_retry = Some((now() + JOURNAL_RETRY_PAUSE, reason));
                self.metrics.count_journal_failure();
                self.metrics.set_journal_behind(true);
            }
        }
    }

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

    pub(super) fn refuse_open(&self, incarnation: String, reason: String) {
        let result = OpenResult::NotJournaled(reason);
        self.send_result(async { OwnerMessage::OpenResult { incarnation, result } });
    }

    /// If `all_shims_connected`, a shim reports later that the session's KV is free.
    pub(super) fn close(&self, close_request: CloseRequest, all_shims_connected: bool) {
        let engine = self.engine.clone();
        self.send_result(async move {
            let result = close_once(&engine, &close_request, all_shims_connected).await;
            OwnerMessage::CloseResult { incarnation: close_request.incarnation, result }
        });
    }

    pub(super) fn abort_turns(&self, rids: Vec<String>) {
        let engine = self.engine.clone();
        self.tasks.spawn(async move {
            for rid in rids {
                abort_turn(&engine, &rid).await;
            }
        });
    }

    /// `rid` may still be inside the engine: it is aborted first, and the shim is asked only if the
    /// engine has taken the abort. Otherwise the session is closed when its deadline passes.
    pub(super) fn inspect(&self, shims: ShimHandle, inspection: Inspection) {
        let engine = self.engine.clone();
        let Inspection { dp_rank, number, incarnation, rid, is_repeat } = inspection;
        self.tasks.spawn(async move {
            if is_repeat {
                tokio::time::sleep(INSPECTION_PAUSE).await;
            }
            if let Some(rid) = rid
                && !abort_turn(&engine, &rid).await
            {
                return;
            }
            if let Err(error) = shims.inspect(dp_rank, number, incarnation).await {
                debug!(dp_rank, %error, "can't ask the shim for a session's history");
            }
        });
    }

    pub(super) fn hand_over(&mut self, sessions: Vec<HandedSession>) -> bool {
        let count = sessions.len();
        let handover = Handover { at: read_moment(), sessions };
        match self.journal.hand_over(handover) {
            Ok(()) => info!(sessions = count, "handed the sessions over to the next agent"),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                error!(%error, cause, "can't hand over; the next agent closes all sessions");
                return false;
            }
        }
        true
    }

    /// Takes up the sessions that the last agent process handed over, and closes the others that it
    /// left open in the engine process `instance`.
    pub(super) fn take_over(&mut self, table: &mut Table, instance: &str) {
        let is_same_engine = self.journal.is_about(instance);
        let open_incarnations = self.journal.incarnations_left_open(instance);
        let tags = self.journal.tags_left_open(instance);
        let handover = self.journal.take_handover();
        // If this fails, nothing is pinned until it succeeds.
        self.write_journal(&Record::Engine { instance: instance.to_owned() });
        let Some(Handover { at: handed_at, sessions }) = handover else {
            let (sessions, tagged) = (open_incarnations.len(), tags.len());
            if sessions + tagged > 0 {
                warn!(sessions, tagged, "closing the sessions that an earlier agent left open");
            }
            return table.take_over(now(), Legacy { open_incarnations, tags, ..Legacy::default() });
        };
        let age = read_moment().since(&handed_at);
        info!(
            sessions = sessions.len(),
            open = open_incarnations.len(),
            tagged = tags.len(),
            age_ms = age.as_millis(),
            is_same_engine,
            "taking up the sessions of the last agent"
        );
        table.take_over(now(), Legacy { open_incarnations, tags, sessions, age, is_same_engine });
    }

    fn send_result(&self, call: impl Future<Output = OwnerMessage> + Send + 'static) {
        let mailbox = self.mailbox.clone();
        self.tasks.spawn(async move {
            // Fails only if the owner task has ended. Then nobody needs the result.
            let _ = mailbox.send(call.await).await;
        });
    }
}

fn read_moment() -> Moment {
    Moment { unix_ms: unix_ns() / 1_000_000, boot: BootTime::read() }
}

/// Returns whether the engine answered.
async fn abort_turn(engine: &EngineClient, rid: &str) -> bool {
    let result = engine.abort_turn(rid).await;
    if let Err(error) = &result {
        warn!(rid, %error, "can't abort a turn at the engine");
    }
    result.is_ok()
}

async fn close_once(
    engine: &EngineClient,
    close_request: &CloseRequest,
    all_shims_connected: bool,
) -> CloseResult {
    let rid = close_request.rid.as_deref();
    let close_result = |is_gone| if is_gone { CloseResult::Confirmed } else { CloseResult::Kept };
    let shim_reports_end = all_shims_connected && !close_request.is_repeat;
    let result = match (close_request.is_pinned, shim_reports_end) {
        // Only a pinned session keeps KV of its own, for which the engine may defer the close. A
        // tag is closed when the engine has answered.
        (false, _) => {
            engine.close_session(&close_request.incarnation).await.map(|()| CloseResult::Confirmed)
        }
        // A shim reports later that the session's KV is free.
        (true, true) => engine
            .abort_and_close(&close_request.incarnation, rid)
            .await
            .map(|()| CloseResult::NotYet),
        // No report will come, or none came after an earlier attempt.
        (true, false) => {
            engine.close_and_verify(&close_request.incarnation, rid).await.map(close_result)
        }
    };
    result.unwrap_or_else(|error| {
        let incarnation = &close_request.incarnation;
        if close_request.is_repeat && !close_request.is_pinned {
            debug!(incarnation, %error, "can't close a tag at the engine");
        } else {
            warn!(incarnation, %error, "can't close a session at the engine");
        }
        CloseResult::NotYet
    })
}
