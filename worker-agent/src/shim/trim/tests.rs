//! Tests of the trimmer's socket, with trimmers that write messages field by field.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    time::Duration,
};

use serde::Serialize;

use super::{
    super::{
        codec::tests::framed,
        tests::{Folder, SOON},
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

    fn trimmer(&self, instance: u8, inert_reason: Option<&str>) -> TrimmerEnd {
        let path = format!("{}.trim", self.folder.socket().display());
        let mut trimmer = TrimmerEnd(UnixStream::connect(path).unwrap());
        trimmer.send(&("Trimmer", 1, [instance; 16], "0.5.23", "0.1.0", inert_reason));
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
        trimmer.instance[0]
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
    fn send(&mut self, message: &impl Serialize) {
        self.0.write_all(&framed(message)).unwrap();
    }

    /// Reads the next `count` bytes.
    async fn reads(&self, count: usize) -> Vec<u8> {
        let mut stream = self.0.try_clone().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let read = tokio::task::spawn_blocking(move || {
            let mut bytes = vec![0; count];
            stream.read_exact(&mut bytes).map(|()| bytes)
        });
        read.await.unwrap().unwrap()
    }
}

/// Returns a plan for the session `s`, with half of the prompt trimmed.
fn planned(question: Option<u64>, prompt: u32) -> impl Serialize {
    let half = prompt / 2;
    ("Planned", question, "trimmed", half, half, prompt - half, prompt, "s", "rid", "")
}

fn prompt_of(news: &TrimmerEvent) -> u32 {
    let TrimmerEvent::Planned(planned) = news else { panic!("{news:?}") };
    planned.prompt_tokens
}

#[tokio::test]
async fn plans_arrive_and_questions_are_answered() {
    let mut agent = TestAgent::new("plans", 16);
    assert!(matches!(agent.handle.answer(7, None, 0).await, Err(Error::NoShim(0))));
    let mut trimmer = agent.trimmer(1, None);
    assert_eq!(agent.up().await, 1);
    trimmer.send(&planned(None, 11));
    let TrimmerEvent::Planned(told) = agent.next().await else { panic!("no plan") };
    assert_eq!((told.question, told.plan), (None, Plan::Trimmed));
    assert_eq!(
        (told.shared_tokens, told.committed_tokens, told.appended_tokens, told.prompt_tokens),
        (5, 5, 6, 11)
    );
    assert_eq!((&*told.session, &*told.rid, &*told.why), ("s", "rid", ""));

    trimmer.send(&planned(Some(7), 11));
    let TrimmerEvent::Planned(told) = agent.next().await else { panic!("no question") };
    assert_eq!(told.question, Some(7));
    agent.handle.answer(7, Some("s#2".into()), 512).await.unwrap();
    agent.handle.answer(8, None, 0).await.unwrap();
    let wanted = [framed(&("Run", 7, 512, "s#2")), framed(&("Run", 8, 0, ()))].concat();
    assert_eq!(trimmer.reads(wanted.len()).await, wanted);
    drop(trimmer);
    assert!(agent.down().await.contains("disconnected"));
}

#[tokio::test]
async fn an_inert_trimmer_says_why_and_is_asked_nothing() {
    let mut agent = TestAgent::new("trim-inert", 16);
    let _trimmer = agent.trimmer(1, Some("several DP ranks"));
    let TrimmerEvent::Up(trimmer) = agent.next().await else { panic!("not up") };
    assert_eq!(trimmer.inert_reason.as_deref(), Some("several DP ranks"));
    assert!(matches!(agent.handle.answer(1, None, 0).await, Err(Error::NoShim(0))));
}

#[tokio::test]
async fn a_newer_trimmer_replaces_even_one_that_is_deaf() {
    let mut agent = TestAgent::new("trim-again", 16);
    let _deaf = agent.trimmer(1, None);
    assert_eq!(agent.up().await, 1);
    // Send until the socket and the queue of commands are full.
    let long = "s".repeat(512);
    let handle = agent.handle.clone();
    let answers = async {
        loop {
            if let Err(error) = handle.answer(1, Some(long.clone()), 1).await {
                return error;
            }
        }
    };
    tokio::pin!(answers);
    let patience = Duration::from_millis(300);
    let waits = tokio::time::timeout(patience, &mut answers).await;
    assert!(waits.is_err(), "a full queue is not the trimmer's answer: {waits:?}");
    let unnamed = agent.handle.answer(1, Some("s".repeat(513)), 1).await;
    assert!(matches!(unnamed, Err(Error::NameTooLong)), "who says it hears so");
    let second = agent.trimmer(2, None);
    assert!(agent.down().await.contains("another"));
    assert_eq!(agent.up().await, 2);
    let ended = answers.await;
    assert!(matches!(ended, Error::NoShim(0)), "{ended}");
    agent.handle.answer(9, Some("s".into()), 1).await.unwrap();
    let wanted = framed(&("Run", 9, 1, "s"));
    assert_eq!(second.reads(wanted.len()).await, wanted);
}

#[tokio::test]
async fn nonsense_ends_the_connection_and_says_why() {
    let mut agent = TestAgent::new("trim-nonsense", 16);
    let hello = ("Trimmer", 1, [0; 16], "", "", ());
    let unplanned = ("Planned", (), "shortened", 2, 2, 2, 4, "s", "rid", "");
    let short = ("Planned", (), "trimmed", 2, 2, 2, 4, "s", "rid");
    let update = ("Update", 0, [0; 14], false, [(); 0], [(); 0], [(); 0]);
    for (message, said) in [
        (framed(&update), "no valid message"),
        (framed(&unplanned), "no valid message"),
        (framed(&short), "no valid message"),
        (framed(&hello), "hello"),
    ] {
        let mut trimmer = agent.trimmer(1, None);
        assert_eq!(agent.up().await, 1);
        trimmer.send(&planned(None, 3));
        assert_eq!(prompt_of(&agent.next().await), 3);
        trimmer.0.write_all(&message).unwrap();
        let reason = agent.down().await;
        assert!(reason.contains(said), "{reason}");
    }
    let mut huge = agent.trimmer(1, None);
    assert_eq!(agent.up().await, 1);
    huge.0.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(agent.down().await.contains("a frame of"));
}

#[tokio::test]
async fn a_slow_receiver_stops_the_reading_and_misses_no_plan() {
    let mut agent = TestAgent::new("trim-slow", 1);
    let mut trimmer = agent.trimmer(1, None);
    trimmer.0.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    // Ends when the socket is full: the receiver takes no news, so the agent stops reading.
    let sent = tokio::task::spawn_blocking(move || {
        let whole = |prompt: &u32| trimmer.0.write_all(&framed(&planned(None, *prompt))).is_ok();
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
