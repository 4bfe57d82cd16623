//! Loopback addresses on which a test may listen again after a restart.

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU16, Ordering},
};

/// Returns port 0 of a loopback address that no other call in this process returns. No other
/// process listens there later, except that one in 250 may use the same addresses. On
/// 127.0.0.1, a free port may be taken at any time: the system gives them to connections too.
#[must_use]
pub fn own_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let net = u8::try_from(1 + std::process::id() % 250).expect("at most 250");
    SocketAddr::from(([127, net, high, low], 0))
}
