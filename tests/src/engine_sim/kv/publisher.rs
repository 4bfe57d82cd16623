//! One rank's publisher: a PUB socket, the last batches for replays, and what can go wrong on the
//! way, injected on purpose.
//!
//! It numbers batches and sends them; it never looks into one. A subscriber that doesn't read loses
//! batches, as it does with the engine.

use super::{super::http::wall_seconds, Endpoint, KvEventsConfig, event::Event, wire, zmtp};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{collections::VecDeque, io, net::TcpListener, sync::Arc, time::Duration};
use tokio::{
    sync::{broadcast, mpsc},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

/// Batches on their way to the sockets. The engine's scheduler stands still when it has so many.
const QUEUE_MAX: usize = 100_000;
/// Batches that a subscriber may be behind; then it loses some. The engine allows more.
const BEHIND_MAX: usize = 4096;
/// Bases that are tried for ports in a row.
const PORT_TRIES: usize = 50;

/// What happens to a rank's batches from now on, and not to those that were made before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The next so many are numbered and kept for replays, but not sent.
    Drop(u32),
    /// The next so many are numbered, and neither kept nor sent.
    Lose(u32),
    /// What was kept for replays is gone.
    Forget,
    /// Each is sent so much later than it was made.
    Delay(Duration),
}

/// The sockets of all ranks, bound and not yet served.
#[derive(Debug)]
pub(in super::super) struct Listeners {
    events: Vec<TcpListener>,
    replays: Vec<TcpListener>,
}

impl Listeners {
    /// Binds the configured ports, and writes those that were free into the configuration.
    pub(in super::super) fn bind(config: &mut KvEventsConfig, ranks: usize) -> io::Result<Self> {
        let (endpoint, events) = bind_all(&config.endpoint, ranks)?;
        config.endpoint = endpoint;
        let replays = match &config.replay_endpoint {
            None => Vec::new(),
            Some(endpoint) => {
                let (endpoint, replays) = bind_all(endpoint, ranks)?;
                config.replay_endpoint = Some(endpoint);
                replays
            }
        };
        Ok(Listeners { events, replays })
    }

    /// The ranks' sockets, in order.
    pub(in super::super) fn each(self) -> impl Iterator<Item = (TcpListener, Option<TcpListener>)> {
        let mut replays = self.replays.into_iter();
        self.events.into_iter().map(move |events| (events, replays.next()))
    }
}

/// One port for each rank, in a row; the address of the first.
fn bind_all(endpoint: &str, ranks: usize) -> io::Result<(String, Vec<TcpListener>)> {
    let parsed = Endpoint::parse(endpoint).ok_or(io::ErrorKind::InvalidInput)?;
    let host = parsed.bind_host();
    let mut tries = 0;
    loop {
        let first = TcpListener::bind((host, parsed.port))?;
        let port = first.local_addr()?.port();
        let rest = (1..ranks).map(|rank| {
            let rank = u16::try_from(rank).map_err(io::Error::other)?;
            let port = port.checked_add(rank).ok_or(io::ErrorKind::AddrNotAvailable)?;
            TcpListener::bind((host, port))
        });
        let all = std::iter::once(Ok(first)).chain(rest).collect::<io::Result<Vec<_>>>();
        tries += 1;
        match all {
            Ok(all) => return Ok((format!("tcp://{}:{port}", parsed.host), all)),
            Err(_) if parsed.port == 0 && tries < PORT_TRIES => {}
            Err(error) => return Err(error),
        }
    }
}

/// What a publisher does, one after the other.
#[derive(Debug)]
enum Item {
    Batch(Vec<Event>),
    Fault(Fault),
}

/// Where a rank's batches go.
#[derive(Clone, Debug)]
pub(in super::super) struct Handle(mpsc::Sender<Item>);

impl Handle {
    pub(in super::super) fn publish(&self, batch: Vec<Event>) {
        // The receiver is gone when the engine is.
        if let Err(mpsc::error::TrySendError::Full(_)) = self.0.try_send(Item::Batch(batch)) {
            panic!("{QUEUE_MAX} batches wait for their publisher");
        }
    }

