//! A worker's staged prefill: the agent's own queue of long prompts, over the modelled engine.
//!
//! This module replaces the agent's shell, without sockets.

use std::time::Duration;

use contract::{load, staged_prefill};
use worker_agent::{
    config::tables::EngineTable,
    staged_prefill_queue::{PromptTicket, RankQueue},
};

use super::{Event, World};
use crate::{
    engine::{ComputedPrompt, Job, PREFILL_TOKENS_PER_S},
    policy::Policy,
    pool::Class,
};

/// The time from the end of a stage until the engine has the next: one answer and one request.
const BETWEEN_STAGES: Duration = Duration::from_millis(10);

/// The prompts whose prefill is staged before their turns.
#[derive(Debug, Default)]
pub(super) struct StagedPrefills {
    queue: RankQueue,
    prompts: Vec<Prompt>,
    /// The turns that have left the staging queue and are on their way to the engine.
    leaving: Vec<Job>,
}

#[derive(Debug)]
struct Prompt {
    ticket: PromptTicket,
    turn: Job,
    resident_tokens: u64,
}

impl StagedPrefills {
    /// Returns the load for reports.
    pub(super) fn load(&self) -> load::StagedPrefill {
        let (tokens, prompts) = self.queue.load();
        let prompts = u32::try_from(prompts).expect("a queue has few prompts");
        load::StagedPrefill { tokens, prompts, stage_tokens: stage_tokens() }
    }

    fn remove_prompt(&mut self, at: usize) -> Job {
        let Prompt { ticket, turn, .. } = self.prompts.remove(at);
        self.queue.leave(ticket);
        turn
    }

    fn tokens_left(&self, at: usize) -> u64 {
        self.prompts[at].turn.input_tokens - self.prompts[at].resident_tokens
    }

    /// Returns the next stage for the engine, unless a stage is in the engine.
    fn next(&mut self, block_tokens: u64) -> Option<Job> {
        let ticket = self.queue.next_prompt()?;
        let prompt = self.prompts.iter().find(|prompt| prompt.ticket == ticket);
        let Prompt { turn, resident_tokens, .. } = prompt.expect("the first is in the queue");
        let blocks = stage_end(*resident_tokens, block_tokens) / block_tokens;
        let tokens = blocks * block_tokens - resident_tokens;
        self.queue.begin_stage(ticket, tokens);
        let chain = turn.chain[..usize::try_from(blocks).expect("prompts fit memory")].to_vec();
        Some(Job {
            is_stage: true,
            chain,
            input_tokens: blocks * block_tokens,
            output_tokens: 0,
            expected_tokens: tokens,
            ..*turn
        })
    }
}

/// Returns the tokens of a stage, by the agents' default settings.
fn stage_tokens() -> u64 {
    staged_prefill::stage_tokens(EngineTable::default().prefill_stage_ms, PREFILL_TOKENS_PER_S)
}

/// Returns the token position at which a stage ends.
fn stage_end(resident_tokens: u64, block_tokens: u64) -> u64 {
    let end = resident_tokens + stage_tokens();
    end / block_tokens * block_tokens
}

impl World {
    /// Delivers a placed turn to its worker; a prompt that is known to be long is staged.
    pub(super) fn deliver(&mut self, worker: usize, turn: Job, examined_prompt: bool) {
        let resident_tokens = turn.input_tokens - turn.expected_tokens;
        let takes = examined_prompt
            && !self.staged_prefills.is_empty()
            && self.is_long(&turn, resident_tokens);
        let ticket = takes.then(|| {
            let queue = &mut self.staged_prefills[worker].queue;
            queue.set_prefill_rate(PREFILL_TOKENS_PER_S);
            queue.enter(turn.expected_tokens, self.now)
        });
        match ticket.flatten() {
            Some(ticket) => {
                self.staged_prefills[worker].prompts.push(Prompt { ticket, turn, resident_tokens });
                self.next_stage(worker);
            }
            None => self.engines[worker].enqueue(turn),
        }
    }

    /// Whether a stage of the prompt should be computed before the turn.
    fn is_long(&self, turn: &Job, resident_tokens: u64) -> bool {
        let left = turn.input_tokens - resident_tokens;
        let end = stage_end(resident_tokens, self.corpus.block_tokens);
        // Tokens after the last full block can't be matched later, so the turn itself computes
        // them.
        let found = turn.chain.len() as u64 * self.corpus.block_tokens;
        left > stage_tokens() && end <= found
    }

    /// Gives the engine the turns that have left the queue, and the next stage if it has none.
    pub(super) fn next_stage(&mut self, worker: usize) {
        for turn in std::mem::take(&mut self.staged_prefills[worker].leaving) {
            self.engines[worker].enqueue(turn);
        }
        if let Some(stage) = self.staged_prefills[worker].next(self.corpus.block_tokens) {
            self.engines[worker].enqueue(stage);
        }
    }

    /// Handles a computed stage: its KV stays, and its turn may follow.
    pub(super) fn stage_done(
        &mut self,
        worker: usize,
        stage: ComputedPrompt,
        policy: &mut dyn Policy,
    ) {
        let ComputedPrompt { job, matched_tokens, stored, .. } = stage;
        let computed = job.input_tokens - matched_tokens;
        self.stats.prefilled_tokens[worker] += computed;
        self.turns[job.turn].staged_tokens += computed;
        let pool = self.pool_index(worker);
        self.engines[worker].finish(&job, Class::Plain, &mut self.pools[pool]);
        self.report_blocks(worker, stored, policy);
        let staged = &mut self.staged_prefills[worker];
        let inside = staged.prompts.iter().position(|prompt| prompt.turn.turn == job.turn);
        let at = inside.expect("a prompt leaves with its last stage");
        let before = std::mem::replace(&mut staged.prompts[at].resident_tokens, job.input_tokens);
        let evicted = matched_tokens + self.corpus.block_tokens < before;
        let (left, ticket) = (staged.tokens_left(at), staged.prompts[at].ticket);
        staged.queue.end_stage(ticket, left);
        let prompt = &self.staged_prefills[worker].prompts[at];
        if evicted || !self.is_long(&prompt.turn, prompt.resident_tokens) {
            let turn = self.staged_prefills[worker].remove_prompt(at);
            self.staged_prefills[worker].leaving.push(Job { expected_tokens: left, ..turn });
        }
        let epoch = self.epochs[worker];
        self.push_event(self.now + BETWEEN_STAGES, Event::Stage { worker, epoch });
    }

    /// Removes and returns the turns in the staging queue of a crashed worker.
    pub(super) fn empty_staging_queue(&mut self, worker: usize) -> Vec<Job> {
        let staged = self.staged_prefills.get_mut(worker).map(std::mem::take);
        let inside = |staged: StagedPrefills| {
            let waiting = staged.prompts.into_iter().map(|prompt| prompt.turn);
            waiting.chain(staged.leaving)
        };
        staged.into_iter().flat_map(inside).collect()
    }
}
