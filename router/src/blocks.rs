//! A turn's blocks, and how many of them each worker has: by the agents' word where they say it,
//! else by what the worker was given before. It joins `prompt`, `models`, `kv` and what was
//! learned; placement makes a cost of it.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use proto::load::Description;

use crate::{
    kv::{Phase, Residency},
    models::Models,
    overlap::Overlap,
    placement,
    prompt::{Blocks, Route, learned::Learned},
    request::Turn,
    view::{ClusterView, WorkerRef},
};

/// What is learned may take this part of the memory that the index of told blocks has: it holds
/// what this router has sent, not all that is resident.
const LEARNED_PARTS: usize = 4;

/// A turn's blocks, and who has how many of them.
#[derive(Debug)]
pub(crate) struct TurnBlocks {
    blocks: Blocks,
    overlap: Overlap,
}

impl TurnBlocks {
    /// As placement takes it.
    pub(crate) fn prompt(&self) -> placement::Prompt<'_> {
        placement::Prompt {
            tokens: self.blocks.tokens,
            block_tokens: u64::from(self.blocks.block_tokens.get()),
            overlap: &self.overlap,
        }
    }
}

/// All that is known of who has which blocks.
#[derive(Debug)]
pub(crate) struct Whereabouts {
    told: Arc<Residency>,
    models: Arc<Models>,
    /// A leaf lock, held for microseconds.
    given: Mutex<Given>,
}

/// What workers were given by this router.
#[derive(Debug)]
struct Given {
    learned: Learned,
    /// The engine process that was given it; another one has nothing.
    engines: HashMap<usize, String>,
}

impl Whereabouts {
    /// What agents tell, and nothing learned yet.
    pub(crate) fn new(told: Arc<Residency>, models: Arc<Models>, bytes_max: usize) -> Self {
        let given =
            Given { learned: Learned::new(bytes_max / LEARNED_PARTS), engines: HashMap::new() };
        Self { told, models, given: Mutex::new(given) }
    }

    /// Whether the worker's agent says what is resident there.
    pub(crate) fn is_told(&self, worker: WorkerRef) -> bool {
        worker.number().is_some_and(|number| self.told.is_live(number))
    }

    /// Whether what a worker has of the blocks is known, so that none means none.
    pub(crate) fn counts(&self, turn: &TurnBlocks, worker: WorkerRef) -> bool {
        let Some(number) = worker.number() else { return false };
        self.is_told_of(turn, worker) || turn.overlap.device(number) > 0
    }

    /// Whether the worker's agent names the turn's blocks as they are named here.
    fn is_told_of(&self, turn: &TurnBlocks, worker: WorkerRef) -> bool {
        let block_tokens = turn.blocks.block_tokens.get();
        turn.blocks.exact && self.told.of(worker).phase == Phase::Live { block_tokens }
    }

    /// Leading tokens of the turn's prompt that the worker is told to have; none where nobody
    /// tells, so that it isn't known what it has to compute.
    pub(crate) fn told_tokens(&self, turn: &TurnBlocks, worker: WorkerRef) -> Option<u64> {
        let number = worker.number().filter(|_| self.is_told_of(turn, worker))?;
        let Blocks { tokens, block_tokens, .. } = turn.blocks;
        let blocks = u64::from(turn.overlap.device(number));
        Some((blocks * u64::from(block_tokens.get())).min(tokens))
    }

    /// The token ids of a placed turn's prompt, where they are the engine's own for sure. None:
    /// they aren't, or can't be told soon, or the engine keeps their KV apart by more than them.
    pub(crate) async fn ids(
        &self,
        turn: &Turn,
        path: &str,
        body: &Bytes,
        blocks: &TurnBlocks,
        description: &Description,
    ) -> Option<Vec<u32>> {
        let route = Route::of(path)?;
        // Of text its tokens may be others there, until some engine has told a block of them.
        if turn.prompt.is_text(route, body) && !self.has_told(&blocks.blocks) {
            return None;
        }
        let ids = self.models.ids(&turn.prompt, route, body, description).await?;
        let is_same = u64::try_from(ids.len()) == Ok(blocks.blocks.tokens);
        is_same.then_some(ids)
    }

    /// Whether any engine has the first of these blocks by its agent's word.
    fn has_told(&self, blocks: &Blocks) -> bool {
        let mut overlap = Overlap::default();
        self.told.look_up(&blocks.hashes[..blocks.hashes.len().min(1)], &mut overlap);
        overlap.is_found()
    }

    /// The turn's blocks, and who has them. None: it has no prompt that blocks can be made of, or
    /// no engine is known yet.
    pub(crate) async fn of(
        &self,
        turn: &Turn,
        path: &str,
        body: &Bytes,
        view: &ClusterView,
    ) -> Option<TurnBlocks> {
        let route = Route::of(path)?;
        let serves = |models: &[String]| {
            turn.model.as_ref().is_none_or(|model| {
                let base = model.split_once(':').map_or(&**model, |(base, _)| base);
                models.iter().any(|served| served == model || served == base)
            })
        };
        let serving = || view.workers().filter(|(_, _, of)| serves(&of.description.engine.models));
        // Engines of one model have pages of one size, or their blocks are not compared.
        let (_, _, facts) = serving()
            .find(|(_, agent, of)| agent.is_up() && of.description.model_files.is_some())
            .or_else(|| serving().next())
            .or_else(|| view.workers().next())?;
        let engine = &facts.description;
        let blocks = self.models.blocks(&turn.prompt, route, body, engine).await?;
        let overlap = self.overlap(&blocks, view);
        Some(TurnBlocks { blocks, overlap })
    }

    fn overlap(&self, blocks: &Blocks, view: &ClusterView) -> Overlap {
        let mut overlap = Overlap::default();
        // Blocks that aren't exact have names of this router's own.
        let is_told = |number| blocks.exact && self.told.is_live(number);
        if blocks.exact {
            self.told.look_up(&blocks.hashes, &mut overlap);
        }
        let numbers = || view.workers().filter_map(|(worker, ..)| worker.number());
        if !numbers().all(is_told) {
            let mut given = Overlap::default();
            self.given.lock().learned.look_up(&blocks.hashes, &mut given);
            overlap.replace(&given, |number| !is_told(number));
        }
        overlap
    }

    /// A worker has taken the turn, and will have its blocks.
    pub(crate) fn taken(&self, turn: &TurnBlocks, worker: WorkerRef, view: &ClusterView) {
        let Some(number) = worker.number() else { return };
        if turn.blocks.exact && self.told.is_live(number) {
            // Its agent will say so.
            return;
        }
        let Some(facts) = view.agent(worker).facts.as_ref() else { return };
        let description = &facts.description;
        let rank = description.ranks.get(worker.dp_rank as usize);
        let pool_tokens = rank.map_or(0, |rank| rank.pool_tokens);
        let instance = &description.engine.instance;
        let mut given = self.given.lock();
        let Given { learned, engines } = &mut *given;
        if engines.get(&number) != Some(instance) {
            learned.clear(number);
            engines.insert(number, instance.clone());
        }
        learned.given(number, pool_tokens, &turn.blocks);
    }
}
