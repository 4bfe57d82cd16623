//! Computes the cost of a turn on a worker for the placement, in milliseconds of waiting. Pure.
//!
//! The cost is the time that the turn itself waits, plus the time by which it delays others:
//!
//! - *wait*: until the engine begins to compute the prompt: for the prompts ahead, for a place in
//!   the batch, and for room in the KV pool.
//! - *prefill*: the time to compute the part of the prompt that is not resident.
//! - *load*: the time to load the part that only the host has. The engine computes meanwhile, so
//!   the greater of prefill and load counts.
//! - *displacement*: the turn evicts KV of idle sessions now. The cost is the time to recompute
//!   that KV, times the probability that its session returns. With a host tier, the KV is loaded
//!   again, and not recomputed.
//! - *crowding*: the cost of keeping the session on the worker. The more of the pool is KV that
//!   other sessions will use again, the more of it is evicted before its next use. Each session
//!   pays in proportion to the KV that it brings and will bring. Without this part, all sessions
//!   with the same system prompt would gather on the worker that has the prompt. A host tier that
//!   is larger than the pool counts as the pool.
//! - *blocking*: the waiting of the turns that other sessions send during the prefill.
//! - *interference*: the slowdown of the other turns in the batch.
//! - *impatience*: a surcharge on the time to the first token beyond what people accept.
//!
//! An unknown value is absent in the figures. The cost then uses an assumption, which stands at its
//! constant or function.

mod displacement;

use std::time::{Duration, Instant};

use contract::{
    api::Figures,
    load::{EngineRole, RankLoad},
    staged_prefill::PREFILL_TOKENS_PER_S_ASSUMED,
};

use self::displacement::{IdleKv, displaced_tokens};
use super::{PlacementRequest, Sticky, TURN_TOKENS_ASSUMED};
use crate::fleet::{
    reuse_forecast::ReuseDemand,
    snapshot::Snapshot,
    worker::WorkerRef,
    worker_table::{HostStats, WorkerStats},
};

/// Duration in the batch. An answer of 440 tokens at 20 ms each takes 8.8 s.
const TURN_MS_ASSUMED: u64 = 10_000;
/// KV that a session will add to what it has. The prompts of coding agents have 20,000 tokens in
/// the first turn of a session and 100,000 in the median turn.
const GROWTH_TOKENS_ASSUMED: u64 = 100_000;
/// A session's assumed growth is at most the pool divided by this number. A deployment for small
/// contexts has small pools, and its sessions grow less.
const GROWTH_POOL_DIVISOR: u64 = 10;
/// In a pool that is full of KV that will be used again, a session is assumed to recompute its KV
/// divided by this number.
const CROWDING_DIVISOR: u64 = 2;
/// The pool needs room for the answer.
const ANSWER_TOKENS_ASSUMED: u64 = 1_000;
/// Assumed delay of each other turn in the batch. A new turn makes each step of the batch a
/// fiftieth slower for a few seconds. Each other turn is in the batch for only a part of that time.
const INTERFERENCE_MS_PER_TURN: u64 = 5;

/// How long an engine's account may show a turn after its answer. SGLang writes it with its steps,
/// at most a second apart.
const SAMPLE_LAG: Duration = Duration::from_secs(1);
/// Longest assumed wait of another turn that arrives during the prefill. On average, such a turn
/// waits for half of it. Beyond this bound, the other turn goes to another worker, and its
/// session's KV is recomputed there.
const BLOCKING_MS_MAX: u64 = 2_500;
/// Replaces [`BLOCKING_MS_MAX`] on workers with staged prefill. There most turns wait for only half
/// a stage, but turns with long prompts still wait for seconds. In the simulator `berth-sim`, on
/// half of the conversations, 1 s was one or two percent better than 0, 0.2, 0.4 and 2.5 s.
const BLOCKING_STAGED_MS_MAX: u64 = 1_000;

