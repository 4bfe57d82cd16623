//! Stops, kills and restarts processes under load.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, anyhow, ensure};
use axum::body::Body;
use http::Method;
use rustix::process::Signal;
use serde_json::json;
use service::clock::now;
use tests::web::{Answer, Web};
use tokio::task::JoinSet;

use crate::{
    fleet::{Fleet, Place, Plan, credential},
    users::Users,
};

/// The longest time until a turn that can't be served is answered.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The longest turn under chaos: the time until a silent peer is noticed, and the turn itself.
const TURN_MAX: Duration = Duration::from_secs(15);

/// An engine that is stopped, as a debugger or a frozen host does it: new turns are refused within
/// [`ANSWER_MAX`] with the reason, and served again when the engine goes on.
pub(crate) async fn engine_stopped(place: Place) -> anyhow::Result<String> {
    let fleet = Fleet::start(place, &Plan::default()).await?;
    let users = Users::new(vec![fleet.url(0, "")]);
    users.work(Duration::from_secs(2)).await?;
    fleet.engines[0].signal(Signal::STOP)?;
    let stopped = now();
    let (key, url) = (credential("alice"), fleet.url(0, "/v1/completions"));
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 2 });
    let headers = [("authorization", key.as_str())];
    // Turns that were sent before the silence is noticed may hang; those after it may not.
    let refused = loop {
        let asked = now();
        let answer =
            tokio::time::timeout(Duration::from_secs(1), fleet.web.post(&url, &headers, &body))
                .await;
        if let Ok(Ok(answer)) = answer
            && answer.status == 503
        {
            ensure!(asked.elapsed() < Duration::from_secs(1), "the refusal came late");
            break answer.code();
        }
        ensure!(stopped.elapsed() < ANSWER_MAX + Duration::from_secs(3), "no turn was refused");
    };
    let noticed = stopped.elapsed().as_secs_f64();
    fleet.engines[0].signal(Signal::CONT)?;
    let went_on = now();
    while fleet.web.post(&url, &headers, &body).await?.status != 200 {
        ensure!(went_on.elapsed() < ANSWER_MAX, "no turn is served after the engine went on");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let served = went_on.elapsed().as_secs_f64();
    Ok(format!(
        "refused with {refused} after {noticed:.1} s, served {served:.1} s after it went on"
    ))
}

/// Two minutes of random signals to engines, agents and two routers under load.
///
/// Every turn is answered within [`TURN_MAX`], with what a client can act on, but for those whose
/// router was killed. Pinned turns continue their own history. Nothing is left in the engines.
pub(crate) async fn chaos(place: Place) -> anyhow::Result<String> {
    let plan = Plan { engines: 3, routers: 2, ..Plan::default() };
    let mut fleet = Fleet::start(place, &plan).await?;
    let routers = vec![fleet.url(0, ""), fleet.url(1, "")];
    let stop = Arc::new(AtomicBool::new(false));
    let users = Users { count: 6, ..Users::new(routers.clone()) }.begin(&stop);
    let mut pinned = JoinSet::new();
    for number in 0..6 {
        let user = PinnedUser { number, routers: routers.clone() };
        let stop = Arc::clone(&stop);
        pinned.spawn(async move { user.work(&stop).await });
    }
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let began = now();
    let mut faults = 0;
    while began.elapsed() < Duration::from_secs(120) {
        tokio::time::sleep(Duration::from_millis(random.u64(500..3_000))).await;
        fault(&mut fleet, &mut random).await.with_context(|| format!("seed {seed}"))?;
        faults += 1;
    }
    stop.store(true, Ordering::Relaxed);
    let mut seen = users.end().await?;
    let mut continued = 0;
    while let Some(result) = pinned.join_next().await {
        let (turns, failures) = result??;
        continued += turns;
        seen.failures.extend(failures);
    }
    let slowest = seen.quantile(1.0).max(seen.slowest_failure);
    ensure!(slowest < TURN_MAX.as_secs_f64(), "a turn took {slowest:.1} s; seed {seed}");
    let unclear: Vec<_> =
        seen.failures.iter().filter(|failure| !is_actionable(failure)).take(5).collect();
    ensure!(unclear.is_empty(), "no client can act on {unclear:?}; seed {seed}");
    nothing_left(&mut fleet).await.with_context(|| format!("seed {seed}"))?;
    Ok(format!(
        "{faults} faults, {} turns, {continued} of pinned sessions, {} refused or broken off, \
         slowest {slowest:.1} s",
        seen.turns(),
        seen.failures.len()
    ))
}

/// Whether a client can act on a failure: a refusal with a code, or a connection that its router's
/// death closed.
fn is_actionable(failure: &str) -> bool {
    let has_code = failure.split_once(' ').is_some_and(|(status, code)| {
        status.parse::<u16>().is_ok() && !code.is_empty() && code != "internal"
    });
    has_code || failure.contains("client error")
}

