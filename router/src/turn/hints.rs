//! Reads what a turn's body hints at: its priority, the length of its answer, its session's rest.
//!
//! A hint may change where and when a turn runs, and how long its session's KV is kept, never what
//! the turn answers. So a hint that can't be read is ignored. Pure.
//!
//! - `nvext.agent_hints` (of the Dynamo API): `priority`, `strict_priority`, `latency_sensitivity`,
//!   `osl`, `speculative_prefill`.
//! - `cache_control` with a `ttl`: of the Anthropic API, on blocks or at the top, and in `nvext`.
//! - `prompt_cache_retention` (of the OpenAI API).

use contract::{body::Object, hints::TurnHints};
use memchr::memmem;
use serde::Deserialize;
use serde_json::Value;

/// Says how long a prompt is to be cached.
const CACHE_CONTROL: &[u8] = b"\"cache_control\"";
/// The Anthropic API takes four such members.
const CACHE_CONTROLS_MAX: usize = 16;
/// `{"type":"ephemeral","ttl":"1h"}` has 31.
const CACHE_CONTROL_BYTES_MAX: usize = 256;
/// A year. An agent allows less.
const TTL_SECONDS_MAX: u64 = 365 * 24 * 3600;
/// A greater strict priority comes before any priority within a smaller one.
const STRICT_STEP: i64 = 1 << 20;

/// More is more urgent.
pub(super) fn priority(hints: Option<&Object<'_>>) -> Option<i64> {
    let hints = hints?;
    let number = |key: &str| hints.get(key)?.get().parse::<i64>().ok();
    // The older name of `priority` takes fractions.
    let sensitivity = || {
        let value = hints.get("latency_sensitivity")?.get().parse::<f64>().ok()?;
        whole_number(value)
    };
    let strict = number("strict_priority").filter(|strict| *strict > 0);
    let priority = number("priority").or_else(sensitivity);
    match (strict, priority) {
        (None, priority) => priority,
        (Some(strict), priority) => {
            let within = priority.unwrap_or(0).clamp(1 - STRICT_STEP, STRICT_STEP - 1);
            Some(strict.saturating_mul(2 * STRICT_STEP).saturating_add(within))
        }
    }
}

/// Reads what needs no bound.
pub(super) fn unbounded(hints: Option<&Object<'_>>) -> TurnHints {
    let get = |key: &str| hints.and_then(|hints| hints.get(key)).map(|raw| raw.get());
    TurnHints {
        answer_tokens: get("osl").and_then(|tokens| tokens.parse().ok()),
        returns_soon: get("speculative_prefill") == Some("true"),
        ..TurnHints::default()
    }
}

/// Returns the longest time, in milliseconds, for which the body wants KV kept without a turn.
pub(super) fn idle_ms(body: &Object<'_>) -> Option<u64> {
    let retention = body.get("prompt_cache_retention").and_then(|raw| {
        let text: &str = serde_json::from_str(raw.get()).ok()?;
        parse_ttl(text)
    });
    let seconds = cache_control_ttls(body.bytes()).chain(retention).max()?;
    Some(seconds.clamp(1, TTL_SECONDS_MAX) * 1000)
}

/// Returns the seconds of members at any depth. A quote within a JSON string has a backslash before
/// it, so the quoted key with a colon behind it is a key, and no part of a text.
fn cache_control_ttls(json: &[u8]) -> impl Iterator<Item = u64> {
    #[derive(Deserialize)]
    struct CacheControl {
        ttl: Value,
    }
    let keys = memmem::find_iter(json, CACHE_CONTROL)
        .filter(|&start| start > 0 && json[start - 1] != b'\\')
        .take(CACHE_CONTROLS_MAX);
    keys.filter_map(|start| {
        let value = json[start + CACHE_CONTROL.len()..].trim_ascii_start().strip_prefix(b":")?;
        let value = value.trim_ascii_start();
        let value = &value[..value.len().min(CACHE_CONTROL_BYTES_MAX)];
        let mut parser = serde_json::Deserializer::from_slice(value);
        match CacheControl::deserialize(&mut parser).ok()?.ttl {
            Value::String(text) => parse_ttl(&text),
            Value::Number(seconds) => seconds.as_u64(),
            _ => None,
        }
    })
}

