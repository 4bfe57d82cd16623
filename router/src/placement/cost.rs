//! Computes what a turn costs on a worker, in milliseconds of waiting. Pure.
//!
//! The cost counts the turn's own waiting and that of the turns it delays.
//!
//! - *wait*: the prompts that are computed before this one, a place in a full batch, and room in a
//!   pool that running turns fill. Prompts in staged prefill let shorter ones pass.
//! - *prefill*: the part of the prompt that is not resident on the worker.
//! - *displacement*: KV of idle sessions that the turn's new tokens evict now. It costs the time to
//!   recompute it, times the probability that its session returns.
//! - *crowding*: the cost of keeping the session on the worker. The fuller a pool is of KV that
//!   other sessions will use again, the more of it is evicted before that. Each session pays in
//!   proportion to the KV it brings and will bring. This keeps sessions that share a system prompt
//!   from herding onto the worker that has it.
//! - *blocking*: turns of the worker's sessions that will arrive while the prompt is computed, and
//!   wait for it.
//! - *interference*: the slowdown of the other turns in the batch.
//! - *impatience*: the part of the wait that is longer than people and clients accept.
//!
//! Unknown values are absent in the figures; the cost then uses a documented assumption.

use std::time::Instant;

use proto::{load::RankLoad, staged_prefill::PREFILL_TOKENS_PER_S_ASSUMED};
use serde::Serialize;

use super::{PlacementRequest, Sticky, TURN_TOKENS_ASSUMED};
use crate::fleet::{
    reuse_forecast::{IdleClass, ReuseDemand},
    snapshot::Snapshot,
    worker::WorkerRef,
    worker_table::WorkerStats,
};

/// Time for which a turn occupies its place in a full batch: 440 tokens at 20 ms.
const TURN_MS_ASSUMED: u64 = 10_000;
/// Tokens of KV that a session will add to what it has. Agents' prompts have 20,000 tokens at first
/// and 100,000 in the median.
const GROWTH_TOKENS: u64 = 100_000;
/// Limit of the growth as a fraction of the pool: a deployment for small contexts has small pools.
const GROWTH_POOL_PARTS: u64 = 10;
/// In a pool full of KV that will be used again, a session is assumed to recompute half of its KV.
const CROWDING_DIVISOR: u64 = 2;
/// Part of the resident KV without a session that is evicted before sessions' KV. KV is evicted by
/// age, and half of it is assumed to be older.
const UNWANTED_DIVISOR: u64 = 2;
/// Tokens of room for the answer.
const ANSWER_TOKENS: u64 = 1_000;
/// Cost in milliseconds for each turn in the batch. A new turn slows each step of the others by a
/// fiftieth for a few seconds, and each of the others is there for only part of that time.
const INTERFERENCE_MS_EACH: u64 = 5;

/// Longest assumed wait for another turn's prompt, in milliseconds. A turn that arrives during a
/// prefill waits for half of it on average. If it would wait for longer, it goes to another worker
/// and its KV is recomputed there.
const BLOCKING_MS_MAX: u64 = 2_500;
/// As [`BLOCKING_MS_MAX`], on workers with staged prefill. Most turns there wait for half a stage,
/// and long prompts still wait for seconds. In `berth-sim`, on half of the conversations, 1 s was
/// one or two percent better than 0, 0.2, 0.4 and 2.5 s.
const BLOCKING_STAGED_MS_MAX: u64 = 1_000;

/// Wait in milliseconds above which impatience is counted: people lose attention after ten seconds.
const PATIENCE_MS: u64 = 10_000;
/// Extra cost of each millisecond beyond the patience. One long wait is worse than several short
/// ones with the same sum: clients give up and retry, and the work done for them is lost. In
/// `berth-sim` with 128 users, 3 brings the 99th percentile below that of policies that consider
/// nothing else; 1 doesn't, and 4 brings no more.
const IMPATIENCE: u64 = 3;

