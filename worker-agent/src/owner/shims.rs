//! Handles the owner task's messages from and to the shims, Berth's Python parts in the engine.
//!
//! Each DP rank has one shim. It reports exact figures of the KV pool for the ledger (the account
//! of the pool), and the states of the engine's sessions for the session table. It also demotes
//! sessions (frees their KV but keeps them open) as the session table asks. Without a shim, the
//! agent gets the figures from the engine's HTTP interface, later and less exactly.
//!
//! [`crate::shim`] has the connections and the messages. Page audits, which shims make too, are in
//! `audit_requests`, and the trimmer's messages are in `trim`.

use std::time::Duration;

use service::clock::now;
use tracing::{info, warn};

use super::{Owner, handle::OwnerMessage};
use crate::{
    gpu::process::Scheduler,
    session::{EngineLoad, SessionReport},
    shim::{Hello, RankFacts, SessionChanges, SessionFacts, ShimEvent, codec::SESSIONS_MAX},
};

/// The pause before a demotion is requested again. The shim refuses a demotion while the session's
/// last turn is still in a queue of the engine.
const DEMOTE_RETRY_PAUSE: Duration = Duration::from_millis(20);

/// The pause before the shim is asked for its session table. After one or two steps of the engine,
/// the table shows the effects of what has just happened.
const TABLE_REQUEST_PAUSE: Duration = Duration::from_millis(20);

impl Owner {
    pub(super) fn handle_shim_event(&mut self, event: ShimEvent) {
        self.is_report_stale = true;
        match event {
            ShimEvent::Up(hello) => self.handle_shim_up(&hello),
            ShimEvent::Facts(facts) => self.record_facts(facts),
            ShimEvent::Sessions(sessions) => self.record_sessions(sessions),
            ShimEvent::Closed { dp_rank, id } => {
                self.table.handle_session_gone(now(), dp_rank, &id)
            }
            ShimEvent::Demoted { dp_rank, id, refusal } => {
                self.handle_demote_result(dp_rank, id, refusal.as_deref());
            }
            ShimEvent::Audited { dp_rank, reply } => self.handle_audit_result(dp_rank, &reply),
            ShimEvent::Down { dp_rank, reason } => {
                warn!(dp_rank, reason, "the engine's shim has disconnected");
                self.stop_audits(dp_rank);
                self.connected_shims.remove(&dp_rank);
                self.ledger.remove_shim(dp_rank);
                self.table.handle_shim_down(now(), dp_rank);
            }
            ShimEvent::Committed { id, history_tokens, is_retracted, .. } => {
                self.table.handle_commit(&id, history_tokens.into(), is_retracted);
            }
            // The session table that follows these events shows their result.
            ShimEvent::Opened { .. } | ShimEvent::Aborted { .. } => {}
        }
    }

    /// Handles the greeting of a shim that has connected. In it, `inert`, `undemotable` and
    /// `unauditable` are reasons why the shim can't work, demote sessions or audit pages, if any.
    fn handle_shim_up(&mut self, hello: &Hello) {
        let Hello { pid, dp_rank, sglang, shim, undemotable_reason: undemotable, .. } = hello;
        self.setup.gpus.set_scheduler(Scheduler {
            dp_rank: *dp_rank,
            pid: hello.pid_in_agent_namespace,
            pid_in_own_namespace: *pid,
        });
        // An inert shim does nothing after its greeting, for example because it doesn't know the
        // engine's SGLang version.
        if let Some(reason) = &hello.inert_reason {
            warn!(dp_rank, pid, sglang, reason, "the engine's shim is inert");
            return;
        }
        info!(dp_rank, pid, sglang, shim, undemotable, "the engine's shim is there");
        self.connected_shims.insert(*dp_rank, undemotable.is_none());
        self.table.handle_shim_up(*dp_rank, undemotable.is_none());
        if let Some(reason) = &hello.unauditable_reason {
            info!(dp_rank, reason, "the engine's pages can't be audited");
        }
        self.audits.add_rank(now(), *dp_rank, hello.unauditable_reason.clone());
        self.start_remote_audits(*dp_rank);
        self.ledger.add_shim(*dp_rank, hello.page_bytes);
    }

