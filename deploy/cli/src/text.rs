//! Writes numbers, times and foreign texts for people. Pure.

pub mod style;
pub mod table;

/// Removes from a text of others what could steer a terminal: control characters, and marks that
/// turn the direction of writing. Clients choose the ids of their sessions.
#[must_use]
pub fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for character in text.chars() {
        let turns_writing = matches!(
            character,
            '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        if character.is_control() || turns_writing {
            cleaned.extend(character.escape_unicode());
        } else {
            cleaned.push(character);
        }
    }
    cleaned
}

/// Breaks a text into lines. A word that is longer than `columns` has its own line.
#[must_use]
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a first line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > columns {
            lines.push(word.to_owned());
        } else {
            let space = if line.is_empty() { "" } else { " " };
            line.push_str(space);
            line.push_str(word);
        }
    }
    lines
}

/// The text has at most 5 characters, such as `950`, `12.3k` or `1.20M`.
#[must_use]
pub fn count(number: u64) -> String {
    scaled(number, 1000, ["", "k", "M", "G", "T"])
}

/// The text has at most 8 characters, such as `80.0 GiB`.
#[must_use]
pub fn bytes(number: u64) -> String {
    scaled(number, 1024, [" B", " KiB", " MiB", " GiB", " TiB"])
}

/// Chooses the unit that fits. The number has three digits, and is rounded down.
fn scaled(number: u64, step: u64, units: [&str; 5]) -> String {
    if number < step {
        return format!("{number}{}", units[0]);
    }
    let mut scale = step;
    let mut index = 1;
    while index + 1 < units.len() && number / scale >= step {
        scale *= step;
        index += 1;
    }
    let hundredths = u128::from(number) * 100 / u128::from(scale);
    let unit = units[index];
    match hundredths {
        0..1000 => format!("{}.{:02}{unit}", hundredths / 100, hundredths % 100),
        1000..10_000 => format!("{}.{}{unit}", hundredths / 100, hundredths % 100 / 10),
        _ => format!("{}{unit}", hundredths / 100),
    }
}

/// The text has at most 6 characters, such as `950ms`, `12.3s`, `4m10s` or `2h05m`.
#[must_use]
pub fn millis(time_ms: u64) -> String {
    let seconds = time_ms / 1000;
    match seconds {
        0 => format!("{time_ms}ms"),
        1..60 => format!("{seconds}.{}s", time_ms % 1000 / 100),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

#[must_use]
pub fn known<T>(value: Option<T>, write: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), write)
}

#[must_use]
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    format!("{}%", u128::from(part) * 100 / u128::from(whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_s_id_can_t_steer_the_terminal() {
        assert_eq!(clean("plain-ü"), "plain-ü");
        assert_eq!(clean("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\u{a}");
        assert_eq!(clean("a\u{202e}b\u{9b}c"), "a\\u{202e}b\\u{9b}c");
    }

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1.00k"),
            (12_345, "12.3k"),
            (999_400, "999k"),
            (999_999, "999k"),
            (123_456_789, "123M"),
            (u64::MAX, "18446744T"),
        ] {
            assert_eq!(count(number), text);
        }
        assert_eq!(bytes(80 << 30), "80.0 GiB");
        assert_eq!(bytes(1), "1 B");
        for (time, text) in [
            (999, "999ms"),
            (1050, "1.0s"),
            (59_999, "59.9s"),
            (250_000, "4m10s"),
            (7_500_000, "2h05m"),
            (90_000_000, "1d01h"),
        ] {
            assert_eq!(millis(time), text);
        }
        assert_eq!((percent(1, 3), percent(1, 0)), ("33%".to_owned(), "-".to_owned()));
    }
}
