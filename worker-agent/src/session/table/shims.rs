//! Keeps what is known of each rank's shim, and what foreign sessions hold there.
//!
//! A foreign session is one that another client of the engine opened. Without a shim, their KV is
//! estimated. This module decides nothing.

use std::{collections::HashMap, ops::Range};

use super::{SessionReport, held::Held};

/// The most tracked per rank. Sessions beyond this number are not counted.
const FOREIGN_SESSIONS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct RankShims {
    ranks: Vec<RankShim>,
    trims: bool,
}

#[derive(Debug, Default)]
struct RankShim {
    /// `None` while no shim is connected.
    can_demote: Option<bool>,
    foreign_sessions: HashMap<String, ForeignSession>,
    /// Full tables that the shim has begun.
    tables: u64,
    /// The sum of the reported sessions, or an estimate.
    foreign: Held,
}

#[derive(Debug, Clone, Copy)]
struct ForeignSession {
    held: Held,
    /// The full table that was the newest when the shim reported the session last.
    table: u64,
}

impl RankShims {
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

    pub(super) fn trims(&self) -> bool {
        self.trims
    }

    /// The shim reports each foreign session, which replaces the estimate.
    pub(super) fn connect(&mut self, dp_rank: u32, can_demote: bool) {
        let rank = &mut self.ranks[dp_rank as usize];
        rank.can_demote = Some(can_demote);
        let sessions = rank.foreign_sessions.values();
        rank.foreign = sessions.fold(Held::default(), |sum, session| sum + session.held);
    }

    pub(super) fn disconnect(&mut self, dp_rank: u32) {
        self.ranks[dp_rank as usize] = RankShim::default();
    }

    pub(super) fn disconnect_all(&mut self) -> Range<u32> {
        self.ranks.fill_with(RankShim::default);
        0..u32::try_from(self.ranks.len()).expect("few ranks")
    }

    pub(super) fn can_verify(&self, dp_rank: u32) -> bool {
        self.ranks[dp_rank as usize].can_demote.is_some()
    }

    pub(super) fn can_demote(&self, dp_rank: u32) -> bool {
        self.ranks[dp_rank as usize].can_demote == Some(true)
    }

    pub(super) fn foreign(&self, dp_rank: u32) -> Held {
        self.ranks[dp_rank as usize].foreign
    }

    pub(super) fn estimate_foreign(&mut self, dp_rank: u32, tokens: u64) {
        self.ranks[dp_rank as usize].foreign.tokens = tokens;
    }

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

    pub(super) fn begin_table(&mut self, dp_rank: u32) {
        if let Some(rank) = self.ranks.get_mut(dp_rank as usize) {
            rank.tables += 1;
        }
    }

    /// Drops what was not reported since the newest full table began. Returns whether any was.
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

    /// Returns false if the session is unknown.
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
