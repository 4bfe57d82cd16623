//! Keeps which ranks have a shim, and whether full histories are trimmed.

use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct Shims {
    /// By rank: whether its shim is connected.
    connected: Vec<bool>,
    trims: bool,
}

impl Shims {
    pub(super) fn add_ranks(&mut self, rank_count: usize) {
        let rank_count = rank_count.max(self.connected.len());
        self.connected.resize(rank_count, false);
    }

    pub(super) fn ranks(&self) -> Range<u32> {
        0..u32::try_from(self.connected.len()).expect("few ranks")
    }

    pub(crate) fn has_rank(&self, dp_rank: u32) -> bool {
        self.ranks().contains(&dp_rank)
    }

    pub(crate) fn connect(&mut self, dp_rank: u32) {
        self.connected[dp_rank as usize] = true;
    }

    pub(super) fn disconnect(&mut self, dp_rank: u32) {
        self.connected[dp_rank as usize] = false;
    }

    /// Whether a shim can report histories.
    pub(crate) fn can_verify(&self, dp_rank: u32) -> bool {
        self.connected[dp_rank as usize]
    }

    pub(crate) fn set_trims(&mut self, trims: bool) {
        self.trims = trims;
    }

    pub(crate) fn trims(&self) -> bool {
        self.trims
    }
}
