//! Plays a plan at an engine, with Berth before it or without.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use harness::web::Web;
use parking_lot::Mutex;
use replay::{
    Api, ReplayOptions, SessionOpen,
    client::{CallFailure, Client, MeasuredTurn, TurnHeaders},
    pace,
};
use serde_json::json;
use tokio::{sync::Semaphore, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    arms::{Access, Arm},
    outcome::{Ending, Outcome, PhysicalUsage, TurnOutcome},
    watch::Watch,
    workload::{AgentPlan, Plan, Scenario, TreePlan, TurnPlan},
};

/// The time between two looks at whether any turn gets on.
const LOOK: Duration = Duration::from_millis(250);
/// A turn is given up after so many times [`Target::stall_max`]: by then a wedge has been noticed.
const TURN_STALLS: u32 = 6;
/// How long an engine that computes has to answer one token.
const PROBE: Duration = Duration::from_secs(5);
/// How long KV may stay after the close of its session, with no turn meanwhile.
const FREED_WITHIN: Duration = Duration::from_secs(2);
/// The time in which all figures of a quiet engine have arrived. Shorter than sessions idle before
/// they are demoted.
const SETTLED: Duration = Duration::from_millis(400);
/// At the end of a run nobody is in a hurry, and a busy machine's figures come later.
const SETTLED_AT_END: Duration = Duration::from_millis(1500);
/// The most retries of a turn after a 429 with `Retry-After`.
const RETRIES_MAX: u32 = 2;
/// The priorities of a main agent's KV and of a subagent's. What has none is worth least.
const PRIORITIES: [i32; 2] = [0, -1];

/// Where a run goes.
#[derive(Debug, Clone)]
pub struct Target {
    /// The engine's URL.
    pub engine: String,
    /// The URL of a router before it.
    pub router: String,
    /// Tokens of the engine's pool.
    pub pool_tokens: u64,
    /// Tokens of a page of the pool.
    pub page_tokens: u64,
    /// How long no turn may get on before the engine is probed.
    pub stall_max: Duration,
}

#[derive(Debug, Default)]
struct Results {
    turns: Vec<TurnOutcome>,
    freed_ms: Vec<f64>,
    not_freed: usize,
    opens_refused: usize,
    given_up: usize,
    failures: BTreeMap<String, usize>,
    ending: Ending,
    /// At a wedge: what agents close after it is no more the engine's doing.
    physical: Option<PhysicalUsage>,
}

/// Whether turns get on.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Progress {
    /// When a turn was last answered, or began to wait alone.
    last: Instant,
    /// Turns that wait for an answer.
    waiting: usize,
}

/// What all agents of a run share.
struct Run {
    access: Access,
    target: Target,
    client: Client,
    web: Web,
    watch: Watch,
    results: Mutex<Results>,
    /// Cancelled when the engine is seen to be wedged or dead.
    stop: CancellationToken,
    progress: Mutex<Progress>,
    /// Whether turns of other trees may run at any time.
    is_crowded: bool,
    /// The beginning of the ids of sessions.
    id: String,
}

/// How an agent's turns find its KV.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Session {
    None,
    /// Turns carry the whole prompt.
    Whole(String),
    /// Turns carry only what the engine doesn't have.
    Delta(String),
    /// The same, at the engine itself.
    Bare(String),
}

/// Plays a plan. `turn_ended` is called after each turn.
pub async fn play(
    arm: Arm,
    (scenario, seed): (Scenario, u64),
    plan: Plan,
    target: Target,
    turn_ended: impl Fn() + Send + Sync + 'static,
) -> Outcome {
    let began = Instant::now();
    let planned = plan.turns();
    let url = if arm.access == Access::Bare { &target.engine } else { &target.router };
    let options = ReplayOptions {
        url: url.clone(),
        api: Api::Generate,
        timeout_s: (target.stall_max * TURN_STALLS).as_secs_f64(),
        ..ReplayOptions::default()
    };
    let web = Web::default();
    let run = Arc::new(Run {
        access: arm.access,
        client: Client::new(&options),
        watch: Watch::new(web.clone(), &target.router),
        web,
        results: Mutex::default(),
        stop: CancellationToken::new(),
        progress: Mutex::new(Progress { last: began, waiting: 0 }),
        is_crowded: plan.at_once > 1,
        id: options.run_id,
        target,
    });
    let all = async {
        run_trees(&run, plan, Arc::new(turn_ended)).await;
        if run.results.lock().turns.len() < planned {
            run.probe_for_end().await;
        }
        tokio::time::sleep(SETTLED_AT_END).await;
    };
    tokio::select! {
        () = all => {}
        () = run.watch_progress() => {}
        () = run.watch.look() => {}
    }
    let results = std::mem::take(&mut *run.results.lock());
    Outcome {
        scenario,
        arm: arm.name.to_owned(),
        seed,
        pool_tokens: run.target.pool_tokens,
        turns_lost: planned - results.turns.len(),
        turns: results.turns,
        physical: results.physical.or_else(|| run.watch.usage()),
        freed_ms: results.freed_ms,
        not_freed: results.not_freed,
        opens_refused: results.opens_refused,
        given_up: results.given_up,
        failures: results.failures,
        ending: results.ending,
        seconds: began.elapsed().as_secs_f64(),
        measured: measured(),
    }
}

