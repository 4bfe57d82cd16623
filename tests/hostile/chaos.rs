//! Stops, kills and restarts processes at random under load, and judges what clients saw.
//!
//! - `fault_log`: what was done to which process, and which failures that explains.
//! - `pinned`: users who keep pinned sessions, and check that each turn continues its session.

mod fault_log;
mod pinned;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use harness::fleet::{FleetPlan, Place, Processes};
use rustix::process::Signal;
use serde_json::json;
use service::clock::now;
use tokio::task::JoinSet;

use self::{
    fault_log::{Fault, FaultKind, FaultLog, Target},
    pinned::{Life, PinnedUser},
};
use crate::users::{Failure, Seen, Users, Why};

/// For how long processes are disturbed.
const TIME: Duration = Duration::from_secs(120);
/// The longest time from a request to the end of its refusal, whatever happened to the processes
/// meanwhile. A router finds a stopped agent silent in less.
const FAILED_MAX: Duration = Duration::from_secs(10);
/// The longest time of an answered turn: those that its processes are stopped for, and its own.
const ANSWERED_MAX: Duration = Duration::from_secs(15);
/// A stop of an agent that routers notice: they call it silent after 6 to 10 s.
const LONG_STOP: Duration = Duration::from_secs(12);
/// The users without pins, and those with.
const USERS: usize = 6;

/// Two minutes of random signals to engines, agents and two routers under load.
///
/// Each failed request is refused within [`FAILED_MAX`] with a code, unless its router was killed
/// or restarting. Pinned turns continue their own history, also after planned restarts of their
/// agent. Nothing is left in the engines.
pub(crate) async fn chaos(place: Place, has_tls: bool) -> anyhow::Result<String> {
    let seed = place.seed;
    Box::pin(run(place, has_tls)).await.with_context(|| format!("seed {seed}"))
}

async fn run(place: Place, has_tls: bool) -> anyhow::Result<String> {
    let mut random = fastrand::Rng::with_seed(place.seed);
    // Sessions that are cut off from their users keep their rows for a while.
    let engine_flags = ["--max-running-requests=128", "--max-total-tokens=262144"];
    let engine_flags = engine_flags.map(str::to_owned).into();
    let plan = FleetPlan {
        engines: 3,
        routers: 2,
        engine_flags,
        has_tls,
        has_handover: true,
        ..FleetPlan::default()
    };
    let mut fleet = Processes::start(place, &plan).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let users = Users::new(&fleet, USERS).begin(&stop);
    let mut pinned = JoinSet::new();
    for number in 0..USERS {
        let (user, stop) = (PinnedUser::new(&fleet, number), Arc::clone(&stop));
        pinned.spawn(async move { user.work(&stop).await });
    }
    let mut log = FaultLog::default();
    let began = now();
    while began.elapsed() < TIME {
        tokio::time::sleep(Duration::from_millis(random.u64(500..3_000))).await;
        log.faults.push(disturb(&mut fleet, &mut random, log.faults.is_empty()).await?);
    }
    stop.store(true, Ordering::Relaxed);
    let mut seen = users.end().await?;
    let mut lives = vec![];
    while let Some(result) = pinned.join_next().await {
        let worked = result??;
        lives.extend(worked.lives);
        seen.failures.extend(worked.failures);
    }
    fleet.place.write("chaos.log", &log.text(&seen.failures))?;
    let figures = judge(&log, &seen, &lives)?;
    nothing_left(&mut fleet).await.with_context(|| figures.clone())?;
    Ok(figures)
}

