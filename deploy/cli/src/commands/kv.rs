//! Runs `berth kv`: prints the KV blocks that a running agent reports as resident.
//!
//! The agent's control port first sends each rank's snapshot (all its resident blocks) and then
//! changes. This command prints the snapshots, and ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use blocks::{
    block::{BlockHash, Tier},
    kv::{Change, RankChange},
};
use contract::v1;
use serde::Serialize;
use service::proof::router::AgentClient;

use super::{Outcome, json_line, print};
use crate::{
    args::{KvArgs, TargetArgs},
    connect::agent,
    error::Error,
    text::clean,
};

const SNAPSHOTS_WAIT_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct RankBlocks {
    block_tokens: u32,
    /// The resident blocks on the device and on the host, in this order.
    blocks: [BTreeSet<BlockHash>; 2],
    /// Why the agent doesn't know the rank's blocks. `None` if it knows them, or hasn't answered
    /// yet.
    unknown_reason: Option<String>,
    is_complete: bool,
}

impl RankBlocks {
    fn apply(&mut self, change: Change) {
        let tier_index = |tier| usize::from(tier == Tier::Host);
        match change {
            // A snapshot begins. An earlier reason stays until the snapshot is complete.
            Change::Reset { block_tokens } => {
                let unknown_reason = self.unknown_reason.take();
                let block_tokens = block_tokens.get();
                *self = Self { block_tokens, unknown_reason, ..Self::default() };
            }
            Change::Unknown { why } => {
                *self = Self { unknown_reason: Some(why), ..Self::default() }
            }
            Change::Stored { tier, blocks, .. } => self.blocks[tier_index(tier)].extend(blocks),
            Change::Removed { tier, blocks } => {
                for block in blocks {
                    self.blocks[tier_index(tier)].remove(&block);
                }
            }
            Change::Complete => {
                self.unknown_reason = None;
                self.is_complete = true;
            }
        }
    }

    fn is_answered(&self) -> bool {
        self.is_complete || self.unknown_reason.is_some()
    }
}

#[derive(Debug, Serialize)]
struct Ranks<'a> {
    ranks: Vec<Rank<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Rank<'a> {
    /// `unknown` says why.
    Unknown { dp_rank: u32, unknown: &'a str },
    /// The hashes of the resident blocks.
    Known { dp_rank: u32, block_tokens: u32, device: Vec<String>, host: Vec<String> },
}

/// A rank whose blocks are unknown is not well.
pub async fn run(target: &TargetArgs, args: &KvArgs) -> Result<Outcome, Error> {
    let client = agent::connect(target, SNAPSHOTS_WAIT_MAX).await?;
    let timeout_error =
        || failure(format!("no complete snapshot within {} s", SNAPSHOTS_WAIT_MAX.as_secs()));
    let ranks = tokio::time::timeout(SNAPSHOTS_WAIT_MAX, receive_ranks(target, client))
        .await
        .map_err(|_| timeout_error())??;
    let text = if args.json { as_json(&ranks) } else { as_table(&ranks) };
    print(&text)?;
    Ok(Outcome::from_is_well(ranks.values().all(|rank| rank.is_complete)))
}

async fn receive_ranks(
    target: &TargetArgs,
    mut client: AgentClient,
) -> Result<BTreeMap<u32, RankBlocks>, Error> {
    let to_error = |status: tonic::Status| agent::call_error(target, &status);
    let description = client.describe(v1::DescribeRequest {}).await.map_err(to_error)?.into_inner();
    let empty_ranks = description.ranks.iter().map(|rank| (rank.dp_rank, RankBlocks::default()));
    let mut ranks: BTreeMap<u32, RankBlocks> = empty_ranks.collect();
    let mut events = client.watch_kv(v1::WatchKvRequest {}).await.map_err(to_error)?.into_inner();
    while !ranks.values().all(RankBlocks::is_answered) {
        let early_end_error = || failure("the stream ended too early".to_owned());
        let event = events.message().await.map_err(to_error)?.ok_or_else(early_end_error)?;
        for change in event.changes {
            let change = RankChange::try_from(change).map_err(|error| Error::Answer {
                url: target.agent.clone(),
                why: error.to_string(),
            })?;
            ranks.entry(change.dp_rank).or_default().apply(change.change);
        }
    }
    Ok(ranks)
}

fn failure(why: String) -> Error {
    Error::Failed { who: "agent", why }
}

fn as_json(ranks: &BTreeMap<u32, RankBlocks>) -> String {
    let hex_hashes = |blocks: &BTreeSet<BlockHash>| -> Vec<String> {
        blocks.iter().map(|block| format!("{:016x}", block.0)).collect()
    };
    let ranks = ranks.iter().map(|(&dp_rank, rank)| match &rank.unknown_reason {
        Some(reason) => Rank::Unknown { dp_rank, unknown: reason },
        None => Rank::Known {
            dp_rank,
            block_tokens: rank.block_tokens,
            device: hex_hashes(&rank.blocks[0]),
            host: hex_hashes(&rank.blocks[1]),
        },
    });
    json_line(&Ranks { ranks: ranks.collect() })
}

fn as_table(ranks: &BTreeMap<u32, RankBlocks>) -> String {
    let rank_line = |(dp_rank, rank): (&u32, &RankBlocks)| match &rank.unknown_reason {
        Some(reason) => format!("rank {dp_rank}: unknown: {}\n", clean(reason)),
        None => format!(
            "rank {dp_rank}: {} blocks of {} tokens on the device, {} on the host\n",
            rank.blocks[0].len(),
            rank.block_tokens,
            rank.blocks[1].len(),
        ),
    };
    ranks.iter().map(rank_line).collect()
}
