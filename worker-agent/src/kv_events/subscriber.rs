//! The connection to the publisher of one rank's KV events.
//!
//! It connects, receives messages, requests a replay of missed ones, and connects again after an
//! error. It passes messages to [`Rank`] and the resulting changes to watchers. All decisions about
//! the messages are made in [`Rank`].

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tracing::{debug, info, warn};

use super::{
    Shared,
    event_log::{Snapshot, What},
    rank_cache::{Rank, Step},
    zmtp::{Connection, Error, Kind},
};

/// The pause before connecting again. It doubles after each failure, up to the maximum.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// The time limit for the first message of a replay. A publisher looks for replay requests between
/// messages, at least every 100 ms.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// The time limit for each further message of a replay. A replay is sent without pauses; one that
/// stops is incomplete.
const ANSWER_REST_MAX: Duration = Duration::from_millis(500);
/// A connection that lasted longer than this resets the pause to its minimum.
const LASTING: Duration = Duration::from_secs(30);
/// After this long without a message, the publisher is asked whether a message was missed.
const QUIET: Duration = Duration::from_secs(2);
/// The message number that marks the end of a replay.
const END: [u8; 8] = [0xff; 8];

/// The addresses at which a rank publishes.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) dp_rank: u32,
    pub(super) address: String,
    pub(super) replay: Option<String>,
    pub(super) topic: String,
}

/// Follows the KV events of one rank, and answers snapshot requests of its watchers.
pub(super) struct Follower {
    pub(super) source: Source,
    pub(super) rank: Rank,
    pub(super) shared: Arc<Shared>,
    pub(super) snapshots: mpsc::Receiver<oneshot::Sender<Snapshot>>,
    asked_tree: Option<Instant>,
    /// When a replay was last requested, or its last message received.
    answered: Instant,
    has_warned: bool,
}

/// Answers snapshot requests with the reason why nothing is known. Returns when no further request
/// can come.
pub(super) async fn answer_unknown(
    why: &str,
    shared: &Shared,
    snapshots: &mut mpsc::Receiver<oneshot::Sender<Snapshot>>,
) {
    while let Some(reply) = snapshots.recv().await {
        let _ = reply.send(Snapshot { changes: Err(why.to_owned()), at: shared.board.next() });
    }
}

impl Follower {
    pub(super) fn new(
        source: Source,
        rank: Rank,
        shared: Arc<Shared>,
        snapshots: mpsc::Receiver<oneshot::Sender<Snapshot>>,
    ) -> Self {
        let answered = Instant::now();
        Self { source, rank, shared, snapshots, asked_tree: None, answered, has_warned: false }
    }

    /// Follows the publisher until nobody can request snapshots any more.
    pub(super) async fn run(mut self) {
        let mut pause = RETRY_MIN;
        loop {
            let dp_rank = self.source.dp_rank;
            let error = match self.connect().await {
                Ok((events, replay)) => {
                    info!(dp_rank, address = self.source.address, "following KV events");
                    let begun = Instant::now();
                    let ended = self.follow(events, replay).await;
                    if begun.elapsed() > LASTING {
                        pause = RETRY_MIN;
                    }
                    ended
                }
                Err(error) => ControlFlow::Continue(error),
            };
            let ControlFlow::Continue(error) = error else { return };
            if pause == RETRY_MIN {
                warn!(dp_rank, %error, address = self.source.address, "no KV events");
            }
            let why = format!("no KV events from {}: {error}", self.source.address);
            self.shared.metrics.gone(dp_rank);
            self.shared.board.tell(dp_rank, What::Anew);
            let unknown = answer_unknown(&why, &self.shared, &mut self.snapshots);
            // If the timeout has not passed, no further request can come.
            if tokio::time::timeout(pause, unknown).await.is_ok() {
                return;
            }
            pause = (2 * pause).min(RETRY_MAX);
        }
    }

    async fn connect(&self) -> Result<(Connection, Option<Connection>), Error> {
        let mut events = Connection::open(&self.source.address, Kind::Sub).await?;
        events.subscribe(self.source.topic.as_bytes()).await?;
        let Some(address) = &self.source.replay else { return Ok((events, None)) };
        // Only the port of the replay address is known for certain, so connecting may fail. Without
        // a replay socket, only missed messages are lost.
        let replay = Connection::open(address, Kind::Dealer).await.inspect_err(|error| {
            warn!(dp_rank = self.source.dp_rank, %error, address, "missed KV events can't be had");
        });
        Ok((events, replay.ok()))
    }

