//! Decodes the report of an audit, and replaces the session numbers in it by session ids.
//!
//! An audit finds out who uses each page of the engine's KV pool. The *shim* (our code in the
//! engine's process) makes the report with the library of the crate `kernels`. The report names
//! sessions by numbers, and the shim's answer has the list of their ids. [`super::Audits`] calls
//! [`decode_audit`] for each answer and gets an [`Audit`] with the age 0. This file only converts;
//! [`super`] decides what a fault means for the engine.

use std::time::Instant;

use kernels::report::{self, Report};
use proto::load::{NamedFinding, PageAudit, PageClasses, PageFinding};

use super::Audit;
use crate::shim::AuditReply;

/// The maximum number of sessions in an [`Audit`]. If a report has more sessions, those with the
/// fewest pages are left out.
const SESSIONS_MAX: usize = 1000;

/// The pages of one session, or of one turn without a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPages {
    /// The id of the session's incarnation (one life of the session inside the engine). `None` for
    /// a turn (one request) without a session.
    pub incarnation: Option<String>,
    /// The number of pages that the session references.
    pub pages: u64,
    /// The number of pages that only this session references.
    pub exclusive_pages: u64,
    /// The number of pages that closing the session frees at once. `None` if the audit didn't see
    /// every user of every page, because the engine's request table changed meanwhile.
    pub freed_by_close_pages: Option<u64>,
    /// The session's share of the pages that it references, in thousandths of a page. Each page is
    /// divided equally among all references to it.
    pub share_milli: u64,
    /// The number of runs of consecutive pages.
    pub runs: u64,
    /// The number of unused token slots in the session's last page.
    pub tail_tokens: u64,
}

/// Decodes the report in the shim's answer, which arrived at `arrived_at`.
pub(super) fn decode_audit(reply: &AuditReply, arrived_at: Instant) -> Result<Audit, String> {
    let report = Report::decode(&reply.report).map_err(|error| error.to_string())?;
    let session_id = |number: u32| {
        // The list has an empty name for a turn without a session.
        reply.names.get(number as usize).filter(|name| !name.is_empty()).cloned()
    };
    let mut sessions: Vec<SessionPages> = report
        .sessions
        .iter()
        .map(|session| SessionPages {
            incarnation: session_id(session.number),
            pages: session.refs,
            exclusive_pages: session.exclusive_pages,
            freed_by_close_pages: session.freed_by_close,
            share_milli: to_thousandths(session.share_q32),
            runs: session.runs,
            tail_tokens: session.tail_tokens,
        })
        .collect();
    sessions.sort_by(|a, b| (b.pages, &a.incarnation).cmp(&(a.pages, &b.incarnation)));
    sessions.truncate(SESSIONS_MAX);
    Ok(Audit { arrived_at, pages: page_audit(&report, session_id), sessions })
}

/// Converts the report's totals and findings.
fn page_audit(report: &Report, session_id: impl Fn(u32) -> Option<String>) -> PageAudit {
    PageAudit {
        age_ms: 0,
        // The report's count includes one padding page, which the engine never hands out.
        pages: u64::from(report.pages).saturating_sub(1),
        held_pages: report.held_pages,
        rows_moved: report.rows_changed,
        free_runs: report.free.map(|free| free.runs),
        classes: report.pages_by_owner.map(|pages| PageClasses {
            free: pages.free,
            private: pages.private,
            cached: pages.cached,
            cached_in_use: pages.cached_in_use,
            leaked: pages.leaked,
            corrupt: pages.corrupt,
        }),
        compared_pages: report.digests.compared,
        findings: report
            .findings
            .iter()
            .map(|kind_findings| page_finding(kind_findings, &session_id))
            .collect(),
    }
}

/// Converts the findings of one kind of fault.
fn page_finding(
    kind_findings: &report::KindFindings,
    session_id: &impl Fn(u32) -> Option<String>,
) -> PageFinding {
    let first_faults = kind_findings.first_faults.iter().map(|finding| NamedFinding {
        at: finding.page_or_entry,
        sessions: finding
            .sessions
            .iter()
            .map(|&number| session_id(number).unwrap_or_default())
            .collect(),
    });
    PageFinding {
        kind: kind_findings.kind.name().to_owned(),
        count: kind_findings.count,
        named: first_faults.collect(),
    }
}

/// Converts a fixed-point number with 32 fractional bits to thousandths, rounded.
fn to_thousandths(q32: u64) -> u64 {
    let milli = (u128::from(q32) * 1000 + (1 << 31)) >> 32;
    u64::try_from(milli).unwrap_or(u64::MAX)
}
