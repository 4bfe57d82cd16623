//! Finds what is set wrong in a fleet: findings from facts. Pure.
//!
//! A check finds nothing where its facts are unknown.

pub mod checks;
pub mod facts;

use contract::{api::Worker, load::Device};
use serde::Serialize;

use self::facts::{Asked, Facts};

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
    find: Find,
}

/// What a check looks at, what to change there, and what says that something is wrong.
#[derive(Debug, Clone, Copy)]
enum Find {
    /// Each router and agent, with what to change for the one and for the other.
    Ports([&'static str; 2], fn(&Asked) -> Option<String>),
    Routers(&'static str, fn(&Asked) -> Option<String>),
    Agents(&'static str, fn(&Asked, &Facts) -> Option<String>),
    Workers(&'static str, fn(&Worker, &Facts) -> Option<String>),
    /// One worker of each agent, for what all ranks of an engine share.
    Engines(&'static str, fn(&Worker, &Facts) -> Option<String>),
    Devices(&'static str, fn(&Device) -> Option<String>),
    Fleet(fn(&Facts, &mut Found)),
}

const fn fault(id: &'static str, why: &'static str, find: Find) -> Check {
    Check { id, severity: Severity::Fault, why, find }
}

const fn warning(id: &'static str, why: &'static str, find: Find) -> Check {
    Check { id, severity: Severity::Warning, why, find }
}

/// The findings so far, and the check that looks for more.
struct Found {
    check: &'static Check,
    findings: Vec<Finding>,
}

impl Found {
    fn add(&mut self, about: &str, what: impl Into<String>, fix: impl Into<String>) {
        let Check { id, severity, why, .. } = *self.check;
        let (about, what, fix) = (about.to_owned(), what.into(), fix.into());
        self.findings.push(Finding { id, severity, about, what, why, fix });
    }

    /// Nothing is added if nothing is wrong.
    fn add_if(&mut self, about: &str, what: Option<String>, fix: &str) {
        if let Some(what) = what {
            self.add(about, what, fix);
        }
    }

    fn look(&mut self, facts: &Facts) {
        match self.check.find {
            Find::Ports([of_router, of_agent], find) => {
                facts.routers.iter().for_each(|it| self.add_if(&it.url, find(it), of_router));
                facts.agents.iter().for_each(|it| self.add_if(&it.url, find(it), of_agent));
            }
            Find::Routers(fix, find) => {
                facts.routers.iter().for_each(|it| self.add_if(&it.url, find(it), fix));
            }
            Find::Agents(fix, find) => {
                facts.agents.iter().for_each(|it| self.add_if(&it.url, find(it, facts), fix));
            }
            Find::Workers(fix, find) => {
                facts.workers().for_each(|it| self.add_if(&it.worker, find(it, facts), fix));
            }
            Find::Engines(fix, find) => {
                facts.engines().for_each(|it| self.add_if(&it.worker, find(it, facts), fix));
            }
            Find::Devices(fix, find) => facts.devices().for_each(|(worker, it)| {
                self.add_if(&format!("{} {}", worker.worker, it.uuid), find(it), fix);
            }),
            Find::Fleet(find) => find(facts, self),
        }
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
    for check in all_checks() {
        let mut found = Found { check, findings };
        found.look(facts);
        findings = found.findings;
    }
    findings.sort_by_key(|finding| finding.severity);
    findings
}

#[cfg(test)]
mod tests;
