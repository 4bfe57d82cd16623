//! A turn's body on its way to the engine: refused where the engine would crash, answer 500 or harm
//! another session; else the client's bytes with only Berth's keys replaced. Pure.

use bytes::Bytes;
use proto::{
    body::{self, OWNED_KEYS, Object, Piece},
    load::Retention,
    process::refusal::Refusal,
};
use serde_json::value::RawValue;

use crate::{route::Kind, session::Turn};

/// Bytes of a turn's id: fixed, because the engine aborts by prefix.
pub const RID_BYTES: usize = 32;

/// A body ready to be sent, with what the client wrote under `rid` for the log.
#[derive(Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The parts of the body, in order.
    pub parts: Vec<Bytes>,
    /// The client's own request id.
    pub client_rid: Option<String>,
    /// One prompt and one answer, so that the turn's id names exactly one request.
    pub single: bool,
}

/// Checks a body and puts the agent's values in.
///
/// # Errors
/// 400 that says what to change.
pub fn prepare(
    kind: Kind,
    bytes: &Bytes,
    turn: &Turn,
    rid: &str,
    vocabulary: Option<u32>,
) -> Result<Prepared, Refusal> {
    let object = Object::parse(bytes).map_err(|error| malformed(&error))?;
    check_session_params(&object)?;
    check_ids(kind, &object, vocabulary)?;
    let single = is_single(kind, &object);
    if turn.session.is_some() && !single {
        return Err(Refusal::bad_request(
            "batch_in_session",
            "a turn of a session has one prompt and one answer: send a single prompt with n = 1, \
             or leave the session out",
        ));
    }
    let rid_key = kind.rid_key();
    let client_rid = rid_key.and_then(|key| object.get(key)).map(|rid| clip(rid.get()));
    let added = added_members(kind, turn, rid);
    let mut owned = OWNED_KEYS.to_vec();
    owned.extend(rid_key);
    let parts = object
        .rewrite(&owned, &added)
        .into_iter()
        .map(|piece| match piece {
            Piece::Kept(range) => bytes.slice(range),
            Piece::New(text) => Bytes::from(text),
        })
        .collect();
    Ok(Prepared { parts, client_rid, single })
}

