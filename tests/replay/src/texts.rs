//! Reads traces of full prompts in words, one request each (LMCache's form), as conversations.
//!
//! A pure module. The text that a prompt adds to the previous prompt becomes the user's next
//! message. The answers are kept apart, so that a replay can insert real ones. Sizes count
//! characters.

use crate::trace::{Blocks, Conversation, HistoryChange, Run, TraceTurn, TurnWords};
use crate::wire::Error;
use serde::Deserialize;
use std::time::Duration;

/// The tokens of a block, the unit in which prompts are named.
const BLOCK_TOKENS: u64 = 64;
/// The distance between the block ids of two histories of one conversation; no prompt has as many
/// blocks.
const HISTORY_BLOCKS_MAX: u64 = 1 << 32;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Prompt {
    /// Microseconds since an arbitrary start.
    timestamp: u64,
    /// The full prompt.
    input: String,
    /// The answer.
    output: String,
    /// The conversation to which the request belongs.
    session_id: String,
}

/// Parses a record.
pub fn parse_prompt(text: &str) -> Result<Prompt, Error> {
    let prompt: Prompt = serde_json::from_str(text).map_err(Error::Json)?;
    if prompt.input.is_empty() {
        return Err(Error::Value {
            place: "request".to_owned(),
            problem: "`input` is empty".to_owned(),
        });
    }
    Ok(prompt)
}

/// Groups requests into conversations, in the order of the conversations' first requests.
pub fn group_conversations(prompts: Vec<Prompt>) -> Vec<Conversation> {
    let mut sessions: Vec<Vec<Prompt>> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for prompt in prompts {
        let place = *places.entry(prompt.session_id.clone()).or_insert(sessions.len());
        if place == sessions.len() {
            sessions.push(Vec::new());
        }
        sessions[place].push(prompt);
    }
    let numbered = sessions.into_iter().zip(0..);
    numbered.map(|(session, index)| conversation(session, index)).collect()
}

fn conversation(mut prompts: Vec<Prompt>, index: u64) -> Conversation {
    // Lines are written when answers end, and some answers end out of order.
    prompts.sort_by_key(|prompt| prompt.timestamp);
    let start = prompts[0].timestamp;
    let (mut turns, mut words) = (Vec::<TraceTurn>::new(), Vec::<TurnWords>::new());
    let (mut first, mut tokens) = (0, 0);
    let mut before: Option<&Prompt> = None;
    for prompt in &prompts {
        let (history, text) = compare_history(before, prompt);
        match history {
            HistoryChange::Extended => {
                tokens += before.map_or(0, |before| length(&before.output)) + length(text);
            }
            HistoryChange::Repeated => {}
            HistoryChange::Replaced => {
                first += u64::from(before.is_some()) * HISTORY_BLOCKS_MAX;
                tokens = length(text);
            }
        }
        let mut blocks = Blocks::default();
        blocks.push_run(Run { first, count: tokens.div_ceil(BLOCK_TOKENS) });
        let at = Duration::from_micros(prompt.timestamp - start);
        let think = turns.last().map_or(Duration::ZERO, |last| at - last.at);
        let output_tokens = length(&prompt.output).max(1);
        turns.push(TraceTurn { at, think, prompt_tokens: tokens, output_tokens, blocks });
        words.push(TurnWords { history, text: text.to_owned(), answer: prompt.output.clone() });
        before = Some(prompt);
    }
    Conversation {
        id: prompts[0].session_id.clone(),
        block_tokens: BLOCK_TOKENS,
        scope: Some(index),
        turns,
        words,
        ..Conversation::default()
    }
}

/// Returns how a prompt follows from the previous one, and its new text.
fn compare_history<'a>(before: Option<&Prompt>, prompt: &'a Prompt) -> (HistoryChange, &'a str) {
    let added = before.and_then(|before| prompt.input.strip_prefix(before.input.as_str()));
    match added {
        None => (HistoryChange::Replaced, &prompt.input),
        Some("") => (HistoryChange::Repeated, ""),
        // The client joins messages by empty lines.
        Some(added) => (HistoryChange::Extended, added.trim_start_matches('\n')),
    }
}

fn length(text: &str) -> u64 {
    text.chars().count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(prompts: &[(&str, u64, &str)]) -> Vec<Conversation> {
        let line = |(session, at, input): &(&str, u64, &str)| {
            let at = at * 1_000_000;
            serde_json::json!({
                "timestamp": at, "input": input, "output": "yes", "session_id": session,
            })
            .to_string()
        };
        group_conversations(prompts.iter().map(|one| parse_prompt(&line(one)).unwrap()).collect())
    }

    fn history_and_text(conversation: &Conversation) -> Vec<(HistoryChange, &str)> {
        conversation.words.iter().map(|words| (words.history, words.text.as_str())).collect()
    }

    #[test]
    fn the_user_message_is_the_text_that_a_prompt_adds() {
        let found =
            read(&[("a", 0, "Fix it."), ("b", 0, "Hm"), ("a", 2, "Fix it.\n\nFailed: 1\n")]);
        assert_eq!(found.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(
            history_and_text(&found[0]),
            [(HistoryChange::Replaced, "Fix it."), (HistoryChange::Extended, "Failed: 1\n")]
        );
        let turns = &found[0].turns;
        assert_eq!((turns[1].at, turns[1].think), (turns[1].think, Duration::from_secs(2)));
        // The second prompt includes the answer between the two messages.
        let tokens: Vec<u64> = turns.iter().map(|turn| turn.prompt_tokens).collect();
        assert_eq!(tokens, [7, 7 + 3 + 10]);
        assert_ne!(found[0].scope, found[1].scope);
    }

    #[test]
    fn requests_are_taken_in_the_order_of_their_times() {
        let found = read(&[("a", 5, "1\n\n2"), ("a", 1, "1"), ("a", 9, "1\n\n2\n\n3")]);
        assert_eq!(
            history_and_text(&found[0])[1..],
            [(HistoryChange::Extended, "2"), (HistoryChange::Extended, "3")]
        );
        assert_eq!(found[0].edits(), 0);
    }

    #[test]
    fn an_edited_history_is_replaced_and_counted() {
        let found = read(&[("a", 0, "1"), ("a", 1, "1"), ("a", 2, "1\n\n2"), ("a", 3, "Sum: 2")]);
        let expected = [
            (HistoryChange::Replaced, "1"),
            (HistoryChange::Repeated, ""),
            (HistoryChange::Extended, "2"),
            (HistoryChange::Replaced, "Sum: 2"),
        ];
        assert_eq!(history_and_text(&found[0]), expected);
        assert_eq!(found[0].edits(), 2);
        let turns = &found[0].turns;
        assert_eq!(turns[0].blocks, turns[1].blocks);
        assert_eq!(turns[2].blocks.common_prefix(&turns[3].blocks), 0);
    }

    #[test]
    fn invalid_requests_are_reported() {
        let wrong = |text: &str| parse_prompt(text).unwrap_err().to_string();
        assert_eq!(wrong("{}"), "not a record of this form");
        let empty = r#"{"timestamp":1,"input":"","output":"a","session_id":"s"}"#;
        assert_eq!(wrong(empty), "request: `input` is empty");
    }
}
