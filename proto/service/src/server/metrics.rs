//! Counts the connections of a process's ports, and what they keep in memory.
//!
//! Router and agent make one [`Metrics`] each, and pass it to each port's server.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};

use crate::{
    metrics::{By, to_i64},
    tls::server::HandshakeError,
};

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClosedLabel {
    port: &'static str,
    reason: &'static str,
}

/// Why the server closed a connection, or refused its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseReason {
    /// The connection was idle, and a new connection needed its place.
    Evicted,
    /// The first request's header did not arrive in time.
    HeaderLate,
    /// The client read its answer too slowly.
    SlowReader,
    /// All places were taken. The connection was closed at once, or its request was refused.
    Full,
}

crate::metrics! {
    pub struct Metrics {
        /// Open connections, by port
        open: By<Gauge> = "connections", By::label("port");
        /// Connections that the server closed or refused, by port and reason
        closed: Family<ClosedLabel, Counter> = "connections_closed";
        /// TLS handshakes that failed, by port and reason
        failed_handshakes: Family<ClosedLabel, Counter> = "tls_handshakes_failed";
        /// Bytes of answers that wait in memory for clients that read slowly
        pub answer_buffer_bytes: Gauge = "answer_buffer" in "bytes";
    }
}

impl Metrics {
    pub(super) fn set_open(&self, port: &'static str, count: usize) {
        self.open.get(port).set(to_i64(count as u64));
    }

    /// Counts a connection that was closed at once, because the port has as many as it may have.
    pub fn count_full(&self, port: &'static str) {
        self.count_closed(port, CloseReason::Full);
    }

    /// Counts a connection whose handshake failed.
    pub fn count_failed_handshake(&self, port: &'static str, error: &HandshakeError) {
        self.failed_handshakes.get_or_create(&ClosedLabel { port, reason: error.reason() }).inc();
    }

    pub(super) fn count_closed(&self, port: &'static str, reason: CloseReason) {
        let reason = match reason {
            CloseReason::Evicted => "evicted",
            CloseReason::HeaderLate => "header_late",
            CloseReason::SlowReader => "slow_reader",
            CloseReason::Full => "full",
        };
        self.closed.get_or_create(&ClosedLabel { port, reason }).inc();
    }
}
