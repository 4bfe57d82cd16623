//! The simulated world: virtual time, the events that are due, and everything that takes part.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use fastrand::Rng;
use worker_agent::{guard::Guards, session::TrimPlan};

use super::{
    RunCounts,
    calls::{CallAnswer, Task},
    engine::{CallId, Command, Rank, RankEvent, TurnId},
    journal::Journal,
    plan::Plan,
    shares::PrincipalViews,
    shell::AgentProcess,
    shim::{Shim, ShimRequest},
    trace::RunTrace,
    trimmer::Trimmer,
    turns::{Ended, Turn},
    users::User,
    weights::{Control, KvAges},
};

/// The time after the last client by which the engine has ended what it ends by itself. It covers a
/// probe's backstop, and a session's longest idle time and turn. The engine's backstop for sessions
/// is far longer.
const OVER_AFTER: Duration = Duration::from_secs(300);

/// What happens at a point of virtual time.
#[derive(Debug)]
pub(super) enum Event {
    UserActs(usize),
    TurnArrives(TurnId),
    BodyRead(TurnId),
    TurnSent(TurnId),
    TurnReachesEngine(TurnId),
    TurnEnds(TurnId, Box<Ended>),
    ClientLeaves(TurnId),
    ReplyArrives(TurnId),
    AbortAgain(TurnId),
    ConnectionBreaks(TurnId),
    CallReachesEngine(CallId),
    CallAnswered(CallId, CallAnswer),
    EngineNotices {
        instance: u64,
        rid: String,
    },
    RankWakes {
        instance: u64,
        rank: usize,
    },
    EngineStarts,
    AgentStarts,
    HandsOver(u64),
    AgentWakes(u64),
    /// The agent's follower checks the engine.
    CheckEngine(u64),
    Sampled {
        epoch: u64,
        instance: u64,
        loads: Vec<(u64, u64)>,
    },
    /// The shim reports, a frame of it arrives at the agent, a request of the agent arrives at it,
    /// and it carries requests out.
    ShimReports(u64),
    FrameArrives(u64),
    RequestArrives {
        epoch: u64,
        request: ShimRequest,
    },
    ShimPass {
        epoch: u64,
        dp_rank: u32,
    },
    /// Messages between the shim's trimmer and the agent.
    Planned {
        instance: u64,
        planned: TrimPlan,
    },
    Asks {
        instance: u64,
        question: u64,
        planned: TrimPlan,
    },
    Answered {
        question: u64,
        run: Option<(String, u64)>,
    },
    Fault,
    StrangerLeaves {
        instance: u64,
        id: String,
    },
    /// A call that changes the weights, or flushes, looks whether anything runs in the engine.
    Controlled(Control),
    Tick,
    /// Clients stop, and faults stop too.
    Calm,
}

/// The engine's process. There is none while the engine is down.
#[derive(Debug)]
pub(super) struct EngineProcess {
    pub(super) instance: u64,
    pub(super) ranks: Vec<Rank>,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) plan: Plan,
    base: Instant,
    pub(super) now: Duration,
    due: BTreeMap<(Duration, u64), Event>,
    numbers: u64,
    pub(super) engine: Option<EngineProcess>,
    pub(super) trimmer: Trimmer,
    pub(super) shim: Shim,
    pub(super) instances: u64,
    pub(super) agent: Option<AgentProcess>,
    pub(super) epochs: u64,
    pub(super) journal: Journal,
    /// Calls without an answer so far, each with the epoch of the agent process that waits.
    pub(super) calls: BTreeMap<CallId, (u64, Task)>,
    pub(super) turns: BTreeMap<TurnId, Turn>,
    pub(super) users: Vec<User>,
    /// Closes that the agent asked for: since when, and how often the engine said that a turn runs
    /// in the session.
    pub(super) closing: BTreeMap<String, (Duration, u32)>,
    /// Incarnations whose close the engine has confirmed.
    pub(super) confirmed: BTreeSet<String>,
    /// Incarnations in which a meddler ran a turn, and the number of the agent's own answers since
    /// then.
    pub(super) meddled: BTreeMap<String, u32>,
    /// Incarnations to which the engine has appended a delta.
    pub(super) appended_to: BTreeSet<String>,
    pub(super) strangers: BTreeSet<String>,
    pub(super) kv_ages: KvAges,
    /// When the agent last let turns go on that it had held back.
    pub(super) held_until: Duration,
    /// What each principal had before the newest call of the table.
    pub(super) views_before: PrincipalViews,
    pub(super) calm: bool,
    pub(super) trace: RunTrace,
    pub(super) counts: RunCounts,
}