/// A full capacity, in thousandths.
const WHOLE_MILLI: u64 = 1000;

/// The figures compared for one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// The worker.
    pub worker: WorkerRef,
    /// The total cost, which decides.
    pub cost_ms: u64,
    /// Time until the engine begins to compute the prompt.
    pub wait_ms: u64,
    /// Time to compute the part of the prompt that isn't resident; unknown if the prompt is.
    pub prefill_ms: Option<u64>,
    /// Time to recompute KV that the turn evicts; unknown if the prompt or the pool's free space
    /// is.
    pub displacement_ms: Option<u64>,
    /// Cost of keeping the session on the worker.
    pub crowding_ms: u64,
    /// Cost for turns that will arrive and wait; unknown if the prompt is.
    pub blocking_ms: Option<u64>,
    /// Cost for the other turns in the batch.
    pub interference_ms: u64,
    /// Extra cost of a wait beyond the patience.
    pub impatience_ms: u64,
    /// Prompt tokens resident on the worker.
    pub resident_tokens: Option<u64>,
    /// Prompt tokens computed before this turn, including those this router sent since the report.
    pub backlog_tokens: u64,
    /// The measured rate. If it is unknown, the costs use an assumed rate.
    pub prefill_tokens_per_s: Option<u64>,
    /// Running turns, including those this router began since the report.
    pub turns: u32,
    /// The most turns the worker runs at once; 0 if not reported.
    pub turns_max: u32,
    /// Requests waiting in the worker's engine.
    pub waiting: Option<u64>,
    /// KV that other sessions will use again, or that can't be evicted.
    pub wanted_tokens: u64,
    /// Size of the KV pool.
    pub pool_tokens: Option<u64>,
    /// Open sessions, including those this router opened since the report.
    pub sessions: u32,
}

/// What delays a turn sent now: the backlog of prompts, the batch, and room in the pool.
#[derive(Debug, Clone, Copy)]
struct Queue {
    tokens_per_s: u64,
    backlog_tokens: u64,
    turns: u32,
    wait_ms: u64,
}

/// How full a worker's pool is of KV worth keeping.
#[derive(Debug, Clone, Copy)]
struct Room {
    pool_tokens: Option<u64>,
    /// KV that one more session will add beyond its first prompt.
    growth_tokens: u64,
    wanted_tokens: u64,
    /// How full the pool or its rows are, in thousandths.
    full_milli: u64,
}

/// Computes the cost of the turn on a worker.
pub(super) fn compute(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    now: Instant,
) -> Figures {
    compute_up_to(request, view, stats, u64::MAX, now).expect("no cost is above u64::MAX")
}

