//! Makes the page of the metrics of both binaries, from the places in the code that register them.
//!
//! The columns that the code doesn't say in one place, such as what each value of a label stands
//! for, are written by hand in the page.

mod registered;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use self::registered::Registered;
use crate::{
    page::{Cell, Page, Table},
    root,
};

const INTRODUCTION: &str = "\
Labels are small sets, never a session, turn or user. A figure that is not known has no line; it \
is never zero instead. A metric has one figure, with its unit in the name. A counter's name ends \
in `_total`. Ports and keys: see [operations](operations.md#metrics).";

/// What every source has that registers or lists metrics.
const MARKS: [&str; 2] = [".register", "MetricType"];

const COLUMNS: &[&str] = &["metric", "type", "labels", "shows", "more"];

pub(crate) fn page() -> anyhow::Result<Page> {
    let mut page = Page::new("Metrics", INTRODUCTION);
    let (devices, agent) = read("worker-agent")?.into_iter().partition(Registered::is_of_devices);
    let common = read("proto/service")?;
    let (process, common) =
        common.into_iter().partition(|metric| metric.name.starts_with("process_"));
    let sections: [(&str, &[&str], Vec<Registered>); 5] = [
        ("Agent", &["berth_agent_"], agent),
        ("Router", &["berth_router_"], read("router")?),
        ("Both", &["berth_agent_", "berth_router_"], common),
        ("Devices", &["berth_agent_"], devices),
        ("Process", &[""], process),
    ];
    for (title, prefixes, mut metrics) in sections {
        page.add_text(&format!("## {title}"));
        metrics.sort_by(|one, other| one.name.cmp(&other.name));
        let rows = metrics.iter().map(|metric| row(prefixes, metric)).collect();
        page.add_table(Table { columns: COLUMNS, rows });
    }
    Ok(page)
}

fn row(prefixes: &[&str], metric: &Registered) -> Vec<Cell> {
    let names: Vec<String> =
        prefixes.iter().map(|prefix| format!("`{prefix}{}`", metric.name)).collect();
    let labels = match &metric.labels {
        Some(labels) => {
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            Cell::Made(labels.join(", "))
        }
        None => Cell::ByHand,
    };
    let made = |text: &str| Cell::Made(text.to_owned());
    vec![made(&names.join(", ")), made(metric.kind), labels, made(&metric.help), Cell::ByHand]
}

fn read(package: &str) -> anyhow::Result<Vec<Registered>> {
    let mut files = vec![];
    add_files(&root().join(package).join("src"), &mut files)?;
    let mut metrics = vec![];
    for file in files {
        let text = fs::read_to_string(&file)?;
        if !MARKS.iter().any(|mark| text.contains(mark)) {
            continue;
        }
        let found = registered::read(&text).with_context(|| file.display().to_string())?;
        metrics.extend(found);
    }
    Ok(metrics)
}

/// Leaves out sources that only tests use.
fn add_files(folder: &Path, files: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if ["tests", "testing"].contains(&stem) {
            continue;
        } else if path.is_dir() {
            add_files(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_stands_once_and_says_what_it_shows() {
        let text = page().expect("the page can be made").render("");
        let mut names: Vec<&str> = vec![];
        for line in text.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            assert!(!cells[4].is_empty(), "without help: {line}");
            names.push(cells[1]);
        }
        assert!(names.len() > 100, "{}", names.len());
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
