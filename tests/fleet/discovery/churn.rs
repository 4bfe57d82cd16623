//! Workers that come and go under load: listed in a file, or announced by their agents over TLS.

use std::{path::PathBuf, time::Duration};

use anyhow::ensure;
use engine_sim::EngineSim;
use harness::{
    certificates::{Authority, Files},
    cluster::{Agent, Router, agent_config, router_config},
    fleet::Place,
    keys::KeyFixture,
    web::Web,
};
use router::config::Config;
use serde_json::json;
use service::clock::now;
use tokio::task::JoinSet;

use super::{Load, Worker, wait_for};

/// How a router learns of workers that come and go.
enum Listing {
    /// By a file, which names the agents that are there.
    File(PathBuf),
    /// By the agents' own announcements, over TLS.
    Announcements { certificates: Files, keys: KeyFixture, router: Option<String> },
}

impl Listing {
    fn by_announcements() -> anyhow::Result<Self> {
        let certificates = Files::of_fleet(&Authority::new("a fleet's authority"));
        let right = "announce = { agents = [\"w*\"], addresses = [\"127.0.0.0/8\"] }";
        let keys = KeyFixture::new(&[
            ("users", "sk-users", "admin = true"),
            ("agents", "sk-agents", right),
        ])?;
        std::fs::write(keys.folder().join("announce-key"), "sk-agents\n")?;
        Ok(Self::Announcements { certificates, keys, router: None })
    }

    /// Starts a router that learns of workers in this way.
    async fn start_router(&mut self) -> anyhow::Result<Router> {
        let mut config: Config = router_config(&[]);
        match self {
            Self::File(path) => config.discovery.file.clone_from(path),
            Self::Announcements { certificates, keys, .. } => {
                (config.discovery.announce, config.auth.keys_file) = (true, keys.path());
                config.tls.cert = certificates.path("front.pem");
                config.tls.key = certificates.path("front.key");
            }
        }
        let started = Router::start(config).await?;
        if let Self::Announcements { router, .. } = self {
            *router = Some(started.url(""));
        }
        Ok(started)
    }

    /// Returns what clients of the router connect with.
    fn web(&self) -> Web {
        match self {
            Self::File(_) => Web::default(),
            Self::Announcements { certificates, .. } => certificates.web(None, None),
        }
    }

    async fn start_worker(&self, number: u32) -> anyhow::Result<Worker> {
        let engine = EngineSim::start_local(engine_sim::Config::default()).await?;
        let mut config = agent_config(&engine.url(), &format!("w{number}"));
        if let Self::Announcements { certificates, keys, router } = self {
            config.announce.routers = router.iter().cloned().collect();
            config.announce.key_file = keys.folder().join("announce-key");
            config.announce.ca = certificates.path("ca.pem");
        }
        Ok(Worker { engine, agent: Agent::start(config)? })
    }

    /// Says which workers are there, unless they say it themselves.
    fn list(&self, workers: &[Worker]) -> anyhow::Result<()> {
        let Self::File(path) = self else { return Ok(()) };
        let urls: Vec<String> = workers.iter().map(|worker| worker.agent.control_url()).collect();
        std::fs::write(path.with_extension("new"), format!("workers = {}\n", json!(urls)))?;
        Ok(std::fs::rename(path.with_extension("new"), path)?)
    }
}

pub(super) async fn of_listed_workers(place: Place) -> anyhow::Result<String> {
    let listing = Listing::File(place.folder().join("workers.toml"));
    replace_workers(&place, listing).await
}

pub(super) async fn of_announced_workers(place: Place) -> anyhow::Result<String> {
    replace_workers(&place, Listing::by_announcements()?).await
}

/// Workers come and go at 100 a minute, and no turn fails.
async fn replace_workers(place: &Place, mut listing: Listing) -> anyhow::Result<String> {
    let changes: u32 = if place.is_quick { 20 } else { 100 };
    let (router, web) = (listing.start_router().await?, listing.web());
    let mut workers = Vec::new();
    for number in 0..4 {
        workers.push(listing.start_worker(number).await?);
    }
    listing.list(&workers)?;
    wait_for(&web, &router, &["w0", "w1", "w2", "w3"]).await?;
    let load = Load::start(&router, || listing.web(), 8);
    let (began, mut leaving) = (now(), Vec::new());
    let mut stopping = JoinSet::new();
    for change in 0..changes {
        // After a stop of the machine, the changes don't catch up: all workers would leave at once.
        let next_at = now() + Duration::from_millis(600);
        // One joins, and the oldest leaves. A listed worker runs on until the router has let it go.
        workers.push(listing.start_worker(4 + change).await?);
        leaving.push(workers.remove(0));
        listing.list(&workers)?;
        let left_running = if matches!(listing, Listing::File(_)) { 16 } else { 0 };
        if leaving.len() > left_running {
            stopping.spawn(leaving.remove(0).stop());
        }
        tokio::time::sleep_until(next_at.into()).await;
    }
    let took = began.elapsed();
    let names: Vec<String> = (changes..changes + 4).map(|number| format!("w{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    wait_for(&web, &router, &names).await?;
    let turns = load.stop().await?;
    router.stop().await?;
    for worker in workers.into_iter().chain(leaving) {
        worker.stop().await?;
    }
    while let Some(stopped) = stopping.join_next().await {
        stopped??;
    }
    ensure!(turns > 100, "only {turns} turns were sent");
    Ok(format!("{changes} workers replaced in {} s, {turns} turns, 0 failed", took.as_secs()))
}
