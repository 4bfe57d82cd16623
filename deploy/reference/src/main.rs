//! `berth-reference`: writes the reference pages of `deploy/docs` from the code.
//!
//! A page is made anew each time, except for the columns of its tables that are written by hand:
//! those are taken from the page as it is. A test compares the pages with the committed ones.

mod grpc;
mod http_api;
mod metrics;
mod page;
mod settings;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::Parser;

use self::page::Page;

/// Writes the reference pages of Berth's documentation from the code
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Folder of the pages
    #[arg(default_value_os_t = root().join("deploy/docs"))]
    folder: PathBuf,
}

type MakePage = fn() -> anyhow::Result<Page>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Each page keeps what is written by hand in the page in `folder`. Returns names and texts.
fn make_pages(folder: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
    let names_and_pages: [(&str, MakePage); 5] = [
        ("agent-settings.md", settings::agent),
        ("router-settings.md", settings::router),
        ("metrics.md", metrics::page),
        ("http-api.md", http_api::page),
        ("grpc.md", grpc::page),
    ];
    let make = |(name, make): (&'static str, MakePage)| {
        let before = fs::read_to_string(folder.join(name)).unwrap_or_default();
        let page = make().with_context(|| format!("can't make {name}"))?;
        Ok((name, page.render(&before)))
    };
    names_and_pages.into_iter().map(make).collect()
}

fn main() -> anyhow::Result<()> {
    let folder = Args::parse().folder;
    for (name, text) in make_pages(&folder)? {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("can't write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_pages_say_what_the_code_says() {
        let folder = root().join("deploy/docs");
        for (name, text) in make_pages(&folder).expect("the pages can be made") {
            let committed = fs::read_to_string(folder.join(name)).unwrap_or_default();
            let line = text.lines().zip(committed.lines()).find(|(made, there)| made != there);
            let is_same = text == committed;
            assert!(is_same, "{name}: run `cargo run -p reference`; first difference: {line:?}");
        }
    }
}
