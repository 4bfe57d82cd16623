//! Reads what a client's request says about its session, from the headers and the JSON body.
//!
//! The session's id is taken from the first source that is present: `nvext.session_control` in the
//! body (a field of the Dynamo API), the header `x-berth-session-id`, `session_params.id` in the
//! body (the turn is then a delta), what clients send on their own ([`session_names`]),
//! `session_id` in the body, and at last a header that may name only the request. An id that
//! clients send on their own is a hint, unless the turn says more about its session in Berth's own
//! headers.
//!
//! Equal ids of two principals are two sessions. Pure: which sessions exist is
//! checked later.

use contract::{
    abort::TurnNames,
    body::{self, Object},
    hints::TurnHints,
    id::{self, SessionKey},
    load::{Retention, WEIGHTS, WantedWeights},
};
use http::{HeaderMap, HeaderName};
use serde_json::{Value, value::RawValue};
use xxhash_rust::xxh3::xxh3_128;

use super::{
    hints, model_names,
    session_names::{self, Hint, SessionHeaders},
};
use crate::{
    fleet::worker::AgentKey,
    placement::PairUse,
    prompt::Prompt,
    sessions::intent::{HintKind, SessionIntent},
};

pub const SESSION_ID_HEADER: HeaderName = HeaderName::from_static("x-berth-session-id");
/// `1` or `true` means that the body holds only the tokens that are new in this turn.
pub const DELTA_HEADER: HeaderName = HeaderName::from_static("x-berth-delta");
/// `1` or `true` means that the session closes when this turn has ended.
pub const SESSION_FINAL_HEADER: HeaderName = HeaderName::from_static("x-berth-session-final");
/// How the engine keeps a new session's KV between turns. `pinned` KV is private to the session and
/// isn't evicted, `tagged` KV is evicted after other KV, `none` is as any other KV. With `auto`,
/// the agent chooses.
pub const RETENTION_HEADER: HeaderName = HeaderName::from_static("x-berth-retention");

/// Ten years. A longer time is a mistake, and could overflow the agent's clock.
const IDLE_SECONDS_MAX: f64 = 315_360_000.0;

/// Objects whose members Berth reads have hundreds of bytes.
const OBJECT_BYTES_MAX: usize = 64 << 10;
const OBJECT_ALLOWED: &str = "an object of at most 64 KiB with at most 4096 members";
const NVEXT_ALLOWED: &str = "an object with at most 4096 members";

const IDLE_SECONDS_ALLOWED: &str = "a positive number of seconds, at most ten years";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}; send one JSON object")]
    Body(#[from] body::Error),
    #[error("{0}; send an id of that length")]
    SessionId(#[from] id::Error),
    #[error("{field} must be {allowed}")]
    Field {
        /// The name of the field or header.
        field: &'static str,
        allowed: &'static str,
    },
    #[error("this route's prompts would share a cache with other clients; use another route")]
    NotIsolated,
    #[error("{DELTA_HEADER} is set but no session is named; add {SESSION_ID_HEADER}")]
    DeltaWithoutSession,
}

/// A field of the Dynamo API.
#[derive(Debug, Default)]
pub struct Nvext<'a> {
    session_control: Option<Object<'a>>,
    /// `None` also if the hints can't be read.
    pub(super) agent_hints: Option<Object<'a>>,
}

