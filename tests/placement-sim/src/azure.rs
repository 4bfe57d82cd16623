//! Reads Azure's trace of arrivals: each line has a time, prompt tokens and answer tokens.
//!
//! No two prompts of this trace share anything.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    time::Duration,
};

use flate2::read::MultiGzDecoder;

use replay::trace::{Blocks, Conversation, Form, Run, Shared, Trace, TraceTurn};

/// The tokens of a block; the trace has no blocks of its own.
const BLOCK_TOKENS: u64 = 512;

/// Why a file isn't a valid trace of this form.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file can't be read.
    #[error("the trace can't be read")]
    Read(#[from] std::io::Error),
    /// A line is malformed.
    #[error("line {0} is not `time,prompt tokens,answer tokens`")]
    Line(usize),
}

/// Reads a gzip file.
///
/// # Errors
/// Fails if the file can't be read or a line is malformed.
pub fn read_trace(path: &Path) -> Result<Trace, Error> {
    let lines = BufReader::new(MultiGzDecoder::new(std::fs::File::open(path)?)).lines();
    let (mut conversations, mut start, mut blocks) = (Vec::new(), None, 0);
    for (number, line) in lines.enumerate().skip(1) {
        let line = line?;
        let (time, prompt_tokens, output_tokens) = fields(&line).ok_or(Error::Line(number + 1))?;
        let start = *start.get_or_insert(time);
        let run = Run { first: blocks, count: prompt_tokens.div_ceil(BLOCK_TOKENS) };
        blocks += run.count;
        let mut named = Blocks::default();
        named.push_run(run);
        conversations.push(Conversation {
            id: number.to_string(),
            block_tokens: BLOCK_TOKENS,
            scope: None,
            shared: Shared::default(),
            turns: vec![TraceTurn {
                at: time.saturating_sub(start),
                think: Duration::ZERO,
                prompt_tokens,
                output_tokens: output_tokens.max(1),
                blocks: named,
            }],
            ..Conversation::default()
        });
    }
    conversations.sort_by_key(|one| one.turns[0].at);
    Ok(Trace { form: Form::Requests, conversations, duplicates: 0 })
}

/// Parses `2023-11-16 18:17:03.9799600,4808,10`. The date is ignored, because the trace covers one
/// day.
fn fields(line: &str) -> Option<(Duration, u64, u64)> {
    let mut parts = line.trim().split(',');
    let (time, prompt, output) = (parts.next()?, parts.next()?, parts.next()?);
    let (_, clock) = time.split_once(' ')?;
    let mut units = clock.splitn(3, ':');
    let hours: u64 = units.next()?.parse().ok()?;
    let minutes: u64 = units.next()?.parse().ok()?;
    let seconds: f64 = units.next()?.parse().ok()?;
    let whole = Duration::from_secs(hours * 3600 + minutes * 60);
    let time = whole + Duration::try_from_secs_f64(seconds).ok()?;
    let prompt: u64 = prompt.parse().ok()?;
    (prompt > 0).then_some((time, prompt, output.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_time_and_two_sizes() {
        let (time, prompt, output) = fields("2023-11-16 18:17:03.5,4808,10").unwrap();
        assert_eq!(time, Duration::from_millis((18 * 3600 + 17 * 60 + 3) * 1000 + 500));
        assert_eq!((prompt, output), (4808, 10));
        assert!(fields("2023-11-16,4808,10").is_none());
    }
}
