//! Counts the connections of a process's ports, and what they keep in memory.
//!
//! Router and agent make one [`Metrics`] each, and pass it to each port's server.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use crate::tls::server::HandshakeError;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PortLabel {
    port: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
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

/// The metrics of connections. Clones share the same values.
#[derive(Debug, Clone)]
pub struct Metrics {
    open: Family<PortLabel, Gauge>,
    closed: Family<ClosedLabel, Counter>,
    failed_handshakes: Family<ClosedLabel, Counter>,
    /// Bytes of answers that wait in memory for their clients.
    pub answer_buffer_bytes: Gauge,
}

impl Metrics {
    /// Creates the metrics, and registers them in `registry`.
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            open: Family::default(),
            closed: Family::default(),
            failed_handshakes: Family::default(),
            answer_buffer_bytes: Gauge::default(),
        };
        let help = "Open connections, by port";
        registry.register("connections", help, metrics.open.clone());
        let help = "Connections that the server closed or refused, by port and reason";
        registry.register("connections_closed", help, metrics.closed.clone());
        let help = "TLS handshakes that failed, by port and reason";
        registry.register("tls_handshakes_failed", help, metrics.failed_handshakes.clone());
        let help = "Bytes of answers that wait in memory for clients that read slowly";
        let bytes = metrics.answer_buffer_bytes.clone();
        registry.register_with_unit("answer_buffer", help, Unit::Bytes, bytes);
        metrics
    }

    pub(super) fn set_open(&self, port: &'static str, count: usize) {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        self.open.get_or_create(&PortLabel { port }).set(count);
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