type TurnEnded = Arc<dyn Fn() + Send + Sync>;

async fn run_trees(run: &Arc<Run>, plan: Plan, turn_ended: TurnEnded) {
    let places = Arc::new(Semaphore::new(plan.at_once));
    let mut trees = JoinSet::new();
    for (number, tree) in plan.trees.into_iter().enumerate() {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        let (run, turn_ended) = (Arc::clone(run), Arc::clone(&turn_ended));
        trees.spawn(async move {
            run_tree(&run, number, tree, &turn_ended).await;
            drop(place);
        });
    }
    trees.join_all().await;
}

/// Runs a main agent, and its subagents between its turns.
async fn run_tree(run: &Arc<Run>, number: usize, tree: TreePlan, turn_ended: &TurnEnded) {
    let TreePlan { main, subagents } = tree;
    let id = format!("{}-{number}", run.id);
    let mut agent = Agent::start(Arc::clone(run), id.clone(), false, main.closes).await;
    let mut batches = subagents.into_iter();
    for (batch, turn) in main.turns.into_iter().enumerate() {
        agent.turn(turn).await;
        turn_ended();
        if run.stop.is_cancelled() {
            break;
        }
        let mut beside = JoinSet::new();
        for (child, plan) in batches.next().into_iter().flatten().enumerate() {
            let (run, turn_ended) = (Arc::clone(run), Arc::clone(turn_ended));
            let id = format!("{id}-{batch}-{child}");
            beside.spawn(async move { run_subagent(run, id, plan, &turn_ended).await });
        }
        // The one that is left frees its KV alone.
        while let Some(ended) = beside.join_next().await {
            let Ok(agent) = ended else { continue };
            agent.end(beside.is_empty()).await;
        }
    }
    agent.end(false).await;
}

async fn run_subagent(run: Arc<Run>, id: String, plan: AgentPlan, turn_ended: &TurnEnded) -> Agent {
    let mut agent = Agent::start(run, id, true, plan.closes).await;
    for turn in plan.turns {
        agent.turn(turn).await;
        turn_ended();
    }
    agent
}

/// A conversation, with what it has of the engine.
struct Agent {
    run: Arc<Run>,
    session: Session,
    is_subagent: bool,
    closes: bool,
    turns: usize,
    /// All tokens of the conversation.
    context: Vec<u32>,
}

impl Agent {
    /// Opens the agent's session. It goes on without one that is refused.
    async fn start(run: Arc<Run>, id: String, is_subagent: bool, closes: bool) -> Self {
        let session = run.open(id).await;
        Self { run, session, is_subagent, closes, turns: 0, context: vec![] }
    }

    async fn turn(&mut self, plan: TurnPlan) {
        let run = Arc::clone(&self.run);
        let answered = async {
            tokio::time::sleep(plan.think).await;
            self.send(plan).await;
        };
        run.stop.run_until_cancelled(answered).await;
    }

