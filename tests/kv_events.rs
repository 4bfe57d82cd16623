//! The engine simulator's KV events as a subscriber sees them.
//!
//! Covered are the bytes on the wire, a subscriber with libzmq, and batches that the simulator
//! loses or reorders on purpose. The conformance suite compares the events' content with the
//! engine's.

use serde_json::{Value, json};
use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};
use tests::{
    cluster::PATIENCE,
    engine_sim::{
        Config, EngineSim,
        kv::{Fault, KvEventsConfig},
    },
    web::Web,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout},
};

/// A subscriber's or dealer's socket. A message is a list of frames.
struct Socket(TcpStream);

impl Socket {
    async fn connect(port: u64, kind: &str) -> Socket {
        let port = u16::try_from(port).expect("a port");
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.expect("a listener");
        let mut greeting = [0_u8; 64];
        greeting[0] = 0xff;
        greeting[9..16].copy_from_slice(b"\x7f\x03\x00NULL");
        stream.write_all(&greeting).await.expect("a peer");
        stream.read_exact(&mut greeting).await.expect("a greeting");
        let short = |bytes: &[u8]| u8::try_from(bytes.len()).expect("a short text");
        let ready = [&b"\x05READY\x0bSocket-Type\0\0\0"[..], &[short(kind.as_bytes())]].concat();
        let ready = [&ready, kind.as_bytes()].concat();
        stream.write_all(&[&[4, short(&ready)], &ready[..]].concat()).await.expect("a peer");
        let mut socket = Socket(stream);
        assert!(socket.frame().await.1.starts_with(b"\x05READY"));
        socket
    }

    /// Subscribes, and returns when the subscription has taken effect: the publisher answers the
    /// heartbeat only after that, because it reads in order.
    async fn subscribe(port: u64) -> Socket {
        let mut socket = Socket::connect(port, "SUB").await;
        socket.0.write_all(b"\x00\x01\x01\x04\x08\x04PING\0\0!").await.expect("a peer");
        assert_eq!(socket.frame().await, (4, b"\x04PONG!".to_vec()));
        socket
    }

    async fn frame(&mut self) -> (u8, Vec<u8>) {
        let read = async {
            let flags = self.0.read_u8().await?;
            let size = if flags & 2 == 0 {
                u64::from(self.0.read_u8().await?)
            } else {
                self.0.read_u64().await?
            };
            let mut body = vec![0; usize::try_from(size).expect("a small message")];
            self.0.read_exact(&mut body).await?;
            Ok::<_, std::io::Error>((flags, body))
        };
        timeout(PATIENCE, read).await.expect("a message in time").expect("a live connection")
    }

    async fn message(&mut self) -> Vec<Vec<u8>> {
        let mut frames = vec![];
        loop {
            let (flags, body) = self.frame().await;
            frames.push(body);
            if flags & 1 == 0 {
                return frames;
            }
        }
    }

    /// Returns the number and content of the next batch.
    async fn batch(&mut self) -> (u64, Vec<u8>) {
        batch(&self.message().await)
    }
}

fn batch(frames: &[Vec<u8>]) -> (u64, Vec<u8>) {
    let [topic, number, payload] = frames else { panic!("no batch: {frames:?}") };
    assert!(topic.is_empty());
    (u64::from_be_bytes(number[..].try_into().expect("eight bytes")), payload.clone())
}

struct Engine {
    sim: EngineSim,
    web: Web,
    info: Value,
}

impl Engine {
    async fn start(kv_events: KvEventsConfig, dp_size: usize) -> Engine {
        let config = Config { kv_events: Some(kv_events), dp_size, ..Config::default() };
        let sim = EngineSim::start_local(config).await.expect("free ports");
        let mut engine = Engine { sim, web: Web::default(), info: Value::Null };
        engine.read_server_info().await;
        engine
    }

    async fn read_server_info(&mut self) {
        let answer = self.web.get(&format!("{}/server_info", self.sim.url())).await;
        self.info = answer.expect("an answer").json()["kv_events"].clone();
    }

    fn port(&self, key: &str) -> u64 {
        self.info[key].as_u64().unwrap_or_else(|| panic!("no {key} in {}", self.info))
    }

