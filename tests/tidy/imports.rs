//! Which module may use which, checked on the paths that the source names.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    report,
    source::{Package, SourceFile, packages},
};

/// Top-level modules of a crate, highest first. A module imports only modules of lower rows, and
/// modules of one row don't import each other.
type Rows = &'static [&'static [&'static str]];

/// The rows of the two crates that a turn passes through.
const LAYERS: [(&str, Rows); 2] = [
    (
        "router",
        &[
            &["http"],
            &["agent_tasks"],
            &["turn"],
            &["sessions"],
            &["placement"],
            &["residency"],
            &["prompt"],
            &["discovery"],
            &["fleet"],
        ],
    ),
    (
        "worker-agent",
        &[
            &["program"],
            &["announcer", "control_port", "admin_actions"],
            &["staged_prefill"],
            &["data_port"],
            &["owner"],
            &["ledger", "staged_prefill_queue"],
            &["session"],
            &["audit"],
            &["engine"],
            &["kv_events"],
            &["shim"],
            &["gpu"],
        ],
    ),
];

/// Modules that every module may import, and that import no module of a row.
const LEAVES: [&str; 6] = ["auth", "config", "guard", "incarnation", "metrics", "shares"];

/// A module that names another.
struct Import<'a> {
    from: &'a SourceFile,
    to: Vec<String>,
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut findings = vec![];
    // The simulation in `tests` spreads one type over its files, which name each other.
    for package in packages().into_iter().filter(|package| !package.folder.starts_with("tests")) {
        for (parent, edges) in siblings(&imports(&package)) {
            if let Some(circle) = circle(&edges) {
                let parent = [vec!["crate".to_owned()], parent].concat().join("::");
                let circle = circle.join(" -> ");
                findings.push(format!("{}: a circle in {parent}: {circle}", package.folder));
            }
        }
    }
    report(&findings);
}

#[test]
fn modules_import_downwards_only() {
    let mut findings = vec![];
    for package in packages() {
        let Some((_, rows)) = LAYERS.iter().find(|(folder, _)| *folder == package.folder) else {
            continue;
        };
        let row = |name: &str| rows.iter().position(|row| row.contains(&name));
        for file in &package.files {
            let Some(top) = file.module.first() else { continue };
            if row(top).is_none() && !LEAVES.contains(&top.as_str()) {
                findings.push(format!("{}: `{top}` is in no row of the layers", file.path));
            }
        }
        for import in imports(&package) {
            let (Some(from), Some(to)) = (import.from.module.first(), import.to.first()) else {
                continue;
            };
            let is_down = match (row(from), row(to)) {
                (Some(from), Some(to)) => from < to,
                (None, Some(_)) => false,
                (_, None) => true,
            };
            if from != to && !is_down {
                findings.push(format!("{}: imports `{to}`, which isn't below", import.from.path));
            }
        }
    }
    findings.sort();
    findings.dedup();
    report(&findings);
}

/// Returns every import of a package, by the module that the imported item is in.
fn imports(package: &Package) -> Vec<Import<'_>> {
    let modules: BTreeSet<&[String]> =
        package.files.iter().map(|file| file.module.as_slice()).collect();
    let of_file = |from| named_paths(from).into_iter().map(move |path| (from, path));
    let all = package.files.iter().flat_map(of_file);
    all.map(|(from, path)| Import { from, to: module_of(path, &modules) }).collect()
}

/// Returns the module that an item's path begins with.
fn module_of(mut path: Vec<String>, modules: &BTreeSet<&[String]>) -> Vec<String> {
    while !path.is_empty() && !modules.contains(path.as_slice()) {
        path.pop();
    }
    path
}

