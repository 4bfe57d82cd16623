//! Keeps what foreign sessions hold on each rank: those that other clients of the engine opened.
//!
//! The shim reports each of them. Without a shim, their KV is estimated.

use std::collections::HashMap;

use crate::session::table::{SessionReport, room::Room};

/// The most tracked per rank. Sessions beyond this number are not counted.
const SESSIONS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Foreign(Vec<RankForeign>);

#[derive(Debug, Default)]
struct RankForeign {
    sessions: HashMap<String, ForeignSession>,
    /// Full tables that the shim has begun.
    tables: u64,
    /// The sum of the reported sessions, or an estimate.
    held: Room,
}

#[derive(Debug, Clone, Copy)]
struct ForeignSession {
    held: Room,
    /// The full table that was the newest when the shim reported the session last.
    table: u64,
}

impl Foreign {
    pub(crate) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.0.len());
        self.0.resize_with(rank_count, RankForeign::default);
    }

    pub(crate) fn held(&self, dp_rank: u32) -> Room {
        self.0[dp_rank as usize].held
    }

    pub(crate) fn estimate(&mut self, dp_rank: u32, tokens: u64) {
        self.0[dp_rank as usize].held.tokens = tokens;
    }

    /// The shim reports each session from now on, which replaces the estimate.
    pub(crate) fn drop_estimate(&mut self, dp_rank: u32) {
        let rank = &mut self.0[dp_rank as usize];
        rank.held = rank.sessions.values().fold(Room::default(), |sum, session| sum + session.held);
    }

    pub(crate) fn forget_all(&mut self, dp_rank: u32) {
        self.0[dp_rank as usize] = RankForeign::default();
    }

    pub(crate) fn lose_engine(&mut self) {
        self.0.fill_with(RankForeign::default);
    }

    pub(crate) fn report(&mut self, dp_rank: u32, report: &SessionReport, page_tokens: u64) {
        let Some(rank) = self.0.get_mut(dp_rank as usize) else { return };
        if rank.sessions.len() < SESSIONS_MAX || rank.sessions.contains_key(&report.id) {
            let tokens = report.allocated_tokens.next_multiple_of(page_tokens);
            let held = Room { rows: u32::from(report.holds_row), tokens };
            let session = ForeignSession { held, table: rank.tables };
            let before = rank.sessions.insert(report.id.clone(), session);
            let held_before = before.map_or(Room::default(), |session| session.held);
            rank.held = rank.held + held - held_before;
        }
    }

    pub(crate) fn begin_table(&mut self, dp_rank: u32) {
        if let Some(rank) = self.0.get_mut(dp_rank as usize) {
            rank.tables += 1;
        }
    }

    /// Drops what was not reported since the newest full table began. Returns whether any was.
    pub(crate) fn end_table(&mut self, dp_rank: u32) -> bool {
        let Some(rank) = self.0.get_mut(dp_rank as usize) else { return false };
        let (sessions, newest) = (&mut rank.sessions, rank.tables);
        let mut is_any_gone = false;
        for (_, session) in sessions.extract_if(|_, session| session.table < newest) {
            rank.held = rank.held - session.held;
            is_any_gone = true;
        }
        is_any_gone
    }

    /// Returns false if the session is unknown.
    pub(crate) fn forget(&mut self, dp_rank: u32, id: &str) -> bool {
        let Some(rank) = self.0.get_mut(dp_rank as usize) else { return false };
        let known = rank.sessions.remove(id);
        if let Some(session) = known {
            rank.held = rank.held - session.held;
        }
        known.is_some()
    }
}
