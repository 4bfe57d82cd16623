//! Holds the life of one session at the engine: its states, and how they follow each other.
//!
//! The tables say where each event leads a session that a client opened as pinned, or as tagged for
//! the two states in the tree (it has had a turn then), and what follows. An empty cell changes
//! nothing, and a turn then waits. `running` is an open session with a turn inside the engine. Of a
//! `demoting` session others need the room, an `asked` one its owner or an operator demotes. A test
//! compares every cell with the code.
//!
//! A turn arrives with a full history (which may open the session) or a delta:
//!
//! | state        | full history        | opening turn        | delta          |
//! |--------------|---------------------|---------------------|----------------|
//! | open         | running, admit      | running, admit      | running, admit |
//! | running      | refuse              | refuse              | refuse         |
//! | demoted      | running, admit      | running, admit      | running, admit |
//! | tree         | tree running, admit | tree running, admit | refuse         |
//! | tree running | refuse              | refuse              | refuse         |
//! | closing      | refuse              | refuse              | refuse         |
//! | gone         | refuse              | tree running, admit | refuse         |
//!
//! The running turn ends:
//!
//! | state        | finished       | aborted        | lost           |
//! |--------------|----------------|----------------|----------------|
//! | running      | open           | demoted        | suspect, ask   |
//! | tree running | tree           | tree           | tree           |
//! | closing      | removed, close | removed, close | removed, close |
//!
//! The engine answers the open:
//!
//! | state   | opened      | not opened      |
//! |---------|-------------|-----------------|
//! | opening | open, admit | removed, refuse |
//!
//! The shim answers or doesn't. It demotes the session or not, or reports the expected history or
//! an unexpected one:
//!
//! | state    | demoted | not demoted | expected | unexpected  | shim silent | shim down   |
//! |----------|---------|-------------|----------|-------------|-------------|-------------|
//! | demoting | demoted | gone, close |          |             | gone, close | gone, close |
//! | asked    | demoted | open        |          |             | gone, close | gone, close |
//! | suspect  |         |             | open     | gone, close | gone, close | gone, close |
//!
//! The session's owner or an operator demotes it. That is refused in all states but these, and
//! changes nothing in a session that is `demoting`, `asked` or `demoted`:
//!
//! | state | demote        |
//! |-------|---------------|
//! | open  | asked, demote |
//!
//! The client closes the session, all deadlines pass, the engine ends, or an audit finds the KV
//! corrupt (if a turn runs, the session is gone when it ends):
//!
//! | state        | close           | idle limit          | engine lost     | corrupt             |
//! |--------------|-----------------|---------------------|-----------------|---------------------|
//! | planned      | removed, refuse | removed, refuse     | removed, refuse | gone, close, refuse |
//! | opening      | closing, refuse | refuse              | gone, refuse    | gone, close, refuse |
//! | open         | removed, close  | removed, close      | gone            | gone, close         |
//! | running      | closing         |                     | gone            |                     |
//! | demoting     | removed, close  | gone, close, refuse | gone, refuse    | gone, close         |
//! | asked        | removed, close  | gone, close         | gone            | gone, close         |
//! | demoted      | removed, close  | removed, close      | gone            | gone, close         |
//! | suspect      | removed, close  | gone, close         | gone            | gone, close         |
//! | tree         | removed, close  | removed, close      | gone            | gone, close         |
//! | tree running | closing         |                     | gone            |                     |
//! | gone         | removed         | removed             |                 |                     |

use std::{mem, time::Instant};

use serde::{Deserialize, Serialize};

use super::Error;

