//! Reads the beginning of a turn's prompt, as hashes of its first content blocks.
//!
//! A *block* here is a content block of a message or of the system prompt, not a block of KV. The
//! order is `tools`, then `system` or `instructions`, then the first messages. On routes without
//! messages, the prompt has no blocks.

use std::fmt;

use contract::{body::Object, load::PromptRole, route::Kind};
use serde::{
    Deserializer,
    de::{SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::session::{BLOCKS_MAX, PromptStart};

pub(super) fn read_prompt_start(kind: Kind, object: &Object<'_>) -> PromptStart {
    let mut start = PromptStart::default();
    let system_part = match kind {
        Kind::Messages => Some(("system", PromptRole::System)),
        Kind::Responses => Some(("instructions", PromptRole::Instructions)),
        Kind::Chat => None,
        _ => return start,
    };
    let get_non_null = |key| object.get(key).filter(|value| value.get() != "null");
    if kind == Kind::Responses && get_non_null("previous_response_id").is_some() {
        return PromptStart::continued();
    }
    if let Some(tools) = get_non_null("tools") {
        start.push(PromptRole::Tools, 0, 0, &[tools.get().as_bytes()]);
    }
    if let Some((key, role)) = system_part
        && let Some(content) = get_non_null(key)
    {
        push_content(&mut start, role, 0, content);
    }
    let messages_key = if kind == Kind::Responses { "input" } else { "messages" };
    match get_non_null(messages_key) {
        Some(list) if list.get().starts_with('[') => push_messages(&mut start, list),
        Some(input) => push_content(&mut start, PromptRole::User, 0, input),
        None => {}
    }
    start
}

fn push_messages(start: &mut PromptStart, list: &RawValue) {
    visit_elements(list, |message_number, message| {
        let object = Object::parse(message.get().as_bytes()).ok();
        let get = |key| object.as_ref().and_then(|object| object.get(key));
        let role = parse_role(get("role").map(RawValue::get));
        match get("content").filter(|content| content.get() != "null") {
            Some(content) => push_content(start, role, message_number, content),
            // An assistant's message that only calls a tool is one block, for example.
            None => push_block(start, role, (message_number, 0), message),
        }
        !start.is_full()
    });
}

fn push_content(
    start: &mut PromptStart,
    role: PromptRole,
    message_number: usize,
    content: &RawValue,
) {
    if !content.get().starts_with('[') {
        return push_block(start, role, (message_number, 0), content);
    }
    visit_elements(content, |block_number, block| {
        push_block(start, role, (message_number, block_number), block);
        !start.is_full()
    });
}

/// Two forms that give the engine the same prompt get the same hash. Clients move `cache_control`
/// from block to block between turns, and write the same text as a string or as a block.
fn push_block(
    start: &mut PromptStart,
    role: PromptRole,
    (message_number, block_number): (usize, usize),
    block: &RawValue,
) {
    let object = Object::parse(block.get().as_bytes()).ok();
    let text = object.as_ref().and_then(|object| object.get("text"));
    let parts: Vec<&[u8]> = match (&object, text) {
        (Some(object), None) => {
            let members = object.members().iter();
            let hashed_members = members.filter(|member| member.key != "cache_control");
            hashed_members
                .flat_map(|member| [member.key.as_bytes(), member.value.get().as_bytes()])
                .collect()
        }
        (_, text) => vec![text.unwrap_or(block).get().as_bytes()],
    };
    start.push(role, message_number, block_number, &parts);
}

fn parse_role(name: Option<&str>) -> PromptRole {
    match name {
        Some(r#""system""#) => PromptRole::System,
        Some(r#""developer""#) => PromptRole::Developer,
        Some(r#""user""#) => PromptRole::User,
        Some(r#""assistant""#) => PromptRole::Assistant,
        Some(r#""tool""#) => PromptRole::Tool,
        _ => PromptRole::Other,
    }
}

/// The rest after [`BLOCKS_MAX`] is not parsed, so a long history costs no more time than a short
/// one.
fn visit_elements<'a>(list: &'a RawValue, visit: impl FnMut(usize, &'a RawValue) -> bool) {
    // The whole body was parsed before, so the only possible error is that `visit` stopped early.
    let _ = serde_json::Deserializer::from_str(list.get()).deserialize_seq(ElementVisitor(visit));
}

struct ElementVisitor<F>(F);

impl<'de, F: FnMut(usize, &'de RawValue) -> bool> Visitor<'de> for ElementVisitor<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        for number in 0..BLOCKS_MAX {
            match list.next_element()? {
                Some(element) if (self.0)(number, element) => {}
                _ => break,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn start(kind: Kind, body: &Value) -> PromptStart {
        let bytes = body.to_string();
        read_prompt_start(kind, &Object::parse(bytes.as_bytes()).unwrap())
    }

    #[test]
    fn a_moved_cache_control_and_a_string_for_a_list_are_no_difference() {
        let as_list = json!({
            "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "t", "name": "ls", "input": {}, "cache_control": {}}]},
            ],
        });
        let as_text = json!({
            "system": "You help.",
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "t", "name": "ls", "input": {}}]},
            ],
        });
        let (list, text) = (start(Kind::Messages, &as_list), start(Kind::Messages, &as_text));
        assert_eq!(list, text);
        assert_ne!(text, PromptStart::default());
    }

    #[test]
    fn every_part_that_comes_early_is_seen() {
        let chat = |tool: &str, system: &str, user: &str, call: &str| {
            let messages = json!([
                {"role": "system", "content": system},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": user}]},
                {"role": "assistant", "content": null, "tool_calls": [{"id": call}]},
            ]);
            start(Kind::Chat, &json!({"tools": [{"name": tool}], "messages": messages}))
        };
        let responses = |instructions: &str, text: &str| {
            let input =
                json!([{"role": "user", "content": [{"type": "input_text", "text": text}]}]);
            start(Kind::Responses, &json!({"instructions": instructions, "input": input}))
        };
        let base = chat("t", "s", "u", "c");
        assert_eq!(base, chat("t", "s", "u", "c"));
        for other in [
            chat("T", "s", "u", "c"),
            chat("t", "S", "u", "c"),
            chat("t", "s", "U", "c"),
            chat("t", "s", "u", "C"),
        ] {
            assert_ne!(base, other);
        }
        assert_ne!(responses("i", "t"), responses("I", "t"));
        assert_ne!(responses("i", "t"), responses("i", "T"));
        let rest = json!({"previous_response_id": "resp_1", "input": "a"});
        assert_eq!(start(Kind::Responses, &rest), PromptStart::continued());
        let plain = |text: &str| start(Kind::Responses, &json!({"input": text}));
        assert_ne!(plain("a"), plain("b"));
    }

    #[test]
    fn only_the_beginning_of_a_long_body_is_kept_and_no_body_fails() {
        let many = |count: usize| {
            let block = |number| json!({"type": "text", "text": format!("block {number}")});
            let blocks: Vec<Value> = (0..count).map(block).collect();
            let message = json!({"role": "user", "content": blocks});
            start(Kind::Messages, &json!({"messages": vec![message; count]}))
        };
        assert_eq!(many(17), many(400));
        assert!(many(17).is_full());
        for odd in [json!({}), json!({"messages": 1}), json!({"messages": [1, null, [], {}]})] {
            for kind in [Kind::Chat, Kind::Messages, Kind::Responses] {
                start(kind, &odd);
            }
        }
        let text = json!({"text": "a", "messages": [{"role": "user", "content": "x"}]});
        assert_eq!(start(Kind::Generate, &text), PromptStart::default());
    }
}
