//! Tests of the trimmer's socket, with trimmers that send the protocol's bytes directly.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    time::Duration,
};

use super::{
    super::{
        codec,
        tests::{Folder, SOON, text},
    },
    *,
};

struct TestAgent {
    folder: Folder,
    handle: TrimHandle,
    events: mpsc::Receiver<TrimmerEvent>,
    _tasks: Tasks,
}

impl TestAgent {
    fn new(name: &str, room: usize) -> Self {
        let (folder, tasks) = (Folder::new(name), Tasks::default());
        let (sender, events) = mpsc::channel(room);
        let handle = listen(&folder.socket(), sender, &tasks).unwrap();
        Self { folder, handle, events, _tasks: tasks }
    }

    fn trimmer(&self, instance: u8, inert_reason: &str) -> TrimmerEnd {
        let path = format!("{}.trim", self.folder.socket().display());
        let mut trimmer = TrimmerEnd(UnixStream::connect(path).unwrap());
        let texts = ["0.5.23", "0.1.0", inert_reason].map(text).concat();
        trimmer.send(4, &[&1_u32.to_le_bytes()[..], &[instance; 16], &texts].concat());
        trimmer
    }

    async fn next(&mut self) -> TrimmerEvent {
        tokio::time::timeout(SOON, self.events.recv()).await.expect("in time").expect("an event")
    }

    /// Waits for a working trimmer to connect. Returns the first byte of its instance.
    async fn up(&mut self) -> u8 {
        let TrimmerEvent::Up(trimmer) = self.next().await else { panic!("not up") };
        let own_pid = Some(std::process::id());
        assert_eq!((trimmer.pid_in_agent_namespace, trimmer.inert_reason), (own_pid, None));
        trimmer.instance.to_le_bytes()[0]
    }

    /// Waits for the trimmer's connection to end. Returns the reason.
    async fn down(&mut self) -> String {
        match self.next().await {
            TrimmerEvent::Down { reason } => reason,
            other => panic!("{other:?}"),
        }
    }
}

struct TrimmerEnd(UnixStream);

impl TrimmerEnd {
    fn send(&mut self, kind: u8, body: &[u8]) {
        self.0.write_all(&framed(kind, body)).unwrap();
    }

    /// Reads the next `N` bytes.
    async fn reads<const N: usize>(&self) -> [u8; N] {
        let mut stream = self.0.try_clone().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = [0; N];
            stream.read_exact(&mut bytes).map(|()| bytes)
        });
        read.await.unwrap().unwrap()
    }
}

fn framed(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 2).unwrap().to_le_bytes();
    [&length, &[codec::VERSION, kind][..], body].concat()
}

/// The body of a plan for the session `s`, with half of the prompt trimmed.
fn planned(number: u64, prompt: u32) -> Vec<u8> {
    let numbers = [prompt / 2, prompt / 2, prompt - prompt / 2, prompt].map(u32::to_le_bytes);
    let texts = ["s", "rid", ""].map(text).concat();
    [&number.to_le_bytes()[..], &numbers.concat(), &[1], &texts].concat()
}

fn prompt_of(news: &TrimmerEvent) -> u32 {
    let TrimmerEvent::Planned(planned) = news else { panic!("{news:?}") };
    planned.prompt_tokens
}

#[tokio::test]
async fn plans_arrive_and_questions_are_answered() {
    let mut agent = TestAgent::new("plans", 16);
    assert!(matches!(agent.handle.answer(7, None, 0), Err(Error::NoShim(0))));
    let mut trimmer = agent.trimmer(1, "");
    assert_eq!(agent.up().await, 1);
    trimmer.send(5, &planned(0, 11));
    let TrimmerEvent::Planned(told) = agent.next().await else { panic!("no plan") };
    assert_eq!((told.question, told.plan), (None, Plan::Trimmed));
    assert_eq!(
        (told.shared_tokens, told.committed_tokens, told.appended_tokens, told.prompt_tokens),
        (5, 5, 6, 11)
    );
    assert_eq!((&*told.session, &*told.rid, &*told.why), ("s", "rid", ""));

    trimmer.send(5, &planned(7, 11));
    let TrimmerEvent::Planned(told) = agent.next().await else { panic!("no question") };
    assert_eq!(told.question, Some(7));
    agent.handle.answer(7, Some("s#2"), 512).unwrap();
    agent.handle.answer(8, None, 0).unwrap();
    let wanted = [
        &b"\x13\0\0\0\x04\x14\x07\0\0\0\0\0\0\0\0\x02\0\0\x03\0s#2"[..],
        b"\x10\0\0\0\x04\x14\x08\0\0\0\0\0\0\0\0\0\0\0\0\0",
    ];
    assert_eq!(trimmer.reads::<43>().await[..], wanted.concat());
    drop(trimmer);
    assert!(agent.down().await.contains("disconnected"));
}

