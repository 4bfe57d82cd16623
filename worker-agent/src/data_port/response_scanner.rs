//! Scans the engine's response as it streams past. Pure.
//!
//! It finds the token counts, how the response ended, and whether it is complete. It accepts chunks
//! cut anywhere, keeps no text, and changes nothing. One scanner serves all routes, because their
//! fields are at different places: `/generate` reports in `meta_info`, the OpenAI and Anthropic
//! routes in `usage`.

use crate::session::{Outcome, Usage};

/// The maximum nesting depth that is tracked. Deeper objects and arrays are skipped. The needed
/// fields are at most four levels deep.
const DEPTH_MAX: usize = 6;
/// The maximum bytes of a key or string that is compared with the known ones.
const TEXT_MAX: usize = 24;

/// The scanner of one response.
#[derive(Debug)]
pub struct Scanner {
    framing: Framing,
    json: Json,
    found: Findings,
    terminal: bool,
}

#[derive(Debug)]
enum Framing {
    /// A single JSON value.
    Whole,
    /// Server-sent events; `line` is the state inside the current line.
    Events { line: Line, payload: usize, done: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// This many bytes of `data:` have matched.
    Field(usize),
    Data,
    Other,
}

/// The values found. Later ones replace earlier ones.
#[derive(Debug, Default)]
struct Findings {
    prompt: Option<u64>,
    completion: Option<u64>,
    cached: Option<u64>,
    /// Cached tokens, in an API that excludes them from the prompt count.
    cached_excluded: Option<u64>,
    retractions: u64,
    aborted: bool,
    queued_abort: bool,
    abort_status: Option<u64>,
    error: bool,
    ended: bool,
}

impl Scanner {
    /// Creates a scanner for a response with this content type.
    #[must_use]
    pub fn new(content_type: Option<&[u8]>) -> Self {
        let events = content_type.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
        let framing = if events {
            Framing::Events { line: Line::Field(0), payload: 0, done: 0 }
        } else {
            Framing::SingleValue
        };
        Self { framing, json: Json::default(), found: Findings::default(), terminal: false }
    }

    /// Scans the next bytes. Returns whether the response is now complete: the end of the JSON
    /// value, `[DONE]`, or the API's closing event.
    pub fn push(&mut self, bytes: &[u8]) -> bool {
        match self.framing {
            Framing::SingleValue => {
                self.json.push(bytes, &mut self.found);
                self.terminal |= self.json.complete;
            }
            Framing::Events { .. } => self.push_events(bytes),
        }
        self.terminal
    }

    fn push_events(&mut self, bytes: &[u8]) {
        const DATA: &[u8] = b"data:";
        const DONE: &[u8] = b"[DONE]";
        let Framing::Events { line, payload, done } = &mut self.framing else { return };
        let mut rest = bytes;
        while let Some(&byte) = rest.first() {
            match *line {
                Line::Field(matched) if matched == DATA.len() => {
                    *line = Line::Data;
                    (*payload, *done) = (0, 0);
                }
                Line::Field(matched) if byte == DATA[matched] => {
                    *line = Line::Field(matched + 1);
                    rest = &rest[1..];
                }
                Line::Field(_) | Line::Other => {
                    let end = rest.iter().position(|&byte| byte == b'\n');
                    *line = if end.is_some() { Line::Field(0) } else { Line::Other };
                    rest = &rest[end.map_or(rest.len(), |end| end + 1)..];
                }
                Line::Data => {
                    let end = rest.iter().position(|&byte| byte == b'\n');
                    let content = &rest[..end.unwrap_or(rest.len())];
                    for &byte in content.iter().take(DONE.len() + 2) {
                        if *done < DONE.len() && byte == DONE[*done] {
                            *done += 1;
                        }
                    }
                    *payload += content.len();
                    self.terminal |= *done == DONE.len() && *payload <= DONE.len() + 2;
                    self.json.push(content, &mut self.found);
                    self.terminal |= self.found.ended && self.json.complete;
                    if end.is_some() {
                        *line = Line::Field(0);
                        self.json = Json::default();
                    }
                    rest = &rest[end.map_or(rest.len(), |end| end + 1)..];
                }
            }
        }
    }

    /// Whether the response is complete.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.terminal
    }

