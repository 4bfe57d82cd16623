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
    engine::{Begun, Engine, Job, Time},
    fleet::{Ask, Condition, Fleet, numbered},
    options::{Churn, Close, Options},
    plays::{Due, Plays},
    policy::{Choice, Heard, Kind, Policy},
    pool::Pool,
    tally::Tally,
};

/// The events of a run.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    User,
    Turn { play: usize },
    Again { turn: usize, play: usize },
    ChunkDone { worker: usize, life: u32 },
    TurnDone { turn: usize, worker: usize, life: u32 },
    Blocks { worker: usize, life: u32, stored: Vec<u32>, removed: Vec<u32> },
    Close { play: usize },
    Condition { worker: usize, to: Change },
    Stage { worker: usize, life: u32 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    Crash,
    Drain,
    Return,
}

/// A turn from its arrival to its end.
#[derive(Debug)]
struct Turn {
    arrived: Time,
    worker: usize,
    /// The worker that the session leaves when the answer starts.
    leaves: Option<usize>,
    /// Whether the first token was counted; a retry after a crash counts no second one.
    answered: bool,
    /// The prompt tokens computed by staged prefill.
    ahead_tokens: u64,
    /// The turn's job while it is decoding.
    running: Option<Job>,
}

/// The state of one run.
#[derive(Debug)]
struct World {
    corpus: Arc<Corpus>,
    options: Options,
    now: Time,
    heap: BinaryHeap<Reverse<(Time, u64, Event)>>,
    scheduled: u64,
    plays: Plays,
    engines: Vec<Engine>,
    /// One pool per engine, or one pool for all engines (a bound).
    pools: Vec<Pool>,
    /// The next use of blocks, for a pool that evicts what is used last (a bound).
    foresees: Option<Foresight>,
    /// Whether the policy learns of a session's end although no client closes the session.
    tells_ends: bool,
    lives: Vec<u32>,
    /// The staging queue of each engine; empty if prompts are not staged.
    staged_prefills: Vec<staged_prefill::StagedPrefills>,
    fleet: Fleet,
    turns: Vec<Turn>,
    /// The worker of each session's previous turn.
    last: HashMap<usize, usize>,
    sessions: sessions::Sessions,
    faults: faults::Faults,
    tally: Tally,
}

/// Plays the corpus under a policy.
#[must_use]
pub fn run(corpus: &Arc<Corpus>, options: &Options, kind: Kind, seed: u64) -> Tally {
    let told = options.pool_tokens.map_or(u64::MAX, |tokens| tokens / corpus.block_tokens);
    let engine = || Engine::new(corpus.block_tokens, options.chunk_tokens);
    let pools = match kind {
        Kind::Ideal => vec![Pool::new(u64::MAX); options.workers],
        Kind::Pooled => vec![Pool::new(told.saturating_mul(options.workers as u64))],
        Kind::PooledClairvoyant => {
            vec![Pool::foreseeing(told.saturating_mul(options.workers as u64))]
        }
        _ => vec![Pool::new(told); options.workers],
    };
    let fleet = Fleet::new(options.workers, told, corpus.block_tokens);
    let staged_prefills = if kind.has_staged_prefill() { options.workers } else { 0 };
    let mut policy = kind.build(seed, options.mode, &fleet);
    let mut world = World {
        corpus: Arc::clone(corpus),
        options: *options,
        now: Time::ZERO,
        heap: BinaryHeap::new(),
        scheduled: 0,
        plays: Plays::new(corpus, options, seed),
        engines: (0..options.workers).map(|_| engine()).collect(),
        lives: vec![0; options.workers],
        staged_prefills: (0..staged_prefills)
            .map(|_| staged_prefill::StagedPrefills::default())
            .collect(),
        fleet,
        turns: Vec::new(),
        last: HashMap::new(),
        sessions: sessions::Sessions::new(options, pools[0].capacity()),
        pools,
        foresees: (kind == Kind::PooledClairvoyant).then(|| Foresight::new(corpus, options)),
        tells_ends: kind == Kind::Told,
        faults: faults::Faults::new(options.hearing, seed),
        tally: Tally::new(options.workers),
    };
    world.start();
    while let Some(Reverse((at, _, event))) = world.heap.pop() {
        if at > options.horizon && !corpus.timed {
            break;
        }
        world.now = at;
        world.happen(event, policy.as_mut());
    }
    world.tally
}

impl World {
    fn start(&mut self) {
        for due in self.plays.start(&self.options) {
            self.due(due);
        }
        // A bound with one pool has no churn, because a crash would empty the pool of all engines.
        if self.options.churn == Churn::Once && self.pools.len() == self.engines.len() {
            for (at, worker, to) in faults::churn(&self.options) {
                self.schedule(at, Event::Condition { worker, to });
            }
        }
    }

