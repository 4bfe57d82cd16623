//! Turns one conversation into request bodies (a pure module).
//!
//! A full-history prompt consists of the trace's tokens. With `echo`, the engine's real answers
//! replace the trace's answers, as with real clients. A pinned session receives only the tokens
//! after those that the engine has committed. If a prompt keeps less than half of the previous
//! prompt (the trace authors' criterion of a compaction), the session is reopened. A smaller
//! rewrite can't be expressed in an append-only session; it is sent as the same number of appended
//! tokens. If the trace has words, chat messages use them; scaling keeps the beginning of each
//! message.

use crate::options::{Api, ReplayOptions};
use crate::synth::{self, Salt};
use crate::trace::{Conversation, HistoryChange, TraceTurn, TurnWords};
use std::fmt::Write as _;
use std::sync::Arc;

/// A request to send.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The JSON body.
    pub body: String,
    /// Whether the session must be closed and reopened before this request.
    pub reopen: bool,
}

/// The part of an answer that the conversation needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerContent {
    /// The text, for the chat API.
    pub text: String,
    /// The token ids, if the API returns them.
    pub ids: Vec<u32>,
    /// The tokens of the full prompt, as counted by the engine.
    pub prompt_tokens: u64,
    /// The tokens of the answer, as counted by the engine.
    pub output_tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    System,
    User,
    Assistant,
}

/// A message: a range of the prompt's tokens, or words instead.
#[derive(Debug, Clone)]
struct Message {
    role: Role,
    start: u64,
    end: u64,
    words: Option<String>,
}

/// A real answer that replaces the trace's tokens from position `start` on.
#[derive(Debug, Clone)]
struct Patch {
    start: u64,
    ids: Vec<u32>,
}

/// The state of a conversation.
#[derive(Debug)]
pub struct Dialog {
    conversation: Arc<Conversation>,
    style: Arc<ReplayOptions>,
    salt: Salt,
    /// The index of the last turn sent, and its answer.
    last: Option<(usize, Option<AnswerContent>)>,
    messages: Vec<Message>,
    patches: Vec<Patch>,
    /// The tokens that the engine holds for the pinned session; 0 for a new session.
    committed: u64,
}

impl Dialog {
    /// Creates the state before the first turn.
    pub fn new(conversation: Arc<Conversation>, style: Arc<ReplayOptions>, salt: Salt) -> Self {
        let (messages, patches) = (Vec::new(), Vec::new());
        Self { conversation, style, salt, last: None, messages, patches, committed: 0 }
    }

    /// Returns the request for turn `index`. Must be called for the turns in order.
    pub fn request(&mut self, index: usize) -> Request {
        let conversation = Arc::clone(&self.conversation);
        let turn = &conversation.turns[index];
        if self.style.api == Api::Chat && !conversation.words.is_empty() {
            self.add_words(&conversation.words[..=index]);
            return Request { body: self.chat_body(turn, &[]), reopen: false };
        }
        let symbols = synth::symbols(&conversation, turn, &self.style.shape, self.salt);
        let previous = self.last.take();
        let append = previous.map(|(last, reply)| {
            let before = &conversation.turns[last];
            let shared = synth::shared_prefix(&conversation, before, turn, &self.style.shape);
            (before, shared, reply)
        });
        self.last = Some((index, None));
        match self.style.api {
            Api::Generate => self.generate(turn, &symbols, append),
            Api::Chat => self.chat(turn, &symbols, append),
        }
    }

    /// Records the answer to the last requested turn.
    pub fn record_answer(&mut self, reply: AnswerContent) {
        self.committed = reply.prompt_tokens + reply.output_tokens;
        if let Some((_, slot)) = &mut self.last {
            *slot = Some(reply);
        }
    }

