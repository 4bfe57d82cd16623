//! What a turn costs on a worker, in milliseconds of somebody's waiting: its own, and that of those
//! whose KV it takes the room of. Pure.
//!
//! - *wait*: prompts to be computed before this one, and a place in a full batch.
//! - *prefill*: what of the prompt is not resident there.
//! - *displacement*: KV of idle sessions that its new tokens evict now, at the cost of computing it
//!   again, times the chance that it is wanted.
//! - *crowding*: what it will cost to keep the session there. The fuller a pool is of KV that will
//!   be wanted, the more often some of it is evicted before that; each session pays in proportion
//!   to the KV it brings and will bring. This keeps sessions that share a system prompt from
//!   herding onto the worker that has it.
//! - *blocking*: turns of the worker's sessions that will come while the prompt is computed, and
//!   wait for it.
//! - *interference*: a turn more in the batch slows the others.
//!
//! What is unknown is visible as absent in the figures and counts as a stated assumption.

use std::time::Instant;

use proto::load::{Figure, RankLoad};
use serde::Serialize;

use super::{Prompt, Question, TURN_TOKENS_ASSUMED};
use crate::view::{
    Agent, ClusterView, WorkerRef,
    demand::{Idle, Wanted},
};

/// Assumed until it is measured: a 70B model on one node, cautiously.
const PREFILL_TOKENS_PER_S_ASSUMED: u64 = 10_000;
/// How long a turn of a full batch keeps its place: 440 tokens at 20 ms.
const TURN_MS_ASSUMED: u64 = 10_000;
/// KV that a session will bring beyond what it has: agents' prompts have 100,000 tokens in the
/// median, and begin with 20,000.
const GROWTH_TOKENS: u64 = 100_000;
/// But at most this part of the pool: who serves small contexts has small pools.
const GROWTH_POOL_PARTS: u64 = 10;
/// Of a pool full of wanted KV, a session will have to compute again half of what it brings.
const CROWDING_DIVISOR: u64 = 2;
/// What is resident and nobody's goes first, as far as it is older than what is somebody's: half.
const UNWANTED_DIVISOR: u64 = 2;
/// A return is as likely before as after the time when the KV would have gone anyway.
const DISPLACEMENT_DIVISOR: u64 = 2;
/// Room for the answer.
const ANSWER_TOKENS: u64 = 1_000;
/// A turn in a batch slows each other's step by a fiftieth, for some seconds, of which each has
/// some part left.
const INTERFERENCE_MS_EACH: u64 = 5;

/// A turn that comes while a prompt is computed waits for half of it in the mean, and not longer
/// than this: then it goes elsewhere, for the price of its own KV.
const BLOCKING_MS_MAX: u64 = 2_500;

/// All of a capacity.
const WHOLE_MILLI: u64 = 1000;

/// What was compared of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// Which.
    pub worker: WorkerRef,
    /// The sum that decides.
    pub cost_ms: u64,
    /// Until the prompt's turn comes.
    pub wait_ms: u64,
    /// To compute what of the prompt is not resident; unknown where the prompt is.
    pub prefill_ms: Option<u64>,
    /// To compute again what is evicted for it; unknown where the prompt or the pool's room is.
    pub displacement_ms: Option<u64>,
    /// To keep the session there.
    pub crowding_ms: u64,
    /// For turns that will come and wait; unknown where the prompt is.
    pub blocking_ms: Option<u64>,
    /// For the others in the batch.
    pub interference_ms: u64,
    /// Prompt tokens resident there.
    pub resident_tokens: Option<u64>,
    /// Prompt tokens to be computed before, with those this router sent since the report.
    pub backlog_tokens: u64,
    /// As measured; where it is not, costs are reckoned with an assumed rate.
    pub prefill_tokens_per_s: Option<u64>,
    /// Turns running, with those this router began since the report.
    pub turns: u32,
    /// Turns it admits; 0 when not reported.
    pub turns_max: u32,
    /// Requests waiting in its engine.
    pub waiting: Option<u64>,
    /// KV that will be wanted again, or can't be evicted.
    pub wanted_tokens: u64,
    /// The pool, tokens.
    pub pool_tokens: Option<u64>,
    /// Sessions open there, with those this router opened since the report.
    pub sessions: u32,
}

/// Prompts to be computed before a turn that is sent now, and the batch.
#[derive(Debug, Clone, Copy)]
struct Queue {
    tokens_per_s: u64,
    backlog_tokens: u64,
    turns: u32,
    wait_ms: u64,
}

/// What a pool holds that is worth something.
#[derive(Debug, Clone, Copy)]
struct Room {
    pool_tokens: Option<u64>,
    /// KV that one session more will bring beyond its first prompt.
    growth_tokens: u64,
    wanted_tokens: u64,
    /// Of the pool, or of its rows.
    full_milli: u64,
}

