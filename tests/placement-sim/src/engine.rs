//! The model of one engine: a queue in order of arrival, one prefill at a time, a decode batch.
//!
//! The caller passes the pool, because bounds let several engines share one. The module is pure:
//! callers pass the time, and the engine returns the times of its events. It is a simplified model
//! of SGLang: prefill and decode don't overlap, and the batch size affects decoding only by a
//! linear term.

use std::{collections::VecDeque, time::Duration};

use super::pool::{BlockPool, Change, Class, Matched};

/// The fixed time of each prefill.
const PREFILL_FIXED: Duration = Duration::from_millis(2);
/// The prefill speed in tokens per second, as of a 70B model on one node.
pub const PREFILL_TOKENS_PER_S: u64 = 20_000;
/// How many times as long the first prompt of an engine that starts cold takes, because the engine
/// compiles kernels meanwhile.
const COLD_FACTOR: u32 = 10;
/// The fixed decode time per answered token.
const DECODE: Duration = Duration::from_millis(10);
/// The additional decode time per answered token, for each turn in the batch.
const DECODE_EACH: Duration = Duration::from_micros(200);
/// The most turns in the batch.
pub const DECODING_MAX: u32 = 64;

/// A time since the run's start.
pub type Time = Duration;

/// How KV comes back from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLoads {
    /// The tokens loaded in a second.
    pub tokens_per_s: u64,
    /// Whether a prompt's other tokens are computed meanwhile, layer by layer.
    pub is_overlapped: bool,
}

/// The blocks that changed their tiers.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moves {
    /// On the device from now on.
    pub stored: Vec<u32>,
    /// No longer on the device.
    pub removed: Vec<u32>,
    /// On the host from now on.
    pub stored_on_host: Vec<u32>,
    /// No longer on the host.
    pub removed_from_host: Vec<u32>,
}

impl Moves {
    /// Whether no block moved.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The engine's data of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The turn's number.
    pub turn: usize,
    /// The session's number.
    pub play: usize,
    /// The prompt's blocks, numbered for this play of the session.
    pub chain: Vec<u32>,
    /// The tokens of the prompt.
    pub input_tokens: u64,
    /// The tokens of the answer.
    pub output_tokens: u64,
    /// The prompt tokens that were not resident, as far as the router knew when it placed the turn.
    pub expected_tokens: u64,
    /// Whether this is a stage of a staged prefill: it only computes KV for a later turn.
    pub is_stage: bool,
}

/// A prompt whose KV is being computed.
#[derive(Debug)]
struct Prefill {
    job: Job,
    matched_tokens: u64,
    tokens_left: u64,
    /// Until the KV that the host has is on the device. Zero once the first chunk has begun.
    load_time: Duration,
    /// The new blocks of the prompt, which can be matched once they are computed.
    stored: Moves,
    /// The end of the chunk that is being computed.
    chunk_end: Option<Time>,
    chunk_tokens: u64,
    /// How long that chunk's computation takes, without waits for loads.
    chunk_time: Duration,
}

/// An engine's counters of its prefill, as SGLang reports them. An agent measures by them how fast
/// the engine is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefillCounters {
    /// The prompt tokens computed since the engine's start.
    pub tokens: u64,
    /// The time that took.
    pub busy: Duration,
}

/// A turn whose prompt has been computed.
#[derive(Debug)]
pub struct ComputedPrompt {
    /// The turn.
    pub job: Job,
    /// The prompt tokens that were found on the device or the host.
    pub matched_tokens: u64,
    /// The blocks that can be matched from now on.
    pub stored: Moves,
    /// When the answer is complete.
    pub done_at: Time,
}

/// The modelled engine.
#[derive(Debug)]
pub struct Engine {
    block_tokens: u64,
    chunk_tokens: Option<u64>,
    host_loads: HostLoads,
    queue: VecDeque<Job>,
    queued_tokens: u64,
    /// Blocks that left a tier, and are still to be reported.
    removed: Moves,
    /// The started prompts: at most one without chunks, several that alternate with chunks. The
    /// first is being computed.
    prefills: VecDeque<Prefill>,
    decoding: u32,
    counters: PrefillCounters,
    /// Whether the next prompt is an engine's first, and slow.
    cold: bool,
}

impl Engine {
    /// Creates an idle engine; the first prompt of a `cold` one is slow.
    #[must_use]
    pub fn new(
        block_tokens: u64,
        chunk_tokens: Option<u64>,
        host_loads: HostLoads,
        cold: bool,
    ) -> Self {
        Self {
            block_tokens,
            chunk_tokens,
            host_loads,
            queue: VecDeque::new(),
            queued_tokens: 0,
            removed: Moves::default(),
            prefills: VecDeque::new(),
            decoding: 0,
            counters: PrefillCounters::default(),
            cold,
        }
    }

