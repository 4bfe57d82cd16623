//! Keeps the KV of different principals apart in the engines' caches.
//!
//! An engine shares the KV of equal prefixes among all requests with the same salt, and says how
//! many tokens were cached. So without salts a client could find out by guessing what others have
//! sent. `prompt` reads the salted body, so that the router's block ids have the salt, too. Pure.

use std::fmt::Write as _;

use contract::{
    body::{self, Object},
    route::Kind,
};
use sha2::{Digest as _, Sha256};

use super::request::Error;

const SALT_KEY: &str = "cache_salt";
/// Keeps the salts apart from other hashes of the same texts.
const DOMAIN: &[u8] = b"berth cache isolation v1\0";

/// Refuses routes whose requests have no salt, but leave KV in the engine's cache.
pub(crate) fn check_kind(kind: Kind) -> Result<(), Error> {
    match kind {
        Kind::Generate | Kind::Chat | Kind::Completions | Kind::Responses => Ok(()),
        _ if !kind.is_turn() => Ok(()),
        _ => Err(Error::NotIsolated),
    }
}

/// A salt of the client becomes part of the new one, so the client can still keep its own requests
/// apart.
pub(crate) fn add_salt(object: &Object<'_>, principal: &str) -> Result<Vec<u8>, Error> {
    let client_salt: Option<String> = match object.get(SALT_KEY) {
        None => None,
        Some(raw) => serde_json::from_str(raw.get()).map_err(|_| Error::Field {
            field: SALT_KEY,
            allowed: "a string, because the router isolates caches",
        })?,
    };
    let salt = make_salt(principal, client_salt.as_deref().unwrap_or_default());
    let member = format!(r#""{SALT_KEY}":"{salt}""#);
    Ok(body::assemble(object.bytes(), &object.rewrite(&[SALT_KEY]), &member))
}

/// Returns 32 hex digits, which are the same at every router. `client_salt` may be empty.
fn make_salt(principal: &str, client_salt: &str) -> String {
    let mut hasher = Sha256::new();
    hasher.update(DOMAIN);
    // The length keeps `("a", "bc")` and `("ab", "c")` apart.
    hasher.update((principal.len() as u64).to_le_bytes());
    hasher.update(principal);
    hasher.update(client_salt);
    hasher.finalize()[..16].iter().fold(String::new(), |mut salt, byte| {
        write!(salt, "{byte:02x}").expect("writing to a string can't fail");
        salt
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    fn salted(body: &str, principal: &str) -> String {
        let object = Object::parse(body.as_bytes()).unwrap();
        String::from_utf8(add_salt(&object, principal).unwrap()).unwrap()
    }

    fn salt(body: &str, principal: &str) -> String {
        let body: Value = serde_json::from_str(&salted(body, principal)).unwrap();
        body["cache_salt"].as_str().unwrap().to_owned()
    }

    #[test]
    fn each_principal_and_each_salt_of_a_client_has_a_salt_of_its_own() {
        let own = salt("{}", "alice");
        assert_eq!(own.len(), 32);
        let same = [r#"{"cache_salt":null}"#, r#"{"cache_salt":""}"#, r#"{"text":"a"}"#];
        assert!(same.iter().all(|body| salt(body, "alice") == own));
        let bobs = format!(r#"{{"cache_salt":"{own}"}}"#);
        let all: BTreeSet<String> = [
            own.clone(),
            salt("{}", "bob"),
            salt(r#"{"cache_salt":"x"}"#, "alice"),
            salt(r#"{"cache_salt":"ex"}"#, "alic"),
            salt(r#"{"cache_salt":"x"}"#, "bob"),
            // Who knows the salt of another can't take it.
            salt(&bobs, "bob"),
        ]
        .into();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn no_way_to_write_a_salt_survives_and_every_other_byte_does() {
        let body =
            r#"{ "a":1.50,"cache_salt":"x","b":{"cache_salt":"kept"}, "cache_s\u0061lt":"y" }"#;
        let out = salted(body, "alice");
        let salt = salt(r#"{"cache_salt":"y"}"#, "alice");
        let want = format!(r#"{{ "a":1.50,"b":{{"cache_salt":"kept"}},"cache_salt":"{salt}" }}"#);
        assert_eq!(out, want);
    }

    #[test]
    fn salts_for_several_prompts_are_refused() {
        for body in [r#"{"cache_salt":["a"]}"#, r#"{"cache_salt":1}"#, r#"{"cache_salt":{}}"#] {
            let object = Object::parse(body.as_bytes()).unwrap();
            assert!(add_salt(&object, "alice").is_err(), "{body}");
        }
    }

    #[test]
    fn routes_without_a_salt_are_refused() {
        for kind in [Kind::Generate, Kind::Chat, Kind::Completions, Kind::Responses] {
            assert!(check_kind(kind).is_ok(), "{kind:?}");
        }
        for kind in [Kind::Messages, Kind::Embeddings, Kind::Score, Kind::Transcription] {
            assert!(check_kind(kind).is_err(), "{kind:?}");
        }
    }
}
