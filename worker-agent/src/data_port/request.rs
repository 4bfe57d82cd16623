//! Checks the body of a turn and rewrites it for the engine.
//!
//! A body is refused if the engine would crash on it or answer 500, or if it would harm another
//! session. Otherwise the engine gets the client's bytes, in which only the keys that Berth decides
//! are replaced: those that name the turn, its session and its DP rank.

mod flags;
mod kv_identity;
mod limits;
mod prompt_start;

use std::{fmt, sync::Arc};

use bytes::Bytes;
use contract::{
    abort::TurnNames,
    answers::{count_sequences, first_byte_inside, has_single_answer},
    body::{self, OWNED_KEYS, Object, Part},
    bootstrap::{Bootstrap, Half},
    hints::TurnHints,
    load::Retention,
    route::Kind,
    turn_rid::RESPONSE_PREFIX,
};
use serde::{
    Deserializer,
    de::{self, DeserializeSeed, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use service::refusal::{Code, Refusal};

use crate::{
    engine::PriorityOrder,
    session::{KvIdentity, Need, PlannedTurn, PromptStart},
};

#[derive(Debug, Clone)]
pub struct BodyContext {
    pub kind: Kind,
    pub in_session: bool,
    pub vocabulary_size: Option<u32>,
    /// The prompt's tokens that are in the engine's cache, as the router knows it.
    pub resident_tokens: u64,
    /// The name may contain a colon.
    pub served_model: Option<Arc<str>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortReach {
    Turn,
    /// The engine has each prompt under an id of its own.
    Prompts(usize),
    /// The engine doesn't take or keep the agent's id, so only the end of the connection helps.
    Connection,
}

#[derive(Debug)]
pub struct ParsedRequest {
    kind: Kind,
    /// Ranges of the client's body, and the place of the JSON members that Berth adds.
    body_parts: Vec<Part>,
    /// Upper bounds.
    pub need: Need,
    /// Empty for a turn without a session.
    pub prompt_start: PromptStart,
    /// JSON of at most 64 characters, for logs.
    pub client_rid: Option<String>,
    pub names: TurnNames,
    pub reach: AbortReach,
    pub wants_stream: bool,
    /// If true, the turn's id names exactly one request.
    pub has_single_answer: bool,
    /// The turn's route takes a priority, and the body states none.
    lacks_priority: bool,
    added_priority: Option<i64>,
    /// `None` for a whole turn.
    bootstrap: Option<Bootstrap>,
}

/// The engine's default on `/generate`.
const GENERATE_ANSWER_TOKENS_MAX_DEFAULT: u64 = 128;
/// These come on top of one token per byte of the body.
const TEMPLATE_TOKENS_MAX: u64 = 256;

pub fn parse(context: &BodyContext, bytes: &Bytes) -> Result<ParsedRequest, Refusal> {
    let BodyContext { kind, in_session, vocabulary_size, .. } = *context;
    let served_model = context.served_model.as_deref();
    if !kind.has_json_body() {
        return Ok(unread(kind, bytes.len()));
    }
    let object = Object::parse(bytes).map_err(invalid_json)?;
    check_session_params(&object)?;
    check_token_ids(kind, &object, vocabulary_size)?;
    let has_single_answer = has_single_answer(kind, &object);
    if in_session && !has_single_answer {
        return Err(Refusal::new(
            Code::BatchInSession,
            "a turn of a session has one prompt and one answer: send a single prompt with n = 1, \
             or leave the session out",
        ));
    }
    let wants_stream = flags::read_wants_stream(kind, &object)?;
    let rid_key = kind.rid_key();
    let client_rid = rid_key.and_then(|key| object.get(key)).map(|rid| shorten(rid.get()));
    let mut owned_keys = OWNED_KEYS.to_vec();
    owned_keys.extend(rid_key);
    let body_parts = object.rewrite(&owned_keys);
    let prompt_start = if in_session {
        prompt_start::read_prompt_start(kind, &object)
    } else {
        PromptStart::default()
    };
    let kv = match in_session {
        true => kv_identity::read_kv_identity(kind, &object, served_model),
        false => KvIdentity::UNKNOWN,
    };
    let need = Need {
        kv,
        sequences: count_sequences(kind, &object),
        is_clamped_batch: !kind.is_generation(),
        ..read_need(kind, context.resident_tokens, &object, bytes.len())
    };
    let takes_priority = kind.is_generation() && kind != Kind::Messages;
    let has_priority = object.get("priority").is_some_and(|value| value.get() != "null");
    Ok(ParsedRequest {
        kind,
        body_parts,
        need,
        prompt_start,
        client_rid,
        names: TurnNames::in_body(kind, &object),
        reach: abort_reach(kind, &object, has_single_answer),
        wants_stream,
        has_single_answer,
        lacks_priority: takes_priority && !has_priority,
        added_priority: None,
        bootstrap: None,
    })
}

/// The engine alone knows how many tokens a sound becomes, so the context length limits them.
fn unread(kind: Kind, body_bytes: usize) -> ParsedRequest {
    ParsedRequest {
        kind,
        body_parts: vec![Part::Kept(0..body_bytes)],
        need: Need {
            prompt_tokens: u64::from(u32::MAX),
            answer_tokens: None,
            kv: KvIdentity::UNKNOWN,
            ..Need::default()
        },
        prompt_start: PromptStart::default(),
        client_rid: None,
        names: TurnNames::None,
        reach: AbortReach::Connection,
        wants_stream: false,
        has_single_answer: true,
        lacks_priority: false,
        added_priority: None,
        bootstrap: None,
    }
}

impl ParsedRequest {
    pub fn apply_hints(&mut self, hints: TurnHints, priority_order: Option<PriorityOrder>) {
        self.need.likely_answer_tokens = hints.answer_tokens;
        let priority = hints.priority.filter(|_| self.lacks_priority);
        self.added_priority = priority.and_then(|priority| match priority_order? {
            PriorityOrder::GreatestFirst => Some(priority),
            PriorityOrder::LeastFirst => Some(priority.saturating_neg()),
        });
    }

    pub fn apply_bootstrap(&mut self, bootstrap: Option<Bootstrap>) {
        if bootstrap.as_ref().is_some_and(|bootstrap| bootstrap.half == Half::Prefill) {
            // The prefill engine generates the first token, and none after it.
            self.need.answer_tokens = Some(1);
        }
        self.bootstrap = bootstrap;
    }

    /// `bytes` is the body that was parsed.
    #[must_use]
    pub fn engine_body(&self, bytes: &Bytes, turn: &PlannedTurn, rid: &str) -> Vec<Bytes> {
        let mut members = added_members(self.kind, turn, rid, self.has_single_answer);
        if let Some(priority) = self.added_priority {
            // Of duplicate keys the last one counts, so this replaces a `null` of the client's.
            members.push_str(&format!(r#","priority":{priority}"#));
        }
        if let Some(bootstrap) = &self.bootstrap {
            members.push(',');
            members.push_str(&bootstrap.members());
        }
        let parts = self.body_parts.iter().map(|part| match part {
            Part::Kept(range) => bytes.slice(range.clone()),
            Part::Added { needs_comma: true } => Bytes::from(format!(",{members}")),
            Part::Added { needs_comma: false } => Bytes::from(members.clone()),
        });
        parts.collect()
    }
}

fn read_need(kind: Kind, resident_tokens: u64, object: &Object<'_>, body_bytes: usize) -> Need {
    // Pydantic takes words and numbers for true, and `sampling_params` all that Python takes for
    // true. A flag that is read as false would let the turn outgrow its room.
    let is_true =
        |value: &RawValue| !matches!(value.get(), "false" | "null" | "0" | "0.0" | "\"\"");
    if kind != Kind::Generate {
        return Need {
            prompt_tokens: body_bytes as u64 + TEMPLATE_TOKENS_MAX,
            answer_tokens: limits::read_answer_limit(kind, object),
            ignores_eos: object.get("ignore_eos").is_some_and(is_true),
            resident_tokens,
            ..Need::default()
        };
    }
    let sampling = object.get("sampling_params").filter(|params| params.get() != "null");
    let sampling = sampling.map(|params| Object::parse(params.get().as_bytes()));
    let is_unreadable = matches!(sampling, Some(Err(_)));
    let sampling = sampling.and_then(Result::ok);
    let sampling_param = |key: &str| sampling.as_ref().and_then(|params| params.get(key));
    let answer_tokens = match sampling_param("max_new_tokens") {
        // The engine may read a limit that the agent can't read.
        None if is_unreadable => None,
        None => Some(GENERATE_ANSWER_TOKENS_MAX_DEFAULT),
        // `null` isn't a number, so it becomes `None`, which means as many tokens as fit.
        Some(limit) => limit.get().parse().ok(),
    };
    let ignores_eos = is_unreadable || sampling_param("ignore_eos").is_some_and(is_true);
    let (prompt_tokens, is_exact) = count_generate_prompt(object);
    Need { prompt_tokens, answer_tokens, is_exact, ignores_eos, resident_tokens, ..Need::default() }
}

/// A text has at most one token per byte, plus one that the tokenizer may put first. Also returns
/// whether the bound is exact.
fn count_generate_prompt(object: &Object<'_>) -> (u64, bool) {
    let non_null = |key: &str| object.get(key).filter(|value| value.get() != "null");
    if ["image_data", "video_data", "audio_data"].iter().any(|key| non_null(key).is_some()) {
        // Only the engine knows how many tokens images, videos and sounds become, so the context
        // length limits the prompt.
        return (u64::from(u32::MAX), false);
    }
    let ids = object.get("input_ids").filter(|ids| ids.get().starts_with('['));
    let is_flat_list = |ids: &&RawValue| first_byte_inside(ids) != Some(b'[');
    match (ids.filter(is_flat_list), non_null("text")) {
        (Some(ids), None) => {
            let comma_count = ids.get().bytes().filter(|byte| *byte == b',').count() as u64;
            let is_nonempty = first_byte_inside(ids).is_some_and(|byte| byte != b']');
            (comma_count + u64::from(is_nonempty), true)
        }
        (_, text) => (text.or(ids).map_or(0, |text| text.get().len() as u64) + 1, false),
    }
}

fn added_members(kind: Kind, turn: &PlannedTurn, rid: &str, has_single_answer: bool) -> String {
    let mut members = vec![];
    // The engine fails on one id for a list of texts to embed.
    let takes_rid = has_single_answer || !matches!(kind, Kind::Embeddings | Kind::Encode);
    if let Some(key) = kind.rid_key().filter(|_| takes_rid) {
        let prefix = if kind == Kind::Responses { RESPONSE_PREFIX } else { "" };
        members.push(format!(r#""{key}":"{prefix}{rid}""#));
    }
    if let Some(session) = &turn.session {
        let id = &session.incarnation;
        // The shim may trim the turn. Otherwise it runs as named here.
        match session.retention {
            Retention::Pinned => members.push(format!(r#""session_params":{{"id":"{id}"}}"#)),
            Retention::Tagged if kind.is_taggable() => {
                members.push(format!(r#""session_id":"{id}""#))
            }
            Retention::Tagged | Retention::None => {}
        }
    }
    members.push(format!(r#""routed_dp_rank":{}"#, turn.dp_rank));
    members.join(",")
}

#[expect(clippy::needless_pass_by_value, reason = "`map_err` passes the error")]
fn invalid_json(error: body::Error) -> Refusal {
    Refusal::new(Code::InvalidJson, format!("{error}; send one JSON object"))
}

/// The engine answers 500 to unknown keys. `offset`, `replace` and `drop_previous_output` would
/// change the history of earlier turns, which the agent doesn't support.
fn check_session_params(object: &Object<'_>) -> Result<(), Refusal> {
    let Some(params) = object.get("session_params").filter(|params| params.get() != "null") else {
        return Ok(());
    };
    let refuse = |detail: String| Err(Refusal::new(Code::SessionParams, detail));
    let Ok(params) = Object::parse(params.get().as_bytes()) else {
        return refuse("session_params must be an object with the key `id`".into());
    };
    for member in params.members() {
        let key = member.key.as_str();
        let is_null_or_false = matches!(member.value.get(), "null" | "false");
        let is_legal = match key {
            "id" | "rid" => true,
            "offset" | "replace" | "drop_previous_output" => is_null_or_false,
            _ => false,
        };
        if !is_legal {
            return refuse(format!(
                "session_params.{} isn't possible here: sessions only append. Send `id` alone; to \
                 change history, open a new session",
                shorten(key)
            ));
        }
    }
    Ok(())
}

/// An id outside the vocabulary crashes the engine's process. A list that mixes texts, ids or other
/// values is refused, because the engine's parser also takes `true` and `"1"` for ids.
fn check_token_ids(
    kind: Kind,
    object: &Object<'_>,
    vocabulary_size: Option<u32>,
) -> Result<(), Refusal> {
    let vocabulary_size = vocabulary_size.map_or(u64::from(u32::MAX), u64::from);
    let allows_texts = !matches!(kind, Kind::Generate | Kind::Encode);
    let values = kind.token_ids_keys().iter().filter_map(|key| object.get(key));
    for value in values.filter(|value| value.get().starts_with('[')) {
        let visitor = TokenIdsVisitor { vocabulary_size, allows_texts };
        let checked = serde_json::Deserializer::from_str(value.get()).deserialize_any(visitor);
        checked.map_err(|error| {
            let text = error.to_string();
            let is_outside_vocabulary = text.contains(OUTSIDE_VOCABULARY);
            let code =
                if is_outside_vocabulary { Code::TokenOutOfVocabulary } else { Code::TokenIds };
            Refusal::new(code, text)
        })?;
    }
    Ok(())
}

/// [`check_token_ids`] knows by this text that an id is too large.
const OUTSIDE_VOCABULARY: &str = "is outside the vocabulary";

#[derive(Clone, Copy)]
struct TokenIdsVisitor {
    vocabulary_size: u64,
    allows_texts: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PromptElement {
    Id,
    Text,
    List,
}

impl<'de> Visitor<'de> for TokenIdsVisitor {
    type Value = PromptElement;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.allows_texts {
            "texts, or token ids as integers"
        } else {
            "integer token ids"
        })
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<PromptElement, E> {
        if id < self.vocabulary_size {
            return Ok(PromptElement::Id);
        }
        let last_id = self.vocabulary_size - 1;
        Err(E::custom(format_args!(
            "token id {id} {OUTSIDE_VOCABULARY}, whose ids are 0 to {last_id}"
        )))
    }

    fn visit_i64<E: de::Error>(self, id: i64) -> Result<PromptElement, E> {
        // The deserializer calls this only for negative numbers.
        self.visit_u64(u64::MAX).map_err(|_: E| {
            let last_id = self.vocabulary_size - 1;
            E::custom(format_args!(
                "token id {id} {OUTSIDE_VOCABULARY}, whose ids are 0 to {last_id}"
            ))
        })
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptElement, E> {
        if self.allows_texts {
            return Ok(PromptElement::Text);
        }
        Err(E::invalid_type(de::Unexpected::Str(&shorten(text)), &self))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptElement, A::Error> {
        let mut first_element = None;
        while let Some(element) = list.next_element_seed(self)? {
            if *first_element.get_or_insert(element) != element {
                return Err(de::Error::custom("texts, ids and lists don't mix in a prompt"));
            }
        }
        Ok(PromptElement::List)
    }
}

impl<'de> DeserializeSeed<'de> for TokenIdsVisitor {
    type Value = PromptElement;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<PromptElement, D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Each of a list of prompts has an id that is made of the turn's id. Several answers to one prompt
/// have ids that nobody knows.
fn abort_reach(kind: Kind, object: &Object<'_>, has_single_answer: bool) -> AbortReach {
    if kind.rid_key().is_none() {
        return AbortReach::Connection;
    }
    if has_single_answer {
        return AbortReach::Turn;
    }
    let list_key = match kind {
        Kind::Generate if object.get("text").is_some_and(|text| text.get() != "null") => "text",
        Kind::Generate => "input_ids",
        Kind::Completions => "prompt",
        _ => return AbortReach::Connection,
    };
    let is_one = |value: Option<&RawValue>| value.is_none_or(|n| matches!(n.get(), "1" | "null"));
    let has_one_answer_each = match object.get("sampling_params") {
        Some(params) if params.get() != "null" => {
            Object::parse(params.get().as_bytes()).is_ok_and(|params| is_one(params.get("n")))
        }
        _ => is_one(object.get("n")) && is_one(object.get("best_of")),
    };
    let list: Option<Vec<de::IgnoredAny>> =
        object.get(list_key).and_then(|list| serde_json::from_str(list.get()).ok());
    match list {
        Some(prompts) if has_one_answer_each => AbortReach::Prompts(prompts.len()),
        _ => AbortReach::Connection,
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::session::TurnSession;

    fn turn(retention: Option<Retention>) -> PlannedTurn {
        let session = retention.map(|retention| TurnSession {
            key: contract::id::SessionKey::new("p", "s").unwrap(),
            incarnation: "berth-a-1-1".into(),
            retention,
            trim: None,
        });
        PlannedTurn {
            session,
            dp_rank: 1,
            growth_tokens_max: None,
            weights_epoch: 1,
            run_mode: None,
        }
    }

    fn context(kind: Kind, in_session: bool, vocabulary_size: Option<u32>) -> BodyContext {
        let served_model = Some("m:8b".into());
        BodyContext { kind, in_session, vocabulary_size, resident_tokens: 0, served_model }
    }

    fn sent(kind: Kind, retention: Option<Retention>, body: &str) -> Result<Value, Code> {
        let bytes = Bytes::copy_from_slice(body.as_bytes());
        let parsed = parse(&context(kind, retention.is_some(), Some(320)), &bytes);
        let body =
            parsed.map_err(|refusal| refusal.code)?.engine_body(&bytes, &turn(retention), "R");
        Ok(serde_json::from_slice(&body.concat()).unwrap())
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
    fn a_hinted_priority_is_added_only_where_the_engine_takes_one_and_the_body_has_none() {
        use PriorityOrder::{GreatestFirst, LeastFirst};
        let added = |kind, body: &str, order| {
            let bytes = Bytes::copy_from_slice(body.as_bytes());
            let mut parsed = parse(&context(kind, false, None), &bytes).unwrap();
            let hints = TurnHints { priority: Some(7), ..TurnHints::default() };
            parsed.apply_hints(hints, order);
            let body = parsed.engine_body(&bytes, &turn(None), "R").concat();
            serde_json::from_slice::<Value>(&body).unwrap()["priority"].as_i64()
        };
        assert_eq!(added(Kind::Generate, r#"{"text":"a"}"#, Some(GreatestFirst)), Some(7));
        assert_eq!(added(Kind::Chat, r#"{"priority":null}"#, Some(LeastFirst)), Some(-7));
        assert_eq!(added(Kind::Chat, r#"{"priority":2}"#, Some(GreatestFirst)), Some(2));
        assert_eq!(added(Kind::Chat, "{}", None), None, "the engine could refuse it");
        assert_eq!(added(Kind::Messages, "{}", Some(GreatestFirst)), None);
    }

    #[test]
    fn what_would_harm_the_engine_is_refused() {
        let cases = [
            (Kind::Generate, r#"{"input_ids":[1,320]}"#, Code::TokenOutOfVocabulary),
            (Kind::Generate, r#"{"input_ids":[[1],[-1]]}"#, Code::TokenOutOfVocabulary),
            (Kind::Generate, r#"{"input_ids":[1,2.5]}"#, Code::TokenIds),
            (Kind::Generate, r#"{"input_ids":[1,"2"]}"#, Code::TokenIds),
            (Kind::Generate, r#"{"input_ids":["1",5000]}"#, Code::TokenIds),
            (Kind::Generate, r#"{"input_ids":[true,5000]}"#, Code::TokenIds),
            (Kind::Generate, r#"{"input_ids":[[1],2]}"#, Code::TokenIds),
            (Kind::Completions, r#"{"prompt":["1",5000]}"#, Code::TokenOutOfVocabulary),
            (Kind::Completions, r#"{"prompt":["1",7]}"#, Code::TokenIds),
            (Kind::Completions, r#"{"prompt":[true]}"#, Code::TokenIds),
            (Kind::Generate, r#"{"input_ids":[99999999999999999999]}"#, Code::TokenIds),
            (Kind::Embeddings, r#"{"input":[[5000]]}"#, Code::TokenOutOfVocabulary),
            (Kind::Encode, r#"{"input_ids":[5000]}"#, Code::TokenOutOfVocabulary),
            (Kind::Encode, r#"{"input_ids":["5000"]}"#, Code::TokenIds),
            (Kind::Score, r#"{"query":[5000]}"#, Code::TokenOutOfVocabulary),
            (Kind::Score, r#"{"query":"a","items":[[5000]]}"#, Code::TokenOutOfVocabulary),
            (
                Kind::Score,
                r#"{"items":["a"],"label_token_ids":[5000]}"#,
                Code::TokenOutOfVocabulary,
            ),
            (Kind::Completions, r#"{"prompt":[5000]}"#, Code::TokenOutOfVocabulary),
            (Kind::Completions, r#"{"prompt":[[5000]]}"#, Code::TokenOutOfVocabulary),
            (Kind::Generate, r#"{"text":"a""#, Code::InvalidJson),
            (Kind::Generate, r#"["text"]"#, Code::InvalidJson),
            (Kind::Generate, r#"{"session_params":{"id":"s","bogus":1}}"#, Code::SessionParams),
            (Kind::Generate, r#"{"session_params":{"id":"s","offset":0}}"#, Code::SessionParams),
            (Kind::Generate, r#"{"session_params":{"replace":true}}"#, Code::SessionParams),
            (Kind::Generate, r#"{"session_params":"s"}"#, Code::SessionParams),
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
            (Kind::Generate, r#"{"input_embeds":[[[0.5]]]}"#),
            (Kind::Completions, r#"{"prompt":["a"]}"#),
            (Kind::Completions, r#"{"prompt":[[1]]}"#),
            (Kind::Completions, r#"{"prompt":"a","n":2}"#),
            (Kind::Chat, r#"{"messages":[],"n":3}"#),
        ];
        for (kind, body) in batches {
            let tagged = Some(Retention::Tagged);
            assert_eq!(sent(kind, tagged, body), Err(Code::BatchInSession), "{body}");
            assert!(sent(kind, None, body).is_ok(), "without a session it may pass: {body}");
        }
        let single = r#"{"input_ids":[1,2],"sampling_params":{"n":1}}"#;
        assert!(sent(Kind::Generate, Some(Retention::Pinned), single).is_ok());
        assert!(sent(Kind::Completions, Some(Retention::Tagged), r#"{"prompt":[1,2]}"#).is_ok());
    }

    #[test]
    fn a_turn_in_the_background_is_refused() {
        let later = r#"{"input":"a","background":true}"#;
        for retention in [None, Some(Retention::Tagged)] {
            assert_eq!(sent(Kind::Responses, retention, later), Err(Code::BackgroundUnsupported));
        }
        for odd in [r#""on""#, "1", r#""TRUE""#] {
            let later = format!(r#"{{"text":"a","background":{odd}}}"#);
            let refused = sent(Kind::Generate, None, &later);
            assert_eq!(refused, Err(Code::BackgroundUnsupported), "{odd}");
        }
        assert!(sent(Kind::Responses, None, r#"{"input":"a","background":false}"#).is_ok());
        assert!(sent(Kind::Chat, None, r#"{"messages":[],"background":true}"#).is_ok());
    }

    #[test]
    fn a_body_that_counts_on_a_history_elsewhere_is_refused() {
        for (kind, member, code) in [
            (Kind::Messages, r#""thread":{"type":"create"}"#, Code::ThreadUnsupported),
            (Kind::Messages, r#""thread":"x""#, Code::ThreadUnsupported),
            (
                Kind::Messages,
                r#""thread":{"type":"continue","previous_message_id":"msg_1"}"#,
                Code::ThreadNotFound,
            ),
            (Kind::Responses, r#""conversation":"conv_1""#, Code::ConversationUnsupported),
            (Kind::Responses, r#""prompt":{"id":"pmpt_1"}"#, Code::ConversationUnsupported),
        ] {
            let body = format!(r#"{{"messages":[],"input":"a",{member}}}"#);
            for retention in [None, Some(Retention::Tagged)] {
                assert_eq!(sent(kind, retention, &body), Err(code), "{member}");
            }
            let null = format!(r#"{{"input":"a",{}:null}}"#, member.split(':').next().unwrap());
            assert!(sent(kind, None, &null).is_ok(), "{null}");
        }
        assert!(sent(Kind::Chat, None, r#"{"messages":[],"thread":{"type":"create"}}"#).is_ok());
    }

    #[test]
    fn no_client_reaches_into_the_engine() {
        for member in [
            r#""encoder_urls":["http://evil.example"]"#,
            r#""http_worker_ipc":"ipc:///tmp/x""#,
            r#""kv_hints":{}"#,
            r#""conversation_id":"other""#,
            r#""stream":"perhaps""#,
        ] {
            let body = format!(r#"{{"text":"a",{member}}}"#);
            assert_eq!(sent(Kind::Generate, None, &body), Err(Code::InvalidField), "{member}");
        }
        assert!(sent(Kind::Generate, None, r#"{"text":"a","kv_hints":null}"#).is_ok());
        let of_program = r#"{"messages":[],"conversation_id":"mine"}"#;
        assert!(sent(Kind::Chat, None, of_program).is_ok(), "the engine doesn't read it there");
    }

    #[test]
    fn the_engine_can_abort_what_has_ids_of_the_agent() {
        for (kind, body, reach) in [
            (Kind::Generate, r#"{"text":"a"}"#, AbortReach::Turn),
            (Kind::Generate, r#"{"text":["a","b"]}"#, AbortReach::Prompts(2)),
            (Kind::Generate, r#"{"input_ids":[[1],[2],[3]]}"#, AbortReach::Prompts(3)),
            (Kind::Completions, r#"{"prompt":["a"]}"#, AbortReach::Prompts(1)),
            (Kind::Completions, r#"{"prompt":["a"],"n":2}"#, AbortReach::Connection),
            (Kind::Generate, r#"{"text":"a","sampling_params":{"n":2}}"#, AbortReach::Connection),
            (Kind::Generate, r#"{"text":["a"],"sampling_params":[{}]}"#, AbortReach::Connection),
            (Kind::Messages, r#"{"messages":[]}"#, AbortReach::Connection),
            (Kind::Responses, r#"{"input":"a"}"#, AbortReach::Turn),
        ] {
            let bytes = Bytes::from_static(body.as_bytes());
            assert_eq!(parse(&context(kind, false, None), &bytes).unwrap().reach, reach, "{body}");
        }
    }

    #[test]
    fn texts_to_embed_get_no_id_of_the_agent() {
        // The engine asserts that the ids of several texts are a list.
        let several = sent(Kind::Embeddings, None, r#"{"input":["a","b"],"rid":"x"}"#).unwrap();
        assert_eq!(several.get("rid"), None);
        assert_eq!(sent(Kind::Embeddings, None, r#"{"input":"a"}"#).unwrap()["rid"], "R");
    }

    #[test]
    fn what_a_turn_may_need_is_never_underestimated() {
        let of = |kind, body: &'static str| {
            let bytes = Bytes::from_static(body.as_bytes());
            let need = parse(&context(kind, false, None), &bytes).unwrap().need;
            (need.prompt_tokens, need.answer_tokens, need.is_exact)
        };
        let generate = |body| of(Kind::Generate, body);
        assert_eq!(generate(r#"{"input_ids":[1, 2,3]}"#), (3, Some(128), true));
        assert_eq!(generate(r#"{"input_ids":[ ]}"#), (0, Some(128), true));
        let nulls = r#"{"text":null,"input_ids":[1,2,3],"image_data":null}"#;
        assert_eq!(generate(nulls), (3, Some(128), true), "what clients write for what they lack");
        let (prompt, _, exact) = generate(r#"{"text":"a","image_data":"http://x"}"#);
        assert!(prompt > 1_000_000 && !exact, "a picture may take any number: {prompt}");
        let limited = r#"{"input_ids":[7],"sampling_params":{"max_new_tokens":9}}"#;
        assert_eq!(generate(limited), (1, Some(9), true));
        let ignores_eos = r#"{"input_ids":[7],"sampling_params":{"max_new_tokens":null}}"#;
        assert_eq!(generate(ignores_eos), (1, None, true), "up to the context");
        let (prompt, _, exact) = generate(r#"{"text":"abcd"}"#);
        assert!(prompt >= 5 && !exact, "a token per byte, and a beginning: {prompt}");
        let (prompt, answer, _) = of(Kind::Chat, r#"{"messages":[],"max_tokens":5}"#);
        assert!(prompt > 25 && answer == Some(5), "{prompt} {answer:?}");
        assert_eq!(of(Kind::Chat, "{}").1, None, "without a limit, the context is one");
        assert_eq!(of(Kind::Completions, "{}").1, Some(16), "the engine's own");
        for (body, limit) in [
            (r#"{"max_tokens":"4000"}"#, Some(4000)),
            (r#"{"max_tokens":4000.0}"#, Some(4000)),
            (r#"{"max_tokens":null}"#, Some(16)),
            (r#"{"max_tokens":"4_000"}"#, None),
            (r#"{"max_tokens":-1}"#, None),
        ] {
            assert_eq!(of(Kind::Completions, body).1, limit, "{body}");
        }
        let two = r#"{"messages":[],"max_completion_tokens":"x","max_tokens":5}"#;
        assert_eq!(of(Kind::Chat, two).1, None, "one that the agent can't read");
        let list = r#"{"text":"a","sampling_params":[{"max_new_tokens":900}]}"#;
        assert_eq!(generate(list).1, None, "a form that the agent doesn't read");
    }

    #[test]
    fn an_answer_that_may_ignore_its_end_has_room_for_its_limit() {
        for (form, may_ignore) in
            [("true", true), ("1", true), (r#""yes""#, true), ("false", false), ("null", false)]
        {
            for (kind, body) in [
                (Kind::Chat, format!(r#"{{"messages":[],"ignore_eos":{form}}}"#)),
                (
                    Kind::Generate,
                    format!(r#"{{"text":"","sampling_params":{{"ignore_eos":{form}}}}}"#),
                ),
            ] {
                let need = parse(&context(kind, false, None), &Bytes::from(body)).unwrap().need;
                assert_eq!(need.ignores_eos, may_ignore, "{kind:?} {form}");
            }
        }
    }

    #[test]
    fn an_unknown_vocabulary_still_refuses_what_no_model_has() {
        let bytes = Bytes::from_static(br#"{"input_ids":[5000]}"#);
        assert!(parse(&context(Kind::Generate, false, None), &bytes).is_ok());
        let bytes = Bytes::from_static(br#"{"input_ids":[-1]}"#);
        assert!(parse(&context(Kind::Generate, false, None), &bytes).is_err());
    }
}
