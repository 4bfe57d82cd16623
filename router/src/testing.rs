//! What unit tests share: a starting time, a fleet of agents in a view.

use std::time::Instant;

/// A point in time for pure code.
#[expect(clippy::disallowed_methods, reason = "tests of pure code need one instant to start from")]
pub(crate) fn start() -> Instant {
    Instant::now()
}
