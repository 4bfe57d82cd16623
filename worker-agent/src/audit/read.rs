//! Decodes the library's report and replaces session numbers by session ids.

use std::time::Instant;

use kernels::report::{self, Report};
use proto::load::{NamedFinding, PageAudit, PageClasses, PageFinding};

use super::Audit;
use crate::shim::AuditReply;

/// The maximum number of sessions kept of one audit; the largest are kept.
const SESSIONS_MAX: usize = 1000;

/// The pages of one session, or of one turn without a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionPages {
    /// The session's id inside the engine; empty for a turn without a session.
    pub incarnation: String,
    /// The number of pages that it references.
    pub pages: u64,
    /// The number of pages that only this session references.
    pub exclusive_pages: u64,
    /// The number of pages that a close frees at once. `None` if rows moved during the audit.
    pub freed_by_close_pages: Option<u64>,
    /// The session's share of the pages it references, in thousandths of a page.
    pub share_milli: u64,
    /// The number of runs of consecutive pages.
    pub runs: u64,
    /// The number of unused token slots in its last page.
    pub tail_tokens: u64,
}

/// Decodes the report that the shim passed on.
pub(super) fn audit(reply: &AuditReply, at: Instant) -> Result<Audit, String> {
    let report = Report::decode(&reply.report).map_err(|error| error.to_string())?;
    let name = |number: u32| reply.names.get(number as usize).cloned().unwrap_or_default();
    let mut sessions: Vec<SessionPages> = report
        .sessions
        .iter()
        .map(|session| SessionPages {
            incarnation: name(session.number),
            pages: session.refs,
            exclusive_pages: session.exclusive,
            freed_by_close_pages: session.freed,
            share_milli: milli(session.share_q32),
            runs: session.runs,
            tail_tokens: session.tail_tokens,
        })
        .collect();
    sessions.sort_by(|a, b| (b.pages, &a.incarnation).cmp(&(a.pages, &b.incarnation)));
    sessions.truncate(SESSIONS_MAX);
    Ok(Audit { at, pages: pages(&report, name), sessions })
}

fn pages(report: &Report, name: impl Fn(u32) -> String) -> PageAudit {
    PageAudit {
        age_ms: 0,
        // The report counts one padding page.
        pages: u64::from(report.pages).saturating_sub(1),
        held_pages: report.held_pages,
        rows_moved: report.rows_moved,
        free_runs: report.free.map(|free| free.runs),
        classes: report.classes.map(|classes| PageClasses {
            free: classes.free,
            private: classes.private,
            cached: classes.cached,
            cached_in_use: classes.cached_in_use,
            leaked: classes.leaked,
            corrupt: classes.corrupt,
        }),
        compared_pages: report.digests.compared,
        findings: report.findings.iter().map(|found| finding(found, &name)).collect(),
    }
}

fn finding(found: &report::Found, name: &impl Fn(u32) -> String) -> PageFinding {
    let named = found.named.iter().map(|one| NamedFinding {
        at: one.at,
        sessions: one.sessions.iter().map(|&number| name(number)).collect(),
    });
    PageFinding { kind: found.kind.name().to_owned(), count: found.count, named: named.collect() }
}

/// Converts 2^-32 units to thousandths, rounded.
fn milli(q32: u64) -> u64 {
    let milli = (u128::from(q32) * 1000 + (1 << 31)) >> 32;
    u64::try_from(milli).unwrap_or(u64::MAX)
}
