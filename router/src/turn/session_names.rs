//! Knows the headers by which clients name their sessions on their own, and reads them.
//!
//! Coding agents and benchmarks send such a name with every request, whichever server they talk to.
//! So a name only *hints* at a session: a name that can't be used is ignored. Pure.
//!
//! Names count in the order of [`NAMES`], after those that the settings add. `requests.json` has
//! session headers of whole requests, by the same sources and with values made up, for a test.
//!
//! `x-session-token` isn't one of them: llm-d writes a pod's name into it, which all conversations
//! of that pod share, and elsewhere it is a login's secret.

use contract::{body::Object, id::SessionKey};
use http::{HeaderMap, HeaderName};

#[derive(Debug)]
pub struct Name {
    pub header: HeaderName,
    /// The member that is the name, if the header's value is a JSON object.
    pub member: Option<&'static str>,
    pub names: Named,
    pub client: &'static str,
    /// Where this was read, and when.
    pub source: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    Session,
    /// Some gateways give each request a name of its own. Such a name begins a session only when it
    /// comes a second time, and counts only if the body names no session.
    SessionOrRequest,
    /// A session of its own, within the session that the header before it names.
    SubAgent,
    /// The session that started this one.
    Parent,
    /// Within the same session, the sub-agent that started this one.
    ParentSubAgent,
}

/// In the order in which they count.
pub static NAMES: [Name; 19] = [
    name(
        CLAUDE_SESSION,
        Named::Session,
        "Claude Code",
        "Dynamo 1.6.1's router and public proxies for Claude Code; 2026-11-23",
    ),
    name(CLAUDE_AGENT, Named::SubAgent, "Claude Code, sub-agents", "as above"),
    name(
        CLAUDE_PARENT_AGENT,
        Named::ParentSubAgent,
        "Claude Code, sub-agents of sub-agents",
        "public proxies for Claude Code; 2026-11-23",
    ),
    name(
        "thread-id",
        Named::Session,
        "Codex",
        "Dynamo 1.6.1's router and public proxies for Codex; 2026-11-23",
    ),
    name(
        "x-codex-parent-thread-id",
        Named::Parent,
        "Codex, threads started by a thread",
        "codex-rs/core/src/responses_metadata.rs; 2026-11-23",
    ),
    Name {
        header: HeaderName::from_static("x-codex-turn-metadata"),
        member: Some("thread_id"),
        names: Named::Session,
        client: "Codex through LiteLLM, which forwards only headers with x-",
        source: "Codex 0.171.0, LiteLLM 1.108.7; 2026-11-26",
    },
    // Codex names a sub-agent's root session in it, so it comes after the thread.
    name("session-id", Named::Session, "pi since 1.6, and Codex", "pi 1.6; 2026-11-26"),
    name("session_id", Named::Session, "pi before 1.6", "pi 0.74.2; 2026-11-26"),
    name(
        "x-session-id",
        Named::Session,
        "OpenCode, and aiperf if told to",
        "OpenCode's session/llm/request.ts, aiperf 0.13.0; 2026-11-23",
    ),
    name(
        "x-parent-session-id",
        Named::Parent,
        "OpenCode, sub-agents",
        "OpenCode's session/llm/request.ts; 2026-11-23",
    ),
    name(
        "x-dynamo-session-id",
        Named::Session,
        "clients of NVIDIA Dynamo, and aiperf if told to",
        "Dynamo 1.6.1, aiperf 0.13.0; 2026-11-23",
    ),
    name(
        "x-dynamo-parent-session-id",
        Named::Parent,
        "clients of NVIDIA Dynamo, and aiperf if told to",
        "Dynamo 1.6.1, aiperf 0.13.0; 2026-11-23",
    ),
    name(
        "x-litellm-session-id",
        Named::Session,
        "OpenHands, and clients of LiteLLM",
        "OpenHands SDK 1.58.2, LiteLLM 1.108.7; 2026-11-26",
    ),
    name(
        "x-deepseek-harness-session-id",
        Named::Session,
        "DeepSeek's agent harness",
        "its package llm-deepseek; 2026-11-27",
    ),
    name(
        "x-session-affinity",
        Named::Session,
        "aiperf by default, and OpenCode",
        "aiperf 0.13.0, OpenCode's session/llm/request.ts; 2026-11-23",
    ),
    name(
        "x-smg-routing-key",
        Named::SessionOrRequest,
        "SGLang's gateway and `bench_serving`, slime and miles",
        "sglang 0.5.23, benchmark/serving.py; 2026-11-23",
    ),
    name(
        "x-sgl-routing-key",
        Named::SessionOrRequest,
        "clients of SGLang's newer router",
        "sgl-router's settings; 2026-11-27",
    ),
    name(
        "x-correlation-id",
        Named::SessionOrRequest,
        "aiperf by default, and gateways, which name requests by it",
        "aiperf 0.13.0; 2026-11-23",
    ),
    name(
        "x-client-request-id",
        Named::SessionOrRequest,
        "Codex and pi for the session, other libraries for the request",
        "Codex 0.171.0; 2026-11-26",
    ),
];