/// Time to the first token above which impatience counts. People lose attention after ten seconds.
const PATIENCE_MS: u64 = 10_000;
/// Extra cost of each millisecond beyond [`PATIENCE_MS`]. One long wait is worse than several short
/// waits with the same sum, because a client that waits too long gives up and retries. The work
/// done for it is then lost. In the simulator `berth-sim` with 128 users, the factor 3 brings the
/// 99th percentile below that of policies that consider nothing but the wait. The factor 1 doesn't,
/// and the factor 4 is no better than 3.
const IMPATIENCE_FACTOR: u64 = 3;

/// As of models with 8 to 14 billion parameters.
const KV_BYTES_PER_TOKEN_ASSUMED: u64 = 160 << 10;

const WHOLE_MILLI: u64 = 1000;

#[derive(Debug, Clone, Copy)]
struct QueueAhead {
    turns: u32,
    wait_ms: u64,
}

#[derive(Debug, Clone, Copy)]
struct PoolUse {
    pool_tokens: Option<u64>,
    /// KV that one more session will add beyond its first prompt.
    growth_tokens: u64,
    /// See [`Figures::wanted_tokens`].
    wanted_tokens: u64,
    /// Of the room for KV that is kept, on the device or the host, or of the engine's request rows:
    /// the greater of the two. A request row is a place for one request, and each pinned session
    /// holds one. Counting the wait for loads too changes nothing in the simulator `berth-sim`.
    fullness_milli: u64,
}

pub(super) fn compute(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    now: Instant,
) -> Figures {
    compute_up_to(request, view, stats, u64::MAX, now).expect("no cost is above u64::MAX")
}

/// `None` if the costs that the worker's table row gives are above `cost_ms_max`. In a fleet of a
/// thousand workers that holds for most, so their load reports and reuse forecasts need not be
/// read.
pub(super) fn compute_up_to(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    cost_ms_max: u64,
    now: Instant,
) -> Option<Figures> {
    let worker = stats.worker();
    let own_kv = own_kv(request, worker);
    let parts = prompt_parts(request, stats);
    let uncached_tokens = parts.map(|parts| parts.uncached_tokens);
    let new_tokens = uncached_tokens.unwrap_or(TURN_TOKENS_ASSUMED);
    let tokens_per_s = fill_tokens_per_s(view, stats);
    let backlog_tokens = backlog_tokens(tokens_per_s, new_tokens, stats, now);
    if takes_longer(backlog_tokens, uncached_tokens, tokens_per_s, cost_ms_max) {
        return None;
    }
    let QueueAhead { turns, wait_ms } =
        queue_ahead(request, own_kv, tokens_per_s, backlog_tokens, view, stats);
    let interference_ms = u64::from(turns) * INTERFERENCE_MS_PER_TURN;
    let prefill_ms = uncached_tokens.map(|tokens| compute_ms(tokens, tokens_per_s));
    let host = stats.host();
    let host_tokens = host.and(parts).map(|parts| parts.host_tokens);
    let load_ms = host.zip(host_tokens).map(|(host, tokens)| host_load_ms(host, tokens));
    let prompt_ms = prefill_ms.max(load_ms);
    let first_token_ms = wait_ms.saturating_add(prompt_ms.unwrap_or(0));
    let impatience_ms = impatience_ms(first_token_ms);
    // The divisions of the crowding are a third of the work, and few workers come so far.
    let queue_costs_ms =
        first_token_ms.saturating_add(interference_ms).saturating_add(impatience_ms);
    if queue_costs_ms > cost_ms_max {
        return None;
    }
    let pool_use = pool_use(own_kv, stats);
    let crowding_ms = crowding_ms(request, pool_use, tokens_per_s);
    if queue_costs_ms.saturating_add(crowding_ms) > cost_ms_max {
        return None;
    }
    let demand = view.reuse_demand(worker);
    let displacement_ms = parts.and_then(|PromptParts { uncached_tokens, host_tokens, .. }| {
        let needed_tokens = uncached_tokens + host_tokens + ANSWER_TOKENS_ASSUMED;
        let displaced = displaced_at(request, view, worker, pool_use, needed_tokens, demand, now)?;
        Some(compute_ms(displaced, host.map_or(tokens_per_s, HostStats::load_tokens_per_s)))
    });
    let blocking_ms = prompt_ms.map(|prompt_ms| blocking_ms(prompt_ms, stats, demand));
    let other_costs_ms = [displacement_ms.unwrap_or(0), crowding_ms, blocking_ms.unwrap_or(0)];
    Some(Figures {
        cost_ms: other_costs_ms.into_iter().fold(queue_costs_ms, u64::saturating_add),
        wait_ms,
        prefill_ms,
        load_ms,
        displacement_ms,
        crowding_ms,
        blocking_ms,
        interference_ms,
        impatience_ms,
        resident_tokens: parts.map(|parts| parts.resident_tokens),
        host_tokens,
        backlog_tokens,
        prefill_tokens_per_s: stats.prefill_tokens_per_s(),
        turns,
        turns_max: stats.turns_max(),
        waiting: requests_waiting(view, worker),
        wanted_tokens: pool_use.wanted_tokens,
        pool_tokens: pool_use.pool_tokens,
        free_tokens: None,
        oldest_idle_ms: None,
        sessions: stats.sessions(),
    })
}

