//! Lists the agents of a file, which is read again whenever it changes.
//!
//! The file is TOML with the key `workers`, or JSON: a list of URLs, or an object with the member
//! `workers`. A change counts once two readings in a row agree, so a file that is being written is
//! not taken half.

use std::{path::PathBuf, time::Duration};

use serde::Deserialize;
use service::reload;

use super::Reporter;
use crate::{
    config::{AGENTS_MAX, control_authority},
    fleet::membership::{Listing, SourceList},
};

/// The time between two readings. A change takes effect within about a second.
const READ_INTERVAL: Duration = Duration::from_millis(500);

/// The form of a file that isn't a bare list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Workers {
    workers: Vec<String>,
}

/// Follows the file until the task is dropped.
pub(super) async fn run(path: PathBuf, mut reporter: Reporter) {
    let mut last_reading = None;
    loop {
        let path = path.clone();
        let read = move || {
            let parse = |contents: &[Vec<u8>]| parse(contents.first().map_or(&[], Vec::as_slice));
            reload::Source::new("workers", vec![path], parse).read()
        };
        let reading = tokio::task::spawn_blocking(read).await;
        let reading = reading.map_err(|panic| panic.to_string());
        let reading = reading.and_then(|read| read.map_err(|error| error.to_string()));
        let is_first = last_reading.is_none();
        // The first list is taken at once, so that the router is ready soon.
        if (is_first && reading.is_ok()) || last_reading.as_ref() == Some(&reading) {
            match reading.clone() {
                Ok(list) => reporter.list(list).await,
                Err(why) => reporter.fail(why).await,
            }
        }
        last_reading = Some(reading);
        tokio::time::sleep(READ_INTERVAL).await;
    }
}

/// Reads the list in a file.
fn parse(content: &[u8]) -> Result<SourceList, String> {
    let text = std::str::from_utf8(content).map_err(|_| "the file isn't UTF-8".to_owned())?;
    let urls = match text.trim_start().chars().next() {
        Some('[') => serde_json::from_str(text).map_err(|error| error.to_string())?,
        Some('{') => {
            let file: Workers = serde_json::from_str(text).map_err(|error| error.to_string())?;
            file.workers
        }
        _ => toml::from_str::<Workers>(text).map_err(|error| error.message().to_owned())?.workers,
    };
    if urls.len() > AGENTS_MAX {
        return Err(format!("the file has more than {AGENTS_MAX} workers"));
    }
    if let Some((url, problem)) =
        urls.iter().find_map(|url| Some((url, control_authority(url).err()?)))
    {
        return Err(format!("workers: {url:?} {problem}; write http://host:port"));
    }
    Ok(urls.into_iter().map(|url| (url, Listing::Serving)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_toml_or_json() {
        let expected = SourceList::from([
            ("http://a:1".to_owned(), Listing::Serving),
            ("https://b:2".to_owned(), Listing::Serving),
        ]);
        for text in [
            "# all\nworkers = [\"http://a:1\", \"https://b:2\"]\n",
            " [\"http://a:1\", \"https://b:2\"]",
            "{\"workers\": [\"https://b:2\", \"http://a:1\"]}",
        ] {
            assert_eq!(parse(text.as_bytes()), Ok(expected.clone()), "{text}");
        }
        assert_eq!(parse(b"workers = []"), Ok(SourceList::new()));
    }

    #[test]
    fn a_list_that_is_half_written_or_wrong_is_refused_whole() {
        for text in ["", "workers = [\"http://a:1\",", "[\"http://a:1\", 7]", "[\"a:1\"]", "{}"] {
            assert!(parse(text.as_bytes()).is_err(), "{text:?} was taken");
        }
    }
}