impl<'a> Nvext<'a> {
    pub fn read(body: &Object<'a>) -> Result<Self, Error> {
        let nvext = match body.get("nvext").filter(|raw| raw.get() != "null") {
            None => return Ok(Self::default()),
            // What Berth doesn't read of it may be long, such as a prompt's token ids.
            Some(raw) => Object::parse(raw.get().as_bytes())
                .map_err(|_| Error::Field { field: "nvext", allowed: NVEXT_ALLOWED })?,
        };
        let session_control = object_member(&nvext, "session_control", "nvext.session_control")?;
        let agent_hints = object_member(&nvext, "agent_hints", "nvext.agent_hints").ok().flatten();
        Ok(Self { session_control, agent_hints })
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Turn {
    pub session: Option<SessionIntent>,
    pub has_unusable_name: bool,
    /// This name may be only the request's. If it comes again, it names a session.
    pub name_seen_once: Option<SessionKey>,
    pub hints: TurnHints,
    /// The session that started this one, as a sub-agent.
    pub parent: Option<SessionKey>,
    /// Made of the client's `prompt_cache_key`, to bring turns with the same key to one worker.
    /// Never a session's id.
    pub cache_key: Option<SessionKey>,
    /// `model:adapter` or `:adapter` if the body names a LoRA adapter.
    pub model: Option<String>,
    pub weights: Option<WantedWeights>,
    pub prompt: Prompt,
    pub body_bytes: u64,
    /// The turn's prompts times the answers to each.
    pub sequences: u32,
    pub has_several_answers: bool,
    /// Whether the answer is made after the response has ended.
    pub is_background: bool,
    pub wants_stream: bool,
    pub names: TurnNames,
    /// The stored response that the turn continues.
    pub previous_response: Option<String>,
    /// The agent whose engine has that response. Only that engine can run the turn.
    pub response_agent: Option<AgentKey>,
    pub pairs: PairUse,
    /// Whether the answer needs log probabilities of the prompt, which only a pair's prefill engine
    /// has.
    pub merges_logprobs: bool,
}

impl Turn {
    /// Whether running the turn twice changes no more than running it once. A delta would be
    /// appended twice, and what opens or closes a session has changed it.
    #[must_use]
    pub fn is_idempotent(&self) -> bool {
        let changes = |it: &SessionIntent| it.is_delta || it.opens_session || it.closes_session;
        !self.session.as_ref().is_some_and(changes)
    }
}

/// Returns the session that the headers surely name, so that the router can check it before it
/// reads the body. `names` has the headers that hint at sessions.
pub fn header_session(
    names: &SessionHeaders,
    headers: &HeaderMap,
    principal: &str,
) -> Result<Option<(SessionKey, Option<HintKind>)>, Error> {
    if let Some(key) = own_header_session(headers, principal)? {
        return Ok(Some((key, None)));
    }
    match names.find(headers, principal) {
        Hint::Session { key, may_be_request: false } => Ok(Some((key, Some(HintKind::Session)))),
        Hint::Session { .. } | Hint::Unusable | Hint::Absent => Ok(None),
    }
}

fn own_header_session(headers: &HeaderMap, principal: &str) -> Result<Option<SessionKey>, Error> {
    match header_text(headers, &SESSION_ID_HEADER)? {
        Some(id) => Ok(Some(SessionKey::new(principal, id)?)),
        None => Ok(None),
    }
}

/// `names` has the headers that hint at sessions.
pub fn read(
    names: &SessionHeaders,
    headers: &HeaderMap,
    body: &[u8],
    principal: &str,
) -> Result<Turn, Error> {
    let object = Object::parse(body)?;
    read_session(names, headers, &object, &Nvext::read(&object)?, principal)
}

/// Returns what concerns the session; the stage `read` sets the other fields. `nvext` is that of
/// `object`.
pub fn read_session(
    names: &SessionHeaders,
    headers: &HeaderMap,
    object: &Object<'_>,
    nvext: &Nvext<'_>,
    principal: &str,
) -> Result<Turn, Error> {
    let control = nvext.session_control.as_ref().map(SessionControl::read).transpose()?;
    let session_params_id = session_params_id(object)?;
    let session_id_member = string_member(object, "session_id", "session_id")?;
    let body_session_id = session_id_member.or_else(|| session_params_id.clone());
    let hint = names.find_in_request(headers, object, principal);
    let has_unusable_name = hint == Hint::Unusable;
    let own_key = match &control {
        Some(control) => Some(SessionKey::new(principal, control.session_id.as_str())?),
        None => own_header_session(headers, principal)?,
    };
    // What a delta holds belongs to the session that its body names, whatever else is sent.
    let of_delta = session_params_id.as_ref().filter(|_| own_key.is_none());
    let of_delta = of_delta.map(|id| SessionKey::new(principal, id.as_str())).transpose()?;
    let own_key = own_key.or(of_delta);
    let named = choose_name(own_key, hint, body_session_id, principal)?;
    // SGLang's own `session_params` always mean a delta.
    let is_delta = header_flag(headers, &DELTA_HEADER, "the header x-berth-delta")?
        || session_params_id.is_some();
    let is_final = header_flag(headers, &SESSION_FINAL_HEADER, "the header x-berth-session-final")?;
    let retention = header_retention(headers)?;
    let action = control.as_ref().map_or(SessionAction::Continue, |control| control.action);
    let session = match named {
        None if is_delta => return Err(Error::DeltaWithoutSession),
        None => None,
        Some((key, hint)) => {
            let is_hint = !is_delta && !is_final && retention.is_none();
            let opens_session = action == SessionAction::Open;
            // A delta appends to KV that is private to its session. So a session that a delta opens
            // is pinned, unless the client names a retention.
            let retention = retention.or((opens_session && is_delta).then_some(Retention::Pinned));
            Some(SessionIntent {
                key,
                hint: hint.filter(|_| is_hint),
                is_kept_required: control.as_ref().is_some_and(|control| control.is_required),
                retention,
                is_delta,
                opens_session,
                closes_session: is_final || action == SessionAction::Close,
                is_placement_only: action == SessionAction::Bind,
                idle_ms_max: control
                    .and_then(|control| control.idle_ms_max)
                    .or_else(|| hints::idle_ms(object)),
            })
        }
    };
    let parent = session_names::find_parent(headers, principal);
    Ok(Turn {
        parent: parent.filter(|parent| session.as_ref().is_none_or(|it| it.key != *parent)),
        session,
        has_unusable_name,
        cache_key: cache_key(object, principal),
        model: model_names::with_adapter(object, model_names::model_member(object)),
        weights: header_weights(headers)?,
        prompt: Prompt::find(object),
        body_bytes: object.bytes().len() as u64,
        wants_stream: contract::flags::read_flag(object.get("stream")).unwrap_or(false),
        ..Turn::default()
    })
}

fn choose_name(
    own_key: Option<SessionKey>,
    hint: Hint,
    body_id: Option<String>,
    principal: &str,
) -> Result<Option<(SessionKey, Option<HintKind>)>, Error> {
    Ok(match (own_key, hint, body_id) {
        (Some(key), ..) => Some((key, None)),
        (None, Hint::Session { key, may_be_request: false }, _) => {
            Some((key, Some(HintKind::Session)))
        }
        (None, _, Some(id)) => Some((SessionKey::new(principal, id)?, None)),
        (None, Hint::Session { key, .. }, None) => Some((key, Some(HintKind::SessionOrRequest))),
        (None, Hint::Unusable | Hint::Absent, None) => None,
    })
}

fn cache_key(object: &Object<'_>, principal: &str) -> Option<SessionKey> {
    let key = string_member_or_none(object, "prompt_cache_key")?;
    // The client's key can have any length, and a session key can't, so it is hashed.
    SessionKey::new(principal, format!("{:032x}", xxh3_128(key.as_bytes()))).ok()
}

fn header_weights(headers: &HeaderMap) -> Result<Option<WantedWeights>, Error> {
    let field = "the header x-berth-weights";
    let allowed = "`EPOCH`, `EPOCH/LABEL` or `/LABEL`";
    let Some(value) = headers.get(WEIGHTS) else { return Ok(None) };
    let wanted = value.to_str().ok().and_then(|text| WantedWeights::parse(text).ok());
    wanted.map(Some).ok_or(Error::Field { field, allowed })
}

/// Returns milliseconds for seconds, and `None` for null. An error names `field`.
pub fn parse_idle_ms(value: &Value, field: &'static str) -> Result<Option<u64>, Error> {
    if value.is_null() {
        return Ok(None);
    }
    let invalid = Error::Field { field, allowed: IDLE_SECONDS_ALLOWED };
    let Some(seconds) = value.as_f64() else { return Err(invalid) };
    if !(seconds > 0.0 && seconds <= IDLE_SECONDS_MAX) {
        return Err(invalid);
    }
    let milliseconds = std::time::Duration::from_secs_f64(seconds).as_millis();
    Ok(Some(u64::try_from(milliseconds).expect("ten years fit").max(1)))
}

/// `None` for `auto`. An error names `field`.
pub fn parse_retention(name: &str, field: &'static str) -> Result<Option<Retention>, Error> {
    match name {
        "auto" => Ok(None),
        "pinned" => Ok(Some(Retention::Pinned)),
        "tagged" => Ok(Some(Retention::Tagged)),
        "none" => Ok(Some(Retention::None)),
        _ => Err(Error::Field { field, allowed: "pinned, tagged, none or auto" }),
    }
}

/// What a request asks for besides running the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionAction {
    /// Nothing else.
    Continue,
    Open,
    Close,
    /// Send the session's turns to the same worker, without a session at the agent.
    Bind,
}

struct SessionControl {
    session_id: String,
    action: SessionAction,
    idle_ms_max: Option<u64>,
    /// Whether the turn must be refused if no engine can keep the session.
    is_required: bool,
}

impl SessionControl {
    fn read(control: &Object<'_>) -> Result<Self, Error> {
        let field = "nvext.session_control.session_id";
        let session_id = string_member(control, "session_id", field)?
            .ok_or(Error::Field { field, allowed: "a string of 1 to 256 bytes" })?;
        let field = "nvext.session_control.action";
        let action = match string_member(control, "action", field)?.as_deref() {
            None => SessionAction::Continue,
            Some("open") => SessionAction::Open,
            Some("close") => SessionAction::Close,
            Some("bind") => SessionAction::Bind,
            Some(_) => return Err(Error::Field { field, allowed: "open, close or bind" }),
        };
        let field = "nvext.session_control.timeout";
        let timeout = match control.get("timeout").map(|raw| serde_json::from_str(raw.get())) {
            None => Value::Null,
            Some(Ok(timeout)) => timeout,
            // A number that is too large, or a value that is nested too deeply.
            Some(Err(_)) => return Err(Error::Field { field, allowed: IDLE_SECONDS_ALLOWED }),
        };
        let idle_ms_max = parse_idle_ms(&timeout, field)?;
        let is_required = match control.get("required").map(RawValue::get) {
            None | Some("null" | "false") => false,
            Some("true") => true,
            Some(_) => {
                let field = "nvext.session_control.required";
                return Err(Error::Field { field, allowed: "true or false" });
            }
        };
        Ok(Self { session_id, action, idle_ms_max, is_required })
    }
}

fn session_params_id(body: &Object<'_>) -> Result<Option<String>, Error> {
    match object_member(body, "session_params", "session_params")? {
        None => Ok(None),
        Some(params) => string_member(&params, "id", "session_params.id"),
    }
}

/// Null counts as absent. Other values, and objects beyond [`OBJECT_BYTES_MAX`], are errors that
/// name `field`.
fn object_member<'a>(
    body: &Object<'a>,
    key: &str,
    field: &'static str,
) -> Result<Option<Object<'a>>, Error> {
    match body.get(key) {
        None => Ok(None),
        Some(raw) if raw.get() == "null" => Ok(None),
        Some(raw) if raw.get().len() <= OBJECT_BYTES_MAX => {
            let object = Object::parse(raw.get().as_bytes());
            object.map(Some).map_err(|_| Error::Field { field, allowed: OBJECT_ALLOWED })
        }
        Some(_) => Err(Error::Field { field, allowed: OBJECT_ALLOWED }),
    }
}

