//! Defines the settings of connections, which router and agent share: the table `[connections]`.
//!
//! For data ports. The admin port has fixed limits of its own.

use std::time::Duration;

crate::settings! {
    /// The clients' connections.
    pub struct ConnectionSettings {
        /// How long a client's connection may stay open without a request. It must be longer than a
        /// load balancer in front keeps its connections.
        ///
        /// Load balancers close idle connections after 60 s by default. The server must not be the
        /// first, or a request may meet a connection that is closing.
        keep_alive_ms: u64 = 75_000;
        /// The maximum number of connections of one peer: an IPv4 address, or an IPv6 network of 64
        /// bits. 0: all but an eighth, which is 256 at most and is kept for other peers.
        ///
        /// A load balancer in front is one peer. With this limit, it can have every turn that may
        /// run, as there are 512 connections more than turns, and other peers still find a place.
        per_peer_max: usize = 0;
        /// The bytes of an answer per second that a client must read, on average, while its answer
        /// holds the engine up or takes memory that is scarce. 0: any rate will do.
        ///
        /// A person reads 50 bytes of text a second. With the events around each token, an answer
        /// at that speed has about 1 KiB a second.
        drain_bytes_per_s_min: u64 = 1024;
        /// For how long a client may read less than that before it is cut off.
        ///
        /// A mobile client that changes its network is silent for seconds. TCP then tells the
        /// server in steps of up to 64 KiB that a slow client has read.
        drain_grace_ms: u64 = 30_000;
        /// The maximum bytes of one answer that wait in memory for their client.
        ///
        /// An answer of 4,000 tokens, with about 250 bytes for the event of each token.
        answer_buffer_bytes_max: usize = 1 << 20;
        /// The maximum bytes of all answers that wait in memory for their clients.
        ///
        /// Room for 64 such answers of clients that read slowly.
        answer_buffers_bytes_max: usize = 64 << 20;
    }
}

/// The longest time that a setting may have: a day.
const TIME_MS_MAX: u64 = 24 * 3600 * 1000;
/// The shortest keep-alive. A router keeps its idle connections to agents for 10 s, and must be the
/// first to close them.
const KEEP_ALIVE_MS_MIN: u64 = 15_000;

impl ConnectionSettings {
    /// Returns the problems of these settings, a sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = vec![];
        let times = [
            ("keep_alive_ms", KEEP_ALIVE_MS_MIN, self.keep_alive_ms),
            ("drain_grace_ms", 1000, self.drain_grace_ms),
        ];
        for (key, min, value) in times {
            if !(min..=TIME_MS_MAX).contains(&value) {
                problems.push(format!("connections.{key}: must be {min} to {TIME_MS_MAX} ms"));
            }
        }
        let sizes = [
            ("answer_buffer_bytes_max", self.answer_buffer_bytes_max),
            ("answer_buffers_bytes_max", self.answer_buffers_bytes_max),
        ];
        for (key, value) in sizes {
            if value > 1 << 40 {
                problems.push(format!("connections.{key}: must be at most 2^40"));
            }
        }
        problems
    }

    #[must_use]
    pub fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms)
    }
}
