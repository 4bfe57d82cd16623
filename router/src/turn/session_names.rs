//! Knows the headers by which clients name their sessions on their own, and reads them.
//!
//! A session is a sequence of turns that share a growing prefix, and a turn is one request and its
//! answer. Coding agents and benchmarks send such a name with every request, whichever server they
//! talk to. So a name only *hints* at a session: a name that can't be used is ignored, and a turn
//! that the session can't take runs without it. Names that a client sends to Berth on purpose are
//! read in `request`, which calls this module. This module is pure.
//!
//! [`NAMES`] says for each header who sends it, and where and when that was read. The order of the
//! table is the order in which names count. `requests.json` has the session headers of whole
//! requests, by the same sources and with values made up, and a test reads them.

use http::HeaderMap;
use proto::id::SessionKey;

/// A header by which clients name a session on their own.
#[derive(Debug)]
pub struct Name {
    /// The header, in lower case.
    pub header: &'static str,
    /// Who sends it.
    pub client: &'static str,
    /// What it names.
    pub names: Named,
    /// Where this was read, and when.
    pub source: &'static str,
}

/// What a header names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// The turn's session.
    Session,
    /// The turn's session, or only the request: some gateways give each request a name of its own.
    /// Such a name begins a session only when it comes a second time, and counts only if the body
    /// names no session.
    SessionOrRequest,
    /// A sub-agent within the session that the header before it names. The sub-agent is a session
    /// of its own.
    SubAgent,
    /// The session that started this one.
    Parent,
    /// The sub-agent, within the same session, that started this sub-agent.
    ParentSubAgent,
}

/// All headers that name sessions, in the order in which they count.
pub const NAMES: [Name; 13] = [
    Name {
        header: CLAUDE_SESSION,
        client: "Claude Code",
        names: Named::Session,
        source: "Dynamo 1.6.1's router and public proxies for Claude Code; 2026-11-23",
    },
    Name {
        header: CLAUDE_AGENT,
        client: "Claude Code, sub-agents",
        names: Named::SubAgent,
        source: "as above",
    },
    Name {
        header: CLAUDE_PARENT_AGENT,
        client: "Claude Code, sub-agents of sub-agents",
        names: Named::ParentSubAgent,
        source: "public proxies for Claude Code; 2026-11-23",
    },
    Name {
        header: "x-claude-code-parent-session-id",
        client: "Claude Code, sessions started by a session",
        names: Named::Parent,
        source: "Dynamo 1.6.1's router; 2026-11-22",
    },
    Name {
        header: "thread-id",
        client: "Codex",
        names: Named::Session,
        source: "Dynamo 1.6.1's router and public proxies for Codex; 2026-11-23",
    },
    Name {
        header: "x-codex-parent-thread-id",
        client: "Codex, threads started by a thread",
        names: Named::Parent,
        source: "codex-rs/core/src/responses_metadata.rs; 2026-11-23",
    },
    Name {
        header: "x-session-id",
        client: "OpenCode, and aiperf if told to",
        names: Named::Session,
        source: "OpenCode's session/llm/request.ts, aiperf 0.13.0; 2026-11-23",
    },
    Name {
        header: "x-parent-session-id",
        client: "OpenCode, sub-agents",
        names: Named::Parent,
        source: "OpenCode's session/llm/request.ts; 2026-11-23",
    },
    Name {
        header: "x-dynamo-session-id",
        client: "clients of NVIDIA Dynamo, and aiperf if told to",
        names: Named::Session,
        source: "Dynamo 1.6.1, aiperf 0.13.0; 2026-11-23",
    },
    Name {
        header: "x-dynamo-parent-session-id",
        client: "clients of NVIDIA Dynamo, and aiperf if told to",
        names: Named::Parent,
        source: "Dynamo 1.6.1, aiperf 0.13.0; 2026-11-23",
    },
    Name {
        header: "x-session-affinity",
        client: "aiperf by default, and OpenCode",
        names: Named::Session,
        source: "aiperf 0.13.0, OpenCode's session/llm/request.ts; 2026-11-23",
    },
    Name {
        header: "x-smg-routing-key",
        client: "SGLang's gateway and `bench_serving`, slime and miles",
        names: Named::SessionOrRequest,
        source: "sglang 0.5.23, benchmark/serving.py; 2026-11-23",
    },
    Name {
        header: "x-correlation-id",
        client: "aiperf by default, and gateways, which name requests by it",
        names: Named::SessionOrRequest,
        source: "aiperf 0.13.0; 2026-11-23",
    },
];

const CLAUDE_SESSION: &str = "x-claude-code-session-id";
const CLAUDE_AGENT: &str = "x-claude-code-agent-id";
const CLAUDE_PARENT_AGENT: &str = "x-claude-code-parent-agent-id";

