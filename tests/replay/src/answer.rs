//! Reads the answers of both APIs, streamed or not, into one form (a pure module).
//!
//! A stream has ended properly only with `[DONE]`. An abort inside a 200 is an error, whatever the
//! status.

use crate::dialog::AnswerContent;
use crate::options::Api;
use serde::Deserialize;

/// Why an answer failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerFailure {
    /// The answer ended without its proper end.
    Truncated,
    /// The engine aborted the turn inside a 200.
    Aborted,
    /// The answer carried an error object inside a 200.
    ErrorEvent,
    /// The answer doesn't have the API's format.
    Unreadable,
}

/// What one event or body added to the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerStep {
    /// No content or tokens, only a role, usage or a finish reason.
    Nothing,
    /// Content or tokens.
    Content,
    /// The proper end of the answer.
    Done,
}

/// An answer that is being received.
#[derive(Debug)]
pub struct ReplayAnswer {
    api: Api,
    text: String,
    ids: Vec<u32>,
    prompt_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    contents: u64,
    done: bool,
}

/// An answer that ended properly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FinishedAnswer {
    /// The part of the answer that the conversation needs.
    pub reply: AnswerContent,
    /// The prompt tokens found in a cache, if the server reports them.
    pub cached_tokens: Option<u64>,
}

/// The fields of both APIs' events.
#[derive(Deserialize)]
struct Event {
    text: Option<String>,
    output_ids: Option<Vec<u32>>,
    meta_info: Option<MetaInfo>,
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct MetaInfo {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    finish_reason: Option<FinishReason>,
}

#[derive(Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(alias = "message")]
    delta: Option<Message>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

impl ReplayAnswer {
    /// Creates an empty answer.
    pub fn new(api: Api) -> Self {
        Self {
            api,
            text: String::new(),
            ids: Vec::new(),
            prompt_tokens: None,
            output_tokens: None,
            cached_tokens: None,
            contents: 0,
            done: false,
        }
    }

    /// Reads the data of one event, or the `[DONE]` after the last event.
    pub fn read_event(&mut self, data: &[u8]) -> Result<AnswerStep, AnswerFailure> {
        if data == b"[DONE]" {
            self.done = true;
            return Ok(AnswerStep::Done);
        }
        let event: Event = serde_json::from_slice(data).map_err(|_| AnswerFailure::Unreadable)?;
        if event.error.is_some() {
            return Err(AnswerFailure::ErrorEvent);
        }
        let before = self.contents;
        match self.api {
            Api::Generate => self.read_generate(event)?,
            Api::Chat => self.read_chat(event)?,
        }
        Ok(if self.contents > before { AnswerStep::Content } else { AnswerStep::Nothing })
    }

    /// Reads the complete body of an answer that isn't streamed.
    pub fn read_body(&mut self, data: &[u8]) -> Result<(), AnswerFailure> {
        self.read_event(data)?;
        self.done = true;
        Ok(())
    }

    /// Returns the answer, if it has ended properly.
    pub fn finish(self) -> Result<FinishedAnswer, AnswerFailure> {
        if !self.done {
            return Err(AnswerFailure::Truncated);
        }
        let known = (self.ids.len() as u64).max(self.contents);
        let reply = AnswerContent {
            text: self.text,
            ids: self.ids,
            prompt_tokens: self.prompt_tokens.unwrap_or(0),
            output_tokens: self.output_tokens.unwrap_or(known),
        };
        Ok(FinishedAnswer { reply, cached_tokens: self.cached_tokens })
    }

    fn read_generate(&mut self, event: Event) -> Result<(), AnswerFailure> {
        let meta = event.meta_info.ok_or(AnswerFailure::Unreadable)?;
        if meta.finish_reason.is_some_and(|reason| reason.kind == "abort") {
            return Err(AnswerFailure::Aborted);
        }
        self.prompt_tokens = meta.prompt_tokens.or(self.prompt_tokens);
        self.cached_tokens = meta.cached_tokens.or(self.cached_tokens);
        let before = self.output_tokens.unwrap_or(0);
        self.output_tokens = meta.completion_tokens.or(self.output_tokens);
        let total = self.output_tokens.unwrap_or(0);
        let ids = event.output_ids.unwrap_or_default();
        // Events carry either all ids so far or only the new ones, depending on a server option.
        // The number of ids equals the count of all tokens only in the first case.
        if ids.len() as u64 == total {
            self.ids = ids;
        } else {
            self.ids.extend(ids);
        }
        if let Some(text) = event.text {
            self.text = text;
        }
        self.contents += u64::from(total > before);
        Ok(())
    }