/// Returns the imports between modules with the same parent, by parent. A parent and its own
/// descendants may name each other.
fn siblings(imports: &[Import<'_>]) -> BTreeMap<Vec<String>, BTreeSet<(String, String)>> {
    let mut edges: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for Import { from, to } in imports {
        let shared = from.module.iter().zip(to).take_while(|(from, to)| from == to).count();
        if let (Some(one), Some(other)) = (from.module.get(shared), to.get(shared)) {
            let parent = to[..shared].to_vec();
            edges.entry(parent).or_default().insert((one.clone(), other.clone()));
        }
    }
    edges
}

/// Returns the shortest circle, if there is any.
fn circle(edges: &BTreeSet<(String, String)>) -> Option<Vec<String>> {
    let names: BTreeSet<&String> = edges.iter().map(|(from, _)| from).collect();
    let circles = names.into_iter().filter_map(|start| path_back(edges, start));
    circles.min_by_key(Vec::len)
}

/// Returns the shortest path along the edges from `start` back to it.
fn path_back(edges: &BTreeSet<(String, String)>, start: &str) -> Option<Vec<String>> {
    let mut reached = BTreeSet::new();
    let mut paths = vec![vec![start.to_owned()]];
    while !paths.is_empty() {
        let mut longer = vec![];
        for path in paths {
            for (_, next) in edges.iter().filter(|(from, _)| Some(from) == path.last()) {
                let path = [path.as_slice(), std::slice::from_ref(next)].concat();
                if next == start {
                    return Some(path);
                }
                if reached.insert(next.clone()) {
                    longer.push(path);
                }
            }
        }
        paths = longer;
    }
    None
}

/// Returns the paths below `crate`, `self` and `super` that a file names, from the crate's root.
fn named_paths(file: &SourceFile) -> Vec<Vec<String>> {
    let mut paths = vec![];
    for (at, keyword) in keywords(&file.code) {
        let mut base = if keyword == "crate" { vec![] } else { file.module.clone() };
        let mut rest = &file.code[at..];
        while let Some(after) = rest.strip_prefix("super::") {
            base.pop();
            rest = after;
        }
        let rest = rest.strip_prefix("crate::").or(rest.strip_prefix("self::")).unwrap_or(rest);
        tree(rest, &base, &mut paths);
    }
    paths
}

/// Returns where a path begins that starts with `crate`, `self` or `super`.
fn keywords(code: &str) -> Vec<(usize, &'static str)> {
    let mut found = vec![];
    for keyword in ["crate", "self", "super"] {
        for (at, _) in code.match_indices(keyword) {
            let before = &code[..at];
            let begins = !before.ends_with(|c: char| c.is_alphanumeric() || "_:$".contains(c));
            let is_visibility = before.ends_with("pub(in ");
            if begins && !is_visibility && code[at + keyword.len()..].starts_with("::") {
                found.push((at, keyword));
            }
        }
    }
    found
}

/// Reads a `use` tree or a plain path, and pushes each of its paths. Returns what is after it.
fn tree<'a>(text: &'a str, base: &[String], paths: &mut Vec<Vec<String>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start();
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            let after = tree(rest, base, paths);
            // Skips a comma or a new name (`as name`).
            let Some(end) = after.find([',', '}']) else { return "" };
            rest = after[end..].trim_start_matches(',');
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let path = if name.is_empty() || name == "self" {
        base.to_vec()
    } else {
        [base, &[name.to_owned()]].concat()
    };
    match rest.strip_prefix("::") {
        Some(rest) if !name.is_empty() => tree(rest, &path, paths),
        _ => {
            paths.push(path);
            rest
        }
    }
}

#[test]
fn paths_are_read_as_rust_does() {
    let code = "use crate::{\n    config::{self, Config as Settings},\n    turn::*,\n};\n\
                use super::lease::Lease;\n\
                use super::super::metrics;\npub(in crate::turn) fn f() {}\n\
                let x = crate::placement::cost::wait(self::now::<u64>());\n";
    let module = ["turn", "proxy"].map(str::to_owned).to_vec();
    let file = SourceFile { path: String::new(), module, code: code.to_owned() };
    let paths: BTreeSet<String> =
        named_paths(&file).into_iter().map(|path| path.join("::")).collect();
    let expected = [
        "config",
        "config::Config",
        "placement::cost::wait",
        "turn",
        "turn::lease::Lease",
        "turn::proxy::now",
        "metrics",
    ];
    assert_eq!(paths, expected.map(str::to_owned).into());
}

#[test]
fn a_circle_is_found() {
    let edges = |list: &[(&str, &str)]| -> BTreeSet<(String, String)> {
        list.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect()
    };
    assert_eq!(circle(&edges(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    let found = circle(&edges(&[("a", "b"), ("b", "c"), ("c", "b")]));
    assert_eq!(found, Some(["b", "c", "b"].map(str::to_owned).to_vec()));
}
