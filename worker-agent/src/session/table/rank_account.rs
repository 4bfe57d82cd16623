//! The account of one rank: its totals, its large turns, and what the engine and the shim report.

use std::{collections::HashMap, time::Instant};

use super::{RankCapacity, RankTotals, Session};

/// The account of one rank.
#[derive(Debug, Default)]
pub(super) struct RankAccount {
    pub(super) totals: RankTotals,
    /// The number of turns whose body is being read.
    pub(super) claimed: u32,
    /// KV tokens needed by the largest turn that waits for pinned sessions to give up room; 0 if
    /// none does.
    waiting_for_pins_tokens: u64,
    /// The number of running turns that are not pinned.
    plain_turns: u64,
    /// KV tokens of each running turn that may need more than pinned sessions leave.
    large_turns: Vec<u64>,
    /// The length of the engine's queue: its last reported value, changed by turns sent and ended
    /// since.
    pub(super) engine_queue: Option<i64>,
    /// Since when no turn is inside the engine.
    pub(super) idle_since: Option<Instant>,
    /// Foreign sessions by engine-side id: whether each holds a row, and its KV tokens. Needs a
    /// shim.
    pub(super) foreign: HashMap<String, (bool, u64)>,
    pub(super) shim: Option<ConnectedShim>,
}

/// The abilities of a connected shim.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectedShim {
    pub(super) demotes: bool,
}

impl RankAccount {
    /// Adds a session's figures to the totals.
    pub(super) fn add_session(&mut self, session: &Session, page: u64) {
        let (rows, pinned, estimate) = weight(session, page);
        self.totals.sessions += 1;
        self.totals.rows_held += rows;
        self.totals.pinned_tokens += pinned;
        self.totals.tree_tokens_estimate += estimate;
    }

    /// Subtracts a session's figures from the totals.
    pub(super) fn remove_session(&mut self, session: &Session, page: u64) {
        let (rows, pinned, estimate) = weight(session, page);
        self.totals.sessions -= 1;
        self.totals.rows_held -= rows;
        self.totals.pinned_tokens -= pinned;
        self.totals.tree_tokens_estimate -= estimate;
    }

    /// Counts a turn that was sent to the engine.
    pub(super) fn count_start(&mut self, pinned: bool, large: Option<u64>, rows: u32) {
        self.plain_turns += u64::from(!pinned);
        self.large_turns.extend(large);
        self.idle_since = None;
        // A turn that finds a free row doesn't wait in the engine's queue.
        let free = u64::from(rows.saturating_sub(self.totals.rows_held));
        if let (Some(waiting), true) = (&mut self.engine_queue, self.plain_turns > free) {
            *waiting += 1;
        }
    }

    /// Counts a turn as plain that was admitted as pinned and runs beside its session.
    pub(super) fn count_as_plain(&mut self) {
        self.plain_turns += 1;
    }

    /// Counts the KV tokens of a turn that runs beside its session and may need more than pinned
    /// sessions leave.
    pub(super) fn count_as_large(&mut self, tokens: u64) {
        self.large_turns.push(tokens);
    }

    /// Counts a turn that has ended.
    pub(super) fn count_end(&mut self, pinned: bool, large: Option<u64>) {
        self.totals.turns_running -= 1;
        self.plain_turns -= u64::from(!pinned);
        if let Some(at) =
            large.and_then(|large| self.large_turns.iter().position(|one| *one == large))
        {
            self.large_turns.swap_remove(at);
        }
        if let Some(waiting) = &mut self.engine_queue {
            *waiting = (*waiting - 1).max(0);
        }
    }

    /// Returns the most KV tokens that a large running turn, or a turn that waits for pinned room,
    /// may need.
    pub(super) fn largest_turn_tokens(&self) -> u64 {
        self.large_turns.iter().copied().max().unwrap_or(0).max(self.waiting_for_pins_tokens)
    }

    /// Starts a new pass over the queue.
    pub(super) fn start_pass(&mut self) {
        self.waiting_for_pins_tokens = 0;
    }

    /// Counts a turn that waits for pinned sessions to give up room. Returns whether it is the
    /// first of this pass.
    pub(super) fn note_wait_for_pins(&mut self, tokens: u64) -> bool {
        let first = self.waiting_for_pins_tokens == 0;
        self.waiting_for_pins_tokens = self.waiting_for_pins_tokens.max(tokens);
        first
    }

    /// Whether the engine can run one more plain turn now, or would have at most `ahead` turns
    /// waiting.
    pub(super) fn has_engine_room(&self, capacity: &RankCapacity, ahead: u64) -> bool {
        let rows = u64::from(capacity.rows.saturating_sub(self.totals.rows_held));
        let waiting = self.engine_queue.map_or(0, |waiting| u64::try_from(waiting).unwrap_or(0));
        self.plain_turns < rows + ahead && waiting < ahead
    }

    /// Whether a connected shim can demote sessions.
    pub(super) fn can_demote(&self) -> bool {
        self.shim.is_some_and(|shim| shim.demotes)
    }

    /// Whether a connected shim can verify the histories of suspect sessions.
    pub(super) fn can_verify(&self) -> bool {
        self.shim.is_some()
    }
}

/// Returns the rows, pinned tokens and estimated tokens that a session adds to its rank's totals.
fn weight(session: &Session, page: u64) -> (u32, u64, u64) {
    if session.retention != proto::load::Retention::Pinned {
        return (0, 0, session.resident_tokens);
    }
    if !session.holds_row {
        return (0, 0, 0);
    }
    let tokens = session.resident_tokens.max(session.reserved_tokens);
    (1, tokens.next_multiple_of(page), 0)
}
