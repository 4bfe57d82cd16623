//! Streams an agent's description, sessions and load reports to one watcher.
//!
//! The memory of a watcher is bounded, also of one that reads nothing: the session table is shared
//! with the owner task and converted a small part at a time, few events are queued, and changes
//! wait in a queue that all watchers share. A watcher that is too far behind, or that takes no
//! event for too long, is disconnected; it may watch again, and then gets the newest table.

use std::time::Duration;

use contract::v1::{self, load_event::Event};
use service::clock::now;
use tokio::{
    sync::{OwnedSemaphorePermit, broadcast::error::RecvError, mpsc, watch},
    time::timeout,
};
use tonic::Status;
use tracing::warn;

use super::{incoming::ControlConnectInfo, streams::PlacedStream};
use crate::owner::{AgentHandle, SessionChange, SessionSnapshot, SessionWatch};

/// A fleet has tens of routers, and one that reconnects may be counted twice for a moment. A
/// hundred that read nothing take about 6 MiB.
pub(super) const WATCHERS_MAX: usize = 128;
/// One message has about 12 KiB.
const SESSIONS_PER_MESSAGE: usize = 64;
/// When this queue is full, changes of sessions wait in the owner task's queue. When that is full
/// too, the watcher is disconnected.
const EVENTS_QUEUED_MAX: usize = 2;
/// A router takes each event at once.
const SEND_TIME_MAX: Duration = Duration::from_secs(20);

pub(super) type LoadStream = PlacedStream<v1::LoadEvent>;

#[derive(Debug)]
pub(super) struct EventSender {
    sender: mpsc::Sender<Result<v1::LoadEvent, Status>>,
    /// A watcher notices by it that the agent has restarted.
    epoch: u64,
    /// A gap in the numbers tells the watcher that an event is missing.
    next_sequence: u64,
    /// `None` if the connection can't be closed.
    connection: Option<ControlConnectInfo>,
}

struct WatcherGone;

pub(super) fn new_stream(
    place: OwnedSemaphorePermit,
    epoch: u64,
    connection: Option<ControlConnectInfo>,
) -> (LoadStream, EventSender) {
    let (sender, events) = mpsc::channel(EVENTS_QUEUED_MAX);
    let sending = EventSender { sender, epoch, next_sequence: 0, connection };
    (PlacedStream::new(events, place), sending)
}

impl EventSender {
    pub(super) async fn run(mut self, agent: AgentHandle) {
        let Err(WatcherGone) = self.stream_events(agent).await;
    }

    async fn stream_events(
        &mut self,
        agent: AgentHandle,
    ) -> Result<std::convert::Infallible, WatcherGone> {
        let AgentHandle { mut report, mut description, .. } = agent.clone();
        let known_description = tokio::select! {
            biased;
            () = self.sender.closed() => return Err(WatcherGone),
            described = description.wait_for(Option::is_some) => {
                described.map_err(|_| WatcherGone)?.clone()
            }
        };
        let known_description = known_description.expect("`wait_for` returned `Some`");
        self.send(Event::Description((*known_description).clone().into())).await?;
        // The sessions are read only now: before the engine was found, the table lacks those that
        // the last agent process handed over, and a watcher would take them for unknown.
        let watch = agent.watch_sessions().await.map_err(|_| WatcherGone)?;
        let SessionWatch { sessions, mut changes } = watch;
        self.send_session_table(sessions).await?;
        report.mark_changed();
        loop {
            let event = tokio::select! {
                biased;
                () = self.sender.closed() => return Err(WatcherGone),
                new_description = next_value(&mut description) => {
                    let Some(new_description) = new_description.ok_or(WatcherGone)? else {
                        continue;
                    };
                    Event::Description((*new_description).clone().into())
                }
                new_report = next_value(&mut report) => {
                    Event::Report((*new_report.ok_or(WatcherGone)?).clone().into())
                }
                change = changes.recv() => match change {
                    Ok(change) => Event::Change(to_wire(change)),
                    Err(RecvError::Closed) => return Err(WatcherGone),
                    Err(RecvError::Lagged(missed)) => {
                        let text =
                            format!("the watcher missed {missed} session changes; watch again");
                        self.send_item(Err(Status::resource_exhausted(text))).await?;
                        return Err(WatcherGone);
                    }
                },
            };
            self.send(event).await?;
        }
    }

    async fn send_session_table(&mut self, table: SessionSnapshot) -> Result<(), WatcherGone> {
        let mut after = None;
        loop {
            let (page, end) = table.page(after, SESSIONS_PER_MESSAGE);
            let now = now();
            let sessions = page.iter().map(|session| session.at(now).into()).collect();
            let part = v1::SessionTable { sessions, last: end.is_none() };
            self.send(Event::Sessions(part)).await?;
            if end.is_none() {
                return Ok(());
            }
            after = end;
        }
    }

    async fn send(&mut self, event: Event) -> Result<(), WatcherGone> {
        let event =
            v1::LoadEvent { epoch: self.epoch, sequence: self.next_sequence, event: Some(event) };
        self.next_sequence += 1;
        self.send_item(Ok(event)).await
    }

    /// Closes the watcher's connection if the watcher takes nothing.
    async fn send_item(&self, item: Result<v1::LoadEvent, Status>) -> Result<(), WatcherGone> {
        match timeout(SEND_TIME_MAX, self.sender.send(item)).await {
            Ok(sent) => sent.map_err(|_| WatcherGone),
            Err(_) => {
                warn!("a watcher took no event for too long, its connection is closed");
                // The stream can't end by itself: what is queued waits for the watcher.
                if let Some(connection) = &self.connection {
                    connection.close();
                }
                Err(WatcherGone)
            }
        }
    }
}

async fn next_value<T: Clone>(receiver: &mut watch::Receiver<T>) -> Option<T> {
    receiver.changed().await.ok()?;
    Some(receiver.borrow_and_update().clone())
}

fn to_wire(change: SessionChange) -> v1::SessionChange {
    use v1::session_change::Change as Wire;
    let change = match change {
        SessionChange::Upsert(session) => Wire::Upsert(session.at(now()).into()),
        SessionChange::Removed(key) => Wire::Removed((&key).into()),
    };
    v1::SessionChange { change: Some(change) }
}
