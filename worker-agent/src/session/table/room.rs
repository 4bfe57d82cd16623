//! Counts what sessions hold of a rank: request rows, and tokens of KV.

use std::ops::{Add, Sub};

use super::Row;

/// Request rows and KV tokens, in whole pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) rows: u32,
    pub(super) tokens: u64,
}

impl Room {
    /// What a pinned session with this row holds or has reserved.
    pub(super) fn from_row(row: Option<&Row>, page_tokens: u64) -> Self {
        let tokens = row.map_or(0, |row| row.tokens_max().next_multiple_of(page_tokens));
        Self { rows: u32::from(row.is_some()), tokens }
    }
}

impl Add for Room {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { rows: self.rows + other.rows, tokens: self.tokens + other.tokens }
    }
}

impl Sub for Room {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { rows: self.rows - other.rows, tokens: self.tokens - other.tokens }
    }
}
