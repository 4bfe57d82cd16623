//! What a turn costs on a worker, in milliseconds of somebody's waiting: its own, and that of those
//! whose KV it takes the room of. Pure.
//!
//! - *wait*: prompts to be computed before this one, a place in a full batch, and room in a pool
//!   that running turns hold. Prompts in the slow lane let those pass that are shorter.
//! - *prefill*: what of the prompt is not resident there.
//! - *displacement*: KV of idle sessions that its new tokens evict now, at the cost of computing it
//!   again, times the chance that it is wanted.
//! - *crowding*: what it will cost to keep the session there. The fuller a pool is of KV that will
//!   be wanted by others, the more often some of it is evicted before that; each session pays in
//!   proportion to the KV it brings and will bring. This keeps sessions that share a system prompt
//!   from herding onto the worker that has it.
//! - *blocking*: turns of the worker's sessions that will come while the prompt is computed, and
//!   wait for it.
//! - *interference*: a turn more in the batch slows the others.
//! - *impatience*: what it waits beyond a time that people and clients put up with.
//!
//! What is unknown is visible as absent in the figures and counts as a stated assumption.

use std::time::Instant;

use proto::{lane::PREFILL_TOKENS_PER_S_ASSUMED, load::RankLoad};
use serde::Serialize;

use super::{Question, Sticky, TURN_TOKENS_ASSUMED};
use crate::view::{
    ClusterView, WorkerRef,
    demand::{Idle, Wanted},
    roster::Seen,
};

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
/// Room for the answer.
const ANSWER_TOKENS: u64 = 1_000;
/// A turn in a batch slows each other's step by a fiftieth, for some seconds, of which each has
/// some part left.
const INTERFERENCE_MS_EACH: u64 = 5;

/// A turn that comes while a prompt is computed waits for half of it in the mean, and not longer
/// than this: then it goes elsewhere, for the price of its own KV.
const BLOCKING_MS_MAX: u64 = 2_500;
/// Where long prompts are computed in pieces, most turns wait for half of a piece, and those with
/// long prompts still for seconds. In `berth-sim`, on half of the conversations, 1 s did better
/// than 0, 0.2, 0.4 and 2.5, by one or two in a hundred.
const BLOCKING_LANE_MS_MAX: u64 = 1_000;

/// Attention is lost after ten seconds.
const PATIENCE_MS: u64 = 10_000;
/// What each further millisecond counts beside itself. One long wait is worse than several short
/// ones of the same sum: clients give up, ask again, and what was computed for them is lost. In
/// `berth-sim` with 128 users 3 brings the 99th percentile below that of policies that look at
/// nothing else; 1 does not, 4 brings no more.
const IMPATIENCE: u64 = 3;

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
    /// For what it would wait beyond anybody's patience.
    pub impatience_ms: u64,
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
    /// KV that others will want again, or that can't be evicted.
    pub wanted_tokens: u64,
    /// The pool, tokens.
    pub pool_tokens: Option<u64>,
    /// Sessions open there, with those this router opened since the report.
    pub sessions: u32,
}

/// Prompts to be computed before a turn that is sent now, the batch, and room.
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
    seen: Seen<'_>,
    now: Instant,
) -> Figures {
    within(question, view, seen, u64::MAX, now).expect("no cost is above the greatest number")
}

/// The same, if it is at most so much: of a thousand workers all but a few are seen to cost more by
/// what stands on their lines, before anything is followed.
pub(super) fn within(
    question: &Question<'_>,
    view: &ClusterView,
    seen: Seen<'_>,
    cost_ms_max: u64,
    now: Instant,
) -> Option<Figures> {
    let worker = seen.worker();
    let prompt = question.prompt;
    let own = own(question, worker);
    let uncached = uncached(question, worker);
    let Queue { tokens_per_s, backlog_tokens, turns, wait_ms } =
        queue(question, own, uncached.unwrap_or(TURN_TOKENS_ASSUMED), view, seen, now);
    let interference_ms = u64::from(turns) * INTERFERENCE_MS_EACH;
    let prefill_ms = uncached.map(|tokens| millis(tokens, tokens_per_s));
    let soon_ms = wait_ms.saturating_add(prefill_ms.unwrap_or(0));
    let impatience_ms = impatience_ms(soon_ms);
    let room = room(own, seen);
    let context = prompt.map_or(0, |prompt| prompt.tokens).saturating_add(room.growth_tokens);
    let kept = if question.returns || prompt.is_none() { context } else { 0 };
    let crowding_ms =
        millis(kept, tokens_per_s).saturating_mul(room.full_milli) / WHOLE_MILLI / CROWDING_DIVISOR;
    let on_its_line = [soon_ms, interference_ms, crowding_ms, impatience_ms];
    if on_its_line.into_iter().fold(0, u64::saturating_add) > cost_ms_max {
        return None;
    }
    let wanted = view.wanted(worker);
    let displacement_ms = uncached.and_then(|uncached| {
        let needed = uncached + ANSWER_TOKENS;
        let load = view.agent(worker).rank_load(worker.dp_rank)?;
        let displaced = displaced_tokens(load, wanted, room.pool_tokens?, needed)?;
        Some(millis(displaced, tokens_per_s))
    });
    let blocking_max =
        if seen.piece_tokens().is_some() { BLOCKING_LANE_MS_MAX } else { BLOCKING_MS_MAX };
    let blocking_ms = prefill_ms.map(|prefill_ms| blocking_ms(prefill_ms, blocking_max, wanted));
    let parts = [
        soon_ms,
        displacement_ms.unwrap_or(0),
        crowding_ms,
        blocking_ms.unwrap_or(0),
        interference_ms,
        impatience_ms,
    ];
    Some(Figures {
        worker,
        cost_ms: parts.into_iter().fold(0, u64::saturating_add),
        wait_ms,
        prefill_ms,
        displacement_ms,
        crowding_ms,
        blocking_ms,
        interference_ms,
        impatience_ms,
        resident_tokens: prompt.zip(uncached).map(|(prompt, uncached)| prompt.tokens - uncached),
        backlog_tokens,
        prefill_tokens_per_s: seen.prefill_tokens_per_s(),
        turns,
        turns_max: seen.turns_max(),
        waiting: waiting(view, worker),
        wanted_tokens: room.wanted_tokens,
        pool_tokens: room.pool_tokens,
        sessions: seen.sessions(),
    })
}

