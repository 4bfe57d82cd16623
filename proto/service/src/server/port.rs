//! Holds a port's connections: takes their places, and closes those that give way.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{
    connections::{ConnectionId, ConnectionTable, Place},
    metrics::CloseReason,
    port_limits::PortLimits,
};
use crate::clock::now;

/// Time that an idle connection usually has for its next request, whatever else connects: what a
/// client takes that has just been answered, on a machine whose processes wait for each other. With
/// 2 ms, a turn of the hostile suite has lost its connection, on a machine that stood still for a
/// moment. In this time a port accepts as many connections as the new one's peer has idle ones, and
/// 16 for the reserve: 800 a second or more.
const IDLE_TIME_MIN: Duration = Duration::from_millis(20);

/// The address of the client's end of a connection. Every request has it as an extension.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(pub IpAddr);

#[derive(Debug)]
pub(super) struct Port {
    pub(super) limits: PortLimits,
    /// With each connection, the sender that tells its task to close it.
    table: Mutex<ConnectionTable<oneshot::Sender<()>>>,
    /// Cancelled when the process leaves: then each answer is the last on its connection, so that
    /// its client goes elsewhere.
    pub(super) leaves: CancellationToken,
}

impl Port {
    pub(super) fn new(limits: PortLimits, leaves: CancellationToken) -> Self {
        let table = ConnectionTable::new(limits.connections_max, limits.per_peer_max);
        Self { limits, table: Mutex::new(table), leaves }
    }

    /// Waits while a new connection of this peer would close one that had no time for a request.
    /// Connections that nobody has accepted wait in the system.
    pub(super) async fn let_idle_connections_ask(&self, peer_addr: SocketAddr) {
        let closes_idle_since = self.table.lock().closes_idle_since(peer_addr.ip().into());
        let Some(since) = closes_idle_since else { return };
        let time_left = IDLE_TIME_MIN.saturating_sub(now().saturating_duration_since(since));
        // A sleep of no time would take a millisecond as well.
        if !time_left.is_zero() {
            tokio::time::sleep(time_left).await;
        }
    }

    pub(super) fn open(self: &Arc<Self>, peer_addr: SocketAddr) -> Option<OpenConnection> {
        let (evict_sender, evicted) = oneshot::channel();
        let (opened, count) = {
            let mut table = self.table.lock();
            (table.open(peer_addr.ip().into(), evict_sender, now()), table.len())
        };
        let (name, metrics) = (self.limits.name, &self.limits.metrics);
        metrics.set_open(name, count);
        let Some(opened) = opened else {
            metrics.count_closed(name, CloseReason::Full);
            return None;
        };
        if let Some(evicted) = opened.evicted {
            self.evict(evicted);
        }
        let shared = ConnectionRef { port: Arc::clone(self), id: opened.id };
        let peer = PeerAddress(peer_addr.ip());
        Some(OpenConnection { shared: Arc::new(shared), peer, evicted })
    }

    pub(super) fn evict_longest_idle(&self) {
        let evicted = self.table.lock().evict_longest_idle();
        if let Some(evicted) = evicted {
            self.evict(evicted);
        }
    }

    fn evict(&self, evicted: oneshot::Sender<()>) {
        self.limits.metrics.count_closed(self.limits.name, CloseReason::Evicted);
        // Sending fails if the connection's task has just ended.
        let _ = evicted.send(());
    }
}

pub(super) struct OpenConnection {
    pub(super) shared: Arc<ConnectionRef>,
    pub(super) peer: PeerAddress,
    /// Receives the order to make room for another connection.
    pub(super) evicted: oneshot::Receiver<()>,
}

/// A connection in its port's table. It leaves the table on drop.
#[derive(Debug)]
pub(super) struct ConnectionRef {
    pub(super) port: Arc<Port>,
    id: ConnectionId,
}

impl Drop for ConnectionRef {
    fn drop(&mut self) {
        let mut table = self.port.table.lock();
        table.close(self.id);
        let count = table.len();
        drop(table);
        self.port.limits.metrics.set_open(self.port.limits.name, count);
    }
}

/// A request on a connection. The connection is idle again on drop.
#[derive(Debug)]
pub(super) struct RequestGuard(Arc<ConnectionRef>);

impl RequestGuard {
    /// Returns the place of the connection also. `None` if it was evicted.
    pub(super) fn new(connection: &Arc<ConnectionRef>, peer: PeerAddress) -> Option<(Self, Place)> {
        let port = &connection.port;
        let begun = port.table.lock().begin_request(connection.id, peer.0.into());
        if let Some(evicted) = begun.evicted {
            port.evict(evicted);
        }
        begun.place.map(|place| (Self(Arc::clone(connection)), place))
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.port.table.lock().end_request(self.0.id, now());
    }
}