/// Computes the cost of the turn on a worker; `None` if it is above `cost_ms_max`. Of a thousand
/// workers, most exceed it by the figures in their table rows alone, so their reports are not read.
pub(super) fn compute_up_to(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    cost_ms_max: u64,
    now: Instant,
) -> Option<Figures> {
    let worker = stats.worker();
    let prompt = request.prompt;
    let own_kv = own_kv(request, worker);
    let uncached_tokens = uncached_tokens(request, worker);
    let Queue { tokens_per_s, backlog_tokens, turns, wait_ms } =
        queue(request, own_kv, uncached_tokens.unwrap_or(TURN_TOKENS_ASSUMED), view, stats, now);
    let interference_ms = u64::from(turns) * INTERFERENCE_MS_EACH;
    let prefill_ms = uncached_tokens.map(|tokens| millis(tokens, tokens_per_s));
    let first_token_ms = wait_ms.saturating_add(prefill_ms.unwrap_or(0));
    let impatience_ms = impatience_ms(first_token_ms);
    let pool_room = pool_room(own_kv, stats);
    let context_tokens =
        prompt.map_or(0, |prompt| prompt.tokens).saturating_add(pool_room.growth_tokens);
    let kept_tokens =
        if request.expects_more_turns || prompt.is_none() { context_tokens } else { 0 };
    let crowding_ms = millis(kept_tokens, tokens_per_s).saturating_mul(pool_room.full_milli)
        / WHOLE_MILLI
        / CROWDING_DIVISOR;
    let known_from_row = [first_token_ms, interference_ms, crowding_ms, impatience_ms];
    if known_from_row.into_iter().fold(0, u64::saturating_add) > cost_ms_max {
        return None;
    }
    let demand = view.reuse_demand(worker);
    let displacement_ms = uncached_tokens.and_then(|uncached_tokens| {
        let needed = uncached_tokens + ANSWER_TOKENS;
        let load = view.agent(worker).rank_load(worker.dp_rank)?;
        let displaced = displaced_tokens(load, demand, pool_room.pool_tokens?, needed)?;
        Some(millis(displaced, tokens_per_s))
    });
    let blocking_max =
        if stats.stage_tokens().is_some() { BLOCKING_STAGED_MS_MAX } else { BLOCKING_MS_MAX };
    let blocking_ms = prefill_ms.map(|prefill_ms| blocking_ms(prefill_ms, blocking_max, demand));
    let parts = [
        first_token_ms,
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
        resident_tokens: prompt
            .zip(uncached_tokens)
            .map(|(prompt, uncached_tokens)| prompt.tokens - uncached_tokens),
        backlog_tokens,
        prefill_tokens_per_s: stats.prefill_tokens_per_s(),
        turns,
        turns_max: stats.turns_max(),
        waiting: waiting(view, worker),
        wanted_tokens: pool_room.wanted_tokens,
        pool_tokens: pool_room.pool_tokens,
        sessions: stats.sessions(),
    })
}

/// Returns the wait and the slowdown of the turn on a worker that has all of its prompt resident.
pub(super) fn queue_cost_ms(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    now: Instant,
) -> u64 {
    let own_kv = own_kv(request, stats.worker());
    let Queue { turns, wait_ms, .. } = queue(request, own_kv, 0, view, stats, now);
    let slowed_ms = u64::from(turns) * INTERFERENCE_MS_EACH;
    wait_ms.saturating_add(impatience_ms(wait_ms)).saturating_add(slowed_ms)
}

fn impatience_ms(first_token_ms: u64) -> u64 {
    first_token_ms.saturating_sub(PATIENCE_MS).saturating_mul(IMPATIENCE)
}

fn queue(
    request: &PlacementRequest<'_>,
    own_kv: OwnKv,
    uncached_tokens: u64,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    now: Instant,
) -> Queue {
    let tokens_per_s = stats.prefill_tokens_per_s().unwrap_or(PREFILL_TOKENS_PER_S_ASSUMED);
    let waiting_tokens_assumed = stats.waiting_without_tokens().saturating_mul(TURN_TOKENS_ASSUMED);
    let backlog_tokens = stats
        .backlog_tokens(tokens_per_s, now)
        .max(waiting_tokens_assumed)
        .saturating_add(staged_prefill_tokens(stats, uncached_tokens));
    let turns = stats.turns();
    let batch_ms = batch_ms(turns, stats.turns_max());
    let queued_ms = millis(backlog_tokens, tokens_per_s).saturating_add(batch_ms);
    // Running turns end while the backlog is computed, so the two waits overlap.
    let wait_ms = queued_ms.max(room_ms(request, own_kv, view, stats, backlog_tokens));
    Queue { tokens_per_s, backlog_tokens, turns, wait_ms }
}

/// Returns the tokens in staged prefill that are computed before a prompt with `uncached_tokens`
/// tokens. A prompt of one stage at most waits for none. A longer one waits for all prompts with
/// fewer tokens left. The lengths are not reported, so the bound is that each has at most
/// `uncached_tokens` tokens.
fn staged_prefill_tokens(stats: WorkerStats<'_>, uncached_tokens: u64) -> u64 {
    let needs_it = stats.stage_tokens().is_some_and(|stage_tokens| uncached_tokens > stage_tokens);
    let staged = if needs_it { stats.staged_prefill() } else { None };
    staged.map_or(0, |staged| {
        staged.tokens.min(uncached_tokens.saturating_mul(staged.prompts.into()))
    })
}

