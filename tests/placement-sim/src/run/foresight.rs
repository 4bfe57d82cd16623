//! The future uses of a session's blocks, as only the trace knows them (a pure module).

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::{corpus::Corpus, engine::Time, options::SimOptions, pool::BlockPool};

/// For each session and block, the session's turns that use the block, in order.
#[derive(Debug)]
pub(super) struct Foresight {
    corpus: Arc<Corpus>,
    think_max: Duration,
    turns: HashMap<usize, HashMap<u32, Vec<usize>>>,
}

impl Foresight {
    pub(super) fn new(corpus: &Arc<Corpus>, options: &SimOptions) -> Self {
        Self { corpus: Arc::clone(corpus), think_max: options.think_max, turns: HashMap::new() }
    }

    /// Tells the pool when the blocks of a session's ended turn will be used next. Blocks of other
    /// sessions, such as the system prompt's or a parent's, count as used at once.
    pub(super) fn record_turn_end(
        &mut self,
        script: usize,
        turn: usize,
        pass: u32,
        now: Time,
        pool: &mut BlockPool,
    ) {
        let entry = &self.corpus.scripts[script];
        let turns = self.turns.entry(script).or_insert_with(|| {
            let mut turns: HashMap<u32, Vec<usize>> = HashMap::new();
            for (number, turn) in entry.turns.iter().enumerate() {
                for block in turn.chain.iter().filter(|block| entry.own_blocks.contains(block)) {
                    turns.entry(block).or_default().push(number);
                }
            }
            turns
        });
        // Counts pauses only; the times of answers change no order within a session.
        let mut at = now;
        let mut due: Vec<Time> = vec![now; turn + 1];
        for next in &entry.turns[turn + 1..] {
            at += next.think.min(self.think_max);
            due.push(at);
        }
        for block in entry.turns[turn].chain.iter() {
            let next_use = match turns.get(&block) {
                None => now,
                Some(uses) => {
                    let next = uses.partition_point(|&used| used <= turn);
                    uses.get(next).map_or(Time::MAX, |&used| due[used])
                }
            };
            pool.set_next_use(self.corpus.block_number(block, pass), next_use);
        }
    }
}
