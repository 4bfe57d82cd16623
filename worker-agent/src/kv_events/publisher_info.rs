//! Reads from the engine's `/server_info` where the agent can subscribe to its KV events.

use std::net::IpAddr;

use contract::count::bounded;
use serde_json::Value;

use super::{pages::TierPages, zmtp::Endpoint};

/// The engine's default size of the host's pool, as a multiple of the device's.
const HICACHE_RATIO_DEFAULT: f64 = 2.0;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherInfo {
    pub instance: String,
    pub ranks: u32,
    /// Tokens in a page, as the events count pages.
    pub page_tokens: u32,
    /// The pools of one rank, in pages of the events.
    pub pool_pages: TierPages,
    /// The error is why there are none.
    pub publishers: Result<PublisherAddresses, String>,
}

/// Returns the tokens in the host's pool of one rank, where a token takes `token_bytes` bytes, if
/// that is known. Returns 0 if the engine keeps no KV in the host's memory.
#[must_use]
pub fn host_tokens(info: &Value, device_tokens: u64, token_bytes: Option<u64>) -> u64 {
    if info.get("enable_hierarchical_cache").and_then(Value::as_bool) != Some(true) {
        return 0;
    }
    let number = |key: &str| info.get(key).and_then(Value::as_f64).filter(|number| *number > 0.0);
    // Given in GB, the size takes precedence over the ratio.
    let by_size = number("hicache_size").zip(token_bytes.filter(|bytes| *bytes > 0));
    let by_size = by_size.map(|(gigabytes, bytes)| to_tokens(gigabytes * 1e9 / to_f64(bytes)));
    let ratio = number("hicache_ratio").unwrap_or(HICACHE_RATIO_DEFAULT);
    by_size.unwrap_or_else(|| to_tokens(to_f64(device_tokens) * ratio))
}

