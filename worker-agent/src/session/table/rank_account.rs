//! Keeps one rank's account: its totals, its large turns, and what the engine and the shim report.
//!
//! A rank is one data-parallel (DP) rank of the engine, with a KV pool of its own. The account only
//! counts, and `admission` decides by it which turns and sessions get room. The module `table`
//! counts sessions here at each change, `admission` the turns that it sends, `ends` those that end,
//! `trim` those that leave their session, and `engine` what the engine and the shim report.
//!
//! The shim is Berth's part in the engine's process. A pinned session keeps its KV and a request
//! row to itself. A turn (one request and its answer) is plain if it runs on the radix tree,
//! outside pinned sessions. A plain turn is large if its tokens don't fit into the pool beside a
//! full pin budget, which is the most tokens that all pinned sessions may hold.

use std::{collections::HashMap, time::Instant};

use super::{RankCapacity, RankTotals, Session};

/// The account of one rank.
#[derive(Debug, Default)]
pub(super) struct RankAccount {
    pub(super) totals: RankTotals,
    /// The number of turns that have claimed a session or this rank, and whose body is being read.
    pub(super) turns_claimed: u32,
    /// Some plain turns wait for pinned sessions to give up room. This is the number of KV tokens
    /// that the largest of them needs; 0 if none waits.
    largest_waiting_tokens: u64,
    /// The number of running plain turns.
    plain_turns_running: u64,
    /// KV tokens that each running large turn may need.
    large_turn_tokens: Vec<u64>,
    /// The estimated length of the engine's queue: the length that the engine reported last, plus
    /// the turns sent since then, minus the turns ended since then. `None` before its first report.
    pub(super) engine_queue_length: Option<i64>,
    /// When a load sample first found the rank idle: no turn inside the engine and no close
    /// unconfirmed. `None` if the newest sample found it busy, or a turn has started since.
    pub(super) idle_since: Option<Instant>,
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

    /// Counts a turn that was sent to the engine. `large_tokens`: the KV tokens that it may need,
    /// if it is large. `rows`: the rank's request rows.
    pub(super) fn count_start(&mut self, is_pinned: bool, large_tokens: Option<u64>, rows: u32) {
        self.plain_turns_running += u64::from(!is_pinned);
        self.large_turn_tokens.extend(large_tokens);
        self.idle_since = None;
        // A turn that finds a free row doesn't wait in the engine's queue.
        let free_rows = u64::from(rows.saturating_sub(self.totals.rows_held));
        if let (Some(queue_length), true) =
            (&mut self.engine_queue_length, self.plain_turns_running > free_rows)
        {
            *queue_length += 1;
        }
    }

    /// Counts a turn as plain that was admitted to its pinned session, but runs on the radix tree.
    pub(super) fn count_as_plain(&mut self) {
        self.plain_turns_running += 1;
    }

    /// Counts a turn as large that was admitted to its pinned session, but runs on the radix tree.
    pub(super) fn count_as_large(&mut self, tokens: u64) {
        self.large_turn_tokens.push(tokens);
    }

    /// Counts a turn that has ended.
    pub(super) fn count_end(&mut self, is_pinned: bool, large_tokens: Option<u64>) {
        self.totals.turns_running -= 1;
        self.plain_turns_running -= u64::from(!is_pinned);
        let index = large_tokens.and_then(|ended_tokens| {
            self.large_turn_tokens.iter().position(|tokens| *tokens == ended_tokens)
        });
        if let Some(index) = index {
            self.large_turn_tokens.swap_remove(index);
        }
        if let Some(queue_length) = &mut self.engine_queue_length {
            *queue_length = (*queue_length - 1).max(0);
        }
    }

    /// Returns the most KV tokens that a large running turn, or a plain turn that waits for pinned
    /// sessions to give up room, may need.
    pub(super) fn largest_turn_tokens(&self) -> u64 {
        self.large_turn_tokens.iter().copied().max().unwrap_or(0).max(self.largest_waiting_tokens)
    }

    /// Starts a new pass over the agent's queue.
    pub(super) fn start_queue_pass(&mut self) {
        self.largest_waiting_tokens = 0;
    }

    /// Notes that a plain turn waits for pinned sessions to give up room for its `tokens`. Returns
    /// whether it is the first such turn of this pass over the agent's queue.
    pub(super) fn note_wait_for_pins(&mut self, tokens: u64) -> bool {
        let is_first = self.largest_waiting_tokens == 0;
        self.largest_waiting_tokens = self.largest_waiting_tokens.max(tokens);
        is_first
    }

    /// Whether the engine may get one more plain turn. It may have `turns_ahead` plain turns more
    /// than it has free rows, and fewer than `turns_ahead` turns in its own queue.
    pub(super) fn has_engine_room(&self, capacity: &RankCapacity, turns_ahead: u64) -> bool {
        let free_rows = u64::from(capacity.rows.saturating_sub(self.totals.rows_held));
        let engine_waiting =
            self.engine_queue_length.map_or(0, |length| u64::try_from(length).unwrap_or(0));
        self.plain_turns_running < free_rows + turns_ahead && engine_waiting < turns_ahead
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
