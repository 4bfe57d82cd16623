//! Tests of the socket, with shims that write messages field by field.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    time::Duration,
};

use serde::Serialize;
use serde_bytes::Bytes;

use super::{
    codec::tests::{framed, no_facts},
    *,
};

/// A generous limit for operations that take milliseconds, also on a slow machine.
pub(super) const SOON: Duration = Duration::from_secs(60);

/// A folder for one test, removed at its end.
pub(super) struct Folder(PathBuf);

impl Folder {
    pub(super) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("berth-shim-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.0.join("shim.sock")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct TestAgent {
    folder: Folder,
    tasks: Tasks,
    handle: ShimHandle,
    events: mpsc::Receiver<ShimEvent>,
}

impl TestAgent {
    fn new(name: &str, room: usize) -> Self {
        let (folder, tasks) = (Folder::new(name), Tasks::default());
        let (sender, events) = mpsc::channel(room);
        let handle = listen(&folder.socket(), sender, &tasks).unwrap();
        Self { folder, tasks, handle, events }
    }

    fn shim(&self, dp_rank: u32, instance: u8) -> Shim {
        self.shim_saying(dp_rank, instance, None)
    }

    fn shim_saying(&self, dp_rank: u32, instance: u8, inert_reason: Option<&str>) -> Shim {
        let stream = UnixStream::connect(self.folder.socket()).unwrap();
        let mut shim = Shim { stream, seq: 0 };
        let no_reason = None::<&str>;
        shim.send(&(
            "Hello",
            1,
            dp_rank,
            16,
            2048,
            8,
            [instance; 16],
            "0.5.23",
            "0.1.0",
            inert_reason,
            no_reason,
            no_reason,
            no_reason,
            "cpu",
            4096,
            (no_reason, Some("")),
        ));
        shim
    }

    async fn next(&mut self) -> ShimEvent {
        tokio::time::timeout(SOON, self.events.recv()).await.expect("in time").expect("an event")
    }
}

struct Shim {
    stream: UnixStream,
    seq: u64,
}

impl Shim {
    fn send(&mut self, message: &impl Serialize) {
        self.stream.write_all(&framed(message)).unwrap();
    }

    /// Sends an update with a number of free tokens and some closed sessions.
    fn update(&mut self, available: u64, closed: &[&str]) {
        let update = update(self.seq, available, closed);
        self.send(&update);
        self.seq += 1;
    }
}

fn update(seq: u64, available: u64, closed: &[&str]) -> impl Serialize {
    let used = 2048 - available;
    let facts = RankFacts {
        pool_tokens: 2048,
        available_tokens: available,
        uncached_tokens: used,
        ..no_facts()
    };
    let events: Vec<_> = closed.iter().map(|id| ("Closed", (*id).to_owned())).collect();
    ("Update", seq, facts, false, false, events, [(); 0], [(); 0])
}

fn is_up(news: &ShimEvent, rank: u32, instance: u8) -> bool {
    matches!(news, ShimEvent::Up(hello) if hello.dp_rank == rank
        && hello.instance == [instance; 16]
        && (hello.pid, hello.pid_in_agent_namespace) == (1, Some(std::process::id())))
}

#[tokio::test]
async fn what_a_shim_says_arrives_and_commands_reach_it() {
    let mut agent = TestAgent::new("says", 16);
    let mut shim = agent.shim(2, 1);
    let up = agent.next().await;
    assert!(is_up(&up, 2, 1), "{up:?}");
    shim.update(2000, &["s#1"]);
    assert_eq!(agent.next().await, ShimEvent::Closed { dp_rank: 2, id: "s#1".into() });
    let ShimEvent::Facts(facts) = agent.next().await else { panic!("no facts") };
    assert_eq!((facts.available_tokens, facts.uncached_tokens, facts.dp_rank), (2000, 48, 2));

    agent.handle.demote(2, 7, "s#2".into()).await.unwrap();
    agent.handle.sample_now(2).unwrap();
    agent.handle.audit(2, 9).unwrap();
    assert!(matches!(agent.handle.demote(0, 8, "s#2".into()).await, Err(Error::NoShim(0))));
    let wanted = [framed(&("Demote", 7, "s#2")), framed(&("SampleNow",)), framed(&("Audit", 9))];
    let wanted = wanted.concat();
    let read = tokio::task::spawn_blocking(move || {
        shim.stream.set_read_timeout(Some(SOON)).unwrap();
        let mut bytes = vec![0; wanted.len()];
        shim.stream.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, wanted);
        shim
    });
    let mut shim = read.await.unwrap();
    shim.send(&("Audited", 9, (0, 0), (), ["s#2"], Bytes::new(b"what was found")));
    let ShimEvent::Audited { dp_rank: 2, reply } = agent.next().await else { panic!("no audit") };
    assert_eq!((reply.number, &reply.names[..]), (9, &["s#2".to_owned()][..]));
    assert_eq!((reply.refusal, &reply.report[..]), (None, &b"what was found"[..]));
    drop(shim);
    let down = agent.next().await;
    assert!(matches!(&down, ShimEvent::Down { dp_rank: 2, .. }), "{down:?}");
    while !matches!(agent.handle.demote(2, 9, "s#2".into()).await, Err(Error::NoShim(2))) {
        assert!(tokio::time::timeout(SOON, agent.handle.changed()).await.unwrap());
    }
}

