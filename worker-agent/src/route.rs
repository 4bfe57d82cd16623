//! The routes that an agent serves, and which session features each supports.
//!
//! The engine's other routes (weight updates, flushes, aborting other clients' turns) can't be
//! reached through an agent.

use http::Method;

use crate::session::{Appends, Ran};

/// One route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The path, which is the same at the engine.
    pub path: &'static str,
    /// The kind of request body.
    pub kind: Kind,
}

/// The kinds of request body that the agent distinguishes.
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
    /// OpenAI embeddings: without a session and without generated tokens.
    Embeddings,
    /// Conversion between text and token ids: passed through, not a turn.
    Tokenizer,
    /// No body: passed through, not a turn.
    Read,
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
    Route { path: "/v1/models", kind: Kind::Read },
];

impl Kind {
    /// Returns the HTTP method of the route.
    #[must_use]
    pub fn method(self) -> Method {
        if self == Self::Read { Method::GET } else { Method::POST }
    }

    /// Returns the body key for the turn's request id, if the route has one.
    #[must_use]
    pub fn rid_key(self) -> Option<&'static str> {
        match self {
            Self::Generate | Self::Chat | Self::Completions | Self::Embeddings => Some("rid"),
            Self::Responses => Some("request_id"),
            Self::Messages | Self::Tokenizer | Self::Read => None,
        }
    }

    /// Whether the engine passes a top-level `session_id` to its radix cache.
    #[must_use]
    pub fn tags(self) -> bool {
        matches!(self, Self::Generate | Self::Chat | Self::Completions | Self::Responses)
    }

    /// Returns which turns of a pinned session the route supports. The OpenAI routes accept
    /// `session_params` and silently ignore it.
    #[must_use]
    pub fn appends(self) -> Appends {
        match self {
            Self::Generate => Appends::Possible,
            Self::Chat | Self::Completions | Self::Responses | Self::Messages => Appends::Trimmed,
            Self::Embeddings | Self::Tokenizer | Self::Read => Appends::Never,
        }
    }

    /// Returns how the turn really ran: untagged, if the route supports no tag.
    #[must_use]
    pub fn shown(self, ran: Ran) -> Ran {
        if ran == Ran::Tagged && !self.tags() { Ran::Untagged } else { ran }
    }

    /// Whether the request runs in the engine's batch and so counts as a turn.
    #[must_use]
    pub fn is_turn(self) -> bool {
        !matches!(self, Self::Tokenizer | Self::Read)
    }

    /// Returns the body key of the prompt, if the prompt may be token ids.
    #[must_use]
    pub fn ids_key(self) -> Option<&'static str> {
        match self {
            Self::Generate => Some("input_ids"),
            Self::Completions => Some("prompt"),
            Self::Embeddings => Some("input"),
            _ => None,
        }
    }
}
