//! Decodes the report of an audit, and replaces the session numbers in it by session ids.
//!
//! The report names sessions by numbers, and the shim's answer has the list of their ids.

use std::time::Instant;

use contract::load::{NamedFinding, PageAudit, PageClasses, PageFinding};
use kernels::report::{self, Report};

use super::Audit;
use crate::shim::AuditReply;

/// If a report has more sessions, those with the fewest pages are left out.
const SESSIONS_MAX: usize = 1000;

/// The pages of one session, or of one turn without a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPages {
    /// `None` for a turn without a session.
    pub incarnation: Option<String>,
    pub pages: u64,
    /// The pages that only this session references.
    pub exclusive_pages: u64,
    /// `None` if the audit didn't see every user of every page, because the engine's request table
    /// changed meanwhile.
    pub freed_by_close_pages: Option<u64>,
    /// In thousandths of a page. Each page is divided equally among all references to it.
    pub share_milli: u64,
    /// Runs of consecutive pages.
    pub runs: u64,
    /// Unused token slots in the session's last page.
    pub tail_tokens: u64,
}

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

fn page_audit(report: &Report, session_id: impl Fn(u32) -> Option<String>) -> PageAudit {
    PageAudit {
        age_ms: 0,
        // The report's count includes one padding page, which the engine never hands out.
        pages: u64::from(report.pages).saturating_sub(1),
        held_pages: report.held_pages,
        rows_moved: report.rows_changed,
        free_runs: Some(report.free.runs),
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

/// `q32` is a fixed-point number with 32 fractional bits. Rounds.
fn to_thousandths(q32: u64) -> u64 {
    let milli = (u128::from(q32) * 1000 + (1 << 31)) >> 32;
    u64::try_from(milli).unwrap_or(u64::MAX)
}
