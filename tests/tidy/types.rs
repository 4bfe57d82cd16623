//! Types: none has more methods than a reader can keep in mind, none declares a state impossible.

use std::collections::BTreeMap;

use crate::{report, source::packages};

/// The most methods of a type, over all of its files and without those of traits.
const METHODS_MAX: usize = 40;

#[test]
fn no_type_has_too_many_methods() {
    let mut findings = vec![];
    for package in packages().iter().filter(|package| is_product(&package.folder)) {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for file in package.files.iter().filter(|file| is_product(&file.path)) {
            for (name, methods) in methods(&file.code) {
                *counts.entry(name).or_default() += methods;
            }
        }
        for (name, count) in counts {
            if count > METHODS_MAX {
                findings.push(format!("{}: {name} has {count} methods", package.folder));
            }
        }
    }
    report(&findings);
}

/// Returns the types of a file with the number of methods in each of their blocks.
fn methods(code: &str) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = vec![];
    let mut is_inside = false;
    for line in code.lines() {
        if let Some(name) = implemented(line) {
            found.push((name.to_owned(), 0));
            is_inside = true;
        } else if line.starts_with('}') {
            is_inside = false;
        } else if is_inside
            && line.starts_with("    ")
            && !line.starts_with("     ")
            && line.split_whitespace().any(|word| word == "fn")
            && let Some((_, count)) = found.last_mut()
        {
            *count += 1;
        }
    }
    found
}

/// Returns the name of the type whose own methods begin at this line.
fn implemented(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    if rest.contains(" for ") || !rest.trim_end().ends_with('{') {
        return None;
    }
    // Parameters may have bounds with parameters of their own.
    let mut depth = 0_usize;
    let begin = rest.find(|character: char| {
        depth += usize::from(character == '<');
        let is_name = depth == 0 && character.is_alphabetic();
        depth = depth.saturating_sub(usize::from(character == '>'));
        is_name
    })?;
    rest[begin..].split(['<', ' ', '{']).next()
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

#[test]
fn methods_are_counted_as_rust_does() {
    let code = "impl<T: Into<u8>> Row<T> {\n    pub(crate) fn a() {\n        fn inner() {}\n    }\n\
                \x20   const fn b() {}\n}\n\
                impl Drop for Row {\n    fn drop() {}\n}\nfn free() {}\n";
    assert_eq!(methods(code), [("Row".to_owned(), 2)]);
}