/// Returns seconds for a time such as `5m`, `1h` or `24h`.
fn parse_ttl(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit_seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit_seconds)
}

/// `None` for a number larger than any sensible priority.
fn whole_number(number: f64) -> Option<i64> {
    #[expect(clippy::cast_precision_loss, reason = "a power of two")]
    let is_sensible = number.abs() < STRICT_STEP as f64;
    #[expect(clippy::cast_possible_truncation, reason = "checked to be small")]
    is_sensible.then_some(number.round() as i64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read<T>(body: &str, of: impl Fn(&Object<'_>) -> T) -> T {
        of(&Object::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn agent_hints_give_a_priority_and_a_length() {
        let of = |hints: &str| {
            let hints = Object::parse(hints.as_bytes()).ok();
            (priority(hints.as_ref()), unbounded(hints.as_ref()).answer_tokens)
        };
        assert_eq!(of(r#"{"priority":5,"osl":200}"#), (Some(5), Some(200)));
        assert_eq!(of(r#"{"priority":-2}"#).0, Some(-2));
        assert_eq!(of(r#"{"latency_sensitivity":2.6}"#).0, Some(3));
        assert_eq!(of(r#"{"priority":1,"latency_sensitivity":9.0}"#).0, Some(1));
        let strict = |level: u32, priority: i64| {
            of(&format!(r#"{{"strict_priority":{level},"priority":{priority}}}"#)).0
        };
        assert!(strict(1, -9_999_999) > strict(0, 9_999), "strict comes first");
        assert!(strict(2, i64::MIN) > strict(1, i64::MAX));
        assert_eq!(strict(0, 3), Some(3));
        for odd in ["{}", "[]", "1", r#"{"priority":"high","osl":-1}"#, r#"{"osl":1.5}"#] {
            assert_eq!(of(odd), (None, None), "{odd}");
        }
        assert_eq!(of(r#"{"latency_sensitivity":1e300}"#).0, None);
        let returns =
            |hints: &str| unbounded(Object::parse(hints.as_bytes()).ok().as_ref()).returns_soon;
        assert!(returns(r#"{"speculative_prefill": true }"#));
        for odd in ["{}", r#"{"speculative_prefill":false}"#, r#"{"speculative_prefill":"true"}"#] {
            assert!(!returns(odd), "{odd}");
        }
    }

    #[test]
    fn the_longest_time_of_a_body_counts_wherever_it_stands() {
        let cases = [
            (r#"{"cache_control":{"type":"ephemeral"}}"#, None),
            (r#"{"cache_control":{"type":"ephemeral","ttl":"1h"}}"#, Some(3_600_000)),
            (r#"{"nvext":{"cache_control":{"type":"ephemeral","ttl":90}}}"#, Some(90_000)),
            (r#"{"prompt_cache_retention":"24h"}"#, Some(86_400_000)),
            (r#"{"prompt_cache_retention":"in_memory"}"#, None),
            (r#"{"prompt_cache_retention":["24h"]}"#, None),
            (
                r#"{"system":[{"text":"a","cache_control" : {"ttl":"1h"}}],"messages":[{"content":
                [{"text":"b","cache_control":{"type":"ephemeral","ttl":"5m"}}]}]}"#,
                Some(3_600_000),
            ),
            (r#"{"messages":[{"content":"say \"cache_control\":{\"ttl\":\"1h\"} to me"}]}"#, None),
            (r#"{"tools":[{"properties":{"cache_control":{"type":"string"}}}]}"#, None),
            (r#"{"cache_control":{"ttl":"h"}}"#, None),
            (r#"{"cache_control":{"ttl":"-1h"}}"#, None),
            (r#"{"cache_control":{"ttl":"é"}}"#, None),
            (r#"{"cache_control":{"ttl":"99999999999d"}}"#, Some(TTL_SECONDS_MAX * 1000)),
        ];
        for (body, expected) in cases {
            assert_eq!(read(body, idle_ms), expected, "{body}");
        }
    }

    proptest! {
        #[test]
        fn no_body_panics(text in "\\PC{0,60}", ttl in "\\PC{0,6}") {
            let value = Value::from(ttl);
            let body = format!(r#"{{"a":{},"cache_control":{{"ttl":{value}}}}}"#, Value::from(text));
            read(&body, idle_ms);
            read(&body, |hints| priority(Some(hints)));
        }
    }
}