/// What the turn would wait for there, and be slowed by, with all of its prompt resident.
pub(super) fn ahead_ms(
    question: &Question<'_>,
    view: &ClusterView,
    seen: Seen<'_>,
    now: Instant,
) -> u64 {
    let own = own(question, seen.worker());
    let Queue { turns, wait_ms, .. } = queue(question, own, 0, view, seen, now);
    let slowed_ms = u64::from(turns) * INTERFERENCE_MS_EACH;
    wait_ms.saturating_add(impatience_ms(wait_ms)).saturating_add(slowed_ms)
}

fn impatience_ms(soon_ms: u64) -> u64 {
    soon_ms.saturating_sub(PATIENCE_MS).saturating_mul(IMPATIENCE)
}

fn queue(
    question: &Question<'_>,
    own: Own,
    uncached: u64,
    view: &ClusterView,
    seen: Seen<'_>,
    now: Instant,
) -> Queue {
    let tokens_per_s = seen.prefill_tokens_per_s().unwrap_or(PREFILL_TOKENS_PER_S_ASSUMED);
    let untold_tokens = seen.waiting_untold().saturating_mul(TURN_TOKENS_ASSUMED);
    let backlog_tokens = seen
        .backlog_tokens(tokens_per_s, now)
        .max(untold_tokens)
        .saturating_add(lane_tokens(seen, uncached));
    let turns = seen.turns();
    let batch_ms = batch_ms(turns, seen.turns_max());
    let queued_ms = millis(backlog_tokens, tokens_per_s).saturating_add(batch_ms);
    // Turns end while others wait.
    let wait_ms = queued_ms.max(room_ms(question, own, view, seen, backlog_tokens));
    Queue { tokens_per_s, backlog_tokens, turns, wait_ms }
}

/// Of the prompts in the slow lane, what is computed before one with so many tokens: none if it
/// needs no lane; else all of those that have less. Who they are isn't told; together they are no
/// more than that many such prompts.
fn lane_tokens(seen: Seen<'_>, uncached: u64) -> u64 {
    let needs_it = seen.piece_tokens().is_some_and(|piece_tokens| uncached > piece_tokens);
    let lane = if needs_it { seen.lane() } else { None };
    lane.map_or(0, |lane| lane.tokens.min(uncached.saturating_mul(lane.prompts.into())))
}

/// Until a prompt fits beside what running turns hold: they end evenly over the time of one. What
/// waits before it will hold at least what is computed for it. Where pins are in the way, turns
/// that end are not enough, and the agent has to take some back: as long as a turn. None where the
/// prompt is unknown, or the pool or what is used of it: such a worker counts as crowded.
fn room_ms(
    question: &Question<'_>,
    own: Own,
    view: &ClusterView,
    seen: Seen<'_>,
    backlog_tokens: u64,
) -> u64 {
    let (Some(pool), Some(used)) = (seen.pool_tokens(), seen.used_tokens()) else { return 0 };
    let grown = |sticky: Sticky| sticky.told_tokens.saturating_add(TURN_TOKENS_ASSUMED);
    let context = question.prompt.map(|prompt| prompt.tokens).or(question.sticky.map(grown));
    let Some(context) = context else { return 0 };
    let brings = context.saturating_sub(own.held_tokens).saturating_add(ANSWER_TOKENS);
    let over = used.saturating_add(brings).saturating_add(backlog_tokens).saturating_sub(pool);
    if over == 0 || used == 0 {
        return 0;
    }
    let worker = seen.worker();
    let load = view.agent(worker).rank_load(worker.dp_rank);
    let pinned = load.and_then(|load| load.pinned_tokens).map_or(0, |figure| figure.value);
    let ends = used.saturating_sub(pinned);
    if over >= ends { TURN_MS_ASSUMED } else { TURN_MS_ASSUMED.saturating_mul(over) / ends }
}

