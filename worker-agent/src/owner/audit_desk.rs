//! Manages the owner task's page audits: requests them, acts on findings, answers waiting callers.
//!
//! An audit checks which session (chain of requests) holds each page of a rank's KV pool, and finds
//! pages that leak or belong to two owners. Audits are made periodically and on demand. Most run in
//! the rank's *shim*, Berth's part inside the engine. Periodic audits may run on a thread of this
//! process instead (a [`RemoteAuditor`]), which reads the engine's GPU memory.
//!
//! The owner task calls these functions with requests, deadlines and results. They update metrics
//! and log faults. [`crate::audit`] decides when audits are due, and checks their results.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use service::clock::now;
use tokio::sync::oneshot;
use tracing::{error, warn};

use super::{Owner, RankPageAudit, handle::OwnerMessage};
use crate::{
    audit::{
        Audit, Error, SessionPages,
        remote::{RemoteAnswer, RemoteAuditor, RemoteReport, session_table_key},
    },
    shim::AuditReply,
};

/// The maximum number of callers that wait for audits at the same time.
const AUDIT_WAITERS_MAX: usize = 64;

/// A caller that waits for an audit of a rank.
pub(super) struct AuditWaiter {
    dp_rank: u32,
    /// The number of the requested audit. An audit with this number or a higher one is the answer.
    audit_number: u64,
    reply: oneshot::Sender<Result<RankPageAudit, Error>>,
}