/// Null counts as absent, and any other type is an error that names `field`.
fn string_member(
    body: &Object<'_>,
    key: &str,
    field: &'static str,
) -> Result<Option<String>, Error> {
    match body.get(key) {
        None => Ok(None),
        Some(raw) if raw.get() == "null" => Ok(None),
        // Only strings are parsed: another value may be nested too deeply to be read.
        Some(raw) => serde_json::from_str(raw.get())
            .map(Some)
            .map_err(|_| Error::Field { field, allowed: "a string of Unicode characters" }),
    }
}

/// A value of another type counts as absent. The engine reports it.
fn string_member_or_none(body: &Object<'_>, key: &str) -> Option<String> {
    serde_json::from_str(body.get(key)?.get()).ok()
}

fn header_text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Error> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    std::str::from_utf8(value.as_bytes())
        .map(Some)
        .map_err(|_| Error::Field { field: "a session id in a header", allowed: "UTF-8" })
}

/// An absent header counts as false.
fn header_flag(headers: &HeaderMap, name: &HeaderName, field: &'static str) -> Result<bool, Error> {
    match headers.get(name).map(http::HeaderValue::as_bytes) {
        None | Some(b"0" | b"false") => Ok(false),
        Some(b"1" | b"true") => Ok(true),
        Some(_) => Err(Error::Field { field, allowed: "1, true, 0 or false" }),
    }
}