/// What the headers of a request say about its session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// Nothing.
    Absent,
    /// A name that can't be used: it is empty, too long or not UTF-8.
    Unusable,
    /// A session.
    Session {
        /// The session's key.
        key: SessionKey,
        /// Whether the name may be that of the request alone.
        may_be_request: bool,
    },
}

/// Finds the session that the headers hint at. The first name that can be used counts.
#[must_use]
pub fn find(headers: &HeaderMap, principal: &str) -> Hint {
    let mut hint = Hint::Absent;
    let sessions =
        NAMES.iter().filter(|name| matches!(name.names, Named::Session | Named::SessionOrRequest));
    for name in sessions {
        let Some(value) = headers.get(name.header) else { continue };
        let id = std::str::from_utf8(value.as_bytes()).ok().and_then(|id| {
            let is_claude = name.header == CLAUDE_SESSION;
            if is_claude { claude_id(headers, id, CLAUDE_AGENT) } else { Some(id.to_owned()) }
        });
        match id.and_then(|id| SessionKey::new(principal, id).ok()) {
            Some(key) => {
                return Hint::Session {
                    key,
                    may_be_request: name.names == Named::SessionOrRequest,
                };
            }
            None => hint = Hint::Unusable,
        }
    }
    hint
}

/// Finds the session that started this one. A name that can't be used is ignored.
#[must_use]
pub fn find_parent(headers: &HeaderMap, principal: &str) -> Option<SessionKey> {
    let text = |header: &str| std::str::from_utf8(headers.get(header)?.as_bytes()).ok();
    let named = |id: String| SessionKey::new(principal, id).ok();
    let parents = NAMES.iter().filter(|name| name.names == Named::Parent);
    let parent = parents.filter_map(|name| text(name.header)).find_map(|id| named(id.to_owned()));
    parent.or_else(|| {
        // A sub-agent's session is within the session of the agent that the user talks to.
        text(CLAUDE_AGENT).filter(|agent| !agent.is_empty())?;
        named(claude_id(headers, text(CLAUDE_SESSION)?, CLAUDE_PARENT_AGENT)?)
    })
}

/// Returns the id of Claude Code's session `session`, or of the sub-agent that the header names.
/// `None` if the sub-agent's name can't be read: its turns must not count as the session's own.
fn claude_id(headers: &HeaderMap, session: &str, agent_header: &str) -> Option<String> {
    let agent = headers.get(agent_header).map(http::HeaderValue::as_bytes);
    match agent.filter(|agent| !agent.is_empty()) {
        None => Some(session.to_owned()),
        Some(_) if session.is_empty() => None,
        Some(agent) => Some(format!("{session}:{}", std::str::from_utf8(agent).ok()?)),
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
        let mut used = std::collections::BTreeSet::new();
        for request in requests {
            let headers = headers(&request.headers);
            let client = &request.client;
            assert!(!request.source.is_empty(), "{client}: where was this read?");
            let (session, may_be_request) = match find(&headers, "p") {
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
            used.extend(
                NAMES.iter().map(|name| name.header).filter(|it| headers.contains_key(*it)),
            );
        }
        for name in &NAMES {
            assert!(used.contains(name.header), "no request has {}", name.header);
        }
    }

    #[test]
    fn the_guide_names_every_header_and_its_clients() {
        let guide = include_str!("../../../deploy/docs/sessions.md");
        for name in &NAMES {
            let header = format!("`{}`", name.header);
            let row = guide.lines().find(|line| line.starts_with('|') && line.contains(&header));
            let client = name.client.split([',', ' ']).next().unwrap();
            assert!(row.is_some_and(|row| row.contains(client)), "{header} of {client}");
        }
    }

    #[test]
    fn a_name_that_cannot_be_used_is_no_session_and_the_next_one_counts() {
        let long = "i".repeat(257);
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
                let alone = request(&[(name.header, bad)]);
                assert_eq!(find(&alone, "p"), Hint::Unusable, "{}", name.header);
            }
            let both = request(&[("thread-id", bad), ("x-session-affinity", b"a")]);
            let Hint::Session { key, may_be_request: false } = find(&both, "p") else {
                panic!("the second name counts")
            };
            assert_eq!(key.id(), "a");
            let agent = request(&[(CLAUDE_SESSION, b"s"), (CLAUDE_AGENT, bad)]);
            let expected = if bad.is_empty() { "s" } else { "" };
            let id = match find(&agent, "p") {
                Hint::Session { key, .. } => key.id().to_owned(),
                _ => String::new(),
            };
            assert_eq!(id, expected, "a sub-agent's turns are never the session's own");
            assert_eq!(find_parent(&request(&[("x-parent-session-id", bad)]), "p"), None);
        }
        assert_eq!(find(&HeaderMap::new(), "p"), Hint::Absent);
    }
}