    /// Adds the last turn's words, and before them the answer to the previous turn.
    fn add_words(&mut self, words: &[TurnWords]) {
        let index = words.len() - 1;
        let answered = self.last.replace((index, None)).and_then(|(_, reply)| reply);
        let message = |role, words: String| Message { role, start: 0, end: 0, words: Some(words) };
        match words[index].history {
            HistoryChange::Extended => {
                let trace = &words[index.saturating_sub(1)].answer;
                let answer = match (self.style.echo, answered) {
                    (true, reply) => reply.map(|reply| reply.text),
                    (false, _) => Some(self.scale_text(trace)),
                };
                self.messages.extend(answer.map(|text| message(Role::Assistant, text)));
            }
            HistoryChange::Repeated => return,
            HistoryChange::Replaced => self.messages.clear(),
        }
        self.messages.push(message(Role::User, self.scale_text(&words[index].text)));
    }

    /// Returns the beginning of a message, as long as the scale allows.
    fn scale_text(&self, text: &str) -> String {
        let characters = self.style.shape.tokens(text.chars().count() as u64);
        text.chars().take(usize::try_from(characters).unwrap_or(usize::MAX)).collect()
    }

    fn generate(
        &mut self,
        turn: &TraceTurn,
        symbols: &[u32],
        append: Option<(&TraceTurn, u64, Option<AnswerContent>)>,
    ) -> Request {
        let vocab = self.style.vocab;
        let first = append.is_none();
        // After a turn without an answer the session's history is unknown.
        let mut reopen = self.style.delta() && !first;
        if let Some((before, shared, reply)) = append {
            let before_tokens = self.style.shape.prompt_tokens(before);
            reopen &= reply.is_none() || shared * 2 < before_tokens || self.overflows(turn);
            self.update_patches(before_tokens, shared, reply);
        }
        let mut ids: Vec<u32> = symbols.iter().map(|s| synth::token(*s, vocab)).collect();
        for patch in &self.patches {
            let start = usize::try_from(patch.start).unwrap_or(usize::MAX).min(ids.len());
            let fitting = patch.ids.len().min(ids.len() - start);
            ids[start..start + fitting].copy_from_slice(&patch.ids[..fitting]);
        }
        let mut sent = ids.as_slice();
        if self.style.delta() && !first && !reopen {
            let committed = usize::try_from(self.committed).unwrap_or(usize::MAX);
            // Sends at least one token, because an engine refuses a turn that adds nothing.
            sent = &ids[committed.min(ids.len() - 1)..];
        }
        Request { body: self.generate_body(turn, sent), reopen }
    }

    /// Whether the prompt (at least the session's tokens and one new token) and the answer exceed
    /// the context.
    fn overflows(&self, turn: &TraceTurn) -> bool {
        let shape = &self.style.shape;
        let prompt = shape.prompt_tokens(turn).max(self.committed + 1);
        shape.context_tokens_max.is_some_and(|max| prompt + shape.output_tokens(turn) > max)
    }

    fn update_patches(&mut self, before_tokens: u64, shared: u64, reply: Option<AnswerContent>) {
        self.patches.retain_mut(|patch| {
            let kept = shared.saturating_sub(patch.start);
            patch.ids.truncate(usize::try_from(kept).unwrap_or(usize::MAX));
            kept > 0
        });
        if let (true, Some(reply)) = (self.style.echo && shared >= before_tokens, reply) {
            self.patches.push(Patch { start: before_tokens, ids: reply.ids });
        }
    }

    fn chat(
        &mut self,
        turn: &TraceTurn,
        symbols: &[u32],
        append: Option<(&TraceTurn, u64, Option<AnswerContent>)>,
    ) -> Request {
        let length = symbols.len() as u64;
        match append {
            Some((before, shared, reply)) => {
                let before_tokens = self.style.shape.prompt_tokens(before);
                if shared >= before_tokens {
                    let output = self.style.shape.output_tokens(before);
                    self.append_turn(before_tokens, output, length, reply);
                } else {
                    self.rewrite_messages(shared, length);
                }
            }
            None => self.rewrite_messages(0, length),
        }
        Request { body: self.chat_body(turn, symbols), reopen: false }
    }

