//! Lists the scenarios: which attack must not be noticed by whom, and the figure that must hold.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use harness::{
    case,
    cases::Case,
    fleet::{FleetPlan, Place, Processes, credential},
};
use serde_json::json;

use crate::{
    attacks::{self, Attack, Attackers},
    chaos, disconnects, hostile_engine, long_bodies, lying_agent, stopped,
    users::{Failure, Seen, Users},
};

/// How much longer the slowest turns of the others may take under attack.
const SLOWER_MAX: f64 = 2.0;
/// The rounds in which turns are measured without an attack, and again under it. The medians of
/// the rounds are compared, as other processes of this machine disturb some of them.
const ROUNDS: usize = 3;
/// The most rounds under an attack. More are measured only while the turns look slower.
const ROUNDS_MAX: usize = 5 * ROUNDS;
/// The time of a round.
const ROUND: Duration = Duration::from_secs(3);
/// The users, each with one turn at a time.
const USERS: usize = 4;
/// Descriptors of each process where few are allowed.
const FEW_DESCRIPTORS: u32 = 1_024;

/// All scenarios, in the order in which they run.
pub(crate) const SCENARIOS: [Case; 26] = [
    case!("rows", true, |place| attacked(place, None, Kind::Rows)),
    case!("sessions", true, |place| attacked(place, None, Kind::Sessions)),
    case!("turns", false, |place| attacked(place, None, Kind::Turns)),
    case!("bodies", false, |place| attacked(place, None, Kind::Bodies)),
    case!("long bodies", true, |place| attacked(place, None, Kind::LongBodies)),
    case!("batches", true, |place| attacked(place, None, Kind::Batches)),
    case!("slow bodies behind a balancer", true, |place| few(place, Kind::SlowBodies)),
    case!("open routes behind a balancer", true, |place| few(place, Kind::OpenRoutes)),
    case!("slow readers", true, |place| attacked(place, None, Kind::SlowReaders)),
    case!("idle connections", true, |place| attacked(place, None, Kind::Idle)),
    case!("idle admin connections", true, |place| attacked(place, None, Kind::IdleAdmin)),
    case!("tokenizing", true, |place| attacked(place, None, Kind::Tokenizing)),
    case!("rows, few descriptors", false, |place| few(place, Kind::Rows)),
    case!("sessions, few descriptors", false, |place| few(place, Kind::Sessions)),
    case!("turns, few descriptors", false, |place| few(place, Kind::Turns)),
    case!("bodies, few descriptors", false, |place| few(place, Kind::Bodies)),
    case!("slow readers, few descriptors", false, |place| few(place, Kind::SlowReaders)),
    case!("idle connections, few descriptors", false, |place| few(place, Kind::Idle)),
    case!("idle admin connections, few descriptors", false, |place| few(place, Kind::IdleAdmin)),
    case!("streams, few descriptors", true, |place| few(place, Kind::Streams)),
    case!("disconnects", true, disconnects::disconnects),
    case!("endless answers", true, hostile_engine::endless_answers),
    case!("lying agent", true, lying_agent::lying_agent),
    case!("engine stopped", true, stopped::engine_stopped),
    case!("chaos", false, |place| chaos::chaos(place, false)),
    case!("chaos, with TLS", false, |place| chaos::chaos(place, true)),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rows,
    Sessions,
    Turns,
    Bodies,
    LongBodies,
    Batches,
    SlowBodies,
    OpenRoutes,
    SlowReaders,
    Idle,
    IdleAdmin,
    Streams,
    Tokenizing,
}

impl Kind {
    async fn begin(self, fleet: &Processes) -> anyhow::Result<Attack> {
        match self {
            Self::Rows => attacks::rows(fleet).await,
            Self::Sessions => attacks::sessions(fleet).await,
            Self::Turns => attacks::turns(fleet).await,
            Self::Bodies => attacks::bodies(fleet).await,
            Self::LongBodies => long_bodies::send(fleet).await,
            Self::Batches => attacks::batches(fleet).await,
            Self::SlowBodies => attacks::slow_bodies(fleet).await,
            Self::OpenRoutes => attacks::open_routes(fleet).await,
            Self::SlowReaders => attacks::slow_readers(fleet).await,
            Self::Idle => attacks::idle_connections(fleet).await,
            Self::IdleAdmin => attacks::idle_admin_connections(fleet).await,
            Self::Streams => attacks::streams(fleet).await,
            Self::Tokenizing => attacks::tokenizing(fleet).await,
        }
    }
}

async fn few(place: Place, kind: Kind) -> anyhow::Result<String> {
    attacked(place, Some(FEW_DESCRIPTORS), kind).await
}

