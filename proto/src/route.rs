//! The engine's routes that the agent and the router serve, with the properties of each.
//!
//! The agent's `data_port` and the router's `http` make their HTTP routes from [`ROUTES`]. They ask
//! [`Kind`] how a request's body is formed: which key holds the prompt's token ids, which the
//! request id. A *turn* is a request that runs in the engine's batch.
//!
//! The engine's other routes (weight updates, flushes, aborting other clients' turns) can't be
//! reached through an agent. The router's own routes (sessions, workers, placements) are not here.

use http::Method;

/// One route of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The path. The engine, the agent and the router use the same path.
    pub path: &'static str,
    /// The kind of request that the route takes.
    pub kind: Kind,
}

/// The kinds of request, by the form of their bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// SGLang's own generate API.
    Generate,
    /// OpenAI chat.
    Chat,
    /// OpenAI completions.
    Completions,
    /// OpenAI responses.
    Responses,
    /// Anthropic messages.
    Messages,
    /// OpenAI embeddings. They have no session and no generated tokens.
    Embeddings,
    /// Conversion between text and token ids. The agent passes it to the engine; it is no turn.
    Tokenizer,
    /// The list of models, without a body. The agent passes it to the engine; it is no turn.
    Models,
}

/// SGLang's own route. The agent uses it for staged prefill too.
pub const GENERATE: Route = Route { path: "/generate", kind: Kind::Generate };

/// All routes.
pub const ROUTES: [Route; 9] = [
    GENERATE,
    Route { path: "/v1/chat/completions", kind: Kind::Chat },
    Route { path: "/v1/completions", kind: Kind::Completions },
    Route { path: "/v1/responses", kind: Kind::Responses },
    Route { path: "/v1/messages", kind: Kind::Messages },
    Route { path: "/v1/embeddings", kind: Kind::Embeddings },
    Route { path: "/tokenize", kind: Kind::Tokenizer },
    Route { path: "/detokenize", kind: Kind::Tokenizer },
    Route { path: "/v1/models", kind: Kind::Models },
];

impl Kind {
    /// Returns the kind of the requests to `path`; `None` if no route has this path.
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        ROUTES.iter().find(|route| route.path == path).map(|route| route.kind)
    }

    /// Returns the HTTP method of the route.
    #[must_use]
    pub fn method(self) -> Method {
        if self == Self::Models { Method::GET } else { Method::POST }
    }

    /// Whether the engine generates tokens. A request that generates tokens may belong to a
    /// session, and leaves KV in the engine.
    #[must_use]
    pub fn is_generation(self) -> bool {
        match self {
            Self::Generate | Self::Chat | Self::Completions | Self::Responses | Self::Messages => {
                true
            }
            Self::Embeddings | Self::Tokenizer | Self::Models => false,
        }
    }

    /// Whether the request runs in the engine's batch and so counts as a turn at the agent.
    #[must_use]
    pub fn is_turn(self) -> bool {
        self.is_generation() || self == Self::Embeddings
    }

    /// Whether the engine passes the body's top-level `session_id` to its radix cache, which then
    /// tags the KV with it.
    #[must_use]
    pub fn is_taggable(self) -> bool {
        matches!(self, Self::Generate | Self::Chat | Self::Completions | Self::Responses)
    }

    /// Returns the body key of the turn's request id, if the route's requests have such a key.
    #[must_use]
    pub fn rid_key(self) -> Option<&'static str> {
        match self {
            Self::Generate | Self::Chat | Self::Completions | Self::Embeddings => Some("rid"),
            Self::Responses => Some("request_id"),
            Self::Messages | Self::Tokenizer | Self::Models => None,
        }
    }

    /// Returns the body key of the prompt, if the prompt may be token ids.
    #[must_use]
    pub fn token_ids_key(self) -> Option<&'static str> {
        match self {
            Self::Generate => Some("input_ids"),
            Self::Completions => Some("prompt"),
            Self::Embeddings => Some("input"),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_stands_once_and_leads_to_its_kind() {
        for (number, route) in ROUTES.iter().enumerate() {
            assert_eq!(Kind::for_path(route.path), Some(route.kind));
            assert!(ROUTES[..number].iter().all(|earlier| earlier.path != route.path));
        }
        assert_eq!(Kind::for_path("/flush_cache"), None);
        assert_eq!(Kind::for_path("/generate/"), None);
    }
}
