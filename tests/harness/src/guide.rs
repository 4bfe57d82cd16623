//! Writes measured figures into the guides.

use std::path::Path;

use anyhow::Context as _;

const END: &str = "<!-- end of the figures -->";

/// Puts `text` between the lines `<!-- figures of NAME -->` and `<!-- end of the figures -->`.
///
/// # Errors
/// Fails if the guide has no such lines, or can't be read or written.
pub fn write_figures(guide: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let [before, after] = read_around(guide, name)?;
    let begin = begin(name);
    std::fs::write(guide, format!("{before}{begin}\n\n{text}\n{END}{after}"))
        .with_context(|| format!("{} can't be written", guide.display()))
}

/// Checks that the guide has a place for these figures.
///
/// # Errors
/// Fails if it has no such lines, or can't be read.
pub fn check(guide: &Path, name: &str) -> anyhow::Result<()> {
    read_around(guide, name).map(drop)
}

fn begin(name: &str) -> String {
    format!("<!-- figures of {name} -->")
}

fn read_around(guide: &Path, name: &str) -> anyhow::Result<[String; 2]> {
    let text = std::fs::read_to_string(guide)
        .with_context(|| format!("{} can't be read", guide.display()))?;
    let begin = begin(name);
    let parts = text
        .split_once(&begin)
        .and_then(|(before, rest)| rest.split_once(END).map(|(_, after)| [before, after]));
    let parts = parts.with_context(|| format!("{} has no line {begin}", guide.display()))?;
    Ok(parts.map(str::to_owned))
}
