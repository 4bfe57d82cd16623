//! Divides the prompt of a turn into blocks, and counts how many of them each worker has.
//!
//! If a worker's agent reports the resident blocks, the counts come from the KV index. Otherwise
//! they come from the learned prompts, which this router sent to the worker before.

use std::{collections::HashMap, sync::Arc};

use blocks::block::BlockHash;
use bytes::Bytes;
use contract::load::{Description, EngineFacts};
use parking_lot::Mutex;

use blocks::index::Overlap;

use super::{PromptOverlap, kv_index::KvIndex, learned::LearnedPrompts};
use crate::{
    fleet::{
        agent::{Agent, Facts},
        snapshot::Snapshot,
        worker::{AgentKey, WorkerRef},
    },
    prompt::{Blocks, Prompt, PromptForm, models::Models},
    shares::Sharer,
};

/// The learned prompts get the memory of the KV index divided by this number: they are only what
/// this router has sent.
const LEARNED_BYTES_DIVISOR: usize = 4;

#[derive(Debug)]
pub(crate) struct TurnBlocks {
    blocks: Blocks,
    overlap: Overlap,
    /// By slot, when the blocks were counted. An agent that joined later has none of the counts.
    agents: Arc<[AgentKey]>,
}

impl TurnBlocks {
    fn device_blocks(&self, worker: WorkerRef) -> u32 {
        let is_counted = self.agents.get(worker.agent.slot()) == Some(&worker.agent);
        let number = worker.number().filter(|_| is_counted);
        number.map_or(0, |number| self.overlap.device_blocks(number))
    }

    pub(crate) fn chain(&self) -> &[BlockHash] {
        &self.blocks.hashes
    }

    pub(crate) fn prompt_overlap(&self) -> PromptOverlap<'_> {
        PromptOverlap {
            tokens: self.blocks.tokens,
            block_tokens: u64::from(self.blocks.block_tokens.get()),
            overlap: &self.overlap,
        }
    }
}

#[derive(Debug)]
pub(crate) struct BlockLocator {
    kv_index: Arc<KvIndex>,
    models: Arc<Models>,
    /// Locked for microseconds.
    sent_prompts: Mutex<SentPrompts>,
}

#[derive(Debug)]
struct SentPrompts {
    learned: LearnedPrompts,
    /// By worker number: the id of the engine process that got the prompts. After a restart, the
    /// engine has another id and none of the prompts.
    engine_ids: HashMap<usize, String>,
    /// By slot: the last agent there that has left the fleet. A turn of it may still be accepted.
    ended: HashMap<usize, AgentKey>,
}

impl SentPrompts {
    fn record(&mut self, worker: WorkerRef, engine_id: &str, pool_tokens: u64, blocks: &Blocks) {
        let has_ended = |ended: &AgentKey| worker.agent <= *ended;
        let Some(number) = worker.number() else { return };
        if self.ended.get(&worker.agent.slot()).is_some_and(has_ended) {
            return;
        }
        if self.engine_ids.get(&number).is_none_or(|known| known != engine_id) {
            self.learned.clear(number);
            self.engine_ids.insert(number, engine_id.to_owned());
        }
        self.learned.record(number, pool_tokens, blocks);
    }

    fn end_agent(&mut self, agent: AgentKey) {
        for number in agent.worker_numbers() {
            self.learned.clear(number);
            self.engine_ids.remove(&number);
        }
        self.ended.insert(agent.slot(), agent);
    }
}

impl BlockLocator {
    /// `bytes_max` is the memory bound of `kv_index`.
    pub(crate) fn new(kv_index: Arc<KvIndex>, models: Arc<Models>, bytes_max: usize) -> Self {
        let sent_prompts = SentPrompts {
            learned: LearnedPrompts::new(bytes_max / LEARNED_BYTES_DIVISOR),
            engine_ids: HashMap::new(),
            ended: HashMap::new(),
        };
        Self { kv_index, models, sent_prompts: Mutex::new(sent_prompts) }
    }

    /// Takes no lock.
    pub(crate) fn reports_blocks(&self, worker: WorkerRef) -> bool {
        self.kv_index.is_live_at(worker)
    }

    /// A count of 0 can be trusted only if the worker's agent reports its blocks. Otherwise the
    /// worker may have blocks that this router doesn't know of. Takes no lock.
    pub(crate) fn can_trust_count(&self, turn_blocks: &TurnBlocks, worker: WorkerRef) -> bool {
        let has_number = worker.number().is_some();
        has_number
            && (self.reports_same_blocks(turn_blocks, worker)
                || turn_blocks.device_blocks(worker) > 0)
    }