    fn schedule(&mut self, at: Time, event: Event) {
        self.scheduled += 1;
        self.heap.push(Reverse((at, self.scheduled, event)));
    }

    fn due(&mut self, due: Due) {
        match due {
            Due::User { at } => self.schedule(at, Event::User),
            Due::Turn { play, at } => self.schedule(at, Event::Turn { play }),
        }
    }

    fn happen(&mut self, event: Event, policy: &mut dyn Policy) {
        match event {
            Event::User => {
                let due = self.plays.begin(self.now);
                self.due(due);
            }
            Event::Turn { play } => {
                self.turns.push(Turn {
                    arrived: self.now,
                    worker: 0,
                    leaves: None,
                    answered: false,
                    ahead_tokens: 0,
                    running: None,
                });
                self.send(self.turns.len() - 1, play, policy);
            }
            Event::Again { turn, play } => self.send(turn, play, policy),
            Event::ChunkDone { worker, life } if life == self.lives[worker] => {
                match self.engines[worker].chunk_done(self.now) {
                    Some(begun) if begun.job.is_ahead => self.stage_done(worker, begun, policy),
                    Some(begun) => self.begin(worker, begun, policy),
                    None => {}
                }
                self.go_on(worker, policy);
            }
            Event::TurnDone { turn, worker, life } if life == self.lives[worker] => {
                self.end(turn, worker, policy);
            }
            Event::Blocks { worker, life, stored, removed } if life == self.lives[worker] => {
                self.hear_blocks(worker, &stored, &removed, policy);
            }
            Event::Stage { worker, life } if life == self.lives[worker] => {
                self.next_stage(worker);
                self.go_on(worker, policy);
            }
            Event::Close { play } => self.close(play, policy),
            Event::Condition { worker, to } => self.change(worker, to, policy),
            // Events of an engine that has crashed since are ignored.
            Event::ChunkDone { .. }
            | Event::TurnDone { .. }
            | Event::Blocks { .. }
            | Event::Stage { .. } => {}
        }
    }