/// Checks what the clients saw. Returns the figures.
fn judge(log: &FaultLog, seen: &Seen, lives: &[Life]) -> anyhow::Result<String> {
    let pinned_turns = lives.iter().flat_map(|life| &life.turns);
    let slowest_pinned = pinned_turns.clone().map(|turn| turn.seconds()).fold(0.0, f64::max);
    let slowest = seen.quantile(1.0).max(slowest_pinned);
    let slowest_failure = seen.failures.iter().map(Failure::seconds).fold(0.0, f64::max);
    let handed_over = lives.iter().filter(|life| log.handed_over(life)).count();
    let figures = format!(
        "{} faults, {} turns, {} of pinned sessions, {handed_over} of which went on in another \
         process of their agent, slowest {slowest:.1} s; {} failed, slowest {slowest_failure:.1} \
         s: {}",
        log.faults.len(),
        seen.turns(),
        pinned_turns.count(),
        seen.failures.len(),
        tally(&seen.failures)
    );
    let unclear: Vec<String> = seen
        .failures
        .iter()
        .filter(|failure| !log.explains(failure))
        .take(5)
        .map(ToString::to_string)
        .collect();
    ensure!(unclear.is_empty(), "no client can act on {unclear:?}: {figures}");
    let late = seen.failures.iter().find(|failure| failure.seconds() > FAILED_MAX.as_secs_f64());
    if let Some(late) = late {
        let meanwhile = log.meanwhile(late.began, late.ended);
        anyhow::bail!("{late}, while {meanwhile}: {figures}");
    }
    ensure!(slowest < ANSWERED_MAX.as_secs_f64(), "a turn was slow: {figures}");
    ensure!(handed_over > 0, "no session went on: {figures}");
    Ok(figures)
}

/// Returns how often requests failed in which way.
fn tally(failures: &[Failure]) -> String {
    let mut counts = BTreeMap::<String, usize>::new();
    for failure in failures {
        let kind = match &failure.why {
            Why::Refused { status, code, .. } => format!("{status} {code}"),
            Why::Broken(_) => "broken off by its router's end".to_owned(),
        };
        *counts.entry(kind).or_default() += 1;
    }
    let counts: Vec<_> = counts.iter().map(|(kind, count)| format!("{count} × {kind}")).collect();
    counts.join(", ")
}

/// Kills, stops or restarts one process, and lets it come back. The first time, it restarts an
/// agent, so that each run has a hand-over.
async fn disturb(
    fleet: &mut Processes,
    random: &mut fastrand::Rng,
    is_first: bool,
) -> anyhow::Result<Fault> {
    let (mut kind, mut target) = (random.usize(..3), random.usize(..3));
    if is_first {
        (kind, target) = (1, 1);
    }
    let kind = [FaultKind::Kill, FaultKind::Restart, FaultKind::Stop][kind];
    let (processes, target): (_, fn(usize) -> Target) = match target {
        0 => (&mut fleet.engines, Target::Engine),
        1 => (&mut fleet.agents, Target::Agent),
        _ => (&mut fleet.routers, Target::Router),
    };
    let number = random.usize(..processes.len());
    let (process, target) = (&mut processes[number], target(number));
    let mut stop_time = Duration::from_millis(random.u64(100..4_000));
    if matches!(target, Target::Agent(_)) && random.u8(..3) == 0 {
        stop_time = LONG_STOP;
    }
    let began = now();
    match kind {
        FaultKind::Kill => process.end(Signal::KILL).await?,
        FaultKind::Restart => process.end(Signal::TERM).await?,
        FaultKind::Stop => {
            process.signal(Signal::STOP)?;
            tokio::time::sleep(stop_time).await;
            process.signal(Signal::CONT)?;
        }
    }
    if kind != FaultKind::Stop {
        tokio::time::sleep(Duration::from_millis(random.u64(0..1_000))).await;
        process.start()?;
        process.ready(&fleet.web).await?;
    }
    Ok(Fault { target, kind, began, ended: now() })
}

/// Stops the routers and agents, and checks that the engines hold nothing by their own account.
async fn nothing_left(fleet: &mut Processes) -> anyhow::Result<()> {
    for router in &mut fleet.routers {
        router.end(Signal::TERM).await?;
    }
    for agent in &mut fleet.agents {
        // SIGTERM would leave sessions to the next agent.
        agent.end(Signal::INT).await?;
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
