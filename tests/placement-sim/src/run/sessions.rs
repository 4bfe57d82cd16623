//! The engines' knowledge of open sessions: where each session ran, and what is pinned for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{
    corpus::Corpus,
    engine::{Engine, Job},
    options::{Mode, SimOptions},
    pool::{BlockPool, Class},
    schedule::Schedule,
};

/// A session's pin on one worker.
#[derive(Debug)]
struct Pin {
    chain: Vec<u32>,
    /// A counter value that orders pins by when they were set.
    since: u64,
    /// Whether a turn of the session is in the engine; then other pins are released first.
    busy: bool,
}

/// The open sessions and pins of all workers.
#[derive(Debug)]
pub(super) struct Sessions {
    mode: Mode,
    pin_blocks_max: u64,
    visited: HashMap<usize, BTreeSet<usize>>,
    /// The pins, by worker and then by play.
    pins: Vec<BTreeMap<usize, Pin>>,
    pinned: Vec<u64>,
    /// The number of pins set so far.
    pins_set: u64,
}

impl Sessions {
    #[expect(clippy::cast_possible_truncation, reason = "a part of the pool is no larger than it")]
    pub(super) fn new(options: &SimOptions, pool_blocks: u64) -> Self {
        let budget = (pool_blocks as f64 * options.pin_budget_ratio) as u64;
        Self {
            mode: options.mode,
            // A ratio of 1 means no limit, because pinned blocks are resident anyway.
            pin_blocks_max: if options.pin_budget_ratio < 1.0 { budget } else { u64::MAX },
            visited: HashMap::new(),
            pins: (0..options.workers).map(|_| BTreeMap::new()).collect(),
            pinned: vec![0; options.workers],
            pins_set: 0,
        }
    }

    /// Records that a turn of the session goes to the worker.
    pub(super) fn record_sent(&mut self, play: usize, worker: usize) {
        self.visited.entry(play).or_default().insert(worker);
        if let Some(pin) = self.pins[worker].get_mut(&play) {
            pin.busy = true;
        }
    }

    /// Returns the workers on which a session ran.
    pub(super) fn workers_of(&self, play: usize) -> Vec<usize> {
        self.visited.get(&play).into_iter().flatten().copied().collect()
    }

    /// Handles the end of a turn: releases its blocks, which stay with the session's class or pin.
    pub(super) fn end_turn(
        &mut self,
        job: &Job,
        worker: usize,
        engine: &mut Engine,
        pool: &mut BlockPool,
    ) {
        if self.mode == Mode::Pinned {
            self.unpin(job.play, worker, pool);
            let blocks = job.chain.len() as u64;
            if self.pinned[worker] + blocks <= self.pin_blocks_max {
                pool.pin(&job.chain);
                self.pins_set += 1;
                self.pinned[worker] += blocks;
                let pin = Pin { chain: job.chain.clone(), since: self.pins_set, busy: false };
                self.pins[worker].insert(job.play, pin);
            }
        }
        let class = if self.mode == Mode::Tagged { Class::Tagged } else { Class::Plain };
        engine.finish(job, class, pool);
    }

    /// Ends the session on the worker: drops its pin and frees the blocks that only this session
    /// used.
    pub(super) fn close(
        &mut self,
        play: usize,
        corpus: &Corpus,
        worker: usize,
        schedule: &Schedule,
        pool: &mut BlockPool,
    ) {
        self.unpin(play, worker, pool);
        let entry = schedule.get(play);
        for block in corpus.scripts[entry.script].own_blocks.clone() {
            pool.discard(corpus.block_number(block, entry.pass));
        }
    }

    /// Drops the session's pin on the worker.
    pub(super) fn unpin(&mut self, play: usize, worker: usize, pool: &mut BlockPool) {
        if let Some(pin) = self.pins[worker].remove(&play) {
            self.pinned[worker] -= pin.chain.len() as u64;
            pool.release(&pin.chain, 0, Class::Plain);
        }
    }

    /// Releases the worker's oldest pin, if possible of a session without a running turn. Returns
    /// false if there is no pin.
    pub(super) fn release_oldest(&mut self, worker: usize, pool: &mut BlockPool) -> bool {
        let pins = self.pins[worker].iter();
        // When the engine is blocked, even the pin of a session with a queued turn may be released.
        let oldest = pins.min_by_key(|(_, pin)| (pin.busy, pin.since)).map(|(play, _)| *play);
        if let Some(play) = oldest {
            self.unpin(play, worker, pool);
        }
        oldest.is_some()
    }

    /// Drops the pins of a worker that crashed.
    pub(super) fn crash(&mut self, worker: usize) {
        self.pins[worker].clear();
        self.pinned[worker] = 0;
    }
}
