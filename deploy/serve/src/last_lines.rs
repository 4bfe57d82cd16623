//! Keeps the last lines of an engine's log, whatever its bytes. Pure.

use std::collections::VecDeque;

/// A traceback of several processes has some hundred lines.
const LINES_MAX: usize = 200;
/// The engine's longest usual line, its settings, has 6 KiB.
const LINE_BYTES_MAX: usize = 8 << 10;

#[derive(Debug, Default)]
pub struct LastLines {
    lines: VecDeque<String>,
    /// The begin of the line that hasn't ended.
    open: Vec<u8>,
}

impl LastLines {
    /// A progress bar ends its lines by carriage returns.
    pub fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => self.end_line(),
                _ if self.open.len() < LINE_BYTES_MAX => self.open.push(*byte),
                _ => {}
            }
        }
    }

    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.open).trim_end().to_owned();
        self.open.clear();
        if line.is_empty() {
            return;
        }
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// With the line that hasn't ended.
    pub fn finish(&mut self) -> impl DoubleEndedIterator<Item = &str> {
        self.end_line();
        self.lines.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_kept_across_parts_and_are_bounded() {
        let mut lines = LastLines::default();
        let long = vec![0xff; 9000];
        for part in [b"a\nb", &b"b\r 50 %\rc"[..], &long, b"\n\n", b"open"] {
            lines.push(part);
        }
        assert_eq!(lines.finish().take(3).collect::<Vec<_>>(), ["a", "bb", " 50 %"]);
        assert_eq!(lines.finish().next_back(), Some("open"));
        for number in 0..1000 {
            lines.push(format!("{number}\n").as_bytes());
        }
        assert_eq!(lines.finish().count(), LINES_MAX);
    }
}
