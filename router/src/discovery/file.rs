//! Lists the agents of a file, which is read again whenever it changes.
//!
//! The file is TOML with the key `workers`, or JSON: a list of URLs, or an object with the member
//! `workers`. A change counts once two readings in a row agree, so a file that is being written is
//! not taken half.

use std::{path::PathBuf, time::Duration};

use super::Reporter;
use crate::{config::discovery::workers_source, fleet::membership::Listing};

const READ_INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn run(path: PathBuf, mut reporter: Reporter) {
    let mut last_reading = None;
    loop {
        let path = path.clone();
        let reading = tokio::task::spawn_blocking(move || workers_source(path).read()).await;
        let reading = reading.map_err(|panic| panic.to_string());
        let reading = reading.and_then(|read| read.map_err(|error| error.to_string()));
        let is_first = last_reading.is_none();
        // The first list is taken at once, so that the router is ready soon.
        if (is_first && reading.is_ok()) || last_reading.as_ref() == Some(&reading) {
            match reading.clone() {
                Ok(urls) => {
                    let serving = urls.into_iter().map(|url| (url, Listing::Serving));
                    reporter.list(serving.collect()).await;
                }
                Err(why) => reporter.fail(why).await,
            }
        }
        last_reading = Some(reading);
        tokio::time::sleep(READ_INTERVAL).await;
    }
}
