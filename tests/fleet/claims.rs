//! Several routers: every new session begins on one worker, whatever claims are held by.

pub(crate) mod stores;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, ensure};
use axum::body::Body;
use contract::v1::{ListSessionsRequest, worker_agent_client::WorkerAgentClient};
use harness::{
    case,
    cases::Case,
    fleet::{FleetPlan, Place, Processes, credential},
};
use http::Method;
use rustix::process::Signal;
use serde_json::json;
use service::clock::now;
use tokio::task::JoinSet;
use tonic::transport::Endpoint;

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    case!("claims: two routers", true, two_routers),
    case!("claims: five routers", false, five_routers),
    case!("claims: an arbiter killed", true, arbiter_killed),
    case!("claims: an arbiter stopped", false, arbiter_stopped),
    case!("claims: routers killed", true, routers_killed),
];

/// The sessions of a round.
const SESSIONS: usize = 200;
/// The concurrent first turns of each session.
const TURNS: usize = 5;
/// The engines. Each has an agent.
const ENGINES: usize = 4;

/// Returns a fleet whose engines have rows and tokens for all pinned sessions of a round.
fn plan(routers: usize, router_settings: &str) -> FleetPlan {
    let flags = ["--max-running-requests=256", "--max-total-tokens=1000000"];
    FleetPlan {
        engines: ENGINES,
        routers,
        engine_flags: flags.map(str::to_owned).to_vec(),
        agent_settings: "sessions.pin_rows_ratio = 1.0\n".to_owned(),
        router_settings: router_settings.to_owned(),
        ..FleetPlan::default()
    }
}

/// How many rounds a case plays.
fn rounds(fleet: &Processes) -> usize {
    if fleet.place.is_quick { 2 } else { 20 }
}

/// What came of the turns and opens of one round.
#[derive(Debug, Default)]
struct Outcome {
    /// The turns and opens that were not answered as they should be: the router and its answer.
    failed: Vec<(usize, String)>,
    /// How many opens were answered with 201, by session.
    created: BTreeMap<String, usize>,
    /// How long the round took.
    took: Duration,
}

impl Outcome {
    fn check_all_answered(&self) -> anyhow::Result<()> {
        let (count, first) = (self.failed.len(), self.failed.first());
        ensure!(count == 0, "{count} failed, the first by router and answer: {first:?}");
        Ok(())
    }
}

/// What the requests of a round do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// First turns of tagged sessions.
    Turns,
    /// Opens of pinned sessions.
    Opens,
}

/// Sends the concurrent first turns or opens of a round's sessions, in turn to each of the routers.
/// Calls `midway` when a fifth of them are answered.
async fn play(
    fleet: &Processes,
    routers: &[usize],
    round: usize,
    kind: Kind,
    midway: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    let began = now();
    let mut requests = JoinSet::new();
    for number in 0..SESSIONS * TURNS {
        let session = format!("{kind:?}-{round}-{}", number % SESSIONS);
        // The turns of a session come by different routers.
        let router = routers[(number / SESSIONS + number) % routers.len()];
        let path = if kind == Kind::Turns { "/v1/completions" } else { "/v1/sessions" };
        let (url, web) = (fleet.url(router, path), fleet.web.clone());
        requests.spawn(async move {
            let key = credential("alice");
            let mut headers = vec![("authorization", key.as_str())];
            let body = match kind {
                Kind::Turns => {
                    headers.push(("x-berth-session-id", &session));
                    json!({ "model": "tiny", "prompt": session, "max_tokens": 1 })
                }
                Kind::Opens => json!({ "session_id": session, "retention": "pinned" }),
            };
            let answer = web.post(&url, &headers, &body).await;
            (session, router, answer)
        });
    }
    let (mut outcome, mut midway, mut left) = (Outcome::default(), Some(midway), requests.len());
    while let Some(sent) = requests.join_next().await {
        let (session, router, answer) = sent?;
        left -= 1;
        if left < SESSIONS * TURNS * 4 / 5
            && let Some(midway) = midway.take()
        {
            midway()?;
        }
        match answer {
            Ok(answer) if answer.status == 201 => {
                *outcome.created.entry(session).or_default() += 1;
            }
            Ok(answer) if answer.status == 200 => {}
            Ok(answer) => {
                outcome.failed.push((router, format!("{} {}", answer.status, answer.text())));
            }
            Err(error) => outcome.failed.push((router, format!("{error:#}"))),
        }
    }
    outcome.took = began.elapsed();
    Ok(outcome)
}

