//! The engine's routes that the agent and the router serve, with the properties of each.
//!
//! The agent's `data_port` and the router's `http` make their HTTP routes from [`ROUTES`]. They ask
//! [`Kind`] how a request's body is formed: which key holds the prompt's token ids, which the
//! request id. A *turn* is a request that runs in the engine's batch.
//!
//! The routes of trainers and operators are in [`control`](crate::control). The engine's other
//! routes can't be reached through an agent. The router's own routes (sessions, workers,
//! placements) are not here.

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
    /// OpenAI embeddings and classes of an `input`. They have no session and no generated tokens.
    Embeddings,
    /// The same in SGLang's own form, with the keys of `/generate`.
    Encode,
    /// Probabilities of labels after a query and each of several items.
    Score,
    /// The order of documents for a query.
    Rerank,
    /// The text of a sound, which comes as a file in a form. The only body that isn't JSON.
    Transcription,
    /// Counting tokens and converting text to them and back. The agent passes it to the engine; it
    /// is no turn.
    Tokenizer,
    /// The models, without a body. The agent passes it to the engine; it is no turn.
    Models,
    /// What the engine says of itself, without a body, to the router alone; it is no turn.
    Info,
}

/// SGLang's own route. The agent uses it for staged prefill too.
pub const GENERATE: Route = Route { path: "/generate", kind: Kind::Generate };

/// All routes.
pub const ROUTES: [Route; 21] = [
    GENERATE,
    Route { path: "/v1/chat/completions", kind: Kind::Chat },
    Route { path: "/v1/completions", kind: Kind::Completions },
    Route { path: "/v1/responses", kind: Kind::Responses },
    Route { path: "/v1/messages", kind: Kind::Messages },
    Route { path: "/v1/messages/count_tokens", kind: Kind::Tokenizer },
    Route { path: "/v1/embeddings", kind: Kind::Embeddings },
    Route { path: "/v1/classify", kind: Kind::Embeddings },
    Route { path: "/encode", kind: Kind::Encode },
    Route { path: "/classify", kind: Kind::Encode },
    Route { path: "/v1/score", kind: Kind::Score },
    Route { path: "/v1/rerank", kind: Kind::Rerank },
    Route { path: "/v1/audio/transcriptions", kind: Kind::Transcription },
    Route { path: "/tokenize", kind: Kind::Tokenizer },
    Route { path: "/detokenize", kind: Kind::Tokenizer },
    Route { path: "/v1/tokenize", kind: Kind::Tokenizer },
    Route { path: "/v1/detokenize", kind: Kind::Tokenizer },
    Route { path: "/v1/models", kind: Kind::Models },
    Route { path: "/model_info", kind: Kind::Info },
    Route { path: "/server_info", kind: Kind::Info },
    Route { path: "/v1/loads", kind: Kind::Info },
];

impl Kind {
    /// Returns the kind of the requests to `path`; `None` if no route has this path.
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        ROUTES.iter().find(|route| route.path == path).map(|route| route.kind)
    }

    /// Returns the HTTP methods of the route, which mean the same.
    #[must_use]
    pub fn methods(self) -> &'static [Method] {
        match self {
            Self::Models | Self::Info => &[Method::GET],
            Self::Generate | Self::Encode | Self::Rerank => &[Method::POST, Method::PUT],
            _ => &[Method::POST],
        }
    }

    /// Whether the body is a JSON object, in which keys can be read and replaced.
    #[must_use]
    pub fn has_json_body(self) -> bool {
        !matches!(self, Self::Transcription | Self::Models | Self::Info)
    }

    /// Whether the engine generates tokens. A request that generates tokens may belong to a
    /// session, and leaves KV in the engine.
    #[must_use]
    pub fn is_generation(self) -> bool {
        matches!(
            self,
            Self::Generate | Self::Chat | Self::Completions | Self::Responses | Self::Messages
        )
    }

    /// Whether the request runs in the engine's batch and so counts as a turn at the agent.
    #[must_use]
    pub fn is_turn(self) -> bool {
        !matches!(self, Self::Tokenizer | Self::Models | Self::Info)
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
            Self::Generate | Self::Chat | Self::Completions | Self::Embeddings | Self::Encode => {
                Some("rid")
            }
            Self::Responses => Some("request_id"),
            Self::Messages
            | Self::Score
            | Self::Rerank
            | Self::Transcription
            | Self::Tokenizer
            | Self::Models
            | Self::Info => None,
        }
    }

    /// Returns the body keys whose values may be token ids.
    #[must_use]
    pub fn token_ids_keys(self) -> &'static [&'static str] {
        match self {
            Self::Generate | Self::Encode => &["input_ids"],
            Self::Completions => &["prompt"],
            Self::Embeddings => &["input"],
            Self::Score => &["query", "items", "label_token_ids"],
            _ => &[],
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
