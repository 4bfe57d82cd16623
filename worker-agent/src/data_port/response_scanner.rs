//! Scans an engine's response as it passes: finds token counts, and how and whether it ended.
//!
//! Chunks may be cut anywhere. The scanner keeps no text. `/generate` reports in `meta_info`, the
//! OpenAI and Anthropic routes in `usage`.
//!
//! serde_json would need a whole value in memory: tens of megabytes for log probabilities. This
//! code reads 6.1 GiB/s where events repeat the text (serde_json 0.7), and 0.26 GiB/s of
//! short deltas (serde_json 0.34), best of seven on two busy cores, 2026-11-23.

mod strings;

use contract::count::COUNT_MAX;
use memchr::memchr;

use self::strings::{StringStart, scan_string};
use crate::session::{Outcome, Usage};

/// Deeper objects and arrays are skipped. The needed fields are at most four levels deep.
const DEPTH_MAX: usize = 6;

#[derive(Debug)]
pub struct Scanner {
    framing: Framing,
    json: JsonState,
    findings: Findings,
    is_complete: bool,
}

#[derive(Debug)]
enum Framing {
    SingleValue,
    Events {
        line: LineState,
        /// The beginning of the current line's data.
        data: StringStart,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineState {
    /// The line has begun with this many bytes of `data:`.
    Field(usize),
    Data,
    Other,
}

/// A later value of a field replaces an earlier one.
#[derive(Debug, Default)]
struct Findings {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    /// Only for an API that doesn't count them as prompt tokens.
    cached_tokens_beside_prompt: Option<u64>,
    /// How often the engine took the turn out of its batch and put it back into its queue.
    retractions: u64,
    is_aborted: bool,
    is_aborted_in_queue: bool,
    /// The HTTP status that the engine gives as the reason of an abort.
    abort_status: Option<u64>,
    has_error: bool,
    has_closing_event: bool,
}

impl Scanner {
    #[must_use]
    pub fn new(content_type: Option<&[u8]>) -> Self {
        let is_events = content_type.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
        let framing = if is_events {
            Framing::Events { line: LineState::Field(0), data: StringStart::default() }
        } else {
            Framing::SingleValue
        };
        Self {
            framing,
            json: JsonState::default(),
            findings: Findings::default(),
            is_complete: false,
        }
    }

    /// Returns whether the response is complete: by the end of its JSON value, by `[DONE]` or by
    /// the API's closing event.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        match self.framing {
            Framing::SingleValue => {
                self.json.push(bytes, &mut self.findings);
                self.is_complete |= self.json.is_complete;
            }
            Framing::Events { .. } => self.push_events(bytes),
        }
        self.is_complete
    }

    fn push_events(&mut self, bytes: &[u8]) {
        const DATA: &[u8] = b"data:";
        let Framing::Events { line, data } = &mut self.framing else { return };
        let mut rest = bytes;
        while let Some(&byte) = rest.first() {
            match *line {
                LineState::Field(matched) if matched == DATA.len() => {
                    *line = LineState::Data;
                    *data = StringStart::default();
                }
                LineState::Field(matched) if byte == DATA[matched] => {
                    *line = LineState::Field(matched + 1);
                    rest = &rest[1..];
                }
                LineState::Field(_) | LineState::Other => {
                    let line_end = memchr(b'\n', rest);
                    *line = if line_end.is_some() { LineState::Field(0) } else { LineState::Other };
                    rest = &rest[line_end.map_or(rest.len(), |line_end| line_end + 1)..];
                }
                LineState::Data => {
                    let line_end = memchr(b'\n', rest);
                    let content = &rest[..line_end.unwrap_or(rest.len())];
                    data.push(content);
                    self.json.push(content, &mut self.findings);
                    self.is_complete |= self.findings.has_closing_event && self.json.is_complete;
                    if line_end.is_some() {
                        // Only a whole line is `[DONE]`: chunks end anywhere, also after a text
                        // that merely begins so.
                        self.is_complete |= is_done(data.known_text());
                        *line = LineState::Field(0);
                        self.json = JsonState::default();
                    }
                    rest = &rest[line_end.map_or(rest.len(), |line_end| line_end + 1)..];
                }
            }
        }
    }

