//! Manages the owner task's page audits: requests them, acts on findings, answers waiting callers.

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
    session::{KvChange, Table},
    shim::{AuditReply, ShimHandle},
};

const AUDIT_WAITERS_MAX: usize = 64;

pub(super) struct AuditDesk {
    audits: Audits,
    waiters: Vec<AuditWaiter>,
    shim: ShimHandle,
    metrics: Metrics,
}

struct AuditWaiter {
    dp_rank: u32,
    /// An audit with this number or a higher one is the answer.
    audit_number: u64,
    reply: oneshot::Sender<Result<RankPageAudit, Error>>,
}

impl AuditDesk {
    /// `interval` is `None` if audits are made only on demand.
    pub(super) fn new(interval: Option<Duration>, shim: ShimHandle, metrics: Metrics) -> Self {
        Self { audits: Audits::new(interval), waiters: vec![], shim, metrics }
    }

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

    pub(super) fn audits(&self) -> &Audits {
        &self.audits
    }

    pub(super) fn run_deadlines(&mut self, now: Instant) {
        for (dp_rank, audit_number) in self.audits.take_late(now) {
            self.handle_failure(dp_rank, audit_number, "late", &Error::Late);
        }
        for (dp_rank, audit_number) in self.audits.request_due(now) {
            self.send_request(dp_rank, audit_number);
        }
    }

    /// `refusal` is why the rank's shim can't audit, or `None` if it can.
    pub(super) fn add_rank(&mut self, dp_rank: u32, refusal: Option<String>) {
        self.audits.add_rank(now(), dp_rank, refusal);
    }

    pub(super) fn remove_rank(&mut self, dp_rank: u32) {
        self.audits.remove_rank(dp_rank);
        self.metrics.set_pages(dp_rank, None);
        self.refuse_waiters(dp_rank, .., &Error::NoShim(dp_rank));
    }

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
                    table.handle_kv_change(now(), KvChange::Corrupt { incarnation });
                }
                for waiter in self.take_waiters(dp_rank, ..=reply.number) {
                    let _ = waiter.reply.send(Ok(with_session_keys(table, &audit)));
                }
            }
            Err(error) => self.handle_failure(dp_rank, reply.number, "refused", &error),
        }
    }

    /// If the request can't be sent, the audit fails later: when the shim's connection closes, or
    /// when the time limit passes.
    fn send_request(&self, dp_rank: u32, audit_number: u64) {
        let _ = self.shim.audit(dp_rank, audit_number);
    }

    /// Removes the rank's gauges, because an old gauge looks current. The load report keeps showing
    /// the last successful audit, with its age.
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

fn with_session_keys(table: &Table, audit: &Audit) -> RankPageAudit {
    let session_key =
        |session: &SessionPages| table.sessions().key_of(session.incarnation.as_deref()?).cloned();
    let sessions = audit.sessions.iter();
    RankPageAudit {
        pages: audit.pages_with_age(now()),
        sessions: sessions.map(|session| (session_key(session), session.clone())).collect(),
    }
}

/// Call only when the findings have changed, so that a lasting fault is logged once.
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
