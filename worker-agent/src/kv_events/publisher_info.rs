//! Reads from the engine's `/server_info` where the agent can subscribe to its KV events.
//!
//! A KV event says that the engine's cache has stored or evicted *pages*, the engine's units of KV
//! memory. Each data parallel (DP) rank publishes its own events. The agent tracks the cache by
//! these events. `engine` requests `/server_info`, and `subscriber` connects to the addresses. This
//! module only reads the addresses from the JSON.

use serde_json::Value;

/// The engine facts that are needed to follow its KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherInfo {
    /// Identifies the engine process. A new process has a new, empty cache.
    pub instance: String,
    /// The number of DP ranks. Each has a publisher of its own.
    pub ranks: u32,
    /// Tokens in a page, as the events count pages.
    pub page_tokens: u32,
    /// Pages in the pool of one rank, as the events count pages.
    pub pool_pages: usize,
    /// The addresses of the publishers, or the reason why there are none.
    pub publishers: Result<PublisherAddresses, String>,
}

/// The addresses of the publishers. Each rank's ports are rank 0's ports plus the rank's number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherAddresses {
    host: String,
    /// The port on which rank 0 publishes.
    rank0_port: u16,
    /// The port on which rank 0 sends old messages again when asked.
    rank0_replay_port: Option<u16>,
    /// The topic to subscribe to.
    pub topic: String,
    /// Tokens in a page as the events count pages, if the engine states it. With context
    /// parallelism, one such page is several pages of the engine's pool.
    pub page_tokens: Option<u32>,
}

impl PublisherAddresses {
    /// Reads the publishers' addresses from the JSON of `/server_info`. `engine_host` is the host
    /// that answered.
    ///
    /// # Errors
    /// When the engine publishes no events that can be followed; the text is for an operator.
    pub fn from_server_info(info: &Value, engine_host: &str) -> Result<Self, String> {
        let Some(kv_events) = info.get("kv_events").filter(|kv_events| kv_events.is_object())
        else {
            return Err("the engine publishes no KV events; start it with \
                        --kv-events-config '{\"publisher\": \"zmq\", …}'"
                .to_owned());
        };
        let text = |key: &str| kv_events.get(key).and_then(Value::as_str);
        let port =
            |key: &str| kv_events.get(key)?.as_u64().and_then(|port| u16::try_from(port).ok());
        if text("publisher") != Some("zmq") {
            let publisher = text("publisher").unwrap_or("none");
            return Err(format!("the engine's publisher of KV events is {publisher}, not zmq"));
        }
        let host = match text("endpoint_host").unwrap_or("*") {
            // With a wildcard address, the publisher listens on every address of the engine's host.
            "*" | "0.0.0.0" | "::" | "[::]" | "" => engine_host,
            host => host,
        };
        Ok(Self {
            host: host.to_owned(),
            rank0_port: port("endpoint_port_base")
                .ok_or("the engine doesn't say on which port it publishes KV events")?,
            rank0_replay_port: port("replay_endpoint_port_base"),
            topic: text("topic").unwrap_or("").to_owned(),
            page_tokens: kv_events
                .get("block_size")
                .and_then(Value::as_u64)
                .and_then(|tokens| u32::try_from(tokens).ok())
                .filter(|&tokens| tokens > 0),
        })
    }

    /// Returns the addresses of a rank's publisher and of its replay socket, each as `host:port`.
    /// Returns `None` if there is no such port.
    pub(super) fn addresses(&self, dp_rank: u32) -> Option<(String, Option<String>)> {
        let rank = u16::try_from(dp_rank).ok()?;
        let address = |port: u16| Some(format!("{}:{}", self.host, port.checked_add(rank)?));
        let replay = match self.rank0_replay_port {
            Some(port) => Some(address(port)?),
            None => None,
        };
        Some((address(self.rank0_port)?, replay))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(kv_events: &Value) -> Result<PublisherAddresses, String> {
        PublisherAddresses::from_server_info(&json!({ "kv_events": kv_events }), "10.0.0.7")
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
        let both = ("10.0.0.7:5559".to_owned(), Some("10.0.0.7:5560".to_owned()));
        assert_eq!(publishers.addresses(2), Some(both));
        assert_eq!(publishers.addresses(65_000), None);
        let named = json!({
            "publisher": "zmq", "endpoint_host": "node-1", "endpoint_port_base": 1, "topic": "",
        });
        assert_eq!(parse(&named).unwrap().addresses(0), Some(("node-1:1".to_owned(), None)));
    }

    #[test]
    fn where_there_are_none_it_says_what_to_do() {
        for none in [json!(null), json!({"publisher": "null"}), json!({"publisher": "zmq"})] {
            let why = parse(&none).unwrap_err();
            assert!(why.contains("KV events"), "{why}");
        }
    }
}