    /// Ask this only after the last byte: the last line needs no end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let is_last_line_done = match &self.framing {
            Framing::Events { line: LineState::Data, data } => is_done(data.known_text()),
            Framing::Events { .. } | Framing::SingleValue => false,
        };
        self.is_complete || is_last_line_done
    }

    /// The caller must have read the response to its end, without an error of the connection.
    #[must_use]
    pub fn outcome(&self, status: http::StatusCode) -> Outcome {
        let findings = &self.findings;
        if status.is_server_error() {
            // The engine failed in the turn, so it is unknown how much of the turn it kept.
            return Outcome::Lost;
        }
        if findings.abort_status.is_some_and(|status| status >= 500) {
            return Outcome::Partial;
        }
        if !status.is_success() || (findings.abort_status.is_some() && !self.has_run()) {
            return Outcome::Refused;
        }
        // The engine may keep a part of these turns. A retracted turn waits in the queue again,
        // with a part of its answer committed. If a turn was aborted in the queue, the response
        // doesn't say whether the turn ran before.
        if findings.is_aborted_in_queue || (findings.is_aborted && findings.retractions > 0) {
            return Outcome::Partial;
        }
        if findings.is_aborted {
            return Outcome::Aborted;
        }
        if findings.has_error {
            return Outcome::Lost;
        }
        let uncounted_tokens = findings.cached_tokens_beside_prompt.unwrap_or(0);
        // A prompt has at least one token. A stream reports 0 if it began before the engine knew
        // the count.
        let prompt = findings.prompt_tokens.map(|tokens| tokens + uncounted_tokens);
        let prompt = prompt.filter(|tokens| *tokens > 0);
        let usage = prompt.zip(findings.completion_tokens).map(|(prompt, completion)| Usage {
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_tokens: findings.cached_tokens.or(findings.cached_tokens_beside_prompt),
            retractions: findings.retractions,
        });
        Outcome::Finished(usage)
    }

    /// A turn that the engine refused has an output too: of a prompt of one token that the engine
    /// put in its place.
    fn has_run(&self) -> bool {
        let findings = &self.findings;
        let (prompt, completion) = (findings.prompt_tokens, findings.completion_tokens);
        let is_longer =
            prompt.is_some_and(|tokens| tokens > 1) || completion.is_some_and(|tokens| tokens > 1);
        is_longer && completion.is_some_and(|tokens| tokens > 0)
    }
}

/// A space may come before the text, and `\r` after it.
fn is_done(data: &[u8]) -> bool {
    let data = data.strip_prefix(b" ").unwrap_or(data);
    data.strip_suffix(b"\r").unwrap_or(data) == b"[DONE]"
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Other,
    MetaInfo,
    Usage,
    PromptTokens,
    CompletionTokens,
    CachedTokens,
    CachedTokensBesidePrompt,
    TokenDetails,
    Retractions,
    FinishReason,
    Type,
    Message,
    StatusCode,
    Choices,
    Response,
    Error,
}

impl Key {
    fn from_text(text: &[u8]) -> Self {
        match text {
            b"meta_info" => Self::MetaInfo,
            b"usage" => Self::Usage,
            b"prompt_tokens" | b"input_tokens" => Self::PromptTokens,
            b"completion_tokens" | b"output_tokens" => Self::CompletionTokens,
            b"cached_tokens" => Self::CachedTokens,
            b"cache_read_input_tokens" => Self::CachedTokensBesidePrompt,
            b"prompt_tokens_details" | b"input_tokens_details" => Self::TokenDetails,
            b"num_retractions" => Self::Retractions,
            b"finish_reason" => Self::FinishReason,
            b"type" => Self::Type,
            b"message" => Self::Message,
            b"status_code" => Self::StatusCode,
            b"choices" => Self::Choices,
            b"response" => Self::Response,
            b"error" => Self::Error,
            _ => Self::Other,
        }
    }
}

/// The keys of the open objects are the path to the current place. Arrays don't appear in it.
#[derive(Debug, Default)]
struct JsonState {
    open_containers: Vec<Container>,
    skipped_depth: usize,
    open_scalar: OpenScalar,
    is_complete: bool,
}

#[derive(Debug, Clone, Copy)]
struct Container {
    is_object: bool,
    key: Key,
    expects_key: bool,
}

/// A string or number may continue in the next chunk.
#[derive(Debug, Default)]
enum OpenScalar {
    #[default]
    None,
    String {
        /// Whether a backslash comes before the next byte.
        is_escaped: bool,
        text: StringStart,
    },
    Number {
        /// `None` if the number is not an integer from 0 to `u64::MAX`.
        value: Option<u64>,
    },
}