    /// Whether the agent reports all resident blocks, with the hashes and the size of the turn's
    /// blocks.
    fn reports_same_blocks(&self, turn_blocks: &TurnBlocks, worker: WorkerRef) -> bool {
        let block_tokens = turn_blocks.blocks.block_tokens.get();
        turn_blocks.blocks.has_agent_hashes && self.kv_index.is_live_with(worker, block_tokens)
    }

    /// Leading tokens that the worker has on its device. `None` if its agent doesn't report that.
    pub(crate) fn reported_tokens(
        &self,
        turn_blocks: &TurnBlocks,
        worker: WorkerRef,
    ) -> Option<u64> {
        if worker.number().is_none() || !self.reports_same_blocks(turn_blocks, worker) {
            return None;
        }
        let Blocks { tokens, block_tokens, .. } = turn_blocks.blocks;
        let blocks = u64::from(turn_blocks.device_blocks(worker));
        Some((blocks * u64::from(block_tokens.get())).min(tokens))
    }

    /// The token ids of a placed turn's prompt, if they are certainly the engine's. `None` also if
    /// tokenizing takes too long, or if the engine keeps the prompt's KV apart from other KV of the
    /// same tokens.
    pub(crate) async fn token_ids(
        &self,
        prompt: &Prompt,
        path: &str,
        body: &Bytes,
        turn_blocks: &TurnBlocks,
        description: &Description,
        sharer: &Sharer,
    ) -> Option<Vec<u32>> {
        let form = PromptForm::for_path(path)?;
        // The engine may tokenize the text in another way than this router does. If an agent has
        // reported the first block under this router's hash, both do it in the same way.
        if prompt.is_text(form, body) && !self.is_first_block_reported(&turn_blocks.blocks) {
            return None;
        }
        let token_ids = self.models.token_ids(prompt, form, body, description, sharer).await?;
        let is_same_length = u64::try_from(token_ids.len()) == Ok(turn_blocks.blocks.tokens);
        is_same_length.then_some(token_ids)
    }

    fn is_first_block_reported(&self, blocks: &Blocks) -> bool {
        let mut overlap = Overlap::default();
        self.kv_index.look_up(&blocks.hashes[..blocks.hashes.len().min(1)], &mut overlap);
        overlap.has_blocks()
    }

    /// The longest context of the turn's workers, if the prompt certainly has more tokens than
    /// that. Counts the tokens only if the prompt has far more bytes than usual.
    pub(crate) async fn context_if_over(
        &self,
        prompt: &Prompt,
        model: Option<&str>,
        path: &str,
        body: &Bytes,
        view: &Snapshot,
        sharer: &Sharer,
    ) -> Option<u32> {
        let form = PromptForm::for_path(path)?;
        let descriptions = || serving_workers(view, model).map(|(_, facts)| &facts.description);
        let longest =
            descriptions().max_by_key(|it| (it.engine.context_tokens, it.model_files.is_some()))?;
        let context_tokens = longest.engine.context_tokens;
        if !prompt.looks_over_context(form, context_tokens.into())
            || descriptions().any(|description| description.engine.shortens_prompts)
        {
            return None;
        }
        let is_over = self.models.is_over_context(prompt, form, body, longest, sharer).await;
        is_over.then_some(context_tokens)
    }

    /// `None` if no blocks can be made of the prompt, or if no engine is known yet.
    pub(crate) async fn locate(
        &self,
        prompt: &Prompt,
        model: Option<&str>,
        path: &str,
        body: &Bytes,
        view: &Snapshot,
        sharer: &Sharer,
    ) -> Option<TurnBlocks> {
        let form = PromptForm::for_path(path)?;
        // All counts use the page size of one engine. The engines of a model should all have the
        // same page size. Blocks of another size have other hashes, so they don't match.
        let (_, facts) = serving_workers(view, model)
            .find(|(agent, facts)| agent.is_up() && facts.description.model_files.is_some())
            .or_else(|| serving_workers(view, model).next())
            .or_else(|| view.workers().next().map(|(_, agent, facts)| (agent, facts)))?;
        let description = &facts.description;
        let blocks = self.models.blocks(prompt, form, body, description, sharer).await?;
        let overlap = self.count_overlap(&blocks, view);
        Some(TurnBlocks { blocks, overlap, agents: Arc::clone(view.agent_keys()) })
    }

