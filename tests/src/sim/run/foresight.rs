//! When each block of a session will be wanted next, as only the trace knows. Pure.

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::sim::{corpus::Corpus, engine::Time, options::Options, pool::Pool};

/// By session: in which of its turns a block is, in order.
#[derive(Debug)]
pub(super) struct Foresight {
    corpus: Arc<Corpus>,
    think_max: Duration,
    turns: HashMap<usize, HashMap<u32, Vec<usize>>>,
}

impl Foresight {
    pub(super) fn new(corpus: &Arc<Corpus>, options: &Options) -> Self {
        Self { corpus: Arc::clone(corpus), think_max: options.think_max, turns: HashMap::new() }
    }

    /// The session's turn has ended: tells the pool about the turn's blocks. Blocks of others, as
    /// the system prompt's and a parent's, are wanted at once.
    pub(super) fn note(
        &mut self,
        script: usize,
        turn: usize,
        pass: u32,
        now: Time,
        pool: &mut Pool,
    ) {
        let one = &self.corpus.scripts[script];
        let turns = self.turns.entry(script).or_insert_with(|| {
            let mut turns: HashMap<u32, Vec<usize>> = HashMap::new();
            for (number, turn) in one.turns.iter().enumerate() {
                for block in turn.chain.iter().filter(|block| one.own.contains(block)) {
                    turns.entry(block).or_default().push(number);
                }
            }
            turns
        });
        // Pauses alone: that answers take time too changes no order within a session.
        let mut at = now;
        let mut due: Vec<Time> = vec![now; turn + 1];
        for next in &one.turns[turn + 1..] {
            at += next.think.min(self.think_max);
            due.push(at);
        }
        for block in one.turns[turn].chain.iter() {
            let wanted = match turns.get(&block) {
                None => now,
                Some(uses) => {
                    let next = uses.partition_point(|&used| used <= turn);
                    uses.get(next).map_or(Time::MAX, |&used| due[used])
                }
            };
            pool.foresee(self.corpus.numbered(block, pass), wanted);
        }
    }
}
