//! The engine's routes that the agent and the router serve, with the properties of each.
//!
//! Those of trainers and operators are in [`control`](crate::control). No other route of the engine
//! can be reached through an agent.

use http::Method;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Engine, agent and router have the same.
    pub path: &'static str,
    pub kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// SGLang's own generate API.
    Generate,
    Chat,
    Completions,
    Responses,
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
    /// Counting tokens and converting text to them and back. It is no turn.
    Tokenizer,
    /// The models, without a body. It is no turn.
    Models,
    /// What the engine says of itself, without a body, to the router alone; it is no turn.
    Info,
}

/// The agent uses this route for staged prefill too.
pub const GENERATE: Route = Route { path: "/generate", kind: Kind::Generate };

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
    #[must_use]
    pub fn for_path(path: &str) -> Option<Self> {
        ROUTES.iter().find(|route| route.path == path).map(|route| route.kind)
    }

    /// The methods mean the same.
    #[must_use]
    pub fn methods(self) -> &'static [Method] {
        match self {
            Self::Models | Self::Info => &[Method::GET],
            Self::Generate | Self::Encode | Self::Rerank => &[Method::POST, Method::PUT],
            _ => &[Method::POST],
        }
    }

    #[must_use]
    pub fn has_json_body(self) -> bool {
        !matches!(self, Self::Transcription | Self::Models | Self::Info)
    }

    /// A request that generates tokens may belong to a session, and leaves KV in the engine.
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

    /// Values of these keys may be token ids.
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
