//! KV events as the engine publishes them over ZMQ: pages stored in and evicted from its cache.
//!
//! Pure modules compute block hashes, events and their MessagePack encoding; the publisher owns the
//! sockets. This module makes no caching decision: the radix tree reports its changes.

use crate::loopback::own_addr;
use serde::Deserialize;

pub(super) mod event;
pub(super) mod hash;
pub(super) mod publisher;
mod wire;
mod zmtp;

pub use event::{KvEvent, Medium, Stored};
pub use publisher::Fault;

/// The engine's `--kv-events-config`, with the engine's key names. Keys that only a real message
/// queue needs are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct KvEventsConfig {
    /// The publisher: "zmq", or "null" for no events.
    pub publisher: String,
    /// The first rank's PUB address. Each further rank uses the next port; port 0 picks free ports.
    pub endpoint: String,
    /// Whether to bind the endpoint; by default only a wildcard host is bound. Connecting instead
    /// is not simulated.
    pub bind: Option<bool>,
    /// The first rank's ROUTER address for replays.
    pub replay_endpoint: Option<String>,
    /// The number of batches kept for replays.
    pub buffer_steps: usize,
    pub topic: String,
    /// The event format; only "default" is simulated.
    pub format: String,
    /// Encodes events as arrays, as older engine releases did; a key that only the simulator has.
    pub arrays: bool,
}

impl Default for KvEventsConfig {
    fn default() -> KvEventsConfig {
        KvEventsConfig {
            publisher: "null".to_owned(),
            endpoint: "tcp://*:5557".to_owned(),
            bind: None,
            replay_endpoint: None,
            buffer_steps: 10_000,
            topic: String::new(),
            format: "default".to_owned(),
            arrays: false,
        }
    }
}

impl KvEventsConfig {
    /// Returns settings for free ports of a loopback address of their own.
    pub fn local() -> KvEventsConfig {
        let free = own_addr();
        KvEventsConfig {
            publisher: "zmq".to_owned(),
            endpoint: format!("tcp://{free}"),
            bind: Some(true),
            replay_endpoint: Some(format!("tcp://{free}")),
            ..KvEventsConfig::default()
        }
    }

    /// Returns why these settings can't be simulated, or `None` if they can.
    pub fn problem(&self) -> Option<String> {
        let endpoints = [Some(&self.endpoint), self.replay_endpoint.as_ref()];
        let malformed = endpoints.into_iter().flatten().find(|e| Endpoint::parse(e).is_none());
        if let Some(endpoint) = malformed {
            return Some(format!("{endpoint:?} is not of the form tcp://host:port or ipc:///path"));
        }
        let endpoint = Endpoint::parse(&self.endpoint).expect("looked at above");
        let checks = [
            (["zmq", "null"].contains(&self.publisher.as_str()), "set publisher to zmq or null"),
            (self.format == "default", "only the default format is simulated"),
            (
                self.bind.unwrap_or_else(|| endpoint.is_bound_by_default()),
                "a publisher that connects is not simulated: set bind",
            ),
        ];
        checks.into_iter().find(|(good, _)| !good).map(|(_, problem)| problem.to_owned())
    }

    /// Returns the address of the event publisher; `None` without a publisher.
    pub(super) fn events_at(&self) -> Option<Endpoint> {
        Endpoint::parse(&self.endpoint).filter(|_| self.publisher != "null")
    }

    /// Returns the address of the replay socket, if any.
    pub(super) fn replays_at(&self) -> Option<Endpoint> {
        Endpoint::parse(self.replay_endpoint.as_ref()?)
    }
}

/// An address of the form `tcp://host:port` or `ipc:///path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Tcp { host: String, port: u16 },
    Ipc { path: String },
}

impl Endpoint {
    fn parse(text: &str) -> Option<Endpoint> {
        if let Some(path) = text.strip_prefix("ipc://") {
            return Some(Endpoint::Ipc { path: path.to_owned() });
        }
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = Some(host).filter(|host| !host.is_empty())?;
        Some(Endpoint::Tcp { host: host.to_owned(), port: port.parse().ok()? })
    }

    /// Whether the engine binds the address if `bind` isn't set.
    fn is_bound_by_default(&self) -> bool {
        match self {
            Endpoint::Tcp { host, .. } => ["*", "0.0.0.0", "[::]"].contains(&host.as_str()),
            Endpoint::Ipc { .. } => true,
        }
    }
}
