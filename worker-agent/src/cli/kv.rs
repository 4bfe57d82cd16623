//! `berth-agent kv`: prints the blocks that a running agent reports as resident.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use proto::{
    block::{BlockHash, Tier},
    kv::{Change, RankChange},
    v1::{self, worker_agent_client::WorkerAgentClient},
};
use serde_json::{Value, json};
use tonic::transport::{Channel, Endpoint};

use super::{CommandOutput, Error};
use crate::config::KvArgs;

/// The time limit for receiving all ranks' snapshots.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// The blocks of one rank received so far.
#[derive(Debug, Default)]
struct Rank {
    block_tokens: u32,
    /// The resident blocks on the device and on the host, in this order.
    blocks: [BTreeSet<BlockHash>; 2],
    unknown: String,
    is_complete: bool,
}

impl Rank {
    fn apply(&mut self, change: Change) {
        let at = |tier| usize::from(tier == Tier::Host);
        match change {
            // An unknown state lasts until a snapshot is complete.
            Change::Reset { block_tokens } => {
                let unknown = std::mem::take(&mut self.unknown);
                *self = Self { block_tokens: block_tokens.get(), unknown, ..Self::default() };
            }
            Change::Unknown { why } => *self = Self { unknown: why, ..Self::default() },
            Change::Stored { tier, blocks, .. } => self.blocks[at(tier)].extend(blocks),
            Change::Removed { tier, blocks } => {
                for block in blocks {
                    self.blocks[at(tier)].remove(&block);
                }
            }
            Change::Complete => {
                self.unknown.clear();
                self.is_complete = true;
            }
        }
    }

    fn is_told(&self) -> bool {
        self.is_complete || !self.unknown.is_empty()
    }
}

/// Receives a snapshot of all ranks and formats it. A rank whose blocks are unknown counts as a
/// fault.
///
/// # Errors
/// See [`Error`].
pub async fn run(args: &KvArgs) -> Result<CommandOutput, Error> {
    let addr = args.control_addr;
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).expect("an address makes a URL");
    let channel = endpoint.connect_timeout(ANSWER_MAX).connect().await;
    let channel = channel.map_err(|error| Error::Unreachable(addr, error))?;
    let late = || Error::Refused(format!("no complete snapshot within {} s", ANSWER_MAX.as_secs()));
    let ranks = tokio::time::timeout(ANSWER_MAX, ranks(channel)).await.map_err(|_| late())??;
    let text = if args.json { as_json(&ranks) } else { table(&ranks) };
    Ok(CommandOutput { text, is_sound: ranks.values().all(|rank| rank.is_complete) })
}

async fn ranks(channel: Channel) -> Result<BTreeMap<u32, Rank>, Error> {
    let refused = |status: tonic::Status| Error::Refused(status.message().to_owned());
    let mut client = WorkerAgentClient::new(channel);
    let description = client.describe(v1::DescribeRequest {}).await.map_err(refused)?.into_inner();
    let all = description.ranks.iter().map(|rank| (rank.dp_rank, Rank::default()));
    let mut ranks: BTreeMap<u32, Rank> = all.collect();
    let mut events = client.watch_kv(v1::WatchKvRequest {}).await.map_err(refused)?.into_inner();
    while !ranks.values().all(Rank::is_told) {
        let ended = || Error::Refused("the stream ended too early".to_owned());
        let event = events.message().await.map_err(refused)?.ok_or_else(ended)?;
        for change in event.changes {
            let change: RankChange = change.try_into()?;
            ranks.entry(change.dp_rank).or_default().apply(change.change);
        }
    }
    Ok(ranks)
}

fn as_json(ranks: &BTreeMap<u32, Rank>) -> String {
    let hashes = |blocks: &BTreeSet<BlockHash>| -> Vec<String> {
        blocks.iter().map(|block| format!("{:016x}", block.0)).collect()
    };
    let shown = ranks.iter().map(|(dp_rank, rank)| match &rank.unknown {
        why if !why.is_empty() => json!({ "dp_rank": dp_rank, "unknown": why }),
        _ => json!({
            "dp_rank": dp_rank,
            "block_tokens": rank.block_tokens,
            "device": hashes(&rank.blocks[0]),
            "host": hashes(&rank.blocks[1]),
        }),
    });
    format!("{}\n", json!({ "ranks": shown.collect::<Vec<Value>>() }))
}

fn table(ranks: &BTreeMap<u32, Rank>) -> String {
    let line = |(dp_rank, rank): (&u32, &Rank)| match &rank.unknown {
        why if !why.is_empty() => format!("rank {dp_rank}: unknown: {why}\n"),
        _ => format!(
            "rank {dp_rank}: {} blocks of {} tokens on the device, {} on the host\n",
            rank.blocks[0].len(),
            rank.block_tokens,
            rank.blocks[1].len(),
        ),
    };
    ranks.iter().map(line).collect()
}
