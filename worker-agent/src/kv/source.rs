//! One rank's publisher: connects, hears, asks for what was missed, and connects again. It moves
//! messages into [`Rank`] and what comes out of it to watchers; it decides nothing about them.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tracing::{debug, info, warn};

use super::{
    Shared,
    board::{Snapshot, What},
    rank::{Rank, Step},
    zmtp::{Connection, Error, Kind},
};

/// Pause before connecting again, doubled up to the longer one.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// A publisher answers questions between messages, at least every tenth of a second.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// An answer that has begun comes without pauses; one that stops was cut short.
const ANSWER_REST_MAX: Duration = Duration::from_millis(500);
/// A connection that lasted for so long was one: the next is tried at once.
const LASTING: Duration = Duration::from_secs(30);
/// After this long without a message it is asked whether there was one.
const QUIET: Duration = Duration::from_secs(2);
/// The number by which a publisher says that it has no more.
const END: [u8; 8] = [0xff; 8];

/// Where a rank publishes.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) dp_rank: u32,
    pub(super) address: String,
    pub(super) replay: Option<String>,
    pub(super) topic: String,
}

/// A rank with its engine's end and its watchers.
pub(super) struct Follower {
    pub(super) source: Source,
    pub(super) rank: Rank,
    pub(super) shared: Arc<Shared>,
    pub(super) snapshots: mpsc::Receiver<oneshot::Sender<Snapshot>>,
    asked_tree: Option<Instant>,
    /// When the publisher was asked for messages, or last said one that was asked for.
    answered: Instant,
    has_warned: bool,
}

/// Answers, as long as anyone may ask, that nothing is known, and why.
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

    /// Follows the publisher until nobody wants to know any more.
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
            // Unless nobody can ask any more.
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
        // Its address is told by its port alone; without it only what is missed is lost.
        let replay = Connection::open(address, Kind::Dealer).await.inspect_err(|error| {
            warn!(dp_rank = self.source.dp_rank, %error, address, "missed KV events can't be had");
        });
        Ok((events, replay.ok()))
    }

    /// Follows one connection to its end; breaks where nobody wants to know any more.
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
        // None: the publisher was asked whether there was anything, and there was nothing.
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
                // A shim that has come may be asked at once.
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
        // This task alone tells of the rank: no news of it come in between.
        let _ = reply.send(Snapshot { changes, at: self.shared.board.next() });
    }

    /// Carries out what a rank wants.
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

    /// Asks the shim to have the tree published anew. It comes as other events do.
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

/// The next message that was asked for, or that there are no more.
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

/// The number and the payload of topic, number, payload.
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
