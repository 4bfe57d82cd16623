//! Manages the owner task's page audits: requests them, acts on findings, answers waiting callers.
//!
//! An audit checks which session (chain of requests) holds each page of a rank's KV pool, and finds
//! pages that leak or belong to two owners. Audits are made periodically and on demand. Most run in
//! the rank's *shim*, Berth's part inside the engine. Periodic audits may run on a thread of this
//! process instead (a [`RemoteAuditor`]), which reads the engine's GPU memory.
//!
//! The owner task calls [`AuditDesk`] with requests, deadlines and results. The desk updates
//! metrics, logs faults and tells the session table which sessions are corrupt. [`crate::audit`]
//! decides when audits are due, and checks their results.

use std::{
    collections::HashMap,
    ops::RangeBounds,
    path::PathBuf,
    time::{Duration, Instant},
};

use service::clock::now;
use tokio::sync::{mpsc, oneshot};
use tracing::{error, warn};

use super::{RankPageAudit, handle::OwnerMessage};
use crate::{
    audit::{
        Audit, Audits, Error, SessionPages,
        remote::{RemoteAnswer, RemoteAuditor, RemoteReport, session_table_key},
    },
    metrics::Metrics,
    session::Table,
    shim::{AuditReply, ShimHandle},
};

/// The maximum number of callers that wait for audits at the same time.
const AUDIT_WAITERS_MAX: usize = 64;

/// The page audits of all ranks, and the callers that wait for them.
pub(super) struct AuditDesk {
    /// When audits are due, and their newest results.
    audits: Audits,
    waiters: Vec<AuditWaiter>,
    /// The threads of this process that audit a rank, by DP rank.
    remote_auditors: HashMap<u32, RemoteAuditor>,
    /// The base path of the tables in which the engine publishes its request rows. `None`: all
    /// audits are made inside the engine.
    table_prefix: Option<PathBuf>,
    shim: ShimHandle,
    /// The owner task's mailbox, which gets the audits made in this process.
    mailbox: mpsc::Sender<OwnerMessage>,
    metrics: Metrics,
}

/// A caller that waits for an audit of a rank.
struct AuditWaiter {
    dp_rank: u32,
    /// The number of the requested audit. An audit with this number or a higher one is the answer.
    audit_number: u64,
    reply: oneshot::Sender<Result<RankPageAudit, Error>>,
}

impl AuditDesk {
    /// Returns a desk without ranks. `interval` and `table_prefix` are as in
    /// [`OwnerSetup`](super::OwnerSetup).
    pub(super) fn new(
        interval: Option<Duration>,
        table_prefix: Option<PathBuf>,
        shim: ShimHandle,
        mailbox: mpsc::Sender<OwnerMessage>,
        metrics: Metrics,
    ) -> Self {
        Self {
            audits: Audits::new(interval),
            waiters: vec![],
            remote_auditors: HashMap::new(),
            table_prefix,
            shim,
            mailbox,
            metrics,
        }
    }

