//! What a policy may look at: per worker, what a router would know. Filled by `run`, read by
//! policies.

use std::time::Duration;

use proto::load::Lane;

use super::corpus::Chain;

/// What a worker may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Everything.
    Up,
    /// What it has.
    Draining,
    /// Nothing.
    Down,
}

/// One worker.
#[derive(Debug, Clone)]
pub struct Worker {
    /// Its condition.
    pub condition: Condition,
    /// Turns sent there and not ended.
    pub outstanding: u32,
    /// Prompt tokens sent there and not computed, prompts begun in full.
    pub pending_tokens: u64,
    /// The same with what is done of prompts begun taken off.
    pub backlog_tokens: u64,
    /// Long prompts that its agent computes in pieces; none where it doesn't.
    pub lane: Option<Lane>,
    /// Blocks that its turns hold.
    pub active_blocks: u64,
    /// Blocks of its pool that hold nothing.
    pub free_blocks: u64,
    /// Blocks of its pool.
    pub pool_blocks: u64,
    /// Blocks heard to be resident, by number.
    resident: Vec<bool>,
}

/// The turn to place.
#[derive(Debug)]
pub struct Ask<'a> {
    /// Names the turn.
    pub turn: usize,
    /// Names its session in this run.
    pub session: usize,
    /// The session was guessed from blocks: no client has named it.
    pub guessed: bool,
    /// The session that started this one.
    pub parent: Option<usize>,
    /// Where the session's turn before went.
    pub last: Option<usize>,
    /// Its blocks.
    pub chain: &'a [u32],
    /// Tokens of its prompt.
    pub input_tokens: u64,
    /// When.
    pub now: Duration,
}

/// All workers.
#[derive(Debug)]
pub struct Fleet {
    /// In order.
    pub workers: Vec<Worker>,
    /// Tokens of a block.
    pub block_tokens: u64,
}

impl Fleet {
    /// So many idle, empty workers.
    #[must_use]
    pub fn new(workers: usize, pool_blocks: u64, block_tokens: u64) -> Self {
        let worker = Worker {
            condition: Condition::Up,
            outstanding: 0,
            pending_tokens: 0,
            backlog_tokens: 0,
            lane: None,
            active_blocks: 0,
            free_blocks: pool_blocks,
            pool_blocks,
            resident: Vec::new(),
        };
        Self { workers: vec![worker; workers], block_tokens }
    }

    /// Workers that take new work; all that are not down while there is no such.
    #[must_use]
    pub fn usable(&self) -> Vec<usize> {
        let of = |wanted: &[Condition]| -> Vec<usize> {
            let all = self.workers.iter().enumerate();
            all.filter(|(_, worker)| wanted.contains(&worker.condition)).map(|(at, _)| at).collect()
        };
        let up = of(&[Condition::Up]);
        if up.is_empty() { of(&[Condition::Draining]) } else { up }
    }

    /// Whether the worker is gone.
    #[must_use]
    pub fn is_down(&self, worker: usize) -> bool {
        self.workers[worker].condition == Condition::Down
    }

    /// Whether the worker takes the turn: a draining one goes on with its sessions.
    #[must_use]
    pub fn takes(&self, worker: usize, ask: &Ask<'_>) -> bool {
        match self.workers[worker].condition {
            Condition::Up => true,
            Condition::Draining => ask.last == Some(worker) || self.usable().contains(&worker),
            Condition::Down => false,
        }
    }

    /// Leading blocks of the prompt that the worker is known to hold.
    #[must_use]
    pub fn overlap(&self, worker: usize, chain: &[u32]) -> u64 {
        let resident = &self.workers[worker].resident;
        let has = |block: &&u32| resident.get(**block as usize).copied().unwrap_or(false);
        chain.iter().take_while(has).count() as u64
    }

    /// Prompt tokens the worker would have to compute.
    #[must_use]
    pub fn uncached_tokens(&self, worker: usize, ask: &Ask<'_>) -> u64 {
        let matched = self.overlap(worker, ask.chain) * self.block_tokens;
        ask.input_tokens - matched.min(ask.input_tokens)
    }

    /// Tokens that the worker computes before the turn's own.
    #[must_use]
    pub fn tokens_before(&self, worker: usize, ask: &Ask<'_>) -> u64 {
        let own = self.uncached_tokens(worker, ask);
        let Worker { backlog_tokens, lane, .. } = self.workers[worker];
        // As placement reckons it: who needs no lane passes all that are in it.
        let lane = lane.filter(|lane| own > lane.piece_tokens);
        backlog_tokens + lane.map_or(0, |lane| lane.tokens.min(own * u64::from(lane.prompts)))
    }

    /// Notes what was heard of a worker's blocks.
    pub fn hear(&mut self, worker: usize, stored: &[u32], removed: &[u32]) {
        let resident = &mut self.workers[worker].resident;
        for &block in removed {
            if let Some(one) = resident.get_mut(block as usize) {
                *one = false;
            }
        }
        for &block in stored {
            let at = block as usize;
            if at >= resident.len() {
                resident.resize(at + 1, false);
            }
            resident[at] = true;
        }
    }

    /// Forgets the blocks of a worker that is gone.
    pub fn forget(&mut self, worker: usize) {
        self.workers[worker].resident.clear();
    }
}

/// A corpus' chain as one playing of its session has it.
#[must_use]
pub fn numbered(chain: &Chain, corpus: &super::corpus::Corpus, pass: u32) -> Vec<u32> {
    chain.iter().map(|block| corpus.numbered(block, pass)).collect()
}