#[tokio::test]
async fn a_restarted_engine_replaces_the_one_before() {
    let mut agent = TestAgent::new("again", 16);
    let _first = agent.shim(0, 1);
    let up = agent.next().await;
    assert!(is_up(&up, 0, 1), "{up:?}");
    let mut second = agent.shim(0, 2);
    let down = agent.next().await;
    assert!(
        matches!(&down, ShimEvent::Down { reason, .. } if reason.contains("another")),
        "{down:?}"
    );
    let up = agent.next().await;
    assert!(is_up(&up, 0, 2), "{up:?}");
    // Commands go to the new connection.
    agent.handle.sample_now(0).unwrap();
    second.stream.set_read_timeout(Some(SOON)).unwrap();
    let wanted = framed(&("SampleNow",));
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = vec![0; wanted.len()];
        second.stream.read_exact(&mut bytes).map(|()| bytes == wanted)
    });
    assert!(read.await.unwrap().unwrap());
}

#[tokio::test]
async fn an_inert_shim_says_why_and_takes_no_commands() {
    let mut agent = TestAgent::new("inert", 16);
    let _shim = agent.shim_saying(1, 1, Some("unknown version"));
    let ShimEvent::Up(hello) = agent.next().await else { panic!("not up") };
    assert_eq!(hello.inert_reason.as_deref(), Some("unknown version"));
    assert!(matches!(agent.handle.demote(1, 1, "s".into()).await, Err(Error::NoShim(1))));
}

#[tokio::test]
async fn nonsense_ends_the_connection_and_says_why() {
    let mut agent = TestAgent::new("nonsense", 16);
    for (number, (spoil, said)) in
        [(0, "no valid message"), (1, "instead of update 1")].into_iter().enumerate()
    {
        let mut shim = agent.shim(0, u8::try_from(number).unwrap());
        agent.next().await;
        shim.update(1, &[]);
        assert!(matches!(agent.next().await, ShimEvent::Facts(_)));
        if spoil == 0 {
            shim.send(&("Goodbye",));
        } else {
            shim.seq = 9;
            shim.update(1, &[]);
        }
        let ShimEvent::Down { reason, .. } = agent.next().await else { panic!("not down") };
        assert!(reason.contains(said), "{reason}");
    }
}

#[tokio::test]
async fn a_slow_receiver_stops_the_shim_and_misses_no_event() {
    let mut agent = TestAgent::new("slow", 1);
    let mut shim = agent.shim(0, 1);
    shim.stream.set_write_timeout(Some(SOON)).unwrap();
    // Ends when the socket is full: without a receiver of its news the agent stops reading.
    let sent = tokio::task::spawn_blocking(move || {
        let ids: Vec<String> = (0..100_000).map(|number| format!("session-{number}")).collect();
        let mut sent = 0;
        for id in &ids {
            if sent == outbox::EVENTS_MAX {
                // Up to here a slow agent must still read; from here on it may stop reading.
                shim.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
            }
            match shim.stream.write_all(&framed(&update(shim.seq, 0, &[id]))) {
                Ok(()) => sent += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock);
                    break;
                }
            }
            shim.seq += 1;
        }
        (sent, shim)
    });
    let (sent, shim) = sent.await.unwrap();
    assert!((outbox::EVENTS_MAX..100_000).contains(&sent), "{sent} updates were taken");
    drop(shim);
    let mut closed = 0;
    loop {
        match agent.next().await {
            ShimEvent::Closed { id, .. } => {
                assert_eq!(id, format!("session-{closed}"));
                closed += 1;
            }
            ShimEvent::Down { .. } => break,
            ShimEvent::Up(_) | ShimEvent::Facts(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(closed, sent);
}

#[tokio::test]
async fn the_socket_is_this_users_own_and_goes_with_the_agent() {
    let agent = TestAgent::new("own", 1);
    let path = agent.folder.socket();
    let mode =
        |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&path), mode(&agent.folder.0)), (0o600, 0o700));
    let (sender, _news) = mpsc::channel(1);
    let taken = listen(&path, sender, &agent.tasks);
    assert!(matches!(taken, Err(Error::PathTaken(_))), "{taken:?}");
    assert!(agent.tasks.stop(SOON).await, "an essential task ended early");
    assert!(!path.exists());
}

#[tokio::test]
async fn a_crashed_agents_socket_is_replaced_and_nothing_else_is() {
    let folder = Folder::new("stale");
    std::fs::create_dir(&folder.0).unwrap();
    let tasks = Tasks::default();
    drop(UnixListener::bind(folder.socket()).unwrap());
    assert!(folder.socket().exists(), "a dropped listener leaves its file");
    let (sender, _news) = mpsc::channel(1);
    listen(&folder.socket(), sender.clone(), &tasks).unwrap();
    UnixStream::connect(folder.socket()).unwrap();

    let file = folder.0.join("file");
    std::fs::write(&file, "kept").unwrap();
    assert!(matches!(listen(&file, sender.clone(), &tasks), Err(Error::PathTaken(_))));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");

    let open = folder.0.join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(listen(&open.join("s"), sender, &tasks), Err(Error::Folder(_))));
}