    /// Places the turn and sends it to its worker.
    fn send(&mut self, turn: usize, play: usize, policy: &mut dyn Policy) {
        let one = self.plays.get(play);
        let script = &self.corpus.scripts[one.script];
        let facts = &script.turns[one.turn];
        let chain = numbered(&facts.chain, &self.corpus, one.pass);
        // A session that was inferred from blocks is identified by its first request.
        let session = script.continues.unwrap_or(play);
        let ask = Ask {
            turn,
            session,
            guessed: script.continues.is_some(),
            parent: one.parent,
            last: self.last.get(&session).copied(),
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
        let Choice { worker, leaves, is_known } = policy.place(&ask, &self.fleet);
        assert!(self.fleet.takes(worker, &ask), "placed on a worker that doesn't take it");
        let expected_tokens = self.fleet.uncached_tokens(worker, &ask);
        self.tally.rebinds += u64::from(ask.last.is_some_and(|last| last != worker));
        policy.hear(&Heard::Sent { ask: &ask, worker, leaves, now: self.now }, &self.fleet);
        self.last.insert(session, worker);
        self.turns[turn].worker = worker;
        self.turns[turn].leaves = leaves;
        self.turns[turn].ahead_tokens = 0;
        let job = Job {
            turn,
            play,
            input_tokens: facts.input_tokens,
            output_tokens: facts.output_tokens,
            expected_tokens,
            chain,
            is_ahead: false,
        };
        if !self.engines[worker].could_hold(&job, &self.pools[self.pool_of(worker)]) {
            self.tally.dropped += 1;
            policy.hear(&Heard::Ended { turn, session, worker, now: self.now }, &self.fleet);
            self.follow(play);
            return;
        }
        for before in self.sessions.workers_of(play) {
            if before != worker {
                let pool = self.pool_of(before);
                self.sessions.unpin(play, before, &mut self.pools[pool]);
            }
        }
        self.sessions.sent(play, worker);
        self.arrive(worker, job, is_known);
        self.go_on(worker, policy);
    }

    /// Lets the engine start the work that it has room for.
    fn go_on(&mut self, worker: usize, policy: &mut dyn Policy) {
        let pool = self.pool_of(worker);
        loop {
            let engine = &mut self.engines[worker];
            if let Some(until) = engine.step(self.now, &mut self.pools[pool]) {
                self.schedule(until, Event::ChunkDone { worker, life: self.lives[worker] });
            }
            let engine = &self.engines[worker];
            // If only pins hold blocks, the oldest pin is dropped by force.
            if engine.waiting() == 0 || engine.is_running() {
                break;
            }
            self.tally.wedges += 1;
            assert!(
                self.sessions.release_oldest(worker, &mut self.pools[pool]),
                "an engine without turns and pins has room"
            );
        }
        let removed = self.engines[worker].take_removed(&mut self.pools[pool]);
        self.tell_blocks(worker, vec![], removed, policy);
        self.look(worker, policy);
    }

    fn begin(&mut self, worker: usize, begun: Begun, policy: &mut dyn Policy) {
        let Begun { job, matched_tokens, stored, done_at } = begun;
        let turn = &mut self.turns[job.turn];
        if !turn.answered {
            turn.answered = true;
            self.tally.ttft.push(self.now - turn.arrived);
            self.tally.input_tokens += job.input_tokens;
            self.tally.matched_tokens += matched_tokens.saturating_sub(turn.ahead_tokens);
        }
        self.tally.prefilled_tokens[worker] += job.input_tokens - matched_tokens;
        let leaves = turn.leaves.take();
        let (number, play, session) = (job.turn, job.play, self.session(job.play));
        self.turns[number].running = Some(job);
        self.schedule(done_at, Event::TurnDone { turn: number, worker, life: self.lives[worker] });
        self.tell_blocks(worker, stored, vec![], policy);
        let turn = number;
        policy.hear(&Heard::Began { turn, session, worker, now: self.now }, &self.fleet);
        if let Some(left) = leaves.filter(|_| self.options.close == Close::Free) {
            self.close_at(play, left, policy);
        }
    }

    fn end(&mut self, turn: usize, worker: usize, policy: &mut dyn Policy) {
        let job = self.turns[turn].running.take().expect("a turn that ends has run");
        let session = self.session(job.play);
        self.tally.ended += 1;
        let last = !self.corpus.timed && self.plays.is_last(job.play);
        let pool = self.pool_of(worker);
        if let Some(foresight) = &mut self.foresees {
            let one = self.plays.get(job.play);
            foresight.note(one.script, one.turn, one.pass, self.now, &mut self.pools[pool]);
        }
        let engine = &mut self.engines[worker];
        self.sessions.ended(&job, worker, engine, &mut self.pools[pool]);
        policy.hear(&Heard::Ended { turn, session, worker, now: self.now }, &self.fleet);
        if last {
            for at in self.faults.close(self.now) {
                self.schedule(at, Event::Close { play: job.play });
            }
        }
        self.go_on(worker, policy);
        self.follow(job.play);
    }

    /// Schedules the events that follow the end of the play's turn.
    fn follow(&mut self, play: usize) {
        for due in self.plays.ended(play, self.now) {
            self.due(due);
        }
    }

    fn close(&mut self, play: usize, policy: &mut dyn Policy) {
        let session = self.session(play);
        match self.options.close {
            Close::Free => {
                self.tally.closed += 1;
                for worker in self.sessions.workers_of(play) {
                    self.close_at(play, worker, policy);
                }
            }
            Close::None if self.tells_ends => {}
            Close::None => return,
        }
        policy.hear(&Heard::Closed { session, now: self.now }, &self.fleet);
    }

    fn close_at(&mut self, play: usize, worker: usize, policy: &mut dyn Policy) {
        let pool = self.pool_of(worker);
        self.sessions.close(play, &self.corpus, worker, &self.plays, &mut self.pools[pool]);
        self.go_on(worker, policy);
    }

    fn pool_of(&self, worker: usize) -> usize {
        worker % self.pools.len()
    }

    /// Returns the workers that share a pool with this worker, itself included.
    fn sharing(&self, worker: usize) -> Range<usize> {
        if self.pools.len() == 1 { 0..self.engines.len() } else { worker..worker + 1 }
    }

    fn session(&self, play: usize) -> usize {
        self.corpus.scripts[self.plays.get(play).script].continues.unwrap_or(play)
    }

    /// Updates the facts of a worker that the policy may use.
    fn look(&mut self, worker: usize, policy: &mut dyn Policy) {
        let engine = &self.engines[worker];
        let pool = &self.pools[self.pool_of(worker)];
        let seen = &mut self.fleet.workers[worker];
        seen.outstanding = engine.turns();
        seen.pending_tokens = engine.pending_tokens();
        seen.backlog_tokens = engine.backlog_tokens(self.now);
        seen.active_blocks = pool.used();
        // An unlimited pool is reported as one that has room.
        let left = seen.pool_blocks.saturating_sub(pool.used());
        seen.free_blocks = pool.free().min(left);
        policy.hear(&Heard::Load { worker, now: self.now }, &self.fleet);
    }
}
