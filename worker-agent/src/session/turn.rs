//! Describes a turn to and from the session table: what it may need, how it runs, how it ended.

use contract::{id::SessionKey, load::Retention};

use super::KvIdentity;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTurn {
    /// `None` for a turn without a session.
    pub session: Option<TurnSession>,
    pub dp_rank: u32,
    /// The most KV tokens that the turn may add to its pinned session; `None` outside of one.
    pub growth_tokens_max: Option<u64>,
    /// At the turn's admission.
    pub weights_epoch: u64,
    /// `None` while the shim must first compare the prompt with the session's history.
    pub run_mode: Option<RunMode>,
}

impl PlannedTurn {
    /// Whether the request to the engine names the pinned session. One whose full history is to be
    /// trimmed names the tree, and the shim moves the turn into the session.
    #[must_use]
    pub fn names_pin(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.retention == Retention::Pinned)
    }

    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        let session = self.session.as_ref()?;
        let may_tag = session.retention == Retention::Tagged;
        (may_tag && self.run_mode != Some(RunMode::Untagged)).then_some(&session.incarnation)
    }

    pub fn drop_tag(&mut self) {
        if let (Some(RunMode::Tagged), Some(session)) = (self.run_mode, &mut self.session) {
            session.retention = Retention::None;
            self.run_mode = Some(RunMode::Untagged);
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunMode {
    /// In the session's own KV. The engine computes only the new tokens.
    Pinned,
    /// As the first turn of a new incarnation, because the engine's history was another one.
    Reopened,
    /// On the radix tree. The engine evicts the turn's KV after untagged KV.
    Tagged,
    Untagged,
}

impl RunMode {
    /// Returns the name used in headers and metrics.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnSession {
    pub key: SessionKey,
    pub incarnation: String,
    /// What the request to the engine asks for.
    pub retention: Retention,
    /// Set if the shim must trim the turn's full history.
    pub trim: Option<TrimRequest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrimRequest {
    /// With more prompt tokens, the turn runs outside the session.
    pub tokens_max: u64,
    /// Whether the shim refuses a prompt that doesn't continue the session's history, because other
    /// clients rely on that history. The turn then never runs outside the session.
    pub must_continue: bool,
}

/// Upper bounds of what a turn may need, from its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Need {
    pub prompt_tokens: u64,
    /// `None`: as many as the context allows.
    pub answer_tokens: Option<u64>,
    /// Prompts times answers to each, which run side by side. 0 counts as 1.
    pub sequences: u32,
    /// Whether a batch over its client's share counts as the share and runs, because it generates
    /// nothing and so ends soon.
    pub is_clamped_batch: bool,
    /// What the client expects, if it says so. No bound.
    pub likely_answer_tokens: Option<u64>,
    /// Whether `prompt_tokens` is exact, because the body holds token ids.
    pub is_exact: bool,
    /// With `ignore_eos`, the engine reserves room for the longest answer.
    pub ignores_eos: bool,
    /// Leading prompt tokens in the engine's cache, as the turn's sender says (usually a router).
    /// The engine doesn't compute them, but they need room too.
    pub resident_tokens: u64,
    /// Which KV the turn can continue. No bound.
    pub kv: KvIdentity,
}

impl Need {
    #[must_use]
    pub fn places(&self) -> u32 {
        self.sequences.max(1)
    }
}

impl RouteTurns {
    /// On a route without tags, only a shim that trims can tag a turn.
    #[must_use]
    pub fn run_mode(self, planned: RunMode, shim_trims: bool) -> RunMode {
        match (self, planned) {
            (Self::HistoriesTaggedByShim, RunMode::Tagged) if !shim_trims => RunMode::Untagged,
            _ => planned,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// History included.
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    /// Prompt tokens whose KV was resident, if the engine reports them.
    pub cached_tokens: Option<u64>,
    /// How often the engine took the turn out of its batch and put it back.
    pub retractions: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Without usage if the route doesn't report it.
    Finished(Option<Usage>),
    /// Finished, but the client had disconnected and doesn't know the answer.
    Unheard(Option<Usage>),
    /// The engine acknowledged the abort.
    Aborted,
    /// Before it ran, or it never reached the engine.
    Refused,
    /// Given up without an answer. A part of the turn may have become history.
    Partial,
    /// The agent did not see the end of the turn.
    Lost,
}

impl Outcome {
    /// Returns the name used in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished(_) => "finished",
            Self::Unheard(_) => "unheard",
            Self::Aborted => "aborted",
            Self::Refused => "refused",
            Self::Partial => "partial",
            Self::Lost => "lost",
        }
    }
}

/// Which turns a route can carry to a pinned session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteTurns {
    /// `/generate` with one prompt, which the engine appends. Full histories need a shim that
    /// trims, or an empty session.
    DeltasAndHistories,
    /// Only if the shim trims them. On such a route, only the engine makes tokens of the prompt.
    FullHistories,
    /// As [`Self::FullHistories`], and the body has no place for a tag: outside pinned KV, only a
    /// shim that trims can add one.
    HistoriesTaggedByShim,
    Nothing,
}