/// A session's life at the engine. Only an unpinned session has a [`Tree`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum State {
    /// Pinned. The engine has not been asked to open the session.
    #[default]
    Planned,
    /// Pinned. The engine has not answered yet.
    Opening(Row),
    /// Pinned and open.
    Open(Row),
    /// Pinned. If the shim doesn't demote the session, it is closed, or it stays open after a
    /// refusal if `is_asked` (by its owner or an operator).
    Demoting { row: Row, request: ShimRequest, is_asked: bool },
    /// Pinned. The engine has the history, but the KV is in the radix tree and can be evicted.
    Demoted,
    /// Pinned. The agent isn't sure of the engine's history. No `row`: it was demoted before.
    Suspect { row: Option<Row>, doubt: Doubt },
    /// Not pinned. Turns run on the radix tree.
    InTree(Tree),
    /// The session closes when its last running turn has ended.
    Closing(Kv),
    /// The engine has nothing. The session stays to tell its client why. `tree` is set if the
    /// session is not pinned.
    Gone { reason: GoneReason, tree: Option<Tree> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kv {
    /// The session is pinned, but holds no row.
    Nothing,
    Row(Row),
    Tree(Tree),
}

/// The row and KV of a pinned session. Only a close or a demotion frees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) resident_tokens: u64,
    /// What the session may hold when its running turn ends, history included.
    pub(super) reserved_tokens: u64,
    /// A turn whose end the agent did not see, so it may still be inside the engine.
    pub(super) lost_rid: Option<String>,
}

/// The KV of a session that is not pinned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) is_tagged: bool,
    /// Whether a turn was sent with the tag, so the engine may have it. The journal has it.
    pub(super) has_tag: bool,
    /// An estimate of what the radix tree still has.
    pub(super) resident_tokens: u64,
    /// No pin before this time, because the session lost its pin or found no room for it.
    pub(super) no_pin_before: Option<Instant>,
}

/// The answer to `request`, made since the doubt arose, must report the `expected` history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Doubt {
    pub(super) expected: ExpectedHistory,
    pub(super) request: ShimRequest,
    /// Why the session can't continue if the doubt isn't cleared.
    pub(super) otherwise: GoneReason,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ShimRequest {
    /// The answer repeats it; `None` while no shim is there to be asked.
    pub(super) number: Option<u64>,
    /// Without an answer by then, the session is closed. `None` while it first waits in line.
    pub(super) until: Option<Instant>,
}