/// `None` lets the agent choose.
fn header_retention(headers: &HeaderMap) -> Result<Option<Retention>, Error> {
    let field = "the header x-berth-retention";
    match headers.get(&RETENTION_HEADER) {
        None => Ok(None),
        Some(value) => parse_retention(value.to_str().unwrap_or(""), field),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
            })
            .collect()
    }

    fn read(headers: &HeaderMap, body: &[u8], principal: &str) -> Result<Turn, Error> {
        super::read(&SessionHeaders::default(), headers, body, principal)
    }

    fn intent(pairs: &[(&'static str, &str)], body: &str) -> Option<SessionIntent> {
        read(&headers(pairs), body.as_bytes(), "p").unwrap().session
    }

    #[test]
    fn identity_is_the_first_source_that_applies() {
        // Each source has priority over the sources below it.
        let sources: [(&'static str, &str, &str); 20] = [
            ("", r#""nvext":{"session_control":{"session_id":"control"}}"#, "control"),
            ("x-berth-session-id", "berth", "berth"),
            ("", r#""session_params":{"id":"params"}"#, "params"),
            ("x-claude-code-session-id", "claude", "claude"),
            ("thread-id", "codex", "codex"),
            ("x-codex-turn-metadata", r#"{"thread_id":"meta"}"#, "meta"),
            ("session-id", "pi", "pi"),
            ("session_id", "old pi", "old pi"),
            ("x-session-id", "opencode", "opencode"),
            ("x-dynamo-session-id", "dynamo", "dynamo"),
            ("x-litellm-session-id", "litellm", "litellm"),
            ("x-deepseek-harness-session-id", "deepseek", "deepseek"),
            ("x-session-affinity", "aiperf", "aiperf"),
            ("", r#""metadata":{"user_id":"{\"session_id\":\"user\"}"}"#, "user"),
            ("", r#""session_id":"top""#, "top"),
            ("x-smg-routing-key", "gateway", "gateway"),
            ("x-sgl-routing-key", "router", "router"),
            ("x-correlation-id", "correlation", "correlation"),
            ("x-client-request-id", "request", "request"),
            ("", r#""prompt_cache_key":"never""#, ""),
        ];
        for from in 0..sources.len() {
            let members: Vec<&str> = sources[from..]
                .iter()
                .filter(|(header, ..)| header.is_empty())
                .map(|(_, member, _)| *member)
                .collect();
            let pairs: Vec<(&'static str, &str)> = sources[from..]
                .iter()
                .filter(|(header, ..)| !header.is_empty())
                .map(|(header, value, _)| (*header, *value))
                .collect();
            let found = intent(&pairs, &format!("{{{}}}", members.join(",")));
            let id = found.map_or(String::new(), |intent| intent.key.id().to_owned());
            assert_eq!(id, sources[from].2);
        }
    }

    #[test]
    fn sub_agents_are_sessions_of_their_own_with_a_parent() {
        let pairs = [("x-claude-code-session-id", "c"), ("x-claude-code-agent-id", "1")];
        let turn = read(&headers(&pairs), b"{}", "p").unwrap();
        assert_eq!(turn.session.unwrap().key.id(), "c:1");
        assert_eq!(turn.parent.unwrap().id(), "c");
        let pairs = [("x-session-id", "child"), ("x-parent-session-id", "parent")];
        let turn = read(&headers(&pairs), b"{}", "p").unwrap();
        assert_eq!(turn.parent.unwrap().id(), "parent");
    }

    #[test]
    fn a_name_that_a_client_sends_on_its_own_is_only_a_hint() {
        let kind = |pairs: &[(&'static str, &str)], body: &str| intent(pairs, body).unwrap().hint;
        assert_eq!(kind(&[("thread-id", "t")], "{}"), Some(HintKind::Session));
        assert_eq!(kind(&[("x-correlation-id", "t")], "{}"), Some(HintKind::SessionOrRequest));
        assert_eq!(kind(&[("x-berth-session-id", "t")], "{}"), None);
        assert_eq!(kind(&[("x-correlation-id", "t")], r#"{"session_id":"s"}"#), None);
        for more in ["x-berth-delta", "x-berth-session-final"] {
            assert_eq!(kind(&[("thread-id", "t"), (more, "1")], "{}"), None, "{more}");
        }
        let pinned = [("thread-id", "t"), ("x-berth-retention", "pinned")];
        assert_eq!(kind(&pinned, "{}"), None, "this client means the session");
        let long = "i".repeat(300);
        for unusable in ["", long.as_str()] {
            let turn = read(&headers(&[("thread-id", unusable)]), b"{}", "p").unwrap();
            assert!(turn.session.is_none() && turn.has_unusable_name);
            let named = r#"{"session_id":"s"}"#.as_bytes();
            let turn = read(&headers(&[("thread-id", unusable)]), named, "p").unwrap();
            assert_eq!(turn.session.unwrap().key.id(), "s");
        }
    }

    #[test]
    fn lifecycle_is_read_from_body_and_headers() {
        let control = |inner: &str| {
            let inner = format!(r#"{{"session_id":"s"{inner}}}"#);
            intent(&[], &format!(r#"{{"nvext":{{"session_control":{inner}}}}}"#)).unwrap()
        };
        let plain = control("");
        assert!(
            !plain.opens_session
                && !plain.closes_session
                && !plain.is_placement_only
                && !plain.is_delta
        );
        assert_eq!(plain.idle_ms_max, None);
        let open = control(r#","action":"open","timeout":1.5"#);
        assert_eq!((open.opens_session, open.idle_ms_max), (true, Some(1500)));
        assert!(control(r#","action":"close""#).closes_session);
        assert!(control(r#","action":"bind""#).is_placement_only);
        assert!(!control(r#","action":null,"timeout":null"#).opens_session);
        let id = ("x-berth-session-id", "s");
        assert!(intent(&[id, ("x-berth-session-final", "true")], "{}").unwrap().closes_session);
        assert!(intent(&[id, ("x-berth-delta", "1")], "{}").unwrap().is_delta);
        assert!(intent(&[id], r#"{"session_params":{"id":"x"}}"#).unwrap().is_delta);
        let pinned = intent(&[id, ("x-berth-retention", "pinned")], "{}").unwrap();
        assert_eq!(pinned.retention, Some(Retention::Pinned));
        assert_eq!(intent(&[id, ("x-berth-retention", "auto")], "{}").unwrap().retention, None);
    }

    #[test]
    fn the_last_of_duplicate_members_counts_as_it_does_for_the_engine() {
        let body = r#"{"session_id":"first","\u0073ession_id":"last"}"#;
        assert_eq!(intent(&[], body).unwrap().key.id(), "last");
    }

    #[test]
    fn a_model_is_named_with_its_adapter() {
        let model = |body: &str| read(&HeaderMap::new(), body.as_bytes(), "p").unwrap().model;
        assert_eq!(model(r#"{"model":"m"}"#).as_deref(), Some("m"));
        assert_eq!(model(r#"{"model":"m","lora_path":"a"}"#).as_deref(), Some("m:a"));
        assert_eq!(model(r#"{"model":"m:b","lora_path":"a"}"#).as_deref(), Some("m:b"));
        assert_eq!(model(r#"{"lora_path":"a"}"#).as_deref(), Some(":a"));
        assert_eq!(model(r#"{"model":"default","lora_path":"a"}"#).as_deref(), Some(":a"));
        for unnamed in ["{}", r#"{"model":""}"#, r#"{"model":"default"}"#, r#"{"lora_path":["a"]}"#]
        {
            assert_eq!(model(unnamed), None, "{unnamed}");
        }
    }

    #[test]
    fn wrong_kinds_are_refused_by_name() {
        let cases = [
            (r#"{"nvext":{"session_control":[]}}"#, "nvext.session_control "),
            (r#"{"nvext":{"session_control":{}}}"#, "nvext.session_control.session_id"),
            (r#"{"nvext":{"session_control":{"session_id":"s","action":1}}}"#, "action"),
            (r#"{"nvext":{"session_control":{"session_id":"s","timeout":"1"}}}"#, "timeout"),
            (r#"{"nvext":{"session_control":{"session_id":"s","timeout":0}}}"#, "timeout"),
            (r#"{"nvext":{"session_control":{"session_id":"s","required":1}}}"#, "required"),
            (r#"{"session_id":["a"]}"#, "session_id"),
            (r#"{"session_params":[{"id":"a"}]}"#, "session_params"),
            (r#"{"session_params":{"id":1}}"#, "session_params.id"),
            (r#"{"session_id":""}"#, "a session id has 1 to 256 bytes"),
        ];
        for (body, named) in cases {
            let error = read(&HeaderMap::new(), body.as_bytes(), "p").unwrap_err().to_string();
            assert!(error.contains(named), "{body}: {error}");
        }
    }

    #[test]
    fn a_session_that_cannot_be_read_is_refused_and_not_ignored() {
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let many = vec![r#""a":0"#; body::MEMBERS_MAX + 1].join(",");
        let cases = [
            (format!(r#"{{"session_id":{deep}}}"#), "session_id must be a string"),
            (r#"{"session_id":"\ud800"}"#.to_owned(), "session_id must be a string"),
            (format!(r#"{{"session_params":{{"id":{deep}}}}}"#), "session_params.id"),
            (format!(r#"{{"session_params":{{{many}}}}}"#), "session_params"),
            (format!(r#"{{"nvext":{{"session_control":{deep}}}}}"#), "nvext.session_control"),
            (format!(r#"{{"nvext":{{{many}}}}}"#), "nvext"),
            (r#"{"nvext":1}"#.to_owned(), "nvext"),
            (
                format!(r#"{{"session_params":{{"a":"{}"}}}}"#, "a".repeat(OBJECT_BYTES_MAX)),
                "64 KiB",
            ),
            (
                format!(
                    r#"{{"nvext":{{"session_control":{{"session_id":"s","timeout":{deep}}}}}}}"#
                ),
                "timeout",
            ),
        ];
        for (body, named) in cases {
            let error = read(&HeaderMap::new(), body.as_bytes(), "p").unwrap_err().to_string();
            assert!(error.contains(named), "{body:.60}: {error}");
        }
        // What isn't Berth's own may nest as it likes.
        let turn = read(&HeaderMap::new(), format!(r#"{{"tools":{deep}}}"#).as_bytes(), "p");
        assert_eq!(turn.unwrap().session, None);
    }

    #[test]
    fn an_id_that_is_too_long_is_refused_wherever_it_stands() {
        let doors = [
            r#"{"session_id":"ID"}"#,
            r#"{"session_params":{"id":"ID"}}"#,
            r#"{"nvext":{"session_control":{"session_id":"ID"}}}"#,
            r#"{"nvext":{"session_control":{"session_id":"ID","action":"bind"}}}"#,
        ];
        let natives = ["x-berth-session-id"];
        for (bytes, taken) in [(256, true), (257, false), (60_000, false)] {
            let id = "i".repeat(bytes);
            let bodies = doors.iter().map(|body| ("", body.replace("ID", &id)));
            let named = natives.iter().map(|header| (*header, "{}".to_owned()));
            for (header, body) in bodies.chain(named) {
                let pairs = [(header, &*id)];
                let pairs = if header.is_empty() { &[] } else { &pairs[..] };
                let error = read(&headers(pairs), body.as_bytes(), "p").err();
                let message = error.map_or(String::new(), |error| error.to_string());
                let bound = "a session id has 1 to 256 bytes";
                assert_eq!(message.contains(bound), !taken, "{header} {bytes}: {message}");
                assert_eq!(message.is_empty(), taken, "{header} {bytes}: {message}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_body_panics(body in prop::collection::vec(any::<u8>(), 0..60), text in "\\PC{0,60}") {
            drop(read(&HeaderMap::new(), &body, "p"));
            drop(read(&HeaderMap::new(), text.as_bytes(), "p"));
            let nested = format!(r#"{{"nvext":{{"session_control":{text}}}}}"#);
            drop(read(&HeaderMap::new(), nested.as_bytes(), "p"));
        }
    }
}