    /// Follows one connection until an error, which it returns. Breaks if nobody can request
    /// snapshots any more.
    async fn follow(
        &mut self,
        mut events: Connection,
        mut replay: Option<Connection>,
    ) -> ControlFlow<(), Error> {
        let mut shim = self.shared.shim.clone();
        let steps = self.rank.connected();
        if let Err(error) = self.take(steps, &mut replay).await {
            return ControlFlow::Continue(error);
        }
        // When the last message came; `None` after a replay has shown that nothing was missed.
        let mut heard = Some(Instant::now());
        loop {
            let deadline = match self.rank.is_asking() {
                true if self.rank.is_answered() => Some(self.answered + ANSWER_REST_MAX),
                true => Some(self.answered + ANSWER_MAX),
                false => heard.map(|heard| heard + QUIET),
            };
            let tree = self.rank.wants_tree().then(|| self.tree_due());
            let steps = tokio::select! {
                biased;
                reply = self.snapshots.recv() => match reply {
                    Some(reply) => {
                        self.answer(reply);
                        continue;
                    }
                    None => return ControlFlow::Break(()),
                },
                message = replayed(&mut replay) => message.map(|message| {
                    self.answered = Instant::now();
                    match message {
                        Some((number, message)) => {
                            heard = Some(self.answered);
                            self.rank.replayed(number, message)
                        }
                        None => self.rank.replay_ended(),
                    }
                }),
                message = events.receive() => message.and_then(numbered).map(|(number, message)| {
                    heard = Some(Instant::now());
                    self.rank.live(number, message)
                }),
                () = until(deadline) => Ok(if self.rank.is_asking() {
                    self.answered = Instant::now();
                    self.rank.replay_stopped()
                } else {
                    heard = None;
                    self.rank.look()
                }),
                () = until(tree) => {
                    self.ask_tree();
                    continue;
                }
                // A shim has connected: request the tree at once.
                true = shim.changed(), if tree.is_some() => {
                    self.asked_tree = None;
                    continue;
                }
            };
            let taken = match steps {
                Ok(steps) => self.take(steps, &mut replay).await,
                Err(error) => Err(error),
            };
            if let Err(error) = taken {
                return ControlFlow::Continue(error);
            }
        }
    }

    fn answer(&mut self, reply: oneshot::Sender<Snapshot>) {
        let unread = || "the engine's KV events are being read".to_owned();
        let changes = self.rank.snapshot().ok_or_else(unread);
        // Only this task writes changes of this rank, so none can come between the snapshot and its
        // number.
        let _ = reply.send(Snapshot { changes, at: self.shared.board.next() });
    }

    /// Carries out the steps that a rank returns.
    async fn take(
        &mut self,
        steps: Vec<Step>,
        replay: &mut Option<Connection>,
    ) -> Result<(), Error> {
        let dp_rank = self.source.dp_rank;
        let mut steps = std::collections::VecDeque::from(steps);
        while let Some(step) = steps.pop_front() {
            match step {
                Step::Tell(changes) => self.shared.board.tell(dp_rank, What::Changes(changes)),
                Step::TellAll => self.shared.board.tell(dp_rank, What::Anew),
                Step::Replay(from) => match replay {
                    Some(replay) => {
                        self.answered = Instant::now();
                        replay.send(&[b"", &from.to_be_bytes()]).await?;
                    }
                    None => steps.extend(self.rank.replay_ended()),
                },
            }
        }
        if let Some(reason) = self.rank.take_refusal()
            && !std::mem::replace(&mut self.has_warned, true)
        {
            warn!(dp_rank, reason, "KV events not taken; further ones are only counted");
        }
        self.shared.metrics.follow(dp_rank, &mut self.rank);
        Ok(())
    }

    fn tree_due(&self) -> Instant {
        let interval = self.shared.republish_interval;
        self.asked_tree.map_or_else(Instant::now, |asked| asked + interval)
    }

    /// Asks the shim to publish the engine's radix tree again. The tree arrives as normal KV
    /// events.
    fn ask_tree(&mut self) {
        let dp_rank = self.source.dp_rank;
        self.asked_tree = Some(Instant::now());
        let outcome = match self.shared.shim.republish(dp_rank) {
            Ok(()) => {
                info!(dp_rank, "KV events were missed; the engine's tree is published anew");
                "asked"
            }
            Err(error) => {
                debug!(dp_rank, %error, "KV events were missed; only what comes now is known");
                "impossible"
            }
        };
        self.shared.metrics.asked_tree(outcome);
    }
}

/// Returns the next message of a replay, or `None` at its end.
async fn replayed(replay: &mut Option<Connection>) -> Result<Option<(u64, Vec<u8>)>, Error> {
    let Some(replay) = replay else { return std::future::pending().await };
    let mut frames = replay.receive().await?;
    if frames.len() != 4 {
        return Err(Error::Frame);
    }
    if frames[2][..] == END {
        return Ok(None);
    }
    frames.remove(0);
    numbered(frames).map(Some)
}

/// Returns the number and the payload of a message with the frames topic, number, payload.
#[expect(clippy::needless_pass_by_value, reason = "frames end here, and their buffer with them")]
fn numbered(frames: Vec<Bytes>) -> Result<(u64, Vec<u8>), Error> {
    let [_, number, payload] = &frames[..] else { return Err(Error::Frame) };
    let number = number[..].try_into().map_err(|_| Error::Frame)?;
    Ok((u64::from_be_bytes(number), payload.to_vec()))
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