/// In tokens, as the shim must report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpectedHistory {
    Exactly(u64),
    /// The engine ran the right prompt, but the length of its answer is unknown.
    AtLeast(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum GoneReason {
    EngineRestarted,
    HistoryUnknown,
    KvCorrupt,
    Reclaimed,
    /// The new agent process could not prove what the engine has of the session.
    NotTakenOver,
    WeightsChanged,
    /// The adapter of the session's KV was loaded or unloaded since.
    AdapterChanged,
}

impl GoneReason {
    pub(super) fn to_error(self) -> Error {
        match self {
            Self::EngineRestarted => Error::Lost,
            Self::HistoryUnknown => Error::HistoryUnknown,
            Self::KvCorrupt => Error::KvCorrupt,
            Self::Reclaimed => Error::Reclaimed,
            Self::NotTakenOver => Error::NotTakenOver,
            Self::WeightsChanged => Error::WeightsChanged,
            Self::AdapterChanged => Error::AdapterChanged,
        }
    }
}

impl Row {
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
            | Self::Suspect { row: Some(row), .. }
            | Self::Closing(Kv::Row(row)) => Some(row),
            _ => None,
        }
    }

    pub(super) fn row_mut(&mut self) -> Option<&mut Row> {
        match self {
            Self::Opening(row)
            | Self::Open(row)
            | Self::Demoting { row, .. }
            | Self::Suspect { row: Some(row), .. }
            | Self::Closing(Kv::Row(row)) => Some(row),
            _ => None,
        }
    }

    pub(super) fn tree(&self) -> Option<&Tree> {
        match self {
            Self::InTree(tree)
            | Self::Closing(Kv::Tree(tree))
            | Self::Gone { tree: Some(tree), .. } => Some(tree),
            _ => None,
        }
    }

    fn into_kv(self) -> Kv {
        match self {
            Self::Opening(row)
            | Self::Open(row)
            | Self::Demoting { row, .. }
            | Self::Suspect { row: Some(row), .. } => Kv::Row(row),
            Self::InTree(tree) | Self::Gone { tree: Some(tree), .. } => Kv::Tree(tree),
            Self::Closing(kv) => kv,
            Self::Planned
            | Self::Demoted
            | Self::Suspect { row: None, .. }
            | Self::Gone { tree: None, .. } => Kv::Nothing,
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

    pub(super) fn shim_request(&self) -> Option<ShimRequest> {
        match *self {
            Self::Demoting { request, .. } | Self::Suspect { doubt: Doubt { request, .. }, .. } => {
                Some(request)
            }
            _ => None,
        }
    }

    pub(super) fn await_shim_until(&mut self, until: Instant) {
        if let Self::Demoting { request, .. } | Self::Suspect { doubt: Doubt { request, .. }, .. } =
            self
        {
            request.until = Some(until);
        }
    }

    pub(super) fn request_again(&mut self, again: ShimRequest) {
        if let Self::Suspect { doubt: Doubt { request, .. }, .. } = self {
            *request = again;
        }
    }

    pub(super) fn lost_rid(&self) -> Option<String> {
        self.row().and_then(|row| row.lost_rid.clone())
    }

    /// Takes a row if the session holds none, and returns whether it held none.
    pub(super) fn reserve(&mut self, reserved_tokens: u64) -> bool {
        if let Some(row) = self.row_mut() {
            row.reserved_tokens = reserved_tokens;
            return false;
        }
        *self = Self::Open(Row { reserved_tokens, ..Row::default() });
        true
    }

    pub(super) fn release_reserved(&mut self) {
        if let Some(row) = self.row_mut() {
            row.reserved_tokens = 0;
        }
    }

    pub(super) fn note_lost_turn(&mut self, rid: &str) {
        if let Some(row) = self.row_mut() {
            row.lost_rid = Some(rid.to_owned());
        }
    }

    /// `row`: what the session holds, as the shim reports.
    pub(super) fn clear_doubt(&mut self, row: Option<Row>) {
        if matches!(self, Self::Suspect { .. }) {
            *self = row.map_or(Self::Demoted, Self::Open);
        }
    }

    /// Does nothing to a session without a row.
    pub(super) fn move_row(&mut self, to: impl FnOnce(Row) -> State) {
        *self = match mem::take(self) {
            Self::Opening(row)
            | Self::Open(row)
            | Self::Demoting { row, .. }
            | Self::Suspect { row: Some(row), .. } => to(row),
            other => other,
        };
    }

    pub(super) fn drop_row(&mut self) {
        self.move_row(|_| Self::Demoted);
        if let Self::Closing(kv @ Kv::Row(_)) = self {
            *kv = Kv::Nothing;
        }
    }

    pub(super) fn forget_tree_kv(&mut self) {
        if let Self::InTree(tree) | Self::Closing(Kv::Tree(tree)) = self {
            tree.resident_tokens = 0;
        }
    }

    pub(super) fn note_tag(&mut self) {
        if let Self::InTree(tree)
        | Self::Closing(Kv::Tree(tree))
        | Self::Gone { tree: Some(tree), .. } = self
        {
            tree.has_tag = true;
        }
    }

    /// Only evictable KV was lost, which the next turn computes again.
    pub(super) fn continue_in_tree(&mut self) {
        if let Self::Gone { tree: Some(tree), .. } = self {
            *self = Self::InTree(mem::take(tree));
        }
    }

    pub(super) fn begin_closing(&mut self) {
        *self = Self::Closing(mem::take(self).into_kv());
    }

    /// Takes all that the session had at the engine. A closing session stays closing.
    pub(super) fn lose(&mut self, reason: GoneReason) {
        let is_closing = self.is_closing();
        let tree = match mem::take(self).into_kv() {
            Kv::Tree(tree) => Some(Tree { resident_tokens: 0, has_tag: false, ..tree }),
            Kv::Row(_) | Kv::Nothing => None,
        };
        *self = match tree {
            tree if !is_closing => Self::Gone { reason, tree },
            Some(tree) => Self::Closing(Kv::Tree(tree)),
            None => Self::Closing(Kv::Nothing),
        };
    }
}
