//! Tells from a request's body for how many answers to how many prompts it asks.
//!
//! A request with several prompts or answers has no place in the sequence of turns that is a
//! session.

use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::{
    body::Object,
    flags::{NotAFlag, read_flag},
    route::Kind,
};

#[must_use]
pub fn has_single_answer(kind: Kind, object: &Object<'_>) -> bool {
    let is_more_than_one =
        |value: Option<&RawValue>| value.is_some_and(|n| !matches!(n.get(), "1" | "null"));
    let first_byte_inside_is = |key, is_match: fn(u8) -> bool| {
        object.get(key).and_then(first_byte_inside).is_some_and(is_match)
    };
    match kind {
        Kind::Generate => {
            let sampling = object.get("sampling_params");
            let has_sampling_list = sampling.is_some_and(|params| params.get().starts_with('['));
            // What only the engine can read may ask for several.
            let has_several_answers = sampling.is_some_and(|params| {
                let object = Object::parse(params.get().as_bytes());
                params.get().starts_with('{')
                    && object.map_or(true, |params| is_more_than_one(params.get("n")))
            });
            let has_text_list = object.get("text").is_some_and(|text| text.get().starts_with('['));
            // Embeddings replace the prompt's tokens, so a session has nothing to append.
            let has_embeds =
                object.get("input_embeds").is_some_and(|embeds| embeds.get() != "null");
            let has_id_lists = first_byte_inside_is("input_ids", |byte| byte == b'[');
            !(has_sampling_list
                || has_several_answers
                || has_text_list
                || has_embeds
                || has_id_lists)
        }
        Kind::Completions => {
            let is_batch = first_byte_inside_is("prompt", |byte| matches!(byte, b'[' | b'"'));
            !is_batch
                && !is_more_than_one(object.get("n"))
                && !is_more_than_one(object.get("best_of"))
        }
        Kind::Embeddings => !first_byte_inside_is("input", |byte| matches!(byte, b'[' | b'"')),
        Kind::Encode => {
            !first_byte_inside_is("input_ids", |byte| byte == b'[')
                && object.get("text").is_none_or(|text| !text.get().starts_with('['))
        }
        _ => !is_more_than_one(object.get("n")),
    }
}

/// Counts what the engine runs side by side: prompts, times the answers to each. Never 0. A body
/// that can't be read counts as one sequence; the engine refuses it.
#[must_use]
pub fn count_sequences(kind: Kind, object: &Object<'_>) -> u32 {
    let lists = |key| elements(object.get(key), |byte| byte == b'[');
    // One prompt is a list of lists of numbers.
    let is_list_of_prompts = |value: &&RawValue| {
        let mut bytes = value.get().bytes().filter(|byte| !byte.is_ascii_whitespace());
        bytes.by_ref().take(3).all(|byte| byte == b'[')
    };
    let embeds = object.get("input_embeds").filter(is_list_of_prompts);
    let texts = |key| elements(object.get(key), |byte| matches!(byte, b'[' | b'"' | b'{'));
    let number = |key| object.get(key).map_or(1, read_number);
    let (prompts, answers) = match kind {
        Kind::Generate => {
            let answers = object.get("sampling_params").map_or(1, sampled_answers);
            (texts("text").max(lists("input_ids")).max(elements(embeds, |_| true)), answers)
        }
        Kind::Completions => (texts("prompt"), number("n").max(number("best_of"))),
        Kind::Embeddings => (texts("input"), 1),
        Kind::Encode => (texts("text").max(lists("input_ids")), 1),
        Kind::Score => (texts("items"), 1),
        Kind::Rerank => (texts("documents"), 1),
        Kind::Chat | Kind::Responses | Kind::Messages => (1, number("n")),
        Kind::Transcription | Kind::Tokenizer | Kind::Models | Kind::Info => (1, 1),
    };
    prompts.saturating_mul(answers).max(1)
}

/// Counts the elements of an array whose first element begins so; else 1.
fn elements(value: Option<&RawValue>, is_begin: impl Fn(u8) -> bool) -> u32 {
    let list = value.filter(|value| first_byte_inside(value).is_some_and(is_begin));
    let elements = list.and_then(|list| serde_json::from_str::<Vec<IgnoredAny>>(list.get()).ok());
    elements.map_or(1, |elements| u32::try_from(elements.len()).unwrap_or(u32::MAX))
}

/// Of a list, the element that asks for the most answers counts.
fn sampled_answers(sampling: &RawValue) -> u32 {
    let of_one = |one: &RawValue| match Object::parse(one.get().as_bytes()) {
        Ok(object) => object.get("n").map_or(1, read_number),
        // An object that only the engine can read may ask for any number.
        Err(_) if one.get().starts_with('{') => u32::MAX,
        Err(_) => 1,
    };
    if sampling.get().starts_with('[') {
        let list = serde_json::from_str::<Vec<&RawValue>>(sampling.get()).unwrap_or_default();
        return list.into_iter().map(of_one).max().unwrap_or(1);
    }
    of_one(sampling)
}

