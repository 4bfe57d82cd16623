//! Reads how long an answer may become, as the engine reads it.

use contract::{body::Object, route::Kind};
use serde_json::value::RawValue;

/// The engine's default on `/v1/completions`; the other routes here have none.
const COMPLETIONS_ANSWER_TOKENS_MAX_DEFAULT: u64 = 16;

/// For all routes but `/generate`. `None` is as many as fit: no limit, or one that only the engine
/// can read.
pub(super) fn read_answer_limit(kind: Kind, object: &Object<'_>) -> Option<u64> {
    let keys = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
    let given = keys.iter().filter_map(|key| object.get(key)).filter(|it| it.get() != "null");
    // Which one counts is the engine's decision: take the largest.
    let limits: Option<Vec<u64>> = given.map(read_tokens).collect();
    let largest = limits?.into_iter().max();
    let default = (kind == Kind::Completions).then_some(COMPLETIONS_ANSWER_TOKENS_MAX_DEFAULT);
    largest.or(default)
}

/// Pydantic's lax mode takes `"40"` and `40.0` too.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked before")]
fn read_tokens(value: &RawValue) -> Option<u64> {
    let text = value.get().trim_matches('"').trim();
    text.parse().ok().or_else(|| {
        let number: f64 = text.parse().ok()?;
        let is_count = number.fract() == 0.0 && (0.0..1e15).contains(&number);
        is_count.then_some(number as u64)
    })
}
