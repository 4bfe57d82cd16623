//! Runs `berth doctor`: asks routers, agents, engines and this host, and names what is set wrong.

mod certificate;
mod collect;

use serde_json::json;

use self::collect::Collector;
use super::{Outcome, print};
use crate::{
    args::{DoctorArgs, TargetArgs},
    doctor::{self, Finding, Severity},
    error::Error,
    text::{
        clean,
        style::{Style, Tone},
        wrap,
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
    let mut collector = Collector::new(target)?;
    let facts = collector.collect(args).await?;
    let (findings, not_asked) = (doctor::diagnose(&facts), collector.not_asked);
    print(&match args.json {
        true => format!("{}\n", json!({ "findings": findings, "not_asked": not_asked })),
        false => report(&findings, &not_asked, Style::of_stdout()),
    })?;
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
            text.push_str(&indented(part, columns));
        }
    }
    for reason in not_asked {
        text.push_str(&format!("{:<INDENT$}{}", "unknown", indented(reason, columns).trim_start()));
    }
    let faults = findings.iter().filter(|finding| finding.severity == Severity::Fault).count();
    let checks = doctor::all_checks().count();
    let warnings = findings.len() - faults;
    text.push_str(&format!("{checks} checks: {faults} faults, {warnings} warnings\n"));
    text
}

fn indented(text: &str, columns: usize) -> String {
    let lines = wrap(&clean(text), columns - INDENT);
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
