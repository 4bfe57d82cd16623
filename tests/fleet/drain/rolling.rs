//! Replaces every router and every agent of a fleet, one after the other, while people talk to it.
//!
//! Each router is stopped by SIGTERM, as a supervisor does it, and its clients go to another one as
//! soon as its `/ready` fails. Each agent is drained before it is stopped; engines go on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use harness::{
    fleet::{FleetPlan, Origin, Place, Processes, credential},
    web::Web,
};
use rustix::process::Signal;
use serde_json::json;
use tokio::task::JoinSet;

use super::wait_state;

const AGENTS: usize = 8;
const ROUTERS: usize = 2;
const CONVERSATIONS: usize = 24;
/// A conversation with a longer prompt begins anew, in bytes. The simulator has a token a byte.
const PROMPT_BYTES_MAX: usize = 6_000;
/// Tokens of a history that are computed again in each turn: its last page, and the last token.
const RECOMPUTED_TOKENS_MAX: u64 = 64;

/// What one conversation saw.
#[derive(Debug, Default)]
struct Seen {
    turns: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Tokens of histories that were computed again because the session had moved.
    moved_tokens: u64,
    moves: u64,
    /// The same for sessions that had not moved.
    lost_tokens: u64,
    failures: Vec<String>,
}

/// Replaces all processes under load: no turn fails, and only moved sessions are computed again.
pub(super) async fn restart(place: Place) -> anyhow::Result<String> {
    let plan = FleetPlan {
        engines: AGENTS,
        routers: ROUTERS,
        lame_duck_ms: 1_500,
        has_handover: true,
        engine_flags: ["--max-running-requests=32", "--max-total-tokens=262144"]
            .map(str::to_owned)
            .into(),
        ..FleetPlan::default()
    };
    let mut fleet = Processes::start(place, &plan).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let ready: Arc<[AtomicBool; ROUTERS]> = Arc::new([true, true].map(AtomicBool::new));
    let mut people = JoinSet::new();
    for number in 0..CONVERSATIONS {
        let (stop, ready) = (Arc::clone(&stop), Arc::clone(&ready));
        let person = Person::new(&fleet, number, ready);
        people.spawn(async move { person.talk(&stop).await });
    }
    let balancer = watch_routers(fleet.router_urls(), fleet.origin.clone(), Arc::clone(&ready));
    let replaced = tokio::select! {
        replaced = replace_all(&mut fleet) => replaced,
        never = balancer => never,
    };
    stop.store(true, Ordering::Relaxed);
    let mut all = Seen::default();
    while let Some(seen) = people.join_next().await {
        let seen = seen?;
        all.turns += seen.turns;
        all.prompt_tokens += seen.prompt_tokens;
        all.cached_tokens += seen.cached_tokens;
        all.moved_tokens += seen.moved_tokens;
        all.moves += seen.moves;
        all.lost_tokens += seen.lost_tokens;
        all.failures.extend(seen.failures);
    }
    replaced?;
    let share = |tokens: u64| 100.0 * tokens as f64 / all.prompt_tokens as f64;
    let figures = format!(
        "{} turns, {} moves; {:.1} % of the prompts cached, {:.1} % computed again after a move, \
         {:.2} % otherwise",
        all.turns,
        all.moves,
        share(all.cached_tokens),
        share(all.moved_tokens),
        share(all.lost_tokens),
    );
    ensure!(all.failures.is_empty(), "{} turns failed: {}", all.failures.len(), all.failures[0]);
    ensure!(all.turns > 500, "too few turns to say anything: {figures}");
    ensure!(all.lost_tokens == 0, "sessions that stayed lost KV: {figures}");
    // Each restart moves each session at most once.
    let moves_max = (AGENTS * CONVERSATIONS) as u64;
    ensure!(all.moves <= moves_max, "sessions moved without a restart: {figures}");
    Ok(figures)
}

