//! Makes the pages of settings: each key with its bounds, its default and the reason.
//!
//! What a key sets, and why its default is as it is, comes from the comments of the source. The
//! default comes from the binary's own `Config`. The bounds are found by asking the binary's own
//! check about values.

use std::{fs, path::Path};

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use toml::Value;

use crate::{
    page::{Cell, Page, Table, grouped},
    root,
    source::{Field, Settings},
};

/// The sources of settings that both binaries have.
const COMMON: [&str; 3] = [
    "proto/service/src/auth.rs",
    "proto/service/src/server/settings.rs",
    "proto/service/src/traces/settings.rs",
];

const COLUMNS: &[&str] = &["key", "values", "default", "sets", "why this default", "more"];

struct Binary {
    source: Settings,
    defaults: Value,
    problems: fn(&Path) -> Vec<String>,
}

pub(crate) fn agent() -> anyhow::Result<Page> {
    use worker_agent::config::{Args, Config};

    let names = ["config", "config/tables", "config/access", "config/announce", "config/auth"];
    let binary = Binary {
        source: read_source("worker-agent", &names)?,
        defaults: Value::try_from(Config::default())?,
        problems: |path| {
            let args = [Path::new("berth-agent"), Path::new("--config"), path];
            Config::load(Args::parse_from(args))
                .err()
                .map(|problems| problems.0)
                .unwrap_or_default()
        },
    };
    make_page("Settings of the agent", "agent", &binary, &Args::command())
}

pub(crate) fn router() -> anyhow::Result<Page> {
    use router::config::{Args, Config};

    let names = [
        "config",
        "config/tables",
        "config/access",
        "config/auth",
        "config/claims",
        "config/discovery",
        "config/jwt",
    ];
    let binary = Binary {
        source: read_source("router", &names)?,
        defaults: Value::try_from(Config::default())?,
        problems: |path| {
            let worker = Path::new("--worker=http://127.0.0.1:31001");
            let args = [Path::new("berth-router"), worker, Path::new("--config"), path];
            Config::load(&Args::parse_from(args))
                .err()
                .map(|problems| problems.0)
                .unwrap_or_default()
        },
    };
    make_page("Settings of the router", "router", &binary, &Args::command())
}

fn read_source(package: &str, names: &[&str]) -> anyhow::Result<Settings> {
    let own: Vec<String> = names.iter().map(|name| format!("{package}/src/{name}.rs")).collect();
    let paths: Vec<&str> = COMMON.into_iter().chain(own.iter().map(String::as_str)).collect();
    Settings::read(&root(), &paths)
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
    page.add_text("## Keys outside tables");
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("settings.toml");
    let fields = binary.source.structs.get("Config").context("the sources have no Config")?;
    let is_table = |field: &Field| binary.source.structs.contains_key(&field.type_name);
    let (tables, keys): (Vec<&Field>, Vec<&Field>) =
        fields.iter().partition(|field| is_table(field));
    let rows = keys.iter().map(|field| binary.row("Config", "", field, &file));
    page.add_table(Table { columns: COLUMNS, rows: rows.collect::<anyhow::Result<_>>()? });
    for table in tables {
        binary.add_table(&mut page, "", table, &file)?;
    }
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
    /// Also adds the tables below this one.
    fn add_table(
        &self,
        page: &mut Page,
        parent: &str,
        table: &Field,
        file: &Path,
    ) -> anyhow::Result<()> {
        let name = format!("{parent}{}", table.name);
        page.add_text(&format!("## `[{name}]`\n\n{}", table.doc));
        let fields = &self.source.structs[&table.type_name];
        let is_table = |field: &&Field| self.source.structs.contains_key(&field.type_name);
        let prefix = format!("{name}.");
        let keys = fields.iter().filter(|field| !is_table(field));
        let rows = keys.map(|field| self.row(&table.type_name, &prefix, field, file));
        page.add_table(Table { columns: COLUMNS, rows: rows.collect::<anyhow::Result<_>>()? });
        for table in fields.iter().filter(is_table) {
            self.add_table(page, &prefix, table, file)?;
        }
        Ok(())
    }

    fn row(
        &self,
        type_name: &str,
        prefix: &str,
        field: &Field,
        file: &Path,
    ) -> anyhow::Result<Vec<Cell>> {
        let key = format!("{prefix}{}", field.name);
        let default = key.split('.').try_fold(&self.defaults, |value, part| value.get(part));
        let default = default.with_context(|| format!("{key} has no default"))?;
        let accepts = |value: &Value| {
            fs::write(file, format!("{key} = {value}")).is_ok() && (self.problems)(file).is_empty()
        };
        let unit = unit_of(&field.name);
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
            Value::Boolean(_) => "`true`, `false`".to_owned(),
            _ => self.text_values(field),
        };
        let variants = self.source.enums.get(&field.type_name).into_iter().flatten();
        let meanings = variants.map(|(name, doc)| format!(" `\"{}\"`: {doc}", name.to_lowercase()));
        let sets = meanings.fold(field.doc.clone(), |sets, meaning| sets + &meaning);
        let reason = self.source.reason(type_name, &field.name);
        let cells = [format!("`{key}`"), values, shown_default(default, unit), sets, reason];
        Ok(cells.map(Cell::Made).into_iter().chain([Cell::ByHand]).collect())
    }

    fn text_values(&self, field: &Field) -> String {
        let (is_list, of) = match field.type_name.as_str() {
            "Vec" => (true, &field.element),
            name => (false, &name.to_owned()),
        };
        let values = match of.as_str() {
            "PathBuf" => "path",
            "BTreeMap" => "table of texts",
            "SocketAddr" => "`address:port`",
            name => match self.source.enums.get(name) {
                Some(variants) if is_list => {
                    let names = variants.iter().map(|(name, _)| format!("`\"{name}\"`"));
                    &names.collect::<Vec<_>>().join(", ")
                }
                Some(_) => "one of those named here",
                None => "text",
            },
        };
        if is_list { format!("list: {values}") } else { values.to_owned() }
    }
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