/// The engine takes a number of answers in other forms of a number and as a string too. One that is
/// too large for a `u32` is the largest.
fn read_number(value: &RawValue) -> u32 {
    let text = value.get().trim_matches('"').trim();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    text.parse::<f64>().map_or(1, |number| number.ceil() as u32)
}

/// Whether the answer is made after the response has ended: by a response in the background, or by
/// SGLang's own flag, by which the engine goes on without its client.
pub fn runs_in_background(kind: Kind, object: &Object<'_>) -> Result<bool, NotAFlag> {
    match kind {
        Kind::Responses | Kind::Generate | Kind::Encode => read_flag(object.get("background")),
        _ => Ok(false),
    }
}

/// Returns `]` for an empty array.
#[must_use]
pub fn first_byte_inside(value: &RawValue) -> Option<u8> {
    let array_text = value.get().strip_prefix('[')?;
    array_text.bytes().find(|byte| !byte.is_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_prompts_times_answers() {
        let cases = [
            (Kind::Generate, r#"{"text":"a"}"#, 1),
            (Kind::Generate, r#"{"text":["a","b"],"sampling_params":{"n":3}}"#, 6),
            (Kind::Generate, r#"{"text":["a"],"sampling_params":[{"n":2},{"n":5}]}"#, 5),
            (Kind::Generate, r#"{"input_ids":[1,2,3]}"#, 1),
            (Kind::Generate, r#"{"input_ids":[ [1,2],[3]]}"#, 2),
            (Kind::Generate, r#"{"input_embeds":[[0.5,1],[2,3]]}"#, 1),
            (Kind::Generate, r#"{"input_embeds":[[[0.5],[1]],[[2]]]}"#, 2),
            (Kind::Generate, r#"{"text":"a","sampling_params":{"n":null}}"#, 1),
            (Kind::Generate, r#"{"text":[],"sampling_params":{"n":0}}"#, 1),
            (Kind::Generate, r#"{"text":"a","sampling_params":{"n":99999999999}}"#, u32::MAX),
            (Kind::Generate, r#"{"text":"a","sampling_params":{"n":1,"n":500}}"#, 500),
            (Kind::Chat, r#"{"n":"500"}"#, 500),
            (Kind::Chat, r#"{"n":5e2}"#, 500),
            (Kind::Completions, r#"{"prompt":["a","b"],"n":2,"best_of":4}"#, 8),
            (Kind::Completions, r#"{"prompt":[1,2]}"#, 1),
            (Kind::Completions, r#"{"prompt":[[1],[2],[3]]}"#, 3),
            (Kind::Chat, r#"{"messages":[{},{}],"n":4}"#, 4),
            (Kind::Embeddings, r#"{"input":["a","b","c"]}"#, 3),
            (Kind::Rerank, r#"{"query":"q","documents":["a","b"]}"#, 2),
            (Kind::Transcription, "{}", 1),
        ];
        for (kind, body, wanted) in cases {
            let object = Object::parse(body.as_bytes()).unwrap();
            assert_eq!(count_sequences(kind, &object), wanted, "{body}");
            let is_single = has_single_answer(kind, &object);
            assert!(wanted == 1 || !is_single || matches!(kind, Kind::Rerank), "{body}");
        }
    }

    #[test]
    fn parameters_that_only_the_engine_can_read_hide_no_answers() {
        let members: String = (0..5_000).map(|number| format!(r#""k{number}":1,"#)).collect();
        let body = format!(r#"{{"text":"a","sampling_params":{{{members}"n":5}}}}"#);
        let object = Object::parse(body.as_bytes()).unwrap();
        assert!(!has_single_answer(Kind::Generate, &object));
        assert_eq!(count_sequences(Kind::Generate, &object), u32::MAX);
    }

    #[test]
    fn whatever_the_engine_reads_as_true_runs_in_the_background() {
        let read = |kind, text: &str| {
            let body = format!(r#"{{"background":{text}}}"#);
            runs_in_background(kind, &Object::parse(body.as_bytes()).unwrap())
        };
        for kind in [Kind::Responses, Kind::Generate, Kind::Encode] {
            for text in ["true", "1", r#""true""#, r#""on""#] {
                assert_eq!(read(kind, text), Ok(true), "{text}");
            }
            assert_eq!(read(kind, "0"), Ok(false));
            assert_eq!(read(kind, "[]"), Err(NotAFlag));
        }
        assert_eq!(read(Kind::Chat, "true"), Ok(false), "the engine doesn't know it there");
    }
}
