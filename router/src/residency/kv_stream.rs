//! Checks that one agent's stream of resident blocks is complete and in order, for the router.
//!
//! An agent reports which blocks of KV are resident on each rank of its engine. All events of a
//! stream must have the same epoch (one life of the agent's process) and consecutive sequence
//! numbers from 0. The first change of each rank must be a reset, which begins a snapshot, or say
//! that the rank's blocks are unknown. An event that breaks these rules ends the stream. The next
//! stream begins with snapshots again. `kv_index` reads the streams and applies the changes that
//! this module returns. The module is pure.

use std::collections::HashMap;

use proto::{
    kv::{self, Change, RankChange},
    load::RANKS_MAX,
    v1,
};
use serde::Serialize;

/// Why a stream can't be followed any further.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    /// An event is missing or came twice.
    #[error("expected event {want} but received event {got}")]
    Gap {
        /// The expected sequence number.
        want: u64,
        /// The received sequence number.
        got: u64,
    },
    /// The agent process behind the stream changed.
    #[error("the epoch changed from {from} to {to}")]
    EpochChanged {
        /// The epoch of the previous events.
        from: u64,
        /// The epoch of this event.
        to: u64,
    },
    /// A rank's blocks changed without a reset before, or its snapshot ended without a beginning.
    #[error("received a change of rank {0} without a reset before it")]
    NoReset(u32),
    /// The agent reports more than [`RANKS_MAX`] ranks.
    #[error("received resident blocks of more than {RANKS_MAX} ranks")]
    TooManyRanks,
    /// An event that can't be decoded.
    #[error("received an invalid event")]
    Invalid(#[from] kv::Error),
}

/// Whether the router knows the resident blocks of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum KvPhase {
    /// The snapshot has begun but isn't complete.
    Snapshot {
        /// Tokens per block.
        block_tokens: u32,
    },
    /// All resident blocks are known.
    Live {
        /// Tokens per block.
        block_tokens: u32,
    },
    /// The resident blocks are unknown.
    Unknown {
        /// The reason, for an operator.
        reason: String,
    },
}

/// The checks of one stream.
#[derive(Debug, Default)]
pub(super) struct KvStreamChecker {
    epoch: u64,
    /// The sequence number that the next event must have.
    next_sequence: u64,
    /// By rank. A rank without any change is absent.
    phases: HashMap<u32, KvPhase>,
}

impl KvStreamChecker {
    /// Checks the next event and returns its changes, in order.
    ///
    /// # Errors
    /// If the event breaks the order, so that a new stream is needed.
    pub(super) fn accept(&mut self, event: v1::KvEvent) -> Result<Vec<RankChange>, Error> {
        if event.sequence != self.next_sequence {
            return Err(Error::Gap { want: self.next_sequence, got: event.sequence });
        }
        if self.next_sequence > 0 && event.epoch != self.epoch {
            return Err(Error::EpochChanged { from: self.epoch, to: event.epoch });
        }
        self.epoch = event.epoch;
        self.next_sequence += 1;
        let mut changes = Vec::with_capacity(event.changes.len());
        for wire_change in event.changes {
            let change = RankChange::try_from(wire_change)?;
            self.update_phase(&change)?;
            changes.push(change);
        }
        Ok(changes)
    }

    /// Returns the phase of each rank. Ranks without any event are absent.
    #[must_use]
    pub(super) fn phases(&self) -> &HashMap<u32, KvPhase> {
        &self.phases
    }

    /// Changes the phase of a rank as `change` says, or returns why the change can't come now.
    fn update_phase(&mut self, RankChange { dp_rank, change }: &RankChange) -> Result<(), Error> {
        let old_phase = self.phases.get(dp_rank);
        let new_phase = match (change, old_phase) {
            (Change::Reset { block_tokens }, _) => {
                KvPhase::Snapshot { block_tokens: block_tokens.get() }
            }
            (Change::Unknown { why }, _) => KvPhase::Unknown { reason: why.clone() },
            (Change::Complete, Some(KvPhase::Snapshot { block_tokens })) => {
                KvPhase::Live { block_tokens: *block_tokens }
            }
            (
                Change::Stored { .. } | Change::Removed { .. },
                Some(KvPhase::Snapshot { .. } | KvPhase::Live { .. }),
            ) => return Ok(()),
            _ => return Err(Error::NoReset(*dp_rank)),
        };
        if old_phase.is_none() && self.phases.len() == RANKS_MAX {
            return Err(Error::TooManyRanks);
        }
        self.phases.insert(*dp_rank, new_phase);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proto::block::{BlockHash, BlockTokens, Tier};

    use super::*;

    fn event(epoch: u64, sequence: u64, changes: Vec<(u32, Change)>) -> v1::KvEvent {
        let wire = |(dp_rank, change)| RankChange { dp_rank, change }.into();
        v1::KvEvent { epoch, sequence, changes: changes.into_iter().map(wire).collect() }
    }

    fn reset() -> Change {
        Change::Reset { block_tokens: BlockTokens::for_page(1).unwrap() }
    }

    fn stored() -> Change {
        Change::Stored { tier: Tier::Device, parent: None, blocks: vec![BlockHash(9)] }
    }

    #[test]
    fn a_rank_is_live_after_its_snapshot() {
        let mut stream = KvStreamChecker::default();
        let first = vec![(1, reset()), (1, stored())];
        assert_eq!(stream.accept(event(5, 0, first)).unwrap().len(), 2);
        assert_eq!(stream.phases()[&1], KvPhase::Snapshot { block_tokens: 64 });
        stream.accept(event(5, 1, vec![(1, Change::Complete), (1, stored())])).unwrap();
        assert_eq!(stream.phases()[&1], KvPhase::Live { block_tokens: 64 });
        let lost = Change::Unknown { why: "no events came".to_owned() };
        stream.accept(event(5, 2, vec![(1, lost)])).unwrap();
        assert_eq!(stream.accept(event(5, 3, vec![(1, stored())])), Err(Error::NoReset(1)));
    }

    #[test]
    fn what_is_out_of_order_ends_the_stream() {
        let mut stream = KvStreamChecker::default();
        assert_eq!(stream.accept(event(5, 1, vec![])), Err(Error::Gap { want: 0, got: 1 }));
        assert_eq!(stream.accept(event(5, 0, vec![(0, stored())])), Err(Error::NoReset(0)));
        let mut stream = KvStreamChecker::default();
        stream.accept(event(5, 0, vec![(0, reset()), (0, Change::Complete)])).unwrap();
        assert_eq!(stream.accept(event(6, 1, vec![])), Err(Error::EpochChanged { from: 5, to: 6 }));
        assert_eq!(stream.accept(event(5, 1, vec![(0, Change::Complete)])), Err(Error::NoReset(0)));
    }

    #[test]
    fn ranks_have_a_bound() {
        let mut stream = KvStreamChecker::default();
        let ranks = u32::try_from(RANKS_MAX).unwrap();
        stream.accept(event(5, 0, (0..ranks).map(|rank| (rank, reset())).collect())).unwrap();
        assert_eq!(stream.accept(event(5, 1, vec![(ranks, reset())])), Err(Error::TooManyRanks));
    }
}
