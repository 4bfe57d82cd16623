//! Lays out tables: columns as wide as their longest cell, as long as the terminal has room. Pure.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::style::{Style, Tone};

/// No column is made narrower for lack of room.
const COLUMN_WIDTH_MIN: usize = 8;
const GAP: usize = 2;

#[derive(Debug, Clone, Copy)]
pub struct Column {
    title: &'static str,
    is_number: bool,
    /// Cells may be cut where the terminal is too narrow.
    is_cuttable: bool,
}

impl Column {
    #[must_use]
    pub const fn text(title: &'static str) -> Self {
        Self { title, is_number: false, is_cuttable: true }
    }

    #[must_use]
    pub const fn word(title: &'static str) -> Self {
        Self { title, is_number: false, is_cuttable: false }
    }

    /// Numbers stand at the right edge.
    #[must_use]
    pub const fn number(title: &'static str) -> Self {
        Self { title, is_number: true, is_cuttable: false }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    #[must_use]
    pub fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: text.into(), tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.into(), tone: Tone::Plain }
    }
}

/// Each row has a cell for each column.
#[must_use]
pub fn render(columns: &[Column], rows: &[Vec<Cell>], style: Style) -> String {
    let widths = fit(columns, rows, style.columns);
    let titles: Vec<Cell> =
        columns.iter().map(|column| Cell::toned(column.title, Tone::Strong)).collect();
    let lines = [&titles].into_iter().chain(rows);
    lines.map(|row| line(columns, row, &widths, style) + "\n").collect()
}

fn fit(columns: &[Column], rows: &[Vec<Cell>], room: Option<usize>) -> Vec<usize> {
    let widest = |index: usize, column: &Column| {
        let cells = rows.iter().map(|row| row[index].text.width());
        cells.chain([column.title.width()]).max().unwrap_or(0)
    };
    let mut widths: Vec<usize> =
        columns.iter().enumerate().map(|(index, column)| widest(index, column)).collect();
    let gaps = GAP * columns.len().saturating_sub(1);
    let mut excess =
        room.map_or(0, |room| (widths.iter().sum::<usize>() + gaps).saturating_sub(room));
    while excess > 0 {
        let cuttable = |index: &usize| {
            let least = COLUMN_WIDTH_MIN.max(columns[*index].title.width());
            columns[*index].is_cuttable && widths[*index] > least
        };
        let Some(widest) = (0..widths.len()).filter(cuttable).max_by_key(|index| widths[*index])
        else {
            break;
        };
        widths[widest] -= 1;
        excess -= 1;
    }
    widths
}

fn line(columns: &[Column], row: &[Cell], widths: &[usize], style: Style) -> String {
    let mut line = String::new();
    for (index, (cell, width)) in row.iter().zip(widths).enumerate() {
        let text = cut(&cell.text, *width);
        let padding = " ".repeat(width - text.width());
        let text = style.paint(cell.tone, &text);
        let is_last = index + 1 == row.len();
        match (columns[index].is_number, is_last) {
            (true, _) => line.extend([padding, text]),
            (false, true) => line.push_str(&text),
            (false, false) => line.extend([text, padding]),
        }
        if !is_last {
            line.push_str(&" ".repeat(GAP));
        }
    }
    line
}

/// A text that is cut ends with `…`.
#[must_use]
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut kept = String::new();
    let mut used = 1;
    for character in text.chars() {
        used += character.width().unwrap_or(0);
        if used > width {
            break;
        }
        kept.push(character);
    }
    if width > 0 {
        kept.push('…');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] = [Column::text("NAME"), Column::number("N"), Column::word("STATE")];

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let rows = vec![
            vec!["a".into(), "7".into(), "ok".into()],
            vec!["long-name".into(), "12345".into(), Cell::toned("bad", Tone::Bad)],
        ];
        let text = render(&COLUMNS, &rows, Style::default());
        let expected = "NAME           N  STATE\na              7  ok\nlong-name  12345  bad\n";
        assert_eq!(text, expected);
        let style = Style { has_colours: true, ..Style::default() };
        let coloured = render(&COLUMNS, &rows, style);
        assert!(coloured.contains("\x1b[31mbad\x1b[0m"), "{coloured:?}");
    }

    #[test]
    fn only_texts_are_cut_where_room_is_short() {
        let rows = vec![vec!["x".repeat(200).into(), "12345".into(), "running".into()]];
        let style = Style { columns: Some(40), ..Style::default() };
        let text = render(&COLUMNS, &rows, style);
        assert!(text.lines().all(|line| line.width() <= 40), "{text}");
        assert!(text.contains("…") && text.contains("12345  running"), "{text}");
        // Numbers stay whole even where there is no room for them.
        let narrow = render(&COLUMNS, &rows, Style { columns: Some(5), ..style });
        assert!(narrow.contains("12345  running"), "{narrow}");
    }

    #[test]
    fn wide_characters_count_as_two_columns() {
        assert_eq!(cut("日本語", 6), "日本語");
        assert_eq!(cut("日本語", 5), "日本…");
        assert_eq!(cut("日本語", 4), "日…");
        assert_eq!((cut("abc", 0), cut("abc", 1)), (String::new(), "…".to_owned()));
    }
}
