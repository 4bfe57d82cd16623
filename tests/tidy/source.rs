//! The project's Rust files, sorted into packages and modules.

use std::collections::BTreeSet;

use crate::{is_test, root, rust_files, without_tests};

/// One package of the workspace: its folder, and its files without their tests.
pub(crate) struct Package {
    pub(crate) folder: String,
    pub(crate) files: Vec<SourceFile>,
}

/// One file below a package's `src/`, without its tests and comments.
pub(crate) struct SourceFile {
    pub(crate) path: String,
    /// The module's path in the crate; empty for `lib.rs`, `main.rs` and `bin/`.
    pub(crate) module: Vec<String>,
    pub(crate) code: String,
}

/// Returns all packages that have a `src/` folder. Modules that only tests use are left out.
pub(crate) fn packages() -> Vec<Package> {
    let files = rust_files();
    let folders: BTreeSet<&str> =
        files.iter().filter_map(|(path, _)| Some(path.split_once("/src/")?.0)).collect();
    let package =
        |folder: &str| Package { folder: folder.to_owned(), files: source_files(folder, &files) };
    let has_manifest = |folder: &&str| root().join(folder).join("Cargo.toml").is_file();
    folders.into_iter().filter(has_manifest).map(package).collect()
}

fn source_files(folder: &str, files: &[(String, String)]) -> Vec<SourceFile> {
    let inside = |path: &str| path.strip_prefix(folder)?.strip_prefix("/src/").map(module_path);
    let tests: BTreeSet<Vec<String>> = files
        .iter()
        .filter_map(|(path, text)| Some(test_modules(&inside(path)?, text)))
        .flatten()
        .collect();
    files
        .iter()
        .filter(|(path, _)| !is_test(path))
        .filter_map(|(path, text)| {
            let module = inside(path)?;
            let is_tested = (1..=module.len()).any(|length| tests.contains(&module[..length]));
            let code = without_comments(without_tests(text));
            (!is_tested).then(|| SourceFile { path: path.clone(), module, code })
        })
        .collect()
}

/// Returns the module of a path below `src/`.
fn module_path(path: &str) -> Vec<String> {
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    if ["lib", "main"].contains(&stem) || stem.starts_with("bin/") {
        return vec![];
    }
    stem.split('/').map(str::to_owned).collect()
}

/// Returns the modules that a file declares for tests only.
fn test_modules(module: &[String], text: &str) -> Vec<Vec<String>> {
    let after = text.split("#[cfg(test)]\n").skip(1);
    let names = after.filter_map(|rest| {
        let line = rest.lines().next()?.trim();
        let name = line.strip_suffix(';')?.split_once("mod ")?.1;
        Some([module, &[name.to_owned()]].concat())
    });
    names.collect()
}

fn without_comments(text: &str) -> String {
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned() + "\n";
    text.lines().map(code).collect()
}
