//! Counts the tokens that a turn uses, for the turn's record and for its key's limit of tokens.
//!
//! A record has only what the engine reports. A limit of tokens per minute needs a number in any
//! case: the prompt is estimated when the turn begins, and without a report each event of a stream
//! counts as one token, and four bytes of another answer do.

use std::sync::LazyLock;

use contract::count::COUNT_MAX;
use memchr::memmem::Finder;

use super::events::EventReader;
use crate::shares::TokenShare;

const BYTES_PER_TOKEN: u64 = 4;
/// Each key of the usage report ends so. One search finds them all.
const KEY_END: &[u8] = b"_tokens\":";
/// A finder made for each part would take as long as the search of a short part.
static KEY_ENDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(KEY_END));
/// Carried over from one frame to the next, so that a number that is cut by the frames' border is
/// found. A key with its number has at most 46.
const CARRY_BYTES: usize = 64;

#[derive(Debug, Clone, Copy)]
enum Count {
    Prompt,
    /// A part of the prompt's tokens.
    Cached,
    /// Not included in the prompt's number.
    CachedBesidePrompt,
    Answer,
}

impl Count {
    /// `text` ends with the key's beginning, in the form of any route.
    fn of_key(text: &[u8]) -> Option<Self> {
        let counts = [
            (&b"\"prompt"[..], Self::Prompt),
            (b"\"input", Self::Prompt),
            (b"\"completion", Self::Answer),
            (b"\"output", Self::Answer),
            (b"\"cached", Self::Cached),
            (b"\"cache_read_input", Self::CachedBesidePrompt),
        ];
        counts.into_iter().find(|(name, _)| text.ends_with(name)).map(|(_, count)| count)
    }
}

/// As far as the engine reports them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TurnUsage {
    /// Includes the cached ones.
    pub(crate) prompt_tokens: Option<u64>,
    /// SGLang's OpenAI routes report these tokens only with `--enable-cache-report`.
    pub(crate) cached_tokens: Option<u64>,
    /// A stream of an OpenAI route reports them only if the client asks.
    pub(crate) output_tokens: Option<u64>,
}

pub(super) fn estimate_tokens(body_bytes: usize) -> u64 {
    body_bytes as u64 / BYTES_PER_TOKEN + 1
}

#[derive(Debug, Default)]
pub(super) struct UsageMeter {
    /// Each event of a stream repeats the numbers so far. In another answer, each prompt of a batch
    /// has numbers of its own.
    is_stream: bool,
    carry: Vec<u8>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    cached_tokens_beside_prompt: Option<u64>,
    answer_tokens: Option<u64>,
    events: EventReader,
    bytes: u64,
}

impl UsageMeter {
    pub(super) fn new(is_stream: bool) -> Self {
        Self { is_stream, ..Self::default() }
    }

    pub(super) fn feed(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
        let carried_bytes = self.carry.len();
        let mut text = std::mem::take(&mut self.carry);
        text.extend_from_slice(data);
        if self.is_stream {
            self.events.feed(data);
        }
        for (count, number) in scan(&text, carried_bytes) {
            let known = match count {
                Count::Prompt => &mut self.prompt_tokens,
                Count::Cached => &mut self.cached_tokens,
                Count::CachedBesidePrompt => &mut self.cached_tokens_beside_prompt,
                Count::Answer => &mut self.answer_tokens,
            };
            let before = known.unwrap_or_default();
            // A later event of a stream may lack the number, and then says 0.
            *known = Some(if self.is_stream {
                before.max(number)
            } else {
                before.saturating_add(number)
            });
        }
        text.drain(..text.len().saturating_sub(CARRY_BYTES));
        self.carry = text;
    }

