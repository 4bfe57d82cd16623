//! The facts that a policy may use: per worker, what a router would know.
//!
//! `run` writes them and policies read them.

use std::time::Duration;

use contract::load::StagedPrefill;

use super::{
    corpus::Chain,
    engine::{Moves, PrefillCounters},
};

/// What a worker may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Accepts all turns.
    Up,
    /// Accepts only turns of sessions that it has.
    Draining,
    /// Accepts nothing.
    Down,
}

/// One worker.
#[derive(Debug, Clone)]
pub struct Worker {
    /// The worker's condition.
    pub condition: Condition,
    /// The turns sent there that have not ended.
    pub outstanding: u32,
    /// The prompt tokens sent there and not computed, with started prompts counted in full.
    pub pending_tokens: u64,
    /// The prompt tokens sent there and not computed, without the computed part of started prompts.
    pub backlog_tokens: u64,
    /// The load of the worker's staged prefill; `None` if its agent doesn't stage prefills.
    pub staged_prefill: Option<StagedPrefill>,
    /// The counters of the engine's prefill.
    pub prefill_counters: PrefillCounters,
    /// The blocks held by the worker's turns and pins.
    pub active_blocks: u64,
    /// The free blocks of the pool.
    pub free_blocks: u64,
    /// The blocks of the pool.
    pub pool_blocks: u64,
    /// The blocks on the host.
    pub host_used_blocks: u64,
    /// The blocks of the host tier; 0 if there is none.
    pub host_blocks: u64,
    /// The tokens that the engine loads from its host tier in a second.
    pub host_load_tokens_per_s: u64,
    /// On which tiers each block, by number, is reported.
    tiers: Vec<Tiers>,
}

/// The tiers that have a block.
#[derive(Debug, Clone, Copy, Default)]
struct Tiers {
    is_on_device: bool,
    is_on_host: bool,
}

/// The turn to place.
#[derive(Debug)]
pub struct TurnToPlace<'a> {
    /// The turn's number.
    pub turn: usize,
    /// The session's number in this run.
    pub session: usize,
    /// Whether the session was inferred from blocks because no client named it.
    pub is_inferred: bool,
    /// The session that started this session.
    pub parent: Option<usize>,
    /// The worker of the session's previous turn.
    pub previous_worker: Option<usize>,
    /// The prompt's blocks.
    pub chain: &'a [u32],
    /// The tokens of the prompt.
    pub input_tokens: u64,
    /// The current time.
    pub now: Duration,
}

/// All workers.
#[derive(Debug)]
pub struct Fleet {
    /// The workers, by number.
    pub workers: Vec<Worker>,
    /// The tokens of a block.
    pub block_tokens: u64,
}

impl Fleet {
    /// Creates `workers` idle, empty workers.
    #[must_use]
    pub fn new(workers: usize, pool_blocks: u64, block_tokens: u64) -> Self {
        let worker = Worker {
            condition: Condition::Up,
            outstanding: 0,
            pending_tokens: 0,
            backlog_tokens: 0,
            staged_prefill: None,
            prefill_counters: PrefillCounters::default(),
            active_blocks: 0,
            free_blocks: pool_blocks,
            pool_blocks,
            host_used_blocks: 0,
            host_blocks: 0,
            host_load_tokens_per_s: 0,
            tiers: Vec::new(),
        };
        Self { workers: vec![worker; workers], block_tokens }
    }

    /// Returns the workers that accept new sessions; if there are none, the draining ones.
    #[must_use]
    pub fn usable(&self) -> Vec<usize> {
        let with_condition = |wanted: &[Condition]| -> Vec<usize> {
            let all = self.workers.iter().enumerate();
            all.filter(|(_, worker)| wanted.contains(&worker.condition)).map(|(at, _)| at).collect()
        };
        let up = with_condition(&[Condition::Up]);
        if up.is_empty() { with_condition(&[Condition::Draining]) } else { up }
    }

    /// Whether the worker is down.
    #[must_use]
    pub fn is_down(&self, worker: usize) -> bool {
        self.workers[worker].condition == Condition::Down
    }

    /// Whether the worker accepts the turn; a draining worker accepts turns of its sessions.
    #[must_use]
    pub fn accepts(&self, worker: usize, request: &TurnToPlace<'_>) -> bool {
        match self.workers[worker].condition {
            Condition::Up => true,
            Condition::Draining => {
                request.previous_worker == Some(worker) || self.usable().contains(&worker)
            }
            Condition::Down => false,
        }
    }

    /// Returns the number of leading blocks of the prompt that are reported as resident on the
    /// worker, on either tier.
    #[must_use]
    pub fn overlap(&self, worker: usize, chain: &[u32]) -> u64 {
        let tiers = &self.workers[worker].tiers;
        let has = |block: &&u32| {
            tiers.get(**block as usize).is_some_and(|tiers| tiers.is_on_device || tiers.is_on_host)
        };
        chain.iter().take_while(has).count() as u64
    }

    /// Returns the prompt tokens that the worker would have to compute.
    #[must_use]
    pub fn uncached_tokens(&self, worker: usize, request: &TurnToPlace<'_>) -> u64 {
        let matched = self.overlap(worker, request.chain) * self.block_tokens;
        request.input_tokens - matched.min(request.input_tokens)
    }

    /// Returns the tokens that the worker computes before the turn's own.
    #[must_use]
    pub fn tokens_before(&self, worker: usize, request: &TurnToPlace<'_>) -> u64 {
        let own = self.uncached_tokens(worker, request);
        let Worker { backlog_tokens, staged_prefill, .. } = self.workers[worker];
        // As in placement: a prompt that needs no staging overtakes all prompts in the staging
        // queue.
        let staged_prefill =
            staged_prefill.filter(|staged_prefill| own > staged_prefill.stage_tokens);
        backlog_tokens
            + staged_prefill.map_or(0, |staged_prefill| {
                staged_prefill.tokens.min(own * u64::from(staged_prefill.prompts))
            })
    }

    /// Records a report of a worker's blocks.
    pub fn record_blocks(&mut self, worker: usize, moves: &Moves) {
        let tiers = &mut self.workers[worker].tiers;
        let mut record = |blocks: &[u32], change: fn(&mut Tiers)| {
            for &block in blocks {
                let at = block as usize;
                if at >= tiers.len() {
                    tiers.resize(at + 1, Tiers::default());
                }
                change(&mut tiers[at]);
            }
        };
        record(&moves.removed, |tiers| tiers.is_on_device = false);
        record(&moves.removed_from_host, |tiers| tiers.is_on_host = false);
        record(&moves.stored, |tiers| tiers.is_on_device = true);
        record(&moves.stored_on_host, |tiers| tiers.is_on_host = true);
    }

    /// Forgets the blocks of a worker that is down.
    pub fn forget_blocks(&mut self, worker: usize) {
        self.workers[worker].tiers.clear();
    }
}

/// Returns a chain's block numbers in the `pass`-th play of its session.
#[must_use]
pub fn block_numbers(chain: &Chain, corpus: &super::corpus::Corpus, pass: u32) -> Vec<u32> {
    chain.iter().map(|block| corpus.block_number(block, pass)).collect()
}
