//! Makes the pages of settings: each key with its bounds, its default and the reason.
//!
//! What a key sets, and why its default is as it is, comes from its declaration. The default comes
//! from the binary's own `Config`. The bounds are found by asking the binary's own check about
//! values.

use std::{fs, path::Path};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use service::settings::table::{self, Key, Values};
use toml::Value;

use crate::page::{Cell, Page, Table, grouped};

const COLUMNS: &[&str] = &["key", "values", "default", "sets", "why this default", "more"];

struct Binary {
    table: &'static table::Table,
    defaults: Value,
    /// Whether a file of settings is legal.
    accepts: fn(&Path) -> bool,
}

pub(crate) fn agent() -> anyhow::Result<Page> {
    use worker_agent::config::{Args, Config};

    let binary = Binary {
        table: Config::TABLE,
        defaults: Value::try_from(Config::default())?,
        accepts: |path| {
            let args = [Path::new("berth-agent"), Path::new("--config"), path];
            Config::load(Args::parse_from(args)).is_ok()
        },
    };
    make_page("Settings of the agent", "agent", &binary, &Args::command())
}

pub(crate) fn router() -> anyhow::Result<Page> {
    use router::config::{Args, Config};

    let binary = Binary {
        table: Config::TABLE,
        defaults: Value::try_from(Config::default())?,
        accepts: |path| {
            let worker = Path::new("--worker=http://127.0.0.1:31001");
            let args = [Path::new("berth-router"), worker, Path::new("--config"), path];
            Config::load(&Args::parse_from(args)).is_ok()
        },
    };
    make_page("Settings of the router", "router", &binary, &Args::command())
}

fn make_page(
    title: &str,
    name: &str,
    binary: &Binary,
    command: &clap::Command,
) -> anyhow::Result<Page> {
    let mut page = Page::new(
        title,
        &format!(
            "One TOML file, then environment variables, then flags; later sources win. A key is \
             written here as `table.key`: `listen.data_addr` is `data_addr` in the table \
             `[listen]`. An unknown key is refused. Settings are read once, at the start; all \
             problems are told at once, with exit status 64. `berth-{name} --check-config` prints \
             the settings in effect. Bounds hold while all other keys have their defaults."
        ),
    );
    page.add_text("## Flags");
    page.add_table(flags(command));
    let folder = tempfile::tempdir()?;
    binary.add_table(&mut page, "", binary.table, &folder.path().join("settings.toml"))?;
    Ok(page)
}

fn flags(command: &clap::Command) -> Table {
    let rows = command.get_arguments().filter_map(|argument| {
        let flag = format!("`--{}`", argument.get_long()?);
        let env = argument.get_env().map(|name| format!("`{}`", name.display()));
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let cells = [flag, env.unwrap_or_default(), help];
        Some(cells.map(Cell::Made).to_vec())
    });
    Table { columns: &["flag", "variable", "sets"], rows: rows.collect() }
}

impl Binary {
    /// Also adds the tables below this one. The table without a name has them all.
    fn add_table(
        &self,
        page: &mut Page,
        name: &str,
        table: &table::Table,
        file: &Path,
    ) -> anyhow::Result<()> {
        let (heading, prefix) = match name {
            "" => ("## Keys outside tables".to_owned(), String::new()),
            _ => (format!("## `[{name}]`\n\n{}", paragraphs(table.doc).0), format!("{name}.")),
        };
        page.add_text(&heading);
        let mut rows = vec![];
        let mut tables = vec![];
        for key in table.keys {
            let name = format!("{prefix}{}", key.name);
            match key.values {
                Values::Table(table) => tables.push((name, table)),
                _ => rows.push(self.row(&name, key, file)?),
            }
        }
        page.add_table(Table { columns: COLUMNS, rows });
        tables.iter().try_for_each(|(name, table)| self.add_table(page, name, table, file))
    }

    fn row(&self, name: &str, key: &Key, file: &Path) -> anyhow::Result<Vec<Cell>> {
        let default = name.split('.').try_fold(&self.defaults, |value, part| value.get(part));
        let default = default.with_context(|| format!("{name} has no default"))?;
        let accepts = |value: &Value| {
            fs::write(file, format!("{name} = {value}")).is_ok() && (self.accepts)(file)
        };
        let unit = unit_of(key.name);
        let values = match default {
            Value::Integer(number) => {
                let bounds = bounds(*number, |number| accepts(&Value::Integer(number)));
                shown_bounds(bounds, unit)
            }
            Value::Float(_) => {
                let is_legal = |number| accepts(&Value::Float(number));
                let is_share = !is_legal(-0.001) && is_legal(1.0) && !is_legal(1.001);
                let from = if is_legal(0.0) { "0" } else { "more than 0," };
                if is_share { format!("{from} to 1") } else { "number".to_owned() }
            }
            _ => shown_values(&key.values),
        };
        let (mut sets, reason) = paragraphs(key.doc);
        if let Values::OneOf(texts) = key.values {
            for (text, doc) in texts {
                sets += &format!(" `\"{text}\"`: {}", paragraphs(doc).0);
            }
        }
        let cells = [format!("`{name}`"), values, shown_default(default, unit), sets, reason];
        Ok(cells.map(Cell::Made).into_iter().chain([Cell::ByHand]).collect())
    }
}