fn room(own: Own, seen: Seen<'_>) -> Room {
    let opens = seen.opens_since_report();
    let (pool_tokens, used) = (seen.pool_tokens(), seen.used_tokens());
    let part = pool_tokens.map_or(u64::MAX, |pool| pool / GROWTH_POOL_PARTS);
    let growth_tokens = GROWTH_TOKENS.min(part);
    let wanted_tokens = seen
        .wanted_tokens()
        .saturating_add(seen.coming_tokens())
        .saturating_add(u64::from(opens) * growth_tokens)
        .saturating_sub(own.tokens)
        .max(used.unwrap_or(0).saturating_sub(own.held_tokens));
    let full_milli = match (pool_tokens, used) {
        (Some(pool), Some(_)) => share_milli(wanted_tokens, pool),
        // Unknown counts as full.
        _ => WHOLE_MILLI,
    };
    let full_milli = full_milli.max(rows_milli(seen.rows(), opens));
    Room { pool_tokens, growth_tokens, wanted_tokens, full_milli }
}

/// What of a worker's KV is the session's own, which doesn't crowd itself out.
#[derive(Debug, Clone, Copy, Default)]
struct Own {
    /// As its agent tells it: counted among what is wanted, by a chance that has come true.
    tokens: u64,
    /// Of it, what can't be evicted.
    held_tokens: u64,
}

fn own(question: &Question<'_>, worker: WorkerRef) -> Own {
    let there = question.sticky.filter(|sticky| sticky.worker == worker);
    there.map_or(Own::default(), |Sticky { told_tokens: tokens, held_tokens, .. }| Own {
        tokens,
        held_tokens,
    })
}

fn waiting(view: &ClusterView, worker: WorkerRef) -> Option<u64> {
    Some(view.agent(worker).rank_load(worker.dp_rank)?.requests_waiting?.value)
}

/// Prompt tokens that the worker has to compute, where the prompt is known.
pub(super) fn uncached(question: &Question<'_>, worker: WorkerRef) -> Option<u64> {
    let prompt = question.prompt?;
    let blocks = worker.number().map_or(0, |number| prompt.overlap.device(number));
    let held = own(question, worker).held_tokens;
    Some(prompt.tokens.saturating_sub(held.max(u64::from(blocks) * prompt.block_tokens)))
}

/// Wanted tokens among those that eviction takes for so many new ones: what is free and half of
/// what is nobody's first, then the KV of the longest idle. A session is told with all that it had
/// at its last turn's end: what all of them had beyond what is there to evict has gone already.
fn displaced_tokens(load: &RankLoad, wanted: &Wanted, pool: u64, needed: u64) -> Option<u64> {
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
    let mut gone = owned.saturating_sub(evictable);
    let mut displaced = 0;
    for Idle { tokens, wanted_tokens } in wanted.idle.iter().rev() {
        if needed == 0 {
            break;
        }
        let taken = needed.min(tokens.saturating_sub(gone));
        gone = gone.saturating_sub(*tokens);
        if taken > 0 {
            let part = share_milli(*wanted_tokens, *tokens).saturating_mul(taken) / WHOLE_MILLI;
            displaced = part.saturating_add(displaced);
        }
        needed -= taken;
    }
    Some(displaced)
}

/// What those wait that come while the worker computes for so long.
fn blocking_ms(prefill_ms: u64, each_ms_max: u64, wanted: &Wanted) -> u64 {
    let turns_micro = wanted.turns_micro_per_s.saturating_mul(prefill_ms) / 1000;
    turns_micro.saturating_mul((prefill_ms / 2).min(each_ms_max)) / 1_000_000
}

/// Until a full batch has a place.
fn batch_ms(turns: u32, turns_max: u32) -> u64 {
    if turns_max == 0 || turns < turns_max {
        return 0;
    }
    u64::from(turns - turns_max + 1) * TURN_MS_ASSUMED / u64::from(turns_max)
}

/// Pinned sessions hold rows: a pool with room but no rows takes none of them.
fn rows_milli(rows: Option<(u64, u64)>, opens: u32) -> u64 {
    rows.map_or(0, |(held, total)| share_milli(held.saturating_add(opens.into()), total))
}

fn share_milli(part: u64, whole: u64) -> u64 {
    part.saturating_mul(WHOLE_MILLI) / whole
}

fn millis(tokens: u64, tokens_per_s: u64) -> u64 {
    tokens.saturating_mul(1000) / tokens_per_s
}