    /// Adds the last answer and the client's next message.
    fn append_turn(&mut self, start: u64, output: u64, length: u64, reply: Option<AnswerContent>) {
        if length <= start {
            // The trace repeats its prompt, and the replay does the same.
            return;
        }
        let echoed = reply.filter(|_| self.style.echo).map(|reply| reply.text);
        let words = echoed.filter(|text| !text.is_empty());
        let end = (start + output).min(length.saturating_sub(1)).max(start);
        if end > start || words.is_some() {
            self.messages.push(Message { role: Role::Assistant, start, end, words });
        }
        self.messages.push(Message { role: Role::User, start: end, end: length, words: None });
    }

    /// Keeps the messages of the shared prefix and sends the rest as one user message.
    fn rewrite_messages(&mut self, shared: u64, length: u64) {
        self.messages.retain(|message| message.start < shared);
        if self.messages.is_empty() {
            let front = self.style.shape.tokens(self.conversation.shared.tokens);
            let end = front.min(length - 1);
            if end > 0 {
                self.messages.push(Message { role: Role::System, start: 0, end, words: None });
            }
        }
        let mut start = self.messages.last().map_or(0, |message| message.end);
        if let Some(last) = self.messages.last_mut() {
            if last.end > shared {
                last.words = None;
            }
            last.end = last.end.min(length);
            // The last message is always the user's, because the model answers a user message.
            if last.role == Role::User || last.end == length {
                start = last.start;
                self.messages.pop();
            }
        }
        self.messages.push(Message { role: Role::User, start, end: length, words: None });
    }

    fn generate_body(&self, turn: &TraceTurn, ids: &[u32]) -> String {
        let mut body = String::with_capacity(ids.len() * 4 + 200);
        body.push_str("{\"input_ids\":[");
        for (index, id) in ids.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(body, "{comma}{id}");
        }
        let _ = write!(
            body,
            "],\"sampling_params\":{{\"max_new_tokens\":{},\"temperature\":0,\
             \"ignore_eos\":{}}},\"stream\":{}}}",
            self.style.shape.output_tokens(turn),
            !self.style.stop_at_eos,
            self.style.stream,
        );
        body
    }

    fn chat_body(&self, turn: &TraceTurn, symbols: &[u32]) -> String {
        let mut body = format!("{{\"model\":{},\"messages\":[", json_string(&self.style.model));
        for (index, message) in self.messages.iter().enumerate() {
            let role = match message.role {
                Role::System => "system",
                Role::User => "user",
                Role::Assistant => "assistant",
            };
            let content = message.words.as_deref().map_or_else(
                || {
                    json_string(&synth::text(
                        message_symbols(symbols, message),
                        self.style.bytes_per_token,
                    ))
                },
                json_string,
            );
            let comma = if index == 0 { "" } else { "," };
            let _ = write!(body, "{comma}{{\"role\":\"{role}\",\"content\":{content}}}");
        }
        let output = self.style.shape.output_tokens(turn);
        let _ = write!(body, "],\"max_tokens\":{output},\"temperature\":0");
        if !self.style.stop_at_eos {
            // An extension of SGLang and vLLM; other servers may refuse the key.
            body.push_str(",\"ignore_eos\":true");
        }
        if self.style.stream {
            body.push_str(",\"stream\":true,\"stream_options\":{\"include_usage\":true}");
        }
        body.push('}');
        body
    }
}