impl World {
    pub(super) fn new(seed: u64, guards: Guards, base: Instant, echo: Option<fn(&str)>) -> World {
        let mut rng = Rng::with_seed(seed);
        let mut plan = Plan::new(&mut rng, guards);
        plan.faults.controls = seed.is_multiple_of(3);
        plan.faults.demotions = seed % 8 == 7;
        if seed % 4 == 3 {
            plan.add_host_tier(seed / 4);
        }
        World {
            users: (0..plan.users).map(|number| User::new(number, &plan, &mut rng)).collect(),
            rng,
            plan,
            base,
            now: Duration::ZERO,
            due: BTreeMap::new(),
            numbers: 0,
            engine: None,
            trimmer: Trimmer::default(),
            shim: Shim::default(),
            instances: 0,
            agent: None,
            epochs: 0,
            journal: Journal::default(),
            calls: BTreeMap::new(),
            turns: BTreeMap::new(),
            closing: BTreeMap::new(),
            confirmed: BTreeSet::new(),
            meddled: BTreeMap::new(),
            appended_to: BTreeSet::new(),
            strangers: BTreeSet::new(),
            kv_ages: KvAges::default(),
            held_until: Duration::ZERO,
            views_before: PrincipalViews::new(),
            calm: false,
            trace: RunTrace::new(echo),
            counts: RunCounts::default(),
        }
    }

    /// Runs until everything is over. Panics at the first broken promise.
    pub(super) fn run(&mut self) {
        let plan = format!("{:?}", self.plan);
        self.note(|| plan);
        self.engine_starts();
        self.agent_starts();
        for user in 0..self.users.len() {
            let start = self.between(50, 2_000);
            self.schedule(start, Event::UserActs(user));
        }
        let calm = self.plan.acts_for;
        self.schedule(calm, Event::Calm);
        self.schedule(Duration::from_secs(1), Event::Tick);
        self.schedule(Duration::from_millis(700), Event::Fault);
        while let Some(((at, _), event)) = self.due.pop_first() {
            self.now = at;
            self.handle(event);
            self.check();
            if self.is_over() {
                return self.check_end();
            }
        }
    }

    /// Returns the virtual time as an `Instant`, for the table.
    pub(super) fn instant(&self) -> Instant {
        self.base + self.now
    }

    pub(super) fn schedule(&mut self, after: Duration, event: Event) {
        let number = self.number();
        self.due.insert((self.now + after, number), event);
    }

    /// Returns a number that is used only once.
    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Returns a random time between two bounds in milliseconds. It has microseconds, so that few
    /// events coincide.
    pub(super) fn between(&mut self, from_ms: u64, to_ms: u64) -> Duration {
        Duration::from_micros(self.rng.u64(from_ms * 1000..=to_ms * 1000))
    }

    /// Returns the time that a message is on the wire.
    pub(super) fn latency(&mut self) -> Duration {
        if self.rng.u32(..20) == 0 { self.between(10, 200) } else { self.between(0, 8) }
    }

