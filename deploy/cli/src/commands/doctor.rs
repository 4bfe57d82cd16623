//! Runs `berth doctor`: asks routers, agents, engines and this host, and names what is set wrong.

mod certificate;
mod collect;

use serde_json::json;

use super::{Outcome, print};
use crate::{
    args::{DoctorArgs, TargetArgs},
    doctor::{self, Finding, Severity},
    error::Error,
    text::{
        clean,
        style::{Style, Tone},
    },
};

/// The width of output that goes to no terminal.
const COLUMNS_DEFAULT: usize = 80;
/// The columns before the lines of a finding.
const INDENT: usize = 9;

/// A finding is not well, and what doesn't answer is a finding.
pub async fn run(target: &TargetArgs, args: &DoctorArgs) -> Result<Outcome, Error> {
    if args.list {
        let checks = doctor::all_checks().map(|check| format!("{:<26}{}\n", check.id, check.why));
        print(&checks.collect::<String>())?;
        return Ok(Outcome::Well);
    }
    let collected = collect::collect(target, args).await?;
    let findings = doctor::diagnose(&collected.facts);
    if args.json {
        let report = json!({ "findings": findings, "not_asked": collected.not_asked });
        print(&format!("{report}\n"))?;
    } else {
        print(&report(&findings, &collected.not_asked, Style::of_stdout()))?;
    }
    Ok(Outcome::from_is_well(findings.is_empty()))
}

fn report(findings: &[Finding], not_asked: &[String], style: Style) -> String {
    let columns = style.columns.unwrap_or(COLUMNS_DEFAULT).max(40);
    let mut text = String::new();
    for finding in findings {
        let (severity, tone) = match finding.severity {
            Severity::Fault => ("fault", Tone::Bad),
            Severity::Warning => ("warning", Tone::Warn),
        };
        text.push_str(&style.paint(tone, &format!("{severity:<INDENT$}")));
        text.push_str(&style.paint(Tone::Strong, &clean(&finding.about)));
        text.push_str(&format!("  {}\n", style.paint(Tone::Faint, finding.id)));
        let change = format!("change: {}", finding.fix);
        for part in [&finding.what, finding.why, &change] {
            text.push_str(&indented(&clean(part), columns));
        }
    }
    for reason in not_asked {
        let reason = indented(&clean(reason), columns);
        text.push_str(&format!("{:<INDENT$}{}", "unknown", reason.trim_start()));
    }
    let faults = findings.iter().filter(|finding| finding.severity == Severity::Fault).count();
    let checks = doctor::all_checks().count();
    let warnings = findings.len() - faults;
    text.push_str(&format!("{checks} checks: {faults} faults, {warnings} warnings\n"));
    text
}

/// A word that is longer than `columns` has its own line.
fn indented(text: &str, columns: usize) -> String {
    let room = columns - INDENT;
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a first line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > room {
            lines.push(word.to_owned());
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.iter().map(|line| format!("{:INDENT$}{line}\n", "")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_fits_the_terminal_and_counts() {
        let finding = Finding {
            id: "kv-events-off",
            severity: Severity::Warning,
            about: "w0/0\u{1b}[2J".into(),
            what: "a long text of many words ".repeat(6),
            why: "something costs something",
            fix: "start the engine with --kv-events-config".into(),
        };
        let text = report(&[finding], &["no admin port".into()], Style::default());
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("change: start") && !text.contains('\u{1b}'), "{text}");
        assert!(text.contains("unknown  no admin port"), "{text}");
        assert!(text.ends_with("0 faults, 1 warnings\n"), "{text}");
    }
}