    /// Returns how the turn ended. The response must have ended cleanly; `status` is its HTTP
    /// status.
    #[must_use]
    pub fn outcome(&self, status: http::StatusCode) -> Outcome {
        let found = &self.found;
        if status.is_server_error() {
            // The engine failed half-way, so it is unknown what it kept.
            return Outcome::Lost;
        }
        if found.abort_status.is_some_and(|status| status >= 500) {
            return Outcome::Partial;
        }
        if !status.is_success() || found.abort_status.is_some() {
            return Outcome::Refused;
        }
        // A retracted turn waits in the queue again, with a part of its answer committed. When a
        // turn is aborted in the queue, the response doesn't say whether it ever ran.
        if found.queued_abort || (found.aborted && found.retractions > 0) {
            return Outcome::Partial;
        }
        if found.aborted {
            return Outcome::Aborted;
        }
        if found.error {
            return Outcome::Lost;
        }
        let excluded = found.cached_excluded.unwrap_or(0);
        // A prompt has at least one token. A stream that began before the count was known reports
        // 0.
        let prompt = found.prompt.map(|prompt| prompt + excluded).filter(|prompt| *prompt > 0);
        let usage = prompt.zip(found.completion).map(|(prompt, completion)| Usage {
            prompt_tokens: prompt,
            completion_tokens: completion,
            cached_tokens: found.cached.or(found.cached_excluded),
            retractions: found.retractions,
        });
        Outcome::Finished(usage)
    }

    /// Returns the token counts found so far, if the response reports them.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        match self.outcome(http::StatusCode::OK) {
            Outcome::Finished(usage) => usage,
            _ => None,
        }
    }
}

/// The keys on the paths of the needed fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Other,
    MetaInfo,
    Usage,
    Prompt,
    Completion,
    Cached,
    CachedExcluded,
    Details,
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
            b"prompt_tokens" | b"input_tokens" => Self::Prompt,
            b"completion_tokens" | b"output_tokens" => Self::Completion,
            b"cached_tokens" => Self::Cached,
            b"cache_read_input_tokens" => Self::CachedExcluded,
            b"prompt_tokens_details" | b"input_tokens_details" => Self::Details,
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

/// The state inside a JSON value: the path of keys. Arrays don't appear in the path.
#[derive(Debug, Default)]
struct Json {
    /// The open containers, at most [`DEPTH_MAX`].
    stack: Vec<Level>,
    /// The number of open containers beyond [`DEPTH_MAX`].
    skipped_depth: usize,
    token: Token,
    /// Whether the root value has ended.
    complete: bool,
}

#[derive(Debug, Clone, Copy)]
struct Level {
    object: bool,
    /// The current key, if this is an object.
    key: Key,
    /// Whether the next string is a key.
    at_key: bool,
}

#[derive(Debug, Default)]
enum Token {
    #[default]
    None,
    String {
        escaped: bool,
        text: Text,
    },
    Number {
        value: Option<u64>,
    },
}

/// The start of a string, long enough to recognize the known ones.
#[derive(Debug, Default)]
struct Text {
    bytes: [u8; TEXT_MAX],
    len: usize,
}

impl Text {
    fn push(&mut self, bytes: &[u8]) {
        let room = &mut self.bytes[self.len.min(TEXT_MAX)..];
        let take = bytes.len().min(room.len());
        room[..take].copy_from_slice(&bytes[..take]);
        self.len = self.len.saturating_add(bytes.len());
    }

    /// Returns the text; empty if it was too long to be a known one.
    fn get(&self) -> &[u8] {
        if self.len <= TEXT_MAX { &self.bytes[..self.len] } else { b"" }
    }
}

