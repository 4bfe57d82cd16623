//! The result of a page audit: how many pages of one rank's KV pool each kind of owner holds.
//!
//! An owner is the free list, the radix tree, or a turn or session (which *holds* pages).
//! Conversion from the wire rejects figures that contradict each other.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Error;
use crate::v1;

/// Counts pages unless a field says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PageAudit {
    /// The time between the audit and the sending of this message.
    pub age_ms: u32,
    /// Doesn't count the padding page.
    pub pages: u64,
    /// Distinct pages of turns and sessions.
    pub held_pages: u64,
    /// Request rows that changed while the audit read them. The audit doesn't count their pages.
    pub rows_moved: u32,
    /// Stretches of free pages with consecutive numbers; 1 if free pages aren't fragmented.
    pub free_runs: Option<u64>,
    /// Absent if rows changed during the audit.
    pub classes: Option<PageClasses>,
    /// Sealed pages whose contents were compared with those at an earlier audit. A sealed page is
    /// full, and its contents must not change.
    pub compared_pages: u64,
    /// One entry for each kind of fault that this audit looked for, with or without faults. A kind
    /// that could not be checked has no entry.
    pub findings: Vec<PageFinding>,
}

impl PageAudit {
    /// A sound engine has none.
    pub fn faults(&self) -> impl Iterator<Item = &PageFinding> {
        self.findings.iter().filter(|finding| finding.count > 0)
    }
}

/// The sum of the counts is the size of the pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PageClasses {
    /// Pages that are only in the free list.
    pub free: u64,
    /// Pages of turns or sessions that are not in the radix tree.
    pub private: u64,
    /// Pages that are only in the radix tree.
    pub cached: u64,
    /// Pages of the radix tree that a turn or session holds.
    pub cached_in_use: u64,
    /// Pages without an owner. A sound engine has none.
    pub leaked: u64,
    /// Pages in the free list with another owner too. A sound engine has none.
    pub corrupt: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PageFinding {
    /// `aliased`, `leaked`, `double_free`, `changed` or another kind.
    pub kind: String,
    pub count: u64,
    /// The first few faults in detail; empty in a load report.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub named: Vec<NamedFinding>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NamedFinding {
    /// The number of the faulty page. If an entry of a list is faulty instead: the entry's index in
    /// its request row, or the entry's value in the free list or the radix tree.
    pub at: i64,
    /// The engine's ids. An empty string is a turn without a session.
    pub sessions: Vec<String>,
}

/// There are fewer than ten kinds of faults.
const FINDINGS_MAX: u64 = 64;

fn check_at_most(field: &'static str, part: u64, whole: u64) -> Result<(), Error> {
    if part > whole { Err(Error::Impossible { field, value: part }) } else { Ok(()) }
}

impl TryFrom<v1::PageAudit> for PageAudit {
    type Error = Error;

    fn try_from(wire: v1::PageAudit) -> Result<Self, Error> {
        check_at_most("held_pages", wire.held_pages, wire.pages)?;
        check_at_most("the number of findings", wire.findings.len() as u64, FINDINGS_MAX)?;
        if let Some(classes) = &wire.classes {
            let page_counts = [
                classes.free,
                classes.private,
                classes.cached,
                classes.cached_in_use,
                classes.leaked,
                classes.corrupt,
            ];
            let sum = page_counts.into_iter().fold(0, u64::saturating_add);
            if sum != wire.pages {
                return Err(Error::Impossible { field: "sum of page classes", value: sum });
            }
        }
        Ok(Self {
            age_ms: wire.age_ms,
            pages: wire.pages,
            held_pages: wire.held_pages,
            rows_moved: wire.rows_moved,
            free_runs: wire.free_runs,
            classes: wire.classes.map(|classes| PageClasses {
                free: classes.free,
                private: classes.private,
                cached: classes.cached,
                cached_in_use: classes.cached_in_use,
                leaked: classes.leaked,
                corrupt: classes.corrupt,
            }),
            compared_pages: wire.compared_pages,
            findings: wire.findings.into_iter().map(read_finding).collect(),
        })
    }
}

fn read_finding(wire: v1::PageFinding) -> PageFinding {
    let faults = wire.named.into_iter();
    let faults = faults.map(|fault| NamedFinding { at: fault.at, sessions: fault.sessions });
    PageFinding { kind: wire.kind, count: wire.count, named: faults.collect() }
}

impl From<PageAudit> for v1::PageAudit {
    fn from(audit: PageAudit) -> Self {
        Self {
            age_ms: audit.age_ms,
            pages: audit.pages,
            held_pages: audit.held_pages,
            rows_moved: audit.rows_moved,
            free_runs: audit.free_runs,
            classes: audit.classes.map(|classes| v1::PageClasses {
                free: classes.free,
                private: classes.private,
                cached: classes.cached,
                cached_in_use: classes.cached_in_use,
                leaked: classes.leaked,
                corrupt: classes.corrupt,
            }),
            compared_pages: audit.compared_pages,
            findings: audit.findings.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<PageFinding> for v1::PageFinding {
    fn from(finding: PageFinding) -> Self {
        let faults = finding.named.into_iter();
        let faults =
            faults.map(|fault| v1::NamedFinding { at: fault.at, sessions: fault.sessions });
        Self { kind: finding.kind, count: finding.count, named: faults.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn audit() -> PageAudit {
        let classes = PageClasses { free: 60, private: 20, cached: 14, ..PageClasses::default() };
        let named = vec![NamedFinding { at: 17, sessions: vec!["a".into(), String::new()] }];
        PageAudit {
            age_ms: 7,
            pages: 100,
            held_pages: 25,
            rows_moved: 0,
            free_runs: Some(3),
            classes: Some(PageClasses { cached_in_use: 5, leaked: 1, ..classes }),
            compared_pages: 10,
            findings: vec![PageFinding { kind: "leaked".into(), count: 1, named }],
        }
    }

    #[test]
    fn an_audit_survives_the_wire_and_unknown_classes_stay_unknown() {
        let moved = PageAudit { classes: None, free_runs: None, rows_moved: 1, ..audit() };
        for audit in [audit(), moved] {
            assert_eq!(PageAudit::try_from(v1::PageAudit::from(audit.clone())), Ok(audit));
        }
    }

    #[test]
    fn an_audit_that_cannot_be_true_is_rejected() {
        let lies: [fn(&mut v1::PageAudit); 3] = [
            |audit| audit.held_pages = 101,
            |audit| audit.pages = 99,
            |audit| audit.classes.as_mut().unwrap().cached = 15,
        ];
        for (number, lie) in lies.iter().enumerate() {
            let mut wire = v1::PageAudit::from(audit());
            lie(&mut wire);
            assert!(PageAudit::try_from(wire).is_err(), "lie {number} was taken");
        }
    }
}
