//! Merges the log probabilities of a prompt into the decode engine's answer. Pure.
//!
//! With prefill/decode disaggregation, only the prefill engine's answer has the log probabilities
//! of the prompt, for which a client of `/generate` asks with `return_logprob` and
//! `logprob_start_len`. They stand in `meta_info`, in every event of a stream. They are inserted
//! before the decode engine's own there. No other byte changes.

use bytes::{Bytes, BytesMut};
use contract::{
    body::{Member, Object},
    route::Kind,
};
use memchr::memmem;

const KEYS: [&str; 3] = ["input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"];
/// The most bytes of an answer or event that are held back. What is longer passes unmerged.
const HELD_BYTES_MAX: usize = 64 << 20;

pub(in crate::turn) fn wants_input_logprobs(kind: Kind, body: &Object<'_>) -> bool {
    let text = |key| body.get(key).map(|value| value.get());
    let is_from_prompt = |start: &str| !matches!(start, "null" | "-1");
    kind == Kind::Generate
        && text("return_logprob") == Some("true")
        && text("logprob_start_len").is_some_and(is_from_prompt)
}

/// Such requests ask for log probabilities of their prompt in a form that isn't merged.
pub(in crate::turn) fn echoes_logprobs(kind: Kind, body: &Object<'_>) -> bool {
    let text = |key| body.get(key).map(|value| value.get());
    let is_asked = |value: &str| !matches!(value, "null" | "false");
    kind == Kind::Completions
        && text("echo") == Some("true")
        && text("logprobs").is_some_and(is_asked)
}

pub(in crate::turn) fn has_error(answer: &[u8]) -> bool {
    objects(answer).any(is_error)
}

/// Returns the JSON objects in an answer: itself, or the data of its events.
fn objects(answer: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = Some(answer).filter(|answer| answer.first() == Some(&b'{'));
    let stream = if whole.is_some() { &[][..] } else { answer };
    whole.into_iter().chain(events(stream).filter_map(data_of))
}

fn is_error(object: &[u8]) -> bool {
    let Ok(object) = Object::parse(object) else { return false };
    let text = |key| object.get(key).map(|value| value.get());
    let is_error_kind = matches!(text("type"), Some("\"error\"" | "\"response.failed\""))
        || text("object") == Some("\"error\"");
    if is_error_kind || text("error").is_some_and(|error| error != "null") {
        return true;
    }
    let is_aborted = || {
        let meta = Object::parse(text("meta_info")?.as_bytes()).ok()?;
        let reason = Object::parse(meta.get("finish_reason")?.get().as_bytes()).ok()?;
        Some(reason.get("type")?.get() == "\"abort\"")
    };
    is_aborted().unwrap_or(false)
}

/// JSON values by key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::turn) struct PromptLogprobs(Vec<(&'static str, String)>);

impl PromptLogprobs {
    pub(in crate::turn) fn find(answer: &[u8]) -> Option<Self> {
        objects(answer).find_map(|object| {
            let object = Object::parse(object).ok()?;
            let meta = Object::parse(object.get("meta_info")?.get().as_bytes()).ok()?;
            let value = |key| Some((key, meta.get(key)?.get().to_owned()));
            let found: Vec<_> =
                KEYS.into_iter().filter_map(value).filter(|(_, value)| !is_empty(value)).collect();
            (!found.is_empty()).then_some(Self(found))
        })
    }

