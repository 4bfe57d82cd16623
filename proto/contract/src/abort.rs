//! The names by which a client aborts its turns, and the request by which a router asks for that.
//!
//! The agent gives the turn another id inside the engine, so that two clients may use the same
//! name. For a list of prompts, the body may have a list of names; otherwise the engine names the
//! prompts of a turn `x`: `x_0`, `x_1` and so on. The router posts an [`AbortRequest`] to all
//! agents, because the turn may have come through another router.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{body::Object, id::TurnId, route::Kind};

/// A path of the agent's data port.
pub const PATH: &str = "/berth/abort";
/// Names a turn whose body names none.
pub const REQUEST_ID: http::HeaderName = http::HeaderName::from_static("x-request-id");

/// A turn with a longer list of names counts as one without a name.
const NAMES_MAX: usize = 1024;
/// A UUID has 36 bytes.
pub const NAME_BYTES_MAX: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortRequest {
    /// `None`: everybody's turns.
    pub principal: Option<String>,
    /// `None`: all turns.
    pub rids: Option<Vec<String>>,
}

/// What a router asks of each agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentAbortRequest {
    #[serde(flatten)]
    pub request: AbortRequest,
    /// The turns among them that the router has without an answer. The agent may get one of them
    /// after this request, and aborts it then.
    #[serde(default)]
    pub unanswered: Vec<TurnId>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TurnNames {
    /// The turn has no name, or one that is empty or too long.
    #[default]
    None,
    Turn(String),
    /// One name for each prompt of a list.
    Prompts(Vec<String>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnPart {
    Whole,
    /// The prompt's place in a list, from 0.
    Prompt(usize),
}

impl TurnNames {
    #[must_use]
    pub fn in_body(kind: Kind, body: &Object<'_>) -> Self {
        let names = kind.rid_key().and_then(|key| body.get(key));
        names.map_or(Self::None, Self::from_json)
    }

    #[must_use]
    pub fn or_header(self, headers: &http::HeaderMap) -> Self {
        if self != Self::None {
            return self;
        }
        let name = headers.get(REQUEST_ID).and_then(|name| name.to_str().ok());
        name.filter(|name| is_legal(name)).map_or(Self::None, |name| Self::Turn(name.to_owned()))
    }

    fn from_json(names: &RawValue) -> Self {
        if names.get().starts_with('[') {
            let names: Vec<String> = serde_json::from_str(names.get()).unwrap_or_default();
            let is_legal = names.len() <= NAMES_MAX && names.iter().all(|name| is_legal(name));
            return if is_legal { Self::Prompts(names) } else { Self::None };
        }
        let name: Option<String> = serde_json::from_str(names.get()).ok();
        name.filter(|name| is_legal(name)).map_or(Self::None, Self::Turn)
    }

    /// `None` if `rid` isn't this turn's name.
    #[must_use]
    pub fn part_named(&self, rid: &str) -> Option<TurnPart> {
        match self {
            Self::None => None,
            Self::Turn(name) if name == rid => Some(TurnPart::Whole),
            Self::Turn(name) => {
                let number = rid.strip_prefix(name.as_str())?.strip_prefix('_')?;
                number.parse().ok().map(TurnPart::Prompt)
            }
            Self::Prompts(names) => names.iter().position(|name| name == rid).map(TurnPart::Prompt),
        }
    }
}

fn is_legal(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};

    use super::*;

    fn names(kind: Kind, body: &str) -> TurnNames {
        let headers = HeaderMap::from_iter([(REQUEST_ID, HeaderValue::from_static("h"))]);
        let body = Object::parse(body.as_bytes()).unwrap();
        TurnNames::in_body(kind, &body).or_header(&headers)
    }

    #[test]
    fn the_body_names_a_turn_before_the_header_does() {
        let turn = |name: &str| TurnNames::Turn(name.to_owned());
        for (kind, body, want) in [
            (Kind::Generate, r#"{"rid":"a"}"#, turn("a")),
            (Kind::Generate, r#"{"rid":null}"#, turn("h")),
            (Kind::Responses, r#"{"request_id":"a","rid":"b"}"#, turn("a")),
            (Kind::Messages, r#"{"rid":"a"}"#, turn("h")),
            (
                Kind::Generate,
                r#"{"rid":["a","b"]}"#,
                TurnNames::Prompts(vec!["a".into(), "b".into()]),
            ),
            (Kind::Generate, r#"{"rid":7}"#, turn("h")),
            (Kind::Generate, r#"{"rid":""}"#, turn("h")),
            (Kind::Generate, r#"{"rid":["a",""]}"#, turn("h")),
        ] {
            assert_eq!(names(kind, body), want, "{body}");
        }
        let long = format!(r#"{{"rid":"{}"}}"#, "a".repeat(NAME_BYTES_MAX + 1));
        assert_eq!(names(Kind::Generate, &long), turn("h"));
    }

    #[test]
    fn a_name_stands_for_a_turn_or_for_one_of_its_prompts() {
        let turn = names(Kind::Generate, r#"{"rid":"a"}"#);
        assert_eq!(turn.part_named("a"), Some(TurnPart::Whole));
        assert_eq!(turn.part_named("a_12"), Some(TurnPart::Prompt(12)));
        for other in ["", "b", "ab", "a_", "a_x", "a_1_1"] {
            assert_eq!(turn.part_named(other), None, "{other}");
        }
        let list = names(Kind::Generate, r#"{"rid":["a","b"]}"#);
        assert_eq!(list.part_named("b"), Some(TurnPart::Prompt(1)));
        assert_eq!(list.part_named("c"), None);
        assert_eq!(TurnNames::default().part_named(""), None);
    }
}
