//! Checks the rules of CONTRIBUTING.md that a program can check.

mod imports;
mod names;
mod refusals;
mod source;
mod types;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const FUNCTION_LINES_MAX: usize = 70;
const COLUMNS_MAX: usize = 100;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the root").to_owned()
}

/// Returns the project's files: tracked files, and new files that git doesn't ignore.
fn files() -> Vec<String> {
    let list = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git is here where the checkout is");
    let text = String::from_utf8(list.stdout).expect("paths are UTF-8");
    let files: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(files.iter().any(|file| file == "Cargo.toml"), "git listed no project");
    files.into_iter().filter(|file| root().join(file).is_file()).collect()
}

fn rust_files() -> Vec<(String, String)> {
    let read = |file: String| {
        let text = fs::read_to_string(root().join(&file)).expect("a listed file can be read");
        (file, text)
    };
    files().into_iter().filter(|file| file.ends_with(".rs")).map(read).collect()
}

/// Returns the part of a file before its tests.
fn without_tests(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests").next().expect("split yields at least one part")
}

/// Whether the whole file consists of tests.
fn is_test(file: &str) -> bool {
    let in_package = file.split_once('/').is_some_and(|(top, rest)| {
        (top == "tests" && !rest.contains('/')) || rest.starts_with("tests/")
    });
    in_package || file.ends_with("/tests.rs")
}

/// Fails if there are findings, and shows all of them.
fn report(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn files_say_what_they_are() {
    let mut findings = vec![];
    for (file, text) in rust_files() {
        if !text.starts_with("//! ") {
            findings.push(format!("{file}: doesn't open with what it is"));
        }
        if file.ends_with("/mod.rs") {
            findings.push(format!("{file}: name it after its folder, beside it"));
        }
    }
    report(&findings);
}

#[test]
fn functions_and_lines_are_short() {
    let mut findings = vec![];
    for (file, text) in rust_files() {
        let mut function: Option<(usize, usize)> = None;
        for (number, line) in (1..).zip(text.lines()) {
            let indent = line.len() - line.trim_start().len();
            match function {
                None if is_function(line) => function = Some((number, indent)),
                Some((start, depth)) if indent == depth && line.trim_start().starts_with('}') => {
                    let length = number - start + 1;
                    if length > FUNCTION_LINES_MAX {
                        findings.push(format!("{file}:{start}: a function of {length} lines"));
                    }
                    function = None;
                }
                // The end of a declaration without a body, in a trait.
                Some((_, depth))
                    if indent == depth
                        && line.trim_start().starts_with(')')
                        && line.ends_with(';') =>
                {
                    function = None;
                }
                _ => {}
            }
        }
        // Lines of test data may be wider.
        let text = if is_test(&file) { "" } else { without_tests(&text) };
        for (number, line) in (1..).zip(text.lines()) {
            if line.chars().count() > COLUMNS_MAX {
                findings.push(format!("{file}:{number}: wider than {COLUMNS_MAX} columns"));
            }
        }
    }
    report(&findings);
}

/// Whether a function with a body of more than one line begins in this line.
fn is_function(line: &str) -> bool {
    let words = line.split_whitespace();
    let before: Vec<&str> = words.take_while(|word| *word != "fn").collect();
    let has_fn = line.split_whitespace().any(|word| word == "fn");
    let modifiers = ["pub", "pub(super)", "pub(crate)", "async", "const", "unsafe", "extern"];
    has_fn
        && before.iter().all(|word| modifiers.contains(word) || word.starts_with('"'))
        && !line.trim_end().ends_with([';', '}'])
}

#[test]
fn nothing_names_a_machine() {
    // The paths are joined from parts, so that this test doesn't report its own file.
    let roots = ["/ho".to_owned() + "me/", "/wo".to_owned() + "rk/", "/ro".to_owned() + "ot/"];
    let mut findings = vec![];
    for file in files() {
        let Ok(text) = fs::read_to_string(root().join(&file)) else { continue };
        for (number, line) in (1..).zip(text.lines()) {
            if roots.iter().any(|root| line.contains(root.as_str())) {
                findings.push(format!("{file}:{number}: an absolute path of some machine"));
            }
        }
    }
    report(&findings);
}

#[test]
fn every_version_stands_once() {
    let mut findings = vec![];
    for file in files().into_iter().filter(|file| file.ends_with("/Cargo.toml")) {
        let text = fs::read_to_string(root().join(&file)).expect("a listed file can be read");
        if text.contains("[workspace]") {
            continue;
        }
        let dependencies = text.split("dependencies]").skip(1);
        for section in dependencies {
            for line in section.lines().take_while(|line| !line.starts_with('[')) {
                if line.contains('=') && !line.contains("workspace = true") {
                    findings.push(format!("{file}: `{line}` belongs in the workspace's table"));
                }
            }
        }
    }
    report(&findings);
}

#[test]
fn no_binary_can_switch_a_guard_off() {
    let mut findings = vec![];
    for file in files().into_iter().filter(|file| file.ends_with("Cargo.toml")) {
        let text = fs::read_to_string(root().join(&file)).expect("a listed file can be read");
        let mut section = "";
        for line in text.lines() {
            if line.starts_with('[') {
                section = line;
            }
            let defines = section == "[features]" && line.starts_with("guard-switch = []");
            let comment = line.trim_start().starts_with('#');
            if line.contains("guard-switch")
                && !comment
                && !defines
                && section != "[dev-dependencies]"
            {
                findings.push(format!("{file}: `{line}` is for tests alone"));
            }
        }
    }
    report(&findings);
}

#[test]
fn the_top_level_stays_as_it_is() {
    let known = [
        "Cargo.lock",
        "Cargo.toml",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "deploy",
        "kernels",
        "proto",
        "router",
        "tests",
        "worker-agent",
    ];
    let mut findings = vec![];
    for file in files() {
        let top = file.split('/').next().expect("split yields at least one part").to_owned();
        if !top.starts_with('.') && !known.contains(&top.as_str()) {
            findings.push(format!("{top}: a new name at the top level"));
        }
    }
    report(&findings);
}

#[test]
fn router_and_agent_never_see_each_other() {
    for (package, other) in [("router", "worker-agent"), ("worker-agent", "router")] {
        let path = root().join(package).join("Cargo.toml");
        let text = fs::read_to_string(path).expect("both packages are here");
        assert!(!text.contains(&format!("\n{other} =")), "{package} depends on {other}");
    }
}