#[expect(clippy::cast_precision_loss, reason = "a bound needs no more precision")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a positive float saturates"
)]
fn to_tokens(tokens: f64) -> u64 {
    bounded(tokens as u64)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherAddresses {
    sockets: Sockets,
    pub topic: String,
    /// With context parallelism, a page of the events is several pages of the engine's pool.
    pub page_tokens: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Sockets {
    /// Each rank's ports are rank 0's ports plus the rank's number.
    Tcp {
        host: String,
        rank0_port: u16,
        /// On this port, rank 0 sends old messages again when asked.
        rank0_replay_port: Option<u16>,
        /// Other hosts reach the ports.
        is_exposed: bool,
    },
    /// Unix sockets. The engine offers them only without data parallelism.
    Ipc { path: String, replay: Option<Endpoint> },
}

impl PublisherAddresses {
    /// `engine_host` is the host that answered. The error's text is for an operator.
    pub fn from_server_info(info: &Value, engine_host: &str) -> Result<Self, String> {
        let Some(kv_events) = info.get("kv_events").filter(|kv_events| kv_events.is_object())
        else {
            return Self::from_engine_flag(info, engine_host);
        };
        let text = |key: &str| kv_events.get(key).and_then(Value::as_str);
        let port =
            |key: &str| kv_events.get(key)?.as_u64().and_then(|port| u16::try_from(port).ok());
        check_publisher(text("publisher"))?;
        let announced_host = text("endpoint_host").unwrap_or("*");
        Ok(Self {
            sockets: Sockets::Tcp {
                host: reachable_host(announced_host, engine_host).to_owned(),
                rank0_port: port("endpoint_port_base")
                    .ok_or("the engine doesn't say on which port it publishes KV events")?,
                rank0_replay_port: port("replay_endpoint_port_base"),
                is_exposed: !is_loopback(announced_host),
            },
            topic: text("topic").unwrap_or("").to_owned(),
            page_tokens: kv_events
                .get("block_size")
                .and_then(Value::as_u64)
                .and_then(|tokens| u32::try_from(tokens).ok())
                .filter(|&tokens| tokens > 0),
        })
    }

    /// The flag also names unix sockets. In `kv_events`, the engine describes only TCP endpoints.
    fn from_engine_flag(info: &Value, engine_host: &str) -> Result<Self, String> {
        let none = "the engine publishes no KV events; start it with \
                    --kv-events-config '{\"publisher\": \"zmq\", …}'";
        let flag = info.get("kv_events_config").and_then(Value::as_str).ok_or(none)?;
        let config: Value = serde_json::from_str(flag).map_err(|_| none)?;
        let text = |key: &str| config.get(key).and_then(Value::as_str);
        check_publisher(text("publisher"))?;
        let path = text("endpoint").and_then(|endpoint| endpoint.strip_prefix("ipc://"));
        let path = path.ok_or(none)?;
        if !path.starts_with(['/', '@']) {
            return Err(format!(
                "the engine publishes KV events at ipc://{path}, which depends on its working \
                 folder; give it the whole path, like ipc:///run/berth/kv-events"
            ));
        }
        let replay = text("replay_endpoint").and_then(|endpoint| {
            if let Some(path) = endpoint.strip_prefix("ipc://") {
                return Some(Endpoint::Ipc(path.to_owned()));
            }
            let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
            Some(Endpoint::Tcp(format!("{}:{port}", reachable_host(host, engine_host))))
        });
        Ok(Self {
            sockets: Sockets::Ipc { path: path.to_owned(), replay },
            topic: text("topic").unwrap_or("").to_owned(),
            page_tokens: None,
        })
    }

    pub(super) fn addresses(&self, dp_rank: u32) -> Option<(Endpoint, Option<Endpoint>)> {
        match &self.sockets {
            Sockets::Tcp { host, rank0_port, rank0_replay_port, .. } => {
                let rank = u16::try_from(dp_rank).ok()?;
                let address =
                    |port: u16| Some(Endpoint::Tcp(format!("{host}:{}", port.checked_add(rank)?)));
                let replay = match rank0_replay_port {
                    Some(port) => Some(address(*port)?),
                    None => None,
                };
                Some((address(*rank0_port)?, replay))
            }
            Sockets::Ipc { path, replay } => {
                (dp_rank == 0).then(|| (Endpoint::Ipc(path.clone()), replay.clone()))
            }
        }
    }

    /// The publishers send token ids of prompts, and ask nobody for a credential.
    #[must_use]
    pub(super) fn are_exposed(&self) -> bool {
        matches!(self.sockets, Sockets::Tcp { is_exposed: true, .. })
    }
}

fn check_publisher(publisher: Option<&str>) -> Result<(), String> {
    if publisher == Some("zmq") {
        return Ok(());
    }
    let publisher = publisher.unwrap_or("none");
    Err(format!("the engine's publisher of KV events is {publisher}, not zmq"))
}

/// With a wildcard address, the publisher listens on the engine's host.
fn reachable_host<'a>(announced_host: &'a str, engine_host: &'a str) -> &'a str {
    match announced_host {
        "*" | "0.0.0.0" | "::" | "[::]" | "" => engine_host,
        host => host,
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(kv_events: &Value) -> Result<PublisherAddresses, String> {
        PublisherAddresses::from_server_info(&json!({ "kv_events": kv_events }), "10.0.0.7")
    }

    #[test]
    fn the_host_s_pool_is_as_large_as_its_flags_say() {
        let info =
            json!({"enable_hierarchical_cache": true, "hicache_ratio": 4.5, "hicache_size": 0});
        assert_eq!(host_tokens(&info, 1000, None), 4500);
        let sized =
            json!({"enable_hierarchical_cache": true, "hicache_ratio": 2.0, "hicache_size": 3});
        assert_eq!(host_tokens(&sized, 1000, Some(100_000)), 30_000);
        assert_eq!(host_tokens(&sized, 1000, None), 2000, "the bytes of a token are unknown");
        assert_eq!(host_tokens(&json!({"hicache_ratio": 2.0}), 1000, None), 0);
        let absurd = json!({"enable_hierarchical_cache": true, "hicache_ratio": 1e300});
        assert_eq!(host_tokens(&absurd, u64::MAX, None), contract::count::COUNT_MAX);
    }

    #[test]
    fn each_rank_has_a_port() {
        // As SGLang 0.5.23 states it.
        let publishers = parse(&json!({
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
            "topic": "kv-events", "block_size": 16, "dp_size": 1,
            "load_endpoint_port_base": 5559, "load_topic": "load",
            "replay_endpoint_port_base": 5558,
        }))
        .unwrap();
        assert_eq!(publishers.topic, "kv-events");
        let tcp = |address: &str| Endpoint::Tcp(address.to_owned());
        let both = (tcp("10.0.0.7:5559"), Some(tcp("10.0.0.7:5560")));
        assert_eq!(publishers.addresses(2), Some(both));
        assert_eq!(publishers.addresses(65_000), None);
        let named = json!({
            "publisher": "zmq", "endpoint_host": "node-1", "endpoint_port_base": 1, "topic": "",
        });
        assert_eq!(parse(&named).unwrap().addresses(0), Some((tcp("node-1:1"), None)));
    }

    #[test]
    fn an_endpoint_that_other_hosts_reach_is_noticed() {
        for (host, is_exposed) in [
            ("*", true),
            ("0.0.0.0", true),
            ("10.0.0.7", true),
            ("node-1", true),
            ("::", true),
            ("127.0.0.1", false),
            ("127.8.0.1", false),
            ("[::1]", false),
            ("localhost", false),
        ] {
            let publishers =
                parse(&json!({"publisher": "zmq", "endpoint_host": host, "endpoint_port_base": 1}));
            assert_eq!(publishers.unwrap().are_exposed(), is_exposed, "{host}");
        }
    }

    #[test]
    fn a_unix_socket_is_known_from_the_engine_s_flag() {
        // SGLang 0.5.23 describes no publisher that isn't TCP, but shows its flags.
        let from_flag = |flag: &str| {
            let info = json!({ "kv_events": null, "kv_events_config": flag });
            PublisherAddresses::from_server_info(&info, "10.0.0.7")
        };
        let publishers = from_flag(
            r#"{"publisher":"zmq","endpoint":"ipc:///run/a","replay_endpoint":"ipc:///run/b","topic":"t"}"#,
        )
        .unwrap();
        let ipc = |path: &str| Endpoint::Ipc(path.to_owned());
        assert_eq!(publishers.addresses(0), Some((ipc("/run/a"), Some(ipc("/run/b")))));
        assert_eq!(publishers.addresses(1), None, "only rank 0 can have one");
        assert_eq!((publishers.topic.as_str(), publishers.are_exposed()), ("t", false));
        let mixed = r#"{"publisher":"zmq","endpoint":"ipc://@name","replay_endpoint":"tcp://*:5"}"#;
        let replay = Endpoint::Tcp("10.0.0.7:5".to_owned());
        assert_eq!(from_flag(mixed).unwrap().addresses(0), Some((ipc("@name"), Some(replay))));
        let why = from_flag(r#"{"publisher":"zmq","endpoint":"ipc://relative"}"#).unwrap_err();
        assert!(why.contains("whole path"), "{why}");
        assert!(from_flag(r#"{"publisher":"null","endpoint":"ipc:///run/a"}"#).is_err());
    }

    #[test]
    fn where_there_are_none_it_says_what_to_do() {
        for none in [json!(null), json!({"publisher": "null"}), json!({"publisher": "zmq"})] {
            let why = parse(&none).unwrap_err();
            assert!(why.contains("KV events"), "{why}");
        }
    }
}