    /// Registers the connected shims at the session table again. The table forgets them when it
    /// gets a new engine, but a shim may connect before the agent reaches that engine.
    pub(super) fn register_shims_again(&mut self) {
        for (&dp_rank, &can_demote) in &self.connected_shims {
            self.table.handle_shim_up(dp_rank, can_demote);
            // The request fails only if this shim has disconnected. `ShimEvent::Down` follows.
            let _ = self.setup.shim.sample_now(dp_rank);
        }
    }

    /// Records a shim's figures of its rank's pool and load.
    fn record_facts(&mut self, facts: RankFacts) {
        self.ledger.record_facts(facts);
        let (waiting_requests, used_tokens) = (facts.waiting.into(), facts.used_tokens());
        let load = EngineLoad { waiting_requests, used_tokens };
        self.table.handle_load(now(), facts.dp_rank, load);
    }

    /// Records a shim's report of sessions: its whole session table, or only changes.
    fn record_sessions(&mut self, sessions: SessionChanges) {
        let SessionChanges { dp_rank, is_full_table, changed, gone_ids } = sessions;
        // A full table lists all sessions, so a session that it lacks is gone. But one message with
        // `SESSIONS_MAX` sessions may be only the start of the table.
        if is_full_table && changed.len() < SESSIONS_MAX {
            let session_ids: Vec<&str> =
                changed.iter().map(|session| session.id.as_str()).collect();
            self.table.handle_session_table(now(), dp_rank, &session_ids);
        }
        for session in changed {
            self.table.handle_session_report(
                now(),
                dp_rank,
                &session_report(session, is_full_table),
            );
        }
        for id in gone_ids {
            self.table.handle_session_gone(now(), dp_rank, &id);
        }
    }

    fn handle_demote_result(&mut self, dp_rank: u32, id: String, refusal: Option<&str>) {
        match refusal {
            None => self.table.handle_demote_result(now(), &id, true),
            // The client has its last answer, but the turn is still in a queue of the engine.
            Some("busy" | "in_flight") => {
                let shim = self.setup.shim.clone();
                self.tasks.spawn(async move {
                    tokio::time::sleep(DEMOTE_RETRY_PAUSE).await;
                    // If the request fails, the demotion ends when the session's deadline passes.
                    let _ = shim.demote(dp_rank, &id);
                });
            }
            // The session's first turn was aborted and left no KV, so there is nothing to demote.
            Some("no_kv") => self.table.handle_demote_result(now(), &id, true),
            Some(reason) => {
                warn!(incarnation = id, reason, "the engine's shim did not demote a session");
                self.table.handle_demote_result(now(), &id, false);
            }
        }
    }

    /// Requests the session table of a rank's shim, in a separate task. `rid` is a turn that may
    /// still be inside the engine: the task aborts that turn first. Without `rid`, the task makes a
    /// short pause first.
    pub(super) fn request_shim_table(&self, dp_rank: u32, rid: Option<String>) {
        let (engine, mailbox) = (self.setup.engine.clone(), self.handle.mailbox.clone());
        self.tasks.spawn(async move {
            match rid {
                None => tokio::time::sleep(TABLE_REQUEST_PAUSE).await,
                Some(rid) => {
                    if let Err(error) = engine.abort(&rid).await {
                        warn!(rid, %error, "can't abort a turn at the engine");
                        return;
                    }
                }
            }
            let _ = mailbox.send(OwnerMessage::RequestShimTable { dp_rank }).await;
        });
    }

    /// Requests that a session is demoted: its KV is freed, but the session stays open.
    pub(super) fn demote(&mut self, dp_rank: u32, incarnation: &str) {
        if self.setup.shim.demote(dp_rank, incarnation).is_err() {
            self.table.handle_demote_result(now(), incarnation, false);
        }
    }
}

fn session_report(session: SessionFacts, is_from_full_table: bool) -> SessionReport {
    SessionReport {
        id: session.id,
        holds_row: session.holds_row,
        allocated_tokens: u64::from(session.allocated_tokens),
        history_tokens: u64::from(session.history_tokens),
        in_flight: session.in_flight,
        is_from_full_table,
    }
}
