//! Follows one engine rank's publisher of KV events, and writes the changes to the watchers' log.
//!
//! [`RankCache`] makes all decisions about the messages.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tracing::{debug, info, warn};

use super::{
    Shared,
    event_log::{EntryContent, RankSnapshot},
    rank_cache::{RankCache, RankStep},
    zmtp::{Connection, Endpoint, Error, SocketType},
};

/// The pause doubles after each failure.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// A publisher looks for replay requests between messages, at least every 100 ms.
const REPLAY_START_MAX: Duration = Duration::from_secs(5);
/// The publisher sends a replay without pauses, so one that pauses for longer has lost messages.
const REPLAY_PAUSE_MAX: Duration = Duration::from_millis(500);
/// A connection that lasted so long resets the pause to [`RETRY_MIN`].
const LASTING_CONNECTION_MIN: Duration = Duration::from_secs(30);
/// A replay after this silence tells whether the latest messages were lost.
const QUIET_MAX: Duration = Duration::from_secs(2);
/// In place of a message number, this marks the end of a replay.
const REPLAY_END: [u8; 8] = [0xff; 8];

#[derive(Debug)]
pub(super) struct RankAddresses {
    pub(super) dp_rank: u32,
    pub(super) address: Endpoint,
    /// Answers replay requests.
    pub(super) replay_address: Option<Endpoint>,
    pub(super) topic: String,
}

pub(super) struct Subscriber {
    pub(super) addresses: RankAddresses,
    pub(super) rank: RankCache,
    pub(super) shared: Arc<Shared>,
    pub(super) snapshot_requests: mpsc::Receiver<oneshot::Sender<RankSnapshot>>,
    tree_requested_at: Option<Instant>,
    /// When a replay was last requested, or its latest message came.
    replay_active_at: Instant,
    /// Rejected events were logged.
    has_warned: bool,
}

/// Returns when no further request can come.
pub(super) async fn answer_unknown(
    why: &str,
    shared: &Shared,
    snapshot_requests: &mut mpsc::Receiver<oneshot::Sender<RankSnapshot>>,
) {
    while let Some(reply) = snapshot_requests.recv().await {
        let _ = reply.send(RankSnapshot {
            changes: Err(why.to_owned()),
            next_entry: shared.log.next_number(),
        });
    }
}

impl Subscriber {
    pub(super) fn new(
        addresses: RankAddresses,
        rank: RankCache,
        shared: Arc<Shared>,
        snapshot_requests: mpsc::Receiver<oneshot::Sender<RankSnapshot>>,
    ) -> Self {
        let replay_active_at = Instant::now();
        Self {
            addresses,
            rank,
            shared,
            snapshot_requests,
            tree_requested_at: None,
            replay_active_at,
            has_warned: false,
        }
    }

    pub(super) async fn run(mut self) {
        let mut pause = RETRY_MIN;
        loop {
            let dp_rank = self.addresses.dp_rank;
            let error = match self.connect().await {
                Ok((event_socket, replay_socket)) => {
                    info!(dp_rank, address = %self.addresses.address, "following KV events");
                    let connected_at = Instant::now();
                    let result = self.follow(event_socket, replay_socket).await;
                    if connected_at.elapsed() > LASTING_CONNECTION_MIN {
                        pause = RETRY_MIN;
                    }
                    result
                }
                Err(error) => ControlFlow::Continue(error),
            };
            let ControlFlow::Continue(error) = error else { return };
            if pause == RETRY_MIN {
                warn!(dp_rank, %error, address = %self.addresses.address, "can't follow KV events");
            }
            let why = format!("no KV events from {}: {error}", self.addresses.address);
            self.shared.metrics.remove_rank(dp_rank);
            self.shared.log.append(dp_rank, EntryContent::Reset);
            let unknown = answer_unknown(&why, &self.shared, &mut self.snapshot_requests);
            // Watchers get the reason meanwhile. If `answer_unknown` ends before the timeout, no
            // further request can come.
            if tokio::time::timeout(pause, unknown).await.is_ok() {
                return;
            }
            pause = (2 * pause).min(RETRY_MAX);
        }
    }

    async fn connect(&self) -> Result<(Connection, Option<Connection>), Error> {
        let mut event_socket = Connection::open(&self.addresses.address, SocketType::Sub).await?;
        event_socket.subscribe(self.addresses.topic.as_bytes()).await?;
        let Some(address) = &self.addresses.replay_address else { return Ok((event_socket, None)) };
        // The engine states the replay socket's port but not its host, so connecting may fail. Then
        // messages that the agent misses are lost.
        let replay_socket = Connection::open(address, SocketType::Dealer).await;
        let replay_socket = replay_socket.inspect_err(|error| {
            let dp_rank = self.addresses.dp_rank;
            warn!(dp_rank, %error, %address, "no replays; missed KV events are lost");
        });
        Ok((event_socket, replay_socket.ok()))
    }

