//! Finds what is set wrong in a fleet: findings from facts. Pure.
//!
//! A check finds nothing where its facts are unknown.

pub mod checks;
pub mod facts;

use serde::Serialize;

use self::facts::Facts;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Turns fail, or others can do what they must not.
    Fault,
    /// Berth works, with less than it could do.
    Warning,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Such as `engine-streaming-off`.
    pub id: &'static str,
    pub severity: Severity,
    /// A worker, an address or a file.
    pub about: String,
    /// What is wrong, with the values.
    pub what: String,
    pub why: &'static str,
    /// The line to change, in the settings file or the command that it names.
    pub fix: String,
}

#[derive(Debug, Clone, Copy)]
pub struct Check {
    pub id: &'static str,
    pub severity: Severity,
    /// Says what a finding costs.
    pub why: &'static str,
    pub find: fn(&Facts) -> Vec<Place>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub about: String,
    pub what: String,
    pub fix: String,
}

impl Place {
    fn new(about: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { about: about.into(), what: what.into(), fix: fix.into() }
    }
}

pub fn all_checks() -> impl Iterator<Item = &'static Check> {
    [
        checks::ports::CHECKS,
        checks::fleet::CHECKS,
        checks::engine::CHECKS,
        checks::gpu::CHECKS,
        checks::settings::CHECKS,
    ]
    .into_iter()
    .flatten()
}

/// Faults are first.
#[must_use]
pub fn diagnose(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![];
    for Check { id, severity, why, find } in all_checks() {
        let to_finding =
            |Place { about, what, fix }| Finding { id, severity: *severity, about, what, why, fix };
        findings.extend(find(facts).into_iter().map(to_finding));
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

#[cfg(test)]
mod tests;