    async fn send(&mut self, plan: TurnPlan) {
        let index = self.turns;
        self.turns += 1;
        let (known, since) = (self.context.len() as u64, Instant::now());
        self.context.extend_from_slice(&plan.new);
        let mut answer = self.try_send(&plan, since).await;
        if answer.is_err() && self.session != Session::None && !self.run.stop.is_cancelled() {
            // As an agent program does whose session is gone: it sends the whole history.
            self.close().await;
            self.run.results.lock().given_up += 1;
            answer = self.try_send(&plan, since).await;
        }
        let Ok(MeasuredTurn { finished, first_token, total, .. }) = answer else {
            self.context.truncate(usize::try_from(known).unwrap_or(usize::MAX));
            return;
        };
        self.context.extend_from_slice(&finished.reply.ids);
        let page = self.run.target.page_tokens;
        self.run.results.lock().turns.push(TurnOutcome {
            is_subagent: self.is_subagent,
            index,
            prompt_tokens: finished.reply.prompt_tokens,
            // The KV of an answer's last token is computed with the next prompt.
            known_tokens: known.saturating_sub(1) / page * page,
            cached_tokens: finished.cached_tokens.unwrap_or(0),
            ttft_ms: first_token.unwrap_or(total).as_secs_f64() * 1e3,
        });
    }

    async fn try_send(&self, plan: &TurnPlan, since: Instant) -> Result<MeasuredTurn, CallFailure> {
        let run = &self.run;
        let body = self.body(plan);
        let headers = match &self.session {
            Session::Whole(id) => Some((id, false)),
            Session::Delta(id) => Some((id, true)),
            Session::None | Session::Bare(_) => None,
        };
        let headers =
            headers.map(|(id, delta)| TurnHeaders { id, parent: None, last: false, delta });
        let mut tried = 0;
        loop {
            run.progress.lock().begin();
            let answer = run.client.send_turn(body.clone().into(), headers, since).await;
            run.progress.lock().end(answer.is_ok());
            let failure = match answer {
                Ok(measured) => return Ok(measured),
                Err(failure) => failure,
            };
            if let Some(wait) = retry_in(&failure, tried) {
                tried += 1;
                tokio::time::sleep(wait).await;
                continue;
            }
            run.count_failure("turn", &failure).await;
            return Err(failure);
        }
    }

    fn body(&self, plan: &TurnPlan) -> String {
        let sent = match &self.session {
            Session::None | Session::Whole(_) => &self.context,
            Session::Delta(_) | Session::Bare(_) => &plan.new,
        };
        let mut body = json!({
            "input_ids": sent,
            "sampling_params": {
                "max_new_tokens": plan.answer_tokens, "temperature": 0, "ignore_eos": true,
            },
            "stream": true,
        });
        if let Session::Bare(id) = &self.session {
            body["session_params"] = json!({ "id": id });
        }
        if self.run.access == Access::Prioritized {
            body["priority"] = PRIORITIES[usize::from(self.is_subagent)].into();
        }
        body.to_string()
    }

    /// Ends the agent. With `is_alone`, no other turn of the run is on its way, and the time until
    /// its KV is free is measured.
    async fn end(mut self, is_alone: bool) {
        if !self.closes || self.session == Session::None {
            return;
        }
        let run = Arc::clone(&self.run);
        if !is_alone || run.is_crowded || run.stop.is_cancelled() {
            self.close().await;
            return;
        }
        tokio::time::sleep(SETTLED).await;
        let before = run.watch.last().unwrap_or_default();
        let own = self.context.len() as f64 / run.target.pool_tokens as f64;
        let began = Instant::now();
        self.close().await;
        // Not all of it: what the pool had evicted before needn't be freed.
        let is_freed = run.watch.falls_to(before - own / 2.0, FREED_WITHIN).await;
        let mut results = run.results.lock();
        if is_freed {
            results.freed_ms.push(began.elapsed().as_secs_f64() * 1e3);
        } else {
            results.not_freed += 1;
        }
    }

    /// Closes the session. Later turns go without.
    async fn close(&mut self) {
        let closed = match std::mem::replace(&mut self.session, Session::None) {
            Session::None => return,
            Session::Whole(id) | Session::Delta(id) => self.run.client.close_session(&id).await,
            Session::Bare(id) => {
                self.run.at_engine("/close_session", json!({"session_id": id})).await
            }
        };
        if let Err(failure) = closed
            && !matches!(failure, CallFailure::Status { status: 404, .. })
        {
            self.run.count_failure("close", &failure).await;
        }
    }
}