    async fn subscribe(&self, rank: u64) -> Socket {
        Socket::subscribe(self.port("endpoint_port_base") + rank).await
    }

    /// Makes the engine store two pages, which it publishes in one batch.
    async fn store(&self, token: u32, rank: u64) {
        let body = json!({
            "input_ids": vec![token; 32], "sampling_params": {"max_new_tokens": 1},
            "routed_dp_rank": rank,
        });
        let url = format!("{}/generate", self.sim.url());
        let answer = self.web.post(&url, &[], &body).await.expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// Returns the batches that the publisher has kept, from number `from` on.
    async fn replay(&self, from: u64) -> Vec<(u64, Vec<u8>)> {
        let mut dealer = Socket::connect(self.port("replay_endpoint_port_base"), "DEALER").await;
        let request = [&[1, 0, 0, 8][..], &from.to_be_bytes()].concat();
        dealer.0.write_all(&request).await.expect("a peer");
        let mut batches = vec![];
        loop {
            let frames = dealer.message().await;
            assert_eq!(frames[0], b"");
            if frames[2] == [0xff; 8] {
                return batches;
            }
            batches.push(batch(&frames[1..]));
        }
    }
}

fn has(payload: &[u8], text: &str) -> bool {
    payload.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn a_lost_batch_leaves_a_gap_that_a_replay_fills() {
    let engine = Engine::start(KvEventsConfig::local(), 1).await;
    let mut live = engine.subscribe(0).await;
    engine.store(1, 0).await;
    let (first, _) = live.batch().await;
    engine.sim.kv_fault(0, Fault::Drop(2)).await;
    for token in 2..=4 {
        engine.store(token, 0).await;
    }
    let (next, payload) = live.batch().await;
    assert_eq!(next, first + 3);
    let replayed = engine.replay(first + 1).await;
    let numbers: Vec<u64> = replayed.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [first + 1, first + 2, first + 3]);
    assert_eq!(replayed[2].1, payload);
}

#[tokio::test]
async fn dropped_batches_are_not_replayed() {
    let engine = Engine::start(KvEventsConfig::local(), 1).await;
    let mut live = engine.subscribe(0).await;
    engine.store(1, 0).await;
    let (first, _) = live.batch().await;
    engine.sim.kv_fault(0, Fault::Forget).await;
    engine.store(2, 0).await;
    live.batch().await;
    let replayed = engine.replay(0).await;
    let numbers: Vec<u64> = replayed.into_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, [first + 1]);
}

#[tokio::test]
async fn a_batch_that_is_lost_for_good_is_neither_sent_nor_replayed() {
    let engine = Engine::start(KvEventsConfig::local(), 1).await;
    let mut live = engine.subscribe(0).await;
    engine.sim.kv_fault(0, Fault::Lose(1)).await;
    for token in 1..=2 {
        engine.store(token, 0).await;
    }
    let (next, _) = live.batch().await;
    let replayed = engine.replay(next - 1).await;
    let numbers: Vec<u64> = replayed.into_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, [next]);
}

#[tokio::test]
async fn a_delayed_batch_arrives_after_its_delay() {
    let engine = Engine::start(KvEventsConfig::local(), 1).await;
    let mut live = engine.subscribe(0).await;
    let delay = Duration::from_millis(30);
    engine.sim.kv_fault(0, Fault::Delay(delay)).await;
    let begin = Instant::now();
    engine.store(1, 0).await;
    live.batch().await;
    assert!(begin.elapsed() >= delay);
}

#[tokio::test]
async fn a_restarted_engine_counts_from_zero_at_the_same_ports() {
    let mut engine = Engine::start(KvEventsConfig::local(), 1).await;
    let mut live = engine.subscribe(0).await;
    engine.store(1, 0).await;
    live.batch().await;
    let before = engine.info.clone();
    engine.sim = engine.sim.restart().await.expect("its ports are free again");
    assert_eq!(live.0.read(&mut [0]).await.ok().unwrap_or(0), 0, "the old connection has ended");
    engine.read_server_info().await;
    assert_eq!(engine.info, before);
    let mut live = engine.subscribe(0).await;
    engine.store(1, 0).await;
    assert_eq!(live.batch().await.0, 1);
    let replayed = engine.replay(0).await;
    assert_eq!(replayed[0].0, 0);
    assert!(has(&replayed[0].1, "AllBlocksCleared") && has(&replayed[1].1, "BlockStored"));
}