/// Returns the agents that have each session, as the agents say.
async fn homes(
    fleet: &Processes,
    agents: &[usize],
) -> anyhow::Result<BTreeMap<String, Vec<usize>>> {
    let mut homes: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for &agent in agents {
        let url = format!("http://{}:31001", fleet.agent_hosts[agent]);
        let mut client = WorkerAgentClient::new(Endpoint::from_shared(url)?.connect().await?);
        let mut page_token = String::new();
        loop {
            let request = ListSessionsRequest { page_size: 0, page_token };
            let page = client.list_sessions(request).await?.into_inner();
            for session in page.sessions {
                let id = session.key.context("a session without a key")?.id;
                homes.entry(id).or_default().push(agent);
            }
            page_token = page.next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
    }
    Ok(homes)
}

/// Returns how many sessions of a round are on several agents, and checks that all are somewhere.
async fn count_split(
    fleet: &Processes,
    agents: &[usize],
    round: usize,
    kind: Kind,
) -> anyhow::Result<usize> {
    let homes = homes(fleet, agents).await?;
    let of_round = format!("{kind:?}-{round}-");
    let homes: Vec<_> = homes.iter().filter(|(id, _)| id.starts_with(&of_round)).collect();
    ensure!(homes.len() == SESSIONS, "only {} of {SESSIONS} sessions exist", homes.len());
    Ok(homes.iter().filter(|(_, agents)| agents.len() > 1).count())
}

/// Checks that losing one place that holds claims splits next to nothing. With claims at one place
/// a third of the sessions were split, and more on a busy machine. Only where the other places
/// answer nothing for `claims.patience_ms` may a session begin twice.
fn check_few_split(rounds: &[usize]) -> anyhow::Result<()> {
    let is_few = rounds.iter().all(|split| split * 20 <= SESSIONS);
    ensure!(is_few, "of {SESSIONS} sessions a round, {rounds:?} began on two workers");
    Ok(())
}

/// Closes the pinned sessions of a round, so that the next has room.
async fn close_all(fleet: &Processes, outcome: &Outcome) -> anyhow::Result<()> {
    let key = credential("alice");
    let headers = [("authorization", key.as_str())];
    for session in outcome.created.keys() {
        let url = fleet.url(0, &format!("/v1/sessions/{session}"));
        let request = fleet.web.request(Method::DELETE, &url, &headers, Body::empty());
        let answer = request.await?;
        ensure!(answer.status == 204, "a close was answered {}", answer.status);
    }
    Ok(())
}

/// Plays rounds in which nothing fails, and checks that every session begins on one worker.
async fn play_rounds(fleet: &Processes) -> anyhow::Result<String> {
    let routers: Vec<usize> = (0..fleet.routers.len()).collect();
    let agents: Vec<usize> = (0..ENGINES).collect();
    let (rounds, mut took) = (rounds(fleet), Duration::ZERO);
    for round in 0..rounds {
        for kind in [Kind::Turns, Kind::Opens] {
            let outcome = play(fleet, &routers, round, kind, || Ok(())).await?;
            outcome.check_all_answered()?;
            let split = count_split(fleet, &agents, round, kind).await?;
            ensure!(
                split == 0,
                "{split} of {SESSIONS} sessions are on several workers in {kind:?}, round {round}"
            );
            if kind == Kind::Opens {
                let created: usize = outcome.created.values().sum();
                ensure!(created == SESSIONS, "{created} x 201 for {SESSIONS} sessions");
                close_all(fleet, &outcome).await?;
            }
            took += outcome.took;
        }
    }
    let requests = rounds * 2 * SESSIONS * TURNS;
    let seconds = took.as_secs_f64();
    Ok(format!(
        "{rounds} rounds, 0 of {} sessions on two workers, {requests} requests in {seconds:.1} s",
        rounds * 2 * SESSIONS
    ))
}

async fn two_routers(place: Place) -> anyhow::Result<String> {
    let plan = plan(2, patience(&place));
    play_rounds(&Processes::start(place, &plan).await?).await
}

async fn five_routers(place: Place) -> anyhow::Result<String> {
    let plan = plan(5, patience(&place));
    play_rounds(&Processes::start(place, &plan).await?).await
}

/// Returns the settings of routers where no place that holds claims is lost. By default a router
/// goes on without a claim that takes half a second, and a machine that stops for as long splits
/// sessions. In CI that must not decide.
fn patience(place: &Place) -> &'static str {
    if place.is_quick { "claims.patience_ms = 10000\nclaims.deadline_ms = 10000\n" } else { "" }
}

/// Kills an agent while first turns run: it holds the claims of a quarter of the sessions.
async fn arbiter_killed(place: Place) -> anyhow::Result<String> {
    lose_arbiter(place, Signal::KILL).await
}

/// Stops an agent, which then holds claims and gives no answers.
async fn arbiter_stopped(place: Place) -> anyhow::Result<String> {
    lose_arbiter(place, Signal::STOP).await
}

/// Loses the last agent while first turns run. Its engine is dead before, so that only its claims
/// are lost.
async fn lose_arbiter(place: Place, signal: Signal) -> anyhow::Result<String> {
    // A killed agent's host refuses connections at once, and a stopped one gives no answer.
    let settings = if signal == Signal::KILL { patience(&place) } else { "" };
    let mut fleet = Processes::start(place, &plan(2, settings)).await?;
    let last = ENGINES - 1;
    fleet.engines[last].end(Signal::KILL).await?;
    for router in 0..2 {
        wait_for("the dead engine's worker to take no turns", || async {
            let state = worker_state(&fleet, router, last).await?;
            Ok(Some(()).filter(|()| state == "unhealthy"))
        })
        .await?;
    }
    let mut began = vec![];
    let rest: Vec<usize> = (0..last).collect();
    let rounds = rounds(&fleet).min(5);
    for round in 0..rounds {
        let agent = &fleet.agents[last];
        let lose = || if round == 0 { agent.signal(signal) } else { Ok(()) };
        let outcome = play(&fleet, &[0, 1], round, Kind::Turns, lose).await?;
        outcome.check_all_answered()?;
        began.push(count_split(&fleet, &rest, round, Kind::Turns).await?);
    }
    check_few_split(&began)?;
    let mended = wait_until_mended(&fleet, &rest).await?;
    Ok(format!(
        "no turn failed; of {SESSIONS} sessions a round, {began:?} began on two workers, all were \
         mended in {:.1} s",
        mended.as_secs_f64()
    ))
}

