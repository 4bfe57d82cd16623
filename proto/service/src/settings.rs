//! Reads settings from a TOML file, and reports all problems at once.
//!
//! Router and agent apply command line arguments and environment variables themselves, and add the
//! problems that only they can see, such as values that contradict each other. A running process
//! doesn't read the file again.

pub mod table;

use std::{fmt, path::Path};

use serde::{Serialize, de::DeserializeOwned};
use toml::{Table, Value};

/// Exit status of a process whose settings are invalid: `EX_USAGE` of `sysexits.h`.
pub const EXIT_USAGE: u8 = 64;

/// One sentence each; never empty.
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

/// All keys and tables of `T` must have defaults. An invalid key keeps its default and is reported,
/// so one run shows every problem. Without a path, returns the defaults.
pub fn load<T: DeserializeOwned + Default>(path: Option<&Path>) -> (T, Vec<String>) {
    let Some(path) = path else { return (T::default(), vec![]) };
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text),
        Err(error) => (T::default(), vec![format!("{} can't be read: {error}", path.display())]),
    }
}

/// As [`load`], from the text of a file.
pub fn parse<T: DeserializeOwned + Default>(text: &str) -> (T, Vec<String>) {
    let file: Table = match text.parse() {
        Ok(file) => file,
        Err(error) => return (T::default(), vec![format!("not TOML: {error}")]),
    };
    let mut valid = Table::new();
    let mut problems = vec![];
    for (key, value) in file {
        match value {
            Value::Table(table) => {
                if let Some(table) = check_table::<T>(&key, table, &mut problems) {
                    valid.insert(key, Value::Table(table));
                }
            }
            value => {
                let file = Table::from_iter([(key.clone(), value.clone())]);
                if is_valid::<T>(&key, file, &mut problems) {
                    valid.insert(key, value);
                }
            }
        }
    }
    let settings =
        T::deserialize(valid).expect("each key was read alone and none depends on another");
    (settings, problems)
}

/// Returns only the valid keys; `None` for a table that the settings don't have.
fn check_table<T: DeserializeOwned>(
    table_name: &str,
    table: Table,
    problems: &mut Vec<String>,
) -> Option<Table> {
    let file_with = |table| Table::from_iter([(table_name.to_owned(), Value::Table(table))]);
    if let Err(error) = T::deserialize(file_with(Table::new())) {
        problems.push(format!("{table_name}: {}", error.to_string().trim_end()));
        return None;
    }
    let mut valid = Table::new();
    for (key, value) in table {
        let file = file_with(Table::from_iter([(key.clone(), value.clone())]));
        if is_valid::<T>(&format!("{table_name}.{key}"), file, problems) {
            valid.insert(key, value);
        }
    }
    Some(valid)
}

/// Whether `file`, which has only the key `name`, is valid. Otherwise adds the problem.
fn is_valid<T: DeserializeOwned>(name: &str, file: Table, problems: &mut Vec<String>) -> bool {
    let result = T::deserialize(file);
    problems.extend(
        result.as_ref().err().map(|error| format!("{name}: {}", error.to_string().trim_end())),
    );
    result.is_ok()
}

pub fn to_toml<T: Serialize>(settings: &T) -> String {
    toml::to_string(settings).expect("settings are tables of strings, numbers and lists")
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, Serialize)]
    #[serde(default, deny_unknown_fields)]
    struct Example {
        name: String,
        reports: Reports,
    }

    #[derive(Debug, Deserialize, Serialize)]
    #[serde(default, deny_unknown_fields)]
    struct Reports {
        interval_ms: u32,
        count: u32,
    }

    impl Default for Reports {
        fn default() -> Self {
            Self { interval_ms: 7, count: 1 }
        }
    }

    #[test]
    fn every_wrong_key_is_reported_and_good_ones_are_kept() {
        let text = "name = \"y\"\nother = true\n[reports]\ninterval_ms = -1\nintervall_ms = 5\n\
                    count = 3\n[report]\ncount = 4\n";
        let (settings, problems) = parse::<Example>(text);
        assert_eq!(settings.name, "y");
        assert_eq!((settings.reports.interval_ms, settings.reports.count), (7, 3));
        assert_eq!(problems.len(), 4, "{problems:?}");
        for name in ["other: ", "reports.interval_ms: ", "reports.intervall_ms: ", "report: "] {
            assert!(problems.iter().any(|problem| problem.starts_with(name)), "{problems:?}");
        }
    }

    #[test]
    fn a_table_that_is_no_table_is_reported() {
        let (settings, problems) = parse::<Example>("reports = 5\n");
        assert_eq!((settings.reports.interval_ms, problems.len()), (7, 1), "{problems:?}");
    }

    #[test]
    fn a_missing_file_is_a_problem_not_a_default() {
        let (_, problems) = load::<Example>(Some(Path::new("/nonexistent/berth.toml")));
        assert_eq!(problems.len(), 1);
    }
}
