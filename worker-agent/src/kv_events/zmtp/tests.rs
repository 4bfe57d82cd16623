//! Tests against recorded bytes of libzmq 4.3.5, and against libzmq itself where it is installed.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use proptest::prelude::*;
use tokio::{io::AsyncReadExt as _, net::TcpListener};

use super::*;

/// A PUB socket's greeting and READY command, and two messages without the second one's 300 bytes
/// `x`.
const PUB: &str = "ff00000000000000017f03014e554c4c000000000000000000000000000000000000000000000000\
    00000000000000000000000000000000000000000000000004190552454144590b536f636b65742d54797065000000\
    0350554201096b762d6576656e747301080000000000000007000573686f727401096b762d6576656e747301080000\
    00000000000802000000000000012c";

fn recorded() -> Vec<u8> {
    let pairs = PUB.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    let mut bytes: Vec<u8> = pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect();
    bytes.extend([b'x'; 300]);
    bytes
}

fn expected() -> [Vec<Bytes>; 2] {
    let topic = Bytes::from_static(b"kv-events");
    let number = |number: u64| Bytes::copy_from_slice(&number.to_be_bytes());
    [
        vec![topic.clone(), number(7), Bytes::from_static(b"short")],
        vec![topic, number(8), Bytes::from(vec![b'x'; 300])],
    ]
}

fn take(messages: &mut MessageAssembler, bytes: &[u8]) -> Result<Vec<Vec<Bytes>>, Error> {
    messages.unread.extend_from_slice(bytes);
    let all = std::iter::from_fn(|| messages.next().transpose());
    let frames = all.filter_map(|incoming| match incoming {
        Ok(Incoming::Message(frames)) => Some(Ok(frames)),
        Ok(Incoming::Command(_)) => None,
        Err(error) => Some(Err(error)),
    });
    frames.collect()
}

proptest! {
    #[test]
    fn messages_are_the_same_however_they_are_cut(
        cuts in prop::collection::vec(0..400_usize, 0..9),
    ) {
        let bytes = recorded().split_off(GREETING_BYTES);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let (mut messages, mut found) = (MessageAssembler::new(EVENTS_BYTES_MAX), vec![]);
        for pair in cuts.windows(2) {
            found.extend(take(&mut messages, &bytes[pair[0]..pair[1]]).unwrap());
        }
        prop_assert_eq!(found, expected());
    }

    #[test]
    fn no_bytes_break_it(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = take(&mut MessageAssembler::new(EVENTS_BYTES_MAX), &bytes);
    }
}

#[test]
fn what_has_no_bound_is_refused_before_it_comes() {
    let taken = |bytes: &[u8]| take(&mut MessageAssembler::new(EVENTS_BYTES_MAX), bytes);
    assert!(matches!(taken(&[FLAG_LONG, 0, 0, 0, 0, 0xff, 0, 0, 0]), Err(Error::Bound(_))));
    assert!(matches!(
        taken(&[FLAG_LONG, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]),
        Err(Error::Bound(_))
    ));
    assert!(matches!(taken(&[FLAG_MORE, 0].repeat(FRAMES_MAX + 1)), Err(Error::Bound(_))));
    let mut requests = MessageAssembler::new(SocketType::Router.received_bytes_max());
    let too_long = take(&mut requests, &[FLAG_LONG, 0, 0, 0, 0, 0, 1, 0, 1]);
    assert!(matches!(too_long, Err(Error::Bound(REQUEST_BYTES_MAX))));
    assert!(matches!(taken(&[0x40, 0]), Err(Error::Frame)));
    assert!(matches!(taken(&[FLAG_MORE | FLAG_COMMAND, 0]), Err(Error::Frame)));
}

#[tokio::test]
async fn what_it_says_is_what_was_agreed_and_a_stranger_is_not_listened_to() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Endpoint::Tcp(listener.local_addr().unwrap().to_string());
    let peer = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut said = [0; GREETING_BYTES + 27 + 4];
        stream.write_all(&recorded()).await.unwrap();
        stream.read_exact(&mut said).await.unwrap();
        assert_eq!(&said[GREETING_BYTES..GREETING_BYTES + 9], b"\x04\x19\x05READY\x0b");
        assert_eq!(&said[GREETING_BYTES + 27..], b"\x00\x02\x01k");
        drop(stream);
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&[b'H'; GREETING_BYTES]).await.unwrap();
    };
    let own = async {
        let mut connection = Connection::open(&address, SocketType::Sub).await.unwrap();
        connection.subscribe(b"k").await.unwrap();
        for message in expected() {
            assert_eq!(connection.receive().await.unwrap(), message);
        }
        assert!(matches!(connection.receive().await, Err(Error::Closed)));
        let stranger = Connection::open(&address, SocketType::Dealer).await;
        assert!(matches!(stranger, Err(Error::Greeting)));
    };
    tokio::join!(peer, own);
}