    fn merge_into(&self, text: &[u8]) -> Option<Vec<u8>> {
        let object = Object::parse(text).ok()?;
        let last = |members: &[Member<'_>], key: &str| {
            members.iter().rev().find(|member| member.key == key).map(Member::range)
        };
        let meta_range = last(object.members(), "meta_info")?;
        let meta_text = &text[meta_range.clone()];
        let meta = Object::parse(meta_text).ok()?;
        let mut changes = vec![];
        let mut is_first = meta.members().is_empty();
        for (key, prompt) in &self.0 {
            match last(meta.members(), key) {
                Some(range) => {
                    let own = std::str::from_utf8(&meta_text[range.clone()]).ok()?;
                    changes.push((range, join(prompt, own)));
                }
                None => {
                    let end = meta_text.len() - 1;
                    let comma = if is_first { "" } else { "," };
                    is_first = false;
                    changes.push((end..end, format!(r#"{comma}"{key}":{prompt}"#)));
                }
            }
        }
        changes.sort_by_key(|(range, _)| range.start);
        let mut merged = Vec::with_capacity(text.len() + 64);
        let mut copied = 0;
        for (range, replacement) in changes {
            let (start, end) = (meta_range.start + range.start, meta_range.start + range.end);
            merged.extend_from_slice(&text[copied..start]);
            merged.extend_from_slice(replacement.as_bytes());
            copied = end;
        }
        merged.extend_from_slice(&text[copied..]);
        Some(merged)
    }
}

#[derive(Debug)]
pub(in crate::turn) struct LogprobMerger {
    logprobs: PromptLogprobs,
    is_stream: bool,
    held: BytesMut,
}

impl LogprobMerger {
    pub(in crate::turn) fn new(logprobs: PromptLogprobs, is_stream: bool) -> Self {
        Self { logprobs, is_stream, held: BytesMut::new() }
    }

    pub(in crate::turn) fn push(&mut self, data: &[u8]) -> Bytes {
        self.held.extend_from_slice(data);
        if self.held.len() > HELD_BYTES_MAX {
            return self.held.split().freeze();
        }
        if !self.is_stream {
            return Bytes::new();
        }
        let mut merged = BytesMut::new();
        while let Some(end) = memmem::find(&self.held, b"\n\n") {
            let event = self.held.split_to(end + 2);
            merged.extend_from_slice(&self.merge_event(&event));
        }
        merged.freeze()
    }

    pub(in crate::turn) fn finish(self) -> Bytes {
        if self.is_stream {
            return self.held.freeze();
        }
        let merged = self.logprobs.merge_into(&self.held);
        merged.map_or_else(|| self.held.freeze(), Bytes::from)
    }

    fn merge_event(&self, event: &[u8]) -> Vec<u8> {
        let merge = || {
            let data = data_of(event)?;
            let start = data.as_ptr() as usize - event.as_ptr() as usize;
            let merged = self.logprobs.merge_into(data)?;
            Some([&event[..start], &merged, &event[start + data.len()..]].concat())
        };
        merge().unwrap_or_else(|| event.to_vec())
    }
}

fn events(stream: &[u8]) -> impl Iterator<Item = &[u8]> {
    let ends = memmem::find_iter(stream, b"\n\n").chain([stream.len()]);
    ends.scan(0, move |start, end| {
        let event = &stream[(*start).min(end)..end];
        *start = end + 2;
        Some(event)
    })
}

fn data_of(event: &[u8]) -> Option<&[u8]> {
    let mut lines = event.split(|byte| *byte == b'\n');
    let data = lines.find_map(|line| line.strip_prefix(b"data:"))?;
    Some(data.trim_ascii()).filter(|data| data.starts_with(b"{"))
}

fn is_empty(value: &str) -> bool {
    value == "null" || value.strip_prefix('[').is_some_and(|inside| inside.trim() == "]")
}

fn join(first: &str, second: &str) -> String {
    let inside = first.strip_suffix(']').zip(second.strip_prefix('['));
    match inside {
        Some((first, second)) if !is_empty(&format!("[{second}")) => format!("{first},{second}"),
        _ => first.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFILL: &str =
        r#"{"text":"a","meta_info":{"input_token_logprobs":[[null,1,null],[-0.50,2,null]],"x":1}}"#;

    fn merge(answer: &[u8], is_stream: bool, cut: usize) -> String {
        let logprobs = PromptLogprobs::find(PREFILL.as_bytes()).unwrap();
        let mut merger = LogprobMerger::new(logprobs, is_stream);
        let cut = cut.min(answer.len());
        let parts = [merger.push(&answer[..cut]), merger.push(&answer[cut..]), merger.finish()];
        String::from_utf8(parts.concat()).unwrap()
    }

    #[test]
    fn the_prompt_s_values_come_before_the_answer_s_and_no_other_byte_changes() {
        let prompt = "[null,1,null],[-0.50,2,null]";
        let cases = [
            (
                r#"{"m":1.50, "meta_info" : {"input_token_logprobs":[ ],"a":[1]} }"#,
                format!(
                    r#"{{"m":1.50, "meta_info" : {{"input_token_logprobs":[{prompt}],"a":[1]}} }}"#
                ),
            ),
            (
                r#"{"meta_info":{"input_token_logprobs":null}}"#,
                format!(r#"{{"meta_info":{{"input_token_logprobs":[{prompt}]}}}}"#),
            ),
            (
                r#"{"meta_info":{"input_token_logprobs":[[-1,3,null]]}}"#,
                format!(r#"{{"meta_info":{{"input_token_logprobs":[{prompt},[-1,3,null]]}}}}"#),
            ),
            (
                r#"{"meta_info":{"a":1}}"#,
                format!(r#"{{"meta_info":{{"a":1,"input_token_logprobs":[{prompt}]}}}}"#),
            ),
            (
                r#"{"meta_info":{}}"#,
                format!(r#"{{"meta_info":{{"input_token_logprobs":[{prompt}]}}}}"#),
            ),
            (r#"{"error":"no meta_info"}"#, r#"{"error":"no meta_info"}"#.to_owned()),
            ("not JSON", "not JSON".to_owned()),
        ];
        for (answer, want) in cases {
            for cut in 0..=answer.len() {
                assert_eq!(merge(answer.as_bytes(), false, cut), want, "cut at {cut}");
                let stream = format!("id: 1\ndata: {answer}\n\ndata: [DONE]\n\n");
                let want = format!("id: 1\ndata: {want}\n\ndata: [DONE]\n\n");
                assert_eq!(merge(stream.as_bytes(), true, cut), want, "cut at {cut}");
            }
        }
    }

    #[test]
    fn an_answer_without_values_of_the_prompt_merges_nothing() {
        for answer in
            ["", "{", "{}", r#"{"meta_info":{"input_token_logprobs":[]}}"#, "data: [DONE]\n\n"]
        {
            assert_eq!(PromptLogprobs::find(answer.as_bytes()), None, "{answer}");
        }
        let stream = format!("data: {PREFILL}\n\ndata: [DONE]\n\n");
        let whole = PromptLogprobs::find(PREFILL.as_bytes());
        assert!(whole.is_some() && PromptLogprobs::find(stream.as_bytes()) == whole);
    }

    #[test]
    fn several_values_fit_into_an_answer_that_has_none() {
        let both = r#"{"meta_info":{"input_token_logprobs":[1],"input_top_logprobs":[2]}}"#;
        let logprobs = PromptLogprobs::find(both.as_bytes()).unwrap();
        let merged = logprobs.merge_into(br#"{"meta_info":{}}"#).unwrap();
        assert_eq!(String::from_utf8(merged).unwrap(), both);
    }

    #[test]
    fn only_a_request_for_the_prompt_s_values_is_merged() {
        let asks = |body: &str| {
            wants_input_logprobs(Kind::Generate, &Object::parse(body.as_bytes()).unwrap())
        };
        assert!(asks(r#"{"return_logprob":true,"logprob_start_len":0}"#));
        for body in [
            "{}",
            r#"{"return_logprob":true}"#,
            r#"{"return_logprob":true,"logprob_start_len":-1}"#,
            r#"{"return_logprob":false,"logprob_start_len":0}"#,
        ] {
            assert!(!asks(body), "{body}");
        }
        let echoes = |body: &str| {
            echoes_logprobs(Kind::Completions, &Object::parse(body.as_bytes()).unwrap())
        };
        assert!(echoes(r#"{"echo":true,"logprobs":1}"#));
        assert!(!echoes(r#"{"echo":true}"#) && !echoes(r#"{"echo":true,"logprobs":null}"#));
    }

    #[test]
    fn an_error_in_a_stream_is_a_failure_and_an_answer_is_none() {
        let failed = [
            r#"{"error":{"message":"no"}}"#,
            r#"{"object":"error","message":"no"}"#,
            r#"{"type":"error","error":{}}"#,
            r#"{"meta_info":{"finish_reason":{"type":"abort","message":"no"}}}"#,
        ];
        for text in failed {
            assert!(is_error(text.as_bytes()), "{text}");
            let stream = format!(": comment\n\nevent: error\ndata: {text}\n\n");
            assert!(has_error(stream.as_bytes()) && has_error(text.as_bytes()), "{text}");
        }
        let done = [
            r#"{"error":null,"status":"completed"}"#,
            r#"{"meta_info":{"finish_reason":{"type":"length","length":1}}}"#,
            r#"{"meta_info":{"finish_reason":null}}"#,
            "{",
        ];
        for text in done {
            assert!(!is_error(text.as_bytes()), "{text}");
        }
    }
}
