//! Two published rules without sessions, SGLang's and Dynamo's, which decide per request.

use std::collections::{HashMap, HashSet};

use super::{Policy, PolicyChoice, PolicyEvent};
use crate::fleet::{Fleet, TurnToPlace};

/// Loads differ much if they differ by more than this many turns, and by more than the factor
/// below.
const BALANCE_TURNS: u32 = 32;
/// The factor by which loads must also differ.
const BALANCE_FACTOR: f64 = 1.5;
/// The least share of the prompt that counts as a match.
const MATCH_RATIO: f64 = 0.3;

/// SGLang's cache-aware rule, over a record of routed prompts that is never evicted.
#[derive(Debug)]
pub(super) struct CacheAware {
    routed: Vec<HashSet<u32>>,
}

impl CacheAware {
    pub(super) fn new(workers: usize) -> Self {
        Self { routed: vec![HashSet::new(); workers] }
    }

    fn choose(&self, request: &TurnToPlace<'_>, fleet: &Fleet) -> usize {
        let usable = fleet.usable();
        let load = |worker: &usize| fleet.workers[*worker].outstanding;
        let most = usable.iter().map(load).max().unwrap_or(0);
        let fewest = usable.iter().map(load).min().unwrap_or(0);
        let uneven =
            most - fewest > BALANCE_TURNS && f64::from(most) > BALANCE_FACTOR * f64::from(fewest);
        let best_by = |figure: &dyn Fn(&usize) -> (usize, usize)| {
            usable.iter().copied().min_by_key(|worker| figure(worker)).expect("one is usable")
        };
        if uneven {
            return best_by(&|worker| (load(worker) as usize, 0));
        }
        let matched = |worker: &usize| {
            let routed = &self.routed[*worker];
            request.chain.iter().take_while(|block| routed.contains(block)).count()
        };
        let longest =
            best_by(&|worker| (request.chain.len() - matched(worker), self.routed[*worker].len()));
        if matched(&longest) as f64 > MATCH_RATIO * request.chain.len() as f64 {
            return longest;
        }
        best_by(&|worker| (self.routed[*worker].len(), 0))
    }
}

impl Policy for CacheAware {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let worker = self.choose(request, fleet);
        self.routed[worker].extend(request.chain);
        worker.into()
    }
}

/// Dynamo's published cost at its defaults: the prompt blocks to compute on the worker, with this
/// turn, plus the distinct blocks of its turns, with this one. Chooses a random worker of equals.
#[derive(Debug)]
pub(super) struct Dynamo {
    rng: fastrand::Rng,
    active: Vec<Active>,
}

/// The blocks of a worker's turns, each with its number of turns.
#[derive(Debug, Default, Clone)]
struct Active {
    turns: Vec<u16>,
    distinct: usize,
    chains: HashMap<usize, Vec<u32>>,
}

impl Active {
    fn add(&mut self, turn: usize, chain: &[u32]) {
        for &block in chain {
            let at = block as usize;
            if at >= self.turns.len() {
                self.turns.resize(at + 1, 0);
            }
            self.distinct += usize::from(self.turns[at] == 0);
            self.turns[at] += 1;
        }
        self.chains.insert(turn, chain.to_vec());
    }

    fn remove(&mut self, turn: usize) {
        for block in self.chains.remove(&turn).unwrap_or_default() {
            let at = block as usize;
            self.turns[at] -= 1;
            self.distinct -= usize::from(self.turns[at] == 0);
        }
    }

    fn count_with(&self, chain: &[u32]) -> usize {
        let active = |block: &&u32| self.turns.get(**block as usize).is_some_and(|&n| n > 0);
        self.distinct + chain.len() - chain.iter().filter(active).count()
    }
}

impl Dynamo {
    pub(super) fn new(seed: u64, workers: usize) -> Self {
        Self { rng: fastrand::Rng::with_seed(seed), active: vec![Active::default(); workers] }
    }
}

impl Policy for Dynamo {
    fn place(&mut self, request: &TurnToPlace<'_>, fleet: &Fleet) -> PolicyChoice {
        let block = fleet.block_tokens as f64;
        let cost = |worker: usize| {
            let facts = &fleet.workers[worker];
            let overlap = fleet.overlap(worker, request.chain) as f64;
            let prefill = (facts.pending_tokens + request.input_tokens) as f64 / block - overlap;
            prefill.max(0.0) + self.active[worker].count_with(request.chain) as f64
        };
        let usable = fleet.usable();
        let costs: Vec<f64> = usable.iter().map(|&worker| cost(worker)).collect();
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let equals: Vec<usize> =
            (0..usable.len()).filter(|&at| costs[at] <= least).map(|at| usable[at]).collect();
        equals[self.rng.usize(..equals.len())].into()
    }

    fn observe(&mut self, event: &PolicyEvent<'_>, _fleet: &Fleet) {
        match event {
            PolicyEvent::Sent { request, worker, .. } => {
                self.active[*worker].add(request.turn, request.chain)
            }
            PolicyEvent::Ended { turn, worker, .. } => self.active[*worker].remove(*turn),
            _ => {}
        }
    }
}