impl Json {
    fn push(&mut self, bytes: &[u8], found: &mut Findings) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let used = match &mut self.token {
                Token::String { escaped, text } => {
                    let (used, ended) = skip_string(rest, escaped, text);
                    if ended {
                        self.end_string(found);
                    }
                    used
                }
                Token::Number { value } => {
                    let digits = rest.iter().position(|byte| !byte.is_ascii_digit());
                    for digit in &rest[..digits.unwrap_or(rest.len())] {
                        *value = value.and_then(|so_far| {
                            so_far.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
                        });
                    }
                    match digits.map(|at| rest[at]) {
                        Some(b'.' | b'e' | b'E' | b'+' | b'-') => *value = None,
                        Some(_) => self.end_number(found),
                        None => {}
                    }
                    // Characters of a number other than digits are consumed; the character after it
                    // is not.
                    let inside = matches!(self.token, Token::Number { .. });
                    digits.map_or(rest.len(), |at| at + usize::from(inside))
                }
                Token::None => {
                    self.push_structural(rest[0], found);
                    1
                }
            };
            rest = &rest[used..];
        }
    }

    fn push_structural(&mut self, byte: u8, found: &mut Findings) {
        match byte {
            b'{' | b'[' => {
                if byte == b'{' && self.path_is(&[Key::Error]) {
                    found.error = true;
                }
                if self.stack.len() < DEPTH_MAX {
                    let object = byte == b'{';
                    self.stack.push(Level { object, key: Key::Other, at_key: object });
                } else {
                    self.skipped_depth += 1;
                }
            }
            b'}' | b']' => {
                if self.skipped_depth > 0 {
                    self.skipped_depth -= 1;
                } else {
                    self.stack.pop();
                    self.complete |= self.stack.is_empty();
                }
            }
            b'"' => self.token = Token::String { escaped: false, text: Text::default() },
            b'0'..=b'9' => {
                self.token = Token::Number { value: Some(u64::from(byte - b'0')) };
            }
            b'-' => self.token = Token::Number { value: None },
            b',' if self.skipped_depth == 0 => {
                if let Some(level) = self.stack.last_mut() {
                    level.at_key = level.object;
                }
            }
            _ => {}
        }
    }

    fn end_string(&mut self, found: &mut Findings) {
        let Token::String { text, .. } = std::mem::take(&mut self.token) else { return };
        if self.skipped_depth > 0 {
            return;
        }
        let Some(level) = self.stack.last_mut() else { return };
        if level.at_key {
            level.key = Key::from_text(text.get());
            level.at_key = false;
            return;
        }
        let text = text.get();
        if self.path_is(&[Key::MetaInfo, Key::FinishReason, Key::Type])
            || self.path_is(&[Key::Choices, Key::FinishReason])
        {
            found.aborted |= text == b"abort";
        } else if self.path_is(&[Key::MetaInfo, Key::FinishReason, Key::Message]) {
            found.queued_abort |= text == b"Abort in waiting queue";
        } else if self.path_is(&[Key::Type]) {
            found.ended |= matches!(
                text,
                b"message_stop"
                    | b"response.completed"
                    | b"response.failed"
                    | b"response.incomplete"
            );
        }
    }

    fn end_number(&mut self, found: &mut Findings) {
        let Token::Number { value } = std::mem::take(&mut self.token) else { return };
        let Some(value) = value.filter(|_| self.skipped_depth == 0) else { return };
        if self.path_is(&[Key::MetaInfo, Key::FinishReason, Key::StatusCode]) {
            found.abort_status = Some(value);
            return;
        }
        let mut path = self.path();
        // The Responses and Messages APIs wrap the object with the usage when they stream.
        let wrapped = matches!(path.first(), Some(Key::Response | Key::Message));
        if wrapped {
            path.remove(0);
        }
        match path.as_slice() {
            [Key::MetaInfo | Key::Usage, Key::Prompt] => found.prompt = Some(value),
            [Key::MetaInfo | Key::Usage, Key::Completion] => found.completion = Some(value),
            [Key::Usage, Key::CachedExcluded] => found.cached_excluded = Some(value),
            [Key::MetaInfo | Key::Usage, Key::Cached] | [Key::Usage, Key::Details, Key::Cached] => {
                found.cached = Some(value)
            }
            [Key::MetaInfo, Key::Retractions] => found.retractions = value,
            _ => {}
        }
    }

    fn path(&self) -> Vec<Key> {
        self.stack.iter().filter(|level| level.object).map(|level| level.key).collect()
    }

    fn path_is(&self, wanted: &[Key]) -> bool {
        self.skipped_depth == 0
            && self
                .stack
                .iter()
                .filter(|level| level.object)
                .map(|level| level.key)
                .eq(wanted.iter().copied())
    }
}

/// Consumes a part of a string. Returns the bytes used and whether the string ended.
fn skip_string(bytes: &[u8], escaped: &mut bool, text: &mut Text) -> (usize, bool) {
    if *escaped {
        *escaped = false;
        // The known keys and words have no escapes. The backslash makes sure that this text
        // differs.
        text.push(b"\\");
        return (1, false);
    }
    let plain = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\'));
    let content = &bytes[..plain.unwrap_or(bytes.len())];
    text.push(content);
    match plain {
        None => (bytes.len(), false),
        Some(at) => {
            *escaped = bytes[at] == b'\\';
            (at + 1, bytes[at] == b'"')
        }
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
        let mut terminal = false;
        let mut from = 0;
        for &cut in cuts.iter().chain([&text.len()]) {
            let cut = cut.clamp(from, text.len());
            terminal = scanner.push(&text.as_bytes()[from..cut]);
            from = cut;
        }
        (scanner.outcome(StatusCode::OK), terminal)
    }

    /// Responses in the forms of SGLang 0.5.23, with decoys in their texts and tool arguments.
    fn answers() -> Vec<(Option<&'static [u8]>, &'static str, Outcome)> {
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
        fn chunk_borders_do_not_matter(at in 0..11_usize, mut cuts in prop::collection::vec(0..700_usize, 0..12)) {
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