const fn name(
    header: &'static str,
    names: Named,
    client: &'static str,
    source: &'static str,
) -> Name {
    Name { header: HeaderName::from_static(header), member: None, names, client, source }
}

const CLAUDE_SESSION: &str = "x-claude-code-session-id";
const CLAUDE_AGENT: &str = "x-claude-code-agent-id";
const CLAUDE_PARENT_AGENT: &str = "x-claude-code-parent-agent-id";

/// Real ones have hundreds of bytes.
const JSON_BYTES_MAX: usize = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    Absent,
    /// The name is empty, too long or not UTF-8, or its JSON can't be read.
    Unusable,
    Session {
        key: SessionKey,
        /// Whether the name may be that of the request alone.
        may_be_request: bool,
    },
}

/// Those of the settings, then those of [`NAMES`].
#[derive(Debug, Clone, Default)]
pub struct SessionHeaders {
    added: Vec<HeaderName>,
}

/// A name is there, and can't be read.
struct Unreadable;

impl SessionHeaders {
    #[must_use]
    pub fn new(added: Vec<HeaderName>) -> Self {
        Self { added }
    }

    /// The first name that can be used counts.
    #[must_use]
    pub fn find(&self, headers: &HeaderMap, principal: &str) -> Hint {
        let added = self.added.iter().map(|header| (header, None, Named::Session));
        let known = NAMES.iter().map(|name| (&name.header, name.member, name.names));
        let mut hint = Hint::Absent;
        for (header, member, names) in added.chain(known) {
            if !matches!(names, Named::Session | Named::SessionOrRequest) {
                continue;
            }
            let Some(value) = headers.get(header) else { continue };
            let text = std::str::from_utf8(value.as_bytes()).map_err(|_| Unreadable);
            let id = text.and_then(|text| match member {
                Some(member) => string_in_json(text, member),
                None if header == CLAUDE_SESSION => {
                    claude_id(headers, text, CLAUDE_AGENT).map(Some)
                }
                None => Ok(Some(text.to_owned())),
            });
            let id = match id {
                Ok(None) => continue,
                Ok(Some(id)) => SessionKey::new(principal, id).ok(),
                Err(Unreadable) => None,
            };
            let may_be_request = names == Named::SessionOrRequest;
            match id {
                Some(key) => return Hint::Session { key, may_be_request },
                None => hint = Hint::Unusable,
            }
        }
        hint
    }

    /// Only a name that may be the request's own counts less than the body's.
    #[must_use]
    pub fn find_in_request(&self, headers: &HeaderMap, body: &Object<'_>, principal: &str) -> Hint {
        let in_headers = self.find(headers, principal);
        if matches!(in_headers, Hint::Session { may_be_request: false, .. }) {
            return in_headers;
        }
        match (find_in_body(headers, body, principal), in_headers) {
            (Hint::Absent, in_headers) => in_headers,
            (Hint::Unusable, in_headers @ Hint::Session { .. }) => in_headers,
            (in_body, _) => in_body,
        }
    }
}

/// Claude Code writes JSON text into `metadata.user_id`, and a proxy that drops its headers keeps
/// it. Another user's name is none.
fn find_in_body(headers: &HeaderMap, body: &Object<'_>, principal: &str) -> Hint {
    let user = body
        .get("metadata")
        .and_then(|metadata| string_in_json(metadata.get(), "user_id").ok().flatten());
    let Some(user) = user.filter(|user| user.starts_with('{')) else { return Hint::Absent };
    let id = match string_in_json(&user, "session_id") {
        Ok(None) => return Hint::Absent,
        Ok(Some(id)) => claude_id(headers, &id, CLAUDE_AGENT),
        Err(Unreadable) => Err(Unreadable),
    };
    match id.ok().and_then(|id| SessionKey::new(principal, id).ok()) {
        Some(key) => Hint::Session { key, may_be_request: false },
        None => Hint::Unusable,
    }
}