    pub(in super::super) async fn fault(&self, fault: Fault) {
        let _ = self.0.send(Item::Fault(fault)).await;
    }
}

/// The last batches, by their numbers, oldest first.
pub(super) type Kept = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

/// One rank's publisher before and while it runs.
#[derive(Debug)]
pub(in super::super) struct Publisher {
    rank: usize,
    topic: Bytes,
    arrays: bool,
    kept_max: usize,
    items: mpsc::Receiver<Item>,
    /// What is to be done, each when its time has come and what was before it is done.
    waiting: VecDeque<(Instant, Item)>,
    sequence: u64,
    kept: Kept,
    delay: Duration,
    to_drop: u32,
    to_lose: u32,
}

impl Publisher {
    pub(in super::super) fn new(config: &KvEventsConfig, rank: usize) -> (Publisher, Handle) {
        let (sender, items) = mpsc::channel(QUEUE_MAX);
        let publisher = Publisher {
            rank,
            topic: Bytes::from(config.topic.clone()),
            arrays: config.arrays,
            kept_max: config.buffer_steps,
            items,
            waiting: VecDeque::new(),
            sequence: 0,
            kept: Kept::default(),
            delay: Duration::ZERO,
            to_drop: 0,
            to_lose: 0,
        };
        (publisher, Handle(sender))
    }

    /// Serves until the engine is gone; listeners and connections go with it.
    pub(in super::super) async fn run(
        self,
        (events, replays): (TcpListener, Option<TcpListener>),
        killed: CancellationToken,
    ) {
        let served = killed.run_until_cancelled(self.serve(events, replays)).await;
        if let Some(Err(error)) = served {
            tracing::error!(%error, "publisher of events ended");
            killed.cancel();
        }
    }

    async fn serve(self, events: TcpListener, replays: Option<TcpListener>) -> io::Result<()> {
        let (sender, _) = broadcast::channel(BEHIND_MAX);
        let (topic, kept) = (self.topic.clone(), Arc::clone(&self.kept));
        tokio::select! {
            ended = zmtp::publish(events, topic.clone(), sender.clone()) => ended,
            ended = zmtp::replay(replays, topic, kept) => ended,
            () = self.send_all(sender) => Ok(()),
        }
    }

    async fn send_all(mut self, sender: broadcast::Sender<Bytes>) {
        loop {
            let due = self.waiting.front().map(|(due, _)| *due);
            tokio::select! {
                biased;
                Some(item) = self.items.recv(), if self.waiting.len() < QUEUE_MAX => {
                    if let Item::Fault(Fault::Delay(delay)) = item {
                        self.delay = delay;
                    }
                    self.waiting.push_back((Instant::now() + self.delay, item));
                }
                () = sleep_until(due) => match self.waiting.pop_front() {
                    Some((_, Item::Fault(fault))) => self.suffer(fault),
                    Some((_, Item::Batch(events))) => {
                        if let Some(message) = self.number(&events) {
                            // Without a subscriber it is lost.
                            let _ = sender.send(message);
                        }
                    }
                    None => {}
                }
            }
        }
    }

    fn suffer(&mut self, fault: Fault) {
        match fault {
            Fault::Drop(count) => self.to_drop += count,
            Fault::Lose(count) => self.to_lose += count,
            Fault::Forget => self.kept.lock().clear(),
            // It began when it was asked for.
            Fault::Delay(_) => {}
        }
    }

    /// Numbers a batch and keeps it; None if it is to be lost on the way.
    fn number(&mut self, events: &[Event]) -> Option<Bytes> {
        let sequence = self.sequence;
        self.sequence += 1;
        if self.to_lose > 0 {
            self.to_lose -= 1;
            return None;
        }
        let payload = wire::batch(wall_seconds(), events, self.rank, self.arrays);
        let payload = Bytes::from(payload);
        let mut kept = self.kept.lock();
        kept.push_back((sequence, payload.clone()));
        if kept.len() > self.kept_max {
            kept.pop_front();
        }
        drop(kept);
        if self.to_drop > 0 {
            self.to_drop -= 1;
            return None;
        }
        Some(zmtp::message(&[&self.topic, &sequence.to_be_bytes(), &payload]))
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
