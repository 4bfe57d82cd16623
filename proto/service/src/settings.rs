//! Reads settings from a TOML file, and reports all problems at once.
//!
//! The `config.rs` of router and agent each define a flat struct of settings with defaults, and
//! call [`load`]. They apply command line arguments and environment variables themselves, and add
//! the problems that only they can see, such as values that contradict each other. Their `main.rs`
//! prints the [`Problems`] and exits with [`EXIT_USAGE`]. A running process doesn't read the file
//! again.

use std::{fmt, path::Path};

use serde::{Serialize, de::DeserializeOwned};

/// Exit status of a process whose settings are invalid: `EX_USAGE` of `sysexits.h`.
pub const EXIT_USAGE: u8 = 64;

/// The problems of the settings, one sentence each; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the settings are wrong:")?;
        for problem in &self.0 {
            write!(f, "\n  - {problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Reads a flat settings struct whose keys all have defaults.
///
/// Returns the settings and their problems. An invalid key keeps its default and is reported, so
/// one run shows every problem. Without a path, returns the defaults.
///
/// `renamed_keys` holds the old and the new name of each renamed key. An old name in the file
/// is a problem, and the problem's text has the new name.
pub fn load<T: DeserializeOwned + Default>(
    path: Option<&Path>,
    renamed_keys: &[(&str, &str)],
) -> (T, Vec<String>) {
    let Some(path) = path else { return (T::default(), vec![]) };
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, renamed_keys),
        Err(error) => (T::default(), vec![format!("{} can't be read: {error}", path.display())]),
    }
}

/// Reads settings as [`load`] does, from the text of a file.
pub fn parse<T: DeserializeOwned + Default>(
    text: &str,
    renamed_keys: &[(&str, &str)],
) -> (T, Vec<String>) {
    let table: toml::Table = match text.parse() {
        Ok(table) => table,
        Err(error) => return (T::default(), vec![format!("not TOML: {error}")]),
    };
    let mut valid = toml::Table::new();
    let mut problems = vec![];
    for (key, value) in table {
        if let Some((_, new)) = renamed_keys.iter().find(|(old, _)| *old == key) {
            problems.push(format!("{key}: renamed to {new}"));
            continue;
        }
        let single_key = toml::Table::from_iter([(key.clone(), value.clone())]);
        match T::deserialize(single_key) {
            Ok(_) => drop(valid.insert(key, value)),
            Err(error) => problems.push(format!("{key}: {}", error.to_string().trim_end())),
        }
    }
    let settings =
        T::deserialize(valid).expect("each key was read alone and none depends on another");
    (settings, problems)
}

/// Returns the effective settings as TOML, as `/config` shows them.
pub fn to_toml<T: Serialize>(settings: &T) -> String {
    toml::to_string(settings).expect("settings are flat: strings, numbers and lists")
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize, Serialize)]
    #[serde(default, deny_unknown_fields)]
    struct Example {
        name: String,
        interval_ms: u32,
    }

    impl Default for Example {
        fn default() -> Self {
            Self { name: "x".into(), interval_ms: 7 }
        }
    }

    #[test]
    fn every_wrong_key_is_reported_and_good_ones_are_kept() {
        let text = "name = \"y\"\ninterval_ms = -1\nintervall_ms = 5\nother = true\n";
        let (settings, problems) = parse::<Example>(text, &[]);
        assert_eq!(settings.name, "y");
        assert_eq!(settings.interval_ms, 7);
        assert_eq!(problems.len(), 3, "{problems:?}");
        assert!(problems.iter().any(|problem| problem.contains("intervall_ms")));
    }

    #[test]
    fn the_old_name_of_a_renamed_key_is_refused_with_the_new_name() {
        let renamed_keys = [("pause_ms", "interval_ms")];
        let (settings, problems) = parse::<Example>("pause_ms = 9\n", &renamed_keys);
        assert_eq!(settings.interval_ms, 7);
        assert_eq!(problems, ["pause_ms: renamed to interval_ms"]);
    }

    #[test]
    fn a_missing_file_is_a_problem_not_a_default() {
        let (_, problems) = load::<Example>(Some(Path::new("/nonexistent/berth.toml")), &[]);
        assert_eq!(problems.len(), 1);
    }
}