    /// Requests an audit of a rank now. `reply` gets the result.
    pub(super) fn request(
        &mut self,
        dp_rank: u32,
        reply: oneshot::Sender<Result<RankPageAudit, Error>>,
    ) {
        if self.waiters.len() >= AUDIT_WAITERS_MAX {
            return drop(reply.send(Err(Error::Busy)));
        }
        match self.audits.request(now(), dp_rank) {
            Ok(audit_number) => {
                self.waiters.push(AuditWaiter { dp_rank, audit_number, reply });
                self.send_request(dp_rank, audit_number);
            }
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// Returns when audits are due, and their newest results.
    pub(super) fn audits(&self) -> &Audits {
        &self.audits
    }

    /// Gives up audits that are late, and requests those that are due.
    pub(super) fn run_deadlines(&mut self, now: Instant) {
        for (dp_rank, audit_number) in self.audits.take_late(now) {
            self.handle_failure(dp_rank, audit_number, "late", &Error::Late);
        }
        for (dp_rank, audit_number) in self.audits.request_due(now) {
            // Periodic audits may run in this process, which sees only the pages of request rows.
            // Audits on demand always run in the engine, which knows the owner of every page.
            let runs_in_this_process = self
                .remote_auditors
                .get(&dp_rank)
                .is_some_and(|auditor| auditor.request(audit_number));
            if !runs_in_this_process {
                self.send_request(dp_rank, audit_number);
            }
        }
    }

    /// Starts the audits of a rank whose shim has connected. `refusal` is the reason why the shim
    /// can't audit, or `None` if it can.
    pub(super) fn add_rank(&mut self, dp_rank: u32, refusal: Option<String>) {
        self.audits.add_rank(now(), dp_rank, refusal);
        let Some(table_prefix) = &self.table_prefix else { return };
        let mailbox = self.mailbox.clone();
        let answer = move |answer| {
            // Sending fails only if the owner task has ended. Then nobody needs the answer.
            let _ = mailbox.blocking_send(OwnerMessage::RemoteAudit { dp_rank, answer });
        };
        match RemoteAuditor::start(table_prefix, dp_rank, answer) {
            Ok(auditor) => drop(self.remote_auditors.insert(dp_rank, auditor)),
            Err(error) => {
                warn!(dp_rank, %error, "can't start the thread for audits from this process")
            }
        }
    }

    /// Stops the audits of a rank whose shim has disconnected, and refuses the waiting callers.
    pub(super) fn remove_rank(&mut self, dp_rank: u32) {
        self.audits.remove_rank(dp_rank);
        self.remote_auditors.remove(&dp_rank);
        self.metrics.set_pages(dp_rank, None);
        self.refuse_waiters(dp_rank, .., &Error::NoShim(dp_rank));
    }

    /// Handles the result of an audit that was made in this process.
    pub(super) fn handle_remote_answer(
        &mut self,
        table: &mut Table,
        dp_rank: u32,
        answer: RemoteAnswer,
    ) {
        let RemoteAnswer { number: audit_number, result } = answer;
        match result {
            Ok(RemoteReport { report, session_keys: table_keys }) => {
                // The engine's row table names a session by its table key, a hash of the session's
                // id in the engine.
                let ids = table.iter().map(|(_, session)| &session.incarnation);
                let ids_by_table_key: HashMap<u64, &String> =
                    ids.map(|id| (session_table_key(id), id)).collect();
                let session_id =
                    |key| ids_by_table_key.get(key).copied().cloned().unwrap_or_default();
                let names = table_keys.iter().map(session_id).collect();
                let (number, spent) = (audit_number, Duration::ZERO);
                let reply = AuditReply { number, spent, refusal: None, names, report };
                self.handle_answer(table, dp_rank, &reply);
            }
            Err(reason) => {
                warn!(
                    dp_rank,
                    reason, "audits from this process failed; the engine's shim makes them instead"
                );
                self.remote_auditors.remove(&dp_rank);
                self.send_request(dp_rank, audit_number);
            }
        }
    }

    /// Handles the answer to a request: tells the session table which sessions are corrupt, and
    /// answers the waiting callers.
    pub(super) fn handle_answer(&mut self, table: &mut Table, dp_rank: u32, reply: &AuditReply) {
        let last_findings =
            self.audits.newest_audit(dp_rank).map(|audit| audit.pages.findings.clone());
        match self.audits.take_answer(now(), dp_rank, reply).cloned() {
            Ok(audit) => {
                self.metrics.count_audit("done");
                self.metrics.record_audit_time(reply.spent);
                self.metrics.set_pages(dp_rank, Some(&audit.pages));
                if last_findings.as_ref() != Some(&audit.pages.findings) {
                    log_page_faults(dp_rank, &audit);
                }
                for incarnation in audit.corrupt_sessions() {
                    table.handle_corruption(now(), incarnation);
                }
                for waiter in self.take_waiters(dp_rank, ..=reply.number) {
                    let _ = waiter.reply.send(Ok(with_session_keys(table, &audit)));
                }
            }
            Err(error) => self.handle_failure(dp_rank, reply.number, "refused", &error),
        }
    }

    /// Requests an audit from the rank's shim. If the request can't be sent, the audit fails later:
    /// when the shim's connection closes, or when the time limit passes.
    fn send_request(&self, dp_rank: u32, audit_number: u64) {
        let _ = self.shim.audit(dp_rank, audit_number);
    }

    /// Counts a failed audit and refuses its callers. Removes the rank's gauges, because an old
    /// gauge looks current. The load report keeps showing the last successful audit, with its age.
    fn handle_failure(
        &mut self,
        dp_rank: u32,
        audit_number: u64,
        outcome: &'static str,
        error: &Error,
    ) {
        if self.audits.note_failure(dp_rank, error) {
            warn!(dp_rank, %error, "can't audit the engine's pages");
        }
        self.metrics.count_audit(outcome);
        self.metrics.set_pages(dp_rank, None);
        self.refuse_waiters(dp_rank, ..=audit_number, error);
    }

    fn refuse_waiters(&mut self, dp_rank: u32, numbers: impl RangeBounds<u64>, error: &Error) {
        for waiter in self.take_waiters(dp_rank, numbers) {
            let _ = waiter.reply.send(Err(error.clone()));
        }
    }

    /// Removes the callers whose request has one of these numbers, and returns them.
    fn take_waiters(
        &mut self,
        dp_rank: u32,
        numbers: impl RangeBounds<u64>,
    ) -> impl Iterator<Item = AuditWaiter> {
        let is_answered = move |waiter: &mut AuditWaiter| {
            waiter.dp_rank == dp_rank && numbers.contains(&waiter.audit_number)
        };
        self.waiters.extract_if(.., is_answered)
    }
}

/// Returns an audit with the keys of the sessions that hold pages.
fn with_session_keys(table: &Table, audit: &Audit) -> RankPageAudit {
    let session_key =
        |session: &SessionPages| table.session_key(session.incarnation.as_deref()?).cloned();
    let sessions = audit.sessions.iter();
    RankPageAudit {
        pages: audit.pages_with_age(now()),
        sessions: sessions.map(|session| (session_key(session), session.clone())).collect(),
    }
}

/// Logs an error for each kind of fault. The caller calls this only when the findings have changed,
/// so a lasting fault is logged once.
fn log_page_faults(dp_rank: u32, audit: &Audit) {
    for finding in audit.pages.faults() {
        let places: Vec<i64> = finding.named.iter().map(|fault| fault.at).collect();
        let (kind, count) = (&finding.kind, finding.count);
        error!(
            dp_rank,
            kind,
            count,
            at = ?places,
            "a page audit found a fault in the engine's KV pool"
        );
    }
}