/// Kills half of the routers at random. No turn of the others fails, and a router that comes back
/// knows every session within a second.
async fn routers_killed(place: Place) -> anyhow::Result<String> {
    let mut fleet = Processes::start(place, &plan(4, "")).await?;
    let mut random = fastrand::Rng::with_seed(fleet.place.seed);
    let (seed, mut slowest) = (fleet.place.seed, Duration::ZERO);
    let all: Vec<usize> = (0..4).collect();
    let agents: Vec<usize> = (0..ENGINES).collect();
    let rounds = rounds(&fleet).min(5);
    for round in 0..rounds {
        let killed = random.choose_multiple(all.clone(), 2);
        let kill =
            || killed.iter().try_for_each(|&router| fleet.routers[router].signal(Signal::KILL));
        let outcome = play(&fleet, &all, round, Kind::Turns, kill).await?;
        let failed = outcome.failed.iter().find(|(router, _)| !killed.contains(router));
        ensure!(failed.is_none(), "seed {seed}: a turn of a living router failed: {failed:?}");
        wait_until_mended(&fleet, &agents).await?;
        let known = homes(&fleet, &agents).await?;
        for router in killed {
            fleet.routers[router].end(Signal::KILL).await?;
            let web = fleet.web.clone();
            fleet.routers[router].start()?;
            fleet.routers[router].ready(&web).await?;
            let ready_at = now();
            // Where an agent doesn't answer within a second, the router is ready without it.
            wait_for("the router to list all sessions", || async {
                let listed = count_listed(&fleet, router).await?;
                Ok(Some(()).filter(|()| listed == known.len()))
            })
            .await?;
            slowest = slowest.max(ready_at.elapsed());
        }
    }
    // In CI a machine that stops for a moment must not decide.
    let listed_max = Duration::from_secs(if fleet.place.is_quick { 20 } else { 1 });
    ensure!(slowest < listed_max, "a router took {slowest:?} to list all sessions");
    let ms = slowest.as_millis();
    Ok(format!("{rounds} rounds; a new router listed every session {ms} ms after it was ready"))
}

/// Returns how many sessions a router lists.
async fn count_listed(fleet: &Processes, router: usize) -> anyhow::Result<usize> {
    let key = credential("alice");
    let (mut count, mut after) = (0, String::new());
    loop {
        let headers = [("authorization", key.as_str())];
        let url = fleet.url(router, &format!("/v1/sessions?limit=1000{after}"));
        let request = fleet.web.request(Method::GET, &url, &headers, Body::empty());
        let page = request.await?.json();
        let sessions = page["sessions"].as_array().with_context(|| format!("no list: {page}"))?;
        count += sessions.len();
        let last = sessions.last().and_then(|session| session["session_id"].as_str());
        match last.filter(|_| page["more"] == true) {
            Some(last) => after = format!("&after={last}"),
            None => return Ok(count),
        }
    }
}

/// Returns the state of an agent's worker, as a router shows it.
async fn worker_state(fleet: &Processes, router: usize, agent: usize) -> anyhow::Result<String> {
    let key = credential("ops");
    let headers = [("authorization", key.as_str())];
    let url = fleet.url(router, "/v1/workers");
    let request = fleet.web.request(Method::GET, &url, &headers, Body::empty());
    let shown = request.await?.json();
    let name = format!("w{agent}");
    let mut workers = shown["workers"].as_array().into_iter().flatten();
    let worker = workers.find(|worker| worker["agent"] == name).context("no such worker")?;
    Ok(worker["state"].as_str().unwrap_or_default().to_owned())
}

/// Waits until every session is on one agent. Returns how long that took.
async fn wait_until_mended(fleet: &Processes, agents: &[usize]) -> anyhow::Result<Duration> {
    let began = now();
    wait_for("every session to be on one worker", || async {
        let homes = homes(fleet, agents).await?;
        Ok(homes.values().all(|agents| agents.len() == 1).then_some(()))
    })
    .await?;
    Ok(began.elapsed())
}

/// Asks until there is an answer, for a minute.
async fn wait_for<T, F>(what: &str, mut ask: impl FnMut() -> F) -> anyhow::Result<T>
where
    F: Future<Output = anyhow::Result<Option<T>>>,
{
    let began = now();
    loop {
        if let Some(answer) = ask().await? {
            return Ok(answer);
        }
        ensure!(began.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