/// Kills the process when dropped.
struct Python(Child);

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for a subscription, publishes three messages, and answers one replay request.
const LIBZMQ: &str = r#"
import sys, zmq
context = zmq.Context()
publisher, replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
for socket, endpoint in zip((publisher, replay), sys.argv[1:]):
    socket.bind(endpoint)
print(*(s.getsockopt_string(zmq.LAST_ENDPOINT) for s in (publisher, replay)), flush=True)
assert publisher.recv() == b"\x01kv"
for number in range(3):
    publisher.send_multipart([b"kv-events", number.to_bytes(8, "big"), b"x" * 100_000 * number])
publisher.send_multipart([b"load", b"", b"not subscribed to"])
client, empty, number = replay.recv_multipart()
replay.send_multipart([client, empty, b"kv-events", number, b"again"])
replay.send_multipart([client, b"", b"", b"\xff" * 8, b""])
replay.recv()
"#;

fn python() -> Option<PathBuf> {
    let set = std::env::var_os("BERTH_SGLANG_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/berth"));
    let python = set.or_else(|| Some(home()?.join("sglang-0.5.23")))?.join("venv/bin/python");
    python.exists().then_some(python)
}

#[expect(clippy::print_stderr, reason = "the tests' output must show what was skipped")]
fn report_skip() {
    eprintln!("skipped: no Python with pyzmq; tests/sglang/install makes one");
}

#[tokio::test]
async fn libzmq_is_understood_and_understands_over_every_transport() {
    let Some(python) = python() else {
        return report_skip();
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| format!("ipc://{}", folder.path().join(name).display());
    let name = |name: &str| format!("ipc://@berth-{}-{name}", std::process::id());
    for endpoints in [
        ["tcp://127.0.0.1:*".to_owned(), "tcp://127.0.0.1:*".to_owned()],
        [path("events"), path("replay")],
        [name("events"), name("replay")],
    ] {
        let mut child = Command::new(&python);
        let child = child.args(["-c", LIBZMQ]).args(&endpoints).stdout(Stdio::piped());
        let mut python = Python(child.spawn().unwrap());
        let mut bound = String::new();
        BufReader::new(python.0.stdout.take().unwrap()).read_line(&mut bound).unwrap();
        let bound: Vec<Endpoint> = bound.split_whitespace().map(endpoint).collect();
        let [events, replay] = &bound[..] else { panic!("{bound:?}") };
        exchange(events, replay).await;
    }
}

/// Returns what libzmq calls this endpoint.
fn endpoint(text: &str) -> Endpoint {
    match text.split_once("://") {
        Some(("tcp", address)) => Endpoint::Tcp(address.to_owned()),
        Some(("ipc", path)) => Endpoint::Ipc(path.to_owned()),
        _ => panic!("{text}"),
    }
}

async fn exchange(events: &Endpoint, replay: &Endpoint) {
    let mut sub = Connection::open(events, SocketType::Sub).await.unwrap();
    let mut dealer = Connection::open(replay, SocketType::Dealer).await.unwrap();
    sub.subscribe(b"kv").await.unwrap();
    for number in 0..3 {
        let message = sub.receive().await.unwrap();
        let [topic, found, payload] = &message[..] else { panic!("{message:?}") };
        assert_eq!((&topic[..], &found[..]), (&b"kv-events"[..], &u64::to_be_bytes(number)[..]));
        assert_eq!(payload.len() as u64, 100_000 * number);
    }
    dealer.send(&[b"", &u64::to_be_bytes(2)]).await.unwrap();
    let again = dealer.receive().await.unwrap();
    assert_eq!(again[..], [&b""[..], b"kv-events", &u64::to_be_bytes(2), b"again"]);
    assert_eq!(dealer.receive().await.unwrap()[2][..], [0xff; 8]);
}