/// A name that can't be used is ignored.
#[must_use]
pub fn find_parent(headers: &HeaderMap, principal: &str) -> Option<SessionKey> {
    let text = |header: &HeaderName| std::str::from_utf8(headers.get(header)?.as_bytes()).ok();
    let named = |id: String| SessionKey::new(principal, id).ok();
    let parents = NAMES.iter().filter(|name| name.names == Named::Parent);
    let parent = parents.filter_map(|name| text(&name.header)).find_map(|id| named(id.to_owned()));
    parent.or_else(|| {
        // A sub-agent's session is within the session of the agent that the user talks to.
        headers.get(CLAUDE_AGENT).filter(|agent| !agent.is_empty())?;
        let session = std::str::from_utf8(headers.get(CLAUDE_SESSION)?.as_bytes()).ok()?;
        named(claude_id(headers, session, CLAUDE_PARENT_AGENT).ok()?)
    })
}

/// Fails if the sub-agent's name can't be read: its turns must not count as the session's own.
fn claude_id(headers: &HeaderMap, session: &str, agent_header: &str) -> Result<String, Unreadable> {
    let agent = headers.get(agent_header).map(http::HeaderValue::as_bytes);
    match agent.filter(|agent| !agent.is_empty()) {
        None => Ok(session.to_owned()),
        Some(_) if session.is_empty() => Err(Unreadable),
        Some(agent) => {
            let agent = std::str::from_utf8(agent).map_err(|_| Unreadable)?;
            Ok(format!("{session}:{agent}"))
        }
    }
}

