//! The results, and their output as a table, as JSON and as lines of Markdown.

use serde_json::{Value, json};
use std::{fmt::Write, io::Write as _};

/// All results.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    about: &'static str,
    what: String,
    /// Text for people.
    result: String,
    /// Value for programs; null if the question was skipped.
    value: Value,
    /// Whether the result is as required; `None` if nothing is required.
    passed: Option<bool>,
}

impl Answers {
    /// Adds a figure; `result` is its text, with a unit.
    pub(crate) fn add_figure(
        &mut self,
        about: &'static str,
        what: impl Into<String>,
        result: impl Into<String>,
        value: impl Into<Value>,
    ) {
        self.add(about, what.into(), result.into(), value.into(), None);
    }

    /// Adds the result of a check.
    pub(crate) fn check(
        &mut self,
        about: &'static str,
        what: impl Into<String>,
        result: impl Into<String>,
        passed: bool,
    ) {
        self.add(about, what.into(), result.into(), passed.into(), Some(passed));
    }

    /// Adds a question that can't be answered here, and the reason.
    pub(crate) fn skip(
        &mut self,
        about: &'static str,
        what: impl Into<String>,
        why: impl std::fmt::Display,
    ) {
        self.add(about, what.into(), format!("not asked: {why}"), Value::Null, None);
    }

    fn add(
        &mut self,
        about: &'static str,
        what: String,
        result: String,
        value: Value,
        passed: Option<bool>,
    ) {
        // At once, so that nothing is lost if the program hangs or dies.
        let _ = writeln!(std::io::stderr().lock(), "{about}: {what}: {result}");
        self.lines.push(Line { about, what, result, value, passed });
    }

    pub(crate) fn all_passed(&self) -> bool {
        self.lines.iter().all(|line| line.passed != Some(false))
    }

    pub(crate) fn table(&self, fake: bool) -> String {
        let width = self.lines.iter().map(|line| line.what.len()).max().unwrap_or(0);
        let mut text = String::new();
        let mut about = "";
        for line in &self.lines {
            if line.about != about {
                about = line.about;
                let times = if fake { " (a driver without a GPU: times mean nothing)" } else { "" };
                let _ = writeln!(text, "{about}{times}");
            }
            let mark = match line.passed {
                Some(true) => "ok  ",
                Some(false) => "BAD ",
                None => "    ",
            };
            let _ = writeln!(text, "  {mark}{:width$}  {}", line.what, line.result);
        }
        text.truncate(text.trim_end().len());
        text
    }

    pub(crate) fn json(&self, fake: bool) -> Value {
        let line = |line: &Line| {
            json!({
                "about": line.about, "what": line.what, "said": line.result,
                "value": line.value, "well": line.passed,
            })
        };
        let lines: Vec<Value> = self.lines.iter().map(line).collect();
        json!({ "fake": fake, "well": self.all_passed(), "lines": lines })
    }

    pub(crate) fn markdown(&self, fake: bool) -> String {
        let mut text = String::new();
        if fake {
            text.push_str("On a driver without a GPU: no time below means anything.\n\n");
        }
        text.push_str("| about | what | found |\n|---|---|---|\n");
        for Line { about, what, result, passed, .. } in &self.lines {
            let bad = if *passed == Some(false) { "**bad**: " } else { "" };
            let _ = writeln!(text, "| {about} | {what} | {bad}{result} |");
        }
        text
    }
}
