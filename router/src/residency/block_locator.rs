//! Finds a turn's blocks and how many of them each worker has.
//!
//! The counts are those that agents report. For workers whose agent reports none, they are what
//! this router gave the worker before. This module combines the prompt's blocks, the KV index and
//! the learned prompts; placement turns the counts into costs.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use proto::load::{Description, EngineFacts};

use super::{
    PromptOverlap, index::Overlap, kv_index::KvIndex, kv_stream::KvPhase, learned::LearnedPrompts,
};
use crate::{
    fleet::{snapshot::Snapshot, worker::WorkerRef},
    prompt::{Blocks, Prompt, PromptForm, models::Models},
};

/// Divisor for the memory of learned blocks, compared with the index of reported blocks. They are
/// only the blocks that this router has sent, not all resident ones.
const LEARNED_BYTES_DIVISOR: usize = 4;

/// A turn's blocks and how many of them each worker has.
#[derive(Debug)]
pub(crate) struct TurnBlocks {
    blocks: Blocks,
    overlap: Overlap,
}

impl TurnBlocks {
    /// Returns the prompt in the form that placement takes.
    pub(crate) fn prompt(&self) -> PromptOverlap<'_> {
        PromptOverlap {
            tokens: self.blocks.tokens,
            block_tokens: u64::from(self.blocks.block_tokens.get()),
            overlap: &self.overlap,
        }
    }
}

/// Knows which worker has which blocks, as far as that is reported or learned.
#[derive(Debug)]
pub(crate) struct BlockLocator {
    reported: Arc<KvIndex>,
    models: Arc<Models>,
    /// A leaf lock, held for microseconds.
    sent: Mutex<SentPrompts>,
}

/// The prompts that this router sent to workers.
#[derive(Debug)]
struct SentPrompts {
    learned: LearnedPrompts,
    /// By worker number: the id of the engine process that got the prompts. A restarted engine has
    /// none of them.
    engines: HashMap<usize, String>,
}

impl BlockLocator {
    /// Creates it with the reported blocks, and nothing learned yet.
    pub(crate) fn new(reported: Arc<KvIndex>, models: Arc<Models>, bytes_max: usize) -> Self {
        let sent = SentPrompts {
            learned: LearnedPrompts::new(bytes_max / LEARNED_BYTES_DIVISOR),
            engines: HashMap::new(),
        };
        Self { reported, models, sent: Mutex::new(sent) }
    }

    /// Whether the worker's agent reports all resident blocks.
    pub(crate) fn reports_blocks(&self, worker: WorkerRef) -> bool {
        worker.number().is_some_and(|number| self.reported.is_live(number))
    }

    /// Whether it is known which of the turn's blocks the worker has, so that a count of 0 means
    /// none.
    pub(crate) fn is_known_on(&self, turn_blocks: &TurnBlocks, worker: WorkerRef) -> bool {
        let Some(number) = worker.number() else { return false };
        self.reports_same_blocks(turn_blocks, worker) || turn_blocks.overlap.device(number) > 0
    }

    /// Whether the worker's agent reports blocks under the same hashes as the turn's.
    fn reports_same_blocks(&self, turn_blocks: &TurnBlocks, worker: WorkerRef) -> bool {
        let block_tokens = turn_blocks.blocks.block_tokens.get();
        turn_blocks.blocks.exact
            && self.reported.worker_kv(worker).phase == KvPhase::Live { block_tokens }
    }

    /// Returns the leading prompt tokens that the worker has by its agent's report. `None` if the
    /// agent doesn't report them, so that it is unknown what the worker must compute.
    pub(crate) fn reported_tokens(
        &self,
        turn_blocks: &TurnBlocks,
        worker: WorkerRef,
    ) -> Option<u64> {
        let number = worker.number().filter(|_| self.reports_same_blocks(turn_blocks, worker))?;
        let Blocks { tokens, block_tokens, .. } = turn_blocks.blocks;
        let blocks = u64::from(turn_blocks.overlap.device(number));
        Some((blocks * u64::from(block_tokens.get())).min(tokens))
    }