/// The tokens of others' KV that the turn evicts.
fn displaced_at(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    worker: WorkerRef,
    pool_use: PoolUse,
    needed_tokens: u64,
    demand: &ReuseDemand,
    now: Instant,
) -> Option<u64> {
    let load = view.agent(worker).rank_load(worker.dp_rank)?;
    let idle = IdleKv::new(request, worker, demand, needed_tokens, now);
    displaced_tokens(load, &idle, pool_use.pool_tokens?, needed_tokens)
}

fn crowding_ms(request: &PlacementRequest<'_>, pool_use: PoolUse, tokens_per_s: u64) -> u64 {
    let prompt_tokens = request.prompt.map_or(0, |prompt| prompt.tokens);
    let context_tokens = prompt_tokens.saturating_add(pool_use.growth_tokens);
    let is_kept = request.expects_more_turns || request.prompt.is_none();
    let kept_tokens = if is_kept { context_tokens } else { 0 };
    compute_ms(kept_tokens, tokens_per_s).saturating_mul(pool_use.fullness_milli)
        / WHOLE_MILLI
        / CROWDING_DIVISOR
}

/// On a worker that has the turn's whole prompt resident.
pub(super) fn queue_cost_ms(
    request: &PlacementRequest<'_>,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    now: Instant,
) -> u64 {
    let own_kv = own_kv(request, stats.worker());
    let tokens_per_s = fill_tokens_per_s(view, stats);
    let backlog_tokens = backlog_tokens(tokens_per_s, 0, stats, now);
    let QueueAhead { turns, wait_ms } =
        queue_ahead(request, own_kv, tokens_per_s, backlog_tokens, view, stats);
    let interference_ms = u64::from(turns) * INTERFERENCE_MS_PER_TURN;
    wait_ms.saturating_add(impatience_ms(wait_ms)).saturating_add(interference_ms)
}

fn impatience_ms(first_token_ms: u64) -> u64 {
    first_token_ms.saturating_sub(PATIENCE_MS).saturating_mul(IMPATIENCE_FACTOR)
}

/// Prompt tokens that are computed before the turn's own.
fn backlog_tokens(
    tokens_per_s: u64,
    uncached_tokens: u64,
    stats: WorkerStats<'_>,
    now: Instant,
) -> u64 {
    let waiting_tokens_assumed = stats.waiting_without_tokens().saturating_mul(TURN_TOKENS_ASSUMED);
    stats
        .backlog_tokens(tokens_per_s, now)
        .max(waiting_tokens_assumed)
        .saturating_add(staged_prefill_tokens(stats, uncached_tokens))
}