    fn read_chat(&mut self, event: Event) -> Result<(), AnswerFailure> {
        if let Some(usage) = event.usage {
            self.prompt_tokens = usage.prompt_tokens.or(self.prompt_tokens);
            self.output_tokens = usage.completion_tokens.or(self.output_tokens);
            let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
            self.cached_tokens = cached.or(self.cached_tokens);
        }
        let Some(choice) = event.choices.into_iter().next() else { return Ok(()) };
        if choice.finish_reason.as_deref() == Some("abort") {
            return Err(AnswerFailure::Aborted);
        }
        let Some(message) = choice.delta else { return Ok(()) };
        let content = message.content.unwrap_or_default();
        let reasoning = message.reasoning_content.unwrap_or_default();
        self.text.push_str(&content);
        self.contents += u64::from(!content.is_empty() || !reasoning.is_empty());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(api: Api, events: &[&str]) -> (Vec<AnswerStep>, Result<FinishedAnswer, AnswerFailure>) {
        let mut answer = ReplayAnswer::new(api);
        let mut steps = Vec::new();
        for event in events {
            match answer.read_event(event.as_bytes()) {
                Ok(step) => steps.push(step),
                Err(failure) => return (steps, Err(failure)),
            }
        }
        (steps, answer.finish())
    }

    #[test]
    fn generate_events_may_repeat_or_continue() {
        let last = r#"{"text":"abc","output_ids":[7,8,9],"meta_info":{"prompt_tokens":5,
            "completion_tokens":3,"cached_tokens":4,"finish_reason":{"type":"length"}}}"#;
        let first = r#"{"text":"a","output_ids":[7],"meta_info":{"completion_tokens":1,
            "finish_reason":null}}"#;
        let (steps, repeated) = read(Api::Generate, &[first, last, "[DONE]"]);
        assert_eq!(steps, [AnswerStep::Content, AnswerStep::Content, AnswerStep::Done]);
        let rest = last.replace("[7,8,9]", "[8,9]");
        let (_, continued) = read(Api::Generate, &[first, &rest, "[DONE]"]);
        let finished = repeated.unwrap();
        assert_eq!(finished.reply.ids, [7, 8, 9]);
        assert_eq!(finished.cached_tokens, Some(4));
        assert_eq!((finished.reply.prompt_tokens, finished.reply.output_tokens), (5, 3));
        assert_eq!(continued.unwrap().reply.ids, [7, 8, 9]);
    }

    #[test]
    fn chat_events_carry_text_and_usage() {
        let events = [
            r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{"content":"he"},"finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"delta":{"content":"y"},"finish_reason":"length"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,
                "prompt_tokens_details":{"cached_tokens":8}}}"#,
            "[DONE]",
        ];
        let (steps, finished) = read(Api::Chat, &events);
        use AnswerStep::{Content, Done, Nothing};
        assert_eq!(steps, [Nothing, Content, Content, Nothing, Done]);
        let finished = finished.unwrap();
        assert_eq!((finished.reply.text.as_str(), finished.cached_tokens), ("hey", Some(8)));
        let (_, cut) = read(Api::Chat, &events[..4]);
        assert_eq!(cut, Err(AnswerFailure::Truncated));
    }

    #[test]
    fn failures_inside_a_200_are_seen() {
        let abort = r#"{"text":"!","output_ids":[1],"meta_info":{"completion_tokens":1,
            "finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}"#;
        assert_eq!(read(Api::Generate, &[abort]).1, Err(AnswerFailure::Aborted));
        let error = r#"{"error":{"message":"no","code":400}}"#;
        assert_eq!(read(Api::Generate, &[error]).1, Err(AnswerFailure::ErrorEvent));
        assert_eq!(read(Api::Chat, &[error]).1, Err(AnswerFailure::ErrorEvent));
        assert_eq!(read(Api::Chat, &["<html>"]).1, Err(AnswerFailure::Unreadable));
        assert_eq!(read(Api::Chat, &[r#"{"choices":[]}"#]).1, Err(AnswerFailure::Truncated));
    }

    #[test]
    fn a_whole_body_is_read_like_an_event() {
        let mut answer = ReplayAnswer::new(Api::Chat);
        let body = br#"{"choices":[{"message":{"content":"hey"},"finish_reason":"stop"}],
            "usage":{"prompt_tokens":4,"completion_tokens":3}}"#;
        answer.read_body(body).unwrap();
        let finished = answer.finish().unwrap();
        assert_eq!((finished.reply.text.as_str(), finished.reply.output_tokens), ("hey", 3));
    }
}
