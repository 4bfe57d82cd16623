//! Writes measured figures into the guides.

use std::path::Path;

use anyhow::Context as _;

/// Puts `text` between the lines `<!-- figures of NAME -->` and `<!-- end of the figures -->`.
///
/// # Errors
/// Fails if the guide has no such lines, or can't be read or written.
pub fn write_figures(guide: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    const END: &str = "<!-- end of the figures -->";
    let old = std::fs::read_to_string(guide)
        .with_context(|| format!("{} can't be read", guide.display()))?;
    let begin = format!("<!-- figures of {name} -->");
    let parts = old
        .split_once(&begin)
        .and_then(|(before, rest)| rest.split_once(END).map(|(_, after)| (before, after)));
    let (before, after) =
        parts.with_context(|| format!("{} has no line {begin}", guide.display()))?;
    std::fs::write(guide, format!("{before}{begin}\n\n{text}\n{END}{after}"))
        .with_context(|| format!("{} can't be written", guide.display()))
}
