//! What engines know of open sessions: where each has been, and what is pinned for it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::sim::{
    corpus::Corpus,
    engine::{Engine, Job},
    options::{Mode, Options},
    plays::Plays,
    pool::{Class, Pool},
};

/// A session's pin on one worker.
#[derive(Debug)]
struct Pin {
    chain: Vec<u32>,
    /// When it was pinned last, as a count.
    since: u64,
    /// A turn of the session is inside: its pin goes only with the session.
    busy: bool,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Sessions {
    mode: Mode,
    pin_blocks_max: u64,
    visited: HashMap<usize, BTreeSet<usize>>,
    /// By worker, then play.
    pins: Vec<BTreeMap<usize, Pin>>,
    pinned: Vec<u64>,
    count: u64,
}

impl Sessions {
    #[expect(clippy::cast_possible_truncation, reason = "a part of the pool is no larger than it")]
    pub(super) fn new(options: &Options, pool_blocks: u64) -> Self {
        let budget = (pool_blocks as f64 * options.pin_budget_ratio) as u64;
        Self {
            mode: options.mode,
            // A whole pool of pins is no bound: what is pinned is resident.
            pin_blocks_max: if options.pin_budget_ratio < 1.0 { budget } else { u64::MAX },
            visited: HashMap::new(),
            pins: (0..options.workers).map(|_| BTreeMap::new()).collect(),
            pinned: vec![0; options.workers],
            count: 0,
        }
    }

    /// A turn of the session goes to the worker.
    pub(super) fn sent(&mut self, play: usize, worker: usize) {
        self.visited.entry(play).or_default().insert(worker);
        if let Some(pin) = self.pins[worker].get_mut(&play) {
            pin.busy = true;
        }
    }

    /// Where a session has been.
    pub(super) fn workers_of(&self, play: usize) -> Vec<usize> {
        self.visited.get(&play).into_iter().flatten().copied().collect()
    }

    /// A turn has ended on the worker: what stays of it, and how.
    pub(super) fn ended(&mut self, job: &Job, worker: usize, engine: &mut Engine, pool: &mut Pool) {
        if self.mode == Mode::Pinned {
            self.unpin(job.play, worker, pool);
            let blocks = job.chain.len() as u64;
            if self.pinned[worker] + blocks <= self.pin_blocks_max {
                pool.pin(&job.chain);
                self.count += 1;
                self.pinned[worker] += blocks;
                let pin = Pin { chain: job.chain.clone(), since: self.count, busy: false };
                self.pins[worker].insert(job.play, pin);
            }
        }
        let class = if self.mode == Mode::Tagged { Class::Tagged } else { Class::Plain };
        engine.leave(job, class, pool);
    }

    /// The session ends on the worker: its pin goes, and what it alone used is freed.
    pub(super) fn close(
        &mut self,
        play: usize,
        corpus: &Corpus,
        worker: usize,
        plays: &Plays,
        pool: &mut Pool,
    ) {
        self.unpin(play, worker, pool);
        let one = plays.get(play);
        for block in corpus.scripts[one.script].own.clone() {
            pool.discard(corpus.numbered(block, one.pass));
        }
    }

    /// A session that has moved keeps no pin where it was.
    pub(super) fn unpin(&mut self, play: usize, worker: usize, pool: &mut Pool) {
        if let Some(pin) = self.pins[worker].remove(&play) {
            self.pinned[worker] -= pin.chain.len() as u64;
            pool.leave(&pin.chain, 0, Class::Plain);
        }
    }

    /// Gives up the worker's oldest pin that waits for a turn.
    pub(super) fn release_oldest(&mut self, worker: usize, pool: &mut Pool) -> bool {
        let pins = self.pins[worker].iter();
        // Behind a wedge even a session whose turn is queued gives up its pin.
        let oldest = pins.min_by_key(|(_, pin)| (pin.busy, pin.since)).map(|(play, _)| *play);
        if let Some(play) = oldest {
            self.unpin(play, worker, pool);
        }
        oldest.is_some()
    }

    /// The worker has lost everything.
    pub(super) fn crash(&mut self, worker: usize) {
        self.pins[worker].clear();
        self.pinned[worker] = 0;
    }
}