fn string_in_json(json: &str, member: &str) -> Result<Option<String>, Unreadable> {
    if json.len() > JSON_BYTES_MAX {
        return Err(Unreadable);
    }
    let object = Object::parse(json.as_bytes()).map_err(|_| Unreadable)?;
    match object.get(member).filter(|raw| raw.get() != "null") {
        None => Ok(None),
        Some(raw) => serde_json::from_str(raw.get()).map(Some).map_err(|_| Unreadable),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Request {
        client: String,
        source: String,
        headers: Vec<(String, String)>,
        session: Option<String>,
        may_be_request: bool,
        parent: Option<String>,
    }

    fn headers(pairs: &[(String, String)]) -> HeaderMap {
        let pairs = pairs.iter().map(|(name, value)| {
            (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap())
        });
        pairs.collect()
    }

    #[test]
    fn the_requests_of_known_clients_name_their_sessions() {
        let requests: Vec<Request> =
            serde_json::from_str(include_str!("session_names/requests.json")).unwrap();
        let mut used = std::collections::HashSet::new();
        for request in requests {
            let headers = headers(&request.headers);
            let client = &request.client;
            assert!(!request.source.is_empty(), "{client}: where was this read?");
            let (session, may_be_request) = match SessionHeaders::default().find(&headers, "p") {
                Hint::Session { key, may_be_request } => {
                    (Some(key.id().to_owned()), may_be_request)
                }
                Hint::Absent => (None, false),
                Hint::Unusable => panic!("{client} sends a name that can't be used"),
            };
            assert_eq!(session, request.session, "{client}");
            assert_eq!(may_be_request, request.may_be_request, "{client}");
            let parent = find_parent(&headers, "p").map(|key| key.id().to_owned());
            assert_eq!(parent, request.parent, "{client}");
            let sent = NAMES.iter().map(|name| &name.header);
            used.extend(sent.filter(|header| headers.contains_key(*header)).cloned());
        }
        for name in &NAMES {
            assert!(used.contains(&name.header), "no request has {}", name.header);
        }
    }

    #[test]
    fn the_guide_names_every_header_and_its_clients() {
        let guide = include_str!("../../../deploy/docs/sessions.md");
        for name in &NAMES {
            let header = match name.member {
                Some(member) => format!("`{member}` in the JSON of `{}`", name.header),
                None => format!("`{}`", name.header),
            };
            let row = guide.lines().find(|line| line.starts_with('|') && line.contains(&header));
            let client = name.client.split([',', ' ']).next().unwrap();
            assert!(row.is_some_and(|row| row.contains(client)), "{header} of {client}");
        }
    }

    #[test]
    fn a_name_that_cannot_be_used_is_no_session_and_the_next_one_counts() {
        let long = "i".repeat(257);
        let find = |headers: &HeaderMap| SessionHeaders::default().find(headers, "p");
        let request = |pairs: &[(&str, &[u8])]| -> HeaderMap {
            let pairs = pairs.iter().map(|(name, value)| {
                (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value).unwrap())
            });
            pairs.collect()
        };
        for bad in [&b""[..], long.as_bytes(), b"\xff\xfe"] {
            for name in NAMES
                .iter()
                .filter(|name| matches!(name.names, Named::Session | Named::SessionOrRequest))
            {
                let alone = request(&[(name.header.as_str(), bad)]);
                assert_eq!(find(&alone), Hint::Unusable, "{}", name.header);
            }
            let both = request(&[("thread-id", bad), ("x-session-affinity", b"a")]);
            let Hint::Session { key, may_be_request: false } = find(&both) else {
                panic!("the second name counts")
            };
            assert_eq!(key.id(), "a");
            let agent = request(&[(CLAUDE_SESSION, b"s"), (CLAUDE_AGENT, bad)]);
            let expected = if bad.is_empty() { "s" } else { "" };
            let id = match find(&agent) {
                Hint::Session { key, .. } => key.id().to_owned(),
                _ => String::new(),
            };
            assert_eq!(id, expected, "a sub-agent's turns are never the session's own");
            assert_eq!(find_parent(&request(&[("x-parent-session-id", bad)]), "p"), None);
        }
        assert_eq!(find(&HeaderMap::new()), Hint::Absent);
    }

    #[test]
    fn a_name_within_json_counts_and_json_without_one_says_nothing() {
        let find = |value: &str| {
            let pairs = [("x-codex-turn-metadata".to_owned(), value.to_owned())];
            SessionHeaders::default().find(&headers(&pairs), "p")
        };
        let key = SessionKey::new("p", "t").unwrap();
        let found = find(r#"{"request_kind":"turn","thread_id":"t","later":[{}]}"#);
        assert_eq!(found, Hint::Session { key, may_be_request: false });
        for absent in ["{}", r#"{"thread_id":null}"#, r#"{"turn":{"thread_id":"t"}}"#] {
            assert_eq!(find(absent), Hint::Absent, "{absent}");
        }
        for bad in ["t", "[]", "{", r#"{"thread_id":7}"#, r#"{"thread_id":""}"#] {
            assert_eq!(find(bad), Hint::Unusable, "{bad}");
        }
    }

    #[test]
    fn claude_code_is_known_by_its_body_where_a_proxy_drops_its_headers() {
        let find = |pairs: &[(&str, &str)], user_id: &str| {
            let pairs: Vec<_> =
                pairs.iter().map(|(name, id)| ((*name).to_owned(), (*id).to_owned())).collect();
            let body = serde_json::json!({ "metadata": { "user_id": user_id } }).to_string();
            let body = Object::parse(body.as_bytes()).unwrap();
            match SessionHeaders::default().find_in_request(&headers(&pairs), &body, "p") {
                Hint::Session { key, may_be_request } => {
                    Some((key.id().to_owned(), may_be_request))
                }
                Hint::Absent => None,
                Hint::Unusable => Some(("unusable".to_owned(), false)),
            }
        };
        let found = |id: &str| Some((id.to_owned(), false));
        let user_id = r#"{"device_id":"d","account_uuid":"","session_id":"s"}"#;
        assert_eq!(find(&[], user_id), found("s"));
        assert_eq!(find(&[(CLAUDE_AGENT, "a")], user_id), found("s:a"));
        assert_eq!(find(&[("x-session-affinity", "h")], user_id), found("h"));
        assert_eq!(find(&[("x-client-request-id", "r")], user_id), found("s"));
        for no_name in ["alice", "", "{}", r#"{"session_id":null}"#] {
            assert_eq!(find(&[], no_name), None, "{no_name}");
        }
        for bad in ["{", r#"{"session_id":""}"#, r#"{"session_id":[]}"#] {
            assert_eq!(find(&[], bad), found("unusable"), "{bad}");
            let other = Some(("r".to_owned(), true));
            assert_eq!(find(&[("x-client-request-id", "r")], bad), other, "{bad}");
        }
        let body = Object::parse(br#"{"metadata":["user_id"]}"#).unwrap();
        let names = SessionHeaders::default();
        assert_eq!(names.find_in_request(&HeaderMap::new(), &body, "p"), Hint::Absent);
    }

    #[test]
    fn a_header_of_the_settings_comes_before_the_known_ones() {
        let names = SessionHeaders::new(vec![HeaderName::from_static("x-chat")]);
        let pairs = [("thread-id", "t"), ("x-chat", "c")]
            .map(|(name, id)| (name.to_owned(), id.to_owned()));
        let key = SessionKey::new("p", "c").unwrap();
        let expected = Hint::Session { key, may_be_request: false };
        assert_eq!(names.find(&headers(&pairs), "p"), expected);
    }
}
