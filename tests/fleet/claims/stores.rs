//! Claim stores: real servers of Redis and etcd, which are killed, stopped and cut off under load.

use std::{io, time::Duration};

use anyhow::{Context as _, ensure};
use harness::{
    case,
    cases::Case,
    fleet::{FleetPlan, Place, Process, Processes, own_host},
};
use rustix::process::Signal;
use service::clock::now;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinSet,
};

use super::{
    ENGINES, Kind, SESSIONS, check_few_split, count_split, patience, plan, play, play_rounds,
    rounds, wait_for, wait_until_mended,
};

/// The cases, in the order in which they run.
pub(crate) const CASES: &[Case] = &[
    case!("claims: redis", true, redis),
    case!("claims: etcd", true, etcd),
    case!("claims: redis, five routers", false, redis_five),
    case!("claims: etcd, five routers", false, etcd_five),
    case!("claims: redis killed", true, redis_killed),
    case!("claims: redis stopped", false, redis_stopped),
    case!("claims: redis cut off from one router", true, redis_cut_off),
    case!("claims: etcd killed", true, etcd_killed),
    case!("claims: etcd stopped", false, etcd_stopped),
    case!("claims: etcd cut off from one router", false, etcd_cut_off),
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
        wait_for("the store's port", || async { Ok(TcpStream::connect(address).await.ok()) })
            .await?;
        Ok(())
    }

    /// Returns the routers' settings.
    fn settings(&self) -> String {
        self.settings_at(&self.host)
    }

    /// Returns the settings of a router that finds the store at another host.
    fn settings_at(&self, host: &str) -> String {
        let Self { name, port, .. } = self;
        let scheme = if *name == "redis" { "redis" } else { "http" };
        format!("claims.store = \"{name}\"\nclaims.urls = [\"{scheme}://{host}:{port}\"]\n")
    }
}

/// Stands between a router and a store, and can cut them off from each other: then it accepts
/// connections and bytes, and passes on none.
struct Relay {
    host: String,
    is_open: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Relay {
    async fn start(store: &Store) -> anyhow::Result<Self> {
        let host = own_host();
        let listener = TcpListener::bind((host.as_str(), store.port)).await?;
        let (target, is_open) = ((store.host.clone(), store.port), watch::Sender::new(true));
        let mut tasks = JoinSet::new();
        let gate = is_open.subscribe();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((router, _)) = listener.accept().await {
                let (target, gate) = (target.clone(), gate.clone());
                connections.spawn(async move {
                    let Ok(store) = TcpStream::connect(target).await else { return };
                    let (from_router, to_router) = router.into_split();
                    let (from_store, to_store) = store.into_split();
                    let there = pass_on(from_router, to_store, gate.clone());
                    let back = pass_on(from_store, to_router, gate);
                    let _ = tokio::try_join!(there, back);
                });
            }
        });
        Ok(Self { host, is_open, tasks })
    }
}

/// Passes on bytes while the gate is open, until either end closes.
async fn pass_on(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut gate: watch::Receiver<bool>,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let count = from.read(&mut buffer).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        gate.wait_for(|is_open| *is_open).await.map_err(io::Error::other)?;
        to.write_all(&buffer[..count]).await?;
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

async fn with_store(place: Place, name: &'static str, routers: usize) -> anyhow::Result<String> {
    let store = Store::start(&place, name).await?;
    let settings = store.settings() + patience(&place);
    let fleet = Processes::start(place, &plan(routers, &settings)).await?;
    wait_until_used(&fleet, &store, 1000).await?;
    let figures = play_rounds(&fleet).await?;
    let failed = count_claims(&fleet, name, "failed").await?;
    let granted = count_claims(&fleet, name, "granted").await?;
    let sessions = (rounds(&fleet) * 2 * SESSIONS) as u64;
    // A disk that is busy for half a second has agents hold the claims meanwhile.
    ensure!(granted > sessions / 2, "the store gave {granted} claims for {sessions} sessions");
    Ok(format!("{figures}; {name} gave {granted} claims, {failed} failed"))
}

/// Loses the store while first turns run. With the default deadline: what a turn waits for a store
/// that is gone must be what it is in production.
async fn lose_store(place: Place, name: &'static str, signal: Signal) -> anyhow::Result<String> {
    let mut store = Store::start(&place, name).await?;
    let mut settings = store.settings();
    if place.is_quick && signal == Signal::KILL {
        // The store's host refuses at once. An agent may stop for longer than half a second in CI.
        settings += "claims.patience_ms = 10000\n";
    }
    let fleet = Processes::start(place, &plan(2, &settings)).await?;
    wait_until_used(&fleet, &store, 1000).await?;
    let agents: Vec<usize> = (0..ENGINES).collect();
    let mut began = vec![];
    for round in 0..rounds(&fleet).min(5) {
        let process = &store.process;
        let lose = || if round == 0 { process.signal(signal) } else { Ok(()) };
        play(&fleet, &[0, 1], round, Kind::Turns, lose).await?.check_all_answered()?;
        began.push(count_split(&fleet, &agents, round, Kind::Turns).await?);
    }
    check_few_split(&began)?;
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

/// Cuts one of two routers off from the store while first turns run.
async fn cut_off(place: Place, name: &'static str) -> anyhow::Result<String> {
    let store = Store::start(&place, name).await?;
    let relay = Relay::start(&store).await?;
    let own_router_settings = vec![store.settings_at(&relay.host), store.settings()];
    let plan = FleetPlan { own_router_settings, ..plan(2, "") };
    let fleet = Processes::start(place, &plan).await?;
    wait_until_used(&fleet, &store, 1000).await?;
    let agents: Vec<usize> = (0..ENGINES).collect();
    let mut began = vec![];
    for round in 0..rounds(&fleet).min(5) {
        let cut = || {
            relay.is_open.send_replace(false);
            Ok(())
        };
        play(&fleet, &[0, 1], round, Kind::Turns, cut).await?.check_all_answered()?;
        began.push(count_split(&fleet, &agents, round, Kind::Turns).await?);
    }
    check_few_split(&began)?;
    // All sessions of a round may be claimed at once: then each claim fails, and none is skipped.
    let failed = count_claims(&fleet, name, "failed").await?;
    let skipped = count_claims(&fleet, name, "skipped").await?;
    ensure!(failed + skipped > 0, "no router was cut off");
    relay.is_open.send_replace(true);
    let mended = wait_until_mended(&fleet, &agents).await?.as_secs_f64();
    drop(relay.tasks);
    Ok(format!(
        "no turn failed; of {SESSIONS} sessions a round {began:?} began on two workers, all were \
         mended in {mended:.1} s"
    ))
}

async fn redis(place: Place) -> anyhow::Result<String> {
    with_store(place, "redis", 2).await
}

async fn etcd(place: Place) -> anyhow::Result<String> {
    with_store(place, "etcd", 2).await
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

async fn redis_five(place: Place) -> anyhow::Result<String> {
    with_store(place, "redis", 5).await
}

async fn etcd_five(place: Place) -> anyhow::Result<String> {
    with_store(place, "etcd", 5).await
}

async fn redis_cut_off(place: Place) -> anyhow::Result<String> {
    cut_off(place, "redis").await
}

async fn etcd_cut_off(place: Place) -> anyhow::Result<String> {
    cut_off(place, "etcd").await
}
