//! Types: structs are small or say why not, and no state of a type is declared impossible.

use crate::{report, rust_files, source::packages, without_tests};

/// The most fields of a struct that needs no reason.
const FIELDS_MAX: usize = 12;

/// The words with which the doc comment of a larger struct begins its reason.
const REASON: &str = "Its many fields:";

#[test]
fn a_struct_with_many_fields_says_why() {
    let mut findings = vec![];
    for (file, text) in rust_files().iter().filter(|(file, _)| is_product(file)) {
        let lines: Vec<&str> = without_tests(text).lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let Some(name) = struct_name(line) else { continue };
            let indent = indent(line);
            let body = lines[index + 1..].iter().take_while(|line| indent_or_empty(line) > indent);
            let fields = body.filter(|line| is_field(line, indent + 4)).count();
            let doc = lines[..index].iter().rev().take_while(|line| is_above_item(line));
            let has_reason = doc.into_iter().any(|line| line.contains(REASON));
            if fields > FIELDS_MAX && !has_reason {
                let number = index + 1;
                findings.push(format!(
                    "{file}:{number}: {name} has {fields} fields; split it, or give the reason in \
                     its doc comment, after \"{REASON}\""
                ));
            }
        }
    }
    report(&findings);
}

#[test]
fn no_product_code_declares_a_state_impossible() {
    let mut findings = vec![];
    for package in packages().iter().filter(|package| is_product(&package.folder)) {
        for file in &package.files {
            for (number, line) in (1..).zip(file.code.lines()) {
                if ["unreachable!(", "todo!(", "unimplemented!("].iter().any(|m| line.contains(m)) {
                    let path = &file.path;
                    findings.push(format!("{path}:{number}: let types exclude this state"));
                }
            }
        }
    }
    report(&findings);
}

/// Whether a path is below one of the product's folders and not in a test.
fn is_product(path: &str) -> bool {
    let is_other = ["/tests/", "/benches/"].iter().any(|folder| path.contains(folder));
    !path.starts_with("tests") && !crate::is_test(path) && !is_other
}

/// Returns the name of the struct with named fields whose declaration begins at this line.
fn struct_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line,
    };
    let name = line.strip_prefix("struct ")?.split(['<', ' ', '{']).next()?;
    line.ends_with('{').then_some(name)
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Like [`indent`], but an empty line counts as inside of everything.
fn indent_or_empty(line: &str) -> usize {
    if line.trim().is_empty() { usize::MAX } else { indent(line) }
}

fn is_field(line: &str, depth: usize) -> bool {
    let text = line.trim_start();
    let is_name = |name: &str| name.split(' ').all(|word| !word.is_empty());
    indent(line) == depth
        && !text.starts_with(['/', '#', '}'])
        && text.split_once(": ").is_some_and(|(name, _)| is_name(name))
}

fn is_above_item(line: &str) -> bool {
    let text = line.trim_start();
    text.starts_with("///") || text.starts_with("#[")
}

#[test]
fn fields_are_counted_as_rust_does() {
    let text = ["    pub(crate) a: u8,", "    /// b: no field", "    #[serde(skip)]", "    b: u8,"];
    assert_eq!(text.iter().filter(|line| is_field(line, 4)).count(), 2);
    assert_eq!(struct_name("pub(super) struct Row<'a> {"), Some("Row"));
    assert_eq!(struct_name("pub struct Id(u32);"), None);
}