/// Whether the prompts take more than `ms_max`, each rounded down. May say no for up to 2 ms more.
/// Two divisions would be a third of the work for a worker.
fn takes_longer(
    backlog_tokens: u64,
    uncached_tokens: Option<u64>,
    tokens_per_s: u64,
    ms_max: u64,
) -> bool {
    let tokens = backlog_tokens.saturating_add(uncached_tokens.unwrap_or(0));
    let limit = ms_max.checked_add(2).and_then(|ms| ms.checked_mul(tokens_per_s));
    limit.is_some_and(|limit| tokens.saturating_mul(1000) >= limit)
}

fn queue_ahead(
    request: &PlacementRequest<'_>,
    own_kv: OwnKv,
    tokens_per_s: u64,
    backlog_tokens: u64,
    view: &Snapshot,
    stats: WorkerStats<'_>,
) -> QueueAhead {
    let turns = stats.turns();
    let batch_wait_ms = batch_wait_ms(turns, stats.turns_max());
    let queued_ms = compute_ms(backlog_tokens, tokens_per_s).saturating_add(batch_wait_ms);
    // Running turns end while the backlog is computed, so the two waits overlap.
    let wait_ms = queued_ms.max(pool_wait_ms(request, own_kv, view, stats, backlog_tokens));
    QueueAhead { turns, wait_ms }
}

/// How many tokens of a prompt a worker gets KV for in a second. A decode worker takes the KV from
/// another engine, and computes none.
fn fill_tokens_per_s(view: &Snapshot, stats: WorkerStats<'_>) -> u64 {
    if stats.role() != EngineRole::Decode {
        return stats.prefill_tokens_per_s().unwrap_or(PREFILL_TOKENS_PER_S_ASSUMED);
    }
    let bytes_per_token = stats.kv_bytes_per_token().unwrap_or(KV_BYTES_PER_TOKEN_ASSUMED);
    (view.transfer_bytes_per_s() / bytes_per_token).max(1)
}

/// An upper bound of the staged tokens that are computed before this prompt. A prompt that fits
/// into one stage isn't staged and waits for no staged prompt. A longer prompt waits for all staged
/// prompts that have fewer tokens left. Agents report only the number and the sum of the staged
/// prompts, and each prompt ahead has fewer than `uncached_tokens` left.
fn staged_prefill_tokens(stats: WorkerStats<'_>, uncached_tokens: u64) -> u64 {
    let is_staged = stats.stage_tokens().is_some_and(|stage_tokens| uncached_tokens > stage_tokens);
    let staged_prefill = if is_staged { stats.staged_prefill() } else { None };
    staged_prefill
        .map_or(0, |queue| queue.tokens.min(uncached_tokens.saturating_mul(queue.prompts.into())))
}