/// Replaces all agents, then all routers.
async fn replace_all(fleet: &mut Processes) -> anyhow::Result<()> {
    let key = credential("ops");
    let headers = [("authorization", key.as_str())];
    let web = fleet.web.clone();
    tokio::time::sleep(Duration::from_secs(3)).await;
    for agent in 0..AGENTS {
        let url = format!("{}/drain", fleet.agent_admin(agent));
        loop {
            let left = web.post(&url, &headers, &json!({})).await?.json();
            if left["turns_running"] == 0 && left["turns_queued"] == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        fleet.agents[agent].end(Signal::TERM).await?;
        fleet.agents[agent].start()?;
        fleet.agents[agent].ready(&web).await?;
        wait_state(fleet, &format!("w{agent}"), "fresh").await?;
    }
    for router in 0..ROUTERS {
        fleet.routers[router].signal(Signal::TERM)?;
        fleet.routers[router].ended().await?;
        fleet.routers[router].start()?;
        fleet.routers[router].ready(&web).await?;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Ok(())
}

/// Asks each router whether it is ready, as a balancer does, until dropped.
async fn watch_routers(
    urls: Vec<String>,
    origin: Origin,
    ready: Arc<[AtomicBool; ROUTERS]>,
) -> anyhow::Result<()> {
    let web = origin.web();
    loop {
        for (url, is_ready) in urls.iter().zip(ready.iter()) {
            let answer = web.get(&format!("{url}/ready")).await;
            let now_ready = answer.is_ok_and(|answer| answer.status == 200);
            is_ready.store(now_ready, Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

struct Person {
    number: usize,
    urls: Vec<String>,
    ready: Arc<[AtomicBool; ROUTERS]>,
    web: Web,
    key: String,
}

impl Person {
    fn new(fleet: &Processes, number: usize, ready: Arc<[AtomicBool; ROUTERS]>) -> Self {
        let key = credential(if number.is_multiple_of(2) { "alice" } else { "bob" });
        Self { number, urls: fleet.router_urls(), ready, web: fleet.origin.web(), key }
    }

    /// Talks until `stop` is set. Each turn's prompt is the whole conversation.
    async fn talk(self, stop: &AtomicBool) -> Seen {
        let (mut seen, mut number) = (Seen::default(), 0);
        while !stop.load(Ordering::Relaxed) {
            number += 1;
            if let Err(error) = self.converse(number, stop, &mut seen).await {
                seen.failures.push(format!("{error:#}"));
            }
        }
        seen
    }

    async fn converse(
        &self,
        conversation: u64,
        stop: &AtomicBool,
        seen: &mut Seen,
    ) -> anyhow::Result<()> {
        let session = format!("talk-{}-{conversation}", self.number);
        let mut history = format!("Person {} begins conversation {conversation}. ", self.number);
        let (mut known_tokens, mut home) = (0, String::new());
        let mut turn = 0;
        while history.len() < PROMPT_BYTES_MAX && !stop.load(Ordering::Relaxed) {
            turn += 1;
            history.push_str(&format!("Turn {turn} asks for something else. ").repeat(6));
            let chosen = (0..ROUTERS)
                .map(|step| (self.number + step) % ROUTERS)
                .find(|router| self.ready[*router].load(Ordering::Relaxed))
                .context("no router is ready")?;
            let headers = [
                ("authorization", self.key.as_str()),
                ("x-berth-session-id", session.as_str()),
                ("x-berth-retention", "tagged"),
            ];
            let body = json!({
                "model": "tiny", "prompt": history, "max_tokens": 16, "temperature": 0,
            });
            let url = format!("{}/v1/completions", self.urls[chosen]);
            let answer = self.web.post(&url, &headers, &body).await?;
            ensure!(
                answer.status == 200,
                "turn {turn} of {session} at router {chosen} got {} {}",
                answer.status,
                answer.text()
            );
            let said = answer.json();
            let usage = |key: &str| said["usage"][key].as_u64().unwrap_or_default();
            let details = &said["usage"]["prompt_tokens_details"]["cached_tokens"];
            let cached_tokens = details.as_u64().unwrap_or_default();
            seen.turns += 1;
            seen.prompt_tokens += usage("prompt_tokens");
            seen.cached_tokens += cached_tokens;
            let worker = answer.header("x-berth-worker").to_owned();
            let again = known_tokens - cached_tokens.min(known_tokens);
            if !home.is_empty() && worker != home {
                seen.moves += 1;
                seen.moved_tokens += again;
            } else if again > RECOMPUTED_TOKENS_MAX {
                seen.lost_tokens += again;
            }
            known_tokens = usage("prompt_tokens");
            home = worker;
            history.push_str(said["choices"][0]["text"].as_str().unwrap_or_default());
        }
        Ok(())
    }
}