#[tokio::test]
async fn each_rank_publishes_its_own_beside_the_first_one_s_port() {
    let engine = Engine::start(KvEventsConfig::local(), 2).await;
    let (mut first, mut second) = (engine.subscribe(0).await, engine.subscribe(1).await);
    engine.store(1, 1).await;
    engine.store(2, 0).await;
    // The payload's last byte is the rank.
    let ranks = (first.batch().await.1.pop(), second.batch().await.1.pop());
    assert_eq!(ranks, (Some(0), Some(1)));
}

#[tokio::test]
async fn older_releases_encode_events_as_arrays() {
    let config = KvEventsConfig { arrays: true, ..KvEventsConfig::local() };
    let engine = Engine::start(config, 1).await;
    let mut live = engine.subscribe(0).await;
    engine.store(1, 0).await;
    let (_, payload) = live.batch().await;
    // One event of seven fields; the first field is a text of eleven bytes.
    assert_eq!(payload[10..13], [0x91, 0x97, 0xab]);
    assert!(!has(&payload, "block_hashes"));
}

#[tokio::test]
async fn unsupported_configurations_are_refused() {
    let remote = KvEventsConfig { bind: None, ..KvEventsConfig::local() };
    let config = Config { kv_events: Some(remote), ..Config::default() };
    let error = EngineSim::start_local(config).await.expect_err("it would have to connect");
    assert!(error.to_string().contains("set bind"), "{error}");
}

/// Returns the Python of the engine's own environment, if it has libzmq.
fn python_with_libzmq() -> Option<PathBuf> {
    let named = std::env::var_os("BERTH_SGLANG_HOME").map(PathBuf::from);
    let cache = || Some(Path::new(&std::env::var_os("HOME")?).join(".cache/berth/sglang-0.5.23"));
    let python = named.or_else(cache)?.join("venv/bin/python");
    let check = Command::new(&python).args(["-c", "import zmq"]).status();
    check.is_ok_and(|status| status.success()).then_some(python)
}

const LIBZMQ: &str = "
import sys, zmq
events, replay = sys.argv[1:]
context = zmq.Context()
sub = context.socket(zmq.SUB)
sub.heartbeat_ivl = 50
sub.subscribe(b'')
sub.connect(f'tcp://127.0.0.1:{events}')
dealer = context.socket(zmq.DEALER)
dealer.connect(f'tcp://127.0.0.1:{replay}')
print('ready', flush=True)
topic, number, payload = sub.recv_multipart()
dealer.send_multipart([b'', number])
print(dealer.recv_multipart() == [b'', topic, number, payload])
while dealer.recv_multipart()[2] != b'\\xff' * 8:
    pass
print(sub.recv_multipart()[1] > number)
";

#[tokio::test]
async fn libzmq_receives_the_events() {
    let Some(python) = python_with_libzmq() else {
        let reason = "skipped: no libzmq to ask; tests/sglang/install brings one";
        writeln!(std::io::stdout(), "{reason}").expect("a test has an output");
        return;
    };
    let engine = Engine::start(KvEventsConfig::local(), 1).await;
    let ports = ["endpoint_port_base", "replay_endpoint_port_base"];
    let ports = ports.map(|key| engine.port(key).to_string());
    let child = tokio::process::Command::new(python)
        .args(["-c", LIBZMQ])
        .args(ports)
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("python has just run");
    let mut ended = Box::pin(child.wait_with_output());
    // A batch that is published before libzmq has subscribed never reaches it, so publish until it
    // ends.
    let mut turns = 0;
    let output = loop {
        tokio::select! {
            output = &mut ended => break output.expect("its output"),
            () = engine.store(turns % 250, 0) => {
                turns += 1;
                let url = format!("{}/flush_cache", engine.sim.url());
                engine.web.post(&url, &[], &Value::Null).await.expect("an answer");
            }
        }
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ready\nTrue\nTrue\n");
}
