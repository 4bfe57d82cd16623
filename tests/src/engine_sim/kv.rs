//! KV events as the engine publishes them: what its radix cache stores and gives up, over ZMQ.
//!
//! Pure parts make block hashes, events and their MessagePack; the publisher has the sockets. What
//! is in the cache is not decided here: the tree says what happens to it.

use serde::Deserialize;

pub(super) mod event;
pub(super) mod hash;
pub(super) mod publisher;
mod wire;
mod zmtp;

pub use event::{Event, Stored};
pub use publisher::Fault;

/// The engine's `--kv-events-config`, by its own names. Keys that only real queues need are passed
/// over.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct KvEventsConfig {
    /// "zmq", or "null" for none.
    pub publisher: String,
    /// The first rank's PUB address; each further rank has the next port. Port 0 takes free ones.
    pub endpoint: String,
    /// False connects, as a concrete host does by itself: not simulated.
    pub bind: Option<bool>,
    /// The first rank's ROUTER address for replays.
    pub replay_endpoint: Option<String>,
    /// Batches kept for replays.
    pub buffer_steps: usize,
    pub topic: String,
    /// "default"; the engine's other one isn't simulated.
    pub format: String,
    /// Events as arrays, as in releases before the maps: the simulator's own key.
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
    /// Free loopback ports, replays included.
    pub fn local() -> KvEventsConfig {
        KvEventsConfig {
            publisher: "zmq".to_owned(),
            endpoint: "tcp://127.0.0.1:0".to_owned(),
            bind: Some(true),
            replay_endpoint: Some("tcp://127.0.0.1:0".to_owned()),
            ..KvEventsConfig::default()
        }
    }

    /// Why it can't be simulated.
    pub fn problem(&self) -> Option<String> {
        let endpoints = [Some(&self.endpoint), self.replay_endpoint.as_ref()];
        let malformed = endpoints.into_iter().flatten().find(|e| Endpoint::parse(e).is_none());
        if let Some(endpoint) = malformed {
            return Some(format!("{endpoint:?} is not of the form tcp://host:port"));
        }
        let endpoint = Endpoint::parse(&self.endpoint).expect("looked at above");
        let checks = [
            (["zmq", "null"].contains(&self.publisher.as_str()), "the publisher is zmq or null"),
            (self.format == "default", "only the default format is simulated"),
            (
                self.bind.unwrap_or_else(|| endpoint.is_wildcard()),
                "a publisher that connects is not simulated: set bind",
            ),
        ];
        checks.into_iter().find(|(good, _)| !good).map(|(_, problem)| problem.to_owned())
    }

    /// Where batches come from; None without a publisher.
    pub(super) fn events_at(&self) -> Option<Endpoint> {
        Endpoint::parse(&self.endpoint).filter(|_| self.publisher != "null")
    }

    /// Where replays are to be had.
    pub(super) fn replays_at(&self) -> Option<Endpoint> {
        Endpoint::parse(self.replay_endpoint.as_ref()?)
    }
}

/// A `tcp://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Endpoint {
    fn parse(text: &str) -> Option<Endpoint> {
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = Some(host).filter(|host| !host.is_empty())?;
        Some(Endpoint { host: host.to_owned(), port: port.parse().ok()? })
    }

    fn is_wildcard(&self) -> bool {
        ["*", "0.0.0.0", "[::]"].contains(&self.host.as_str())
    }

    fn bind_host(&self) -> &str {
        if self.host == "*" { "0.0.0.0" } else { &self.host }
    }
}
