//! One rank's KV event publisher: a PUB socket, the last batches for replays, injected faults.
//!
//! The publisher numbers and sends batches without reading their content. A subscriber that reads
//! too slowly loses batches, as with the engine.

use super::{super::http::wall_seconds, Endpoint, KvEventsConfig, event::KvEvent, wire, zmtp};
use bytes::Bytes;
use parking_lot::Mutex;
use std::{collections::VecDeque, io, net::TcpListener, os::unix::net::UnixListener, sync::Arc};
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;

/// The most batches that wait for the publisher. The engine's scheduler blocks at this number; the
/// simulator panics.
const QUEUE_MAX: usize = 100_000;
/// The most batches that a subscriber may lag behind before it loses some. The engine allows more.
const BEHIND_MAX: usize = 4096;
/// The number of attempts to find consecutive free ports.
const PORT_TRIES: usize = 50;

/// A fault in the delivery of all batches published from now on; earlier batches are unaffected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Numbers the next batches, this many, and keeps them for replays, but does not send them.
    Drop(u32),
    /// Numbers the next batches, this many, but neither keeps nor sends them.
    Lose(u32),
    /// Discards the batches kept for replays.
    Forget,
}

/// A bound socket.
#[derive(Debug)]
pub(in super::super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// The bound sockets of all ranks, before they are served.
#[derive(Debug)]
pub(in super::super) struct Listeners {
    events: Vec<Listener>,
    replays: Vec<Listener>,
}

impl Listeners {
    /// Binds the configured ports. Writes the ports chosen for port 0 back into the configuration.
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

    /// Returns each rank's event and replay sockets, in rank order.
    pub(in super::super) fn each(self) -> impl Iterator<Item = (Listener, Option<Listener>)> {
        let mut replays = self.replays.into_iter();
        self.events.into_iter().map(move |events| (events, replays.next()))
    }
}

/// Binds one port per rank, in a row, or the only rank's unix socket. Returns the address of the
/// first and all listeners.
fn bind_all(endpoint: &str, ranks: usize) -> io::Result<(String, Vec<Listener>)> {
    let (host, port) = match Endpoint::parse(endpoint).ok_or(io::ErrorKind::InvalidInput)? {
        Endpoint::Tcp { host, port } => (host, port),
        // Like the engine, whose further ranks find no port to count up.
        Endpoint::Ipc { .. } if ranks > 1 => return Err(io::ErrorKind::InvalidInput.into()),
        Endpoint::Ipc { path } => {
            let listener = Listener::Unix(UnixListener::bind(path)?);
            return Ok((endpoint.to_owned(), vec![listener]));
        }
    };
    let bind_host = if host == "*" { "0.0.0.0" } else { &host };
    let mut tries = 0;
    loop {
        let first = TcpListener::bind((bind_host, port))?;
        let first_port = first.local_addr()?.port();
        let rest = (1..ranks).map(|rank| {
            let rank = u16::try_from(rank).map_err(io::Error::other)?;
            let port = first_port.checked_add(rank).ok_or(io::ErrorKind::AddrNotAvailable)?;
            TcpListener::bind((bind_host, port))
        });
        let all = std::iter::once(Ok(first)).chain(rest).collect::<io::Result<Vec<_>>>();
        tries += 1;
        match all {
            Ok(all) => {
                let all = all.into_iter().map(Listener::Tcp).collect();
                return Ok((format!("tcp://{host}:{first_port}"), all));
            }
            Err(_) if port == 0 && tries < PORT_TRIES => {}
            Err(error) => return Err(error),
        }
    }
}

/// One task of a publisher; tasks are done in order.
#[derive(Debug)]
enum Item {
    Batch(Vec<KvEvent>),
    Fault(Fault),
}

/// A handle by which one rank sends batches to its publisher.
#[derive(Clone, Debug)]
pub(in super::super) struct PublisherHandle(mpsc::Sender<Item>);

impl PublisherHandle {
    pub(in super::super) fn publish(&self, batch: Vec<KvEvent>) {
        // A closed channel means that the engine has ended.
        if let Err(mpsc::error::TrySendError::Full(_)) = self.0.try_send(Item::Batch(batch)) {
            panic!("{QUEUE_MAX} batches wait for their publisher");
        }
    }

    pub(in super::super) async fn fault(&self, fault: Fault) {
        let _ = self.0.send(Item::Fault(fault)).await;
    }
}

/// A batch's sequence number and payload.
pub(super) type Batch = (u64, Bytes);
/// The last batches, oldest first.
pub(super) type Kept = Arc<Mutex<VecDeque<Batch>>>;

/// One rank's publisher.
#[derive(Debug)]
pub(in super::super) struct Publisher {
    rank: usize,
    topic: Bytes,
    arrays: bool,
    kept_max: usize,
    items: mpsc::Receiver<Item>,
    sequence: u64,
    kept: Kept,
    to_drop: u32,
    to_lose: u32,
}

impl Publisher {
    pub(in super::super) fn new(
        config: &KvEventsConfig,
        rank: usize,
    ) -> (Publisher, PublisherHandle) {
        let (sender, items) = mpsc::channel(QUEUE_MAX);
        let publisher = Publisher {
            rank,
            topic: Bytes::from(config.topic.clone()),
            arrays: config.arrays,
            kept_max: config.buffer_steps,
            items,
            sequence: 0,
            kept: Kept::default(),
            to_drop: 0,
            to_lose: 0,
        };
        (publisher, PublisherHandle(sender))
    }

    /// Serves until the engine ends, then drops the listeners and connections.
    pub(in super::super) async fn run(
        self,
        (events, replays): (Listener, Option<Listener>),
        killed: CancellationToken,
    ) {
        let served = killed.run_until_cancelled(self.serve(events, replays)).await;
        if let Some(Err(error)) = served {
            tracing::error!(%error, "publisher of events ended");
            killed.cancel();
        }
    }

    async fn serve(self, events: Listener, replays: Option<Listener>) -> io::Result<()> {
        let (sender, _) = broadcast::channel(BEHIND_MAX);
        let (topic, kept) = (self.topic.clone(), Arc::clone(&self.kept));
        tokio::select! {
            ended = zmtp::publish(events, topic.clone(), sender.clone()) => ended,
            ended = zmtp::replay(replays, topic, kept) => ended,
            () = self.send_all(sender) => Ok(()),
        }
    }

    async fn send_all(mut self, sender: broadcast::Sender<Batch>) {
        while let Some(item) = self.items.recv().await {
            match item {
                Item::Fault(fault) => self.suffer(fault),
                Item::Batch(events) => {
                    if let Some(batch) = self.number(&events) {
                        // Without a subscriber the batch is lost.
                        let _ = sender.send(batch);
                    }
                }
            }
        }
        std::future::pending().await
    }

    fn suffer(&mut self, fault: Fault) {
        match fault {
            Fault::Drop(count) => self.to_drop += count,
            Fault::Lose(count) => self.to_lose += count,
            Fault::Forget => self.kept.lock().clear(),
        }
    }

    /// Numbers and keeps a batch. Returns the batch to send, or `None` if a fault drops it.
    fn number(&mut self, events: &[KvEvent]) -> Option<Batch> {
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
        Some((sequence, payload))
    }
}