    /// Returns `Break` when no further snapshot request can come.
    async fn follow(
        &mut self,
        mut event_socket: Connection,
        mut replay_socket: Option<Connection>,
    ) -> ControlFlow<(), Error> {
        let mut shim = self.shared.shim.clone();
        let steps = self.rank.reset_for_connection();
        if let Err(error) = self.carry_out(steps, &mut replay_socket).await {
            return ControlFlow::Continue(error);
        }
        // `None` from a quiet period's replay until the next message, so that one quiet period
        // leads to only one replay.
        let mut last_message_at = Some(Instant::now());
        loop {
            let deadline = self.replay_deadline(last_message_at);
            let needs_tree = self.rank.needs_republished_tree();
            let tree_request_at = needs_tree.then(|| self.next_tree_request_at());
            let steps = tokio::select! {
                biased;
                reply = self.snapshot_requests.recv() => match reply {
                    Some(reply) => {
                        self.answer_snapshot_request(reply);
                        continue;
                    }
                    None => return ControlFlow::Break(()),
                },
                message = next_replayed(&mut replay_socket) => message.map(|message| {
                    self.replay_active_at = Instant::now();
                    match message {
                        Some((number, message)) => {
                            last_message_at = Some(self.replay_active_at);
                            self.rank.take_replayed(number, message)
                        }
                        None => self.rank.end_replay(),
                    }
                }),
                frames = event_socket.receive() => {
                    frames.and_then(split_message).map(|(number, message)| {
                        last_message_at = Some(Instant::now());
                        self.rank.take_live(number, message)
                    })
                }
                () = wait_until(deadline) => Ok(if self.rank.is_replaying() {
                    self.replay_active_at = Instant::now();
                    self.rank.handle_replay_timeout()
                } else {
                    last_message_at = None;
                    self.rank.request_replay()
                }),
                () = wait_until(tree_request_at) => {
                    self.request_tree();
                    continue;
                }
                // A shim may have connected since the last request.
                true = shim.changed(), if tree_request_at.is_some() => {
                    self.tree_requested_at = None;
                    continue;
                }
            };
            let result = match steps {
                Ok(steps) => self.carry_out(steps, &mut replay_socket).await,
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                return ControlFlow::Continue(error);
            }
        }
    }

    /// The time when the present replay is overdue, or one must be requested after [`QUIET_MAX`].
    fn replay_deadline(&self, last_message_at: Option<Instant>) -> Option<Instant> {
        match self.rank.is_replaying() {
            true if self.rank.has_replay_begun() => Some(self.replay_active_at + REPLAY_PAUSE_MAX),
            true => Some(self.replay_active_at + REPLAY_START_MAX),
            false => last_message_at.map(|last_message_at| last_message_at + QUIET_MAX),
        }
    }

    fn answer_snapshot_request(&mut self, reply: oneshot::Sender<RankSnapshot>) {
        let not_yet_known = || "the engine's KV events are being read".to_owned();
        let changes = self.rank.snapshot().ok_or_else(not_yet_known);
        // Only this task appends changes of this rank to the log, so none comes in between.
        let _ = reply.send(RankSnapshot { changes, next_entry: self.shared.log.next_number() });
    }

    async fn carry_out(
        &mut self,
        steps: Vec<RankStep>,
        replay_socket: &mut Option<Connection>,
    ) -> Result<(), Error> {
        let dp_rank = self.addresses.dp_rank;
        let mut steps = std::collections::VecDeque::from(steps);
        while let Some(step) = steps.pop_front() {
            match step {
                RankStep::Send(changes) => {
                    self.shared.log.append(dp_rank, EntryContent::Changes(changes))
                }
                RankStep::SendSnapshot => self.shared.log.append(dp_rank, EntryContent::Reset),
                RankStep::RequestReplay(from) => match replay_socket {
                    Some(replay_socket) => {
                        self.replay_active_at = Instant::now();
                        replay_socket.send(&[b"", &from.to_be_bytes()]).await?;
                    }
                    None => steps.extend(self.rank.end_replay()),
                },
            }
        }
        if let Some(reason) = self.rank.take_rejection()
            && !std::mem::replace(&mut self.has_warned, true)
        {
            warn!(dp_rank, reason, "KV events were rejected; further ones are only counted");
        }
        self.shared.metrics.update(dp_rank, &mut self.rank);
        Ok(())
    }

    fn next_tree_request_at(&self) -> Instant {
        let interval = self.shared.republish_interval;
        self.tree_requested_at.map_or_else(Instant::now, |requested_at| requested_at + interval)
    }

    /// The tree arrives as normal KV events.
    fn request_tree(&mut self) {
        let dp_rank = self.addresses.dp_rank;
        self.tree_requested_at = Some(Instant::now());
        let outcome = match self.shared.shim.republish(dp_rank) {
            Ok(()) => {
                info!(dp_rank, "KV events were missed; the engine publishes its tree again");
                "asked"
            }
            Err(error) => {
                debug!(dp_rank, %error, "KV events were missed; only new events are known");
                "impossible"
            }
        };
        self.shared.metrics.count_tree_request(outcome);
    }
}

/// `None` at the replay's end. Never returns without a replay socket.
async fn next_replayed(
    replay_socket: &mut Option<Connection>,
) -> Result<Option<(u64, Vec<u8>)>, Error> {
    let Some(replay_socket) = replay_socket else { return std::future::pending().await };
    let mut frames = replay_socket.receive().await?;
    if frames.len() != 4 {
        return Err(Error::Frame);
    }
    if frames[2][..] == REPLAY_END {
        return Ok(None);
    }
    // A replay's message has an empty frame before the frames that a published message has.
    frames.remove(0);
    split_message(frames).map(Some)
}

/// The frames are topic, number, payload.
#[expect(clippy::needless_pass_by_value, reason = "frames end here, and their buffer with them")]
fn split_message(frames: Vec<Bytes>) -> Result<(u64, Vec<u8>), Error> {
    let [_, number, payload] = &frames[..] else { return Err(Error::Frame) };
    let number = number[..].try_into().map_err(|_| Error::Frame)?;
    // The engine counts its messages from 0 as signed integers.
    let number = u64::try_from(i64::from_be_bytes(number)).map_err(|_| Error::Frame)?;
    Ok((number, payload.to_vec()))
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
