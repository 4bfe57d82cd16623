//! Checks that one agent's stream of resident blocks is complete and in order, for the router.
//! Pure.
//!
//! All events of a stream must have the same epoch and consecutive sequence numbers from 0. The
//! first change of each rank must be a reset, which begins a snapshot, or say that the rank's
//! blocks are unknown. An event that breaks these rules ends the stream. The next one begins with
//! snapshots again.

use std::collections::HashMap;

use blocks::kv::{self, Change, RankChange};
use contract::{load::RANKS_MAX, v1};

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    /// An event is missing or came twice.
    #[error("expected event {want} but received event {got}")]
    Gap { want: u64, got: u64 },
    #[error("the epoch changed from {from} to {to}")]
    EpochChanged { from: u64, to: u64 },
    /// A rank's blocks changed without a reset before, or its snapshot ended without a beginning.
    #[error("received a change of rank {0} without a reset before it")]
    NoReset(u32),
    #[error("received resident blocks of more than {RANKS_MAX} ranks")]
    TooManyRanks,
    #[error("received an invalid event")]
    Invalid(#[from] kv::Error),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KvPhase {
    /// The snapshot has begun but isn't complete.
    Snapshot {
        block_tokens: u32,
    },
    /// All resident blocks are known.
    Live {
        block_tokens: u32,
    },
    Unknown {
        reason: String,
    },
}

#[derive(Debug, Default)]
pub(super) struct KvStreamChecker {
    epoch: u64,
    next_sequence: u64,
    /// A rank without any change is absent.
    phases: HashMap<u32, KvPhase>,
}

impl KvStreamChecker {
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

    #[must_use]
    pub(super) fn phases(&self) -> &HashMap<u32, KvPhase> {
        &self.phases
    }

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
    use blocks::block::{BlockHash, BlockTokens, Tier};

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
