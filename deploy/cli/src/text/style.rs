//! Colours text, where a terminal shows colours and nobody has asked for none.

use std::io::IsTerminal as _;

/// What a text means to its reader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Tone {
    /// Nothing special.
    #[default]
    Plain,
    /// As it should be.
    Good,
    /// Worth a look.
    Warn,
    /// A fault.
    Bad,
    /// Of less weight.
    Faint,
    /// A title.
    Strong,
}

/// How output is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    /// Whether tones are colours.
    pub has_colours: bool,
    /// Columns of the terminal; `None`: no limit.
    pub columns: Option<usize>,
}

impl Style {
    /// Returns the style of standard output. The environment can switch colours off (`NO_COLOR`,
    /// `TERM=dumb`) and say the columns of what is no terminal (`COLUMNS`).
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

    /// Returns a text in the colour of its tone.
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

/// Returns the tone of a worker's or session's state.
#[must_use]
pub fn state_tone(state: &str) -> Tone {
    match state {
        "fresh" | "running" | "idle" | "live" => Tone::Good,
        "draining" | "held" | "stale" | "demoted" | "closing" | "opening" | "bound" => Tone::Warn,
        _ => Tone::Bad,
    }
}
