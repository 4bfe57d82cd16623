//! One run: users, engines, a policy and a virtual clock; the same arguments give the same counts.
//!
//! Events at the same time happen in the order in which they were scheduled.

mod faults;
mod foresight;
mod sessions;
mod staged_prefill;

use self::foresight::Foresight;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    ops::Range,
    sync::Arc,
};

use super::{
    corpus::Corpus,
    engine::{ComputedPrompt, Engine, HostLoads, Job, Moves, Time},
    fleet::{Condition, Fleet, TurnToPlace, block_numbers},
    options::{Churn, Close, SimOptions},
    policy::{Policy, PolicyChoice, PolicyEvent, PolicyKind},
    pool::BlockPool,
    schedule::{Due, Schedule},
    stats::RunStats,
};

/// The events of a run.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    User,
    Turn { play: usize },
    Retry { turn: usize, play: usize },
    ChunkDone { worker: usize, epoch: u32 },
    TurnDone { turn: usize, worker: usize, epoch: u32 },
    Blocks { worker: usize, epoch: u32, moves: Moves },
    Close { play: usize },
    Condition { worker: usize, to: ConditionChange },
    Stage { worker: usize, epoch: u32 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ConditionChange {
    Crash,
    Drain,
    Return,
}

/// A turn from its arrival to its end.
#[derive(Debug)]
struct RunTurn {
    arrived: Time,
    worker: usize,
    /// The worker that the session leaves when the answer starts.
    left_worker: Option<usize>,
    /// Whether the first token was counted; a retry after a crash counts no second one.
    answered: bool,
    /// The prompt tokens computed by staged prefill.
    staged_tokens: u64,
    /// The turn's job while it is decoding.
    running: Option<Job>,
}

/// The state of one run.
#[derive(Debug)]
struct World {
    corpus: Arc<Corpus>,
    options: SimOptions,
    now: Time,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    scheduled: u64,
    schedule: Schedule,
    engines: Vec<Engine>,
    /// One pool per engine, or one pool for all engines (a bound).
    pools: Vec<BlockPool>,
    /// The next use of blocks, for a pool that evicts what is used last (a bound).
    foresight: Option<Foresight>,
    /// Whether the policy learns of a session's end although no client closes the session.
    reports_ends: bool,
    epochs: Vec<u32>,
    /// The staging queue of each engine; empty if prompts are not staged.
    staged_prefills: Vec<staged_prefill::StagedPrefills>,
    fleet: Fleet,
    turns: Vec<RunTurn>,
    /// The worker of each session's previous turn.
    previous_workers: HashMap<usize, usize>,
    sessions: sessions::Sessions,
    faults: faults::FaultSource,
    stats: RunStats,
}

/// Plays the corpus under a policy.
#[must_use]
pub fn run(corpus: &Arc<Corpus>, options: &SimOptions, kind: PolicyKind, seed: u64) -> RunStats {
    let pool_blocks = options.pool_tokens.map_or(u64::MAX, |tokens| tokens / corpus.block_tokens);
    // A bound with one pool has no churn, because a crash would empty the pool of all engines.
    let has_one_pool = matches!(kind, PolicyKind::Pooled | PolicyKind::PooledClairvoyant);
    let churn = if has_one_pool { Churn::None } else { options.churn };
    let last = options.workers - 1;
    let host_loads = HostLoads {
        tokens_per_s: options.host_load_tokens_per_s,
        is_overlapped: !options.no_host_overlap,
    };
    let engine = |worker| {
        let cold = churn == Churn::Cold && worker == last;
        Engine::new(corpus.block_tokens, options.chunk_tokens, host_loads, cold)
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let host_blocks = (pool_blocks as f64 * options.host_ratio) as u64;
    let pools = match kind {
        PolicyKind::Ideal => vec![BlockPool::new(u64::MAX); options.workers],
        PolicyKind::Pooled => {
            vec![BlockPool::new(pool_blocks.saturating_mul(options.workers as u64))]
        }
        PolicyKind::PooledClairvoyant => {
            vec![BlockPool::clairvoyant(pool_blocks.saturating_mul(options.workers as u64))]
        }
        _ => vec![BlockPool::new(pool_blocks).with_host(host_blocks); options.workers],
    };
    let mut fleet = Fleet::new(options.workers, pool_blocks, corpus.block_tokens);
    if kind != PolicyKind::Ideal && !options.host_unseen {
        for worker in &mut fleet.workers {
            worker.host_blocks = host_blocks;
            worker.host_load_tokens_per_s = options.host_load_tokens_per_s;
        }
    }
    if churn == Churn::Join {
        fleet.workers[last].condition = Condition::Down;
    }
    let staged_prefills = if kind.has_staged_prefill() { options.workers } else { 0 };
    let mut policy = kind.build(seed, options.mode, &fleet);
    let mut world = World {
        corpus: Arc::clone(corpus),
        options: *options,
        now: Time::ZERO,
        events: BinaryHeap::new(),
        scheduled: 0,
        schedule: Schedule::new(corpus, options, seed),
        engines: (0..options.workers).map(engine).collect(),
        epochs: vec![0; options.workers],
        staged_prefills: (0..staged_prefills)
            .map(|_| staged_prefill::StagedPrefills::default())
            .collect(),
        fleet,
        turns: Vec::new(),
        previous_workers: HashMap::new(),
        sessions: sessions::Sessions::new(options, pools[0].capacity()),
        pools,
        foresight: (kind == PolicyKind::PooledClairvoyant).then(|| Foresight::new(corpus, options)),
        reports_ends: kind == PolicyKind::Told,
        faults: faults::FaultSource::new(options.delivery_faults, seed),
        stats: RunStats::new(options.workers),
    };
    world.start(churn);
    while let Some(Reverse((at, _, event))) = world.events.pop() {
        if at > options.horizon && !corpus.timed {
            break;
        }
        world.now = at;
        world.handle(event, policy.as_mut());
    }
    world.stats
}

impl World {
    fn start(&mut self, churn: Churn) {
        for due in self.schedule.start(&self.options) {
            self.push_due(due);
        }
        for (at, worker, to) in faults::changes(churn, &self.options) {
            self.push_event(at, Event::Condition { worker, to });
        }
    }

    fn push_event(&mut self, at: Time, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at, self.scheduled, event)));
    }

    fn push_due(&mut self, due: Due) {
        match due {
            Due::User { at } => self.push_event(at, Event::User),
            Due::Turn { play, at } => self.push_event(at, Event::Turn { play }),
        }
    }

    fn handle(&mut self, event: Event, policy: &mut dyn Policy) {
        match event {
            Event::User => {
                let due = self.schedule.begin_session(self.now);
                self.push_due(due);
            }
            Event::Turn { play } => {
                self.turns.push(RunTurn {
                    arrived: self.now,
                    worker: 0,
                    left_worker: None,
                    answered: false,
                    staged_tokens: 0,
                    running: None,
                });
                self.send(self.turns.len() - 1, play, policy);
            }
            Event::Retry { turn, play } => self.send(turn, play, policy),
            Event::ChunkDone { worker, epoch } if epoch == self.epochs[worker] => {
                match self.engines[worker].chunk_done(self.now) {
                    Some(begun) if begun.job.is_stage => self.stage_done(worker, begun, policy),
                    Some(begun) => self.start_answer(worker, begun, policy),
                    None => {}
                }
                self.advance_engine(worker, policy);
            }
            Event::TurnDone { turn, worker, epoch } if epoch == self.epochs[worker] => {
                self.end_turn(turn, worker, policy);
            }
            Event::Blocks { worker, epoch, moves } if epoch == self.epochs[worker] => {
                self.deliver_blocks(worker, &moves, policy);
            }
            Event::Stage { worker, epoch } if epoch == self.epochs[worker] => {
                self.next_stage(worker);
                self.advance_engine(worker, policy);
            }
            Event::Close { play } => self.close(play, policy),
            Event::Condition { worker, to } => self.change_condition(worker, to, policy),
            // Events of an engine that has crashed since are ignored.
            Event::ChunkDone { .. }
            | Event::TurnDone { .. }
            | Event::Blocks { .. }
            | Event::Stage { .. } => {}
        }
    }

    /// Places the turn and sends it to its worker.
    fn send(&mut self, turn: usize, play: usize, policy: &mut dyn Policy) {
        let entry = self.schedule.get(play);
        let script = &self.corpus.scripts[entry.script];
        let facts = &script.turns[entry.turn];
        let chain = block_numbers(&facts.chain, &self.corpus, entry.pass);
        // A session that was inferred from blocks is identified by its first request.
        let session = script.continues.unwrap_or(play);
        let request = TurnToPlace {
            turn,
            session,
            is_inferred: script.continues.is_some(),
            parent: entry.parent,
            previous_worker: self.previous_workers.get(&session).copied(),
            chain: &chain,
            input_tokens: facts.input_tokens,
            now: self.now,
        };
        for (seen, engine) in self.fleet.workers.iter_mut().zip(&self.engines) {
            seen.backlog_tokens = engine.backlog_tokens(self.now);
        }
        for (seen, staged) in self.fleet.workers.iter_mut().zip(&self.staged_prefills) {
            seen.staged_prefill = Some(staged.load());
        }
        let PolicyChoice { worker, left_worker, examined_prompt } =
            policy.place(&request, &self.fleet);
        assert!(self.fleet.accepts(worker, &request), "placed on a worker that doesn't take it");
        let expected_tokens = self.fleet.uncached_tokens(worker, &request);
        self.stats.rebinds += u64::from(request.previous_worker.is_some_and(|last| last != worker));
        policy.observe(
            &PolicyEvent::Sent { request: &request, worker, left_worker, now: self.now },
            &self.fleet,
        );
        self.previous_workers.insert(session, worker);
        self.turns[turn].worker = worker;
        self.turns[turn].left_worker = left_worker;
        self.turns[turn].staged_tokens = 0;
        let job = Job {
            turn,
            play,
            input_tokens: facts.input_tokens,
            output_tokens: facts.output_tokens,
            expected_tokens,
            chain,
            is_stage: false,
        };
        if !self.engines[worker].could_hold(&job, &self.pools[self.pool_index(worker)]) {
            self.stats.dropped += 1;
            policy
                .observe(&PolicyEvent::Ended { turn, session, worker, now: self.now }, &self.fleet);
            self.push_followers(play);
            return;
        }
        for before in self.sessions.workers_of(play) {
            if before != worker {
                let pool = self.pool_index(before);
                self.sessions.unpin(play, before, &mut self.pools[pool]);
            }
        }
        self.sessions.record_sent(play, worker);
        self.deliver(worker, job, examined_prompt);
        self.advance_engine(worker, policy);
    }

    /// Lets the engine start the work that it has room for.
    fn advance_engine(&mut self, worker: usize, policy: &mut dyn Policy) {
        let pool = self.pool_index(worker);
        loop {
            let engine = &mut self.engines[worker];
            if let Some(until) = engine.step(self.now, &mut self.pools[pool]) {
                self.push_event(until, Event::ChunkDone { worker, epoch: self.epochs[worker] });
            }
            let engine = &self.engines[worker];
            // If only pins hold blocks, the oldest pin is dropped by force.
            if engine.queued() == 0 || engine.is_running() {
                break;
            }
            self.stats.wedges += 1;
            assert!(
                self.sessions.release_oldest(worker, &mut self.pools[pool]),
                "an engine without turns and pins has room"
            );
        }
        let removed = self.engines[worker].take_removed(&mut self.pools[pool]);
        self.report_blocks(worker, removed, policy);
        self.report_load(worker, policy);
    }

    fn start_answer(&mut self, worker: usize, begun: ComputedPrompt, policy: &mut dyn Policy) {
        let ComputedPrompt { job, matched_tokens, stored, done_at } = begun;
        let turn = &mut self.turns[job.turn];
        if !turn.answered {
            turn.answered = true;
            self.stats.ttft.push(self.now - turn.arrived);
            self.stats.input_tokens += job.input_tokens;
            self.stats.matched_tokens += matched_tokens.saturating_sub(turn.staged_tokens);
        }
        self.stats.prefilled_tokens[worker] += job.input_tokens - matched_tokens;
        let left_worker = turn.left_worker.take();
        let (number, play, session) = (job.turn, job.play, self.session_of(job.play));
        self.turns[number].running = Some(job);
        self.push_event(
            done_at,
            Event::TurnDone { turn: number, worker, epoch: self.epochs[worker] },
        );
        self.report_blocks(worker, stored, policy);
        let turn = number;
        policy.observe(&PolicyEvent::Began { turn, session, worker, now: self.now }, &self.fleet);
        if let Some(left) = left_worker.filter(|_| self.options.close == Close::Free) {
            self.close_at(play, left, policy);
        }
    }

    fn end_turn(&mut self, turn: usize, worker: usize, policy: &mut dyn Policy) {
        let job = self.turns[turn].running.take().expect("a turn that ends has run");
        let session = self.session_of(job.play);
        self.stats.ended += 1;
        let last = !self.corpus.timed && self.schedule.is_last(job.play);
        let pool = self.pool_index(worker);
        if let Some(foresight) = &mut self.foresight {
            let entry = self.schedule.get(job.play);
            foresight.record_turn_end(
                entry.script,
                entry.turn,
                entry.pass,
                self.now,
                &mut self.pools[pool],
            );
        }
        let engine = &mut self.engines[worker];
        self.sessions.end_turn(&job, worker, engine, &mut self.pools[pool]);
        policy.observe(&PolicyEvent::Ended { turn, session, worker, now: self.now }, &self.fleet);
        if last {
            for at in self.faults.close_times(self.now) {
                self.push_event(at, Event::Close { play: job.play });
            }
        }
        self.advance_engine(worker, policy);
        self.push_followers(job.play);
    }

    /// Schedules the events that follow the end of the play's turn.
    fn push_followers(&mut self, play: usize) {
        for due in self.schedule.end_turn(play, self.now) {
            self.push_due(due);
        }
    }

    fn close(&mut self, play: usize, policy: &mut dyn Policy) {
        let session = self.session_of(play);
        match self.options.close {
            Close::Free => {
                self.stats.closed += 1;
                for worker in self.sessions.workers_of(play) {
                    self.close_at(play, worker, policy);
                }
            }
            Close::None if self.reports_ends => {}
            Close::None => return,
        }
        policy.observe(&PolicyEvent::Closed { session, now: self.now }, &self.fleet);
    }

    fn close_at(&mut self, play: usize, worker: usize, policy: &mut dyn Policy) {
        let pool = self.pool_index(worker);
        self.sessions.close(play, &self.corpus, worker, &self.schedule, &mut self.pools[pool]);
        self.advance_engine(worker, policy);
    }

    fn pool_index(&self, worker: usize) -> usize {
        worker % self.pools.len()
    }

    /// Returns the workers that share a pool with this worker, itself included.
    fn workers_with_pool_of(&self, worker: usize) -> Range<usize> {
        if self.pools.len() == 1 { 0..self.engines.len() } else { worker..worker + 1 }
    }

    fn session_of(&self, play: usize) -> usize {
        self.corpus.scripts[self.schedule.get(play).script].continues.unwrap_or(play)
    }

    /// Updates the facts of a worker that the policy may use.
    fn report_load(&mut self, worker: usize, policy: &mut dyn Policy) {
        let engine = &self.engines[worker];
        let pool = &self.pools[self.pool_index(worker)];
        let seen = &mut self.fleet.workers[worker];
        seen.outstanding = engine.turns();
        seen.pending_tokens = engine.pending_tokens();
        seen.backlog_tokens = engine.backlog_tokens(self.now);
        seen.prefill_counters = engine.prefill_counters();
        seen.active_blocks = pool.used();
        seen.host_used_blocks = pool.on_host();
        // An unlimited pool is reported as one that has room.
        let left = seen.pool_blocks.saturating_sub(pool.used());
        seen.free_blocks = pool.free().min(left);
        policy.observe(&PolicyEvent::Load { worker, now: self.now }, &self.fleet);
    }
}
