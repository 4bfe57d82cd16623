//! Simulates one router's state with many workers, sessions and turns; see `tests/scale/run`.
//!
//! The router's own code decodes the agents' messages, applies them, publishes snapshots, and
//! places turns, all on one thread. What is left out: HTTP, and the blocks of prompts, whose index
//! has a limit of its own (`limits.overlap_bytes_max`).

use std::{
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Parser;
use contract::{
    id::SessionKey,
    v1::{self, load_event::Event},
};
use prost::Message as _;
use router::{
    config::Config,
    fleet::{
        load_stream::LoadStreamChecker,
        snapshot::Snapshot,
        state::State,
        worker::{AgentKey, WorkerRef},
    },
    placement::{PairUse, PlacementRequest, Sticky, place},
    sessions::{bindings::Bindings, status},
};
use serde::Serialize;
use service::clock::now;

/// Bounds of the figures, whatever the numbers are.
const MEMORY_BYTES_MAX: u64 = 2 << 30;
const DECISION_P99_MAX: Duration = Duration::from_micros(50);
const RELEARN_MAX: Duration = Duration::from_secs(5);
const CORES_MAX: f64 = 1.0;

/// Load reports of one agent in a second, with the default interval.
const REPORTS_PER_S: usize = 2;
/// Snapshots published in a second. The view task publishes one for each batch of messages that
/// waited; with more there are fewer, larger batches.
const SNAPSHOTS_PER_S: usize = 1_000;
/// Most sessions in one message of a session table.
const SESSIONS_PER_PART: usize = 1_000;
/// One of so many turns begins a session; workers are compared for it.
const TURNS_PER_SESSION: usize = 20;

#[derive(Debug, Parser)]
struct Options {
    /// Workers, each with an agent
    #[arg(long, default_value_t = 1_024, value_parser = clap::value_parser!(u64).range(1..=1024))]
    workers: u64,
    /// Sessions of all workers
    #[arg(long, default_value_t = 1_000_000)]
    sessions: u64,
    /// Turns that begin in a second
    #[arg(long, default_value_t = 20_000)]
    turns_per_s: u64,
    /// Simulated seconds
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Prints JSON
    #[arg(long)]
    json: bool,
}

/// What the simulation saw.
#[derive(Debug, Serialize)]
struct Figures {
    workers: usize,
    sessions: usize,
    turns_per_s: usize,
    /// Resident memory of the process with the state of all sessions.
    memory_bytes: u64,
    /// Time to decode and apply every agent's description, sessions and first report.
    relearn_s: f64,
    /// Processor time for the agents' messages of one second, as a share of a core.
    messages_cores: f64,
    /// Processor time for the decisions of one second, as a share of a core.
    decisions_cores: f64,
    decision_us_p50: f64,
    decision_us_p99: f64,
    /// The same for those turns that begin a session, for which all workers are compared.
    newcomer_us_p50: f64,
    newcomer_us_p99: f64,
}

fn main() -> ExitCode {
    let options: Options = match service::command_line::parse() {
        Ok(options) => options,
        Err(status) => return status,
    };
    match simulate(&options) {
        Ok(figures) => report(&options, &figures),
        Err(error) => {
            complain(&format!("berth-scale: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// A simulated fleet, and the router's state of it.
struct Fleet {
    workers: usize,
    sessions: usize,
    state: State,
    bindings: Bindings,
    view: Snapshot,
    /// The checker of each agent's stream, and the number of its next event.
    streams: Vec<(LoadStreamChecker, u64)>,
}

fn simulate(options: &Options) -> anyhow::Result<Figures> {
    let workers = usize::try_from(options.workers)?;
    let sessions = usize::try_from(options.sessions)?;
    let turns_per_s = usize::try_from(options.turns_per_s)?;
    let seconds = usize::try_from(options.seconds.max(1))?;
    let mut fleet = Fleet::new(workers, sessions);
    let messages = fleet.first_messages();
    let began = now();
    for (agent, message) in messages {
        fleet.receive(agent, &message)?;
    }
    fleet.view = fleet.state.snapshot();
    let relearn = began.elapsed();
    // A router that has served every session has a binding of each, too.
    for number in 0..sessions {
        fleet.bindings.begin_turn(&key(number), fleet.worker_of(number), false, now())?;
        fleet.bindings.end_turn(&key(number), now());
    }
    let memory_bytes = resident_bytes()?;
    let (mut decided, mut newcomers) = (vec![], vec![]);
    let (mut on_messages, mut on_decisions) = (Duration::ZERO, Duration::ZERO);
    for second in 0..seconds {
        let began = now();
        fleet.decide(second * turns_per_s, turns_per_s, &mut decided, &mut newcomers)?;
        on_decisions += began.elapsed();
        let messages = fleet.messages_of_a_second(second * turns_per_s, turns_per_s);
        let per_snapshot = messages.len().div_ceil(SNAPSHOTS_PER_S);
        let began = now();
        for batch in messages.chunks(per_snapshot) {
            for (agent, message) in batch {
                fleet.receive(*agent, message)?;
            }
            fleet.view = fleet.state.snapshot();
        }
        on_messages += began.elapsed();
    }
    let per_second = |time: Duration| time.as_secs_f64() / seconds as f64;
    Ok(Figures {
        workers,
        sessions,
        turns_per_s,
        memory_bytes,
        relearn_s: relearn.as_secs_f64(),
        messages_cores: per_second(on_messages),
        decisions_cores: per_second(on_decisions),
        decision_us_p50: percentile_us(&mut decided, 50),
        decision_us_p99: percentile_us(&mut decided, 99),
        newcomer_us_p50: percentile_us(&mut newcomers, 50),
        newcomer_us_p99: percentile_us(&mut newcomers, 99),
    })
}

impl Fleet {
    fn new(workers: usize, sessions: usize) -> Self {
        let controls = (0..workers).map(|agent| format!("http://host{agent}:31001")).collect();
        let mut config = Config { workers: controls, ..Config::default() };
        // Room for the sessions that begin meanwhile.
        config.limits.sessions_max = sessions + sessions / 4 + 1_000_000;
        let state = State::new(&config);
        let bindings = Bindings::new(config.limits.sessions_max, Duration::from_secs(3_600));
        let stream = || (LoadStreamChecker::new(config.limits.sessions_max), 0);
        let streams = (0..workers).map(|_| stream()).collect();
        Self { workers, sessions, view: state.snapshot(), state, bindings, streams }
    }

    fn worker_of(&self, session: usize) -> WorkerRef {
        WorkerRef { agent: AgentKey::first(session % self.workers), dp_rank: 0 }
    }

    /// Encodes an agent's next message.
    fn encode(&mut self, agent: usize, event: Event) -> (usize, Vec<u8>) {
        let sequence = self.streams[agent].1;
        self.streams[agent].1 += 1;
        (agent, v1::LoadEvent { epoch: 1, sequence, event: Some(event) }.encode_to_vec())
    }

    /// Decodes, checks and applies an agent's message, as the router does.
    fn receive(&mut self, agent: usize, message: &[u8]) -> anyhow::Result<()> {
        let event = v1::LoadEvent::decode(message)?;
        if let Some(update) = self.streams[agent].0.accept(event)? {
            let warning = self.state.apply(AgentKey::first(agent), update, now());
            anyhow::ensure!(warning.is_none(), "{}", warning.unwrap_or_default());
        }
        Ok(())
    }

    /// Returns what a router gets that has just started: each agent's description, sessions and a
    /// report.
    fn first_messages(&mut self) -> Vec<(usize, Vec<u8>)> {
        let mut messages = vec![];
        for agent in 0..self.workers {
            messages.push(self.encode(agent, Event::Description(description(agent))));
            let own: Vec<usize> = (agent..self.sessions).step_by(self.workers).collect();
            let parts = own.chunks(SESSIONS_PER_PART);
            let count = parts.len().max(1);
            let mut tables: Vec<v1::SessionTable> = parts
                .map(|part| v1::SessionTable {
                    sessions: part.iter().map(|number| session(*number, false)).collect(),
                    last: false,
                })
                .collect();
            tables.resize_with(count, v1::SessionTable::default);
            tables[count - 1].last = true;
            for table in tables {
                messages.push(self.encode(agent, Event::Sessions(table)));
            }
            messages.push(self.encode(agent, Event::Report(load_report(agent))));
        }
        messages
    }

    /// Returns the messages of all agents in a second in which these turns run: the reports, and
    /// each turn's session as it runs and as it is idle again.
    fn messages_of_a_second(&mut self, first: usize, turns: usize) -> Vec<(usize, Vec<u8>)> {
        let mut messages = vec![];
        for _ in 0..REPORTS_PER_S {
            for agent in 0..self.workers {
                messages.push(self.encode(agent, Event::Report(load_report(agent))));
            }
        }
        for turn in first..first + turns {
            let number = self.session_of(turn);
            for is_running in [true, false] {
                let session = session(number, is_running);
                let change = Some(v1::session_change::Change::Upsert(session));
                let event = Event::Change(v1::SessionChange { change });
                messages.push(self.encode(number % self.workers, event));
            }
        }
        messages
    }

    /// Returns the session of a turn: mostly one that is known, now and then a new one.
    fn session_of(&self, turn: usize) -> usize {
        if turn.is_multiple_of(TURNS_PER_SESSION) {
            return self.sessions + turn / TURNS_PER_SESSION;
        }
        // Steps of a prime visit sessions in no order of memory.
        turn * 611_953 % self.sessions.max(1)
    }

    /// Places turns, and adds the time of each.
    fn decide(
        &mut self,
        first: usize,
        turns: usize,
        decided: &mut Vec<Duration>,
        newcomers: &mut Vec<Duration>,
    ) -> anyhow::Result<()> {
        for turn in first..first + turns {
            let number = self.session_of(turn);
            let key = key(number);
            let began = now();
            let is_new = self.decide_one(&key, began)?;
            let took = began.elapsed();
            decided.push(took);
            if is_new {
                newcomers.push(took);
            }
            self.bindings.end_turn(&key, began);
        }
        Ok(())
    }

    /// Places one turn. Returns whether it began its session.
    fn decide_one(&mut self, key: &SessionKey, at: Instant) -> anyhow::Result<bool> {
        let binding = self.bindings.get(key, at);
        let status = status::determine_status(key, &self.view, binding, at);
        let worker = status.owned_worker();
        let sticky =
            worker.map(|worker| Sticky { last_turn_ended: Some(at), ..Sticky::new(worker) });
        let request = PlacementRequest {
            digest: key.digest(),
            expects_more_turns: true,
            sticky,
            conversations: None,
            prefer: None,
            prompt: None,
            retention: None,
            model: None,
            weights: None,
            exclude: None,
            pairs: PairUse::May,
        };
        let placement = place(&request, &self.view, at)?;
        self.bindings.begin_turn(key, black_box(placement.worker), false, at)?;
        Ok(worker.is_none())
    }
}

fn key(session: usize) -> SessionKey {
    SessionKey::new("principal", format!("session-{session:012}")).expect("the id is short")
}

fn figure(value: usize) -> Option<v1::Figure> {
    let source = v1::Source::Shim.into();
    Some(v1::Figure { value: value as u64, source, age_ms: 3 })
}

fn description(agent: usize) -> v1::Description {
    v1::Description {
        agent_id: format!("agent-{agent}"),
        epoch: 1,
        data_port: 31_000,
        engine: Some(v1::EngineFacts {
            version: "0.5.23".to_owned(),
            models: vec!["model".to_owned()],
            page_tokens: 64,
            context_tokens: 131_072,
            radix_sessions: true,
            instance: agent.to_string(),
            disaggregation: "null".to_owned(),
            ..v1::EngineFacts::default()
        }),
        ranks: vec![v1::Rank { pool_tokens: 1_000_000, rows: 4_096, ..v1::Rank::default() }],
        retentions: vec![v1::Retention::Tagged.into(), v1::Retention::None.into()],
        ..v1::Description::default()
    }
}

fn session(number: usize, is_running: bool) -> v1::Session {
    let key = key(number);
    v1::Session {
        key: Some((&key).into()),
        retention: v1::Retention::Tagged.into(),
        state: if is_running { v1::SessionState::Running } else { v1::SessionState::Idle }.into(),
        turns: 3,
        turns_running: u32::from(is_running),
        resident_tokens: figure(30_000),
        idle_ms: if is_running { 0 } else { 1_000 * (number as u64 % 600) },
        whole_history: true,
        ..v1::Session::default()
    }
}

fn load_report(agent: usize) -> v1::LoadReport {
    let rank = v1::RankLoad {
        turns_running: u32::try_from(agent % 17).expect("a small number"),
        turns_running_max: 64,
        pool_used_tokens: figure(agent * 977 % 900_000),
        pool_total_tokens: figure(1_000_000),
        pool_available_tokens: figure(10_000),
        pool_evictable_tokens: figure(90_000),
        prefill_tokens_per_s: figure(20_000),
        prefill_backlog_tokens: figure(agent * 7_919 % 20_000),
        sessions: 1_000,
        ..v1::RankLoad::default()
    };
    v1::LoadReport { interval_ms: 500, ranks: vec![rank], ..v1::LoadReport::default() }
}

/// Returns the resident memory of this process.
fn resident_bytes() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib = line.split_whitespace().nth(1).context("no figure")?;
    Ok(kib.parse::<u64>()? * 1024)
}

fn percentile_us(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    let at = (times.len() * percent / 100).min(times.len().saturating_sub(1));
    times.get(at).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}

#[expect(clippy::print_stdout, reason = "the figures are its output")]
fn report_text(figures: &Figures, is_json: bool) {
    if is_json {
        println!("{}", serde_json::to_string(figures).expect("figures make JSON"));
        return;
    }
    let Figures { workers, sessions, turns_per_s, .. } = figures;
    println!("{workers} workers, {sessions} sessions, {turns_per_s} turns a second");
    println!(
        "  memory                 {:>8.0} MiB",
        figures.memory_bytes as f64 / f64::from(1 << 20)
    );
    println!("  relearn after a start  {:>8.2} s", figures.relearn_s);
    println!("  agents' messages       {:>8.3} cores", figures.messages_cores);
    println!("  decisions              {:>8.3} cores", figures.decisions_cores);
    let (p50, p99) = (figures.decision_us_p50, figures.decision_us_p99);
    println!("  decision               {p50:>8.1} µs p50, {p99:.1} µs p99");
    let (p50, p99) = (figures.newcomer_us_p50, figures.newcomer_us_p99);
    println!("    of a session's begin {p50:>8.1} µs p50, {p99:.1} µs p99");
}

#[expect(clippy::print_stderr, reason = "a person reads it")]
fn complain(text: &str) {
    eprintln!("{text}");
}

/// Prints the figures, and checks them against the bounds.
fn report(options: &Options, figures: &Figures) -> ExitCode {
    report_text(figures, options.json);
    let us = DECISION_P99_MAX.as_secs_f64() * 1e6;
    let exceeded = [
        ("memory", figures.memory_bytes > MEMORY_BYTES_MAX),
        ("relearning", figures.relearn_s > RELEARN_MAX.as_secs_f64()),
        ("decisions", figures.decision_us_p99 > us),
        ("messages", figures.messages_cores > CORES_MAX),
    ];
    let mut status = ExitCode::SUCCESS;
    for (what, _) in exceeded.iter().filter(|(_, is_exceeded)| *is_exceeded) {
        complain(&format!("{what}: above the bound"));
        status = ExitCode::FAILURE;
    }
    status
}
