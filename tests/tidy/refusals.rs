//! Refusals: for each code a test provokes it.

use std::collections::BTreeSet;

use service::refusal::Code;

use crate::{report, rust_files};

/// This test pairs errors with codes, and provokes none of them.
const PAIRS: &str = "every_error_of_the_session_table_has_a_code";

#[test]
fn every_refusal_is_provoked_by_a_test() {
    let mut provoked = BTreeSet::new();
    // The tests beside the codes make refusals only to look at their form.
    for (_, text) in rust_files().iter().filter(|(file, _)| !file.contains("service/src/refusal")) {
        for test in tests_of(text).filter(|test| !test.contains(PAIRS)) {
            provoked.extend(test.lines().flat_map(expected));
        }
    }
    let missing = Code::all().filter(|code| !provoked.contains(code));
    let finding = |code| format!("{code}: write a test that provokes it, and names it");
    report(&missing.map(finding).collect::<Vec<_>>());
}

/// Returns the text of each test of a file: from its attribute to its end.
fn tests_of(file: &str) -> impl Iterator<Item = &str> {
    let begins = ["#[test]\n", "#[tokio::test"].map(|attribute| file.match_indices(attribute));
    begins.into_iter().flatten().filter_map(|(begin, _)| {
        let indent = &file[file[..begin].rfind('\n')? + 1..begin];
        let length = file[begin..].find(&format!("\n{indent}}}\n"))?;
        indent.trim().is_empty().then(|| &file[begin..begin + length])
    })
}

/// Returns the codes that a line of a test expects, by variant or by name.
fn expected(line: &str) -> Vec<Code> {
    let variants = line.match_indices("Code::").filter_map(|(at, prefix)| {
        let rest = &line[at + prefix.len()..];
        let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
        let is_sample = line[..at].ends_with("Refusal::new(");
        Code::all().find(|code| !is_sample && format!("{code:?}") == rest[..end])
    });
    let parts: Vec<&str> = line.split('"').collect();
    let names = parts.windows(2).filter_map(|pair| {
        // Keys of objects, and single words without the status, are names of other things too.
        let is_key = pair[1].starts_with([':', ']']);
        let code = Code::all().find(|code| !is_key && code.as_str() == pair[0])?;
        (pair[0].contains('_') || line.contains(code.status().as_str())).then_some(code)
    });
    variants.chain(names).collect()
}
