//! Tells from a request's body whether it asks for one answer to one prompt, as a session needs.
//!
//! A session is a sequence of turns that share a growing prefix, and a turn is one request and its
//! answer. A request with several prompts or answers has no place in that sequence. The agent's
//! `data_port` refuses such a turn of a session. The router's `turn` leaves the session out of such
//! a turn if the client only hinted at the session. This module is pure.

use serde_json::value::RawValue;

use crate::{body::Object, route::Kind};

/// Whether the body asks for one answer to one prompt.
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
            let has_several_answers = sampling
                .and_then(|params| Object::parse(params.get().as_bytes()).ok())
                .is_some_and(|params| is_more_than_one(params.get("n")));
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

/// Whether the body asks for an answer that is made after the response has ended.
#[must_use]
pub fn runs_in_background(kind: Kind, object: &Object<'_>) -> bool {
    let is_true = |value: &RawValue| value.get() == "true";
    kind == Kind::Responses && object.get("background").is_some_and(is_true)
}

/// Returns the first byte inside an array that isn't white space, which is `]` in an empty array.
#[must_use]
pub fn first_byte_inside(value: &RawValue) -> Option<u8> {
    let array_text = value.get().strip_prefix('[')?;
    array_text.bytes().find(|byte| !byte.is_ascii_whitespace())
}