    /// Returns the counters of the prefill.
    #[must_use]
    pub fn prefill_counters(&self) -> PrefillCounters {
        self.counters
    }

    /// Returns the blocks that a turn needs besides its chain: the part of its prompt that no later
    /// prompt can match, and its answer.
    #[must_use]
    pub fn transient_blocks(&self, job: &Job) -> u64 {
        let prompt = job.input_tokens.div_ceil(self.block_tokens);
        prompt - job.chain.len() as u64 + job.output_tokens.div_ceil(self.block_tokens)
    }

    /// Whether the turn would fit into an empty pool.
    #[must_use]
    pub fn could_hold(&self, job: &Job, pool: &BlockPool) -> bool {
        job.chain.len() as u64 + self.transient_blocks(job) <= pool.capacity()
    }

    /// Puts a turn in the queue.
    pub fn enqueue(&mut self, job: Job) {
        self.queued_tokens += job.expected_tokens;
        self.queue.push_back(job);
    }

    /// Returns the number of turns whose prefill hasn't started.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Returns the number of turns in the engine: queued, in prefill or decoding.
    #[must_use]
    pub fn turns(&self) -> u32 {
        let queued = self.queue.len() + self.prefills.len();
        u32::try_from(queued).unwrap_or(u32::MAX).saturating_add(self.decoding)
    }

    /// Returns the number of turns that are decoding.
    #[must_use]
    pub fn decoding(&self) -> u32 {
        self.decoding
    }

    /// Whether a prefill or a decode is in progress.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.prefills.is_empty() || self.decoding > 0
    }

    /// Returns the prompt tokens that remain to be computed: for queued turns the expected number,
    /// for started prompts the actual one.
    #[must_use]
    pub fn backlog_tokens(&self, now: Time) -> u64 {
        let left = |prefill: &Prefill| {
            let done = prefill.chunk_end.map_or(0, |until| {
                let left_tokens = tokens_in(until.saturating_sub(now));
                prefill.chunk_tokens.saturating_sub(left_tokens)
            });
            prefill.tokens_left - done
        };
        self.queued_tokens + self.prefills.iter().map(left).sum::<u64>()
    }

    /// Returns the prompt tokens of [`Self::backlog_tokens`], with started prompts counted in full.
    #[must_use]
    pub fn pending_tokens(&self) -> u64 {
        let begun = |prefill: &Prefill| prefill.job.input_tokens - prefill.matched_tokens;
        self.queued_tokens + self.prefills.iter().map(begun).sum::<u64>()
    }

    /// Returns the blocks that have left a tier since the last call.
    pub fn take_removed(&mut self, pool: &mut BlockPool) -> Moves {
        self.collect_changes(pool);
        std::mem::take(&mut self.removed)
    }

    /// Starts the next chunk of prefill if the engine is not computing; returns the chunk's end.
    pub fn step(&mut self, now: Time, pool: &mut BlockPool) -> Option<Time> {
        if self.prefills.iter().any(|prefill| prefill.chunk_end.is_some()) {
            return None;
        }
        let another = self.prefills.is_empty() || self.chunk_tokens.is_some();
        if another {
            self.admit(pool);
        }
        let prefill = self.prefills.front_mut()?;
        let chunk = prefill.tokens_left.min(self.chunk_tokens.unwrap_or(u64::MAX));
        let warm_time = PREFILL_FIXED + prefill_time(chunk);
        let compute_time = if self.cold { warm_time * COLD_FACTOR } else { warm_time };
        let load_time = std::mem::take(&mut prefill.load_time);
        let time = if self.host_loads.is_overlapped {
            compute_time.max(load_time)
        } else {
            compute_time + load_time
        };
        let until = now + time;
        (prefill.chunk_tokens, prefill.chunk_time) = (chunk, compute_time);
        prefill.chunk_end = Some(until);
        Some(until)
    }

    /// Ends the chunk under way. Returns the turn if its prompt is complete.
    pub fn chunk_done(&mut self, now: Time) -> Option<ComputedPrompt> {
        let mut prefill = self.prefills.pop_front().expect("a chunk was under way");
        assert_eq!(prefill.chunk_end, Some(now), "chunks end when they said");
        prefill.chunk_end = None;
        self.counters.tokens += prefill.chunk_tokens;
        self.counters.busy += prefill.chunk_time;
        prefill.tokens_left -= prefill.chunk_tokens;
        if prefill.tokens_left > 0 {
            self.prefills.push_back(prefill);
            return None;
        }
        self.cold = false;
        self.decoding += 1;
        let each = DECODE + DECODE_EACH * self.decoding;
        let tokens = u32::try_from(prefill.job.output_tokens).expect("answers are below 2^26");
        let Prefill { job, matched_tokens, stored, .. } = prefill;
        Some(ComputedPrompt { job, matched_tokens, stored, done_at: now + each * tokens })
    }

    /// Ends a turn; its blocks stay resident as `class`.
    pub fn finish(&mut self, job: &Job, class: Class, pool: &mut BlockPool) {
        self.decoding -= 1;
        let transient = self.transient_blocks(job);
        pool.release(&job.chain, transient, class);
    }

    /// Loses all state; returns the turns that were not decoding yet.
    pub fn crash(&mut self, pool: &mut BlockPool) -> Vec<Job> {
        pool.clear();
        self.removed = Moves::default();
        (self.decoding, self.queued_tokens) = (0, 0);
        self.counters = PrefillCounters::default();
        let begun = self.prefills.drain(..).map(|prefill| prefill.job);
        begun.chain(self.queue.drain(..)).collect()
    }

    /// Starts the first queued turn if the batch and the pool have room.
    fn admit(&mut self, pool: &mut BlockPool) {
        let batch = self.decoding as usize + self.prefills.len();
        let Some(job) = self.queue.front() else { return };
        if batch >= DECODING_MAX as usize {
            return;
        }
        let Matched { blocks, host_blocks } = pool.matched(job.chain.iter().copied());
        let matched_tokens = (u64::from(blocks) * self.block_tokens).min(job.input_tokens);
        let host_tokens = u64::from(host_blocks) * self.block_tokens;
        let transient = self.transient_blocks(job);
        if !pool.admit(&job.chain, transient) {
            return;
        }
        let stored = self.collect_changes(pool);
        let job = self.queue.pop_front().expect("it was there a few lines above");
        self.queued_tokens -= job.expected_tokens;
        let tokens_left = job.input_tokens - matched_tokens;
        self.prefills.push_back(Prefill {
            job,
            matched_tokens,
            tokens_left,
            load_time: Duration::from_micros(
                host_tokens * 1_000_000 / self.host_loads.tokens_per_s,
            ),
            stored,
            chunk_end: None,
            chunk_tokens: 0,
            chunk_time: Duration::ZERO,
        });
    }

    /// Records the pool's changes. Returns the stored blocks, which are reported only once they are
    /// computed.
    fn collect_changes(&mut self, pool: &mut BlockPool) -> Moves {
        let mut stored = Moves::default();
        for change in pool.take_changes() {
            match change {
                Change::Stored(block) => stored.stored.push(block),
                Change::StoredOnHost(block) => stored.stored_on_host.push(block),
                Change::Removed(block) => self.removed.removed.push(block),
                Change::RemovedFromHost(block) => self.removed.removed_from_host.push(block),
            }
        }
        stored
    }
}