impl JsonState {
    fn push(&mut self, bytes: &[u8], findings: &mut Findings) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let used_bytes = match &mut self.open_scalar {
                OpenScalar::String { is_escaped, text } => {
                    let (used_bytes, has_ended) = scan_string(rest, is_escaped, text);
                    if has_ended {
                        self.end_string(findings);
                    }
                    used_bytes
                }
                OpenScalar::Number { value } => {
                    let digits_end = rest.iter().position(|byte| !byte.is_ascii_digit());
                    for digit in &rest[..digits_end.unwrap_or(rest.len())] {
                        *value = value.and_then(|number| {
                            number.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
                        });
                    }
                    match digits_end.map(|index| rest[index]) {
                        Some(b'.' | b'e' | b'E' | b'+' | b'-') => *value = None,
                        Some(_) => self.end_number(findings),
                        None => {}
                    }
                    // A byte that belongs to the number, such as a decimal point, is used here. Any
                    // other ends the number, and the next round reads it.
                    let is_in_number = matches!(self.open_scalar, OpenScalar::Number { .. });
                    digits_end.map_or(rest.len(), |index| index + usize::from(is_in_number))
                }
                OpenScalar::None => {
                    self.push_structural(rest[0], findings);
                    1
                }
            };
            rest = &rest[used_bytes..];
        }
    }

    fn push_structural(&mut self, byte: u8, findings: &mut Findings) {
        match byte {
            b'{' | b'[' => {
                if byte == b'{' && self.path_is(&[Key::Error]) {
                    findings.has_error = true;
                }
                if self.open_containers.len() < DEPTH_MAX {
                    let is_object = byte == b'{';
                    self.open_containers.push(Container {
                        is_object,
                        key: Key::Other,
                        expects_key: is_object,
                    });
                } else {
                    self.skipped_depth += 1;
                }
            }
            b'}' | b']' => {
                if self.skipped_depth > 0 {
                    self.skipped_depth -= 1;
                } else {
                    self.open_containers.pop();
                    self.is_complete |= self.open_containers.is_empty();
                }
            }
            b'"' => {
                self.open_scalar =
                    OpenScalar::String { is_escaped: false, text: StringStart::default() }
            }
            b'0'..=b'9' => {
                self.open_scalar = OpenScalar::Number { value: Some(u64::from(byte - b'0')) };
            }
            b'-' => self.open_scalar = OpenScalar::Number { value: None },
            b',' if self.skipped_depth == 0 => {
                if let Some(container) = self.open_containers.last_mut() {
                    container.expects_key = container.is_object;
                }
            }
            _ => {}
        }
    }

    fn end_string(&mut self, findings: &mut Findings) {
        let OpenScalar::String { text, .. } = std::mem::take(&mut self.open_scalar) else { return };
        if self.skipped_depth > 0 {
            return;
        }
        let Some(container) = self.open_containers.last_mut() else { return };
        if container.expects_key {
            container.key = Key::from_text(text.known_text());
            container.expects_key = false;
            return;
        }
        let text = text.known_text();
        if self.path_is(&[Key::MetaInfo, Key::FinishReason, Key::Type])
            || self.path_is(&[Key::Choices, Key::FinishReason])
        {
            findings.is_aborted |= text == b"abort";
        } else if self.path_is(&[Key::MetaInfo, Key::FinishReason, Key::Message]) {
            findings.is_aborted_in_queue |= text == b"Abort in waiting queue";
        } else if self.path_is(&[Key::Type]) {
            findings.has_closing_event |= matches!(
                text,
                b"message_stop"
                    | b"response.completed"
                    | b"response.failed"
                    | b"response.incomplete"
            );
        }
    }

    fn end_number(&mut self, findings: &mut Findings) {
        let OpenScalar::Number { value } = std::mem::take(&mut self.open_scalar) else { return };
        if self.skipped_depth > 0 {
            return;
        }
        if self.path_is(&[Key::MetaInfo, Key::FinishReason, Key::StatusCode]) {
            findings.abort_status = value.or(findings.abort_status);
            return;
        }
        // A number that no engine can have counted is as good as none: a pinned session whose turn
        // has no usage must prove its history.
        let value = value.filter(|count| *count <= COUNT_MAX);
        let mut path = self.path();
        // In a stream, the Responses and Messages APIs wrap the object that has the usage.
        let is_wrapped = matches!(path.first(), Some(Key::Response | Key::Message));
        if is_wrapped {
            path.remove(0);
        }
        match path.as_slice() {
            [Key::MetaInfo | Key::Usage, Key::PromptTokens] => findings.prompt_tokens = value,
            [Key::MetaInfo | Key::Usage, Key::CompletionTokens] => {
                findings.completion_tokens = value
            }
            [Key::Usage, Key::CachedTokensBesidePrompt] => {
                findings.cached_tokens_beside_prompt = value
            }
            [Key::MetaInfo | Key::Usage, Key::CachedTokens]
            | [Key::Usage, Key::TokenDetails, Key::CachedTokens] => findings.cached_tokens = value,
            [Key::MetaInfo, Key::Retractions] => findings.retractions = value.unwrap_or(COUNT_MAX),
            _ => {}
        }
    }

    fn path(&self) -> Vec<Key> {
        self.open_containers
            .iter()
            .filter(|container| container.is_object)
            .map(|container| container.key)
            .collect()
    }

    fn path_is(&self, expected: &[Key]) -> bool {
        self.skipped_depth == 0
            && self
                .open_containers
                .iter()
                .filter(|container| container.is_object)
                .map(|container| container.key)
                .eq(expected.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use proptest::prelude::*;

    use super::*;

    const SSE: Option<&[u8]> = Some(b"text/event-stream; charset=utf-8");

    fn usage(prompt: u64, completion: u64, cached: Option<u64>) -> Outcome {
        Outcome::Finished(Some(Usage {
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_tokens: cached,
            retractions: 0,
        }))
    }

    /// Scans a text cut at the given places. Returns the outcome and whether it was complete.
    fn read(kind: Option<&[u8]>, text: &str, cuts: &[usize]) -> (Outcome, bool) {
        let mut scanner = Scanner::new(kind);
        let mut is_complete = false;
        let mut from = 0;
        for &cut in cuts.iter().chain([&text.len()]) {
            let cut = cut.clamp(from, text.len());
            is_complete = scanner.push(&text.as_bytes()[from..cut]);
            from = cut;
        }
        (scanner.outcome(StatusCode::OK), is_complete)
    }

    /// Responses in the forms of SGLang 0.5.23, with decoys in their texts and tool arguments.
    fn answers() -> Vec<(Option<&'static [u8]>, &'static str, Outcome)> {
        [usual_answers(), odd_answers()].concat()
    }

    fn usual_answers() -> Vec<(Option<&'static [u8]>, &'static str, Outcome)> {
        vec![
            (
                None,
                r#"{"text":"\"usage\":{\"prompt_tokens\":9}","output_ids":[15,317],"meta_info":{"id":"r","finish_reason":{"type":"length","length":6},"prompt_tokens":25,"num_retractions":0,"e2e_latency":1.5e-3,"completion_tokens":6,"cached_tokens":4,"cached_tokens_details":{"device":99,"host":0}}}"#,
                usage(25, 6, Some(4)),
            ),
            (
                None,
                r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"}]","tool_calls":[{"function":{"arguments":"{\"usage\":{\"prompt_tokens\":7}}"}}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":48,"total_tokens":58,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":16}}}"#,
                usage(48, 10, Some(16)),
            ),
            (
                None,
                r#"{"type":"message","content":[{"type":"tool_use","input":{"usage":{"input_tokens":1}}}],"usage":{"input_tokens":30,"output_tokens":5,"cache_read_input_tokens":12}}"#,
                usage(42, 5, Some(12)),
            ),
            (
                SSE,
                "data: {\"text\":\"a\",\"meta_info\":{\"finish_reason\":null,\"prompt_tokens\":51,\"completion_tokens\":1,\"cached_tokens\":45}}\n\ndata: {\"text\":\"ab\",\"meta_info\":{\"finish_reason\":{\"type\":\"length\",\"length\":2},\"prompt_tokens\":51,\"completion_tokens\":2,\"cached_tokens\":45}}\n\ndata: [DONE]\n\n",
                usage(51, 2, Some(45)),
            ),
            (
                SSE,
                "data: {\"choices\":[{\"delta\":{\"content\":\"[DONE]\"}}],\"usage\":null}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":3}}\n\ndata: [DONE]\n\n",
                usage(5, 3, None),
            ),
            (
                SSE,
                "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":20,\"output_tokens\":0}}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":7}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
                usage(20, 7, None),
            ),
            (
                SSE,
                "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":0,\"output_tokens\":0}}}\n\nevent: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":7}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
                Outcome::Finished(None),
            ),
            (
                SSE,
                "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"error\":null,\"usage\":{\"input_tokens\":11,\"input_tokens_details\":{\"cached_tokens\":3},\"output_tokens\":2}}}\n\n",
                usage(11, 2, Some(3)),
            ),
            (
                SSE,
                "data: {\"output_ids\":[296],\"text\":\"!\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"Invalid request: session id nope does not exist\",\"status_code\":400},\"prompt_tokens\":1,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n",
                Outcome::Refused,
            ),
            (
                None,
                r#"{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null,"err_type":null},"prompt_tokens":5,"completion_tokens":3}}"#,
                Outcome::Aborted,
            ),
            (
                None,
                r#"{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"Abort in waiting queue"}}}"#,
                Outcome::Partial,
            ),
            (SSE, "data: {\"error\":{\"message\":\"boom\"}}\n\ndata: [DONE]\n\n", Outcome::Lost),
        ]
    }

    /// Answers to turns that ran and were aborted for their parameters, and with absurd counts.
    fn odd_answers() -> Vec<(Option<&'static [u8]>, &'static str, Outcome)> {
        vec![
            (
                SSE,
                "data: {\"output_ids\":[296,12],\"text\":\"!\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"invalid stop_regex '('\",\"status_code\":400},\"prompt_tokens\":31,\"num_retractions\":0,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n",
                Outcome::Aborted,
            ),
            (
                SSE,
                "data: {\"output_ids\":[296,12],\"text\":\"!\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":\"invalid stop_regex '('\",\"status_code\":400},\"prompt_tokens\":31,\"num_retractions\":1,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n",
                Outcome::Partial,
            ),
            (
                None,
                r#"{"text":"","meta_info":{"finish_reason":{"type":"length"},"prompt_tokens":18446744073709551615,"completion_tokens":6}}"#,
                Outcome::Finished(None),
            ),
            (
                None,
                r#"{"type":"message","usage":{"input_tokens":30,"output_tokens":5,"cache_read_input_tokens":18446744073709551600}}"#,
                usage(30, 5, None),
            ),
        ]
    }

    #[test]
    fn only_a_whole_line_is_the_end_however_the_answer_is_cut() {
        let cases = [
            ("data: [DONE]\n\n", true),
            ("data:[DONE]\r\n\r\n", true),
            ("data: [DONE]", true),
            ("data: [DONE], more\n\n", false),
            ("data: [DxONE]\n\n", false),
            ("data:  [DONE]\n\n", false),
            ("event: [DONE]\n\n", false),
        ];
        for (answer, is_complete) in cases {
            for cut in 0..answer.len() {
                let mut scanner = Scanner::new(SSE);
                scanner.push(&answer.as_bytes()[..cut]);
                scanner.push(&answer.as_bytes()[cut..]);
                assert_eq!(scanner.is_complete(), is_complete, "{answer:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn every_route_s_answer_is_understood() {
        for (kind, text, want) in answers() {
            assert_eq!(read(kind, text, &[]), (want, true), "from {text}");
        }
    }

    #[test]
    fn the_last_byte_is_terminal_and_none_before_it() {
        for (kind, text, _) in answers() {
            let mut scanner = Scanner::new(kind);
            let first = (0..text.len()).find(|&at| scanner.push(&text.as_bytes()[at..=at]));
            let left = &text[first.expect("it ends") + 1..];
            assert!(left.trim().is_empty(), "{left:?} came after the end of {text}");
        }
    }

    #[test]
    fn a_stream_cut_short_is_not_terminal() {
        let text = "data: {\"meta_info\":{\"prompt_tokens\":5,\"completion_tokens\":2}}\n\n";
        assert!(!read(SSE, text, &[]).1);
        assert!(!read(None, r#"{"text":"abc","meta_info":{"prompt_tokens":5"#, &[]).1);
    }

    #[test]
    fn a_server_error_leaves_the_end_unknown() {
        let mut scanner = Scanner::new(None);
        scanner.push(br#"{"object":"error","message":"Out of memory"}"#);
        assert_eq!(scanner.outcome(StatusCode::INTERNAL_SERVER_ERROR), Outcome::Lost);
        assert_eq!(scanner.outcome(StatusCode::BAD_REQUEST), Outcome::Refused);
    }

    proptest! {
        #[test]
        fn chunk_borders_do_not_matter(at in 0..16_usize, mut cuts in prop::collection::vec(0..700_usize, 0..12)) {
            let (kind, text, want) = answers().swap_remove(at);
            cuts.sort_unstable();
            // The texts are ASCII, so a cut at any byte is valid.
            prop_assert_eq!(read(kind, text, &cuts), (want, true));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), sse: bool) {
            let mut scanner = Scanner::new(if sse { SSE } else { None });
            for byte in bytes {
                scanner.push(&[byte]);
            }
            let _ = scanner.outcome(StatusCode::OK);
        }
    }
}
