//! What every place that holds claims does, asked of real servers.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    sync::Arc,
};

use contract::placement_claim::CLAIMS_MAX;
use service::tasks::Tasks;
use tokio::task::JoinSet;

use super::*;
use crate::{
    claims::etcd::EtcdStore,
    config::claims::{ClaimsTable, StoreName},
};

/// Life of a claim, longer than a machine stops for a moment. etcd counts in seconds.
const TTL_MS: u64 = 6_000;
/// How long a claim may take on a busy machine.
const TIME_MAX: Duration = Duration::from_secs(5);

/// A server's process, which ends with the test.
struct Server {
    process: Child,
    _data: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns two free ports of a loopback address that no other process uses.
fn free_ports() -> [SocketAddr; 2] {
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, 77, high, low);
    // Both at once, so that they differ.
    let listeners = [(); 2].map(|()| TcpListener::bind((host, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}

/// Starts a server with its data in a folder of its own. `None` if the program isn't installed.
#[expect(clippy::print_stderr, reason = "a test that is skipped says why")]
fn start(program: &str, arguments: &[String]) -> Option<Server> {
    let data = tempfile::tempdir().unwrap();
    let mut command = Command::new(program);
    command.args(arguments).current_dir(data.path());
    match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
        Ok(process) => Some(Server { process, _data: data }),
        Err(error) => {
            eprintln!("skipped: {program} can't be started: {error}");
            None
        }
    }
}

fn settings(store: StoreName, url: String) -> ClaimsTable {
    ClaimsTable { store, urls: vec![url], ttl_ms: TTL_MS, ..Default::default() }
}

fn request(key: u8, agent: &str, expected: Option<u64>) -> PlacementClaimRequest {
    let wanted = WorkerId { agent: agent.to_owned(), dp_rank: 1 };
    let ttl = Duration::from_millis(TTL_MS);
    PlacementClaimRequest { key: PlacementClaimKey([key; 16]), wanted, expected, ttl }
}

/// Asks until the store answers. It may have just been started, and a lease in etcd may end while a
/// machine stops for a moment.
async fn ask(store: &dyn ClaimStore, request: PlacementClaimRequest) -> PlacementClaim {
    let asked = async {
        loop {
            if let Ok(claim) = store.claim(request.clone(), TIME_MAX).await {
                return claim;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), asked).await.expect("the store answers")
}

/// Checks that a store means by a claim what [`PlacementClaimTable::claim`] does.
async fn check(store: Arc<dyn ClaimStore>) {
    ask(&*store, request(0, "w0", None)).await;
    let claim = async |agent, expected| ask(&*store, request(1, agent, expected)).await;
    // Of routers that ask at once, one is granted, and all others learn its worker.
    let mut routers = JoinSet::new();
    for number in 0..50 {
        let store = Arc::clone(&store);
        let request = request(1, &format!("w{number}"), None);
        routers.spawn(async move { ask(&*store, request).await });
    }
    let claims = routers.join_all().await;
    let granted: Vec<_> = claims.iter().filter(|claim| claim.is_granted).collect();
    let [first] = &granted[..] else { panic!("{granted:?}") };
    assert!(claims.iter().all(|claim| claim.worker == first.worker), "{claims:?}");
    assert!(claims.iter().all(|claim| claim.generation == first.generation), "{claims:?}");
    // The newest generation moves the session, and an older one does nothing.
    let moved = claim("m", Some(first.generation)).await;
    assert!(moved.is_granted && moved.generation > first.generation, "{moved:?}");
    for old in [Some(first.generation), None] {
        let late = claim("late", old).await;
        assert!(!late.is_granted && late.worker == moved.worker, "{late:?}");
        assert_eq!(late.generation, moved.generation);
    }
    // A claim that is renewed lives on, and one that isn't ends, whatever generation is expected.
    let mut generation = moved.generation;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(TTL_MS / 3)).await;
        let renewed = claim("m", Some(generation)).await;
        assert!(renewed.is_granted, "{renewed:?}");
        generation = renewed.generation;
    }
    let ended = async {
        loop {
            let again = claim("n", Some(7)).await;
            if again.is_granted {
                return again;
            }
            tokio::time::sleep(Duration::from_millis(TTL_MS / 4)).await;
        }
    };
    let again = tokio::time::timeout(Duration::from_secs(30), ended).await.expect("claims end");
    assert!(again.generation > generation, "{again:?} after {generation}");
}

#[tokio::test]
async fn claims_in_memory_are_compare_and_set() {
    check(Arc::new(MemoryStore(Mutex::new(PlacementClaimTable::new(CLAIMS_MAX, 1))))).await;
}

/// Values that no router writes.
const NO_CLAIMS: [&str; 7] = [
    "garbage",
    "",
    "7",
    "7 1",
    "99999999999999999999999999 1 w0",
    "7 99999999999999999999 w0",
    "7 x w0",
];

#[cfg(feature = "redis")]
/// Sends commands to a Redis server, and waits until it has answered all.
fn command_redis(address: SocketAddr, commands: &[&[&str]]) {
    use std::io::{BufRead as _, BufReader, Write as _};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    for command in commands {
        write!(stream, "*{}\r\n", command.len()).unwrap();
        for word in *command {
            write!(stream, "${}\r\n{word}\r\n", word.len()).unwrap();
        }
    }
    for line in BufReader::new(stream).lines().take(commands.len()) {
        let line = line.unwrap();
        assert!(line.starts_with(['+', ':']), "{line}");
    }
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn what_is_no_claim_in_redis_is_replaced() {
    let ([address, _], tasks) = (free_ports(), Tasks::default());
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    let flags = ["--bind", &host, "--save", "", "--port", &port];
    let Some(_server) = start("redis-server", &flags.map(str::to_owned)) else { return };
    let settings = settings(StoreName::Redis, format!("redis://{address}"));
    let store = crate::sessions::claims::redis::RedisStore::open(&settings, None, &tasks).unwrap();
    ask(&store, request(0, "w0", None)).await;
    let name = format!("{}:claims:{}", settings.prefix, hex(PlacementClaimKey([1; 16])));
    let poisoned = NO_CLAIMS.iter().map(|value| vec!["SET", &name, value]);
    for poison in poisoned.chain([vec!["LPUSH", &name, "a", "list"]]) {
        command_redis(address, &[&["DEL", &name], &poison]);
        let claim = store.claim(request(1, "w1", None), TIME_MAX).await.unwrap();
        assert!(claim.is_granted && claim.worker.agent == "w1", "{poison:?}: {claim:?}");
        let other = store.claim(request(1, "w2", None), TIME_MAX).await.unwrap();
        assert!(!other.is_granted && other.worker == claim.worker, "{poison:?}: {other:?}");
    }
    tasks.cancel();
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn claims_in_redis_are_compare_and_set() {
    let ([address, _], tasks) = (free_ports(), Tasks::default());
    let (host, port) = (address.ip().to_string(), address.port().to_string());
    let flags = ["--bind", &host, "--save", "", "--port", &port];
    let Some(_server) = start("redis-server", &flags.map(str::to_owned)) else { return };
    let settings = settings(StoreName::Redis, format!("redis://{address}/3"));
    check(Arc::new(
        crate::sessions::claims::redis::RedisStore::open(&settings, None, &tasks).unwrap(),
    ))
    .await;
    tasks.cancel();
}

#[tokio::test]
async fn claims_in_etcd_are_compare_and_set() {
    let tasks = Tasks::default();
    let [clients, peers] = free_ports().map(|address| format!("http://{address}"));
    let flags = [
        "--name=t",
        "--data-dir=data",
        &format!("--listen-client-urls={clients}"),
        &format!("--advertise-client-urls={clients}"),
        &format!("--listen-peer-urls={peers}"),
        &format!("--initial-advertise-peer-urls={peers}"),
        &format!("--initial-cluster=t={peers}"),
    ];
    let Some(_server) = start("etcd", &flags.map(str::to_owned)) else { return };
    let settings = settings(StoreName::Etcd, clients);
    check(Arc::new(EtcdStore::open(&settings, None, &tasks).unwrap())).await;
    tasks.cancel();
}