/// The JSON members by which the engine learns whose turn it is and where to run it.
fn added_members(kind: Kind, turn: &Turn, rid: &str) -> String {
    let mut members = vec![];
    if let Some(key) = kind.rid_key() {
        // The Responses API shows this id to clients, who know its ids by their beginning.
        let prefix = if kind == Kind::Responses { "resp_" } else { "" };
        members.push(format!(r#""{key}":"{prefix}{rid}""#));
    }
    if let Some(session) = &turn.session {
        let id = &session.incarnation;
        match session.retention {
            Retention::Pinned => members.push(format!(r#""session_params":{{"id":"{id}"}}"#)),
            Retention::Tagged if kind.tags() => members.push(format!(r#""session_id":"{id}""#)),
            Retention::Tagged | Retention::None => {}
        }
    }
    members.push(format!(r#""routed_dp_rank":{}"#, turn.dp_rank));
    members.join(",")
}

fn malformed(error: &body::Error) -> Refusal {
    let body::Error::NotAnObject(source) = error;
    Refusal::bad_request("malformed_json", format!("{error}: {source}"))
}

/// Keys the engine doesn't know it answers with 500; the others reach into an earlier turn's
/// history.
fn check_session_params(object: &Object<'_>) -> Result<(), Refusal> {
    let Some(params) = object.get("session_params").filter(|params| params.get() != "null") else {
        return Ok(());
    };
    let refused = |detail: String| Err(Refusal::bad_request("session_params", detail));
    let Ok(params) = Object::parse(params.get().as_bytes()) else {
        return refused("session_params must be an object with the key `id`".into());
    };
    for member in params.members() {
        let key = member.key.as_str();
        let unset = matches!(member.value.get(), "null" | "false");
        let legal = match key {
            "id" | "rid" => true,
            "offset" | "replace" | "drop_previous_output" => unset,
            _ => false,
        };
        if !legal {
            return refused(format!(
                "session_params.{} isn't possible here: sessions only append. Send `id` alone; to \
                 change history, open a new session",
                clip(key)
            ));
        }
    }
    Ok(())
}

/// Ids outside the vocabulary end the engine's process.
fn check_ids(kind: Kind, object: &Object<'_>, vocabulary: Option<u32>) -> Result<(), Refusal> {
    let Some(value) = kind.ids_key().and_then(|key| object.get(key)) else { return Ok(()) };
    let Some(first) = first_inside(value) else { return Ok(()) };
    let limit = vocabulary.map_or(i64::from(u32::MAX), i64::from);
    let ids: Vec<i64> = match first {
        b'[' => match serde_json::from_str::<Vec<Vec<i64>>>(value.get()) {
            Ok(lists) => lists.into_iter().flatten().collect(),
            Err(error) => return Err(not_ids(&error)),
        },
        b'-' | b'0'..=b'9' => serde_json::from_str(value.get()).map_err(|error| not_ids(&error))?,
        _ => return Ok(()),
    };
    match ids.into_iter().find(|id| *id < 0 || *id >= limit) {
        None => Ok(()),
        Some(id) => Err(Refusal::bad_request(
            "token_out_of_vocabulary",
            format!("token id {id} is outside the vocabulary, whose ids are 0 to {}", limit - 1),
        )),
    }
}

fn not_ids(error: &serde_json::Error) -> Refusal {
    Refusal::bad_request("token_ids", format!("token ids must be integers: {error}"))
}

/// The first byte inside an array.
fn first_inside(value: &RawValue) -> Option<u8> {
    let inner = value.get().strip_prefix('[')?;
    inner.bytes().find(|byte| !byte.is_ascii_whitespace())
}

/// One prompt, one answer.
fn is_single(kind: Kind, object: &Object<'_>) -> bool {
    let many = |value: Option<&RawValue>| value.is_some_and(|n| !matches!(n.get(), "1" | "null"));
    let lists =
        |key, batch: fn(u8) -> bool| object.get(key).and_then(first_inside).is_some_and(batch);
    match kind {
        Kind::Generate => {
            let sampling = object.get("sampling_params");
            let list = sampling.is_some_and(|params| params.get().starts_with('['));
            let n = sampling
                .and_then(|params| Object::parse(params.get().as_bytes()).ok())
                .is_some_and(|params| many(params.get("n")));
            let texts = object.get("text").is_some_and(|text| text.get().starts_with('['));
            !list && !n && !texts && !lists("input_ids", |byte| byte == b'[')
        }
        Kind::Completions => {
            let batch = lists("prompt", |byte| matches!(byte, b'[' | b'"'));
            !batch && !many(object.get("n")) && !many(object.get("best_of"))
        }
        Kind::Embeddings => !lists("input", |byte| matches!(byte, b'[' | b'"')),
        _ => !many(object.get("n")),
    }
}

/// Outside text, short enough for a message or a log line.
fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::session::TurnSession;

    fn turn(retention: Option<Retention>) -> Turn {
        let session = retention.map(|retention| TurnSession {
            key: proto::id::SessionKey::new("p", "s").unwrap(),
            incarnation: "berth-a-1-1".into(),
            retention,
            must_open: false,
        });
        Turn { session, dp_rank: 1 }
    }

    fn sent(kind: Kind, retention: Option<Retention>, body: &str) -> Result<Value, &'static str> {
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let prepared = prepare(kind, &bytes, &turn(retention), "R", Some(320));
        let parts = prepared.map_err(|refusal| refusal.code)?.parts.concat();
        Ok(serde_json::from_slice(&parts).unwrap())
    }

    #[test]
    fn each_retention_is_named_as_the_engine_wants_it() {
        let hostile = r#"{"text":"a","session_params":{"id":"evil"},"session_id":"evil","rid":"evil","routed_dp_rank":9,"\u0072id":"evil2"}"#;
        let pinned = sent(Kind::Generate, Some(Retention::Pinned), hostile).unwrap();
        assert_eq!(
            pinned,
            json!({"text": "a", "rid": "R", "session_params": {"id": "berth-a-1-1"}, "routed_dp_rank": 1})
        );
        let tagged = sent(Kind::Chat, Some(Retention::Tagged), hostile).unwrap();
        assert_eq!(
            tagged,
            json!({"text": "a", "rid": "R", "session_id": "berth-a-1-1", "routed_dp_rank": 1})
        );
        let none = sent(Kind::Generate, None, hostile).unwrap();
        assert_eq!(none, json!({"text": "a", "rid": "R", "routed_dp_rank": 1}));
        let responses = sent(Kind::Responses, None, r#"{"request_id":"x","input":"a"}"#).unwrap();
        assert_eq!(responses, json!({"input": "a", "request_id": "resp_R", "routed_dp_rank": 1}));
        let messages = sent(Kind::Messages, Some(Retention::Tagged), r#"{"messages":[]}"#).unwrap();
        assert_eq!(messages, json!({"messages": [], "routed_dp_rank": 1}), "no tag, no rid there");
    }

    #[test]
    fn what_would_harm_the_engine_is_refused() {
        let cases = [
            (Kind::Generate, r#"{"input_ids":[1,320]}"#, "token_out_of_vocabulary"),
            (Kind::Generate, r#"{"input_ids":[[1],[-1]]}"#, "token_out_of_vocabulary"),
            (Kind::Generate, r#"{"input_ids":[1,2.5]}"#, "token_ids"),
            (Kind::Generate, r#"{"input_ids":[1,"2"]}"#, "token_ids"),
            (Kind::Generate, r#"{"input_ids":[99999999999999999999]}"#, "token_ids"),
            (Kind::Completions, r#"{"prompt":[5000]}"#, "token_out_of_vocabulary"),
            (Kind::Completions, r#"{"prompt":[[5000]]}"#, "token_out_of_vocabulary"),
            (Kind::Generate, r#"{"text":"a""#, "malformed_json"),
            (Kind::Generate, r#"["text"]"#, "malformed_json"),
            (Kind::Generate, r#"{"session_params":{"id":"s","bogus":1}}"#, "session_params"),
            (Kind::Generate, r#"{"session_params":{"id":"s","offset":0}}"#, "session_params"),
            (Kind::Generate, r#"{"session_params":{"replace":true}}"#, "session_params"),
            (Kind::Generate, r#"{"session_params":"s"}"#, "session_params"),
        ];
        for (kind, body, code) in cases {
            assert_eq!(sent(kind, None, body), Err(code), "{body}");
        }
        let unset =
            r#"{"text":"a","session_params":{"id":"s","rid":null,"replace":false,"offset":null}}"#;
        assert!(sent(Kind::Generate, None, unset).is_ok(), "unset keys harm nobody");
    }

    #[test]
    fn a_session_takes_one_prompt_and_one_answer() {
        let batches = [
            (Kind::Generate, r#"{"text":["a","b"]}"#),
            (Kind::Generate, r#"{"input_ids":[[1],[2]]}"#),
            (Kind::Generate, r#"{"text":"a","sampling_params":{"n":2}}"#),
            (Kind::Generate, r#"{"text":"a","sampling_params":[{}]}"#),
            (Kind::Completions, r#"{"prompt":["a"]}"#),
            (Kind::Completions, r#"{"prompt":[[1]]}"#),
            (Kind::Completions, r#"{"prompt":"a","n":2}"#),
            (Kind::Chat, r#"{"messages":[],"n":3}"#),
        ];
        for (kind, body) in batches {
            let tagged = Some(Retention::Tagged);
            assert_eq!(sent(kind, tagged, body), Err("batch_in_session"), "{body}");
            assert!(sent(kind, None, body).is_ok(), "without a session it may pass: {body}");
        }
        let single = r#"{"input_ids":[1,2],"sampling_params":{"n":1}}"#;
        assert!(sent(Kind::Generate, Some(Retention::Pinned), single).is_ok());
        assert!(sent(Kind::Completions, Some(Retention::Tagged), r#"{"prompt":[1,2]}"#).is_ok());
    }

    #[test]
    fn an_unknown_vocabulary_still_refuses_what_no_model_has() {
        let bytes = Bytes::from_static(br#"{"input_ids":[5000]}"#);
        assert!(prepare(Kind::Generate, &bytes, &turn(None), "R", None).is_ok());
        let bytes = Bytes::from_static(br#"{"input_ids":[-1]}"#);
        assert!(prepare(Kind::Generate, &bytes, &turn(None), "R", None).is_err());
    }
}