impl Owner {
    pub(super) fn request_audit(
        &mut self,
        dp_rank: u32,
        reply: oneshot::Sender<Result<RankPageAudit, Error>>,
    ) {
        if self.audit_waiters.len() >= AUDIT_WAITERS_MAX {
            return drop(reply.send(Err(Error::Busy)));
        }
        match self.audits.request(now(), dp_rank) {
            Ok(audit_number) => {
                self.audit_waiters.push(AuditWaiter { dp_rank, audit_number, reply });
                self.send_audit_request(dp_rank, audit_number);
            }
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    pub(super) fn run_audit_deadlines(&mut self, now: Instant) {
        for (dp_rank, audit_number) in self.audits.take_late(now) {
            self.record_failed_audit(dp_rank, "late", &Error::Late);
            self.answer_waiters(dp_rank, audit_number, &Err(Error::Late));
        }
        for (dp_rank, audit_number) in self.audits.request_due(now) {
            // Periodic audits may run in this process, which sees only the pages of request rows.
            // Audits on demand always run in the engine, which knows the owner of every page.
            let runs_in_this_process = self
                .remote_auditors
                .get(&dp_rank)
                .is_some_and(|auditor| auditor.request(audit_number));
            if !runs_in_this_process {
                self.send_audit_request(dp_rank, audit_number);
            }
        }
    }

    /// Starts the thread that audits the rank from this process, if the settings enable that.
    pub(super) fn start_remote_audits(&mut self, dp_rank: u32) {
        if self.setup.audit_table.as_os_str().is_empty() {
            return;
        }
        let mailbox = self.handle.mailbox.clone();
        let answer = move |answer| {
            // Sending fails only if the owner task has ended. Then nobody needs the answer.
            let _ = mailbox.blocking_send(OwnerMessage::RemoteAudit { dp_rank, answer });
        };
        match RemoteAuditor::start(&self.setup.audit_table, dp_rank, answer) {
            Ok(auditor) => drop(self.remote_auditors.insert(dp_rank, auditor)),
            Err(error) => {
                warn!(dp_rank, %error, "can't start the thread for audits from this process")
            }
        }
    }

    pub(super) fn handle_remote_audit(&mut self, dp_rank: u32, answer: RemoteAnswer) {
        let RemoteAnswer { number: audit_number, result } = answer;
        match result {
            Ok(RemoteReport { report, session_keys: table_keys }) => {
                // The engine's row table names a session by its table key, a hash of the session's
                // id in the engine.
                let mut ids_by_table_key: HashMap<u64, &str> = HashMap::new();
                for (_, session) in self.table.iter() {
                    let table_key = session_table_key(&session.incarnation);
                    ids_by_table_key.insert(table_key, &session.incarnation);
                }
                let session_id = |table_key: &u64| {
                    let id = ids_by_table_key.get(table_key).copied().unwrap_or_default();
                    id.to_owned()
                };
                let names = table_keys.iter().map(session_id).collect();
                let spent = Duration::ZERO;
                self.handle_audit_result(
                    dp_rank,
                    &AuditReply { number: audit_number, spent, refusal: None, names, report },
                );
            }
            Err(reason) => {
                warn!(
                    dp_rank,
                    reason, "audits from this process failed; the engine's shim makes them instead"
                );
                self.remote_auditors.remove(&dp_rank);
                self.send_audit_request(dp_rank, audit_number);
            }
        }
    }

    /// Requests an audit from the rank's shim. If the request can't be sent, the audit fails later:
    /// when the shim's connection closes, or when the time limit passes.
    fn send_audit_request(&self, dp_rank: u32, audit_number: u64) {
        let _ = self.setup.shim.audit(dp_rank, audit_number);
    }

    /// Stops the audits of a rank whose shim has disconnected, and refuses the waiting callers.
    pub(super) fn stop_audits(&mut self, dp_rank: u32) {
        self.audits.remove_rank(dp_rank);
        self.remote_auditors.remove(&dp_rank);
        self.setup.metrics.set_pages(dp_rank, None);
        self.answer_waiters(dp_rank, u64::MAX, &Err(Error::NoShim(dp_rank)));
    }

    pub(super) fn handle_audit_result(&mut self, dp_rank: u32, audit_reply: &AuditReply) {
        let last_findings =
            self.audits.newest_audit(dp_rank).map(|audit| audit.pages.findings.clone());
        let answer = self.audits.take_answer(now(), dp_rank, audit_reply).cloned();
        match &answer {
            Ok(audit) => {
                self.setup.metrics.count_audit("done");
                self.setup.metrics.record_audit_time(audit_reply.spent);
                self.setup.metrics.set_pages(dp_rank, Some(&audit.pages));
                if last_findings.as_ref() != Some(&audit.pages.findings) {
                    log_page_faults(dp_rank, audit);
                }
                for incarnation in audit.corrupt_sessions() {
                    self.table.handle_corruption(now(), incarnation);
                }
            }
            Err(error) => self.record_failed_audit(dp_rank, "refused", error),
        }
        self.answer_waiters(dp_rank, audit_reply.number, &answer);
    }

    /// Counts a failed audit, and removes the rank's gauges, because an old gauge looks current.
    /// The load report keeps showing the last successful audit, with its age.
    fn record_failed_audit(&mut self, dp_rank: u32, outcome: &'static str, error: &Error) {
        if self.audits.note_failure(dp_rank, error) {
            warn!(dp_rank, %error, "can't audit the engine's pages");
        }
        self.setup.metrics.count_audit(outcome);
        self.setup.metrics.set_pages(dp_rank, None);
    }

    /// Answers all callers whose request has this number or a lower one.
    fn answer_waiters(&mut self, dp_rank: u32, audit_number: u64, answer: &Result<Audit, Error>) {
        let waiters = std::mem::take(&mut self.audit_waiters);
        let (answered_waiters, other_waiters) = waiters
            .into_iter()
            .partition(|waiter| waiter.dp_rank == dp_rank && waiter.audit_number <= audit_number);
        self.audit_waiters = other_waiters;
        for waiter in answered_waiters {
            let _ = waiter.reply.send(answer.clone().map(|audit| self.with_session_keys(&audit)));
        }
    }

    fn with_session_keys(&self, audit: &Audit) -> RankPageAudit {
        let sessions = audit.sessions.iter();
        let session_key = |session: &SessionPages| {
            self.table.session_key(session.incarnation.as_deref()?).cloned()
        };
        RankPageAudit {
            pages: audit.pages_with_age(now()),
            sessions: sessions.map(|session| (session_key(session), session.clone())).collect(),
        }
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