#[tokio::test]
async fn an_inert_trimmer_says_why_and_is_asked_nothing() {
    let mut agent = TestAgent::new("trim-inert", 16);
    let _trimmer = agent.trimmer(1, "several DP ranks");
    let TrimmerEvent::Up(trimmer) = agent.next().await else { panic!("not up") };
    assert_eq!(trimmer.inert_reason.as_deref(), Some("several DP ranks"));
    assert!(matches!(agent.handle.answer(1, None, 0), Err(Error::NoShim(0))));
}

#[tokio::test]
async fn a_newer_trimmer_replaces_even_one_that_is_deaf() {
    let mut agent = TestAgent::new("trim-again", 16);
    let _deaf = agent.trimmer(1, "");
    assert_eq!(agent.up().await, 1);
    // Send until the socket and the queue of commands are full.
    let long = "s".repeat(512);
    let busy = loop {
        if let Err(error) = agent.handle.answer(1, Some(&long), 1) {
            break error;
        }
        tokio::task::yield_now().await;
    };
    assert!(matches!(busy, Error::QueueFull), "{busy}");
    let unnamed = agent.handle.answer(1, Some(&"s".repeat(513)), 1);
    assert!(matches!(unnamed, Err(Error::NameTooLong)), "who says it hears so");
    let second = agent.trimmer(2, "");
    assert!(agent.down().await.contains("another"));
    assert_eq!(agent.up().await, 2);
    agent.handle.answer(9, Some("s"), 1).unwrap();
    assert_eq!(second.reads::<7>().await, *b"\x11\0\0\0\x04\x14\x09");
}

#[tokio::test]
async fn nonsense_ends_the_connection_and_says_why() {
    let mut agent = TestAgent::new("trim-nonsense", 16);
    let unknown = [&planned(0, 4)[..24], &[9; 7]].concat();
    let hello = [&[0; 20][..], &["", "", ""].map(text).concat()].concat();
    for (kind, body, said) in [
        (2, planned(0, 4), "kind 2"),
        (5, unknown, "invalid value"),
        (5, planned(0, 4)[1..].to_vec(), "wrong length"),
        (4, hello, "hello"),
    ] {
        let mut trimmer = agent.trimmer(1, "");
        assert_eq!(agent.up().await, 1);
        trimmer.send(5, &planned(0, 3));
        assert_eq!(prompt_of(&agent.next().await), 3);
        trimmer.send(kind, &body);
        let reason = agent.down().await;
        assert!(reason.contains(said), "{reason}");
    }
    let mut huge = agent.trimmer(1, "");
    assert_eq!(agent.up().await, 1);
    huge.0.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(agent.down().await.contains("a frame of"));
}

#[tokio::test]
async fn a_slow_receiver_stops_the_reading_and_misses_no_plan() {
    let mut agent = TestAgent::new("trim-slow", 1);
    let mut trimmer = agent.trimmer(1, "");
    trimmer.0.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    // Ends when the socket is full: the receiver takes no news, so the agent stops reading.
    let sent = tokio::task::spawn_blocking(move || {
        let whole = |prompt: &u32| trimmer.0.write_all(&framed(5, &planned(0, *prompt))).is_ok();
        (0..100_000).take_while(whole).count()
    });
    let sent = sent.await.unwrap();
    assert!((100..100_000).contains(&sent), "{sent} plans were taken");
    assert_eq!(agent.up().await, 1);
    for prompt in 0..sent {
        assert_eq!(prompt_of(&agent.next().await), u32::try_from(prompt).unwrap());
    }
    assert!(agent.down().await.contains("disconnected"));
}
