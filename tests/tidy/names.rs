//! Names and words: functions named as verbs, and words that are retired.

use std::fs;

use crate::{files, report, root, rust_files};

/// Function names that tell a caller nothing.
const VAGUE_NAMES: [&str; 3] = ["of", "on", "so"];

/// Words that the project no longer uses, in lower case, each with its replacement.
const RETIRED: [(&str, &str); 13] = [
    ("slow lane", "staged prefill"),
    ("slow_lane", "staged_prefill"),
    ("slowlane", "staged prefill"),
    ("sglang/lane", "sglang/integration"),
    ("piece_ms", "prefill_stage_ms"),
    ("house", "cluster"),
    ("twin", "duplicate agent id"),
    ("twins", "duplicate agent ids"),
    ("whereabouts", "BlockLocator"),
    ("roster", "worker table"),
    ("astray", "divergence"),
    ("hush", "clear_wake"),
    ("healed", "retokenized"),
];

/// Retired names of settings, metrics and labels, and the files that tell users the new names.
const OLD_NAMES: [&str; 3] = ["piece_ms", "slow_lane", "healed"];
const MAY_USE_OLD_NAMES: [&str; 2] = ["deploy/docs/operations.md", "worker-agent/src/config.rs"];

#[test]
fn functions_say_what_they_do() {
    let mut findings = vec![];
    for (file, text) in rust_files() {
        for (number, line) in (1..).zip(text.lines()) {
            let name = line.split_once("fn ").and_then(|(_, rest)| rest.split(['(', '<']).next());
            if name.is_some_and(|name| VAGUE_NAMES.contains(&name)) {
                findings.push(format!("{file}:{number}: name the function by what it does"));
            }
        }
    }
    report(&findings);
}

#[test]
fn retired_words_are_gone() {
    let mut findings = vec![];
    for file in files().iter().filter(|file| !file.starts_with("tests/tidy/")) {
        let Ok(text) = fs::read_to_string(root().join(file)) else { continue };
        let text = format!("{file}\n{text}");
        for (number, line) in (0..).zip(text.lines()) {
            for (word, instead) in RETIRED {
                let may = OLD_NAMES.contains(&word) && MAY_USE_OLD_NAMES.contains(&file.as_str());
                if !may && has_word(&line.to_lowercase(), word) {
                    findings.push(format!("{file}:{number}: `{word}`: write {instead}"));
                }
            }
        }
    }
    report(&findings);
}

/// Whether a text contains a word that no letter precedes or follows.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(char::is_alphanumeric) && !after.starts_with(char::is_alphanumeric)
    })
}

#[test]
fn module_docs_begin_with_one_short_sentence() {
    let mut findings = vec![];
    for (file, text) in rust_files() {
        let line = text.lines().next().unwrap_or_default();
        if line.chars().count() > 100 || !line.ends_with('.') {
            findings.push(format!("{file}: its first line isn't a sentence of one line"));
        }
    }
    report(&findings);
}

#[test]
fn the_readme_is_short() {
    let readme = fs::read_to_string(root().join("README.md")).expect("the README is there");
    let words = readme.split_whitespace().count();
    assert!(words <= 1000, "README.md has {words} words, 1000 at most");
}
