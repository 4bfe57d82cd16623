//! What a turn is to its session: what it may need, how it goes in, how it ended. Pure.

use proto::{id::SessionKey, load::Retention};

/// A turn let in: what it needs on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// None for a turn without a session.
    pub session: Option<TurnSession>,
    /// The rank to run on.
    pub dp_rank: u32,
    /// KV it may add to a pinned session, tokens.
    pub growth_tokens: Option<u64>,
    /// What its session gets of it; none until the shim has compared it with what the session has.
    pub ran: Option<Ran>,
}

/// How a session's turn ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ran {
    /// On the session's own KV: only what was new was computed.
    Pinned,
    /// As the first turn of a new incarnation: what the session had was not what the client sent.
    Reopened,
    /// On the radix tree, under the session's tag.
    Tagged,
    /// On the radix tree.
    Untagged,
}

impl Ran {
    /// The name used in headers and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Reopened => "reopened",
            Self::Tagged => "tagged",
            Self::Untagged => "none",
        }
    }
}

/// The session part of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnSession {
    /// Whose turn it is.
    pub key: SessionKey,
    /// The engine-side id.
    pub incarnation: String,
    /// How the turn names its session to the engine.
    pub retention: Retention,
    /// Set if the turn holds a full history, which the engine's shim trims to the tokens that the
    /// session lacks.
    pub trim: Option<Trim>,
}

/// What the engine's shim is told of a full history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trim {
    /// The most tokens the prompt may have to run in the session; a longer one runs as it came.
    pub tokens_max: u64,
    /// The shim refuses a prompt that doesn't continue the session's history, and never runs it
    /// beside the session: other clients rely on that history.
    pub must_continue: bool,
}

/// Upper bounds of what a turn may need, from its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Need {
    /// Tokens of what it sends.
    pub prompt_tokens: u64,
    /// Tokens of its answer; none: as many as the context allows.
    pub answer_tokens: Option<u64>,
    /// `prompt_tokens` is what it sends, not a bound: token ids were counted.
    pub exact: bool,
    /// It ignores the end of its answer, so that the engine keeps room for all of it.
    pub endless: bool,
    /// Leading tokens that are in the engine's cache, by the word of who sent it: they aren't
    /// computed, but need room all the same.
    pub resident_tokens: u64,
}

/// Token counts the engine reported for a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// The whole prompt, history included.
    pub prompt_tokens: u64,
    /// The answer.
    pub completion_tokens: u64,
    /// Prompt tokens whose KV was there, if the engine says.
    pub cached_tokens: Option<u64>,
    /// How often the turn was taken out of the batch and put back.
    pub retractions: u64,
}

/// How a turn ended, as the engine acknowledged it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The engine finished it. Usage is absent where the route doesn't report it.
    Finished(Option<Usage>),
    /// The engine finished it, and nobody was there to hear: the client can't know the history.
    Unheard(Option<Usage>),
    /// The engine aborted it and said so.
    Aborted,
    /// The engine refused it before running it, or it never reached the engine.
    Refused,
    /// The engine gave it up without an answer, and may have run and committed a part of it before.
    Partial,
    /// Nobody saw its end.
    Lost,
}

/// What of a pinned session's turns a route can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appends {
    /// `/generate` with one prompt: what is new, as the engine appends it.
    Possible,
    /// A prompt that only the engine makes tokens of: whole histories, where the shim trims them.
    Trimmed,
    /// Nothing.
    Never,
}
