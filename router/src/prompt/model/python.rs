//! Writes values as Python does, because chat templates expect Python's `str()` and `json.dumps`.

use std::fmt::Write as _;

use minijinja::{
    Value,
    value::{ValueKind, ValueKind as Kind},
};

/// Greatest nesting depth that is written; templates print nothing deeper.
const DEPTH_MAX: usize = 128;

/// Returns what `str(value)` returns in Python.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        Kind::Undefined => String::new(),
        Kind::String => value.to_string(),
        _ => format_value(value, &Style::REPR).unwrap_or_default(),
    }
}

/// Returns what `json.dumps(value, ensure_ascii=False, indent=indent)` returns in Python, or `None`
/// if it raises.
pub(super) fn json(value: &Value, indent: Option<usize>) -> Option<String> {
    format_value(value, &Style { indent, ..Style::JSON })
}

/// The differences between `str()` and `json.dumps`.
struct Style {
    none: &'static str,
    truth: [&'static str; 2],
    quote: fn(&mut String, &str),
    indent: Option<usize>,
    json: bool,
}

impl Style {
    const REPR: Self =
        Self { none: "None", truth: ["False", "True"], quote: repr, indent: None, json: false };
    const JSON: Self =
        Self { none: "null", truth: ["false", "true"], quote, indent: None, json: true };
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
        Kind::Undefined if style.json => return None,
        Kind::Bool => out.push_str(style.truth[usize::from(value.is_true())]),
        Kind::Number => out.push_str(&number(value)),
        Kind::String => (style.quote)(out, value.as_str()?),
        Kind::Seq | Kind::Iterable => {
            let items = value.try_iter().ok()?;
            list(out, "[]", items, style, depth, |out, item| {
                write_value(out, &item, style, depth + 1)
            })?;
        }
        Kind::Map => {
            let keys = value.try_iter().ok()?;
            list(out, "{}", keys, style, depth, |out, key| {
                let of_json = |key: &Value| match key.kind() {
                    ValueKind::String => key.to_string(),
                    _ => json(key, None).unwrap_or_default(),
                };
                if style.json {
                    (style.quote)(out, &of_json(&key));
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

fn list(
    out: &mut String,
    brackets: &str,
    items: impl Iterator<Item = Value>,
    style: &Style,
    depth: usize,
    mut item: impl FnMut(&mut String, Value) -> Option<()>,
) -> Option<()> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            let _ = write!(out, "\n{:1$}", "", indent * depth);
        }
    };
    out.push_str(&brackets[..1]);
    let mut any = false;
    for value in items {
        if any {
            out.push_str(if style.indent.is_some() { "," } else { ", " });
        }
        any = true;
        line(out, depth + 1);
        item(out, value)?;
    }
    if any {
        line(out, depth);
    }
    out.push_str(&brackets[1..]);
    Some(())
}

/// Writes a number as Python does: integers as they are, floats by the shortest digits, with an
/// exponent where Python uses one.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    let size = float.abs();
    if size == 0.0 || (1e-4..1e16).contains(&size) || !float.is_finite() {
        return format!("{float:?}").replace("inf", "Infinity");
    }
    let text = format!("{float:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |rest| ('-', rest));
    format!("{digits}e{sign}{exponent:0>2}")
}

fn quote(out: &mut String, text: &str) {
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

fn repr(out: &mut String, text: &str) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\u{1f}' | '\u{7f}' => {
                let _ = write!(out, "\\x{:02x}", u32::from(character));
            }
            _ if character == mark => {
                out.push('\\');
                out.push(character);
            }
            _ => out.push(character),
        }
    }
    out.push(mark);
}