/// Running turns are assumed to end evenly over the duration of one turn. The backlog counts as
/// used KV, because the prompts ahead will hold at least the tokens computed for them.
///
/// 0 if the prompt, the pool or its use is unknown: then crowding counts the worker as full.
fn pool_wait_ms(
    request: &PlacementRequest<'_>,
    own_kv: OwnKv,
    view: &Snapshot,
    stats: WorkerStats<'_>,
    backlog_tokens: u64,
) -> u64 {
    let (Some(pool_tokens), Some(used_tokens)) = (stats.pool_tokens(), stats.used_tokens()) else {
        return 0;
    };
    let context_after_turn =
        |sticky: Sticky| sticky.reported_tokens.saturating_add(TURN_TOKENS_ASSUMED);
    let context_tokens =
        request.prompt.map(|prompt| prompt.tokens).or(request.sticky.map(context_after_turn));
    let Some(context_tokens) = context_tokens else { return 0 };
    let needed_tokens =
        context_tokens.saturating_sub(own_kv.private_tokens).saturating_add(ANSWER_TOKENS_ASSUMED);
    let missing_tokens = |used_tokens: u64| {
        used_tokens
            .saturating_add(needed_tokens)
            .saturating_add(backlog_tokens)
            .saturating_sub(pool_tokens)
    };
    if missing_tokens(used_tokens) == 0 || used_tokens == 0 {
        return 0;
    }
    let worker = stats.worker();
    let load = view.agent(worker).rank_load(worker.dp_rank);
    let pinned_tokens = load.and_then(|load| load.pinned_tokens).map_or(0, |figure| figure.value);
    let unpinned_tokens = used_tokens
        .saturating_sub(pinned_tokens)
        .saturating_sub(load.map_or(0, |load| ended_own_tokens(request, stats, load)));
    // Without the turns that have ended since the load report, which hold no KV: else a
    // conversation's next turn would wait for the turn before it.
    let unpinned_tokens = stats.part_of_turns_not_ended(unpinned_tokens);
    let missing_tokens = missing_tokens(unpinned_tokens.saturating_add(pinned_tokens));
    if missing_tokens == 0 || unpinned_tokens.saturating_add(pinned_tokens) == 0 {
        0
    } else if missing_tokens >= unpinned_tokens {
        // The agent must reclaim pinned KV, assumed to take as long as a turn: it is private to a
        // session, and eviction can't take it.
        TURN_MS_ASSUMED
    } else {
        TURN_MS_ASSUMED.saturating_mul(missing_tokens) / unpinned_tokens
    }
}

/// The session's KV on this worker if the sample may count it as used by the session's last turn,
/// which has ended: the engine was sampled before, or less than [`SAMPLE_LAG`] later.
fn ended_own_tokens(
    request: &PlacementRequest<'_>,
    stats: WorkerStats<'_>,
    load: &RankLoad,
) -> u64 {
    let sticky = request.sticky.filter(|sticky| sticky.worker == stats.worker());
    let ended = sticky.and_then(|sticky| Some((sticky, sticky.last_turn_ended?)));
    match (ended, load.pool_used_tokens) {
        (Some((sticky, ended)), Some(used))
            if stats.was_sampled_before(used, ended + SAMPLE_LAG) =>
        {
            sticky.reported_tokens
        }
        _ => 0,
    }
}

/// Without the session's own KV.
fn pool_use(own_kv: OwnKv, stats: WorkerStats<'_>) -> PoolUse {
    let opened_sessions = stats.open_requests_since_report();
    let (pool_tokens, used_tokens) = (stats.pool_tokens(), stats.used_tokens());
    let growth_tokens_max =
        pool_tokens.map_or(u64::MAX, |pool_tokens| pool_tokens / GROWTH_POOL_DIVISOR);
    let growth_tokens = GROWTH_TOKENS_ASSUMED.min(growth_tokens_max);
    let wanted_tokens = stats
        .wanted_tokens()
        .saturating_add(stats.incoming_tokens())
        .saturating_add(u64::from(opened_sessions) * growth_tokens)
        .saturating_sub(own_kv.tokens)
        .max(used_tokens.unwrap_or(0).saturating_sub(own_kv.private_tokens));
    let fullness_milli = match (stats.kept_tokens_max(), used_tokens) {
        (Some(kept_tokens_max), Some(_)) => share_milli(wanted_tokens, kept_tokens_max),
        // An unknown pool counts as full.
        _ => WHOLE_MILLI,
    };
    let fullness_milli = fullness_milli.max(rows_used_milli(stats.request_rows(), opened_sessions));
    PoolUse { pool_tokens, growth_tokens, wanted_tokens, fullness_milli }
}