/// Returns the milliseconds until the prompt fits into the pool beside the running turns.
///
/// Running turns are assumed to end evenly over the duration of one turn. The backlog counts as KV:
/// prompts ahead of this one will hold at least the tokens computed for them. If the turns that end
/// can't make enough room, pinned KV is in the way. The agent must then reclaim some, which is
/// assumed to take as long as a turn. Returns 0 if the prompt, the pool or its use is unknown; a
/// worker with an unknown pool counts as crowded instead.
fn room_ms(
    request: &PlacementRequest<'_>,
    own_kv: OwnKv,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    backlog_tokens: u64,
) -> u64 {
    let (Some(pool), Some(used)) = (stats.pool_tokens(), stats.used_tokens()) else { return 0 };
    let context_after_turn =
        |sticky: Sticky| sticky.reported_tokens.saturating_add(TURN_TOKENS_ASSUMED);
    let context_tokens =
        request.prompt.map(|prompt| prompt.tokens).or(request.sticky.map(context_after_turn));
    let Some(context_tokens) = context_tokens else { return 0 };
    let needed_tokens =
        context_tokens.saturating_sub(own_kv.private_tokens).saturating_add(ANSWER_TOKENS);
    let missing_tokens =
        used.saturating_add(needed_tokens).saturating_add(backlog_tokens).saturating_sub(pool);
    if missing_tokens == 0 || used == 0 {
        return 0;
    }
    let worker = stats.worker();
    let load = view.agent(worker).rank_load(worker.dp_rank);
    let pinned = load.and_then(|load| load.pinned_tokens).map_or(0, |figure| figure.value);
    let unpinned_tokens = used.saturating_sub(pinned);
    if missing_tokens >= unpinned_tokens {
        TURN_MS_ASSUMED
    } else {
        TURN_MS_ASSUMED.saturating_mul(missing_tokens) / unpinned_tokens
    }
}

fn pool_room(own_kv: OwnKv, stats: WorkerStats<'_>) -> Room {
    let opens = stats.opens_since_report();
    let (pool_tokens, used) = (stats.pool_tokens(), stats.used_tokens());
    let part = pool_tokens.map_or(u64::MAX, |pool| pool / GROWTH_POOL_PARTS);
    let growth_tokens = GROWTH_TOKENS.min(part);
    let wanted_tokens = stats
        .wanted_tokens()
        .saturating_add(stats.incoming_tokens())
        .saturating_add(u64::from(opens) * growth_tokens)
        .saturating_sub(own_kv.tokens)
        .max(used.unwrap_or(0).saturating_sub(own_kv.private_tokens));
    let full_milli = match (pool_tokens, used) {
        (Some(pool), Some(_)) => share_milli(wanted_tokens, pool),
        // An unknown pool counts as full.
        _ => WHOLE_MILLI,
    };
    let full_milli = full_milli.max(rows_milli(stats.request_rows(), opens));
    Room { pool_tokens, growth_tokens, wanted_tokens, full_milli }
}

/// The session's own KV on a worker, which doesn't crowd the session out.
#[derive(Debug, Clone, Copy, Default)]
struct OwnKv {
    /// Tokens as the agent reports them. The reuse forecast contains them, and this turn is the
    /// reuse.
    tokens: u64,
    /// The part that can't be evicted.
    private_tokens: u64,
}

fn own_kv(request: &PlacementRequest<'_>, worker: WorkerRef) -> OwnKv {
    let sticky = request.sticky.filter(|sticky| sticky.worker == worker);
    sticky.map_or(OwnKv::default(), |Sticky { reported_tokens: tokens, private_tokens, .. }| {
        OwnKv { tokens, private_tokens }
    })
}