fn shown_values(values: &Values) -> String {
    match values {
        Values::Any(kind) => (*kind).to_owned(),
        Values::List(Values::OneOf(texts)) => {
            let texts: Vec<String> =
                texts.iter().map(|(text, _)| format!("`\"{text}\"`")).collect();
            format!("list: {}", texts.join(", "))
        }
        Values::List(of) => format!("list: {}", shown_values(of)),
        Values::OneOf(_) => "one of those named here".to_owned(),
        Values::Table(_) => "table".to_owned(),
    }
}

/// The first two paragraphs of a doc comment, each on one line, without links into the code.
fn paragraphs(doc: &str) -> (String, String) {
    let lines: Vec<&str> = doc.lines().map(str::trim).collect();
    let mut paragraphs = lines.split(|line| line.is_empty());
    let mut next = || {
        let text = paragraphs.next().unwrap_or_default().join(" ");
        text.replace("[`", "`").replace("`]", "`")
    };
    (next(), next())
}

/// Units come last, before the bound.
fn unit_of(key: &str) -> &'static str {
    let without_bound = ["_max", "_min", "_cap"].iter().find_map(|bound| key.strip_suffix(bound));
    let name = without_bound.unwrap_or(key);
    let units = [
        ("bytes_per_s", "bytes per second"),
        ("_ms", "ms"),
        ("_s", "s"),
        ("bytes", "bytes"),
        ("body_bytes_in_flight", "bytes"),
    ];
    units.iter().find(|(end, _)| name.ends_with(end)).map_or("", |(_, unit)| unit)
}

/// The least and the largest legal number around a legal one. `None`: there is no bound.
fn bounds(legal: i64, is_legal: impl Fn(i64) -> bool) -> (i64, Option<i64>) {
    let (mut least, mut below) = (legal, -1);
    while least - below > 1 {
        let middle = below + (least - below) / 2;
        if is_legal(middle) { least = middle } else { below = middle }
    }
    if is_legal(i64::MAX) {
        return (least, None);
    }
    let (mut largest, mut above) = (legal, i64::MAX);
    while above - largest > 1 {
        let middle = largest + (above - largest) / 2;
        if is_legal(middle) { largest = middle } else { above = middle }
    }
    (least, Some(largest))
}

fn shown_bounds((least, largest): (i64, Option<i64>), unit: &str) -> String {
    let range = match largest {
        None if least == 0 => return if unit.is_empty() { "number" } else { unit }.to_owned(),
        None => format!("at least {}", shown_number(least, unit)),
        Some(largest) => format!("{} to {}", grouped(least), shown_number(largest, unit)),
    };
    if unit.is_empty() { range } else { format!("{unit}, {range}") }
}

fn shown_default(default: &Value, unit: &str) -> String {
    match default {
        Value::Integer(number) => shown_number(*number, unit),
        other => format!("`{other}`"),
    }
}

/// Shows a round number in a larger unit too.
fn shown_number(number: i64, unit: &str) -> String {
    let larger: &[(i64, &str)] = match unit {
        "ms" => &[(86_400_000, "days"), (3_600_000, "h"), (60_000, "min")],
        "s" => &[(86_400, "days"), (3_600, "h")],
        "bytes" => &[(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")],
        _ => &[],
    };
    let round = larger.iter().find(|(size, _)| number > 0 && number % size == 0);
    let shown = grouped(number);
    let Some((size, name)) = round else { return shown };
    let count = number / size;
    let name = if count == 1 { name.trim_end_matches('s') } else { name };
    format!("{shown} ({count} {name})")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn bounds_are_found_by_asking() {
        assert_eq!(bounds(5, |number| (1..=65_536).contains(&number)), (1, Some(65_536)));
        assert_eq!(bounds(0, |number| number >= 0), (0, None));
        assert_eq!(bounds(7, |number| number == 7), (7, Some(7)));
    }

    #[test]
    fn numbers_have_units() {
        assert_eq!(shown_number(3_600_000, unit_of("idle_ms_max")), "3,600,000 (1 h)");
        assert_eq!(shown_number(86_400, unit_of("interval_s")), "86,400 (1 day)");
        assert_eq!(shown_number(64 << 20, unit_of("body_bytes_max")), "67,108,864 (64 MiB)");
        assert_eq!(unit_of("drain_bytes_per_s_min"), "bytes per second");
        assert_eq!(unit_of("body_bytes_in_flight_max"), "bytes");
        assert_eq!(unit_of("rows_reserve"), "");
    }

    /// Defaults that stand for nothing need no reason: the key says what it is for.
    fn is_nothing(default: &str) -> bool {
        ["`\"\"`", "`[]`", "`{}`", "`false`", "0"].contains(&default)
    }

    #[test]
    fn every_default_has_a_reason() {
        let mut without = HashSet::new();
        for page in [agent(), router()] {
            for line in page.expect("the page can be made").render("").lines() {
                let cells: Vec<&str> = line.split(" | ").collect();
                let has_reason =
                    |cells: &[&str]| !cells[4].starts_with('|') || cells[3].contains("default");
                if cells.len() > 4 && !is_nothing(cells[2]) && !has_reason(&cells) {
                    without.insert(cells[0].trim_start_matches("| ").to_owned());
                }
            }
        }
        assert!(without.is_empty(), "write why beside the default: {without:?}");
    }
}
