//! Keeps one rank's account: what sessions hold there, and what the shim reports.
//!
//! A rank is one data-parallel (DP) rank of the engine, with a KV pool of its own. The other
//! modules of the table update the account when a session changes. The account only counts. The
//! module `admission` decides by it which turns and sessions get room.
//!
//! The shim is Berth's part in the engine's process. A pinned session keeps its KV and a request
//! row to itself.

use std::collections::HashMap;

use super::{RankTotals, Session};

/// The account of one rank.
#[derive(Debug, Default)]
pub(super) struct RankAccount {
    pub(super) totals: RankTotals,
    /// Foreign sessions (opened by other clients of the engine), by their ids in the engine. Empty
    /// without a shim, which reports them.
    pub(super) foreign_sessions: HashMap<String, ForeignSession>,
    /// `None` while no shim is connected.
    pub(super) shim: Option<ConnectedShim>,
}

/// The abilities of a connected shim.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectedShim {
    /// Whether the shim can give a session's KV to the radix tree.
    pub(super) can_demote: bool,
}

/// What a foreign session holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct ForeignSession {
    pub(super) holds_row: bool,
    /// KV tokens in whole pages.
    pub(super) tokens: u64,
}

impl RankAccount {
    /// Adds a session's figures to the totals.
    pub(super) fn add_session(&mut self, session: &Session, page_tokens: u64) {
        let (rows, pinned_tokens, tree_tokens) = session_contribution(session, page_tokens);
        self.totals.sessions += 1;
        self.totals.rows_held += rows;
        self.totals.pinned_tokens += pinned_tokens;
        self.totals.tree_tokens_estimate += tree_tokens;
    }

    /// Subtracts a session's figures from the totals.
    pub(super) fn remove_session(&mut self, session: &Session, page_tokens: u64) {
        let (rows, pinned_tokens, tree_tokens) = session_contribution(session, page_tokens);
        self.totals.sessions -= 1;
        self.totals.rows_held -= rows;
        self.totals.pinned_tokens -= pinned_tokens;
        self.totals.tree_tokens_estimate -= tree_tokens;
    }

    /// Whether a connected shim can demote sessions.
    pub(super) fn can_demote(&self) -> bool {
        self.shim.is_some_and(|shim| shim.can_demote)
    }

    /// Whether a connected shim can verify the histories of suspect sessions, which are those whose
    /// history is uncertain.
    pub(super) fn can_verify(&self) -> bool {
        self.shim.is_some()
    }
}

/// Returns what a session adds to its rank's totals: the request rows and the pinned tokens that it
/// holds, and an estimate of its tokens in the radix tree.
fn session_contribution(session: &Session, page_tokens: u64) -> (u32, u64, u64) {
    let tree_tokens = session.state.tree().map_or(0, |tree| tree.resident_tokens);
    let row = session.state.row();
    let pinned_tokens = row.map_or(0, |row| row.tokens_max().next_multiple_of(page_tokens));
    (u32::from(row.is_some()), pinned_tokens, tree_tokens)
}
