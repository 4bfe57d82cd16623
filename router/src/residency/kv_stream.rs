//! Checks the order of events in one agent's stream of resident blocks. Pure.
//!
//! All events must have one epoch and consecutive numbers, and the first change of each rank must
//! be a reset. An event that breaks these rules ends the stream. A new stream begins with a full
//! snapshot.

use std::collections::HashMap;

use proto::{
    block::BlockTokens,
    kv::{self, Change, RankChange},
    v1,
};
use serde::Serialize;

/// Maximum number of ranks of one agent: far more than any engine has.
const RANKS_MAX: usize = 1024;

/// Why a stream can't be followed any further.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    /// An event is missing or came twice.
    #[error("expected event {want} but received event {got}")]
    Gap {
        /// The expected number.
        want: u64,
        /// The received number.
        got: u64,
    },
    /// The agent process behind the stream changed.
    #[error("the epoch changed from {from} to {to}")]
    Epoch {
        /// The epoch of the previous events.
        from: u64,
        /// The epoch of this event.
        to: u64,
    },
    /// A change of a rank that was not reset before, or a completion without a snapshot.
    #[error("received a change of rank {0} without a reset before it")]
    Order(u32),
    /// More ranks than any engine has.
    #[error("received resident blocks of more than {RANKS_MAX} ranks")]
    Ranks,
    /// An event that can't be decoded.
    #[error("received an invalid event")]
    Invalid(#[from] kv::Error),
}

/// What is known of the blocks of one rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum KvPhase {
    /// Part of the snapshot has arrived.
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

/// Checks one stream.
#[derive(Debug, Default)]
pub(super) struct KvStream {
    epoch: u64,
    next: u64,
    phases: HashMap<u32, KvPhase>,
}

impl KvStream {
    /// Checks the next event and returns its changes, in order.
    ///
    /// # Errors
    /// If the event breaks the order, so that a new stream is needed.
    pub(super) fn accept(&mut self, event: v1::KvEvent) -> Result<Vec<RankChange>, Error> {
        if event.sequence != self.next {
            return Err(Error::Gap { want: self.next, got: event.sequence });
        }
        if self.next > 0 && event.epoch != self.epoch {
            return Err(Error::Epoch { from: self.epoch, to: event.epoch });
        }
        self.epoch = event.epoch;
        self.next += 1;
        let mut changes = Vec::with_capacity(event.changes.len());
        for wire in event.changes {
            let change = RankChange::try_from(wire)?;
            self.check(&change)?;
            changes.push(change);
        }
        Ok(changes)
    }

    /// Returns the phase of each rank. Ranks without any event are absent.
    #[must_use]
    pub(super) fn phases(&self) -> &HashMap<u32, KvPhase> {
        &self.phases
    }

    fn check(&mut self, RankChange { dp_rank, change }: &RankChange) -> Result<(), Error> {
        let before = self.phases.get(dp_rank);
        let tokens = |block_tokens: BlockTokens| block_tokens.get();
        let after = match (change, before) {
            (Change::Reset { block_tokens }, _) => {
                KvPhase::Snapshot { block_tokens: tokens(*block_tokens) }
            }
            (Change::Unknown { why }, _) => KvPhase::Unknown { reason: why.clone() },
            (Change::Complete, Some(KvPhase::Snapshot { block_tokens })) => {
                KvPhase::Live { block_tokens: *block_tokens }
            }
            (
                Change::Stored { .. } | Change::Removed { .. },
                Some(KvPhase::Snapshot { .. } | KvPhase::Live { .. }),
            ) => return Ok(()),
            _ => return Err(Error::Order(*dp_rank)),
        };
        if before.is_none() && self.phases.len() == RANKS_MAX {
            return Err(Error::Ranks);
        }
        self.phases.insert(*dp_rank, after);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proto::block::{BlockHash, Tier};

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
        let mut stream = KvStream::default();
        let first = vec![(1, reset()), (1, stored())];
        assert_eq!(stream.accept(event(5, 0, first)).unwrap().len(), 2);
        assert_eq!(stream.phases()[&1], KvPhase::Snapshot { block_tokens: 64 });
        stream.accept(event(5, 1, vec![(1, Change::Complete), (1, stored())])).unwrap();
        assert_eq!(stream.phases()[&1], KvPhase::Live { block_tokens: 64 });
        let lost = Change::Unknown { why: "no events came".to_owned() };
        stream.accept(event(5, 2, vec![(1, lost)])).unwrap();
        assert_eq!(stream.accept(event(5, 3, vec![(1, stored())])), Err(Error::Order(1)));
    }

    #[test]
    fn what_is_out_of_order_ends_the_stream() {
        let mut stream = KvStream::default();
        assert_eq!(stream.accept(event(5, 1, vec![])), Err(Error::Gap { want: 0, got: 1 }));
        assert_eq!(stream.accept(event(5, 0, vec![(0, stored())])), Err(Error::Order(0)));
        let mut stream = KvStream::default();
        stream.accept(event(5, 0, vec![(0, reset()), (0, Change::Complete)])).unwrap();
        assert_eq!(stream.accept(event(6, 1, vec![])), Err(Error::Epoch { from: 5, to: 6 }));
        assert_eq!(stream.accept(event(5, 1, vec![(0, Change::Complete)])), Err(Error::Order(0)));
    }

    #[test]
    fn ranks_have_a_bound() {
        let mut stream = KvStream::default();
        let ranks = u32::try_from(RANKS_MAX).unwrap();
        stream.accept(event(5, 0, (0..ranks).map(|rank| (rank, reset())).collect())).unwrap();
        assert_eq!(stream.accept(event(5, 1, vec![(ranks, reset())])), Err(Error::Ranks));
    }
}