impl Run {
    async fn open(&self, id: String) -> Session {
        if self.stop.is_cancelled() {
            return Session::None;
        }
        let kind = match self.access {
            Access::Unnamed | Access::Prioritized => return Session::None,
            Access::Bare => {
                let opening =
                    json!({"capacity_of_str_len": 1000, "session_id": id, "streaming": true});
                return match self.at_engine("/open_session", opening).await {
                    Ok(()) => Session::Bare(id),
                    Err(failure) => self.refused(&failure).await,
                };
            }
            Access::Session(kind) => kind,
        };
        let mut tried = 0;
        loop {
            match self.client.open_session(&id, kind.retention()).await {
                Ok(()) if kind == SessionOpen::Pinned => return Session::Delta(id),
                Ok(()) => return Session::Whole(id),
                // An agent doesn't wait for long: without a session it can go on at once.
                Err(failure) if tried > 0 => return self.refused(&failure).await,
                Err(failure) => match retry_in(&failure, tried) {
                    Some(wait) => tokio::time::sleep(wait.min(Duration::from_secs(1))).await,
                    None => return self.refused(&failure).await,
                },
            }
            tried += 1;
        }
    }

    async fn refused(&self, failure: &CallFailure) -> Session {
        self.results.lock().opens_refused += 1;
        self.count_failure("open", failure).await;
        Session::None
    }

    async fn at_engine(&self, path: &str, body: serde_json::Value) -> Result<(), CallFailure> {
        let url = format!("{}{path}", self.target.engine);
        let sent = self.web.post(&url, &[], &body);
        match tokio::time::timeout(PROBE, sent).await {
            Err(_) => Err(CallFailure::Timeout),
            Ok(Err(_)) => Err(CallFailure::Connect),
            Ok(Ok(answer)) if answer.status.is_success() => Ok(()),
            Ok(Ok(answer)) => {
                let status = answer.status.as_u16();
                Err(CallFailure::Status { status, retry_after: None })
            }
        }
    }

    /// Counts a failure. After one that an engine in order doesn't cause, it finds out whether the
    /// engine still runs.
    async fn count_failure(&self, call: &str, failure: &CallFailure) {
        *self.results.lock().failures.entry(format!("{call}_{failure}")).or_default() += 1;
        if matches!(failure, CallFailure::Status { status: 400..500, .. }) {
            return;
        }
        // A connection may break without the engine's end.
        if self.probe().await == Err(CallFailure::Connect)
            && self.probe().await == Err(CallFailure::Connect)
        {
            self.end(Ending::Died);
        }
    }

    /// Finds out whether an engine still answers that lost turns.
    async fn probe_for_end(&self) {
        match self.probe().await {
            Err(CallFailure::Timeout) => self.end(Ending::Wedged),
            Err(CallFailure::Connect) => self.end(Ending::Died),
            _ => {}
        }
    }

    /// Has the engine answer one token.
    async fn probe(&self) -> Result<(), CallFailure> {
        let probe = json!({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}});
        self.at_engine("/generate", probe).await
    }

    fn end(&self, ending: Ending) {
        if !self.stop.is_cancelled() {
            let mut results = self.results.lock();
            (results.ending, results.physical) = (ending, self.watch.usage());
            self.stop.cancel();
        }
    }

    /// Ends the run when turns wait, none gets on for a long time, and the engine doesn't answer
    /// one more token either. Never returns.
    async fn watch_progress(&self) {
        loop {
            tokio::time::sleep(LOOK).await;
            let before = *self.progress.lock();
            let is_stalled = before.waiting > 0 && before.last.elapsed() > self.target.stall_max;
            if is_stalled && !self.stop.is_cancelled() {
                let is_silent = self.probe().await == Err(CallFailure::Timeout);
                if is_silent && self.progress.lock().last == before.last {
                    self.end(Ending::Wedged);
                }
            }
        }
    }
}

impl Progress {
    fn begin(&mut self) {
        if self.waiting == 0 {
            self.last = Instant::now();
        }
        self.waiting += 1;
    }

    fn end(&mut self, is_answered: bool) {
        if is_answered {
            self.last = Instant::now();
        }
        self.waiting -= 1;
    }
}

/// Says where and when it was measured.
fn measured() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cpu = cpu.map_or("a CPU of no known name", |(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let seconds = i64::try_from(service::clock::unix_ns() / 1_000_000_000).unwrap_or_default();
    let date = chrono::DateTime::from_timestamp(seconds, 0).unwrap_or_default();
    format!("{}, on {cores} cores of {cpu}", date.format("%Y-%m-%d"))
}

fn retry_in(failure: &CallFailure, tried: u32) -> Option<Duration> {
    let CallFailure::Status { status, retry_after } = failure else { return None };
    pace::retry_in(*status, retry_after.as_deref(), tried, RETRIES_MAX)
}
