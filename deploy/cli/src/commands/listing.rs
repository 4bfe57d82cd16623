//! Prints a list: once, or again and again; as a table for people or as JSON for programs.

use std::{
    io::{self, IsTerminal as _, Write as _},
    time::Duration,
};

use serde_json::Value;

use super::{Outcome, print};
use crate::{
    args::ListArgs,
    error::{Error, chain},
    text::{
        style::Style,
        table::{self, Cell, Column},
    },
};

/// Moves a terminal's cursor to its first line, and clears what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

#[derive(Debug)]
pub struct Listing {
    /// Programs read this.
    pub json: Value,
    /// People read these columns and rows.
    pub columns: &'static [Column],
    pub rows: Vec<Vec<Cell>>,
    /// Stand below the table.
    pub notes: Vec<String>,
}

impl Listing {
    #[must_use]
    pub fn to_text(&self, is_json: bool, style: Style) -> String {
        if is_json {
            return format!("{}\n", self.json);
        }
        let mut text = table::render(self.columns, &self.rows, style);
        for note in &self.notes {
            text.push_str(note);
            text.push('\n');
        }
        text
    }
}

/// A list that was printed once goes on when the router doesn't answer for a while, and says so.
pub async fn show(
    args: &ListArgs,
    mut fetch: impl AsyncFnMut() -> Result<Listing, Error>,
) -> Result<Outcome, Error> {
    let text = fetch().await?.to_text(args.json, Style::of_stdout());
    let Some(seconds) = args.watch else {
        print(&text)?;
        return Ok(Outcome::Well);
    };
    let clears = !args.json && io::stdout().is_terminal();
    let begin = if clears { CLEAR } else { "" };
    print(&format!("{begin}{text}"))?;
    loop {
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        let text = match fetch().await {
            Ok(listing) => listing.to_text(args.json, Style::of_stdout()),
            Err(error) if is_passing(&error) => {
                say(&error);
                continue;
            }
            Err(error) => return Err(error),
        };
        let begin = match (clears, args.json) {
            (true, _) => CLEAR,
            (false, true) => "",
            (false, false) => "\n",
        };
        print(&format!("{begin}{text}"))?;
    }
}

/// Prints a list that only grows: `fetch` returns it first, and later only what is new.
pub async fn follow(
    args: &ListArgs,
    mut fetch: impl AsyncFnMut() -> Result<Listing, Error>,
) -> Result<Outcome, Error> {
    let style = Style::of_stdout();
    print(&fetch().await?.to_text(args.json, style))?;
    let Some(seconds) = args.watch else { return Ok(Outcome::Well) };
    loop {
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        match fetch().await {
            Ok(listing) if listing.rows.is_empty() => {}
            Ok(listing) => {
                let text = listing.to_text(args.json, style);
                // The titles are above already.
                let titles = if args.json { 0 } else { text.find('\n').map_or(0, |end| end + 1) };
                print(&text[titles..])?;
            }
            Err(error) if is_passing(&error) => say(&error),
            Err(error) => return Err(error),
        }
    }
}

/// Whether the error may be gone at the next request: the router restarts.
fn is_passing(error: &Error) -> bool {
    matches!(error, Error::Unreachable { .. })
}

fn say(error: &Error) {
    // If standard error is gone too, nothing can be reported.
    let _ = writeln!(io::stderr(), "berth: {}; trying again", chain(error));
}
