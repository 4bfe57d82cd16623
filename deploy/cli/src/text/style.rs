//! Colours text, where a terminal shows colours and nobody has asked for none.

use std::io::IsTerminal as _;

/// What a text means to its reader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tone {
    #[default]
    Plain,
    Good,
    /// Worth a look.
    Warn,
    Bad,
    Faint,
    Strong,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    pub has_colours: bool,
    /// `None`: no limit.
    pub columns: Option<usize>,
}

impl Style {
    /// The environment can switch colours off (`NO_COLOR`, `TERM=dumb`) and say the columns of what
    /// is no terminal (`COLUMNS`).
    #[must_use]
    pub fn of_stdout() -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_terminal = std::io::stdout().is_terminal();
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let terminal_columns = || {
            let size = is_terminal.then(crossterm::terminal::size).and_then(Result::ok);
            size.map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
        };
        let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        Self {
            has_colours: is_terminal && !is_dumb && !is_set("NO_COLOR"),
            columns: terminal_columns().or(columns),
        }
    }

    #[must_use]
    pub fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Good => "32",
            Tone::Warn => "33",
            Tone::Bad => "31",
            Tone::Faint => "2",
            Tone::Strong => "1",
        };
        if self.has_colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

#[must_use]
pub fn state_tone(state: &str) -> Tone {
    match state {
        "fresh" | "running" | "idle" | "live" => Tone::Good,
        "draining" | "held" | "stale" | "demoted" | "closing" | "opening" | "bound" => Tone::Warn,
        _ => Tone::Bad,
    }
}