fn waiting(view: &Snapshot, worker: WorkerRef) -> Option<u64> {
    Some(view.agent(worker).rank_load(worker.dp_rank)?.requests_waiting?.value)
}

/// Returns the prompt tokens that the worker has to compute; `None` if the prompt is unknown.
pub(super) fn uncached_tokens(request: &PlacementRequest<'_>, worker: WorkerRef) -> Option<u64> {
    let prompt = request.prompt?;
    let blocks = worker.number().map_or(0, |number| prompt.overlap.device(number));
    let held = own_kv(request, worker).private_tokens;
    Some(prompt.tokens.saturating_sub(held.max(u64::from(blocks) * prompt.block_tokens)))
}

/// Returns the tokens, weighed by reuse, that eviction takes to make room for `needed` new ones.
///
/// Free room is used first, then half of the KV without a session, then the KV of sessions, longest
/// idle first. An agent reports for each session what it had when its last turn ended. If these sum
/// up to more than is evictable, the excess was evicted before.
fn displaced_tokens(load: &RankLoad, demand: &ReuseDemand, pool: u64, needed: u64) -> Option<u64> {
    let used = load.pool_used_tokens?.value;
    let evictable = match (load.pool_evictable_tokens, load.pool_available_tokens) {
        (Some(evictable), _) => evictable.value,
        // Assumes that the pool is full, as it is after the first hour.
        (None, available) => {
            pool.saturating_sub(used).saturating_sub(available.map_or(0, |free| free.value))
        }
    };
    let free = pool.saturating_sub(used).saturating_sub(evictable);
    let session_tokens: u64 =
        demand.idle.iter().map(|idle| idle.tokens).fold(0, u64::saturating_add);
    let sessionless_tokens = evictable.saturating_sub(session_tokens) / UNWANTED_DIVISOR;
    let mut needed = needed.saturating_sub(free).saturating_sub(sessionless_tokens);
    let mut already_evicted = session_tokens.saturating_sub(evictable);
    let mut displaced = 0;
    for IdleClass { tokens, wanted_tokens } in demand.idle.iter().rev() {
        if needed == 0 {
            break;
        }
        let taken = needed.min(tokens.saturating_sub(already_evicted));
        already_evicted = already_evicted.saturating_sub(*tokens);
        if taken > 0 {
            let part = share_milli(*wanted_tokens, *tokens).saturating_mul(taken) / WHOLE_MILLI;
            displaced = part.saturating_add(displaced);
        }
        needed -= taken;
    }
    Some(displaced)
}

/// Returns the total wait of turns that arrive during a prefill of `prefill_ms`.
fn blocking_ms(prefill_ms: u64, wait_ms_max: u64, demand: &ReuseDemand) -> u64 {
    let turns_micro = demand.turns_micro_per_s.saturating_mul(prefill_ms) / 1000;
    turns_micro.saturating_mul((prefill_ms / 2).min(wait_ms_max)) / 1_000_000
}

/// Returns the milliseconds until a full batch has a free place.
fn batch_ms(turns: u32, turns_max: u32) -> u64 {
    if turns_max == 0 || turns < turns_max {
        return 0;
    }
    u64::from(turns - turns_max + 1) * TURN_MS_ASSUMED / u64::from(turns_max)
}

/// Returns the share of rows in use, in thousandths. Each pinned session holds a row, so a pool
/// with free KV but no free rows takes no more of them.
fn rows_milli(rows: Option<(u64, u64)>, opens: u32) -> u64 {
    rows.map_or(0, |(held, total)| share_milli(held.saturating_add(opens.into()), total))
}

fn share_milli(part: u64, whole: u64) -> u64 {
    part.saturating_mul(WHOLE_MILLI) / whole
}

fn millis(tokens: u64, tokens_per_s: u64) -> u64 {
    tokens.saturating_mul(1000) / tokens_per_s
}
