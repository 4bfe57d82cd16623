//! Names and words: functions named as verbs, and one word for a thing.

use std::fs;

use crate::{files, report, root, rust_files};

/// Function names that tell a caller nothing.
const VAGUE_NAMES: [&str; 3] = ["of", "on", "so"];

/// Words that the project doesn't use, in lower case, each with the one that says the same.
const OTHER_WORDS: [(&str, &str); 9] = [
    ("slow lane", "staged prefill"),
    ("house", "cluster"),
    ("twin", "duplicate agent id"),
    ("twins", "duplicate agent ids"),
    ("whereabouts", "BlockLocator"),
    ("roster", "worker table"),
    ("astray", "divergence"),
    ("hush", "clear_wake"),
    ("healed", "retokenized"),
];

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
fn a_thing_has_one_word() {
    let mut findings = vec![];
    for file in files().iter().filter(|file| !file.starts_with("tests/tidy/")) {
        let Ok(text) = fs::read_to_string(root().join(file)) else { continue };
        let text = format!("{file}\n{text}");
        for (number, line) in (0..).zip(text.lines()) {
            for (word, instead) in OTHER_WORDS {
                if has_word(&line.to_lowercase(), word) {
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
