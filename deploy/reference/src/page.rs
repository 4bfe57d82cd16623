//! Renders a reference page: headings, paragraphs and tables in Markdown.

use std::collections::HashMap;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cell {
    Made(String),
    /// Written by hand in the page.
    ByHand,
}

/// The first cell of each row names the row, and is unique in the page.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) columns: &'static [&'static str],
    pub(crate) rows: Vec<Vec<Cell>>,
}

#[derive(Debug)]
pub(crate) enum Part {
    /// Markdown without tables that have cells written by hand.
    Text(String),
    Table(Table),
}

#[derive(Debug, Default)]
pub(crate) struct Page {
    parts: Vec<Part>,
}

/// The first line of each page.
const NOTE: &str = "<!-- Written by `cargo run -p reference` from the code. Cells that the code \
                    doesn't have are written here, by hand, and stay. -->";

impl Page {
    pub(crate) fn new(title: &str, introduction: &str) -> Self {
        let mut page = Self::default();
        page.add_text(&format!("{NOTE}\n# {title}\n\n{introduction}"));
        page
    }

    pub(crate) fn add_text(&mut self, text: &str) {
        self.parts.push(Part::Text(text.to_owned()));
    }

    /// Leaves out an empty table.
    pub(crate) fn add_table(&mut self, table: Table) {
        if !table.rows.is_empty() {
            self.parts.push(Part::Table(table));
        }
    }

    /// `before` is the page as it is, with the cells written by hand.
    pub(crate) fn render(&self, before: &str) -> String {
        let by_hand = cells_by_row(before);
        let render = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Table(table) => render_table(table, &by_hand),
        };
        let parts: Vec<String> = self.parts.iter().map(render).collect();
        parts.join("\n\n") + "\n"
    }
}

/// By the first cell of their row, and the column's name.
type CellsByRow = HashMap<(String, String), String>;

fn render_table(table: &Table, by_hand: &CellsByRow) -> String {
    let mut lines = vec![
        format!("| {} |", table.columns.join(" | ")),
        format!("|{}", "---|".repeat(table.columns.len())),
    ];
    for row in &table.rows {
        let name = row.first().map(|cell| shown(cell, None)).unwrap_or_default();
        let cells = row
            .iter()
            .zip(table.columns)
            .map(|(cell, column)| shown(cell, by_hand.get(&(name.clone(), (*column).to_owned()))));
        let cells: Vec<String> = cells.map(|cell| format!(" {cell} ")).collect();
        lines.push(format!("|{}|", cells.join("|")).replace("|  |", "| |").replace("|  |", "| |"));
    }
    lines.join("\n")
}

fn shown(cell: &Cell, by_hand: Option<&String>) -> String {
    match cell {
        Cell::Made(text) => text.replace('\n', " ").replace('|', "\\|"),
        Cell::ByHand => by_hand.cloned().unwrap_or_default(),
    }
}

fn cells_by_row(page: &str) -> CellsByRow {
    let mut found = CellsByRow::new();
    let mut columns: Vec<String> = vec![];
    for line in page.lines() {
        let Some(cells) = cells_of(line) else {
            columns.clear();
            continue;
        };
        if columns.is_empty() {
            columns = cells;
            continue;
        }
        let Some(name) = cells.first().cloned() else { continue };
        let named = columns.iter().zip(cells);
        found.extend(named.map(|(column, cell)| ((name.clone(), column.clone()), cell)));
    }
    found
}

/// `\|` is part of a cell.
fn cells_of(line: &str) -> Option<Vec<String>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    let mut cells = vec![String::new()];
    let mut before = ' ';
    for letter in inner.chars() {
        if letter == '|' && before != '\\' {
            cells.push(String::new());
        } else if let Some(cell) = cells.last_mut() {
            cell.push(letter);
        }
        before = letter;
    }
    Some(cells.iter().map(|cell| cell.trim().to_owned()).collect())
}

/// Puts a comma before each three digits.
pub(crate) fn grouped(number: i64) -> String {
    let digits = number.to_string();
    let mut shown = String::new();
    for (index, digit) in digits.chars().enumerate() {
        let is_group_start = index > 0 && (digits.len() - index).is_multiple_of(3);
        if is_group_start && !shown.ends_with('-') {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::new("Title", "Words.");
        let row = vec![Cell::Made("`a`".into()), Cell::Made("x|y".into()), Cell::ByHand];
        page.add_table(Table { columns: &["key", "sets", "see"], rows: vec![row] });
        page
    }

    #[test]
    fn what_is_written_by_hand_stays_and_the_rest_is_made_anew() {
        let made = page().render("");
        assert!(
            made.contains("| key | sets | see |\n|---|---|---|\n| `a` | x\\|y | |\n"),
            "{made}"
        );
        let edited = made.replace("| `a` | x\\|y | |", "| `a` | old | a \\| b |");
        let again = page().render(&edited);
        assert!(again.contains("| `a` | x\\|y | a \\| b |"), "{again}");
        assert_eq!(page().render(&again), again);
    }

    #[test]
    fn numbers_are_grouped() {
        for (number, shown) in [(0, "0"), (999, "999"), (1_000, "1,000"), (-100, "-100")] {
            assert_eq!(grouped(number), shown);
        }
        assert_eq!(grouped(1_234_567), "1,234,567");
    }
}
