//! Keeps what is known of each rank's shim, and what foreign sessions hold there.
//!
//! The shim is Berth's part in the engine's process. A foreign session is one that another client
//! of the engine opened. The shim reports foreign sessions. Without a shim, their KV is estimated.
//! This module decides nothing.

use std::{collections::HashMap, ops::Range};

use super::{SessionReport, held::Held};

/// The most foreign sessions that are tracked per rank. Sessions beyond this number are not
/// counted.
const FOREIGN_SESSIONS_MAX: usize = 4096;

/// The shims of all ranks.
#[derive(Debug, Default)]
pub(super) struct RankShims {
    ranks: Vec<RankShim>,
    /// Whether the shim trims full histories, that is, removes the tokens that the turn's session
    /// already holds.
    trims: bool,
}

/// The shim of one rank.
#[derive(Debug, Default)]
struct RankShim {
    /// Whether the shim can give a session's KV to the radix tree. `None` while no shim is
    /// connected.
    can_demote: Option<bool>,
    /// The foreign sessions, by their ids in the engine. Empty without a shim.
    foreign_sessions: HashMap<String, ForeignSession>,
    /// The number of full tables that the shim has begun.
    tables: u64,
    /// What all foreign sessions hold: the sum of the reported sessions, or an estimate.
    foreign: Held,
}

/// A session that another client of the engine opened.
#[derive(Debug, Clone, Copy)]
struct ForeignSession {
    held: Held,
    /// The full table that was the newest when the shim reported the session last.
    table: u64,
}

impl RankShims {
    /// Makes room for the shims of `rank_count` ranks.
    pub(super) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.ranks.len());
        self.ranks.resize_with(rank_count, RankShim::default);
    }

    pub(super) fn has_rank(&self, dp_rank: u32) -> bool {
        (dp_rank as usize) < self.ranks.len()
    }

    pub(super) fn set_trims(&mut self, trims: bool) {
        self.trims = trims;
    }

    /// Whether the shim trims full histories.
    pub(super) fn trims(&self) -> bool {
        self.trims
    }

    /// Marks that the shim of an existing rank is connected. It reports each foreign session, which
    /// replaces the estimate.
    pub(super) fn connect(&mut self, dp_rank: u32, can_demote: bool) {
        let rank = &mut self.ranks[dp_rank as usize];
        rank.can_demote = Some(can_demote);
        let sessions = rank.foreign_sessions.values();
        rank.foreign = sessions.fold(Held::default(), |sum, session| sum + session.held);
    }

    /// Forgets the shim of an existing rank, and what it reported.
    pub(super) fn disconnect(&mut self, dp_rank: u32) {
        self.ranks[dp_rank as usize] = RankShim::default();
    }

    /// Forgets all shims, and what they reported. Returns the ranks.
    pub(super) fn disconnect_all(&mut self) -> Range<u32> {
        self.ranks.fill_with(RankShim::default);
        0..u32::try_from(self.ranks.len()).expect("few ranks")
    }

    /// Whether a connected shim can verify the histories of suspect sessions.
    pub(super) fn can_verify(&self, dp_rank: u32) -> bool {
        self.ranks[dp_rank as usize].can_demote.is_some()
    }

    /// Whether a connected shim can demote sessions.
    pub(super) fn can_demote(&self, dp_rank: u32) -> bool {
        self.ranks[dp_rank as usize].can_demote == Some(true)
    }

    /// Returns what foreign sessions hold.
    pub(super) fn foreign(&self, dp_rank: u32) -> Held {
        self.ranks[dp_rank as usize].foreign
    }

    /// Estimates the KV tokens of foreign sessions that no shim reports.
    pub(super) fn estimate_foreign(&mut self, dp_rank: u32, tokens: u64) {
        self.ranks[dp_rank as usize].foreign.tokens = tokens;
    }

    /// Handles the shim's report of a foreign session.
    pub(super) fn report_foreign(
        &mut self,
        dp_rank: u32,
        report: &SessionReport,
        page_tokens: u64,
    ) {
        let Some(rank) = self.ranks.get_mut(dp_rank as usize) else { return };
        let sessions = &mut rank.foreign_sessions;
        if sessions.len() < FOREIGN_SESSIONS_MAX || sessions.contains_key(&report.id) {
            let tokens = report.allocated_tokens.next_multiple_of(page_tokens);
            let held = Held { rows: u32::from(report.holds_row), tokens };
            let session = ForeignSession { held, table: rank.tables };
            let before = sessions.insert(report.id.clone(), session);
            let held_before = before.map_or(Held::default(), |session| session.held);
            rank.foreign = rank.foreign + held - held_before;
        }
    }

    /// Notes that the shim begins a full table of the sessions.
    pub(super) fn begin_table(&mut self, dp_rank: u32) {
        if let Some(rank) = self.ranks.get_mut(dp_rank as usize) {
            rank.tables += 1;
        }
    }

    /// Forgets the foreign sessions that were not reported since the newest full table began.
    /// Returns whether there were any.
    pub(super) fn end_table(&mut self, dp_rank: u32) -> bool {
        let Some(rank) = self.ranks.get_mut(dp_rank as usize) else { return false };
        let (sessions, newest) = (&mut rank.foreign_sessions, rank.tables);
        let mut is_any_gone = false;
        for (_, session) in sessions.extract_if(|_, session| session.table < newest) {
            rank.foreign = rank.foreign - session.held;
            is_any_gone = true;
        }
        is_any_gone
    }

    /// Forgets a foreign session that the engine has closed. Returns false if it is unknown.
    pub(super) fn forget_foreign(&mut self, dp_rank: u32, id: &str) -> bool {
        let rank = self.ranks.get_mut(dp_rank as usize);
        rank.is_some_and(|rank| {
            let known = rank.foreign_sessions.remove(id);
            if let Some(session) = known {
                rank.foreign = rank.foreign - session.held;
            }
            known.is_some()
        })
    }
}
