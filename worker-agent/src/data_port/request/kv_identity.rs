//! Reads from a turn's body which adapter, cache salt and extra key its KV gets.
//!
//! SGLang's routes differ in which of these keys they take. Where a body doesn't say what the
//! engine will take, the turn continues no KV.

use std::borrow::Cow;

use contract::{body::Object, route::Kind};

use crate::session::KvIdentity;

/// The engine may take such a member for a list with one value for each prompt.
struct NotAText;

pub(super) fn read_kv_identity(
    kind: Kind,
    object: &Object<'_>,
    served_model: Option<&str>,
) -> KvIdentity {
    let identity = || {
        let (adapter, cache_salt, extra_key) = match kind {
            Kind::Generate => (
                text(object, "lora_path")?,
                text(object, "cache_salt")?,
                text(object, "extra_key")?,
            ),
            Kind::Chat | Kind::Completions => {
                let model = text(object, "model")?;
                let adapter = adapter_in(model, served_model)?;
                let adapter = match adapter {
                    Some(adapter) => Some(adapter),
                    None => text(object, "lora_path")?,
                };
                (adapter, text(object, "cache_salt")?, text(object, "extra_key")?)
            }
            // This route has no other of the keys.
            Kind::Messages => (adapter_in(text(object, "model")?, served_model)?, None, None),
            // This route takes an adapter's name, and runs the model without the adapter.
            Kind::Responses => (None, text(object, "cache_salt")?, text(object, "extra_key")?),
            _ => return Err(NotAText),
        };
        Ok(KvIdentity::new(adapter.as_deref(), cache_salt.as_deref(), extra_key.as_deref()))
    };
    identity().unwrap_or(KvIdentity::UNKNOWN)
}

/// `None` if the member is absent or null.
fn text<'a>(object: &Object<'a>, key: &str) -> Result<Option<Cow<'a, str>>, NotAText> {
    let Some(value) = object.get(key).filter(|value| value.get() != "null") else {
        return Ok(None);
    };
    let inside = value.get().strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    match inside {
        Some(inside) if !inside.contains('\\') => Ok(Some(Cow::Borrowed(inside))),
        _ => serde_json::from_str(value.get())
            .map(|text| Some(Cow::Owned(text)))
            .map_err(|_| NotAText),
    }
}

/// The engine finds the adapter in `base:adapter`. The name that it serves has none, even with a
/// colon.
fn adapter_in<'a>(
    model: Option<Cow<'a, str>>,
    served_model: Option<&str>,
) -> Result<Option<Cow<'a, str>>, NotAText> {
    let Some(model) = model.filter(|model| model.contains(':')) else { return Ok(None) };
    let served = served_model.ok_or(NotAText)?;
    if model == served {
        return Ok(None);
    }
    let after_served = model.strip_prefix(served).and_then(|rest| rest.strip_prefix(':'));
    let adapter = after_served.or(model.split_once(':').map(|(_, adapter)| adapter));
    let adapter = adapter.map(str::trim).filter(|adapter| !adapter.is_empty());
    Ok(adapter.map(|adapter| Cow::Owned(adapter.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: Kind, body: &str) -> KvIdentity {
        let object = Object::parse(body.as_bytes()).unwrap();
        read_kv_identity(kind, &object, Some("m:8b"))
    }

    fn named(adapter: &str, cache_salt: &str, extra_key: &str) -> KvIdentity {
        KvIdentity::new(Some(adapter), Some(cache_salt), Some(extra_key))
    }

    #[test]
    fn each_route_gives_the_kv_what_the_engine_takes_there() {
        let all = r#"{"model":"m:8b:sql","lora_path":"code","cache_salt":"s","extra_key":"k"}"#;
        assert_eq!(read(Kind::Generate, all), named("code", "s", "k"), "no model there");
        for kind in [Kind::Chat, Kind::Completions] {
            assert_eq!(read(kind, all), named("sql", "s", "k"), "the model's name comes first");
        }
        assert_eq!(read(Kind::Messages, all), named("sql", "", ""));
        assert_eq!(read(Kind::Responses, all), named("", "s", "k"));
    }

    #[test]
    fn a_models_name_has_an_adapter_after_its_own_colons() {
        for (model, adapter) in [
            ("m:8b", ""),
            ("m", ""),
            ("m:8b:sql", "sql"),
            ("m:8b: sql ", "sql"),
            ("m:8b:", ""),
            ("other:sql", "sql"),
            (":sql", "sql"),
            ("s3://bucket", "//bucket"),
        ] {
            let body = format!(r#"{{"model":"{model}"}}"#);
            assert_eq!(read(Kind::Chat, &body), named(adapter, "", ""), "{model}");
        }
        let object = Object::parse(br#"{"model":"a:b"}"#).unwrap();
        assert_eq!(read_kv_identity(Kind::Chat, &object, None), KvIdentity::UNKNOWN);
    }

    #[test]
    fn the_last_of_duplicate_keys_counts_however_it_is_written() {
        for (body, adapter, cache_salt, extra_key) in [
            (r#"{"lora_path":null,"cache_salt":"","extra_key":null}"#, "", "", ""),
            (r#"{"cache_salt":"a","cache_salt":"b"}"#, "", "b", ""),
            (r#"{"cache_salt":"a","\u0063ache_salt":null}"#, "", "", ""),
            (r#"{"extra_key":"\u0061","lora_path":"\"q\""}"#, "\"q\"", "", "a"),
        ] {
            let kv = read(Kind::Generate, body);
            assert_eq!(kv, named(adapter, cache_salt, extra_key), "{body}");
        }
    }

    #[test]
    fn a_body_that_does_not_say_what_the_engine_takes_continues_no_kv() {
        for body in [r#"{"lora_path":["sql"]}"#, r#"{"cache_salt":["s"]}"#, r#"{"extra_key":7}"#] {
            assert_eq!(read(Kind::Generate, body), KvIdentity::UNKNOWN, "{body}");
            assert_eq!(read(Kind::Chat, body), KvIdentity::UNKNOWN, "{body}");
        }
    }
}
