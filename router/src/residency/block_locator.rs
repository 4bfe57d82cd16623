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
        worker::WorkerRef,
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
}

impl TurnBlocks {
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
}

impl BlockLocator {
    /// `bytes_max` is the memory bound of `kv_index`.
    pub(crate) fn new(kv_index: Arc<KvIndex>, models: Arc<Models>, bytes_max: usize) -> Self {
        let sent_prompts = SentPrompts {
            learned: LearnedPrompts::new(bytes_max / LEARNED_BYTES_DIVISOR),
            engine_ids: HashMap::new(),
        };
        Self { kv_index, models, sent_prompts: Mutex::new(sent_prompts) }
    }

    /// Takes no lock.
    pub(crate) fn reports_blocks(&self, worker: WorkerRef) -> bool {
        worker.number().is_some_and(|number| self.kv_index.is_live(number))
    }

    /// A count of 0 can be trusted only if the worker's agent reports its blocks. Otherwise the
    /// worker may have blocks that this router doesn't know of. Takes no lock.
    pub(crate) fn can_trust_count(&self, turn_blocks: &TurnBlocks, worker: WorkerRef) -> bool {
        let Some(number) = worker.number() else { return false };
        self.reports_same_blocks(turn_blocks, worker)
            || turn_blocks.overlap.device_blocks(number) > 0
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
        let number = worker.number().filter(|_| self.reports_same_blocks(turn_blocks, worker))?;
        let Blocks { tokens, block_tokens, .. } = turn_blocks.blocks;
        let blocks = u64::from(turn_blocks.overlap.device_blocks(number));
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
        overlap.is_first_block_on_a_device()
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
        Some(TurnBlocks { blocks, overlap })
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
        let Some(number) = worker.number() else { return };
        if turn_blocks.blocks.has_agent_hashes && self.kv_index.is_live(number) {
            // The worker's agent will report the blocks.
            return;
        }
        let Some(facts) = view.agent(worker).facts.as_ref() else { return };
        let description = &facts.description;
        let rank = description.ranks.get(worker.dp_rank as usize);
        let pool_tokens = rank.map_or(0, |rank| rank.pool_tokens);
        let engine_id = &description.engine.instance;
        let mut sent_prompts = self.sent_prompts.lock();
        let SentPrompts { learned, engine_ids } = &mut *sent_prompts;
        if engine_ids.get(&number) != Some(engine_id) {
            learned.clear(number);
            engine_ids.insert(number, engine_id.clone());
        }
        learned.record(number, pool_tokens, &turn_blocks.blocks);
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
