//! Makes the page of the metrics of both binaries, from what their registries say.
//!
//! The columns that a registry doesn't have, such as what each value of a label stands for, are
//! written by hand in the page.

use prometheus_client::{encoding::text, registry::Registry};
use service::{metrics::Registrar, process_metrics};

use crate::page::{Cell, Page, Table};

const INTRODUCTION: &str = "\
Labels are small sets, never a session, turn or user. A figure that is not known has no line; it \
is never zero instead. A metric has one figure, with its unit in the name. A counter's name ends \
in `_total`. Ports and keys: see [operations](operations.md#metrics).";

const COLUMNS: &[&str] = &["metric", "type", "labels", "shows", "more"];

/// A metric as Prometheus sees it, but its name is without the prefix of the binary.
#[derive(Debug, Default, PartialEq, Eq)]
struct Metric {
    name: String,
    help: String,
    /// `counter`, `gauge`, `histogram` or `info`.
    kind: String,
    /// `None`: it has no figure that shows them.
    labels: Option<Vec<String>>,
}

pub(crate) fn page() -> anyhow::Result<Page> {
    let mut page = Page::new("Metrics", INTRODUCTION);
    let (agent, process) = read("berth_agent", worker_agent::register_metrics)?;
    let (router, _) = read("berth_router", router::register_metrics)?;
    let (common, router): (Vec<_>, Vec<_>) =
        router.into_iter().partition(|metric| agent.contains(metric));
    let own = agent.into_iter().filter(|metric| !common.contains(metric));
    let (devices, agent) = own.partition(|metric| metric.name.starts_with("gpu_"));
    let sections: [(&str, &[&str], Vec<Metric>); 5] = [
        ("Agent", &["berth_agent_"], agent),
        ("Router", &["berth_router_"], router),
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

fn row(prefixes: &[&str], metric: &Metric) -> Vec<Cell> {
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
    vec![made(&names.join(", ")), made(&metric.kind), labels, made(&metric.help), Cell::ByHand]
}

/// Returns the binary's own metrics, and those of every process.
fn read(
    prefix: &'static str,
    register: fn(&mut Registrar<'_>),
) -> anyhow::Result<(Vec<Metric>, Vec<Metric>)> {
    let mut root = Registry::default();
    register(&mut process_metrics::register(&mut root, prefix, "").show_empty());
    let mut exposition = String::new();
    text::encode(&mut exposition, &root)?;
    let (mut own, process): (Vec<_>, Vec<_>) =
        parse(&exposition).into_iter().partition(|metric| metric.name.starts_with(prefix));
    for metric in &mut own {
        metric.name.drain(..=prefix.len());
    }
    Ok((own, process))
}

fn parse(exposition: &str) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = vec![];
    for line in exposition.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|it| it.split_once(' ')) {
            let (name, help) = (name.to_owned(), help.trim_end_matches('.').to_owned());
            metrics.push(Metric { name, help, ..Metric::default() });
        }
        let Some(metric) = metrics.last_mut() else { continue };
        if line.starts_with("# TYPE ") {
            metric.kind = line.rsplit(' ').next().unwrap_or_default().to_owned();
            match metric.kind.as_str() {
                "counter" => metric.name += "_total",
                "info" => metric.name += "_info",
                _ => {}
            }
        } else if !line.starts_with('#') && metric.labels.is_none() {
            metric.labels = Some(labels_of(line));
        }
    }
    metrics
}

/// The names of the labels in a line such as `turns_total{outcome="ok"} 1`.
fn labels_of(line: &str) -> Vec<String> {
    let inside = line.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    let labels = inside.iter().flat_map(|(inside, _)| inside.split(','));
    labels.filter_map(|label| Some(label.split_once('=')?.0.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::root;

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

    #[test]
    fn a_metric_has_the_name_and_the_labels_of_its_lines() {
        let exposition = "\
# HELP closed Connections closed.
# TYPE closed counter
closed_total{port=\"\",reason=\"\"} 0
closed_total{port=\"data\",reason=\"full\"} 1
# HELP wait_seconds Time
# TYPE wait_seconds histogram
# UNIT wait_seconds seconds
wait_seconds_sum 0.0
wait_seconds_bucket{le=\"1.0\"} 0
# HELP gpu_energy_joules Energy
# TYPE gpu_energy_joules counter
# EOF
";
        let shown = parse(exposition)
            .into_iter()
            .map(|it| format!("{} {} {} {:?}", it.name, it.kind, it.help, it.labels));
        let expected = [
            r#"closed_total counter Connections closed Some(["port", "reason"])"#,
            "wait_seconds histogram Time Some([])",
            "gpu_energy_joules_total counter Energy None",
        ];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
    }

    /// Appends the names in the tables of `metrics!`.
    fn add_declared(folder: &Path, names: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("a file of it").path();
            if path.is_dir() {
                add_declared(&path, names);
                continue;
            }
            let text = fs::read_to_string(path).expect("a source is text");
            let text = text.split("#[cfg(test)]").next().expect("the product's part");
            for table in text.split("metrics! {\n").skip(1) {
                let table = table.split("\n}\n").next().expect("the table's lines");
                let after_sign = table.split(" = \"").skip(1);
                names
                    .extend(after_sign.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
            }
        }
    }

    #[test]
    fn no_struct_of_metrics_is_left_out() {
        let text = page().expect("the page can be made").render("");
        for (folder, prefix) in
            [("worker-agent", "agent"), ("router", "router"), ("proto/service", "agent")]
        {
            let mut names = vec![];
            add_declared(&root().join(folder).join("src"), &mut names);
            assert!(names.len() > 6, "{folder}: {names:?}");
            for name in names {
                let name = format!("`berth_{prefix}_{name}");
                assert!(
                    text.contains(&name),
                    "{folder}: call its `new` in `register_metrics`: {name}"
                );
            }
        }
    }
}