/// Someone who keeps pinned sessions, and checks that each turn continues what was said.
struct PinnedUser {
    number: usize,
    routers: Vec<String>,
}

impl PinnedUser {
    /// Works until `stop` is set. Returns the turns that continued a session, and the failures.
    async fn work(&self, stop: &AtomicBool) -> anyhow::Result<(usize, Vec<String>)> {
        let (mut continued, mut failures) = (0, vec![]);
        for life in 0u64.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let web = Web::default();
            let url = &self.routers[(self.number + usize::try_from(life)?) % self.routers.len()];
            match self.live(&web, url, life, stop, &mut continued).await {
                Ok(()) => {}
                Err(Failure::Wrong(error)) => return Err(error),
                Err(Failure::Refused(why)) => failures.push(why),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok((continued, failures))
    }

    /// Opens a session and continues it, until a turn fails.
    async fn live(
        &self,
        web: &Web,
        url: &str,
        life: u64,
        stop: &AtomicBool,
        continued: &mut usize,
    ) -> Result<(), Failure> {
        let (id, key) = (format!("pinned-{}-{life}", self.number), credential("bob"));
        let open = json!({ "session_id": id, "retention": "pinned" });
        let headers = [("authorization", key.as_str())];
        ok(web.post(&format!("{url}/v1/sessions"), &headers, &open).await)?;
        let turn_headers =
            [headers[0], ("x-berth-session-id", id.as_str()), ("x-berth-delta", "1")];
        let mut history = 0;
        for turn in 0..20u64 {
            let text = format!("turn {turn} of {id}. ");
            let body = json!({
                "text": text,
                "sampling_params": { "max_new_tokens": 8, "ignore_eos": true, "temperature": 0 },
            });
            let answer = ok(web.post(&format!("{url}/generate"), &turn_headers, &body).await)?;
            // The toy tokenizer makes a token of each character.
            let expected = history + text.len() as u64;
            if answer.meta("prompt_tokens") != Some(expected) {
                let found = answer.meta("prompt_tokens");
                let error =
                    anyhow!("{id} turn {turn}: {expected} tokens expected, {found:?} found");
                return Err(Failure::Wrong(error));
            }
            *continued += usize::from(turn > 0);
            history = expected + 8;
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        let url = format!("{url}/v1/sessions/{id}");
        let closed = web.request(Method::DELETE, &url, &headers, Body::empty()).await;
        ok(closed).map(drop)
    }
}

/// Why a session of [`PinnedUser`] ended early.
enum Failure {
    /// A turn ran on another context than the session's.
    Wrong(anyhow::Error),
    /// There was no answer, or a refusal.
    Refused(String),
}

fn ok(answer: anyhow::Result<Answer>) -> Result<Answer, Failure> {
    match answer {
        Ok(answer) if answer.status.is_success() => Ok(answer),
        Ok(answer) => {
            let (status, code) = answer.refusal();
            Err(Failure::Refused(format!("{status} {code}")))
        }
        Err(error) => Err(Failure::Refused(format!("{error:#}"))),
    }
}

/// Stops the routers and agents, and checks that the engines hold nothing by their own account.
async fn nothing_left(fleet: &mut Fleet) -> anyhow::Result<()> {
    for process in fleet.routers.iter_mut().chain(&mut fleet.agents) {
        process.end(Signal::TERM).await?;
    }
    for host in &fleet.agent_hosts {
        let engine = format!("http://{host}:30000");
        // The engine's gauges are as old as its last step.
        let body = json!({ "text": "x", "sampling_params": { "max_new_tokens": 4 } });
        fleet.web.post(&format!("{engine}/generate"), &[], &body).await?;
        let metrics = fleet.web.get(&format!("{engine}/metrics")).await?.text();
        for gauge in ["num_streaming_sessions", "streaming_session_held_tokens"] {
            let line = metrics.lines().find(|line| line.starts_with(&format!("sglang:{gauge}{{")));
            let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
            ensure!(value == Some(0.0), "{engine} still has {gauge} {value:?}");
        }
    }
    Ok(())
}

/// Kills, stops or restarts one process, and lets it come back.
async fn fault(fleet: &mut Fleet, random: &mut fastrand::Rng) -> anyhow::Result<()> {
    let web = fleet.web.clone();
    let process = match random.usize(..3) {
        0 => random.choice(&mut fleet.engines),
        1 => random.choice(&mut fleet.agents),
        _ => random.choice(&mut fleet.routers),
    };
    let Some(process) = process else { return Ok(()) };
    match random.usize(..3) {
        0 => process.end(Signal::KILL).await?,
        1 => process.end(Signal::TERM).await?,
        _ => {
            process.signal(Signal::STOP)?;
            tokio::time::sleep(Duration::from_millis(random.u64(100..4_000))).await;
            return process.signal(Signal::CONT);
        }
    }
    tokio::time::sleep(Duration::from_millis(random.u64(0..1_000))).await;
    process.restart()?;
    process.ready(&web).await
}
