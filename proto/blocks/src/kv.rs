//! The messages by which an agent tells routers which blocks of KV are resident in its engine.
//!
//! A block ([`crate::block`]) is *resident* while its KV is in the engine's GPU or host memory. For
//! each rank, the agent first sends a snapshot and then changes. Conversion from the wire rejects
//! invalid messages. It doesn't check that a change fits the changes before it.

use contract::v1;

use crate::block::{BlockHash, BlockTokens, Tier};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A field that every message of this kind has is absent or empty.
    #[error("a KV change has no {0}; run agent and router of the same version")]
    Missing(&'static str),
    #[error("a KV block has {0} tokens; run agent and router of the same version")]
    BlockTokens(u32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankChange {
    pub dp_rank: u32,
    pub change: Change,
}

/// A change of resident blocks, or a mark in the stream of changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Forget all earlier changes. A snapshot of all resident blocks follows as [`Change::Stored`],
    /// until [`Change::Complete`].
    Reset {
        /// Tokens per block.
        block_tokens: BlockTokens,
    },
    /// Forget all earlier changes. The agent doesn't know the resident blocks, and sends no change
    /// until the next [`Change::Reset`].
    Unknown {
        /// An operator reads it.
        why: String,
    },
    /// In their prompt, each block follows the one before it in `blocks`.
    Stored {
        tier: Tier,
        /// The block before `blocks`; `None` at the beginning of a prompt.
        parent: Option<BlockHash>,
        /// Has at least one.
        blocks: Vec<BlockHash>,
    },
    Removed {
        tier: Tier,
        /// Has at least one.
        blocks: Vec<BlockHash>,
    },
    /// The snapshot that began with [`Change::Reset`] is complete.
    Complete,
}

impl Change {
    /// The true size is at most this.
    #[must_use]
    pub fn wire_bytes(&self) -> usize {
        // An upper bound of all bytes besides the blocks or the text.
        const FRAME_BYTES: usize = 48;
        FRAME_BYTES
            + match self {
                Self::Stored { blocks, .. } | Self::Removed { blocks, .. } => {
                    size_of::<BlockHash>() * blocks.len()
                }
                Self::Unknown { why } => why.len(),
                Self::Reset { .. } | Self::Complete => 0,
            }
    }
}

impl From<Tier> for v1::KvTier {
    fn from(tier: Tier) -> Self {
        match tier {
            Tier::Device => Self::Device,
            Tier::Host => Self::Host,
        }
    }
}

fn read_tier(wire: i32) -> Result<Tier, Error> {
    match v1::KvTier::try_from(wire) {
        Ok(v1::KvTier::Device) => Ok(Tier::Device),
        Ok(v1::KvTier::Host) => Ok(Tier::Host),
        Ok(v1::KvTier::Unspecified) | Err(_) => Err(Error::Missing("tier")),
    }
}

fn write_blocks(blocks: Vec<BlockHash>) -> Vec<u64> {
    blocks.into_iter().map(|block| block.0).collect()
}

fn read_blocks(wire: Vec<u64>) -> Result<Vec<BlockHash>, Error> {
    if wire.is_empty() {
        return Err(Error::Missing("blocks"));
    }
    Ok(wire.into_iter().map(BlockHash).collect())
}

impl TryFrom<v1::KvChange> for RankChange {
    type Error = Error;

    fn try_from(wire: v1::KvChange) -> Result<Self, Error> {
        use v1::kv_change::Change as Wire;
        let change = match wire.change.ok_or(Error::Missing("kind"))? {
            Wire::Reset(reset) if !reset.unknown.is_empty() => {
                Change::Unknown { why: reset.unknown }
            }
            Wire::Reset(reset) => Change::Reset {
                block_tokens: BlockTokens::for_page(reset.block_tokens)
                    .ok()
                    .filter(|tokens| tokens.get() == reset.block_tokens)
                    .ok_or(Error::BlockTokens(reset.block_tokens))?,
            },
            Wire::Stored(stored) => Change::Stored {
                tier: read_tier(stored.tier)?,
                parent: stored.parent.map(BlockHash),
                blocks: read_blocks(stored.blocks)?,
            },
            Wire::Removed(removed) => Change::Removed {
                tier: read_tier(removed.tier)?,
                blocks: read_blocks(removed.blocks)?,
            },
            Wire::Complete(v1::KvComplete {}) => Change::Complete,
        };
        Ok(Self { dp_rank: wire.dp_rank, change })
    }
}

impl From<RankChange> for v1::KvChange {
    fn from(RankChange { dp_rank, change }: RankChange) -> Self {
        use v1::kv_change::Change as Wire;
        let change = match change {
            Change::Reset { block_tokens } => Wire::Reset(v1::KvReset {
                block_tokens: block_tokens.get(),
                unknown: String::new(),
            }),
            Change::Unknown { why } => Wire::Reset(v1::KvReset { block_tokens: 0, unknown: why }),
            Change::Stored { tier, parent, blocks } => Wire::Stored(v1::KvStored {
                tier: v1::KvTier::from(tier).into(),
                parent: parent.map(|block| block.0),
                blocks: write_blocks(blocks),
            }),
            Change::Removed { tier, blocks } => Wire::Removed(v1::KvRemoved {
                tier: v1::KvTier::from(tier).into(),
                blocks: write_blocks(blocks),
            }),
            Change::Complete => Wire::Complete(v1::KvComplete {}),
        };
        Self { dp_rank, change: Some(change) }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    fn all() -> Vec<Change> {
        let block_tokens = BlockTokens::for_page(16).unwrap();
        let blocks: Vec<BlockHash> = (1..=300).map(|hash| BlockHash(hash << 50)).collect();
        vec![
            Change::Reset { block_tokens },
            Change::Unknown { why: "no events came".to_owned() },
            Change::Stored { tier: Tier::Device, parent: None, blocks: blocks.clone() },
            Change::Stored { tier: Tier::Host, parent: Some(BlockHash(7)), blocks: blocks.clone() },
            Change::Removed { tier: Tier::Host, blocks },
            Change::Complete,
        ]
    }

    #[test]
    fn changes_survive_the_wire_and_stay_within_wire_bytes() {
        for change in all() {
            let there = RankChange { dp_rank: 3, change: change.clone() };
            let wire = v1::KvChange::from(there.clone());
            assert!(wire.encoded_len() <= change.wire_bytes(), "{change:?}");
            assert_eq!(RankChange::try_from(wire), Ok(there));
        }
    }

    #[test]
    fn invalid_changes_are_refused() {
        use v1::kv_change::Change as Wire;
        let refused = |change| RankChange::try_from(v1::KvChange { dp_rank: 0, change });
        assert_eq!(refused(None), Err(Error::Missing("kind")));
        let reset = v1::KvReset { block_tokens: 63, unknown: String::new() };
        assert_eq!(refused(Some(Wire::Reset(reset))), Err(Error::BlockTokens(63)));
        let empty = v1::KvRemoved { tier: 1, blocks: vec![] };
        assert_eq!(refused(Some(Wire::Removed(empty))), Err(Error::Missing("blocks")));
        let nowhere = v1::KvRemoved { tier: 0, blocks: vec![1] };
        assert_eq!(refused(Some(Wire::Removed(nowhere))), Err(Error::Missing("tier")));
    }
}