    /// Returns true with a chance of `per_mille` thousandths; always false once the world is calm.
    pub(super) fn odds(&mut self, per_mille: u32) -> bool {
        !self.calm && per_mille > 0 && self.rng.u32(..1000) < per_mille
    }

    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        self.trace.add(self.now, &text());
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::UserActs(user) => self.user_acts(user),
            Event::TurnArrives(turn) => self.turn_arrives(turn),
            Event::BodyRead(turn) => self.body_read(turn),
            Event::TurnSent(turn) => self.turn_sent(turn),
            Event::TurnReachesEngine(turn) => self.turn_reaches_engine(turn),
            Event::TurnEnds(turn, ended) => self.turn_ends(turn, *ended),
            Event::ClientLeaves(turn) => self.client_leaves(turn),
            Event::ReplyArrives(turn) => self.reply_arrives(turn),
            Event::AbortAgain(turn) => self.abort_again(turn),
            Event::ConnectionBreaks(turn) => self.connection_breaks(turn),
            Event::CallReachesEngine(call) => self.call_reaches_engine(call),
            Event::CallAnswered(call, answer) => self.call_answered(call, answer),
            Event::EngineNotices { instance, rid } => {
                if self.is_instance(instance) {
                    self.note(|| format!("engine notices that {rid} has no client"));
                    self.abort_inside(&rid);
                }
            }
            Event::RankWakes { instance, rank } => {
                if self.is_instance(instance) {
                    self.advance(rank);
                }
            }
            Event::EngineStarts => self.engine_starts(),
            Event::AgentStarts => self.agent_starts(),
            Event::HandsOver(epoch) => self.hands_over(epoch),
            Event::AgentWakes(epoch) => self.agent_wakes(epoch),
            Event::CheckEngine(epoch) => self.check_engine(epoch),
            Event::Sampled { epoch, instance, loads } => self.sampled(epoch, instance, &loads),
            Event::ShimReports(epoch) => self.shim_reports(epoch),
            Event::FrameArrives(epoch) => {
                if self.is_epoch(epoch) {
                    self.frame_arrives();
                }
            }
            Event::RequestArrives { epoch, request } => self.request_arrives(epoch, request),
            Event::ShimPass { epoch, dp_rank } => self.shim_pass(epoch, dp_rank),
            Event::Planned { instance, planned } => self.plan_heard(instance, &planned),
            Event::Asks { instance, question, planned } => {
                self.deliver_question(instance, question, &planned);
            }
            Event::Answered { question, run } => self.deliver_answer(question, run),
            Event::Fault => self.fault(),
            Event::StrangerLeaves { instance, id } => self.stranger_leaves(instance, &id),
            Event::Controlled(control) => self.controlled(control),
            Event::Tick => self.tick(),
            Event::Calm => self.becomes_calm(),
        }
    }

    pub(super) fn is_instance(&self, instance: u64) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.instance == instance)
    }

    /// Gives a command to one rank.
    pub(super) fn push(&mut self, rank: usize, command: Command) {
        if let Some(engine) = &mut self.engine {
            engine.ranks[rank].push(command);
            self.advance(rank);
        }
    }

    /// Gives a command to every rank.
    pub(super) fn push_all(&mut self, mut command: impl FnMut(usize) -> Command) {
        for rank in 0..self.plan.ranks as usize {
            self.push(rank, command(rank));
        }
    }

    /// Aborts a turn as the engine's front process does, which ignores an id that it doesn't know.
    pub(super) fn abort_inside(&mut self, rid: &str) {
        let knows = |engine: &EngineProcess| engine.ranks.iter().any(|rank| rank.knows(rid));
        if self.engine.as_ref().is_some_and(knows) {
            self.push_all(|_| Command::Abort(rid.to_owned()));
        }
    }

    /// Lets a rank do what is due.
    pub(super) fn advance(&mut self, rank: usize) {
        let Some(engine) = &mut self.engine else { return };
        let instance = engine.instance;
        let before = engine.ranks[rank].wake;
        let said = engine.ranks[rank].advance(self.now);
        let wake = engine.ranks[rank].wake;
        if wake != before
            && let Some(wake) = wake
        {
            let after = wake.saturating_sub(self.now);
            self.schedule(after, Event::RankWakes { instance, rank });
        }
        self.check_rank(rank);
        for said in said {
            match said {
                RankEvent::Entered(turn) => self.entered(rank, turn),
                RankEvent::Ended { turn, output, tokens } => {
                    self.engine_ended(turn, *output, tokens)
                }
                RankEvent::Opened { id, call, done } => {
                    if done {
                        self.trimmer.opened(&id);
                    }
                    let answer = if done { CallAnswer::Yes } else { CallAnswer::No };
                    self.engine_answers(call, answer);
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        let Some(agent) = &self.agent else { return false };
        let table = &agent.table;
        self.calm
            && self.turns.values().all(Turn::is_over)
            && table.sessions().iter().count() == 0
            && table.unfinished().closes == 0
            && self.calls.is_empty()
            && self.engine.is_some()
            && agent.follows()
            && self.strangers.is_empty()
            && self.is_clean(agent)
    }

    /// Whether the agent has forgotten foreign sessions, and the probes of closes have left the
    /// engine.
    fn is_clean(&self, agent: &AgentProcess) -> bool {
        let forgot = |rank| agent.table.totals(rank).foreign_tokens == 0;
        let core = |rank: &Rank| rank.core.facts().sessions.is_empty();
        let probes = self.engine.iter().flat_map(|engine| &engine.ranks).all(core);
        let later = self.plan.acts_for + OVER_AFTER < self.now;
        (0..self.plan.ranks).all(forgot) && (probes || later)
    }
}