    pub(super) fn used_tokens(&self, prompt_estimate: u64) -> u64 {
        let events = self.events.count();
        let guess = if self.is_stream { events } else { self.bytes / BYTES_PER_TOKEN };
        // With several answers in one stream, each reports only its own tokens.
        let floor = if self.is_stream { events.saturating_sub(2) } else { 0 };
        let answer = self.answer_tokens.map_or(guess, |tokens| tokens.max(floor));
        let prompt = self.prompt_tokens.filter(|tokens| *tokens > 0).unwrap_or(prompt_estimate);
        prompt.saturating_add(answer)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    pub(super) fn usage(&self) -> TurnUsage {
        let beside = self.cached_tokens_beside_prompt;
        let prompt_tokens =
            self.prompt_tokens.map(|tokens| tokens.saturating_add(beside.unwrap_or_default()));
        // A prompt has at least one token. A stream that began before the engine knew says 0.
        let prompt_tokens = prompt_tokens.filter(|tokens| *tokens > 0);
        let cached_tokens = self.cached_tokens.or(beside);
        TurnUsage { prompt_tokens, cached_tokens, output_tokens: self.answer_tokens }
    }
}

/// Numbers that end within the first `carried_bytes` were found in the part before.
fn scan(text: &[u8], carried_bytes: usize) -> impl Iterator<Item = (Count, u64)> {
    KEY_ENDS.find_iter(text).filter_map(move |key_end| {
        let count = Count::of_key(&text[..key_end])?;
        let rest = &text[key_end + KEY_END.len()..];
        let spaces = rest.iter().take_while(|byte| **byte == b' ').count();
        let digits = rest[spaces..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let end = key_end + KEY_END.len() + spaces + digits;
        // A number at the end of the part may go on in the next part.
        if digits == 0 || end < carried_bytes || end == text.len() {
            return None;
        }
        let number = std::str::from_utf8(&rest[spaces..spaces + digits]).ok()?;
        // A number that no engine can have counted is none.
        let number = number.parse().ok().filter(|number| *number <= COUNT_MAX)?;
        Some((count, number))
    })
}

/// A turn that is never settled takes nothing from its key's limit.
#[derive(Debug)]
pub(super) struct TurnTokens {
    share: TokenShare,
    /// An estimate until the prompt's tokens are counted.
    prompt_tokens: u64,
}

impl TurnTokens {
    pub(super) fn new(share: TokenShare) -> Self {
        Self { prompt_tokens: share.estimate(), share }
    }

    /// More exact than the estimate by bytes.
    pub(super) fn set_prompt_tokens(&mut self, tokens: u64) {
        self.prompt_tokens = tokens;
    }

    pub(super) fn settle(&mut self, meter: &UsageMeter) {
        self.share.set_used(meter.used_tokens(self.prompt_tokens));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn used(is_stream: bool, answer: &str, part_bytes: usize) -> u64 {
        let mut meter = UsageMeter::new(is_stream);
        answer.as_bytes().chunks(part_bytes.max(1)).for_each(|part| meter.feed(part));
        meter.used_tokens(1000)
    }

    fn report(is_stream: bool, answer: &str, part_bytes: usize) -> [Option<u64>; 3] {
        let mut meter = UsageMeter::new(is_stream);
        answer.as_bytes().chunks(part_bytes.max(1)).for_each(|part| meter.feed(part));
        let usage = meter.usage();
        [usage.prompt_tokens, usage.cached_tokens, usage.output_tokens]
    }

    const CHAT: &str = r#"{"choices":[{"message":{"content":"say \"completion_tokens\":9999"}}],
        "usage":{"prompt_tokens":20,"total_tokens":27,"completion_tokens": 7,
        "prompt_tokens_details":{"cached_tokens":16},"reasoning_tokens":0}}"#;
    const BATCH: &str = r#"[{"text":"a","meta_info":{"prompt_tokens":5,"completion_tokens":3}},
        {"text":"b","meta_info":{"prompt_tokens":50,"completion_tokens":30}}]"#;
    const STREAM: &str = "data: {\"meta_info\":{\"prompt_tokens\":12,\"completion_tokens\":1}}\n\n\
        data: {\"meta_info\":{\"prompt_tokens\":12,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
    const MESSAGES: &str = "event: message_start\ndata: {\"usage\":{\"input_tokens\":40,\
        \"cache_read_input_tokens\":24,\"output_tokens\":0}}\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":6}}\n\n";
    const ABSURD: &str = "data: {\"usage\":{\"input_tokens\":18446744073709551615,\
        \"cache_read_input_tokens\":18446744073709551615,\"output_tokens\":6}}\n\ndata: [DONE]\n\n";
    const SILENT: &str = "data: {\"delta\":\"a\"}\n\ndata: {\"delta\":\"b\"}\n\n";

    proptest! {
        #[test]
        fn usage_is_read_whatever_the_frames(part_bytes in 1_usize..400) {
            prop_assert_eq!(used(false, CHAT, part_bytes), 27);
            prop_assert_eq!(used(false, BATCH, part_bytes), 88);
            prop_assert_eq!(used(true, STREAM, part_bytes), 14);
            prop_assert_eq!(used(true, MESSAGES, part_bytes), 46);
            prop_assert_eq!(used(true, SILENT, part_bytes), 1002);
            prop_assert_eq!(report(false, CHAT, part_bytes), [Some(20), Some(16), Some(7)]);
            prop_assert_eq!(report(false, BATCH, part_bytes), [Some(55), None, Some(33)]);
            prop_assert_eq!(report(true, STREAM, part_bytes), [Some(12), None, Some(2)]);
            prop_assert_eq!(report(true, MESSAGES, part_bytes), [Some(64), Some(24), Some(6)]);
            prop_assert_eq!(report(true, SILENT, part_bytes), [None, None, None]);
            prop_assert_eq!(report(true, ABSURD, part_bytes), [None, None, Some(6)]);
            prop_assert_eq!(used(true, ABSURD, part_bytes), 1006);
            prop_assert_eq!(used(false, "x".repeat(80).as_str(), part_bytes), 1020);
        }

        #[test]
        fn no_answer_panics(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..8)) {
            let mut meter = UsageMeter::new(true);
            parts.iter().for_each(|part| meter.feed(part));
            meter.used_tokens(0);
        }
    }
}
