//! The routes an agent serves, and what each can do with sessions. Everything else the engine has
//! (weight updates, flushes, aborts of others' turns) is not reachable through an agent.

use http::Method;

use crate::session::{Appends, Ran};

/// One route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Its path, the same at the engine.
    pub path: &'static str,
    /// What its body is.
    pub kind: Kind,
}

/// The kinds of body the agent tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// SGLang's own.
    Generate,
    /// OpenAI chat.
    Chat,
    /// OpenAI completions.
    Completions,
    /// OpenAI responses.
    Responses,
    /// Anthropic messages.
    Messages,
    /// OpenAI embeddings: no session, no tokens generated.
    Embeddings,
    /// Text to ids and back: no turn at all, passed through.
    Tokenizer,
    /// No body, passed through.
    Read,
}

/// SGLang's own, by which the agent has prompts computed too.
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
    /// The method it is asked with.
    #[must_use]
    pub fn method(self) -> Method {
        if self == Self::Read { Method::GET } else { Method::POST }
    }

    /// The body key under which the engine takes the turn's own id, if it takes one.
    #[must_use]
    pub fn rid_key(self) -> Option<&'static str> {
        match self {
            Self::Generate | Self::Chat | Self::Completions | Self::Embeddings => Some("rid"),
            Self::Responses => Some("request_id"),
            Self::Messages | Self::Tokenizer | Self::Read => None,
        }
    }

    /// Does the engine hand a top-level `session_id` on to its radix cache?
    #[must_use]
    pub fn tags(self) -> bool {
        matches!(self, Self::Generate | Self::Chat | Self::Completions | Self::Responses)
    }

    /// What of a pinned session's turns it can carry. The OpenAI routes take `session_params` and
    /// drop it without a word.
    #[must_use]
    pub fn appends(self) -> Appends {
        match self {
            Self::Generate => Appends::Possible,
            Self::Chat | Self::Completions | Self::Responses | Self::Messages => Appends::Trimmed,
            Self::Embeddings | Self::Tokenizer | Self::Read => Appends::Never,
        }
    }

    /// How a turn ran, where the engine takes no tag.
    #[must_use]
    pub fn shown(self, ran: Ran) -> Ran {
        if ran == Ran::Tagged && !self.tags() { Ran::Untagged } else { ran }
    }

    /// Does it run in the batch, so that it counts as a turn?
    #[must_use]
    pub fn is_turn(self) -> bool {
        !matches!(self, Self::Tokenizer | Self::Read)
    }

    /// The key that holds the prompt, where it may be token ids.
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
