//! Claim stores: real servers of Redis and etcd, which are killed and stopped under load.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use service::clock::now;
use tests::{
    case,
    cases::Case,
    fleet::{Place, Process, Processes, own_host},
};

use super::{
    ENGINES, Kind, PATIENT, SESSIONS, count_split, plan, play, play_rounds, rounds, wait_for,
    wait_until_mended,
};

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    case!("claims: redis", true, redis),
    case!("claims: etcd", true, etcd),
    case!("claims: redis killed", true, redis_killed),
    case!("claims: redis stopped", false, redis_stopped),
    case!("claims: etcd killed", true, etcd_killed),
    case!("claims: etcd stopped", false, etcd_stopped),
];

/// A server that holds claims.
struct Store {
    name: &'static str,
    process: Process,
    host: String,
    port: u16,
}

impl Store {
    /// Starts `redis-server` or `etcd` on an address of its own.
    async fn start(place: &Place, name: &'static str) -> anyhow::Result<Self> {
        let host = own_host();
        let data = place.folder().join(name);
        std::fs::create_dir_all(&data)?;
        let data = data.display();
        let (port, command) = match name {
            "redis" => {
                let flags = format!("--bind {host} --port 6379 --appendonly no --dir {data}");
                (6379, format!("redis-server {flags}"))
            }
            _ => {
                let (clients, peers) =
                    (format!("http://{host}:2379"), format!("http://{host}:2380"));
                let flags = format!(
                    "--name t --data-dir {data} --listen-client-urls {clients} \
                     --advertise-client-urls {clients} --listen-peer-urls {peers} \
                     --initial-advertise-peer-urls {peers} --initial-cluster t={peers}"
                );
                (2379, format!("etcd {flags}"))
            }
        };
        let command = command.split(' ').map(str::to_owned).collect();
        let process = Process::new(place.folder(), name, command, String::new());
        let mut store = Self { name, process, host, port };
        store.start_again().await?;
        Ok(store)
    }

    async fn start_again(&mut self) -> anyhow::Result<()> {
        self.process.start()?;
        let address = (self.host.as_str(), self.port);
        wait_for("the store's port", || async {
            Ok(tokio::net::TcpStream::connect(address).await.ok())
        })
        .await?;
        Ok(())
    }

    /// Returns the routers' settings.
    fn settings(&self) -> String {
        let Self { name, host, port, .. } = self;
        let scheme = if *name == "redis" { "redis" } else { "http" };
        format!("claims.store = \"{name}\"\nclaims.urls = [\"{scheme}://{host}:{port}\"]\n")
    }
}

/// Returns how often the routers' requests to a store had a result.
async fn count_claims(fleet: &Processes, store: &str, result: &str) -> anyhow::Result<u64> {
    let mut count = 0;
    for router in 0..fleet.routers.len() {
        let metrics = fleet.web.get(&(fleet.router_admin(router) + "/metrics")).await?.text();
        let labels = format!("{{store=\"{store}\",result=\"{result}\"}} ");
        let name = format!("berth_router_claims_total{labels}");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        count += line.map_or(Ok(0), str::parse)?;
    }
    Ok(count)
}

/// Waits until the routers' claims are granted by the store again. Each try is a new session.
async fn wait_until_used(
    fleet: &Processes,
    store: &Store,
    round: usize,
) -> anyhow::Result<Duration> {
    let (began, before) = (now(), count_claims(fleet, store.name, "granted").await?);
    let mut tries = round;
    while count_claims(fleet, store.name, "granted").await? == before {
        ensure!(began.elapsed() < Duration::from_secs(60), "the store is not used again");
        play(fleet, &[0, 1], tries, Kind::Turns, || Ok(())).await?.check_all_answered()?;
        tries += 1;
    }
    Ok(began.elapsed())
}

async fn with_store(place: Place, name: &'static str) -> anyhow::Result<String> {
    let store = Store::start(&place, name).await?;
    let settings = format!("{}{PATIENT}", store.settings());
    let fleet = Processes::start(place, &plan(2, &settings)).await?;
    wait_until_used(&fleet, &store, 1000).await?;
    let figures = play_rounds(&fleet).await?;
    let failed = count_claims(&fleet, name, "failed").await?;
    let granted = count_claims(&fleet, name, "granted").await?;
    let expected = (rounds(&fleet) * 2 * SESSIONS) as u64;
    ensure!(granted >= expected, "the store gave {granted} claims for {expected} sessions");
    Ok(format!("{figures}; {name} gave {granted} claims, {failed} failed"))
}

/// Loses the store while first turns run. With the default deadline: what a turn waits for a store
/// that is gone must be what it is in production.
async fn lose_store(place: Place, name: &'static str, signal: Signal) -> anyhow::Result<String> {
    let mut store = Store::start(&place, name).await?;
    let fleet = Processes::start(place, &plan(2, &store.settings())).await?;
    wait_until_used(&fleet, &store, 1000).await?;
    let agents: Vec<usize> = (0..ENGINES).collect();
    let mut began = vec![];
    for round in 0..rounds(&fleet).min(5) {
        let process = &store.process;
        let lose = || if round == 0 { process.signal(signal) } else { Ok(()) };
        play(&fleet, &[0, 1], round, Kind::Turns, lose).await?.check_all_answered()?;
        began.push(count_split(&fleet, &agents, round, Kind::Turns).await?);
    }
    let by_agents = count_claims(&fleet, "agents", "granted").await?;
    ensure!(by_agents > 0, "no agent gave a claim while the store was gone");
    let skipped = count_claims(&fleet, name, "skipped").await?;
    ensure!(skipped > 0, "every turn waited for a store that is gone");
    if signal == Signal::STOP {
        store.process.signal(Signal::CONT)?;
    } else {
        store.process.end(signal).await.context("the store was killed")?;
        store.start_again().await?;
    }
    let again = wait_until_used(&fleet, &store, 100).await?.as_secs_f64();
    let mended = wait_until_mended(&fleet, &agents).await?.as_secs_f64();
    Ok(format!(
        "no turn failed; agents gave {by_agents} claims; of {SESSIONS} sessions a round {began:?} \
         began on two workers, all were mended in {mended:.1} s; the store was used again after \
         {again:.1} s"
    ))
}

async fn redis(place: Place) -> anyhow::Result<String> {
    with_store(place, "redis").await
}

async fn etcd(place: Place) -> anyhow::Result<String> {
    with_store(place, "etcd").await
}

async fn redis_killed(place: Place) -> anyhow::Result<String> {
    lose_store(place, "redis", Signal::KILL).await
}

async fn redis_stopped(place: Place) -> anyhow::Result<String> {
    lose_store(place, "redis", Signal::STOP).await
}

async fn etcd_killed(place: Place) -> anyhow::Result<String> {
    lose_store(place, "etcd", Signal::KILL).await
}

async fn etcd_stopped(place: Place) -> anyhow::Result<String> {
    lose_store(place, "etcd", Signal::STOP).await
}
