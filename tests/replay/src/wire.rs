//! Parses the JSON forms of a trace into conversations (a pure module).
//!
//! The form with words is parsed by `texts`. An error names the place inside the record; `load`
//! adds file and line.

use crate::trace::{Blocks, Conversation, Form, Run, Shared, Subagent, TraceTurn};
use serde::Deserialize;
use std::time::Duration;

/// The default tokens of a block id in the conversation form.
const BLOCK_TOKENS_DEFAULT: u64 = 64;
/// The tokens of a Mooncake block id.
const MOONCAKE_BLOCK_TOKENS: u64 = 512;
/// The share of tools and system prompt that all conversations of a client have in common, as the
/// corpus' author models it.
const SHARED_NUMERATOR: u64 = 3;
const SHARED_DENOMINATOR: u64 = 4;
/// The longest prompt: no engine takes more, and a larger figure means a broken file and would be
/// allocated.
const PROMPT_TOKENS_MAX: u64 = 1 << 26;
/// The latest time, about 30 years; a larger figure is milliseconds taken for seconds.
const SECONDS_MAX: f64 = 1e9;
/// The first id for tokens that the trace leaves unnamed; above any id of a trace.
const UNNAMED_ID_FIRST: u64 = 1 << 62;

/// What is wrong with a record.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The record is not JSON or has fields of the wrong types.
    #[error("not a record of this form")]
    Json(#[source] serde_json::Error),
    /// The record has the fields of no known form.
    #[error(
        "neither `requests` (conversation form) nor `input_length` (Mooncake form) nor `input` \
         (LMCache form) is there"
    )]
    UnknownForm,
    /// A field is absent.
    #[error("{place} has no `{field}`")]
    Missing {
        /// The request.
        place: String,
        /// The field.
        field: &'static str,
    },
    /// A field has a value that can't be replayed.
    #[error("{place}: {problem}")]
    Value {
        /// The request.
        place: String,
        /// What is wrong with the value.
        problem: String,
    },
}

#[derive(Deserialize)]
struct FormMarks {
    requests: Option<serde::de::IgnoredAny>,
    input_length: Option<serde::de::IgnoredAny>,
    input: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct RawConversation {
    id: Option<String>,
    block_size: Option<u64>,
    #[serde(default)]
    tool_tokens: u64,
    #[serde(default)]
    system_tokens: u64,
    requests: Vec<RawEntry>,
}

#[derive(Deserialize)]
struct RawEntry {
    t: Option<f64>,
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(rename = "in")]
    input: Option<u64>,
    #[serde(rename = "out")]
    output: Option<u64>,
    hash_ids: Option<Vec<u64>>,
    hash_rle: Option<Vec<(u64, u64)>>,
    think_time: Option<f64>,
    api_time: Option<f64>,
    subagent_type: Option<String>,
    agent_id: Option<String>,
    status: Option<String>,
    #[serde(default)]
    tool_tokens: u64,
    #[serde(default)]
    system_tokens: u64,
    #[serde(default)]
    requests: Vec<RawEntry>,
}