/// What the turn costs there.
pub(super) fn of(
    question: &Question<'_>,
    view: &ClusterView,
    worker: WorkerRef,
    now: Instant,
) -> Figures {
    within(question, view, worker, u64::MAX, now).expect("no cost is above the greatest number")
}

/// The same, if it is at most so much: of a thousand workers all but a few are seen to cost more by
/// their queue and the prompt alone.
pub(super) fn within(
    question: &Question<'_>,
    view: &ClusterView,
    worker: WorkerRef,
    cost_ms_max: u64,
    now: Instant,
) -> Option<Figures> {
    let agent = view.agent(worker);
    let load = agent.rank_load(worker.dp_rank);
    let prompt = question.prompt;
    let Queue { tokens_per_s, backlog_tokens, turns, wait_ms } = queue(agent, worker, now);
    let interference_ms = u64::from(turns) * INTERFERENCE_MS_EACH;
    let prefill_ms = prompt.map(|prompt| millis(uncached(&prompt, worker), tokens_per_s));
    let at_least_ms =
        wait_ms.saturating_add(interference_ms).saturating_add(prefill_ms.unwrap_or(0));
    if at_least_ms > cost_ms_max {
        return None;
    }
    let wanted = view.wanted(worker);
    let room = room(agent, worker, &wanted);
    let displacement_ms = prompt.and_then(|prompt| {
        let needed = uncached(&prompt, worker) + ANSWER_TOKENS;
        let displaced = displaced_tokens(agent, worker, &wanted, room.pool_tokens?, needed)?;
        Some(millis(displaced, tokens_per_s) / DISPLACEMENT_DIVISOR)
    });
    let context = prompt.map_or(0, |prompt| prompt.tokens).saturating_add(room.growth_tokens);
    let kept = if question.returns || prompt.is_none() { context } else { 0 };
    let crowding_ms =
        millis(kept, tokens_per_s).saturating_mul(room.full_milli) / WHOLE_MILLI / CROWDING_DIVISOR;
    let blocking_ms = prefill_ms.map(|prefill_ms| blocking_ms(prefill_ms, &wanted));
    let parts = [
        wait_ms,
        prefill_ms.unwrap_or(0),
        displacement_ms.unwrap_or(0),
        crowding_ms,
        blocking_ms.unwrap_or(0),
        interference_ms,
    ];
    let opens = agent.opens_since_report(worker.dp_rank);
    Some(Figures {
        worker,
        cost_ms: parts.into_iter().fold(0, u64::saturating_add),
        wait_ms,
        prefill_ms,
        displacement_ms,
        crowding_ms,
        blocking_ms,
        interference_ms,
        resident_tokens: prompt.map(|prompt| prompt.tokens - uncached(&prompt, worker)),
        backlog_tokens,
        prefill_tokens_per_s: known(load, |load| load.prefill_tokens_per_s),
        turns,
        turns_max: load.map_or(0, |load| load.turns_running_max),
        waiting: known(load, |load| load.requests_waiting),
        wanted_tokens: room.wanted_tokens,
        pool_tokens: room.pool_tokens,
        sessions: load.map_or(0, |load| load.sessions).saturating_add(opens),
    })
}

/// What the turn would wait for there, and be slowed by, with all of its prompt resident.
pub(super) fn ahead_ms(view: &ClusterView, worker: WorkerRef, now: Instant) -> u64 {
    let Queue { wait_ms, turns, .. } = queue(view.agent(worker), worker, now);
    wait_ms.saturating_add(u64::from(turns) * INTERFERENCE_MS_EACH)
}

fn queue(agent: &Agent, worker: WorkerRef, now: Instant) -> Queue {
    let load = agent.rank_load(worker.dp_rank);
    let measured = known(load, |load| load.prefill_tokens_per_s);
    let tokens_per_s = measured.unwrap_or(PREFILL_TOKENS_PER_S_ASSUMED);
    let mut backlog_tokens = agent.backlog_tokens(worker.dp_rank, tokens_per_s, now);
    if known(load, |load| load.prefill_backlog_tokens).is_none() {
        let queued = u64::from(load.map_or(0, |load| load.turns_queued));
        let waits = known(load, |load| load.requests_waiting).unwrap_or(0).saturating_add(queued);
        backlog_tokens = backlog_tokens.max(waits.saturating_mul(TURN_TOKENS_ASSUMED));
    }
    let turns = agent.turns_estimate(worker.dp_rank);
    let batch_ms = batch_ms(turns, load.map_or(0, |load| load.turns_running_max));
    let wait_ms = millis(backlog_tokens, tokens_per_s).saturating_add(batch_ms);
    Queue { tokens_per_s, backlog_tokens, turns, wait_ms }
}