/// Doesn't count as crowding for this turn.
#[derive(Debug, Clone, Copy, Default)]
struct OwnKv {
    /// Subtracted from the reuse forecast, because this turn is the reuse that the forecast
    /// expects.
    tokens: u64,
    /// The pinned part. No reported block has it. The worker's used KV contains it.
    private_tokens: u64,
}

/// Empty if the worker doesn't have the session.
fn own_kv(request: &PlacementRequest<'_>, worker: WorkerRef) -> OwnKv {
    let sticky = request.sticky.filter(|sticky| sticky.worker == worker);
    sticky.map_or(OwnKv::default(), |Sticky { reported_tokens: tokens, private_tokens, .. }| {
        OwnKv { tokens, private_tokens }
    })
}

fn requests_waiting(view: &Snapshot, worker: WorkerRef) -> Option<u64> {
    Some(view.agent(worker).rank_load(worker.dp_rank)?.requests_waiting?.value)
}

/// What a worker has to do for a turn's prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PromptParts {
    pub(super) uncached_tokens: u64,
    resident_tokens: u64,
    /// The part of `resident_tokens` that only the host has. 0 where no host tier is known.
    pub(super) host_tokens: u64,
}

/// `None` if the prompt is unknown.
pub(super) fn prompt_parts(
    request: &PlacementRequest<'_>,
    stats: WorkerStats<'_>,
) -> Option<PromptParts> {
    let prompt = request.prompt?;
    let worker = stats.worker();
    let (overlap, number) = (prompt.overlap, worker.number());
    let leading_tokens = |blocks: Option<u32>| u64::from(blocks.unwrap_or(0)) * prompt.block_tokens;
    let private_tokens = own_kv(request, worker).private_tokens;
    let device_blocks = number.map(|number| overlap.device_blocks(number));
    let device_tokens = private_tokens.max(leading_tokens(device_blocks));
    let any_tier_blocks =
        number.filter(|_| stats.host().is_some()).map(|number| overlap.any_tier_blocks(number));
    let any_tier_tokens = leading_tokens(any_tier_blocks).min(prompt.tokens);
    let host_tokens = any_tier_tokens.saturating_sub(device_tokens);
    let resident_tokens = device_tokens.saturating_add(host_tokens).min(prompt.tokens);
    let uncached_tokens = prompt.tokens - resident_tokens;
    Some(PromptParts { uncached_tokens, resident_tokens, host_tokens })
}

fn blocking_ms(prefill_ms: u64, stats: WorkerStats<'_>, demand: &ReuseDemand) -> u64 {
    let wait_ms_max =
        if stats.stage_tokens().is_some() { BLOCKING_STAGED_MS_MAX } else { BLOCKING_MS_MAX };
    let arriving_turns_micro = demand.turns_micro_per_s.saturating_mul(prefill_ms) / 1000;
    arriving_turns_micro.saturating_mul((prefill_ms / 2).min(wait_ms_max)) / 1_000_000
}

fn batch_wait_ms(turns: u32, turns_max: u32) -> u64 {
    if turns_max == 0 || turns < turns_max {
        return 0;
    }
    u64::from(turns - turns_max + 1) * TURN_MS_ASSUMED / u64::from(turns_max)
}

/// 0 if unknown. An engine without free rows takes no more pinned sessions, even if its pool has
/// free KV.
fn rows_used_milli(request_rows: Option<(u64, u64)>, opened_sessions: u32) -> u64 {
    request_rows
        .map_or(0, |(held, total)| share_milli(held.saturating_add(opened_sessions.into()), total))
}

fn share_milli(part: u64, whole: u64) -> u64 {
    part.saturating_mul(WHOLE_MILLI) / whole
}

fn host_load_ms(host: HostStats, tokens: u64) -> u64 {
    compute_ms(tokens, host.load_tokens_per_s())
}

fn compute_ms(tokens: u64, tokens_per_s: u64) -> u64 {
    tokens.saturating_mul(1000) / tokens_per_s
}
