//! Finds what is set wrong in a fleet: findings from facts. Pure.
//!
//! `commands::doctor` collects the [`facts::Facts`]. Each check is a function from all facts to its
//! findings, and is in the list of one module:
//!
//! - [`checks::ports`]: what answers, and at which port. [`checks::fleet`]: workers and agents side
//!   by side. [`checks::engine`]: the engines' flags. [`checks::gpu`]: the GPUs.
//!   [`checks::settings`]: the settings files.
//!
//! A check finds nothing where its facts are unknown. `doctor` says what it could not ask.

pub mod checks;
pub mod facts;

use serde::Serialize;

use self::facts::Facts;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Turns fail, or others can do what they must not.
    Fault,
    /// Berth works, with less than it could do.
    Warning,
}

/// A misconfiguration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The check, such as `engine-streaming-off`.
    pub id: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What it is about: a worker, an address or a file.
    pub about: String,
    /// What is wrong, with the values.
    pub what: String,
    /// What it costs.
    pub why: &'static str,
    /// The line to change, in the settings file or the command that it names.
    pub fix: String,
}

/// A kind of misconfiguration, and the function that looks for it.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// The name of the check.
    pub id: &'static str,
    /// How much its findings matter.
    pub severity: Severity,
    /// What a finding costs.
    pub why: &'static str,
    /// Returns the places where the fault is.
    pub find: fn(&Facts) -> Vec<Place>,
}

/// Where a check found its fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// What it is about.
    pub about: String,
    /// What is wrong, with the values.
    pub what: String,
    /// The line to change.
    pub fix: String,
}

impl Place {
    fn new(about: impl Into<String>, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { about: about.into(), what: what.into(), fix: fix.into() }
    }
}

/// Returns all checks.
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

/// Returns all findings, faults first.
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
