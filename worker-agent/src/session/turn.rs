//! Describes a turn to and from the session table: what it may need, how it runs, how it ended.
//!
//! A turn is one request of a session and its answer. A pinned session keeps its KV and a request
//! row to itself. These types are plain values, without state or I/O. `data_port` takes a [`Need`]
//! from a request's body and an [`Outcome`] from its answer, and `owner` passes them to the table.
//! The table returns a [`Turn`] for each turn that may go to the engine.

use proto::{id::SessionKey, load::Retention};

use super::KvIdentity;

/// How an admitted turn is sent to the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// The turn's session. `None` for a turn without a session.
    pub session: Option<TurnSession>,
    /// The DP rank to run on.
    pub dp_rank: u32,
    /// The most KV tokens that the turn may add to its pinned session. `None` if the turn doesn't
    /// run in a pinned session.
    pub growth_tokens_max: Option<u64>,
    /// The weights epoch at the turn's admission.
    pub weights_epoch: u64,
    /// How the turn runs. `None` while that isn't known, because the shim (Berth's part in the
    /// engine's process) must first compare the prompt with the session's history.
    pub run_mode: Option<RunMode>,
}

impl Turn {
    /// Whether the turn was admitted to a pinned session.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.retention == Retention::Pinned)
    }

    /// Returns the incarnation id with which the engine may tag the turn's KV.
    #[must_use]
    pub fn tag(&self) -> Option<&str> {
        let session = self.session.as_ref()?;
        let may_tag = session.retention == Retention::Tagged;
        (may_tag && self.run_mode != Some(RunMode::Untagged)).then_some(&session.incarnation)
    }

    /// Lets a turn that was to run tagged run without its tag. Changes no other turn.
    pub fn drop_tag(&mut self) {
        if let (Some(RunMode::Tagged), Some(session)) = (self.run_mode, &mut self.session) {
            session.retention = Retention::None;
            self.run_mode = Some(RunMode::Untagged);
        }
    }
}

/// How a session's turn runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunMode {
    /// In the KV that the session keeps to itself. The engine computes only the new tokens.
    Pinned,
    /// As the first turn of a new incarnation (a new life of the session in the engine), because
    /// the engine's history was not what the client sent.
    Reopened,
    /// On the radix tree. The engine tags the turn's KV with the session, and evicts it after
    /// untagged KV.
    Tagged,
    /// On the radix tree, without a tag.
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

/// The session that a turn runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnSession {
    /// The session's key.
    pub key: SessionKey,
    /// The incarnation id, which names the session to the engine.
    pub incarnation: String,
    /// The retention that the turn's request to the engine asks for.
    pub retention: Retention,
    /// Set if the turn holds a full history (the whole conversation) that the shim must trim to the
    /// tokens that the session lacks.
    pub trim: Option<TrimRequest>,
}

/// What the shim is told about a turn that holds a full history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrimRequest {
    /// The most prompt tokens with which the turn may run in the session. If the prompt has more,
    /// the turn runs outside the session.
    pub tokens_max: u64,
    /// Whether the shim must refuse a prompt that doesn't continue the session's history, because
    /// other clients rely on that history. The shim then never runs the turn outside the session.
    pub must_continue: bool,
}

/// Upper bounds of what a turn may need. They are taken from the turn's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Need {
    /// The most prompt tokens that the turn's body can hold.
    pub prompt_tokens: u64,
    /// The most tokens of the turn's answer. `None`: as many as the context allows.
    pub answer_tokens: Option<u64>,
    /// The sequences (its prompts times the answers to each) that the engine runs for the turn side
    /// by side. 0 counts as 1.
    pub sequences: u32,
    /// Whether a batch of more sequences than its client's share counts as the share and runs. It
    /// generates nothing, so it ends soon.
    pub is_clamped_batch: bool,
    /// The tokens of the answer that the client expects, if it says so. No bound.
    pub likely_answer_tokens: Option<u64>,
    /// Whether `prompt_tokens` is exact, because the body holds token ids. Otherwise
    /// `prompt_tokens` is an upper bound.
    pub is_exact: bool,
    /// Whether the turn ignores the end of its answer (`ignore_eos`), so that the engine reserves
    /// room for the longest answer.
    pub ignores_eos: bool,
    /// Leading prompt tokens that are in the engine's cache, as the turn's sender says (a router,
    /// usually). The engine doesn't compute these tokens, but they need room too.
    pub resident_tokens: u64,
    /// Which KV the turn can continue. No bound.
    pub kv: KvIdentity,
}

impl Need {
    /// Returns the places for turns that the turn takes in the engine.
    #[must_use]
    pub fn places(&self) -> u32 {
        self.sequences.max(1)
    }
}

impl RouteTurns {
    /// Returns how a turn of a session really runs that is to run as `planned`: on a route without
    /// tags, only a shim that trims lets it run tagged.
    #[must_use]
    pub fn run_mode(self, planned: RunMode, shim_trims: bool) -> RunMode {
        match (self, planned) {
            (Self::HistoriesTaggedByShim, RunMode::Tagged) if !shim_trims => RunMode::Untagged,
            _ => planned,
        }
    }
}

/// Token counts that the engine reported for a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the whole prompt, history included.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Prompt tokens whose KV was resident, if the engine reports them.
    pub cached_tokens: Option<u64>,
    /// How many times the engine took the turn out of its batch and put it back.
    pub retractions: u64,
}

/// How a turn ended, as the engine acknowledged it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The engine finished the turn. Usage is absent if the route doesn't report it.
    Finished(Option<Usage>),
    /// The engine finished the turn, but the client had disconnected and doesn't know the answer.
    Unheard(Option<Usage>),
    /// The engine aborted the turn and acknowledged that.
    Aborted,
    /// The engine refused the turn before it ran, or the turn never reached the engine.
    Refused,
    /// The engine gave the turn up without an answer. The engine may have run a part of the turn
    /// and added that part to the session's history.
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
    /// Deltas, and full histories if the shim trims them or the session has no history. The route
    /// is `/generate` with one prompt, which the engine appends.
    DeltasAndHistories,
    /// Full histories only, and only if the shim trims them. On such a route, only the engine turns
    /// the prompt into tokens.
    FullHistories,
    /// As [`Self::FullHistories`], and the route's body has no place for a tag: a turn outside
    /// pinned KV has one only if a shim that trims adds it.
    HistoriesTaggedByShim,
    /// No turn.
    Nothing,
}