/// Measures the users' turns without the attack, and under it.
async fn attacked(place: Place, descriptors: Option<u32>, kind: Kind) -> anyhow::Result<String> {
    let mut engine_flags: Vec<String> =
        ["--max-running-requests=32", "--max-total-tokens=262144", "--decode-ms-per-step=5"]
            .map(str::to_owned)
            .into();
    if kind == Kind::Tokenizing {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/data/model");
        engine_flags.extend([format!("--model-path={model}"), "--served-model-name=tiny".into()]);
    }
    let plan = FleetPlan { engine_flags, descriptors, ..FleetPlan::default() };
    let fleet = Processes::start(place, &plan).await?;
    let users = Users::new(&fleet, USERS);
    let is_balanced = matches!(kind, Kind::SlowBodies | Kind::OpenRoutes);
    let users = if is_balanced { users.behind_a_balancer() } else { users };
    users.work(Duration::from_secs(1)).await?;
    let before = measure(&users).await?;
    let memory_before = fleet.routers[0].resident_bytes()?;
    let fleet = Arc::new(fleet);
    let begun = Arc::clone(&fleet);
    let attackers = Attackers::new().context("no runtime for attacks")?;
    let attack = attackers.spawn(async move { kind.begin(&begun).await }).await??;
    let mut under = measure(&users).await?;
    // A machine that stops for a moment disturbs some rounds, an attack all of them.
    while is_slower(&before, &under) && under.len() < ROUNDS_MAX {
        under.extend(measure(&users).await?);
    }
    let memory = fleet.routers[0].resident_bytes()?.saturating_sub(memory_before) >> 20;
    let opens = open_session(&fleet).await?;
    let health =
        tokio::time::timeout(Duration::from_secs(20), fleet.web.get(&fleet.url(0, "/health")))
            .await;
    let attacker_got = format!("the attacker got {}", attack.answers);
    let figures = compare(&before, &under).with_context(|| attacker_got.clone())?;
    let figures = format!("{figures}; {attacker_got}");
    let blaming = attack.answers.sum(blames_workers);
    drop(attack);
    ensure!(blaming == 0, "the attacker's answers blame workers: {figures}");
    ensure!(
        matches!(health, Ok(Ok(answer)) if answer.status == 200),
        "/health doesn't answer: {figures}"
    );
    ensure!(opens == 201, "another principal's open got {opens}: {figures}");
    ensure!(memory < 512, "the router grew by {memory} MiB: {figures}");
    Ok(format!("{figures}, router +{memory} MiB"))
}

/// Whether an answer to an attacker blames a worker that has no fault.
fn blames_workers(answer: &str) -> bool {
    let (status, code) = answer.split_once(' ').unwrap_or((answer, ""));
    let is_limit = matches!(
        code,
        "connections_full" | "router_descriptors" | "agent_descriptors" | "body_bytes_in_flight"
    );
    // No scenario here has a fault, so all that a server refuses is for want of room.
    status.starts_with('5') && !is_limit
}

/// Opens a session as somebody else than the attacker, and returns the status.
async fn open_session(fleet: &Processes) -> anyhow::Result<u16> {
    let key = credential("bob");
    let body = json!({ "session_id": "bobs", "retention": "tagged" });
    let headers = [("authorization", key.as_str())];
    Ok(fleet.web.post(&fleet.url(0, "/v1/sessions"), &headers, &body).await?.status.as_u16())
}

/// Lets the users work for some rounds.
async fn measure(users: &Users) -> anyhow::Result<Vec<Seen>> {
    let mut rounds = vec![];
    for _ in 0..ROUNDS {
        rounds.push(users.work(ROUND).await?);
    }
    Ok(rounds)
}

/// Returns the median over the rounds of the seconds within which this share of the turns ended.
fn median(rounds: &[Seen], share: f64) -> f64 {
    let mut seconds: Vec<f64> = rounds.iter().map(|seen| seen.quantile(share)).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Whether the slowest turns take longer under the attack than they may.
fn is_slower(before: &[Seen], under: &[Seen]) -> bool {
    median(under, 0.99) > SLOWER_MAX * median(before, 0.99)
}

/// Checks that the attack wasn't noticed. Returns the figures.
fn compare(before: &[Seen], under: &[Seen]) -> anyhow::Result<String> {
    let (quiet, attacked) = (median(before, 0.99), median(under, 0.99));
    let turns = |rounds: &[Seen]| rounds.iter().map(Seen::turns).sum::<usize>();
    let figures = format!(
        "p99 {:.0} → {:.0} ms ({:.2}×), p50 {:.0} → {:.0} ms, {} → {} turns",
        quiet * 1e3,
        attacked * 1e3,
        attacked / quiet,
        median(before, 0.5) * 1e3,
        median(under, 0.5) * 1e3,
        turns(before),
        turns(under),
    );
    let failures: Vec<&Failure> = under.iter().flat_map(|seen| &seen.failures).collect();
    if let Some(failure) = failures.first() {
        bail!("{} turns of others failed, the first with {failure}: {figures}", failures.len());
    }
    ensure!(!is_slower(before, under), "the others' turns are slower: {figures}");
    Ok(figures)
}
