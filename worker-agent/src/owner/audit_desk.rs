//! Manages the owner task's page audits: requests them, acts on findings, answers waiting callers.
//!
//! An audit checks which session (chain of requests) holds each page of a rank's KV pool, and finds
//! pages that leak or belong to two owners. The rank's *shim*, Berth's part inside the engine,
//! makes audits periodically and on demand.
//!
//! The owner task calls [`AuditDesk`] with requests, deadlines and results. The desk updates
//! metrics, logs faults and tells the session table which sessions are corrupt. [`crate::audit`]
//! decides when audits are due, and checks their results.

use std::{
    ops::RangeBounds,
    time::{Duration, Instant},
};

use service::clock::now;
use tokio::sync::oneshot;
use tracing::{error, warn};

use super::RankPageAudit;
use crate::{
    audit::{Audit, Audits, Error, SessionPages},
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
    shim: ShimHandle,
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
    /// Returns a desk without ranks. `interval` is as in [`OwnerSetup`](super::OwnerSetup).
    pub(super) fn new(interval: Option<Duration>, shim: ShimHandle, metrics: Metrics) -> Self {
        Self { audits: Audits::new(interval), waiters: vec![], shim, metrics }
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
            self.send_request(dp_rank, audit_number);
        }
    }

    /// Starts the audits of a rank whose shim has connected. `refusal` is the reason why the shim
    /// can't audit, or `None` if it can.
    pub(super) fn add_rank(&mut self, dp_rank: u32, refusal: Option<String>) {
        self.audits.add_rank(now(), dp_rank, refusal);
    }

    /// Stops the audits of a rank whose shim has disconnected, and refuses the waiting callers.
    pub(super) fn remove_rank(&mut self, dp_rank: u32) {
        self.audits.remove_rank(dp_rank);
        self.metrics.set_pages(dp_rank, None);
        self.refuse_waiters(dp_rank, .., &Error::NoShim(dp_rank));
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