    fn count_overlap(&self, blocks: &Blocks, view: &Snapshot) -> Overlap {
        let mut overlap = Overlap::default();
        // Blocks without the agents' hashes have hashes that no agent reports.
        let reports_blocks = |number| blocks.has_agent_hashes && self.kv_index.is_live(number);
        if blocks.has_agent_hashes {
            self.kv_index.look_up(&blocks.hashes, &mut overlap);
        }
        let worker_numbers = || view.workers().filter_map(|(worker, ..)| worker.number());
        if !worker_numbers().all(reports_blocks) {
            let mut sent_overlap = Overlap::default();
            self.sent_prompts.lock().learned.look_up(&blocks.hashes, &mut sent_overlap);
            overlap.replace_counts(&sent_overlap, |number| !reports_blocks(number));
        }
        overlap
    }

    /// Call this when the worker has accepted the turn.
    pub(crate) fn record_sent(&self, turn_blocks: &TurnBlocks, worker: WorkerRef, view: &Snapshot) {
        if turn_blocks.blocks.has_agent_hashes && self.kv_index.is_live_at(worker) {
            // The worker's agent will report the blocks.
            return;
        }
        let Some(facts) = view.agent(worker).facts.as_ref() else { return };
        let description = &facts.description;
        let rank = description.ranks.get(worker.dp_rank as usize);
        let pool_tokens = rank.map_or(0, |rank| rank.pool_tokens);
        let engine_id = &description.engine.instance;
        self.sent_prompts.lock().record(worker, engine_id, pool_tokens, &turn_blocks.blocks);
    }

    /// The workers' numbers go to the next agent of the slot. See [`KvIndex::end_agent`].
    pub(crate) fn end_agent(&self, agent: AgentKey) {
        self.kv_index.end_agent(agent);
        self.sent_prompts.lock().end_agent(agent);
    }
}

fn serving_workers<'a>(
    view: &'a Snapshot,
    model: Option<&'a str>,
) -> impl Iterator<Item = (&'a Agent, &'a Facts)> {
    let model = view.required_model(model);
    let serves = move |engine: &EngineFacts| model.is_none_or(|model| engine.serves(model));
    let workers = view.workers().filter(move |(.., facts)| serves(&facts.description.engine));
    workers.map(|(_, agent, facts)| (agent, facts))
}

#[cfg(test)]
mod tests {
    use blocks::block::{BlockTokens, Chain, Scheme};

    use super::*;

    /// Returns the blocks of a prompt of three blocks.
    fn prompt() -> Blocks {
        let scheme = Scheme::plain(BlockTokens::for_page(1).unwrap());
        let (mut chain, mut hashes) = (Chain::new(&scheme), vec![]);
        chain.push(&[7; 3 * 64], &mut hashes);
        let block_tokens = scheme.block_tokens;
        Blocks { tokens: chain.tokens(), block_tokens, hashes, has_agent_hashes: false }
    }

    fn look_up(sent_prompts: &SentPrompts) -> Overlap {
        let mut overlap = Overlap::default();
        sent_prompts.learned.look_up(&prompt().hashes, &mut overlap);
        overlap
    }

    #[test]
    fn the_next_agent_of_a_slot_has_got_none_of_the_prompts() {
        let mut sent_prompts = SentPrompts {
            learned: LearnedPrompts::new(1 << 20),
            engine_ids: HashMap::new(),
            ended: HashMap::new(),
        };
        let old = WorkerRef { agent: AgentKey::first(2), dp_rank: 1 };
        let new = WorkerRef { agent: old.agent.next(), dp_rank: 1 };
        let number = old.number().unwrap();
        assert_eq!(new.number(), Some(number));
        let record_at = |sent_prompts: &mut SentPrompts, worker| {
            sent_prompts.record(worker, "engine", 10_000, &prompt());
            look_up(sent_prompts).device_blocks(number)
        };
        assert_eq!(record_at(&mut sent_prompts, old), 3);
        sent_prompts.end_agent(old.agent);
        assert_eq!(look_up(&sent_prompts).device_blocks(number), 0);
        // A turn that the old agent accepts after it has left.
        assert_eq!(record_at(&mut sent_prompts, old), 0);
        assert_eq!(record_at(&mut sent_prompts, new), 3);
    }

    #[test]
    fn counts_are_those_of_the_agents_that_were_there_when_they_were_made() {
        let agent = AgentKey::first(0);
        let mut learned = LearnedPrompts::new(1 << 20);
        learned.record(0, 10_000, &prompt());
        let mut overlap = Overlap::default();
        learned.look_up(&prompt().hashes, &mut overlap);
        let turn_blocks = TurnBlocks { blocks: prompt(), overlap, agents: [agent].into() };
        let count = |agent| turn_blocks.device_blocks(WorkerRef { agent, dp_rank: 0 });
        assert_eq!([agent, agent.next(), AgentKey::first(1)].map(count), [3, 0, 0]);
    }
}
