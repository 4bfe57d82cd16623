//! What was found, and how it is told: a table, JSON, lines of Markdown.

use serde_json::{Value, json};
use std::fmt::Write;

/// All that was found.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    lines: Vec<Line>,
}

#[derive(Debug)]
struct Line {
    about: &'static str,
    what: String,
    /// For people.
    said: String,
    /// For programs; null where nothing was asked.
    value: Value,
    /// Whether it is as it has to be; `None` where nothing has to be.
    well: Option<bool>,
}

impl Answers {
    /// A figure, said with its unit.
    pub(crate) fn figure(
        &mut self,
        about: &'static str,
        what: impl Into<String>,
        said: impl Into<String>,
        value: impl Into<Value>,
    ) {
        self.add(about, what.into(), said.into(), value.into(), None);
    }

    /// Something that has to be so.
    pub(crate) fn held(
        &mut self,
        about: &'static str,
        what: impl Into<String>,
        said: impl Into<String>,
        well: bool,
    ) {
        self.add(about, what.into(), said.into(), well.into(), Some(well));
    }

    /// What can't be asked here, and why.
    pub(crate) fn unasked(
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
        said: String,
        value: Value,
        well: Option<bool>,
    ) {
        self.lines.push(Line { about, what, said, value, well });
    }

    pub(crate) fn all_well(&self) -> bool {
        self.lines.iter().all(|line| line.well != Some(false))
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
            let mark = match line.well {
                Some(true) => "ok  ",
                Some(false) => "BAD ",
                None => "    ",
            };
            let _ = writeln!(text, "  {mark}{:width$}  {}", line.what, line.said);
        }
        text.truncate(text.trim_end().len());
        text
    }

    pub(crate) fn json(&self, fake: bool) -> Value {
        let line = |line: &Line| {
            json!({
                "about": line.about, "what": line.what, "said": line.said,
                "value": line.value, "well": line.well,
            })
        };
        let lines: Vec<Value> = self.lines.iter().map(line).collect();
        json!({ "fake": fake, "well": self.all_well(), "lines": lines })
    }

    pub(crate) fn markdown(&self, fake: bool) -> String {
        let mut text = String::new();
        if fake {
            text.push_str("On a driver without a GPU: no time below means anything.\n\n");
        }
        text.push_str("| about | what | found |\n|---|---|---|\n");
        for Line { about, what, said, well, .. } in &self.lines {
            let bad = if *well == Some(false) { "**bad**: " } else { "" };
            let _ = writeln!(text, "| {about} | {what} | {bad}{said} |");
        }
        text
    }
}