    /// Returns the token ids of a placed turn's prompt, if they are certainly the engine's own.
    ///
    /// Returns `None` if they aren't, if making them takes too long, or if the engine keeps the
    /// prompt's KV apart by anything else.
    pub(crate) async fn token_ids(
        &self,
        prompt: &Prompt,
        path: &str,
        body: &Bytes,
        blocks: &TurnBlocks,
        description: &Description,
    ) -> Option<Vec<u32>> {
        let form = PromptForm::for_path(path)?;
        // The engine may tokenize text differently, unless an agent has reported a block of it.
        if prompt.is_text(form, body) && !self.is_first_block_reported(&blocks.blocks) {
            return None;
        }
        let token_ids = self.models.token_ids(prompt, form, body, description).await?;
        let is_same = u64::try_from(token_ids.len()) == Ok(blocks.blocks.tokens);
        is_same.then_some(token_ids)
    }

    /// Whether any agent has reported the first of these blocks.
    fn is_first_block_reported(&self, blocks: &Blocks) -> bool {
        let mut overlap = Overlap::default();
        self.reported.look_up(&blocks.hashes[..blocks.hashes.len().min(1)], &mut overlap);
        overlap.is_found()
    }

    /// Makes the turn's blocks and counts them on each worker. Returns `None` if its prompt has no
    /// blocks or no engine is known yet.
    pub(crate) async fn locate(
        &self,
        prompt: &Prompt,
        model: Option<&str>,
        path: &str,
        body: &Bytes,
        view: &Snapshot,
    ) -> Option<TurnBlocks> {
        let form = PromptForm::for_path(path)?;
        let serves = |engine: &EngineFacts| model.is_none_or(|model| engine.serves(model));
        let serving = || view.workers().filter(|(_, _, facts)| serves(&facts.description.engine));
        // Uses one engine's page size for all: engines of one model should have the same, and
        // blocks of another size are not compared.
        let (_, _, facts) = serving()
            .find(|(_, agent, facts)| agent.is_up() && facts.description.model_files.is_some())
            .or_else(|| serving().next())
            .or_else(|| view.workers().next())?;
        let engine = &facts.description;
        let blocks = self.models.blocks(prompt, form, body, engine).await?;
        let overlap = self.overlap(&blocks, view);
        Some(TurnBlocks { blocks, overlap })
    }

    fn overlap(&self, blocks: &Blocks, view: &Snapshot) -> Overlap {
        let mut overlap = Overlap::default();
        // The hashes of inexact blocks have a meaning only within this router.
        let reports_blocks = |number| blocks.exact && self.reported.is_live(number);
        if blocks.exact {
            self.reported.look_up(&blocks.hashes, &mut overlap);
        }
        let numbers = || view.workers().filter_map(|(worker, ..)| worker.number());
        if !numbers().all(reports_blocks) {
            let mut sent = Overlap::default();
            self.sent.lock().learned.look_up(&blocks.hashes, &mut sent);
            overlap.take_counts(&sent, |number| !reports_blocks(number));
        }
        overlap
    }

    /// Records that a worker has taken the turn, so that it will have the turn's blocks.
    pub(crate) fn record_sent(&self, turn_blocks: &TurnBlocks, worker: WorkerRef, view: &Snapshot) {
        let Some(number) = worker.number() else { return };
        if turn_blocks.blocks.exact && self.reported.is_live(number) {
            // The worker's agent will report the blocks.
            return;
        }
        let Some(facts) = view.agent(worker).facts.as_ref() else { return };
        let description = &facts.description;
        let rank = description.ranks.get(worker.dp_rank as usize);
        let pool_tokens = rank.map_or(0, |rank| rank.pool_tokens);
        let instance = &description.engine.instance;
        let mut sent = self.sent.lock();
        let SentPrompts { learned, engines } = &mut *sent;
        if engines.get(&number) != Some(instance) {
            learned.clear(number);
            engines.insert(number, instance.clone());
        }
        learned.record(number, pool_tokens, &turn_blocks.blocks);
    }
}