fn room(agent: &Agent, worker: WorkerRef, wanted: &Wanted) -> Room {
    let load = agent.rank_load(worker.dp_rank);
    let opens = agent.opens_since_report(worker.dp_rank);
    let pool_tokens = known(load, |load| load.pool_total_tokens).filter(|&tokens| tokens > 0);
    let part = pool_tokens.map_or(u64::MAX, |pool| pool / GROWTH_POOL_PARTS);
    let growth_tokens = GROWTH_TOKENS.min(part);
    let pinned = known(load, |load| load.pinned_tokens);
    let used = known(load, |load| load.pool_used_tokens).max(pinned);
    let wanted_tokens = wanted
        .tokens
        .saturating_add(agent.coming_tokens(worker.dp_rank))
        .saturating_add(u64::from(opens) * growth_tokens)
        .max(used.unwrap_or(0));
    let full_milli = match (pool_tokens, used) {
        (Some(pool), Some(_)) => share_milli(wanted_tokens, pool),
        // Unknown counts as full.
        _ => WHOLE_MILLI,
    };
    let full_milli = full_milli.max(rows_milli(load, opens));
    Room { pool_tokens, growth_tokens, wanted_tokens, full_milli }
}

fn known(load: Option<&RankLoad>, figure: fn(&RankLoad) -> Option<Figure>) -> Option<u64> {
    Some(load.and_then(figure)?.value)
}

/// Prompt tokens that the worker has to compute.
pub(super) fn uncached(prompt: &Prompt<'_>, worker: WorkerRef) -> u64 {
    let blocks = worker.number().map_or(0, |number| prompt.overlap.device(number));
    prompt.tokens.saturating_sub(u64::from(blocks) * prompt.block_tokens)
}

/// Wanted tokens among those that eviction takes for so many new ones: what is free and half of
/// what is nobody's first, then the KV of the longest idle.
fn displaced_tokens(
    agent: &Agent,
    worker: WorkerRef,
    wanted: &Wanted,
    pool: u64,
    needed: u64,
) -> Option<u64> {
    let load = agent.rank_load(worker.dp_rank)?;
    let used = load.pool_used_tokens?.value;
    let evictable = match (load.pool_evictable_tokens, load.pool_available_tokens) {
        (Some(evictable), _) => evictable.value,
        // As if the pool were full: so it is after its first hour.
        (None, available) => {
            pool.saturating_sub(used).saturating_sub(available.map_or(0, |free| free.value))
        }
    };
    let free = pool.saturating_sub(used).saturating_sub(evictable);
    let owned: u64 = wanted.idle.iter().map(|idle| idle.tokens).fold(0, u64::saturating_add);
    let unwanted = evictable.saturating_sub(owned) / UNWANTED_DIVISOR;
    let mut needed = needed.saturating_sub(free).saturating_sub(unwanted);
    let mut displaced = 0;
    for Idle { tokens, wanted_tokens } in wanted.idle.iter().rev() {
        if needed == 0 {
            break;
        }
        let taken = needed.min(*tokens);
        if taken > 0 {
            let part = share_milli(*wanted_tokens, *tokens).saturating_mul(taken) / WHOLE_MILLI;
            displaced = part.saturating_add(displaced);
        }
        needed -= taken;
    }
    Some(displaced)
}

/// What those wait that come while the worker computes for so long.
fn blocking_ms(prefill_ms: u64, wanted: &Wanted) -> u64 {
    let turns_micro = wanted.turns_micro_per_s.saturating_mul(prefill_ms) / 1000;
    turns_micro.saturating_mul((prefill_ms / 2).min(BLOCKING_MS_MAX)) / 1_000_000
}

/// Until a full batch has a place.
fn batch_ms(turns: u32, turns_max: u32) -> u64 {
    if turns_max == 0 || turns < turns_max {
        return 0;
    }
    u64::from(turns - turns_max + 1) * TURN_MS_ASSUMED / u64::from(turns_max)
}

/// Pinned sessions hold rows: a pool with room but no rows takes none of them.
fn rows_milli(load: Option<&RankLoad>, opens: u32) -> u64 {
    load.and_then(|load| Some((load.rows_held?.value, load.rows_total?.value)))
        .filter(|(_, rows)| *rows > 0)
        .map_or(0, |(held, rows)| share_milli(held.saturating_add(opens.into()), rows))
}

fn share_milli(part: u64, whole: u64) -> u64 {
    part.saturating_mul(WHOLE_MILLI) / whole
}

fn millis(tokens: u64, tokens_per_s: u64) -> u64 {
    tokens.saturating_mul(1000) / tokens_per_s
}