#[derive(Deserialize)]
struct RawRequest {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Returns the form of a record, from its content.
pub fn detect_form(text: &str) -> Result<Form, Error> {
    let marks: FormMarks = serde_json::from_str(text).map_err(Error::Json)?;
    match marks {
        FormMarks { requests: Some(_), .. } => Ok(Form::Conversations),
        FormMarks { input_length: Some(_), .. } => Ok(Form::Requests),
        FormMarks { input: Some(_), .. } => Ok(Form::Prompts),
        _ => Err(Error::UnknownForm),
    }
}

/// Parses a conversation. `index` is its position in the trace and becomes the namespace of its
/// ids.
pub fn parse_conversation(text: &str, index: u64) -> Result<Conversation, Error> {
    let raw: RawConversation = serde_json::from_str(text).map_err(Error::Json)?;
    convert_conversation(raw, index)
}

/// Parses a single request as a conversation of one turn.
pub fn parse_request(text: &str, index: u64) -> Result<Conversation, Error> {
    let raw: RawRequest = serde_json::from_str(text).map_err(Error::Json)?;
    let place = "request";
    check_prompt(place, raw.input_length)?;
    let blocks = Blocks::from_ids(&raw.hash_ids);
    check_ids(place, &blocks)?;
    let turn = TraceTurn {
        at: parse_seconds(place, "timestamp", raw.timestamp / 1e3)?,
        think: Duration::ZERO,
        prompt_tokens: raw.input_length,
        output_tokens: raw.output_length.max(1),
        blocks,
    };
    let mut turns = vec![turn];
    // Ids of unnamed blocks are global here; the request's index keeps those of different requests
    // apart.
    complete_tails(&mut turns, MOONCAKE_BLOCK_TOKENS, UNNAMED_ID_FIRST + (index << 24));
    Ok(Conversation {
        id: format!("request-{index}"),
        block_tokens: MOONCAKE_BLOCK_TOKENS,
        turns,
        ..Conversation::default()
    })
}

fn convert_conversation(raw: RawConversation, index: u64) -> Result<Conversation, Error> {
    let block_tokens = raw.block_size.unwrap_or(BLOCK_TOKENS_DEFAULT);
    if block_tokens == 0 || block_tokens > PROMPT_TOKENS_MAX {
        return Err(value_error("conversation", format!("`block_size` is {block_tokens}")));
    }
    let mut conversation = Conversation {
        id: raw.id.unwrap_or_else(|| format!("conversation-{index}")),
        block_tokens,
        scope: Some(index),
        shared: Shared { stream: 0, tokens: shared_tokens(raw.tool_tokens, raw.system_tokens) },
        turns: Vec::new(),
        ..Conversation::default()
    };
    let mut api_end = None;
    let mut subagents = Vec::new();
    for (position, entry) in raw.requests.into_iter().enumerate() {
        let place = format!("requests[{position}]");
        if entry.kind.as_deref() == Some("subagent") {
            // The preceding call in the list started the subagent.
            subagents.push((conversation.turns.len().saturating_sub(1), place, entry));
        } else {
            conversation.turns.push(parse_turn(&place, &entry, &mut api_end)?);
        }
    }
    if conversation.turns.is_empty() {
        return Err(value_error("conversation", "`requests` has no request".to_owned()));
    }
    complete_tails(&mut conversation.turns, block_tokens, UNNAMED_ID_FIRST);
    for (number, (beside_turn, place, entry)) in subagents.into_iter().enumerate() {
        // Subagents share the parent's ids, so their unnamed blocks get ids of their own.
        let unnamed = UNNAMED_ID_FIRST + ((number as u64 + 1) << 40);
        if let Some(child) = parse_subagent(&conversation, &place, entry, beside_turn, unnamed)? {
            conversation.children.push(child);
        }
    }
    Ok(conversation)
}

fn parse_subagent(
    parent: &Conversation,
    place: &str,
    entry: RawEntry,
    beside_turn: usize,
    unnamed_first: u64,
) -> Result<Option<Subagent>, Error> {
    let mut turns = Vec::new();
    let mut api_end = None;
    for (position, inner) in entry.requests.iter().enumerate() {
        let place = format!("{place}.requests[{position}]");
        if inner.kind.as_deref() == Some("subagent") {
            return Err(value_error(&place, "a subagent inside a subagent".to_owned()));
        }
        turns.push(parse_turn(&place, inner, &mut api_end)?);
    }
    let Some(first) = turns.first() else { return Ok(None) };
    // A subagent that starts with its parent's first block also has its parent's system prompt.
    let forked = first.blocks.get(0) == parent.turns.first().and_then(|t| t.blocks.get(0));
    let kind = entry.subagent_type.as_deref().unwrap_or("subagent");
    let shared = if forked {
        parent.shared
    } else {
        let tokens = shared_tokens(entry.tool_tokens, entry.system_tokens);
        Shared { stream: kind_stream(kind), tokens }
    };
    complete_tails(&mut turns, parent.block_tokens, unnamed_first);
    let name = entry.agent_id.unwrap_or_else(|| format!("subagent-{beside_turn}"));
    let conversation = Conversation {
        id: format!("{}/{name}", parent.id),
        block_tokens: parent.block_tokens,
        scope: parent.scope,
        shared,
        turns,
        ..Conversation::default()
    };
    let awaited = entry.status.as_deref().is_none_or(|status| status == "completed");
    Ok(Some(Subagent { beside_turn, awaited, conversation }))
}

/// Returns the stream number of a kind of subagent (FNV-1a): never 0, and equal in all
/// conversations.
fn kind_stream(kind: &str) -> u64 {
    let hash = kind.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash | 1
}

fn shared_tokens(tool_tokens: u64, system_tokens: u64) -> u64 {
    let front = tool_tokens.saturating_add(system_tokens).min(PROMPT_TOKENS_MAX);
    front * SHARED_NUMERATOR / SHARED_DENOMINATOR
}

/// Parses a request. `api_end` carries the previous answer's end, for traces without think times.
fn parse_turn(place: &str, raw: &RawEntry, api_end: &mut Option<f64>) -> Result<TraceTurn, Error> {
    let missing = |field| Error::Missing { place: place.to_owned(), field };
    let prompt_tokens = raw.input.ok_or_else(|| missing("in"))?;
    let output_tokens = raw.output.ok_or_else(|| missing("out"))?;
    check_prompt(place, prompt_tokens)?;
    if output_tokens > PROMPT_TOKENS_MAX {
        return Err(value_error(place, format!("`out` is {output_tokens} tokens")));
    }
    let blocks = match (&raw.hash_ids, &raw.hash_rle) {
        (Some(ids), _) => Blocks::from_ids(ids),
        (None, Some(runs)) => blocks_from_runs(place, runs)?,
        (None, None) => return Err(missing("hash_ids` or `hash_rle")),
    };
    check_ids(place, &blocks)?;
    let at = raw.t.ok_or_else(|| missing("t"))?;
    let think = raw.think_time.unwrap_or_else(|| api_end.map_or(0.0, |end| (at - end).max(0.0)));
    *api_end = Some(at + raw.api_time.unwrap_or(0.0));
    Ok(TraceTurn {
        at: parse_seconds(place, "t", at)?,
        think: parse_seconds(place, "think_time", think)?,
        prompt_tokens,
        output_tokens: output_tokens.max(1),
        blocks,
    })
}

fn blocks_from_runs(place: &str, runs: &[(u64, u64)]) -> Result<Blocks, Error> {
    let mut blocks = Blocks::default();
    for &(first, count) in runs {
        if count > PROMPT_TOKENS_MAX || first >= UNNAMED_ID_FIRST {
            let problem = format!("`hash_rle` has the run [{first}, {count}]");
            return Err(value_error(place, problem));
        }
        blocks.push_run(Run { first, count });
    }
    Ok(blocks)
}

fn check_prompt(place: &str, tokens: u64) -> Result<(), Error> {
    if tokens == 0 || tokens > PROMPT_TOKENS_MAX {
        return Err(value_error(place, format!("a prompt of {tokens} tokens")));
    }
    Ok(())
}

fn check_ids(place: &str, blocks: &Blocks) -> Result<(), Error> {
    if blocks.len() > PROMPT_TOKENS_MAX {
        return Err(value_error(place, format!("{} block ids", blocks.len())));
    }
    match blocks.runs().iter().find(|run| run.first >= UNNAMED_ID_FIRST) {
        Some(run) => Err(value_error(place, format!("block id {} is out of range", run.first))),
        None => Ok(()),
    }
}

fn parse_seconds(place: &str, field: &str, seconds: f64) -> Result<Duration, Error> {
    if !(0.0..SECONDS_MAX).contains(&seconds) {
        return Err(value_error(place, format!("`{field}` is {seconds} s")));
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn value_error(place: &str, problem: String) -> Error {
    Error::Value { place: place.to_owned(), problem }
}

/// Makes the ids cover each prompt.
///
/// The conversation form names full blocks only. If the next turn extends this one, the remaining
/// tokens are the beginning of the next turn's block at that place. Otherwise they get an unnamed
/// block.
fn complete_tails(turns: &mut [TraceTurn], block_tokens: u64, unnamed_first: u64) {
    for index in (0..turns.len()).rev() {
        let needed = turns[index].prompt_tokens.div_ceil(block_tokens);
        let named = turns[index].blocks.len();
        if named > needed {
            turns[index].blocks = turns[index].blocks.truncated(needed);
            continue;
        }
        if named == needed {
            continue;
        }
        let continued = turns.get(index + 1).and_then(|next| {
            let extends = turns[index].blocks.common_prefix(&next.blocks) == named;
            next.blocks.get(named).filter(|_| extends)
        });
        let unnamed = unnamed_first + ((index as u64) << 16);
        let first = continued.unwrap_or(unnamed);
        turns[index].blocks.push_run(Run { first, count: 1 });
        if needed > named + 1 {
            let run = Run { first: unnamed + 1, count: needed - named - 1 };
            turns[index].blocks.push_run(run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Conversation, String> {
        let read = match detect_form(text).map_err(|error| error.to_string())? {
            Form::Requests => parse_request,
            _ => parse_conversation,
        };
        read(text, 0).map_err(|error| error.to_string())
    }

    fn agent(requests: &str) -> String {
        format!(r#"{{"id":"a","tool_tokens":60,"system_tokens":40,"requests":[{requests}]}}"#)
    }

    #[test]
    fn run_length_form_reads_as_the_plain_one() {
        let plain = r#"{"t":0,"in":200,"out":0,"hash_ids":[1,2,9]}"#;
        let coded = plain.replace(r#""hash_ids":[1,2,9]"#, r#""hash_rle":[[1,2],[9,1]]"#);
        let plain = read(&agent(plain)).unwrap();
        assert_eq!(plain, read(&agent(&coded)).unwrap());
        assert_eq!((plain.shared.tokens, plain.block_tokens), (75, 64));
        assert_eq!(plain.turns[0].output_tokens, 1);
    }

    #[test]
    fn tails_begin_the_block_that_the_next_turn_names() {
        let conversation = read(&agent(
            r#"{"t":0,"in":100,"out":1,"hash_ids":[1]},
               {"t":1,"in":130,"out":1,"hash_ids":[1,2]},
               {"t":2,"in":190,"out":1,"hash_ids":[1,5]}"#,
        ))
        .unwrap();
        let blocks: Vec<Vec<u64>> =
            conversation.turns.iter().map(|turn| turn.blocks.ids().collect()).collect();
        assert_eq!(blocks[0], [1, 2], "continued by the next turn");
        assert_eq!((blocks[1].len(), &blocks[1][..2]), (3, &[1, 2][..]));
        assert!(blocks[1][2] >= UNNAMED_ID_FIRST, "rewritten by the next turn");
        assert_ne!(blocks[1][2], blocks[2][2]);
    }

    #[test]
    fn missing_think_times_follow_from_the_timestamps() {
        let conversation = read(&agent(
            r#"{"t":0,"in":64,"out":1,"hash_ids":[1],"api_time":2},
               {"t":5,"in":64,"out":1,"hash_ids":[1]},
               {"t":6,"in":64,"out":1,"hash_ids":[1],"think_time":9}"#,
        ))
        .unwrap();
        let thinks: Vec<u64> = conversation.turns.iter().map(|t| t.think.as_secs()).collect();
        assert_eq!(thinks, [0, 3, 9]);
    }

    #[test]
    fn subagents_belong_to_the_turn_before_them() {
        let subagent = |first: u64, status: &str| {
            format!(
                r#"{{"t":1,"type":"subagent","subagent_type":"Explore","status":"{status}",
                    "tool_tokens":40,"requests":[{{"t":0,"in":64,"out":1,"hash_ids":[{first}]}}]}}"#
            )
        };
        let turn = r#"{"t":0,"in":64,"out":1,"hash_ids":[1]}"#;
        let requests =
            [turn, &subagent(1, "completed"), turn, &subagent(7, "async"), turn].join(",");
        let conversation = read(&agent(&requests)).unwrap();
        assert_eq!((conversation.turns.len(), conversation.turns_total()), (3, 5));
        let [forked, fresh] = &conversation.children[..] else { panic!("two subagents") };
        assert_eq!((forked.beside_turn, forked.awaited), (0, true));
        assert_eq!((fresh.beside_turn, fresh.awaited), (1, false));
        assert_eq!(forked.conversation.shared, conversation.shared);
        assert_ne!(fresh.conversation.shared.stream, 0);
        assert_eq!(fresh.conversation.shared.tokens, 30);
    }

    #[test]
    fn mooncake_requests_are_conversations_of_one_turn() {
        let text = r#"{"timestamp":3000,"input_length":600,"output_length":5,"hash_ids":[0,4]}"#;
        let request = read(text).unwrap();
        assert_eq!((request.scope, request.block_tokens), (None, 512));
        assert_eq!(request.turns[0].at, Duration::from_secs(3));
        assert_eq!(request.turns[0].blocks.ids().collect::<Vec<_>>(), [0, 4]);
    }

    #[test]
    fn errors_name_the_place_in_the_record() {
        let wrong = |requests: &str| read(&agent(requests)).unwrap_err();
        assert_eq!(wrong(""), "conversation: `requests` has no request");
        let turn = r#"{"t":0,"in":64,"out":1,"hash_ids":[1]}"#;
        let second = |field: &str, bad: &str| format!("{turn},{}", turn.replace(field, bad));
        assert_eq!(wrong(&second(r#""in":64,"#, "")), "requests[1] has no `in`");
        assert_eq!(wrong(&second("64", "0")), "requests[1]: a prompt of 0 tokens");
        assert_eq!(wrong(&second(r#""t":0"#, r#""t":-1"#)), "requests[1]: `t` is -1 s");
        let none = second(r#","hash_ids":[1]"#, "");
        assert_eq!(wrong(&none), "requests[1] has no `hash_ids` or `hash_rle`");
        let huge = second(r#""hash_ids":[1]"#, r#""hash_rle":[[1,18446744073709551615]]"#);
        assert!(wrong(&huge).contains("has the run [1, 18446744073709551615]"));
        let far = second("[1]", "[18446744073709551615]");
        assert!(wrong(&far).contains("out of range"));
        assert!(read("{}").unwrap_err().contains("neither `requests`"));
    }
}
