//! Writes template values as Python's `str()` and `json.dumps` do.
//!
//! Chat templates are written for Python. Values in another form have other tokens than the
//! engine's.

use std::fmt::Write as _;

use minijinja::{Value, value::ValueKind as Kind};

/// Templates print nothing deeper, and the recursion needs a bound.
const DEPTH_MAX: usize = 128;

pub(super) fn format_str(value: &Value) -> String {
    match value.kind() {
        Kind::Undefined => String::new(),
        Kind::String => value.to_string(),
        _ => format_value(value, &Style::REPR).unwrap_or_default(),
    }
}

/// As `json.dumps(value, ensure_ascii=False, indent=indent)`; `None` if it raises.
pub(super) fn format_json(value: &Value, indent: Option<usize>) -> Option<String> {
    format_value(value, &Style { indent, ..Style::JSON })
}

/// The differences between `str()` and `json.dumps`.
struct Style {
    none: &'static str,
    /// False and true.
    bools: [&'static str; 2],
    write_string: fn(&mut String, &str),
    /// Spaces per level. `None` writes everything on one line.
    indent: Option<usize>,
    is_json: bool,
}

impl Style {
    const REPR: Self = Self {
        none: "None",
        bools: ["False", "True"],
        write_string: write_repr,
        indent: None,
        is_json: false,
    };
    const JSON: Self = Self {
        none: "null",
        bools: ["false", "true"],
        write_string: write_json_string,
        indent: None,
        is_json: true,
    };
}

fn format_value(value: &Value, style: &Style) -> Option<String> {
    let mut out = String::new();
    write_value(&mut out, value, style, 0)?;
    Some(out)
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Option<()> {
    if depth > DEPTH_MAX {
        return None;
    }
    match value.kind() {
        Kind::None => out.push_str(style.none),
        Kind::Undefined if style.is_json => return None,
        Kind::Bool => out.push_str(style.bools[usize::from(value.is_true())]),
        Kind::Number => out.push_str(&format_number(value)),
        Kind::String => (style.write_string)(out, value.as_str()?),
        Kind::Seq | Kind::Iterable => {
            let items = value.try_iter().ok()?;
            write_list(out, "[]", items, style, depth, |out, item| {
                write_value(out, &item, style, depth + 1)
            })?;
        }
        Kind::Map => {
            let keys = value.try_iter().ok()?;
            write_list(out, "{}", keys, style, depth, |out, key| {
                let json_key = |key: &Value| match key.kind() {
                    Kind::String => key.to_string(),
                    _ => format_json(key, None).unwrap_or_default(),
                };
                if style.is_json {
                    (style.write_string)(out, &json_key(&key));
                } else {
                    write_value(out, &key, style, depth + 1)?;
                }
                out.push_str(": ");
                write_value(out, &value.get_item(&key).ok()?, style, depth + 1)
            })?;
        }
        _ => return None,
    }
    Some(())
}

fn write_list(
    out: &mut String,
    brackets: &str,
    items: impl Iterator<Item = Value>,
    style: &Style,
    depth: usize,
    mut write_item: impl FnMut(&mut String, Value) -> Option<()>,
) -> Option<()> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            let _ = write!(out, "\n{:1$}", "", indent * depth);
        }
    };
    out.push_str(&brackets[..1]);
    let mut has_items = false;
    for value in items {
        if has_items {
            out.push_str(if style.indent.is_some() { "," } else { ", " });
        }
        has_items = true;
        new_line(out, depth + 1);
        write_item(out, value)?;
    }
    if has_items {
        new_line(out, depth);
    }
    out.push_str(&brackets[1..]);
    Some(())
}

/// A float has the fewest digits that identify it, and an exponent where Python uses one. Infinity
/// and NaN are written as `json.dumps` writes them.
fn format_number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    let magnitude = float.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) || !float.is_finite() {
        return format!("{float:?}").replace("inf", "Infinity");
    }
    let text = format!("{float:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
    format!("{digits}e{sign}{exponent:0>2}")
}

fn write_json_string(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(character));
            }
            _ => out.push(character),
        }
    }
    out.push('"');
}

fn write_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\u{1f}' | '\u{7f}' => {
                let _ = write!(out, "\\x{:02x}", u32::from(character));
            }
            _ if character == quote => {
                out.push('\\');
                out.push(character);
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}