fn message_symbols<'a>(symbols: &'a [u32], message: &Message) -> &'a [u32] {
    let end = usize::try_from(message.end).unwrap_or(usize::MAX).min(symbols.len());
    let start = usize::try_from(message.start).unwrap_or(usize::MAX).min(end);
    &symbols[start..end]
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::SessionOpen;
    use crate::shape::Shape;
    use crate::trace::{Blocks, Shared};
    use serde_json::Value;

    /// Returns a conversation with blocks of 10 tokens, 5 tokens of shared prefix, and answers of 4
    /// tokens.
    fn conversation(prompts: &[(&[u64], u64)]) -> Arc<Conversation> {
        let turn = |(ids, tokens): &(&[u64], u64)| TraceTurn {
            prompt_tokens: *tokens,
            output_tokens: 4,
            blocks: Blocks::from_ids(ids),
            ..TraceTurn::default()
        };
        Arc::new(Conversation {
            id: "c".to_owned(),
            block_tokens: 10,
            scope: Some(0),
            shared: Shared { stream: 0, tokens: 5 },
            turns: prompts.iter().map(turn).collect(),
            ..Conversation::default()
        })
    }

    fn dialog(api: Api, delta: bool, prompts: &[(&[u64], u64)]) -> Dialog {
        let style = ReplayOptions {
            api,
            shape: Shape { context_tokens_max: Some(100), ..Shape::default() },
            session_open: delta.then_some(SessionOpen::Pinned),
            ..ReplayOptions::default()
        };
        Dialog::new(conversation(prompts), Arc::new(style), Salt::default())
    }

    fn ids(request: &Request) -> Vec<u64> {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(body["stream"], true);
        assert_eq!(body["sampling_params"]["max_new_tokens"], 4);
        body["input_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    }

    fn messages(request: &Request) -> Vec<(String, String)> {
        let body: Value = serde_json::from_str(&request.body).unwrap();
        assert_eq!(
            (&body["max_tokens"], &body["stream_options"]["include_usage"]),
            (&Value::from(4), &Value::from(true))
        );
        let text = |message: &Value, key: &str| message[key].as_str().unwrap().to_owned();
        let messages = body["messages"].as_array().unwrap().iter();
        messages.map(|one| (text(one, "role"), text(one, "content"))).collect()
    }

    fn reply(text: &str, ids: &[u32], prompt_tokens: u64) -> AnswerContent {
        let output_tokens = ids.len() as u64;
        AnswerContent { text: text.to_owned(), ids: ids.to_vec(), prompt_tokens, output_tokens }
    }

    #[test]
    fn full_prompts_contain_the_real_answers() {
        let turns: &[(&[u64], u64)] = &[(&[1, 2], 20), (&[1, 2, 3], 30), (&[1, 9, 3], 30)];
        let mut dialog = dialog(Api::Generate, false, turns);
        let first = ids(&dialog.request(0));
        dialog.record_answer(reply("", &[900, 901, 902], 20));
        let second = ids(&dialog.request(1));
        assert_eq!(&second[..20], &first[..]);
        assert_eq!(&second[20..23], &[900, 901, 902]);
        assert_eq!(second.len(), 30);
        let third = ids(&dialog.request(2));
        assert_eq!(&third[..10], &first[..10]);
        assert_ne!(&third[10..20], &first[10..20], "rewritten from its second block on");
        assert!(!third.contains(&900), "a rewrite removes the answer echoed in it");
    }

    #[test]
    fn pinned_turns_carry_only_tokens_after_the_committed_ones() {
        let turns: &[(&[u64], u64)] =
            &[(&[1, 2], 20), (&[1, 2, 3], 30), (&[1, 2, 3], 30), (&[8], 10), (&[8, 9], 20)];
        let mut dialog = dialog(Api::Generate, true, turns);
        let whole = dialog.request(0);
        assert_eq!((ids(&whole).len(), whole.reopen), (20, false));
        dialog.record_answer(reply("", &[1, 2, 3, 4], 20));
        let appended = dialog.request(1);
        assert_eq!((ids(&appended).len(), appended.reopen), (30 - 24, false));
        dialog.record_answer(reply("", &[1, 2, 3, 4], 30));
        let least = dialog.request(2);
        assert_eq!((ids(&least).len(), least.reopen), (1, false), "the least turn sends one token");
        dialog.record_answer(reply("", &[1], 35));
        let compacted = dialog.request(3);
        assert_eq!((ids(&compacted).len(), compacted.reopen), (10, true));
        let unanswered = dialog.request(4);
        assert_eq!((ids(&unanswered).len(), unanswered.reopen), (20, true));
    }

    #[test]
    fn a_pinned_session_that_outgrows_the_context_is_reopened() {
        let mut dialog = dialog(Api::Generate, true, &[(&[1], 10), (&[1, 2], 20)]);
        dialog.request(0);
        dialog.record_answer(reply("", &[1], 97));
        let request = dialog.request(1);
        assert_eq!((ids(&request).len(), request.reopen), (20, true));
    }

    #[test]
    fn message_lists_extend_each_other() {
        let turns: &[(&[u64], u64)] = &[(&[1, 2], 20), (&[1, 2, 3], 30), (&[1, 2, 3, 4], 40)];
        let mut dialog = dialog(Api::Chat, false, turns);
        let first = messages(&dialog.request(0));
        let roles: Vec<&str> = first.iter().map(|(role, _)| role.as_str()).collect();
        assert_eq!(roles, ["system", "user"]);
        assert_eq!((first[0].1.len(), first[1].1.len()), (5, 15));
        dialog.record_answer(reply("said \"so\"", &[], 20));
        let second = messages(&dialog.request(1));
        assert_eq!(&second[..2], &first[..]);
        assert_eq!(second[2], ("assistant".to_owned(), "said \"so\"".to_owned()));
        assert_eq!(second[3].1.len(), 30 - 24);
        let third = messages(&dialog.request(2));
        assert_eq!(&third[..4], &second[..]);
        assert_eq!(third[4].1.len(), 4, "a missing answer is the trace's");
    }

    #[test]
    fn rewritten_histories_keep_the_shared_text_and_end_with_the_user() {
        let turns: &[(&[u64], u64)] = &[(&[1, 2], 20), (&[1, 2, 3], 30), (&[1, 7], 15), (&[1], 3)];
        let mut dialog = dialog(Api::Chat, false, turns);
        let first = messages(&dialog.request(0));
        dialog.record_answer(reply("yes", &[], 20));
        dialog.request(1);
        let rewritten = messages(&dialog.request(2));
        assert_eq!(rewritten[0], first[0]);
        assert_eq!(rewritten[1].1[..5], first[1].1[..5], "the first block is still the same");
        assert_eq!((rewritten.len(), rewritten[1].1.len()), (2, 10));
        let last = messages(&dialog.request(3));
        assert_eq!(last.last().unwrap().0, "user");
    }

    #[test]
    fn messages_in_words_alternate_with_the_real_answers() {
        let words = |history, text: &str| TurnWords {
            history,
            text: text.to_owned(),
            answer: "told".to_owned(),
        };
        let turns_words = vec![
            words(HistoryChange::Replaced, "abcdef"),
            words(HistoryChange::Extended, "gh"),
            words(HistoryChange::Repeated, ""),
            words(HistoryChange::Extended, ""),
            words(HistoryChange::Replaced, "ijk"),
        ];
        let play = |echo: bool| {
            let turns: [(&[u64], u64); 5] = [(&[1], 10); 5];
            let mut dialog = dialog(Api::Chat, false, &turns);
            let mut conversation = (*dialog.conversation).clone();
            conversation.words = turns_words.clone();
            // The answers' lengths are scaled like the words.
            conversation.turns.iter_mut().for_each(|turn| turn.output_tokens = 8);
            let mut style = (*dialog.style).clone();
            (style.echo, style.shape.scale) = (echo, 0.5);
            (dialog.conversation, dialog.style) = (Arc::new(conversation), Arc::new(style));
            let turn = |index| {
                let sent = messages(&dialog.request(index));
                dialog.record_answer(AnswerContent {
                    text: format!("real {index}"),
                    ..AnswerContent::default()
                });
                sent.iter().map(|(role, text)| format!("{} {text}", &role[..1])).collect()
            };
            (0..5).map(turn).collect::<Vec<Vec<String>>>()
        };
        let real = play(true);
        assert_eq!(real[0], ["u abc"]);
        assert_eq!(real[1], ["u abc", "a real 0", "u g"]);
        assert_eq!(real[2], real[1], "asked again");
        assert_eq!(real[3][2..], ["u g", "a real 2", "u "]);
        assert_eq!(real[4], ["u ij"]);
        assert_eq!(play(false)[1], ["u abc", "a to", "u g"]);
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        let turns: &[(&[u64], u64)] = &[(&[1, 2], 20)];
        for api in [Api::Generate, Api::Chat] {
            let make = || dialog(api, false, turns).request(0);
            assert_eq!(make(), make());
        }
    }
}
