//! Defines the limits of a port, and derives them from the settings.

use std::time::Duration;

use super::{AnswerBuffers, ConnectionSettings, DrainRate, Metrics};

/// Beyond one per turn: for probes, lists, idle clients, and clients whose turn is refused.
const SPARE_CONNECTIONS: usize = 512;
/// Number of connections to the admin port. Some scrapers, probes and people use it at once.
pub(super) const ADMIN_CONNECTIONS_MAX: usize = 64;

/// The health routes of a router's data port. The agent's data port has the first of them. Claude
/// Code asks for `/` when it starts.
pub const HEALTH_PATHS: [&str; 8] =
    ["/health", "/health_generate", "/ready", "/readiness", "/ping", "/live", "/liveness", "/"];

/// The most bytes of a request's line and headers, and the most headers. A request with more is
/// answered with 431.
pub(super) const HEADER_BYTES_MAX: usize = 32 * 1024;
const HEADERS_MAX: usize = 80;
/// More than a router adds to what a client may send.
const ROUTERS_HEADER_BYTES_MAX: usize = 16 * 1024;
const ROUTERS_HEADERS_MAX: usize = 20;

#[derive(Debug, Clone)]
pub struct PortLimits {
    pub name: &'static str,
    /// The paths that the reserve serves: health checks.
    pub health_paths: &'static [&'static str],
    pub(super) connections_max: usize,
    pub(super) per_peer_max: usize,
    pub(super) header_bytes_max: usize,
    pub(super) headers_max: usize,
    pub(super) keep_alive: Duration,
    pub(super) drain_rate: DrainRate,
    pub(super) buffers: AnswerBuffers,
    pub(super) metrics: Metrics,
}

impl PortLimits {
    /// Returns the limits of a data port. `turns_max` turns may run and wait. The process has file
    /// descriptors for `described_turns` connections of clients.
    #[must_use]
    pub fn data(
        settings: &ConnectionSettings,
        turns_max: usize,
        described_turns: usize,
        metrics: &Metrics,
    ) -> Self {
        let connections_max = turns_max.saturating_add(SPARE_CONNECTIONS).min(described_turns);
        let buffers = AnswerBuffers::new(
            settings.answer_buffer_bytes_max,
            settings.answer_buffers_bytes_max,
            metrics.answer_buffer_bytes.clone(),
        );
        let share = share_of_one_address(connections_max);
        Self {
            name: "data",
            health_paths: &HEALTH_PATHS,
            connections_max,
            per_peer_max: if settings.per_peer_max > 0 { settings.per_peer_max } else { share },
            header_bytes_max: HEADER_BYTES_MAX,
            headers_max: HEADERS_MAX,
            keep_alive: settings.keep_alive(),
            drain_rate: DrainRate {
                bytes_per_s_min: settings.drain_bytes_per_s_min,
                grace: Duration::from_millis(settings.drain_grace_ms),
            },
            buffers,
            metrics: metrics.clone(),
        }
    }

    /// Takes what any client may send to a router with what the router adds.
    #[must_use]
    pub fn behind_routers(self) -> Self {
        Self {
            header_bytes_max: self.header_bytes_max + ROUTERS_HEADER_BYTES_MAX,
            headers_max: self.headers_max + ROUTERS_HEADERS_MAX,
            ..self
        }
    }

    /// Returns the requests that clients share among them: as many as the connections that one
    /// address gets by default, as a load balancer has one address.
    #[must_use]
    pub fn shared_requests(&self) -> usize {
        share_of_one_address(self.connections_max)
    }

    #[must_use]
    pub fn admin(metrics: &Metrics) -> Self {
        let settings = ConnectionSettings::default();
        let limits = Self::data(&settings, ADMIN_CONNECTIONS_MAX, ADMIN_CONNECTIONS_MAX, metrics);
        Self {
            name: "admin",
            health_paths: &["/healthz", "/readyz"],
            // A peer leaves a quarter to others.
            per_peer_max: ADMIN_CONNECTIONS_MAX - ADMIN_CONNECTIONS_MAX / 4,
            ..limits
        }
    }
}

fn share_of_one_address(connections_max: usize) -> usize {
    let kept_for_others = (connections_max / 8).min(SPARE_CONNECTIONS / 2);
    connections_max - kept_for_others
}