fn tokens_in(time: Duration) -> u64 {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros.saturating_mul(PREFILL_TOKENS_PER_S) / 1_000_000
}

/// Returns the time to prefill `tokens` tokens, without the fixed part.
#[must_use]
pub fn prefill_time(tokens: u64) -> Duration {
    Duration::from_micros(tokens * (1_000_000 / PREFILL_TOKENS_PER_S))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LOADS: HostLoads = HostLoads { tokens_per_s: 250_000, is_overlapped: true };

    fn job(turn: usize, chain: &[u32], input_tokens: u64) -> Job {
        Job {
            turn,
            play: turn,
            chain: chain.to_vec(),
            input_tokens,
            output_tokens: 100,
            expected_tokens: input_tokens,
            is_stage: false,
        }
    }

    /// Steps until no turn is left to start. Returns the turns in order of their starts, with their
    /// matched tokens and times.
    fn work(engine: &mut Engine, pool: &mut BlockPool, mut now: Time) -> Vec<(usize, u64, Time)> {
        let mut begun = vec![];
        while let Some(until) = engine.step(now, pool) {
            now = until;
            if let Some(one) = engine.chunk_done(now) {
                begun.push((one.job.turn, one.matched_tokens, now));
            }
        }
        begun
    }

    #[test]
    fn a_prefill_takes_two_ms_and_its_tokens_and_the_next_waits_for_it() {
        let (mut engine, mut pool) = (Engine::new(500, None, LOADS, false), BlockPool::new(1_000));
        engine.enqueue(job(0, &[0, 1, 2, 3], 2_000));
        engine.enqueue(job(1, &[0, 1, 2, 9], 2_000));
        assert_eq!(engine.backlog_tokens(Time::ZERO), 4_000);
        assert_eq!(engine.step(Time::ZERO, &mut pool), Some(102 * MS));
        assert_eq!(engine.step(50 * MS, &mut pool), None, "one at a time");
        assert_eq!(engine.backlog_tokens(52 * MS), 2_000 + 1_000);
        let first = engine.chunk_done(102 * MS).unwrap();
        assert_eq!((first.matched_tokens, first.done_at), (0, (102 + 1_020) * MS));
        assert_eq!(first.stored.stored, [0, 1, 2, 3]);
        assert_eq!(work(&mut engine, &mut pool, 102 * MS), [(1, 1_500, (102 + 27) * MS)]);
        assert_eq!((engine.decoding(), engine.turns()), (2, 2));
    }

    #[test]
    fn chunks_let_a_short_prompt_pass_a_long_one() {
        let (mut engine, mut pool) =
            (Engine::new(500, Some(1_000), LOADS, false), BlockPool::new(1_000));
        engine.enqueue(job(0, &[0, 1, 2, 3, 4, 5, 6, 7], 4_000));
        assert!(engine.step(Time::ZERO, &mut pool).is_some());
        engine.enqueue(job(1, &[9], 500));
        assert!(engine.chunk_done(52 * MS).is_none());
        let order: Vec<usize> =
            work(&mut engine, &mut pool, 52 * MS).iter().map(|one| one.0).collect();
        assert_eq!(order, [1, 0]);
    }

    #[test]
    fn kv_on_the_host_is_loaded_while_the_rest_is_computed_or_before() {
        for (is_overlapped, ms) in [(true, 27), (false, 27 + 4)] {
            let loads = HostLoads { is_overlapped, ..LOADS };
            let mut engine = Engine::new(500, None, loads, false);
            let mut pool = BlockPool::new(4).with_host(100);
            for (turn, chain) in [[0, 1, 2], [4, 5, 6]].into_iter().enumerate() {
                let job = Job { output_tokens: 0, ..job(turn, &chain, 1_500) };
                engine.enqueue(job.clone());
                work(&mut engine, &mut pool, Time::ZERO);
                engine.finish(&job, Class::Plain, &mut pool);
            }
            engine.enqueue(Job { output_tokens: 0, ..job(2, &[0, 1, 2, 3], 2_000) });
            let begun = work(&mut engine, &mut pool, Time::ZERO);
            assert_eq!(begun, [(2, 1_500, ms * MS)]);
        }
    }

    #[test]
    fn a_full_batch_and_a_held_pool_make_turns_wait() {
        let (mut engine, mut pool) = (Engine::new(500, None, LOADS, false), BlockPool::new(4));
        engine.enqueue(job(0, &[0, 1], 1_000));
        engine.enqueue(job(1, &[2, 3], 1_000));
        let begun = work(&mut engine, &mut pool, Time::ZERO);
        assert_eq!((begun.len(), engine.queued()), (1, 1), "three of four blocks are held");
        engine.finish(&job(0, &[0, 1], 1_000), Class::Plain, &mut pool);
        assert_eq!(work(&mut engine, &mut pool, 5_000 * MS).len(), 1);
        assert!(!pool.is_resident(1), "the idle leaf made room");
    }

    #[test]
    fn a_cold_engine_is_slow_once_and_counts_it() {
        let (mut engine, mut pool) = (Engine::new(500, None, LOADS, true), BlockPool::new(1_000));
        engine.enqueue(job(0, &[0, 1, 2, 3], 2_000));
        engine.enqueue(job(1, &[5, 6, 7, 8], 2_000));
        let begun = work(&mut engine, &mut pool, Time::ZERO);
        assert_eq!(begun, [(0, 0, 1_020 * MS), (1, 0, (1_020 + 102) * MS)]);
        let counted = PrefillCounters { tokens: 4_000, busy: 1_122 * MS };
        assert_eq!(engine.prefill_counters(), counted);
    }

    proptest! {
        #[test]
        fn turns_begin_in_order_and_every_token_is_matched_or_computed(
            jobs in prop::collection::vec((0..6_u32, 1..12_u32), 1..30),
        ) {
            let (mut engine, mut pool) = (Engine::new(500, None, LOADS, false), BlockPool::new(64));
            for (turn, (first, count)) in jobs.iter().enumerate() {
                let chain: Vec<u32> = (0..*count).map(|at| first * 100 + at).collect();
                engine.enqueue(job(turn, &chain, u64::from(*count) * 500 + 17));
            }
            let (mut now, mut next) = (Time::ZERO, 0);
            while let Some(until) = engine.step(now, &mut pool) {
                let computed = (until - now - PREFILL_FIXED).as_micros() / 50;
                now = until;
                let begun = engine.chunk_done(now).unwrap();
                prop_assert_eq!(begun.job.turn, next);
                let uncached = begun.job.input_tokens - begun.matched_tokens;
                prop_assert_eq!(u128::from(uncached), computed);
                engine.finish(&begun.job, Class::Plain, &mut pool);
                pool.check_invariants();
                next += 1;
            }
            prop_assert_eq!(next, jobs.len(), "an engine with room begins every turn");
        }
    }
}
