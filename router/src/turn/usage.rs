//! Counts the tokens that a turn uses, for the limit of tokens per minute of its key.
//!
//! Only the turns of keys with such a limit are counted. The prompt is estimated when the turn
//! begins. The answer is scanned as it passes, for the numbers of the engine's usage report. If it
//! has none, each event of a stream counts as one token, and four bytes of another answer do.

use memchr::memmem;

use crate::shares::TokenShare;

/// Estimated bytes per token of text.
const BYTES_PER_TOKEN: u64 = 4;
/// The keys of the usage report, in the forms of all routes.
const PROMPT_KEYS: [&[u8]; 2] = [b"\"prompt_tokens\":", b"\"input_tokens\":"];
const ANSWER_KEYS: [&[u8]; 2] = [b"\"completion_tokens\":", b"\"output_tokens\":"];
/// Number of bytes carried over from one frame to the next, so that a number that is cut by the
/// frames' border is found. A key with its number has at most 42.
const CARRY_BYTES: usize = 48;

/// Returns the estimated tokens of a body.
pub(super) fn estimate_tokens(body_bytes: usize) -> u64 {
    body_bytes as u64 / BYTES_PER_TOKEN + 1
}

/// Reads the numbers of an answer's usage report. Pure.
#[derive(Debug, Default)]
pub(super) struct UsageMeter {
    /// Whether the answer is a stream of events. Each event repeats the numbers so far. In another
    /// answer, each prompt of a batch has numbers of its own.
    is_stream: bool,
    carry: Vec<u8>,
    prompt_tokens: Option<u64>,
    answer_tokens: Option<u64>,
    events: u64,
    bytes: u64,
}

impl UsageMeter {
    pub(super) fn new(is_stream: bool) -> Self {
        Self { is_stream, ..Self::default() }
    }

    /// Scans a part of the answer.
    pub(super) fn feed(&mut self, data: &[u8]) {
        self.bytes += data.len() as u64;
        let carried_bytes = self.carry.len();
        let mut text = std::mem::take(&mut self.carry);
        text.extend_from_slice(data);
        if self.is_stream {
            let (from, border) = (carried_bytes.saturating_sub(1), b"\n\n");
            self.events += memmem::find_iter(&text[from..], border).count() as u64;
        }
        let prompt = scan(&text, carried_bytes, &PROMPT_KEYS);
        let answer = scan(&text, carried_bytes, &ANSWER_KEYS);
        self.prompt_tokens = self.merge(self.prompt_tokens, &prompt);
        self.answer_tokens = self.merge(self.answer_tokens, &answer);
        text.drain(..text.len().saturating_sub(CARRY_BYTES));
        self.carry = text;
    }

    /// Returns the tokens of the prompt and the answer.
    pub(super) fn used_tokens(&self, prompt_estimate: u64) -> u64 {
        let guess = if self.is_stream { self.events } else { self.bytes / BYTES_PER_TOKEN };
        // With several answers in one stream, each reports only its own tokens.
        let floor = if self.is_stream { self.events.saturating_sub(2) } else { 0 };
        let answer = self.answer_tokens.map_or(guess, |tokens| tokens.max(floor));
        self.prompt_tokens.filter(|tokens| *tokens > 0).unwrap_or(prompt_estimate) + answer
    }

    fn merge(&self, known: Option<u64>, found: &[u64]) -> Option<u64> {
        let Some(last) = found.last() else { return known };
        if self.is_stream {
            // A later event may lack the number, and then says 0.
            return Some(known.unwrap_or_default().max(*last));
        }
        Some(found.iter().fold(known.unwrap_or_default(), |sum, one| sum.saturating_add(*one)))
    }
}

/// Returns the numbers after these keys whose end is after the first `carried_bytes`: the others
/// were found in the part before.
fn scan(text: &[u8], carried_bytes: usize, keys: &[&[u8]]) -> Vec<u64> {
    let mut found = vec![];
    for key in keys {
        for start in memmem::find_iter(text, key) {
            let rest = &text[start + key.len()..];
            let spaces = rest.iter().take_while(|byte| **byte == b' ').count();
            let digits = rest[spaces..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            let end = start + key.len() + spaces + digits;
            // A number at the end of the part may go on in the next part.
            if digits == 0 || end < carried_bytes || end == text.len() {
                continue;
            }
            let number = std::str::from_utf8(&rest[spaces..spaces + digits]).ok();
            found.extend(number.and_then(|number| number.parse::<u64>().ok()));
        }
    }
    found
}

/// What a turn takes from its key's limit of tokens per minute. Settled on drop.
#[derive(Debug)]
pub(super) struct TurnTokens {
    share: TokenShare,
    /// The tokens of the prompt, as far as they are known.
    prompt_tokens: u64,
    /// The answer. `None` before the turn is sent: then nothing is used.
    meter: Option<UsageMeter>,
}

impl TurnTokens {
    pub(super) fn new(share: TokenShare) -> Self {
        Self { prompt_tokens: share.estimate(), share, meter: None }
    }

    /// Sets the number of the prompt's tokens, which is better than the estimate by bytes.
    pub(super) fn set_prompt_tokens(&mut self, tokens: u64) {
        self.prompt_tokens = tokens;
    }

    /// Records that an answer has begun. `is_success`: whether its status is 2xx. Otherwise the
    /// engine has computed nothing.
    pub(super) fn begin_answer(&mut self, is_success: bool, is_stream: bool) {
        self.meter = is_success.then(|| UsageMeter::new(is_stream));
    }

    /// Scans a part of the answer.
    pub(super) fn feed(&mut self, data: &[u8]) {
        if let Some(meter) = &mut self.meter {
            meter.feed(data);
        }
    }
}

impl Drop for TurnTokens {
    fn drop(&mut self) {
        if let Some(meter) = &self.meter {
            self.share.set_used(meter.used_tokens(self.prompt_tokens));
        }
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

    const CHAT: &str = r#"{"choices":[{"message":{"content":"say \"completion_tokens\":9999"}}],
        "usage":{"prompt_tokens":20,"total_tokens":27,"completion_tokens": 7}}"#;
    const BATCH: &str = r#"[{"text":"a","meta_info":{"prompt_tokens":5,"completion_tokens":3}},
        {"text":"b","meta_info":{"prompt_tokens":50,"completion_tokens":30}}]"#;
    const STREAM: &str = "data: {\"meta_info\":{\"prompt_tokens\":12,\"completion_tokens\":1}}\n\n\
        data: {\"meta_info\":{\"prompt_tokens\":12,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
    const MESSAGES: &str = "event: message_start\ndata: {\"usage\":{\"input_tokens\":40,\
        \"output_tokens\":0}}\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":6}}\n\n";
    const SILENT: &str = "data: {\"delta\":\"a\"}\n\ndata: {\"delta\":\"b\"}\n\n";

    proptest! {
        #[test]
        fn usage_is_read_whatever_the_frames(part_bytes in 1_usize..400) {
            prop_assert_eq!(used(false, CHAT, part_bytes), 27);
            prop_assert_eq!(used(false, BATCH, part_bytes), 88);
            prop_assert_eq!(used(true, STREAM, part_bytes), 14);
            prop_assert_eq!(used(true, MESSAGES, part_bytes), 46);
            prop_assert_eq!(used(true, SILENT, part_bytes), 1002);
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
