//! Holds the states of a session's life at the engine, and the KV that each state has.
//!
//! A pinned session keeps its KV and a request row to itself. The KV of any other session is in the
//! radix tree. [`State`] says which of the two holds, and has the figures that only that state has.
//! `state` changes the state of a session; the session table decides when. This module does no I/O
//! and reads no clock.

use std::time::Instant;

/// A session's life at the engine, independent of its running turns. Only an unpinned session has
/// a [`Tree`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum State {
    /// Pinned. The engine has not been asked to open the session.
    #[default]
    Planned,
    /// Pinned. The engine was asked to open the session and has not answered.
    Opening(Row),
    /// Pinned and open.
    Open(Row),
    /// Pinned. The shim was asked to demote the session. If it has not answered at `until`, the
    /// session is closed at the engine.
    Demoting { row: Row, until: Instant },
    /// Pinned. The engine has the session's history, but the KV is in the radix tree, where it can
    /// be evicted.
    Demoted,
    /// Pinned. After a turn's end, the agent isn't sure what history the engine has.
    Suspect { row: Row, doubt: Doubt },
    /// Not pinned. Turns run on the radix tree.
    InTree(Tree),
    /// The session closes when its last running turn has ended.
    Closing(Kv),
    /// The engine has nothing of the session any more. The agent keeps it to tell its client why.
    /// `tree` is set if the session is not pinned.
    Gone { reason: GoneReason, tree: Option<Tree> },
}

/// The KV of a closing session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kv {
    /// The session is pinned, but holds no row.
    Nothing,
    Row(Row),
    Tree(Tree),
}

/// The request row and the KV of a pinned session. Only a close or a demotion frees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Row {
    /// KV tokens that the session holds.
    pub(super) resident_tokens: u64,
    /// KV tokens that the session may hold when its running turn ends, history included.
    pub(super) reserved_tokens: u64,
    /// Id of a turn whose end the agent did not see. That turn may still be inside the engine.
    pub(super) lost_rid: Option<String>,
}

/// The KV of a session that is not pinned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tree {
    /// Whether the engine tags the KV with the session.
    pub(super) is_tagged: bool,
    /// An estimate of the KV tokens that the session still has in the radix tree.
    pub(super) resident_tokens: u64,
    /// The agent does not pin the session again before this time, because the session lost its pin
    /// or found no room for it.
    pub(super) no_pin_before: Option<Instant>,
}

/// What would clear a suspect session. A session table that the shim was asked for since the doubt
/// arose must report the `expected` history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Doubt {
    pub(super) expected: ExpectedHistory,
    /// If no such table arrives before this time, the session is closed at the engine.
    pub(super) until: Instant,
    pub(super) is_table_requested: bool,
}

/// The history, in tokens, that the shim must report to clear a suspect session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpectedHistory {
    Exactly(u64),
    /// The engine ran the right prompt, but the length of its answer is unknown.
    AtLeast(u64),
}

/// Why a session can't continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GoneReason {
    EngineRestarted,
    /// The agent isn't sure of the engine's history.
    HistoryUnknown,
    /// Pages of the session's KV also belong to other sessions, or other sessions wrote to them.
    KvCorrupt,
    Reclaimed,
}

impl Row {
    /// Returns the KV tokens that the session holds or may hold when its running turn ends.
    pub(super) fn tokens_max(&self) -> u64 {
        self.resident_tokens.max(self.reserved_tokens)
    }
}

impl ExpectedHistory {
    pub(super) fn matches(self, history_tokens: u64) -> bool {
        match self {
            Self::Exactly(tokens) => history_tokens == tokens,
            Self::AtLeast(tokens) => history_tokens >= tokens,
        }
    }
}

impl State {
    pub(super) fn row(&self) -> Option<&Row> {
        match self {
            Self::Opening(row)
            | Self::Open(row)
            | Self::Demoting { row, .. }
            | Self::Suspect { row, .. }
            | Self::Closing(Kv::Row(row)) => Some(row),
            _ => None,
        }
    }

    pub(super) fn row_mut(&mut self) -> Option<&mut Row> {
        match self {
            Self::Opening(row)
            | Self::Open(row)
            | Self::Demoting { row, .. }
            | Self::Suspect { row, .. }
            | Self::Closing(Kv::Row(row)) => Some(row),
            _ => None,
        }
    }

    /// Returns the KV in the radix tree of a session that is not pinned.
    pub(super) fn tree(&self) -> Option<&Tree> {
        match self {
            Self::InTree(tree)
            | Self::Closing(Kv::Tree(tree))
            | Self::Gone { tree: Some(tree), .. } => Some(tree),
            _ => None,
        }
    }

    /// Takes the KV out of the state.
    pub(super) fn into_kv(self) -> Kv {
        match self {
            Self::Opening(row)
            | Self::Open(row)
            | Self::Demoting { row, .. }
            | Self::Suspect { row, .. } => Kv::Row(row),
            Self::InTree(tree) | Self::Gone { tree: Some(tree), .. } => Kv::Tree(tree),
            Self::Closing(kv) => kv,
            Self::Planned | Self::Demoted | Self::Gone { tree: None, .. } => Kv::Nothing,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }

    pub(super) fn is_closing(&self) -> bool {
        matches!(self, Self::Closing(_))
    }

    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }
}
